// Corpora in JSON lines, many threads, and builds that are killed: tokens are those of the plain way, document by
// document, and the store's bytes are the same however it was made.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zstd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "base/files.h"
#include "data/corpus_reader.h"
#include "data/token_store.h"
#include "support/temporary_folder.h"

namespace fox::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string compressed(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

std::string random_document(std::mt19937& random, size_t words) {
  static const std::string kWords[] = {
      " the",     " fox's", "\n\n", " Gärten", " \"x\\y\"",         "\xE4\xB8\xAD\xE6\x96\x87",
      "  12345 ", "\t",     "!?",   " forget", " \xF0\x9F\x98\x80", "<|endoftext|>"};
  std::string text;
  for (size_t i = 0; i < words; ++i) text += kWords[random() % std::size(kWords)];
  return text;
}

class TokenizeTest : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& content) {
    fs::create_directories((dir_ / name).parent_path());
    std::ofstream(dir_ / name, std::ios::binary) << content;
  }
  /// A corpus of texts, JSON lines and compressed JSON lines; returns its documents in order.
  std::vector<std::string> write_corpus(size_t scale) {
    std::mt19937 random(9);
    std::vector<std::string> documents;
    // As SlimPajama: folders of files, each line with a member besides the text.
    for (const std::string name :
         {"c/chunk1/example_0.jsonl.zst", "c/chunk1/example_1.jsonl", "c/chunk2/example_0.jsonl.zst"}) {
      std::string lines;
      for (int i = 0; i < 40; ++i) {
        documents.push_back(i == 3 ? "" : random_document(random, random() % (40 * scale)));
        json line = {{"text", documents.back()}, {"meta", {{"text", "no"}, {"redpajama_set_name", "Book"}}}};
        if (i % 5 == 0) line["a"] = {"text", 1};
        lines += line.dump(-1, ' ', i % 2 == 0) + (i % 7 == 0 ? "\r\n" : "\n");
      }
      if (name.ends_with("1.jsonl")) lines.pop_back();  // no line break at the end
      // Two frames, as zstd -c >> file leaves them.
      write(name, name.ends_with("zst") ? compressed(lines.substr(0, 1000)) + compressed(lines.substr(1000)) : lines);
    }
    for (const char* name : {"c/z1.txt", "c/z2.txt", "c/z3.txt"}) {
      documents.push_back(name[3] == '2' ? "" : random_document(random, 20'000 * scale));
      write(name, documents.back());
    }
    return documents;
  }
  /// Every file of the store and its bytes.
  static std::map<std::string, std::string> contents(const fs::path& store) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(store)) {
      if (entry.is_regular_file()) files[entry.path().lexically_relative(store)] = read_file(entry.path());
    }
    return files;
  }
  std::string complaint(const std::string& name) {
    try {
      build_token_store({dir_ / name}, Tokenizer::gpt2(10), dir_ / "store", {.threads = 2});
    } catch (const Error& error) {
      EXPECT_FALSE(error.hint().empty());
      return error.what();
    }
    return "no error";
  }

  test::TemporaryFolder folder_;
  fs::path dir_ = folder_.path();
};

TEST_F(TokenizeTest, TokensAreThoseOfEachDocument) {
  const std::vector<std::string> documents = write_corpus(10);
  for (const bool escaped : {false, true}) {
    const Tokenizer tokenizer = escaped ? Tokenizer::gpt2_json() : Tokenizer::gpt2(2000);
    const fs::path dir = dir_ / (escaped ? "escaped" : "plain");
    const TokenStore store = build_token_store({dir_ / "c"}, tokenizer, dir, {.threads = 3});
    std::vector<int32_t> tokens(static_cast<size_t>(store.num_tokens())), expected;
    store.read(0, tokens);
    std::vector<int64_t> offsets;
    for (const auto& document : documents) {
      offsets.push_back(std::ssize(expected));
      expected.push_back(tokenizer.end_of_text());
      for (const int32_t id : tokenizer.encode(document)) expected.push_back(id);
    }
    offsets.push_back(std::ssize(expected));
    EXPECT_EQ(tokens, expected);
    std::vector<int64_t> stored_offsets(offsets.size());
    store.read_doc_offsets(0, stored_offsets);
    EXPECT_EQ(stored_offsets, offsets);
  }
}

TEST_F(TokenizeTest, BytesDoNotDependOnThreads) {
  write_corpus(10);
  const Tokenizer tokenizer = Tokenizer::gpt2(500);
  for (const int64_t threads : {1, 2, 5}) {
    build_token_store({dir_ / "c"}, tokenizer, dir_ / ("store" + std::to_string(threads)), {.threads = threads});
  }
  const auto one = contents(dir_ / "store1");
  EXPECT_TRUE(one == contents(dir_ / "store2"));
  EXPECT_TRUE(one == contents(dir_ / "store5"));
  const json sources = json::parse(one.at(".zattrs"))["sources"];
  for (const json& source : sources) EXPECT_EQ(source["checksum"], file_checksum(source["path"].get<std::string>()));
}

// A process that builds is killed (SIGKILL) again and again, some time after it has saved, until one comes to the end.
TEST_F(TokenizeTest, KilledAndStartedAgainItEndsWithTheSameBytes) {
  write_corpus(60);
  const Tokenizer tokenizer = Tokenizer::gpt2(500);
  int killed = 0, resumed = 0;
  for (bool ended = false; !ended && killed < 100;) {
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it does not end by itself
      const auto tell = [&](char what) {
        if (::write(pipe[1], &what, 1) != 1) ::_exit(1);
      };
      BuildOptions options{.threads = 2, .save_interval_s = 0};
      options.on_resume = [&] { tell('r'); };
      int saves = 0;
      options.on_save = [&] {
        ++saves;
        if (saves == 1) tell('s');
        while (saves == 2) ::pause();  // for its end, however late that comes on a busy machine
      };
      build_token_store({dir_ / "c"}, tokenizer, dir_ / "store", options);
      while (saves > 0) ::pause();
      tell('e');
      ::_exit(0);
    }
    ::close(pipe[1]);
    char said = 0;
    while (::read(pipe[0], &said, 1) == 1 && said == 'r') ++resumed;
    ::close(pipe[0]);
    ended = said == 'e';
    if (!ended) {
      ASSERT_EQ(said, 's') << "it died by itself";
      ::usleep(static_cast<useconds_t>(killed * 17 % 60 * 1000));
      ::kill(child, SIGKILL);
      ++killed;
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_EQ(WIFSIGNALED(status), !ended);
  }
  EXPECT_GE(killed, 4);
  EXPECT_GE(resumed, 3);
  build_token_store({dir_ / "c"}, tokenizer, dir_ / "alone", {.threads = 2});
  EXPECT_TRUE(contents(dir_ / "alone") == contents(dir_ / "store"));
}

// A process killed while it writes a file leaves a part of it under another name.
TEST_F(TokenizeTest, HalfWrittenFilesStayOutOfTheStore) {
  write_corpus(1);
  const Tokenizer tokenizer = Tokenizer::gpt2(500);
  build_token_store({dir_ / "c"}, tokenizer, dir_ / "alone", {.threads = 2});
  for (const char* half : {".saved.new-7-3", ".zattrs.new-7-4", "tokens/.0.new-7-1"}) {
    write(std::string(".store.building/") + half, "half");
  }
  build_token_store({dir_ / "c"}, tokenizer, dir_ / "store", {.threads = 2});
  EXPECT_TRUE(contents(dir_ / "alone") == contents(dir_ / "store"));
}

// What was saved for other files or another tokenizer is not gone on from.
TEST_F(TokenizeTest, SavedWorkOfAnotherTextIsLeft) {
  write_corpus(1);
  const Tokenizer tokenizer = Tokenizer::gpt2(500);
  fs::create_directories(dir_ / ".store.building");
  for (const char* saved : {"", "{}\n", "no", "{\"tokenizer\": \"x\"}\n"}) {
    write(".store.building/saved", saved);
    bool resumed = false;
    BuildOptions options;
    options.on_resume = [&] { resumed = true; };
    build_token_store({dir_ / "c"}, tokenizer, dir_ / "store", options);
    EXPECT_FALSE(resumed);
    EXPECT_FALSE(fs::exists(dir_ / ".store.building"));
    fs::remove_all(dir_ / "store");
    fs::create_directories(dir_ / ".store.building");
  }
}

TEST_F(TokenizeTest, BadLinesAreNamed) {
  const auto line = [&](const std::string& bad) {
    write("bad.jsonl", "{\"text\": \"good\"}\n\n" + bad + "\n{\"text\": \"good\"}\n");
    std::string problem = complaint("bad.jsonl");
    const std::string head = (dir_ / "bad.jsonl").string() + ": line 3 ";
    return problem.starts_with(head) ? problem.substr(head.size()) : problem;
  };
  for (const char* bad :
       {"x", "{\"text\": \"cut off", "{\"text\": \"a\"", "{\"text\": \"\xFF\"}", "{\"text\": \"a\"} 1"}) {
    EXPECT_EQ(line(bad), "is not JSON in UTF-8") << bad;
  }
  for (const char* bad : {"1", "\"text\"", "[\"text\", {\"text\": \"a\"}]", "null"}) {
    EXPECT_EQ(line(bad), "is no JSON object") << bad;
  }
  for (const char* bad : {"{}", "{\"text\": 1}", "{\"Text\": \"a\"}", "{\"a\": {\"text\": \"b\"}}",
                          "{\"text\": [\"a\"]}", "{\"text\": \"a\", \"text\": null}"}) {
    EXPECT_EQ(line(bad), "has no string \"text\"") << bad;
  }
  EXPECT_EQ(line("{\"text\": \"\\u0000\\ud83d\\ude00\"}"), "no error");
}

// What is decompressed far exceeds what is read at a time: nothing may stay behind in the decoder.
TEST_F(TokenizeTest, HighlyCompressedTextComesWhole) {
  for (const size_t size : {(size_t{1} << 20) - 15, size_t{1} << 20, (size_t{3} << 20) + 1}) {
    const std::string line = "{\"text\": \"" + std::string(size - 13, 'x') + "\"}\n";
    ASSERT_EQ(line.size(), size);
    write("x.jsonl.zst", compressed(line));
    const TokenStore store = build_token_store({dir_ / "x.jsonl.zst"}, Tokenizer::gpt2(0), dir_ / "store");
    EXPECT_EQ(store.num_tokens(), static_cast<int64_t>(size - 13 + 1));
  }
}

TEST_F(TokenizeTest, DamagedCompressedFilesAreNamed) {
  std::mt19937 random(2);
  const std::string whole = compressed(json{{"text", random_document(random, 1000)}}.dump() + "\n");
  const std::string name = (dir_ / "a.jsonl.zst").string();
  write("a.jsonl.zst", whole);
  EXPECT_EQ(complaint("a.jsonl.zst"), "no error");
  fs::remove_all(dir_ / "store");
  for (const size_t size : {size_t{1}, whole.size() / 2, whole.size() - 1}) {
    write("a.jsonl.zst", whole.substr(0, size));
    EXPECT_EQ(complaint("a.jsonl.zst"), name + " (" + std::to_string(size) + " bytes) ends within a Zstandard frame");
  }
  write("a.jsonl.zst", "{\"text\": \"not compressed\"}");
  EXPECT_NE(complaint("a.jsonl.zst").find(name + " cannot be decompressed"), std::string::npos);
}

}  // namespace
}  // namespace fox::data
