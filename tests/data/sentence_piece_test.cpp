// SentencePiece models: ids and text are those of the sentencepiece package (make_sentence_piece_fixtures.py; many more
// in peer_test.py), and files that are no such models are refused.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "data/token_store.h"
#include "data/tokenizer.h"
#include "support/sentence_piece_file.h"
#include "support/temporary_folder.h"

namespace fox::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using File = test::SentencePieceFile;

const fs::path kFixtures = FOX_SOURCE_DIR "/tests/data/sentence_piece";

std::string bytes_of_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

class SentencePieceTest : public ::testing::Test {
 protected:
  Tokenizer load(const std::string& bytes) const {
    std::ofstream(file_, std::ios::binary) << bytes;
    return Tokenizer::load(file_);
  }
  std::string complaint(const std::string& bytes) const {
    try {
      load(bytes);
    } catch (const Error& error) {
      const std::string what = error.what(), head = file_.string() + " ";
      EXPECT_FALSE(error.hint().empty());
      EXPECT_TRUE(what.starts_with(head)) << what;
      return what.substr(std::min(head.size(), what.size()));
    }
    return "no error";
  }

  test::TemporaryFolder folder_;
  fs::path file_ = folder_.path() / "x.model";
};

TEST_F(SentencePieceTest, EqualsThePackage) {
  const json fixtures = json::parse(read_file(kFixtures / "fixtures.json"));
  for (const auto& [name, fixture] : fixtures.items()) {
    const Tokenizer tokenizer = Tokenizer::load(kFixtures / (name + ".model"));
    EXPECT_EQ(tokenizer.vocab_size(), fixture.at("vocab_size"));
    EXPECT_EQ(tokenizer.end_of_text(), fixture.at("bos"));
    EXPECT_EQ(tokenizer.bytes_of(fixture.at("unk")), " \xE2\x81\x87 ");
    EXPECT_EQ(tokenizer.bytes_of(fixture.at("eos")), "");
    for (const json& encoded : fixture.at("encoded")) {
      EXPECT_EQ(tokenizer.encode(bytes_of_hex(encoded.at("text"))), encoded.at("ids").get<std::vector<int32_t>>())
          << name << encoded;
    }
    for (const json& decoded : fixture.at("decoded")) {
      const auto ids = decoded.at("ids").get<std::vector<int32_t>>();
      EXPECT_EQ(tokenizer.decode(ids), decoded.at("text").get<std::string>()) << name << decoded;
      const auto decoder = tokenizer.decoder();
      std::string streamed;
      for (const int32_t id : ids) streamed += decoder->push(id);
      EXPECT_EQ(streamed + decoder->finish(), decoded.at("text").get<std::string>()) << name << decoded;
    }
  }
}

TEST_F(SentencePieceTest, BytesStandForWhatHasNoPiece) {
  const Tokenizer bpe = Tokenizer::load(kFixtures / "bpe.model"),
                  unigram = Tokenizer::load(kFixtures / "unigram.model");
  const std::string text = "snow \xE2\x98\x83\xE2\x98\x83, \xF0\x9F\x98\x80";
  EXPECT_EQ(bpe.decode(bpe.encode(text)), text);
  EXPECT_EQ(unigram.decode(unigram.encode(text)), "snow  \xE2\x81\x87 ,  \xE2\x81\x87 ") << "one for both snowmen";
  // A character comes byte by byte.
  const std::vector<int32_t> ids = bpe.encode("\xE2\x98\x83");
  const auto decoder = bpe.decoder();
  std::vector<std::string> pieces;
  for (const int32_t id : ids) pieces.push_back(decoder->push(id));
  EXPECT_EQ(pieces, (std::vector<std::string>{"", "\xE2", "\x98", "\x83"})) << "the first is the space before a text";
}

TEST_F(SentencePieceTest, TheSpaceBeforeATextIsTakenAwayWhereItBegins) {
  File file;
  const Tokenizer trimmed = load(file.bytes());
  const std::vector<int32_t> ids = trimmed.encode("a x");
  EXPECT_EQ(ids, (std::vector<int32_t>{5, 7}));
  EXPECT_EQ(trimmed.decode(ids), "a x");
  EXPECT_EQ(trimmed.decode(ids, /*continues=*/true), " a x");
  EXPECT_EQ(trimmed.decode(std::vector<int32_t>{1, 3, 3, 5, 1, 5}), "a a") << "extra spaces too, behind <s> as well";
  file.normalizer = File::field(4, 0);  // white space stays as it is
  const Tokenizer kept = load(file.bytes());
  EXPECT_EQ(kept.decode(std::vector<int32_t>{1, 3, 3, 5}), "  a") << "one space was put there";
  EXPECT_EQ(kept.decode(kept.encode("  a ")), "  a ");
  file.normalizer += File::field(3, 0);  // and none is put before
  const Tokenizer bare = load(file.bytes());
  EXPECT_EQ(bare.encode("a a"), (std::vector<int32_t>{4, 5}));
  EXPECT_EQ(bare.decode(std::vector<int32_t>{5}), " a");
}

TEST_F(SentencePieceTest, SpecialTokensAreTextUnlessAskedFor) {
  const Tokenizer tokenizer = load(File().bytes());
  const std::vector<int32_t> as_text = tokenizer.encode("a<s>a");
  EXPECT_EQ(std::count(as_text.begin(), as_text.end(), 1), 0);
  EXPECT_EQ(tokenizer.encode("a<s>a", true), (std::vector<int32_t>{5, 1, 5}));
  EXPECT_EQ(tokenizer.end_of_text(), 1);
  EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{8}), Error);
  EXPECT_THROW(tokenizer.decoder()->push(-1), Error);
  // T5's has no beginning.
  File file;
  file.pieces = File::piece("</s>", 0, 3) + File::piece("<unk>", 0, 2) + File::piece("a", -1);
  EXPECT_EQ(load(file.bytes()).end_of_text(), 0);
}

TEST_F(SentencePieceTest, ComesBackAsItWasRead) {
  const Tokenizer first = Tokenizer::load(kFixtures / "unigram.model"),
                  other = Tokenizer::load(kFixtures / "bpe.model");
  EXPECT_NE(first.fingerprint(), other.fingerprint());
  first.save_in(folder_.path());
  EXPECT_EQ(Tokenizer::find_in(folder_.path()), folder_.path() / "tokenizer.model");
  EXPECT_EQ(read_file(folder_.path() / "tokenizer.model"), read_file(kFixtures / "unigram.model"));
  EXPECT_EQ(Tokenizer::load(folder_.path() / "tokenizer.model").fingerprint(), first.fingerprint());
  fs::remove(folder_.path() / "tokenizer.model");
  EXPECT_EQ(Tokenizer::find_in(folder_.path()), "");
  Tokenizer::gpt2(1).save_in(folder_.path());
  EXPECT_EQ(Tokenizer::find_in(folder_.path()), folder_.path() / "tokenizer.json");
}

TEST_F(SentencePieceTest, ThreadsAgreeAndStoresAreWritten) {
  std::ofstream lines(folder_.path() / "a.jsonl");
  std::vector<int32_t> expected;
  const Tokenizer tokenizer = Tokenizer::load(kFixtures / "bpe.model");
  for (int i = 0; i < 3000; ++i) {
    const std::string text =
        "document " + std::to_string(i) + " of the\n gates \xE2\x98\x83 " + std::string(i % 70, 'y');
    lines << json{{"text", text}} << "\n";
    expected.push_back(tokenizer.end_of_text());
    const std::vector<int32_t> ids = tokenizer.encode(text);
    expected.insert(expected.end(), ids.begin(), ids.end());
  }
  lines.close();
  const TokenStore store =
      build_token_store({folder_.path() / "a.jsonl"}, tokenizer, folder_.path() / "store", {.threads = 4});
  std::vector<int32_t> tokens(static_cast<size_t>(store.num_tokens()));
  store.read(0, tokens);
  EXPECT_EQ(tokens, expected);
}

TEST_F(SentencePieceTest, WhatCannotBeReadIsNamed) {
  EXPECT_EQ(complaint(""), "has no pieces");
  EXPECT_EQ(complaint("{\"model\": {}}"), "is no SentencePiece model, or is damaged");
  const auto with_pieces = [&](const std::string& pieces) {
    File file;
    file.pieces = pieces;
    return complaint(file.bytes());
  };
  const auto with_trainer = [&](const std::string& trainer) {
    File file;
    file.trainer = trainer;
    return complaint(file.bytes());
  };
  const File good;
  EXPECT_EQ(complaint(good.bytes()), "no error");
  EXPECT_EQ(with_pieces(good.pieces + File::piece("a")), "has the piece 'a' twice");
  EXPECT_EQ(with_pieces(good.pieces + File::piece("")), "piece 8 is empty");
  EXPECT_EQ(with_pieces(good.pieces + File::piece("b", NAN)), "piece 8 has a score that is no number");
  EXPECT_EQ(with_pieces(good.pieces + File::piece("b", 0, 7)), "piece 8 is of the unknown type 7");
  EXPECT_EQ(with_pieces(good.pieces + File::piece("<unk2>", 0, 2)), "has two unknown pieces");
  EXPECT_EQ(with_pieces(File::piece("<s>", 0, 3) + File::piece("a")), "has no unknown piece");
  EXPECT_EQ(with_pieces(File::piece("<unk>", 0, 2) + File::piece("a")),
            "has neither '<s>' nor '</s>', and one must stand before each document");
  EXPECT_EQ(with_pieces(good.pieces + File::piece("<0x41>", 0, 6)),
            "has the byte piece '<0x41>', but no byte_fallback");
  EXPECT_EQ(with_pieces(good.pieces + File::piece("<0x4>", 0, 6)), "has a byte piece '<0x4>', which is none");
  EXPECT_EQ(with_trainer(File::field(3, 2) + File::field(35, 1)), "has byte_fallback, but no piece '<0x00>'");
  EXPECT_EQ(with_trainer(File::field(3, 3)), "is of model_type 3, neither UNIGRAM (1) nor BPE (2)");
  for (const std::string& charsmap :
       {std::string("x"), std::string("\x04\0\0\0abcd", 8), std::string("\xFF\xFF\xFF\xFF", 4),
        std::string("\x04\0\0\0abcdno end", 14), std::string("\x03\0\0\0abc\0", 8)}) {
    File file;
    file.normalizer = File::field(2, charsmap);
    EXPECT_EQ(complaint(file.bytes()), "has a damaged precompiled_charsmap");
  }
  File file;
  file.more = File::field(5, File::field(2, "rules"));
  EXPECT_EQ(complaint(file.bytes()), "changes text when it is decoded, which is not supported");
}

// The bytes of a file may be anything: an error, or a tokenizer that does its work.
TEST_F(SentencePieceTest, DamagedFilesAreRefusedOrRead) {
  for (const char* name : {"bpe.model", "unigram.model"}) {
    const std::string whole = read_file(kFixtures / name);
    std::mt19937 random(4);
    int refused = 0;
    for (int i = 0; i < 600; ++i) {
      std::string damaged = whole;
      for (size_t n = 1 + random() % 4; n > 0; --n) damaged[random() % damaged.size()] = static_cast<char>(random());
      // The rules of the unigram model are at the end.
      if (i % 3 == 0) damaged[damaged.size() - 1 - random() % 1500] = static_cast<char>(random());
      if (i % 10 == 0) damaged.resize(random() % damaged.size());
      try {
        const Tokenizer tokenizer = load(damaged);
        const auto ids = tokenizer.encode("Hello  fox<sep> \xE2\x98\x83 A\xCC\x8A gates\xFF\n");
        tokenizer.decode(ids);
      } catch (const Error&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, 100);
    EXPECT_LT(refused, 600);
  }
}

}  // namespace
}  // namespace fox::data
