// SentencePiece's own library is not linked: it brings a copy of protobuf under the names that libprotobuf and
// libtorch_cpu export too, and each would call into another's.
#include <optional>

#include "base/files.h"
#include "data/added_tokens.h"
#include "data/lender.h"
#include "data/sentence_piece_encoder.h"
#include "data/sentence_piece_normalizer.h"
#include "data/tokenizer_impl.h"
#include "data/word_cache.h"

namespace fox::data {

namespace {

std::string with_spaces(std::string_view piece) {
  std::string text;
  while (!piece.empty()) {
    const size_t place = piece.find(kSpaceSymbol);
    text += piece.substr(0, place);
    if (place == std::string_view::npos) break;
    text += ' ';
    piece.remove_prefix(place + kSpaceSymbol.size());
  }
  return text;
}

class SentencePieceTokenizer : public Tokenizer::Impl {
 public:
  SentencePieceTokenizer(std::string file, const std::string& source);

  void encode(std::string_view text, bool allow_special, const IdSink& sink) const override;
  std::string decode(std::span<const int32_t> ids, bool continues) const override;
  std::unique_ptr<Tokenizer::Decoder> decoder(bool continues) const override;
  /// Nowhere: scores of a unigram model are added from the beginning of a text on, and a text begins with a space.
  size_t separable_prefix(std::string_view) const override { return 0; }
  std::string fingerprint() const override { return bytes_checksum("sentencepiece" + file_).substr(0, 16); }
  std::string file() const override { return file_; }

  const SentencePieceModel& model() const { return model_; }

 private:
  /// What a thread needs while it encodes.
  struct Worker {
    WordCache words;  // of a BPE model
    std::vector<FoundPiece> pieces;
    std::vector<int32_t> word, ids;
    void flush(const IdSink& sink) {
      if (!ids.empty()) sink(ids);
      ids.clear();
    }
  };

  void encode_text(std::string_view text, Worker& worker, const IdSink& sink) const;
  void append_ids(std::vector<FoundPiece>& pieces, std::vector<int32_t>& ids) const;

  std::string file_;
  SentencePieceModel model_;
  SentencePieceNormalizer normalizer_;
  std::optional<UnigramEncoder> unigram_;  // one of the two
  std::optional<MergeEncoder> merges_;
  std::vector<AddedToken> control_;
  Lender<Worker> workers_;
};

SentencePieceTokenizer::SentencePieceTokenizer(std::string file, const std::string& source)
    : Impl(Kind::kSentencePiece),
      file_(std::move(file)),
      model_(parse_sentence_piece_model(file_, source)),
      normalizer_(model_, source) {
  if (model_.bpe) {
    merges_.emplace(model_, normalizer_.kept());
  } else {
    unigram_.emplace(model_);
  }
  for (const SentencePiece& piece : model_.pieces) {
    if (piece.kind == SentencePiece::kControl)
      control_.push_back({static_cast<int32_t>(tokens.size()), piece.text, /*special=*/true});
    tokens.push_back(piece.kind == SentencePiece::kControl   ? ""
                     : piece.kind == SentencePiece::kUnknown ? model_.unknown_surface
                                                             : with_spaces(piece.text));
  }
  for (size_t byte = 0; byte < model_.byte_ids.size(); ++byte)
    tokens[static_cast<size_t>(model_.byte_ids[byte])] = std::string(1, static_cast<char>(byte));
  end_of_text = model_.begin >= 0 ? model_.begin : model_.end;
}

/// Ids of the pieces: bytes for unknown ones where there are bytes, else one id for those that stand together.
void SentencePieceTokenizer::append_ids(std::vector<FoundPiece>& pieces, std::vector<int32_t>& ids) const {
  for (const FoundPiece& piece : pieces) {
    if (piece.id != model_.unknown) {
      ids.push_back(piece.id);
    } else if (model_.byte_fallback) {
      for (const char byte : piece.text) ids.push_back(model_.byte_ids[static_cast<uint8_t>(byte)]);
    } else if (ids.empty() || ids.back() != model_.unknown) {
      ids.push_back(model_.unknown);
    }
  }
  pieces.clear();
}

void SentencePieceTokenizer::encode_text(std::string_view text, Worker& worker, const IdSink& sink) const {
  const std::string normalized = normalizer_(text);
  if (unigram_) {
    unigram_->encode(normalized, worker.pieces);
    append_ids(worker.pieces, worker.ids);
    return worker.flush(sink);
  }
  for (std::string_view rest = normalized; !rest.empty();) {
    const std::string_view word = rest.substr(0, merges_->word_end(rest));
    rest.remove_prefix(word.size());
    worker.words.append(word, worker.ids, [&](std::string_view unknown, std::vector<int32_t>& ids) {
      merges_->encode(unknown, worker.pieces);
      append_ids(worker.pieces, ids);
    });
    if (worker.ids.size() >= kIdsAtATime) worker.flush(sink);
  }
  worker.flush(sink);
}

void SentencePieceTokenizer::encode(std::string_view text, bool allow_special, const IdSink& sink) const {
  workers_.lend([] { return std::make_unique<Worker>(); },
                [&](Worker& worker) {
                  split_at_tokens(
                      text, control_, allow_special, [&](std::string_view part) { encode_text(part, worker, sink); },
                      [&](int32_t id) { worker.ids.push_back(id); });
                  worker.flush(sink);
                });
}

/// Takes away the space that was put before the text, or all that it begins with where a text can begin with none.
class SentencePieceDecoder : public Tokenizer::Decoder {
 public:
  SentencePieceDecoder(const SentencePieceTokenizer& tokenizer, bool continues)
      : tokenizer_(tokenizer), at_begin_(!continues) {
    const SentencePieceRules& rules = tokenizer.model().rules;
    all_ = rules.remove_extra_whitespaces;
    any_ = all_ || rules.add_dummy_prefix;
  }

  std::string push(int32_t id) override {
    std::string_view bytes = tokenizer_.bytes_of(id);
    const SentencePiece& piece = tokenizer_.model().pieces[static_cast<size_t>(id)];
    const bool has_space = piece.in_text() && piece.text.starts_with(kSpaceSymbol);
    if (at_begin_ && any_ && has_space) {
      bytes.remove_prefix(1);
      at_begin_ = all_;
    }
    if (!bytes.empty()) at_begin_ = false;
    return std::string(bytes);
  }

 private:
  const SentencePieceTokenizer& tokenizer_;
  bool at_begin_, all_, any_;
};

std::string SentencePieceTokenizer::decode(std::span<const int32_t> ids, bool continues) const {
  SentencePieceDecoder decoder(*this, continues);
  std::string text;
  for (const int32_t id : ids) text += decoder.push(id);
  return text;
}

std::unique_ptr<Tokenizer::Decoder> SentencePieceTokenizer::decoder(bool continues) const {
  return std::make_unique<SentencePieceDecoder>(*this, continues);
}

}  // namespace

std::unique_ptr<Tokenizer::Impl> make_sentence_piece(std::string file, const std::string& source) {
  return std::make_unique<SentencePieceTokenizer>(std::move(file), source);
}

}  // namespace fox::data
