#include "data/sentence_piece_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <unordered_set>

#include "base/error.h"
#include "base/protobuf_fields.h"

namespace fox::data {

namespace {

constexpr const char* kReadable = "fox reads sentencepiece's unigram and BPE models";
/// The largest vocabularies in use have 256 thousand.
constexpr size_t kMostPieces = 1 << 22;

class ModelFileParser {
 public:
  ModelFileParser(std::string_view file, std::string source) : file_(file), source_(std::move(source)) {}

  SentencePieceModel parse() {
    model_.unknown_surface = " \xE2\x81\x87 ";
    each(file_, [&](const ProtobufField& field) {
      switch (field.number) {
        case 1:
          return read_piece(field.bytes);
        case 2:
          return read_trainer(field.bytes);
        case 3:
          return read_normalizer(field.bytes);
        case 5:
          return refuse_denormalizer(field.bytes);
      }
    });
    if (model_.pieces.empty()) fail("has no pieces");
    if (type_ != 1 && type_ != 2) fail(fmt::format("is of model_type {}, neither UNIGRAM (1) nor BPE (2)", type_));
    model_.bpe = type_ == 2;
    check_pieces();
    model_.begin = control(begin_piece_);
    model_.end = control(end_piece_);
    if (model_.begin < 0 && model_.end < 0)
      fail(fmt::format("has neither '{}' nor '{}', and one must stand before each document", begin_piece_, end_piece_));
    return std::move(model_);
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const { throw Error(source_ + " " + problem, kReadable); }

  void each(std::string_view message, const std::function<void(const ProtobufField&)>& take) const {
    if (!read_protobuf(message, take)) fail("is no SentencePiece model, or is damaged");
  }

  void read_piece(std::string_view message) {
    SentencePiece piece;
    each(message, [&](const ProtobufField& field) {
      if (field.number == 1) piece.text = field.bytes;
      if (field.number == 2) piece.score = std::bit_cast<float>(static_cast<uint32_t>(field.value));
      if (field.number == 3) piece.kind = static_cast<SentencePiece::Kind>(field.value);
    });
    const std::string which = fmt::format("piece {}", model_.pieces.size());
    if (piece.text.empty()) fail(which + " is empty");
    if (piece.kind < SentencePiece::kNormal || piece.kind > SentencePiece::kByte)
      fail(fmt::format("{} is of the unknown type {}", which, static_cast<int64_t>(piece.kind)));
    if (!std::isfinite(piece.score)) fail(which + " has a score that is no number");
    if (model_.pieces.size() == kMostPieces) fail(fmt::format("has more than {} pieces", kMostPieces));
    model_.pieces.push_back(std::move(piece));
  }

  void read_trainer(std::string_view message) {
    each(message, [&](const ProtobufField& field) {
      switch (field.number) {
        case 3:
          type_ = field.value;
          break;
        case 24:
          model_.rules.whitespace_as_suffix = field.value != 0;
          break;
        case 35:
          model_.byte_fallback = field.value != 0;
          break;
        case 44:
          model_.unknown_surface = field.bytes;
          break;
        case 46:
          begin_piece_ = field.bytes;
          break;
        case 47:
          end_piece_ = field.bytes;
          break;
      }
    });
  }

  void read_normalizer(std::string_view message) {
    SentencePieceRules& rules = model_.rules;
    each(message, [&](const ProtobufField& field) {
      switch (field.number) {
        case 2:
          rules.charsmap = field.bytes;
          break;
        case 3:
          rules.add_dummy_prefix = field.value != 0;
          break;
        case 4:
          rules.remove_extra_whitespaces = field.value != 0;
          break;
        case 5:
          rules.escape_whitespaces = field.value != 0;
          break;
      }
    });
  }

  void refuse_denormalizer(std::string_view message) const {
    each(message, [&](const ProtobufField& field) {
      if (field.number == 2 && !field.bytes.empty()) fail("changes text when it is decoded, which is not supported");
    });
  }

  void check_pieces() {
    std::unordered_set<std::string_view> in_text, others;
    if (model_.byte_fallback) model_.byte_ids.assign(256, -1);
    for (size_t id = 0; id < model_.pieces.size(); ++id) {
      const SentencePiece& piece = model_.pieces[id];
      if (!(piece.in_text() ? in_text : others).insert(piece.text).second)
        fail(fmt::format("has the piece '{}' twice", piece.text));
      if (piece.kind == SentencePiece::kUnknown) {
        if (model_.unknown >= 0) fail("has two unknown pieces");
        model_.unknown = static_cast<int32_t>(id);
      }
      if (piece.kind == SentencePiece::kByte) take_byte(piece.text, static_cast<int32_t>(id));
    }
    if (model_.unknown < 0) fail("has no unknown piece");
    const auto missing = std::find(model_.byte_ids.begin(), model_.byte_ids.end(), -1) - model_.byte_ids.begin();
    if (missing < std::ssize(model_.byte_ids))
      fail(fmt::format("has byte_fallback, but no piece '<0x{:02X}>'", missing));
  }

  void take_byte(const std::string& text, int32_t id) {
    int byte = 0;
    while (byte < 256 && text != fmt::format("<0x{:02X}>", byte)) ++byte;
    if (byte == 256) fail(fmt::format("has a byte piece '{}', which is none", text));
    if (!model_.byte_fallback) fail(fmt::format("has the byte piece '{}', but no byte_fallback", text));
    model_.byte_ids[static_cast<size_t>(byte)] = id;
  }

  int32_t control(const std::string& text) const {
    for (size_t id = 0; id < model_.pieces.size(); ++id) {
      const SentencePiece& piece = model_.pieces[id];
      if (piece.kind == SentencePiece::kControl && piece.text == text) return static_cast<int32_t>(id);
    }
    return -1;
  }

  std::string_view file_;
  std::string source_;
  SentencePieceModel model_;
  uint64_t type_ = 1;
  std::string begin_piece_ = "<s>", end_piece_ = "</s>";
};

}  // namespace

SentencePieceModel parse_sentence_piece_model(std::string_view file, const std::string& source) {
  return ModelFileParser(file, source).parse();
}

}  // namespace fox::data
