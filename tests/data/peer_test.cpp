// The C++ half of peer_test.py, which names the folder to work in by FOX_PEER_DIR and compares what this half wrote
// there.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "data/json_escape.h"
#include "data/longcrawl64.h"
#include "data/token_store.h"
#include "data/tokenizer.h"
#include "data/zarr.h"

namespace fox::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Peer : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* dir = std::getenv("FOX_PEER_DIR");
    if (!dir) GTEST_SKIP() << "run by tests/data/peer_test.py";
    dir_ = dir;
  }
  json read(const std::string& name) const { return json::parse(read_file(dir_ / name)); }
  void write_ids(const std::string& name, const Tokenizer& tokenizer) const {
    json all = json::array();
    for (const json& text : read("texts.json")) all.push_back(tokenizer.encode(text.get<std::string>()));
    std::ofstream(dir_ / name) << all;
  }

  fs::path dir_;
};

TEST_F(Peer, WritesTokenizersAndIds) {
  for (const int64_t merges : {50000, 768, 0}) {
    const Tokenizer tokenizer = Tokenizer::gpt2(merges);
    tokenizer.save(dir_ / ("tokenizer-" + std::to_string(merges) + ".json"));
    write_ids("ids-" + std::to_string(merges) + ".json", tokenizer);
  }
}

TEST_F(Peer, EncodesWithTokenizersOfOthers) {
  for (const json& name : read("tokenizers.json")) {
    write_ids("ids-" + name.get<std::string>(), Tokenizer::load(dir_ / name.get<std::string>()));
  }
}

TEST_F(Peer, WritesATokenStore) { build_token_store({dir_ / "corpus"}, Tokenizer::gpt2(768), dir_ / "store"); }

TEST_F(Peer, TokenizesSlimPajamasLayout) {
  build_token_store({dir_ / "slimpajama"}, Tokenizer::gpt2(), dir_ / "slimpajama-store", {.threads = 2});
}

TEST_F(Peer, EncodesAndDecodesEscapedText) {
  const Tokenizer tokenizer = Tokenizer::gpt2_json();
  write_ids("ids-json.json", tokenizer);
  json decoded = json::array();
  for (const json& text : read("escaped.json")) decoded.push_back(json_unescaped(text.get<std::string>()));
  std::ofstream(dir_ / "decoded.json") << decoded;
}

std::string hex(std::string_view bytes) {
  std::string digits;
  for (const char byte : bytes) digits += fmt::format("{:02x}", static_cast<uint8_t>(byte));
  return digits;
}

std::string bytes_of_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

TEST_F(Peer, EncodesAndDecodesAsSentencePiece) {
  const json asked = read("sentence_piece.json");
  json all;
  for (const auto& [name, id_lists] : asked.at("ids").items()) {
    const Tokenizer tokenizer = Tokenizer::load(dir_ / name);
    json encoded = json::array(), decoded = json::array(), continued = json::array();
    for (const json& text : asked.at("texts")) encoded.push_back(tokenizer.encode(bytes_of_hex(text)));
    for (const json& ids : id_lists) {
      decoded.push_back(hex(tokenizer.decode(ids.get<std::vector<int32_t>>())));
      continued.push_back(hex(tokenizer.decode(ids.get<std::vector<int32_t>>(), true)));
    }
    all[name] = {{"encoded", encoded},
                 {"decoded", decoded},
                 {"continued", continued},
                 {"vocab_size", tokenizer.vocab_size()},
                 {"end_of_text", tokenizer.end_of_text()}};
  }
  std::ofstream(dir_ / "sentence_piece_ours.json") << all;
}

TEST_F(Peer, ReadsLongCrawl64) {
  const LongCrawl64 data(dir_ / "longcrawl64.zarr");
  std::vector<uint16_t> tokens(static_cast<size_t>(data.num_tokens()));
  data.read(0, data.num_documents(), 0, data.document_tokens(), tokens.data());
  std::ofstream(dir_ / "longcrawl64.bin", std::ios::binary)
      .write(reinterpret_cast<const char*>(tokens.data()), std::ssize(tokens) * 2);
}

TEST_F(Peer, ReadsArraysOfOthers) {
  for (const json& box : read("boxes.json")) {
    const ZarrArray array(dir_ / box.at("array").get<std::string>(), box.at("dtype"));
    const auto start = box.at("start").get<std::vector<int64_t>>(), count = box.at("count").get<std::vector<int64_t>>();
    int64_t bytes = array.meta().item_bytes();
    for (const int64_t n : count) bytes *= n;
    std::string content(static_cast<size_t>(bytes), '\0');
    array.read(start, count, content.data());
    std::ofstream(dir_ / box.at("file").get<std::string>(), std::ios::binary) << content;
  }
}

}  // namespace
}  // namespace fox::data
