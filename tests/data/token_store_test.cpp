#include "data/token_store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "data/zarr.h"
#include "support/temporary_folder.h"

namespace fox::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class TokenStoreTest : public ::testing::Test {
 protected:
  fs::path text(const std::string& name, const std::string& content) const {
    fs::create_directories((dir_ / name).parent_path());
    std::ofstream(dir_ / name, std::ios::binary) << content;
    return dir_ / name;
  }
  TokenStore build(const std::vector<fs::path>& sources, const Tokenizer& tokenizer) const {
    return build_token_store(sources, tokenizer, store_);
  }
  static std::vector<int32_t> all_tokens(const TokenStore& store) {
    std::vector<int32_t> tokens(static_cast<size_t>(store.num_tokens()));
    store.read(0, tokens);
    return tokens;
  }
  static std::string complaint(const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      EXPECT_FALSE(error.hint().empty()) << error.what();
      return error.what();
    }
    return "no error";
  }
  /// What opening and reading the store says.
  std::string reading() const {
    return complaint([&] { all_tokens(TokenStore::open(store_)); });
  }
  void edit(const std::string& file, const std::function<void(json&)>& change) const {
    json root = json::parse(read_file(store_ / file));
    change(root);
    std::ofstream(store_ / file) << root.dump();
  }
  static fs::file_time_type time_of_build(const fs::path& store) { return fs::last_write_time(store / ".zgroup"); }

  test::TemporaryFolder folder_;
  fs::path dir_ = folder_.path(), store_ = dir_ / "store";
};

const Tokenizer& bytes_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::gpt2(0);
  return tokenizer;
}

TEST_F(TokenStoreTest, HoldsDocumentsInOrderEachLedByEndOfText) {
  const Tokenizer tokenizer = Tokenizer::gpt2(768);
  const std::vector<std::string> contents = {"In the beginning", "", "\xFF not UTF-8 <|endoftext|>", "the end\n"};
  text("corpus/a.txt", contents[0]);
  text("corpus/b/empty.txt", contents[1]);
  text("corpus/b/z.txt", contents[2]);
  text("corpus/notes.md", "not read");
  const TokenStore store = build({dir_ / "corpus", text("last.md", contents[3])}, tokenizer);
  ASSERT_EQ(store.num_documents(), 4);
  std::vector<int64_t> offsets(5);
  store.read_doc_offsets(0, offsets);
  const auto tokens = all_tokens(store);
  for (size_t d = 0; d < 4; ++d) {
    std::vector<int32_t> expected = tokenizer.encode(contents[d]);
    expected.insert(expected.begin(), tokenizer.end_of_text());
    EXPECT_EQ(std::vector<int32_t>(tokens.begin() + offsets[d], tokens.begin() + offsets[d + 1]), expected) << d;
  }
  EXPECT_EQ(offsets[2] - offsets[1], 1) << "an empty document is one token";
  EXPECT_EQ(offsets[4], store.num_tokens());
  EXPECT_EQ(store.tokenizer_fingerprint(), tokenizer.fingerprint());
}

TEST_F(TokenStoreTest, ReadsAcrossChunks) {
  std::string content(2'300'000, '\0');
  std::mt19937 random(1);
  for (char& c : content) c = static_cast<char>(random());
  const TokenStore store = build({text("a.txt", content)}, bytes_tokenizer());
  ASSERT_EQ(store.num_tokens(), 2'300'001);
  EXPECT_TRUE(fs::exists(store_ / "tokens" / "2"));
  const auto check = [&](int64_t first, size_t count) {
    std::vector<int32_t> tokens(count);
    store.read(first, tokens);
    return bytes_tokenizer().decode(tokens) == content.substr(static_cast<size_t>(first - 1), count);
  };
  EXPECT_TRUE(check(1, content.size()));
  EXPECT_TRUE(check((1 << 20) - 3, 7));
  EXPECT_TRUE(check((1 << 21), 1));
  EXPECT_TRUE(check(store.num_tokens() - 5, 5));
  EXPECT_TRUE(check(5, 0));
  for (const auto& [first, count] :
       {std::pair<int64_t, size_t>{-1, 2}, {2'300'000, 2}, {2'300'002, 0}, {int64_t{1} << 62, 1}}) {
    std::vector<int32_t> tokens(count);
    EXPECT_THROW(store.read(first, tokens), std::out_of_range);
  }
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 own(t);
      for (int i = 0; i < 200; ++i) wrong += !check(1 + own() % 2'299'000, 1000);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Case 31: a vocabulary beyond 65,536 ids needs wider elements.
TEST_F(TokenStoreTest, IdsAbove65535) {
  const fs::path file = dir_ / "tokenizer.json";
  Tokenizer::gpt2(5).save(file);
  json root = json::parse(read_file(file));
  root["added_tokens"].push_back({{"id", 70'000}, {"content", "fox"}, {"special", false}});
  root["added_tokens"].push_back({{"id", 300'000}, {"content", "hound"}, {"special", false}});
  std::ofstream(file) << root.dump();
  const Tokenizer tokenizer = Tokenizer::load(file);
  const TokenStore store = build({text("a.txt", "foxahound")}, tokenizer);
  EXPECT_EQ(all_tokens(store), (std::vector<int32_t>{tokenizer.end_of_text(), 70'000, 64, 300'000}));
  EXPECT_EQ(json::parse(read_file(store_ / "tokens" / ".zarray"))["dtype"], "<u4");
  EXPECT_EQ(json::parse(read_file(store_ / "tokens" / ".zarray"))["chunks"], json::array({1 << 20}));
}

TEST_F(TokenStoreTest, IsMadeOnceAndAgainWhenSomethingChanged) {
  const fs::path a = text("c/a.txt", "one"), b = text("c/b.txt", "two");
  build({dir_ / "c"}, bytes_tokenizer());
  // Made long ago: two builds within one tick of the file system's clock would look like one.
  fs::last_write_time(store_ / ".zgroup", fs::file_time_type::clock::now() - std::chrono::hours(1));
  const auto first = time_of_build(store_);
  build({dir_ / "c"}, bytes_tokenizer());
  EXPECT_EQ(time_of_build(store_), first) << "nothing changed";
  fs::last_write_time(a, fs::file_time_type::clock::now() + std::chrono::hours(1));
  fs::rename(dir_ / "c", dir_ / "moved");
  build({dir_ / "moved"}, bytes_tokenizer());
  EXPECT_EQ(time_of_build(store_), first) << "times and places changed, contents did not";

  text("moved/a.txt", "six");
  EXPECT_EQ(bytes_tokenizer().decode(all_tokens(build({dir_ / "moved"}, bytes_tokenizer()))), "sixtwo");
  EXPECT_NE(time_of_build(store_), first);
  text("moved/c.txt", "!");
  EXPECT_EQ(bytes_tokenizer().decode(all_tokens(build({dir_ / "moved"}, bytes_tokenizer()))), "sixtwo!");
  const Tokenizer other = Tokenizer::gpt2(1);
  EXPECT_EQ(build({dir_ / "moved"}, other).tokenizer_fingerprint(), other.fingerprint());
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir_)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"moved", "store"})) << "nothing is left beside the store";
}

TEST_F(TokenStoreTest, IsReplacedOnlyWhenAllowed) {
  const fs::path a = text("c/a.txt", "one");
  int found = 0;
  const auto again = [&](const std::vector<fs::path>& sources, const Tokenizer& tokenizer) {
    return complaint(
        [&] { build_token_store(sources, tokenizer, store_, {.replace = false, .on_found = [&] { ++found; }}); });
  };
  const std::string differs = store_.string() + " holds another token store: ";
  EXPECT_EQ(again({a}, bytes_tokenizer()), "no error");
  EXPECT_EQ(found, 0) << "it was built";
  EXPECT_EQ(again({dir_ / "c"}, bytes_tokenizer()), "no error");
  EXPECT_EQ(found, 1);
  EXPECT_EQ(again({a}, Tokenizer::gpt2(1)), differs + "it was made with another tokenizer");
  EXPECT_EQ(again({a, a}, bytes_tokenizer()), differs + "it was made of 1 file, not of 2");
  const fs::path b = text("b.txt", "two");
  EXPECT_EQ(again({b}, bytes_tokenizer()), differs + "it was made of other text than " + b.string());
  text("c/a.txt", "six");
  fs::last_write_time(a, fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(again({a}, bytes_tokenizer()), differs + a.string() + " has changed since it was made");
  EXPECT_EQ(bytes_tokenizer().decode(all_tokens(TokenStore::open(store_))), "one");
  fs::remove(store_ / ".zattrs");
  EXPECT_EQ(again({a}, bytes_tokenizer()), differs + "it does not say which text it was made of");
}

TEST_F(TokenStoreTest, SourcesHaveUnixTimes) {
  const fs::path a = text("a.txt", "one");
  build({a}, bytes_tokenizer());
  struct stat status;
  ASSERT_EQ(::stat(a.c_str(), &status), 0);
  const json source = json::parse(read_file(store_ / ".zattrs"))["sources"][0];
  EXPECT_NEAR(source["time"].get<double>(), static_cast<double>(status.st_mtime), 1);
  // A store of the time when they were counted otherwise is known by its contents.
  edit(".zattrs", [](json& root) { root["sources"][0]["time"] = -4.6e18; });
  fs::last_write_time(store_ / ".zgroup", fs::file_time_type::clock::now() - std::chrono::hours(1));
  const auto first = time_of_build(store_);
  build({a}, bytes_tokenizer());
  EXPECT_EQ(time_of_build(store_), first);
}

TEST_F(TokenStoreTest, LeftoversOfAKilledBuildDoNoHarm) {
  text(".store.building/tokens/7", "half");
  text(".store.building/tokens/.zarray", "half");
  text(".store.old/.zgroup", "half");
  EXPECT_EQ(bytes_tokenizer().decode(all_tokens(build({text("a.txt", "abc")}, bytes_tokenizer()))), "abc");
  EXPECT_FALSE(fs::exists(store_ / "tokens" / "7"));
  EXPECT_FALSE(fs::exists(dir_ / ".store.building"));
  EXPECT_FALSE(fs::exists(dir_ / ".store.old"));
}

TEST_F(TokenStoreTest, BadSourcesAndPlacesAreNamed) {
  const fs::path file = text("a.txt", "abc");
  EXPECT_EQ(complaint([&] { build({dir_ / "nowhere"}, bytes_tokenizer()); }),
            "there is no " + (dir_ / "nowhere").string());
  fs::create_directory(dir_ / "hollow");
  EXPECT_EQ(complaint([&] { build({dir_ / "hollow"}, bytes_tokenizer()); }),
            (dir_ / "hollow").string() + " holds no *.txt or *.jsonl file");
  EXPECT_EQ(complaint([&] { build({}, bytes_tokenizer()); }), "no text to read");
  text("store/letters.txt", "precious");
  EXPECT_EQ(complaint([&] { build({file}, bytes_tokenizer()); }), store_.string() + " exists and is no token store");
  EXPECT_EQ(read_file(store_ / "letters.txt"), "precious");
  EXPECT_NE(complaint([&] {
              build_token_store({file}, bytes_tokenizer(), file / "store");
            }).find("cannot write the token store"),
            std::string::npos);
}

// A corpus may have more documents than memory has bytes for.
TEST_F(TokenStoreTest, MemoryDoesNotGrowWithDocuments) {
  constexpr int64_t kDocuments = 8 << 20, kPiece = 1 << 16;
  ZarrWriter tokens(store_ / "tokens", "<u2", 1 << 20), writer(store_ / "doc_offsets", "<i8", 1 << 17);
  const std::vector<uint16_t> piece(kPiece, 7);
  std::vector<int64_t> offsets(kPiece);
  for (int64_t first = 0; first < kDocuments; first += kPiece) {
    tokens.append(piece.data(), kPiece);
    std::iota(offsets.begin(), offsets.end(), first);
    writer.append(offsets.data(), kPiece);
  }
  tokens.finish();
  writer.append(&kDocuments, 1);
  writer.finish();
  std::ofstream(store_ / ".zattrs") << R"({"tokenizer": ""})";
  std::ofstream(store_ / ".zgroup") << R"({"zarr_format": 2})";

  const auto allocated = [] {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  };
  const int64_t before = allocated();
  const TokenStore store = TokenStore::open(store_);
  ASSERT_EQ(store.num_documents(), kDocuments);
  std::mt19937 random(3);
  for (int i = 0; i < 100; ++i) {
    const int64_t first = random() % (kDocuments - kPiece);
    store.read_doc_offsets(first, offsets);
    ASSERT_EQ(offsets.front(), first);
    ASSERT_EQ(offsets.back(), first + kPiece - 1);
  }
  EXPECT_LT(allocated() - before, 8 << 20) << "all offsets are 64 MiB";
  EXPECT_THROW(store.read_doc_offsets(kDocuments - kPiece + 2, offsets), std::out_of_range);
  EXPECT_THROW(store.read_doc_offsets(-1, offsets), std::out_of_range);
}

TEST_F(TokenStoreTest, OffsetsThatDoNotRiseAreNamed) {
  build({text("a.txt", "abc")}, bytes_tokenizer());
  for (const auto& offsets :
       std::vector<std::vector<int64_t>>{{0, 3, 2, 4}, {0, -1, 2, 4}, {0, 5, 5, 4}, {1, 2, 3, 4}}) {
    fs::remove_all(store_ / "doc_offsets");
    ZarrWriter writer(store_ / "doc_offsets", "<i8", 100);
    writer.append(offsets.data(), 4);
    writer.finish();
    EXPECT_NE(complaint([&] {
                std::vector<int64_t> all(4);
                TokenStore::open(store_).read_doc_offsets(0, all);
              }).find((store_ / "doc_offsets").string() + " does not rise from 0"),
              std::string::npos);
  }
}

TEST_F(TokenStoreTest, DamageIsNamed) {
  const std::string content(1'500'000, 'x');
  const fs::path source = text("a.txt", content);
  const auto fresh = [&] {
    fs::remove_all(store_);
    build({source}, bytes_tokenizer());
  };
  const fs::path chunk = store_ / "tokens" / "1";
  fresh();
  const std::string stored = read_file(chunk);
  EXPECT_EQ(reading(), "no error");

  fs::remove(chunk);
  EXPECT_EQ(reading(), chunk.string() + " is missing");
  for (const size_t size : {size_t{0}, size_t{10}, size_t{16}, stored.size() / 2, stored.size() - 1}) {
    std::ofstream(chunk, std::ios::binary) << stored.substr(0, size);
    EXPECT_NE(reading().find(chunk.string() + " (" + std::to_string(size) + " bytes) is damaged"), std::string::npos)
        << reading();
  }
  for (const size_t at : {size_t{0}, size_t{4}, size_t{9}, stored.size() / 2, stored.size() - 1}) {
    std::string flipped = stored;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
    std::ofstream(chunk, std::ios::binary) << flipped;
    EXPECT_NE(reading().find(chunk.string()), std::string::npos) << at;
  }

  fresh();
  edit("tokens/.zarray", [](json& root) { root["dtype"] = "<i2"; });
  EXPECT_EQ(reading(), (store_ / "tokens/.zarray").string() + ": 'dtype' must be \"<u2\" or \"<u4\", not \"<i2\"");
  fresh();
  edit("tokens/.zarray", [](json& root) { root["shape"] = {1'500'002}; });
  EXPECT_EQ(reading(), (store_ / "doc_offsets").string() + " ends at 1500001, but there are 1500002 tokens");
  fresh();
  edit("doc_offsets/.zarray", [](json& root) { root["shape"] = {int64_t{1} << 59}; });
  EXPECT_EQ(reading(), fmt::format("{}/doc_offsets/{} is missing", store_.string(), ((int64_t{1} << 59) - 1) >> 17));
  fresh();
  fs::remove(store_ / ".zgroup");
  EXPECT_EQ(reading(), store_.string() + " is no token store: it has no .zgroup");
  fresh();
  std::ofstream(store_ / ".zattrs") << "{}";
  EXPECT_NE(reading().find(".zattrs does not say which tokenizer"), std::string::npos);
  EXPECT_EQ(bytes_tokenizer().decode(all_tokens(build({source}, bytes_tokenizer()))), content)
      << "built again over the damage";
}

}  // namespace
}  // namespace fox::data
