#include "data/json_escape.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "data/tokenizer.h"
#include "data/utf8.h"

namespace fox::data {
namespace {

using Ids = std::vector<int32_t>;

std::string escaped(std::string_view text) {
  std::string out;
  append_json_escaped(text, out);
  return out;
}

std::string random_text(std::mt19937& random) {
  std::string text;
  for (size_t n = random() % 40; n > 0; --n) {
    uint32_t code = random() % 2 ? random() % 0x100 : random() % 3 ? random() % 0x3000 : random() % 0x110000;
    if (code >= 0xD800 && code < 0xE000) code = '\\';
    append_utf8(code, text);
  }
  return text;
}

// Case 25: the vectors of the published tokenizer.
TEST(JsonTokenizer, KnowsThePublishedIds) {
  const Tokenizer tokenizer = Tokenizer::gpt2_json();
  const std::pair<const char*, Ids> vectors[] = {
      {"Hello\nworld", {15496, 59, 77, 6894}},
      {"He said \"hi\".\nOK", {1544, 531, 19990, 5303, 59, 1911, 59, 77, 11380}},
      {"C:\\a\tb", {34, 25, 6852, 64, 59, 83, 65}},
      {"caf\xC3\xA9 \xF0\x9F\x98\x80", {66, 1878, 59, 84, 405, 68, 24, 3467, 463, 5999, 67, 59, 2507, 405}},
      {".", {13}},
      {"a.\n\nb", {64, 13, 59, 77, 59, 46803}}};
  for (const auto& [text, ids] : vectors) {
    EXPECT_EQ(tokenizer.encode(text), ids) << text;
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
  EXPECT_EQ(tokenizer.vocab_size(), 50257);
  EXPECT_EQ(tokenizer.encode("a<|endoftext|>", true), (Ids{64, 50256}));
  EXPECT_GT(tokenizer.encode("a<|endoftext|>").size(), 2u);
  EXPECT_NE(tokenizer.fingerprint(), Tokenizer::gpt2().fingerprint());
}

TEST(JsonTokenizer, TextComesBackAndTheMeaningIsJsons) {
  const Tokenizer tokenizer = Tokenizer::gpt2_json();
  std::mt19937 random(4);
  for (int i = 0; i < 2000; ++i) {
    const std::string text = random_text(random);
    const std::string dumped = nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/true);
    EXPECT_EQ(escaped(text), dumped.substr(1, dumped.size() - 2));
    EXPECT_EQ(json_unescaped(escaped(text)), text);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
  EXPECT_EQ(escaped("\x7F/\xFF"), R"(\u007f/\ufffd)");
}

// What is no strict JSON string is read as Python's unicode_escape does.
TEST(JsonTokenizer, DecodesWhatIsNoJson) {
  EXPECT_EQ(json_unescaped("x\"y\\nz"), "x\"y\nz");
  EXPECT_EQ(json_unescaped("abc\\"), "abc");
  EXPECT_EQ(json_unescaped("a\\q \"b\""), "a\\q \"b\"");
  EXPECT_EQ(json_unescaped("\"\xC3\xA9"), "\"\xC3\x83\xC2\xA9") << "bytes are Latin-1 then";
  EXPECT_EQ(json_unescaped(R"("\x41\101\u12zz\U0001F600\a\v\')"), "\"AAzz\xF0\x9F\x98\x80\a\v'");
  EXPECT_EQ(json_unescaped(R"(a\/b)"), "a/b");
  EXPECT_EQ(json_unescaped(R"(\ud83d\ude00\ud83d!)"), "\xF0\x9F\x98\x80!") << "half a pair is dropped";
}

// However the text is cut into tokens, the pieces give what the whole gives.
TEST(JsonTokenizer, PiecesGiveTheWhole) {
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    const std::string text = random_text(random), whole = escaped(text);
    JsonUnescaper unescaper;
    std::string got;
    for (size_t at = 0; at < whole.size();) {
      const size_t size = 1 + random() % 5;
      got += unescaper.push(std::string_view(whole).substr(at, size));
      at += size;
    }
    EXPECT_EQ(got + unescaper.finish(), text);
  }
  JsonUnescaper unescaper;
  EXPECT_EQ(unescaper.push("a\\u00"), "a");
  EXPECT_EQ(unescaper.finish(), "\\u00");
}

// Ids of the two sides of a cut are those of the whole, whatever the text.
TEST(SeparablePrefix, CutsWhereNoWordIsCut) {
  static const std::string kParts[] = {"the",
                                       " of",
                                       " ",
                                       "\n",
                                       "\r\n",
                                       "\t",
                                       "'s",
                                       "12",
                                       "!",
                                       "\xC2\xA0",
                                       "\xE3\x80\x80",
                                       "\xE4\xB8\xAD",
                                       "\xE3\x80\x82",
                                       "\xC3",
                                       "\xFF",
                                       "\xE2\x80",
                                       "\xF0\x9F\x98\x80",
                                       "\\"};
  std::mt19937 random(6);
  const Tokenizer plain = Tokenizer::gpt2(2000), json = Tokenizer::gpt2_json();
  int cuts = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string text;
    for (size_t n = random() % 30; n > 0; --n) text += kParts[random() % std::size(kParts)];
    for (const Tokenizer* tokenizer : {&plain, &json}) {
      // What stands before the cut must not matter for what follows, and the other way round.
      const size_t cut = tokenizer->separable_prefix(text);
      cuts += cut > 0;
      Ids ids = tokenizer->encode(text.substr(0, cut));
      for (const int32_t id : tokenizer->encode(text.substr(cut))) ids.push_back(id);
      EXPECT_EQ(ids, tokenizer->encode(text)) << text << " at " << cut;
    }
  }
  EXPECT_GT(cuts, 4000);
  EXPECT_EQ(plain.separable_prefix("a  b"), 1u);
  EXPECT_EQ(plain.separable_prefix("ab"), 0u);
}

}  // namespace
}  // namespace fox::data
