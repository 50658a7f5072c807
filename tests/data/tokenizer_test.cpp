#include "data/tokenizer.h"

#include <gtest/gtest.h>
#include <time.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "data/utf8.h"

namespace fox::data {
namespace {

using nlohmann::json;

const Tokenizer& tokenizer_of(int64_t merges) {
  static std::map<int64_t, Tokenizer> all;
  auto it = all.find(merges);
  if (it == all.end()) it = all.emplace(merges, Tokenizer::gpt2(merges)).first;
  return it->second;
}

json run_summary(const std::vector<int32_t>& ids) {
  unsigned __int128 value = 0;
  for (const int32_t id : ids) value = (value * 1'000'003 + static_cast<uint32_t>(id)) % (uint64_t{1} << 61);
  const auto end = ids.size() > 4 ? ids.end() - 4 : ids.begin();
  return {{"count", ids.size()},
          {"hash", static_cast<uint64_t>(value)},
          {"first", std::vector<int32_t>(ids.begin(), ids.begin() + std::min<ptrdiff_t>(4, std::ssize(ids)))},
          {"last", std::vector<int32_t>(end, ids.end())}};
}

// What tiktoken and Hugging Face's tokenizers say (make_tokenizer_fixtures.py).
TEST(Tokenizer, EqualsItsPeers) {
  const json fixtures = json::parse(read_file(FOX_SOURCE_DIR "/tests/data/tokenizer_fixtures.json"));
  ASSERT_GT(fixtures.size(), 200u);
  for (const json& fixture : fixtures) {
    const Tokenizer& tokenizer = tokenizer_of(fixture.at("merges"));
    if (!fixture.contains("text")) {
      std::string text;
      for (int64_t i = 0; i < fixture.at("times").get<int64_t>(); ++i) text += fixture.at("unit").get<std::string>();
      text += fixture.at("tail").get<std::string>();
      const auto ids = tokenizer.encode(text);
      const json summary = run_summary(ids);
      for (const auto& [key, value] : summary.items()) EXPECT_EQ(value, fixture.at(key)) << fixture << " " << key;
      EXPECT_EQ(tokenizer.decode(ids), text);
      continue;
    }
    const auto text = fixture.at("text").get<std::string>();
    EXPECT_EQ(tokenizer.encode(text), fixture.at("ids").get<std::vector<int32_t>>()) << fixture;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
    if (fixture.contains("special")) {
      EXPECT_EQ(tokenizer.encode(text, true), fixture.at("special").get<std::vector<int32_t>>()) << fixture;
    }
  }
}

// The vectors of tiktoken's published gpt2 data, with whose merge list ours must be one.
TEST(Tokenizer, KnowsThePublishedIds) {
  const Tokenizer& gpt2 = tokenizer_of(50000);
  EXPECT_EQ(gpt2.vocab_size(), 50257);
  EXPECT_EQ(gpt2.end_of_text(), 50256);
  EXPECT_EQ(gpt2.encode(R"(Hello\nworld)"), (std::vector<int32_t>{15496, 59, 77, 6894}));
  EXPECT_EQ(gpt2.encode(R"(He said \"hi\".\nOK)"),
            (std::vector<int32_t>{1544, 531, 19990, 5303, 59, 1911, 59, 77, 11380}));
  EXPECT_EQ(gpt2.encode(R"(caf\u00e9 \ud83d\ude00)"),
            (std::vector<int32_t>{66, 1878, 59, 84, 405, 68, 24, 3467, 463, 5999, 67, 59, 2507, 405}));
}

TEST(Tokenizer, PartOfTheMergesIsAVocabularyOfItsOwn) {
  const Tokenizer& demo = tokenizer_of(768);
  EXPECT_EQ(demo.vocab_size(), 1025);
  EXPECT_EQ(demo.end_of_text(), 1024);
  const Tokenizer& bytes = tokenizer_of(0);
  EXPECT_EQ(bytes.vocab_size(), 257);
  EXPECT_EQ(bytes.encode("the").size(), 3u);
  EXPECT_EQ(bytes.bytes_of(bytes.end_of_text()), "");
  EXPECT_THROW(Tokenizer::gpt2(50001), Error);
  EXPECT_THROW(Tokenizer::gpt2(-1), Error);
}

std::string random_bytes(std::mt19937& random, size_t size) {
  // Fragments of every kind of damage between fragments of text.
  static const std::vector<std::string> kParts = {"the ",
                                                  " of",
                                                  "\xC3\xA9",
                                                  "\xF0\x9F\x98\x80",
                                                  "\xC3",
                                                  "\xF0\x9F\x98",
                                                  "\xFF",
                                                  "\x80",
                                                  "\xED\xA0\x80",
                                                  "\xC0\xAF",
                                                  "\xF4\x90\x80\x80",
                                                  "\xE2\x80",
                                                  "\n",
                                                  "  ",
                                                  "'s",
                                                  "123",
                                                  "<|endoftext|>",
                                                  std::string(1, '\0'),
                                                  "\xF8\x88\x80\x80\x80"};
  std::string bytes;
  while (bytes.size() < size) {
    bytes += random() % 3 == 0 ? std::string(1, static_cast<char>(random())) : kParts[random() % kParts.size()];
  }
  return bytes;
}

TEST(Tokenizer, EveryByteStringComesBack) {
  std::mt19937 random(1);
  for (const int64_t merges : {50000, 768, 0}) {
    const Tokenizer& tokenizer = tokenizer_of(merges);
    for (int byte = 0; byte < 256; ++byte) {
      const std::string single(1, static_cast<char>(byte));
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(single)), single);
    }
    for (int i = 0; i < 500; ++i) {
      const std::string text = random_bytes(random, 1 + random() % 200);
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
    }
  }
}

// A run of invalid bytes is a word of its own: the text on both sides is cut as if it stood alone.
TEST(Tokenizer, InvalidBytesStandAlone) {
  const Tokenizer& gpt2 = tokenizer_of(50000);
  const std::string left = "caf\xC3\xA9 au lait  ", right = " of the dead";
  for (const std::string invalid :
       {"\xFF", "\xC3", "\xE2\x80", "\xED\xA0\x80", "\xC0\xAF\xC0\xAF", "\xF4\x90\x80\x80", "\x80\x80\x80"}) {
    std::vector<int32_t> expected = gpt2.encode(left);
    const size_t before = expected.size();
    const std::vector<int32_t> after = gpt2.encode(right), all = gpt2.encode(left + invalid + right);
    ASSERT_GT(all.size(), before + after.size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), all.begin()));
    EXPECT_TRUE(std::equal(after.rbegin(), after.rend(), all.rbegin()));
    EXPECT_EQ(gpt2.decode(std::span(all).subspan(before, all.size() - before - after.size())), invalid);
  }
}

TEST(Tokenizer, ValidUtf8IsWhatPythonSaysItIs) {
  const auto valid = [](std::string_view text) { return valid_utf8_prefix(text) == text.size(); };
  for (const char* good :
       {"", "a", "\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xEF\xBF\xBF",
        "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "0123456789abcdef\xC2\x80 0123456789"}) {
    EXPECT_TRUE(valid(good)) << good;
  }
  for (const char* bad :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xED\xBF\xBF", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFE", "\xFF", "\xC2", "\xE1\x80", "\xF1\x80\x80", "\xE1\x80\x41"}) {
    EXPECT_FALSE(valid(bad)) << bad;
    EXPECT_EQ(valid_utf8_prefix(std::string("0123456789") + bad), 10u);
  }
}

TEST(Tokenizer, LongWordsTakeLinearTime) {
  // Of this thread alone: other programs that keep the machine busy do not count.
  const auto seconds = [](size_t size) {
    const auto now = [] {
      timespec time{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    };
    const std::string text(size, 'a');
    const double begin = now();
    tokenizer_of(50000).encode(text);
    return now() - begin;
  };
  seconds(1000);
  // 16 times the length: about 20 times the time for n log n, 256 times for a quadratic loop.
  const double few = std::min({seconds(1 << 16), seconds(1 << 16), seconds(1 << 16)}),
               many = std::min(seconds(1 << 20), seconds(1 << 20));
  EXPECT_LT(many, 80 * few);
}

TEST(Tokenizer, PiecesAreTheWhole) {
  const Tokenizer& gpt2 = tokenizer_of(50000);
  std::mt19937 random(2);
  const std::string text = random_bytes(random, 300'000);
  std::vector<int32_t> all;
  int pieces = 0;
  gpt2.encode(text, [&](std::span<const int32_t> ids) {
    all.insert(all.end(), ids.begin(), ids.end());
    ++pieces;
    EXPECT_LT(ids.size(), 30'000u);
  });
  EXPECT_GT(pieces, 3);
  EXPECT_EQ(all, gpt2.encode(text));
}

TEST(Tokenizer, ThreadsAgree) {
  const Tokenizer& gpt2 = tokenizer_of(50000);
  std::mt19937 random(3);
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> expected;
  for (int i = 0; i < 50; ++i) {
    texts.push_back(random_bytes(random, 2000));
    expected.push_back(gpt2.encode(texts.back()));
  }
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 3; ++round) {
        for (size_t i = 0; i < texts.size(); ++i) wrong[t] += gpt2.encode(texts[i]) != expected[i];
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST(Tokenizer, UnknownIdsAreNamed) {
  const Tokenizer& demo = tokenizer_of(768);
  for (const int32_t id : {-1, 1025, 2'000'000'000}) {
    try {
      demo.decode(std::vector<int32_t>{5, id});
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(id)), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("1025"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace fox::data
