#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "data/tokenizer.h"
#include "support/temporary_folder.h"

namespace fox::data {
namespace {

using nlohmann::json;

class TokenizerJson : public ::testing::Test {
 protected:
  Tokenizer load(const std::string& text) const {
    std::ofstream(file_, std::ios::binary) << text;
    return Tokenizer::load(file_);
  }
  json saved(int64_t merges) const {
    Tokenizer::gpt2(merges).save(file_);
    return json::parse(read_file(file_));
  }
  /// What `load` says of a tokenizer.json after `change`.
  std::string complaint(const std::function<void(json&)>& change) const {
    json root = saved(20);
    change(root);
    try {
      load(root.dump());
    } catch (const Error& error) {
      EXPECT_FALSE(error.hint().empty()) << error.what();
      const std::string what = error.what(), prefix = file_.string() + ": ";
      EXPECT_EQ(what.substr(0, prefix.size()), prefix);
      return what.substr(std::min(prefix.size(), what.size()));
    }
    return "no error";
  }

  test::TemporaryFolder folder_;
  std::filesystem::path dir_ = folder_.path(), file_ = dir_ / "tokenizer.json";
};

const std::string kText = "The 12 foxes aren't  here:\n\n caf\xC3\xA9 \xF0\x9F\x98\x80 \xFF<|endoftext|>";

TEST_F(TokenizerJson, SavedAndLoadedIsTheSame) {
  for (const int64_t merges : {0, 1, 768, 50000}) {
    const Tokenizer original = Tokenizer::gpt2(merges);
    original.save(file_);
    const Tokenizer loaded = Tokenizer::load(file_);
    EXPECT_EQ(loaded.fingerprint(), original.fingerprint());
    EXPECT_EQ(loaded.vocab_size(), original.vocab_size());
    EXPECT_EQ(loaded.end_of_text(), original.end_of_text());
    for (const bool special : {false, true}) EXPECT_EQ(loaded.encode(kText, special), original.encode(kText, special));
    const std::string before = read_file(file_);
    loaded.save(file_);
    EXPECT_EQ(read_file(file_), before);
  }
}

TEST_F(TokenizerJson, FingerprintsTellEncodingsApart) {
  std::set<std::string> all;
  for (const int64_t merges : {0, 1, 2, 768}) all.insert(Tokenizer::gpt2(merges).fingerprint());
  EXPECT_EQ(all.size(), 4u);
  const std::string same = Tokenizer::gpt2(20).fingerprint();
  const auto fingerprint_with = [&](const std::function<void(json&)>& change) {
    json root = saved(20);
    change(root);
    return load(root.dump()).fingerprint();
  };
  EXPECT_EQ(fingerprint_with([](json& root) { root["truncation"] = {{"max_length", 5}}; }), same);
  EXPECT_NE(fingerprint_with([](json& root) { root["model"]["ignore_merges"] = true; }), same);
  EXPECT_NE(fingerprint_with([](json& root) { std::swap(root["model"]["merges"][0], root["model"]["merges"][1]); }),
            same);
  EXPECT_NE(fingerprint_with([](json& root) { root["pre_tokenizer"]["use_regex"] = false; }), same);
  EXPECT_NE(fingerprint_with([](json& root) { root["added_tokens"][0]["special"] = false; }), same);
}

TEST_F(TokenizerJson, MergesMayBePairs) {
  json root = saved(768);
  for (json& merge : root["model"]["merges"]) {
    const auto text = merge.get<std::string>();
    const size_t space = text.find(' ');
    merge = json::array({text.substr(0, space), text.substr(space + 1)});
  }
  const Tokenizer loaded = load(root.dump());
  EXPECT_EQ(loaded.fingerprint(), Tokenizer::gpt2(768).fingerprint());
  EXPECT_EQ(loaded.encode(kText), Tokenizer::gpt2(768).encode(kText));
}

TEST_F(TokenizerJson, AddedTokensAreFoundLeftmostAndLongest) {
  json root = saved(20);
  const auto add = [&](int id, const char* content, bool special) {
    root["added_tokens"].push_back({{"id", id}, {"content", content}, {"special", special}});
  };
  add(277, "<|im|>", true);
  add(278, "<|im|>x", true);
  add(280, "fox", false);  // 279 stands for nothing
  const Tokenizer loaded = load(root.dump());
  EXPECT_EQ(loaded.vocab_size(), 281);
  EXPECT_EQ(loaded.bytes_of(280), "fox");
  EXPECT_EQ(loaded.bytes_of(277), "");
  EXPECT_EQ(loaded.encode("fox"), std::vector<int32_t>{280});
  EXPECT_EQ(loaded.encode("<|im|>x<|im|>fox<|endoftext|>", true), (std::vector<int32_t>{278, 277, 280, 276}));
  EXPECT_EQ(loaded.decode(loaded.encode("<|im|>fox")), "<|im|>fox");
}

TEST_F(TokenizerJson, EveryProblemNamesItsKey) {
  const auto model = [](const char* key, json value) { return [=](json& root) { root["model"][key] = value; }; };
  EXPECT_EQ(complaint([](json& root) { root.erase("model"); }), "'model' is missing");
  EXPECT_EQ(complaint([](json& root) { root["model"] = 5; }), "'model' must be an object, not 5");
  EXPECT_EQ(complaint(model("type", "WordPiece")), "'model.type' must be \"BPE\", not \"WordPiece\"");
  EXPECT_EQ(complaint(model("byte_fallback", true)), "'model.byte_fallback' is not supported: true");
  EXPECT_EQ(complaint(model("dropout", 0.1)), "'model.dropout' is not supported: 0.1");
  EXPECT_EQ(complaint(model("vocab", json::array())), "'model.vocab' must be an object, not []");
  EXPECT_EQ(complaint([](json& root) { root["model"]["vocab"].erase("a"); }),
            "'model.vocab' has no token 'a' for the byte 97");
  EXPECT_EQ(complaint([](json& root) { root["model"]["vocab"]["b"] = 64; }),
            "'model.vocab.b' has the id 64 of another token");
  EXPECT_EQ(complaint([](json& root) { root["model"]["vocab"]["a b"] = 999; }),
            "'model.vocab.a b' is not written in GPT-2's alphabet of bytes");
  for (const json& id : {json(-1), json(1LL << 40), json(1.5), json("1"), json(18446744073709551615u)}) {
    EXPECT_NE(complaint([&](json& root) { root["model"]["vocab"]["a"] = id; }).find("'model.vocab.a' must be an id"),
              std::string::npos);
  }
  EXPECT_EQ(complaint([](json& root) { root["model"]["merges"][3] = "zz y"; }),
            "'model.merges[3]' names 'zz', which is not in model.vocab");
  EXPECT_EQ(complaint([](json& root) { root["model"]["merges"][3] = "ab"; }),
            "'model.merges[3]' must be two tokens with a space between, not \"ab\"");
  EXPECT_EQ(complaint([](json& root) {
              root["model"]["merges"][3] = {"a", "b", "c"};
            }),
            "'model.merges[3]' must be a pair of tokens, not [\"a\",\"b\",\"c\"]");
  EXPECT_EQ(complaint([](json& root) {
              root["normalizer"] = {{"type", "NFC"}};
            }),
            "'normalizer' is not supported: {\"type\":\"NFC\"}");
  EXPECT_EQ(complaint([](json& root) { root["pre_tokenizer"]["add_prefix_space"] = true; }),
            "'pre_tokenizer.add_prefix_space' is not supported: true");
  EXPECT_EQ(complaint([](json& root) { root["pre_tokenizer"]["type"] = "Whitespace"; }),
            "'pre_tokenizer.type' must be ByteLevel or Split, not \"Whitespace\"");
  EXPECT_EQ(complaint([](json& root) {
              root["added_tokens"] = json::array();
              root["model"]["vocab"].erase("<|endoftext|>");
            }),
            "'added_tokens' has no <|endoftext|>, which stands before each document");
  EXPECT_EQ(complaint([](json& root) { root["added_tokens"][0]["content"] = 7; }),
            "'added_tokens[0].content' must be a string, not 7");
  EXPECT_NE(complaint([](json& root) {
              root["pre_tokenizer"] = {{"type", "Sequence"},
                                       {"pretokenizers",
                                        {{{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}},
                                         {{"type", "ByteLevel"}, {"use_regex", false}}}}};
            }).find("pattern '(a': missing closing parenthesis"),
            std::string::npos);
}

TEST_F(TokenizerJson, FilesThatAreNoJsonAreNamed) {
  for (const char* text : {"", "{", "not json", "\xFF\xFE", "[1, 2]", "7", "null"}) {
    try {
      load(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find(file_.string()), 0u) << error.what();
    }
  }
  EXPECT_THROW(Tokenizer::load(dir_ / "missing.json"), Error);
}

/// Every value of the document may be replaced by every other kind of value, removed, or doubled.
void mutate(json& root, std::mt19937& random) {
  static const std::vector<json> kValues = {nullptr,
                                            true,
                                            -1,
                                            0,
                                            3,
                                            1e300,
                                            18446744073709551615u,
                                            "",
                                            "a",
                                            "a b",
                                            "Ġ",
                                            json::array(),
                                            json::array({"a", "b"}),
                                            json::object(),
                                            json::object({{"type", "ByteLevel"}})};
  json* at = &root;
  for (int depth = 0; depth < 6 && at->is_structured() && !at->empty() && (depth == 0 || random() % 4 != 0); ++depth) {
    at = &*std::next(at->begin(), static_cast<ptrdiff_t>(random() % at->size()));
  }
  if (at->is_structured() && !at->empty() && random() % 2 == 0) {
    at->erase(std::next(at->begin(), static_cast<ptrdiff_t>(random() % at->size())));
  } else {
    *at = kValues[random() % kValues.size()];
  }
}

TEST_F(TokenizerJson, DamagedFilesAreRefusedOrWork) {
  const json original = saved(5);
  const std::string text = original.dump();
  std::mt19937 random(4);
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = text;
    if (i % 2 == 0) {
      json root = original;
      for (size_t n = 1 + random() % 3; n > 0; --n) mutate(root, random);
      damaged = root.dump();
    } else {
      for (size_t n = 1 + random() % 4; n > 0; --n) damaged[random() % damaged.size()] = static_cast<char>(random());
      if (random() % 8 == 0) damaged.resize(random() % damaged.size());
    }
    try {
      const Tokenizer tokenizer = load(damaged);
      const auto ids = tokenizer.encode(kText);
      EXPECT_LE(tokenizer.vocab_size(), 1 << 22);
      for (const int32_t id : ids) EXPECT_TRUE(id >= 0 && id < tokenizer.vocab_size());
      tokenizer.decode(ids);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_LT(refused, 2000);
}

}  // namespace
}  // namespace fox::data
