#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "base/files.h"
#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/json_escape.h"
#include "data/lender.h"
#include "data/pre_tokenizer.h"
#include "data/tokenizer_impl.h"

namespace fox::data {

namespace {

std::array<int32_t, 256> byte_ids(const TokenizerSpec& spec) {
  std::array<int32_t, 256> ids{};
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (spec.tokens[id].size() == 1) ids[static_cast<uint8_t>(spec.tokens[id][0])] = static_cast<int32_t>(id);
  }
  return ids;
}

/// Whether the last character is white space; a true for invalid UTF-8 that looks like it does no harm.
bool may_end_space(std::string_view text) {
  if (static_cast<uint8_t>(text.back()) < 0x80) return std::string_view(" \t\n\v\f\r").find(text.back()) != text.npos;
  // U+0085, U+00A0, U+1680, U+2000-200A, U+2028, U+2029, U+202F, U+205F, U+3000
  constexpr std::string_view kTwoBytes[] = {"\xC2\x85", "\xC2\xA0"};
  constexpr std::string_view kThreeBytes[] = {"\xE1\x9A\x80", "\xE2\x80", "\xE2\x81\x9F", "\xE3\x80\x80"};
  const auto ends_with = [&](std::string_view end) {
    return text.substr(text.size() - std::min<size_t>(text.size(), 3)).find(end) != text.npos;
  };
  return std::any_of(std::begin(kTwoBytes), std::end(kTwoBytes), ends_with) ||
         std::any_of(std::begin(kThreeBytes), std::end(kThreeBytes), ends_with);
}

class ByteLevel : public Tokenizer::Impl {
 public:
  ByteLevel(TokenizerSpec spec, std::string json)
      : Impl(Kind::kByteLevel),
        spec_(std::move(spec)),
        json_(std::move(json)),
        pre_tokenizer_(spec_.patterns),
        bpe_(byte_ids(spec_), spec_.merges) {
    if (spec_.ignore_merges) {
      for (size_t id = 0; id < spec_.tokens.size(); ++id)
        whole_words_.emplace(spec_.tokens[id], static_cast<int32_t>(id));
    }
    end_of_text = spec_.end_of_text;
    tokens = spec_.tokens;
    for (const AddedToken& token : spec_.added) {
      if (!token.special) tokens[token.id] = token.content;
    }
  }

  void encode(std::string_view text, bool allow_special, const IdSink& sink) const override;
  std::string decode(std::span<const int32_t> ids, bool continues) const override;
  std::unique_ptr<Tokenizer::Decoder> decoder(bool continues) const override;
  size_t separable_prefix(std::string_view text) const override;
  std::string fingerprint() const override;
  std::string file() const override { return json_.empty() ? to_tokenizer_json(spec_) : json_; }

 private:
  /// What a thread needs while it encodes.
  struct Worker {
    explicit Worker(const PreTokenizer& pre_tokenizer) : words(pre_tokenizer) {}
    PreTokenizer::Scratch words;
    BytePairEncoder::Scratch bpe;
    std::vector<int32_t> ids;
    void flush(const IdSink& sink) {
      if (!ids.empty()) sink(ids);
      ids.clear();
    }
  };

  void encode_text(std::string_view text, Worker& worker, const IdSink& sink) const;

  TokenizerSpec spec_;
  std::string json_;  // as it was read; empty for the one that is built in
  PreTokenizer pre_tokenizer_;
  BytePairEncoder bpe_;
  std::unordered_map<std::string, int32_t> whole_words_;
  Lender<Worker> workers_;
};

void ByteLevel::encode_text(std::string_view text, Worker& worker, const IdSink& sink) const {
  pre_tokenizer_.split(text, worker.words, [&](std::string_view word) {
    const auto whole = spec_.ignore_merges ? whole_words_.find(std::string(word)) : whole_words_.end();
    if (whole != whole_words_.end()) {
      worker.ids.push_back(whole->second);
    } else {
      bpe_.encode(word, worker.bpe, worker.ids);
    }
    if (worker.ids.size() >= kIdsAtATime) worker.flush(sink);
  });
}

void ByteLevel::encode(std::string_view text, bool allow_special, const IdSink& sink) const {
  std::string escaped;
  if (spec_.json_escaped) append_json_escaped(text, escaped);
  workers_.lend([&] { return std::make_unique<Worker>(pre_tokenizer_); },
                [&](Worker& worker) {
                  split_at_tokens(
                      spec_.json_escaped ? escaped : text, spec_.added, allow_special,
                      [&](std::string_view part) { encode_text(part, worker, sink); },
                      [&](int32_t id) { worker.ids.push_back(id); });
                  worker.flush(sink);
                });
}

std::string ByteLevel::decode(std::span<const int32_t> ids, bool /*continues*/) const {
  std::string bytes;
  for (const int32_t id : ids) bytes += bytes_of(id);
  return spec_.json_escaped ? json_unescaped(bytes) : bytes;
}

class ByteLevelDecoder : public Tokenizer::Decoder {
 public:
  explicit ByteLevelDecoder(const ByteLevel& tokenizer) : tokenizer_(tokenizer) {}
  std::string push(int32_t id) override { return std::string(tokenizer_.bytes_of(id)); }

 private:
  const ByteLevel& tokenizer_;
};

class JsonDecoder : public Tokenizer::Decoder {
 public:
  explicit JsonDecoder(const ByteLevel& tokenizer) : tokenizer_(tokenizer) {}
  std::string push(int32_t id) override { return unescaper_.push(tokenizer_.bytes_of(id)); }
  std::string finish() override { return unescaper_.finish(); }

 private:
  const ByteLevel& tokenizer_;
  JsonUnescaper unescaper_;
};

std::unique_ptr<Tokenizer::Decoder> ByteLevel::decoder(bool /*continues*/) const {
  if (spec_.json_escaped) return std::make_unique<JsonDecoder>(*this);
  return std::make_unique<ByteLevelDecoder>(*this);
}

size_t ByteLevel::separable_prefix(std::string_view text) const {
  const bool known = spec_.patterns.size() == 1 && spec_.patterns[0] == kGpt2Pattern;
  if (!known || std::any_of(spec_.added.begin(), spec_.added.end(), [](const auto& token) { return !token.special; }))
    return 0;
  // No word of GPT-2's pattern holds a space behind what is no space. Escaped, all other spaces are letters.
  for (size_t i = text.size(); i-- > 1;) {
    const bool begins_space = text[i] == ' ' || (text[i] == '\n' && !spec_.json_escaped);
    if (begins_space && !may_end_space(text.substr(0, i))) return i;
  }
  return 0;
}

std::string ByteLevel::fingerprint() const {
  std::string all;
  // Lengths before contents: no two specifications may run together to the same bytes.
  const auto put_number = [&](int64_t number) { all += fmt::format("{} ", number); };
  const auto put = [&](std::string_view text) {
    put_number(static_cast<int64_t>(text.size()));
    all += text;
  };
  for (const auto& token : tokens) put(token);
  for (const Merge& merge : spec_.merges) {
    for (const int32_t id : {merge.left, merge.right, merge.merged}) put_number(id);
  }
  for (const AddedToken& token : spec_.added) {
    put_number(token.id);
    put(token.content);
    put_number(token.special);
  }
  for (const auto& pattern : spec_.patterns) put(pattern);
  put_number(spec_.ignore_merges);
  put_number(spec_.end_of_text);
  if (spec_.json_escaped) put("json_escaped");
  return bytes_checksum(all).substr(0, 16);
}

}  // namespace

std::unique_ptr<Tokenizer::Impl> make_byte_level(TokenizerSpec spec, std::string json) {
  return std::make_unique<ByteLevel>(std::move(spec), std::move(json));
}

}  // namespace fox::data
