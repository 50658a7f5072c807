#include "data/tokenizer.h"

#include <fmt/format.h>

#include <unordered_map>

#include "base/error.h"
#include "base/files.h"
#include "data/byte_alphabet.h"
#include "data/gpt2_merges.h"
#include "data/pre_tokenizer.h"
#include "data/tokenizer_impl.h"

namespace fox::data {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kGpt2Merges = 50000;
constexpr const char* kJsonName = "tokenizer.json";
constexpr const char* kSentencePieceName = "tokenizer.model";

TokenizerSpec gpt2_spec(int64_t num_merges) {
  TokenizerSpec spec;
  std::unordered_map<std::string, int32_t> id_of;
  const auto add = [&](std::string bytes) {
    const auto id = static_cast<int32_t>(spec.tokens.size());
    id_of.emplace(bytes, id);
    spec.tokens.push_back(std::move(bytes));
    return id;
  };
  for (int rank = 0; rank < 256; ++rank) add(std::string(1, static_cast<char>(byte_of_rank(rank))));
  std::string_view rest = gpt2_merges();
  const auto next_line = [&] {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(line.size() + 1);
    return line;
  };
  next_line();  // #version
  for (int64_t i = 0; i < num_merges; ++i) {
    const std::string_view line = next_line();
    const size_t space = line.find(' ');
    const std::string left = *from_alphabet(line.substr(0, space)), right = *from_alphabet(line.substr(space + 1));
    spec.merges.push_back({id_of.at(left), id_of.at(right), add(left + right)});
  }
  spec.end_of_text = add("");
  spec.added.push_back({spec.end_of_text, "<|endoftext|>", true});
  spec.patterns.emplace_back(kGpt2Pattern);
  return spec;
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::gpt2(int64_t num_merges) {
  if (num_merges < 0 || num_merges > kGpt2Merges) {
    throw Error(fmt::format("GPT-2 has {} merges, not {}", kGpt2Merges, num_merges),
                "choose a number from 0 (raw bytes) to 50000");
  }
  return Tokenizer(make_byte_level(gpt2_spec(num_merges), ""));
}

Tokenizer Tokenizer::gpt2_json() {
  TokenizerSpec spec = gpt2_spec(kGpt2Merges);
  spec.json_escaped = true;
  return Tokenizer(make_byte_level(std::move(spec), ""));
}

Tokenizer Tokenizer::load(const fs::path& file) {
  std::string content = read_file(file);
  if (file.extension() == ".model") return Tokenizer(make_sentence_piece(std::move(content), file.string()));
  TokenizerSpec spec = parse_tokenizer_json(content, file.string());
  try {
    return Tokenizer(make_byte_level(std::move(spec), std::move(content)));
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", file.string(), error.what()), error.hint());
  }
}

fs::path Tokenizer::find_in(const fs::path& dir) {
  for (const char* name : {kSentencePieceName, kJsonName}) {
    if (fs::exists(dir / name)) return dir / name;
  }
  return {};
}

void Tokenizer::save(const fs::path& file) const { write_file_atomically(file, impl_->file()); }

void Tokenizer::save_in(const fs::path& dir) const {
  save(dir / (impl_->kind == Impl::Kind::kSentencePiece ? kSentencePieceName : kJsonName));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool allow_special) const {
  std::vector<int32_t> all;
  encode(
      text, [&](std::span<const int32_t> ids) { all.insert(all.end(), ids.begin(), ids.end()); }, allow_special);
  return all;
}

void Tokenizer::encode(std::string_view text, const IdSink& sink, bool allow_special) const {
  impl_->encode(text, allow_special, sink);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool continues) const {
  return impl_->decode(ids, continues);
}

std::unique_ptr<Tokenizer::Decoder> Tokenizer::decoder(bool continues) const { return impl_->decoder(continues); }

std::string_view Tokenizer::bytes_of(int32_t id) const { return impl_->bytes_of(id); }

size_t Tokenizer::separable_prefix(std::string_view text) const { return impl_->separable_prefix(text); }

int64_t Tokenizer::vocab_size() const { return std::ssize(impl_->tokens); }
int32_t Tokenizer::end_of_text() const { return impl_->end_of_text; }
std::string Tokenizer::fingerprint() const { return impl_->fingerprint(); }

std::string_view Tokenizer::Impl::bytes_of(int32_t id) const {
  if (id >= 0 && id < std::ssize(tokens)) return tokens[static_cast<size_t>(id)];
  throw Error(fmt::format("token id {} is outside the tokenizer's vocabulary of {}", id, tokens.size()),
              "model and tokenizer are not of one training");
}

}  // namespace fox::data
