#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"
#include "support/temporary_folder.h"

// The command as a user meets it: what it prints where, and what it exits with.
namespace fox::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Output {
  int code;
  std::string out, err;
};

std::string quoted(const std::string& word) {
  std::string result = "'";
  for (const char c : word) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

/// Runs `fox words…` in `folder`, `input` on its standard input.
Output fox(const fs::path& folder, const std::vector<std::string>& words, const std::string& input = "") {
  std::ofstream(folder / "stdin") << input;
  std::string line = "cd " + quoted(folder.string()) + " && " + quoted(std::string(FOX_BUILD_DIR) + "/fox");
  for (const auto& word : words) line += " " + quoted(word);
  line += " < stdin > stdout 2> stderr";
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(folder / "stdout"), read_file(folder / "stderr")};
}

/// Expects exit `code`, nothing on standard output, and one error and one hint that contain the words given.
void expect_refusal(const Output& output, int code, const std::string& error, const std::string& hint) {
  EXPECT_EQ(output.code, code) << output.err;
  EXPECT_EQ(output.out, "");
  std::istringstream lines(output.err);
  std::string first, second, third;
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_TRUE(first.starts_with("error: ") && first.find(error) != std::string::npos) << output.err;
  EXPECT_TRUE(second.starts_with("hint: ") && second.find(hint) != std::string::npos) << output.err;
  EXPECT_FALSE(std::getline(lines, third)) << output.err;
}

constexpr const char* kRunFile = R"([model]
model_type = "forgetting_transformer-project_fox"
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
intermediate_size = 24
use_k_shift = true
use_v_shift = true
qk_norm = true
use_output_gate = true
use_output_norm = true

[data]
train = ["text.txt"]
valid = ["text.txt"]
tokenizer = "bytes"
context = 32

[train]
batch_tokens = 64
max_tokens = 640
warmup_tokens = 64
lr = 1e-2

[eval]
max_tokens = 128
sample_prompt = "a"
sample_tokens = 4

[output]
dir = "run"
checkpoint_interval_tokens = 320
)";

/// A folder with a run file and a text, and a run trained on it.
class Command : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    setenv("OMP_NUM_THREADS", "1", 1);
    folder_ = std::make_unique<TemporaryFolder>();
    std::mt19937 random(1);
    std::string text;
    while (text.size() < 4000) text += static_cast<char>(random() % 6 == 0 ? ' ' : 'a' + random() % 26);
    // Training and validation share nothing, and fox checks it: two texts.
    std::ofstream(here() / "text.txt") << text.substr(0, 3000);
    std::ofstream(here() / "valid.txt") << text.substr(3000);
    write_run_file("run.toml", "valid = [\"text.txt\"]", "valid = [\"valid.txt\"]");
    const Output trained = fox(here(), {"train", "run.toml"});
    ASSERT_EQ(trained.code, 0) << trained.err;
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static const fs::path& here() { return folder_->path(); }

  /// The run file with one piece of text replaced.
  static void write_run_file(const std::string& name, const std::string& from = "", const std::string& to = "") {
    std::string text = kRunFile;
    if (!from.empty()) {
      ASSERT_NE(text.find(from), std::string::npos);
      text.replace(text.find(from), from.size(), to);
    }
    std::ofstream(here() / name) << text;
  }

  static std::unique_ptr<TemporaryFolder> folder_;
};
std::unique_ptr<TemporaryFolder> Command::folder_;

TEST_F(Command, SaysWhatItIs) {
  const Output version = fox(here(), {"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_TRUE(version.out.starts_with("fox ")) << version.out;
  for (const auto& words : {std::vector<std::string>{}, {"help"}, {"--help"}}) {
    const Output help = fox(here(), words);
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.out.find("train"), std::string::npos) << help.out;
  }
  for (const std::string command : {"train", "eval", "generate", "gates", "tokenize", "inspect", "report", "bench"}) {
    const Output help = fox(here(), {command, "--help"}), same = fox(here(), {"help", command});
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_EQ(help.out, same.out);
    EXPECT_NE(help.out.find("Usage: fox " + command), std::string::npos) << help.out;
  }
}

TEST_F(Command, NamesWhatWasMeantForMisspeltWords) {
  expect_refusal(fox(here(), {"trian"}), 2, "'trian'", "train");
  expect_refusal(fox(here(), {"eval", "los"}), 2, "'los'", "loss");
  expect_refusal(fox(here(), {"generate", "run", "--temprature", "1"}), 2, "--temprature", "--temperature");
  expect_refusal(fox(here(), {"generate", "run", "--max-tokens", "many"}), 2, "max-tokens", "--help");
  expect_refusal(fox(here(), {"eval", "loss", "run", "--length", "0"}), 2, "--length: must be at least 1, not 0", "");
  for (const std::string number : {"-1", "nan", "abc"}) {
    expect_refusal(fox(here(), {"bench", "attention", "--seconds", number}), 2,
                   "--seconds: must be a number above 0, not '" + number + "'", "");
  }
  expect_refusal(fox(here(), {"eval", "run", "run", "--maps", "-1"}), 2, "--maps: must be at least 0, not -1", "");
  expect_refusal(fox(here(), {"gates", "run", "--threads", "5000"}), 2, "--threads: must be at most 4096", "");
  expect_refusal(fox(here(), {"train", "run.toml", "--seed", "-1"}), 2, "not negative, not -1", "");
  expect_refusal(fox(here(), {"train"}), 2, "RUN", "--help");
}

TEST_F(Command, RefusesRunFilesThatDoNotParseWithExitCode2) {
  const struct {
    std::string from, to, error, hint;
  } cases[] = {
      {"hidden_size = 16", "hiden_size = 16", "hiden_size", "hidden_size"},
      {"num_heads = 2", "num_heads = \"two\"", "num_heads", ""},
      {"lr = 1e-2", "lr = -1", "lr", ""},
      {"[eval]", "[evil]", "evil", "eval"},
      {"context = 32", "context = ", "run2.toml", ""},
  };
  for (const auto& c : cases) {
    write_run_file("run2.toml", c.from, c.to);
    expect_refusal(fox(here(), {"train", "run2.toml"}), 2, c.error, c.hint);
  }
  expect_refusal(fox(here(), {"train", "run.toml", "--set", "train.lrr=1"}), 2, "lrr", "lr");
}

TEST_F(Command, RefusesWhatCannotBeDoneWithExitCode1) {
  expect_refusal(fox(here(), {"train", "absent.toml"}), 1, "absent.toml", "");
  expect_refusal(fox(here(), {"generate", "absent", "--prompt", "a"}), 1, "absent", "");
  expect_refusal(fox(here(), {"inspect", "text.txt"}), 1, "text.txt", "");
  expect_refusal(fox(here(), {"generate", "run", "--prompt", "a", "--device", "tpu"}), 1, "tpu", "cpu");
  // Before anything is computed.
  expect_refusal(fox(here(), {"eval", "run", "run", "absent"}), 1, "absent", "run directory");
  expect_refusal(fox(here(), {"eval", "run", "run", "--temperature", "-5"}), 1, "temperature is -5", "0 always");
  expect_refusal(fox(here(), {"eval", "loss", "run", "--out", "absent/loss.json"}), 1, "absent to write in", "make it");
  expect_refusal(fox(here(), {"gates", "run", "--out", "absent/gates.json"}), 1, "absent to write in", "make it");
  write_run_file("run2.toml", "num_heads = 2", "num_heads = 3");
  expect_refusal(fox(here(), {"train", "run2.toml", "--set", "output.dir=run2"}), 2, "num_heads", "");
  write_run_file("run2.toml", "[\"text.txt\"]", "[\"nowhere.txt\"]");
  expect_refusal(fox(here(), {"train", "run2.toml", "--set", "output.dir=run2"}), 1, "nowhere.txt", "");
  // The mistake corrected, the same folder serves.
  const Output corrected =
      fox(here(), {"train", "run.toml", "--set", "output.dir=run2", "--set", "train.max_tokens=64"});
  EXPECT_EQ(corrected.code, 0) << corrected.err;
}

TEST_F(Command, DoesNotTouchARunOfAnotherConfiguration) {
  const std::string before = read_file(here() / "run" / "metrics.jsonl");
  expect_refusal(fox(here(), {"train", "run.toml", "--set", "train.lr=0.5"}), 1, "lr", "output.dir");
  EXPECT_EQ(read_file(here() / "run" / "metrics.jsonl"), before);
}

TEST_F(Command, MeasuresExplainsAndContinues) {
  const Output loss = fox(here(), {"eval", "loss", "run", "--data", "valid.txt", "--length", "64", "--json"});
  ASSERT_EQ(loss.code, 0) << loss.err;
  EXPECT_TRUE(json::parse(loss.out).is_object());
  const Output gates = fox(here(), {"gates", "run", "--json", "--data", "valid.txt"});
  ASSERT_EQ(gates.code, 0) << gates.err;
  EXPECT_FALSE(json::parse(gates.out).empty());
  const Output inspected = fox(here(), {"inspect", "run", "--json"});
  ASSERT_EQ(inspected.code, 0) << inspected.err;
  EXPECT_FALSE(json::parse(inspected.out).empty());
  const Output page = fox(here(), {"report", "run", "--out", "report.html"});
  EXPECT_EQ(page.code, 0) << page.err;
  EXPECT_NE(read_file(here() / "report.html").find("<html"), std::string::npos);

  const Output given = fox(here(), {"generate", "run", "--prompt", "abc", "-n", "8", "--seed", "3"});
  const Output piped = fox(here(), {"generate", "run", "-n", "8", "--seed", "3"}, "abc");
  EXPECT_EQ(given.code, 0) << given.err;
  EXPECT_EQ(given.out, piped.out);

  const Output again = fox(here(), {"train", "run.toml"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_NE(again.err.find("finished"), std::string::npos) << again.err;
}

TEST_F(Command, TokenizesAndTrainsOnTheStore) {
  std::ofstream(here() / "lines.jsonl") << "{\"text\": \"" << std::string(3000, 'a') << "\"}\n";
  const std::vector<std::string> words{"tokenize",  "lines.jsonl", "--tokenizer", "bytes",
                                       "--threads", "2",           "--out",       "store"};
  const Output made = fox(here(), words);
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_EQ(made.out, "");
  EXPECT_NE(made.err.find("store built: 1 document, 3.00K tokens"), std::string::npos) << made.err;
  const Output again = fox(here(), words);
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_NE(again.err.find("store found"), std::string::npos) << again.err;
  expect_refusal(fox(here(), {"tokenize", "text.txt", "--tokenizer", "bytes", "--out", "store"}), 1,
                 "store holds another token store: it was made of other text", "--force");
  const Output trained =
      fox(here(), {"train", "run.toml", "--set", "data.train=store", "--set", "output.dir=on-store"});
  EXPECT_EQ(trained.code, 0) << trained.err;
  expect_refusal(fox(here(), {"train", "run.toml", "--set", "data.train=store", "--set", "data.tokenizer=gpt2", "--set",
                              "output.dir=other"}),
                 1, "store holds tokens of another tokenizer", "fox tokenize");

  std::ofstream(here() / "bad.jsonl") << "{\"text\": \"a\"}\n{\"txt\": \"a\"}\n";
  expect_refusal(fox(here(), {"tokenize", "bad.jsonl", "--out", "bad"}), 1, "bad.jsonl: line 2 has no string",
                 "object");
  expect_refusal(fox(here(), {"tokenize", "absent", "--out", "bad"}), 1, "there is no absent", "jsonl");
  expect_refusal(fox(here(), {"tokenize", "text.txt", "--out", "run"}), 1, "run exists and is no token store", "");
  expect_refusal(fox(here(), {"tokenize", "text.txt"}), 2, "--out", "--help");
  expect_refusal(fox(here(), {"tokenize", "text.txt", "--out", "bad", "--tokenizer", "none"}), 1, "none", "gpt2-json");
}

TEST_F(Command, ADamagedCheckpointIsNamedAndTheOneBeforeIsUsed) {
  fs::copy(here() / "run", here() / "damaged", fs::copy_options::recursive);
  fs::path newest;
  for (const auto& entry : fs::directory_iterator(here() / "damaged" / "checkpoints")) {
    if (entry.path() > newest) newest = entry.path();
  }
  std::fstream file(newest / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('!');
  file.close();
  const Output generated = fox(here(), {"generate", "damaged", "--prompt", "a", "-n", "2"});
  EXPECT_EQ(generated.code, 0) << generated.err;
  EXPECT_NE(generated.err.find(newest.filename().string()), std::string::npos) << generated.err;
  expect_refusal(fox(here(), {"inspect", newest.string()}), 1, "model.safetensors does not have its checksum", "");
}

TEST_F(Command, AFullDiskIsOneErrorAndKeepsWhatWasWritten) {
  expect_refusal(fox(here(), {"report", "run", "--out", "/dev/full"}), 1, "/dev/full", "");
}

}  // namespace
}  // namespace fox::test
