#include "data/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "data/bpe.h"
#include "data/byte_alphabet.h"
#include "data/gpt2_merges.h"
#include "data/json_escape.h"
#include "data/pre_tokenizer.h"
#include "data/tokenizer_json.h"

namespace fox::data {

namespace {

using Sink = std::function<void(std::span<const int32_t>)>;

constexpr int64_t kGpt2Merges = 50000;
/// Ids that are gathered before the sink sees them.
constexpr size_t kPiece = 1 << 14;

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

}  // namespace

struct Tokenizer::Impl {
  Impl(TokenizerSpec the_spec, std::string the_json)
      : spec(std::move(the_spec)),
        json(std::move(the_json)),
        pre_tokenizer(spec.patterns),
        bpe(byte_ids(spec), spec.merges) {
    if (spec.ignore_merges) {
      for (size_t id = 0; id < spec.tokens.size(); ++id) whole_words.emplace(spec.tokens[id], static_cast<int32_t>(id));
    }
    for (const AddedToken& token : spec.added) {
      if (!token.special) spec.tokens[token.id] = token.content;
    }
  }

  TokenizerSpec spec;
  std::string json;  // as it was read; empty for the one that is built in
  PreTokenizer pre_tokenizer;
  BytePairEncoder bpe;
  std::unordered_map<std::string, int32_t> whole_words;

  /// What a thread needs while it encodes. Threads lend and return them, so that each finds a warm cache of words.
  struct Worker {
    explicit Worker(const PreTokenizer& pre_tokenizer) : words(pre_tokenizer) {}
    PreTokenizer::Scratch words;
    BytePairEncoder::Scratch bpe;
    std::vector<int32_t> ids;
  };
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Worker>> idle;

  std::unique_ptr<Worker> borrow() const {
    const std::lock_guard lock(mutex);
    if (idle.empty()) return std::make_unique<Worker>(pre_tokenizer);
    auto worker = std::move(idle.back());
    idle.pop_back();
    return worker;
  }
  void give_back(std::unique_ptr<Worker> worker) const {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(worker));
  }

  void encode_text(std::string_view text, Worker& worker, const Sink& sink) const {
    pre_tokenizer.split(text, worker.words, [&](std::string_view word) {
      const auto whole = spec.ignore_merges ? whole_words.find(std::string(word)) : whole_words.end();
      if (whole != whole_words.end()) {
        worker.ids.push_back(whole->second);
      } else {
        bpe.encode(word, worker.bpe, worker.ids);
      }
      if (worker.ids.size() >= kPiece) flush(worker, sink);
    });
  }

  /// Text as the merges see it; `buffer` keeps it where it must be written first.
  std::string_view prepared(std::string_view text, std::string& buffer) const {
    if (!spec.json_escaped) return text;
    append_json_escaped(text, buffer);
    return buffer;
  }

  static void flush(Worker& worker, const Sink& sink) {
    if (!worker.ids.empty()) sink(worker.ids);
    worker.ids.clear();
  }

  /// Added tokens are found first, the leftmost and then the longest, and what lies between them is text.
  void encode(std::string_view text, bool allow_special, Worker& worker, const Sink& sink) const {
    struct Found {
      const AddedToken* token;
      size_t at;
    };
    std::vector<Found> candidates;
    for (const AddedToken& token : spec.added) {
      if (!token.special || allow_special) candidates.push_back({&token, text.find(token.content)});
    }
    size_t done = 0;
    for (;;) {
      const auto first = std::min_element(candidates.begin(), candidates.end(), [](const Found& a, const Found& b) {
        return a.at != b.at ? a.at < b.at : a.token->content.size() > b.token->content.size();
      });
      if (first == candidates.end() || first->at == std::string_view::npos) break;
      encode_text(text.substr(done, first->at - done), worker, sink);
      worker.ids.push_back(first->token->id);
      done = first->at + first->token->content.size();
      for (Found& candidate : candidates) {
        if (candidate.at < done) candidate.at = text.find(candidate.token->content, done);
      }
    }
    encode_text(text.substr(done), worker, sink);
    flush(worker, sink);
  }
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::gpt2(int64_t num_merges) {
  if (num_merges < 0 || num_merges > kGpt2Merges) {
    throw Error(fmt::format("GPT-2 has {} merges, not {}", kGpt2Merges, num_merges),
                "choose a number from 0 (raw bytes) to 50000");
  }
  return Tokenizer(std::make_unique<Impl>(gpt2_spec(num_merges), ""));
}

Tokenizer Tokenizer::gpt2_json() {
  TokenizerSpec spec = gpt2_spec(kGpt2Merges);
  spec.json_escaped = true;
  return Tokenizer(std::make_unique<Impl>(std::move(spec), ""));
}

Tokenizer Tokenizer::load(const std::filesystem::path& tokenizer_json) {
  std::string text = read_file(tokenizer_json);
  TokenizerSpec spec = parse_tokenizer_json(text, tokenizer_json.string());
  try {
    return Tokenizer(std::make_unique<Impl>(std::move(spec), std::move(text)));
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", tokenizer_json.string(), error.what()), error.hint());
  }
}

void Tokenizer::save(const std::filesystem::path& tokenizer_json) const {
  write_file_atomically(tokenizer_json, impl_->json.empty() ? to_tokenizer_json(impl_->spec) : impl_->json);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool allow_special) const {
  std::vector<int32_t> all;
  encode(
      text, [&](std::span<const int32_t> ids) { all.insert(all.end(), ids.begin(), ids.end()); }, allow_special);
  return all;
}

void Tokenizer::encode(std::string_view text, const Sink& sink, bool allow_special) const {
  auto worker = impl_->borrow();
  std::string escaped;
  impl_->encode(impl_->prepared(text, escaped), allow_special, *worker, sink);
  impl_->give_back(std::move(worker));
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) bytes += bytes_of(id);
  return json_escaped() ? json_unescaped(bytes) : bytes;
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw Error(fmt::format("token id {} is outside the tokenizer's vocabulary of {}", id, vocab_size()),
                "model and tokenizer are not of one training");
  }
  return impl_->spec.tokens[id];
}

bool Tokenizer::json_escaped() const { return impl_->spec.json_escaped; }

size_t Tokenizer::separable_prefix(std::string_view text) const {
  const TokenizerSpec& spec = impl_->spec;
  const bool known = spec.patterns.size() == 1 && spec.patterns[0] == kGpt2Pattern;
  if (!known || std::any_of(spec.added.begin(), spec.added.end(), [](const auto& token) { return !token.special; }))
    return 0;
  // No word of GPT-2's pattern holds a space behind what is no space. Escaped, all other spaces are letters.
  for (size_t i = text.size(); i-- > 1;) {
    const bool begins_space = text[i] == ' ' || (text[i] == '\n' && !spec.json_escaped);
    if (begins_space && !may_end_space(text.substr(0, i))) return i;
  }
  return 0;
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(impl_->spec.tokens.size()); }
int32_t Tokenizer::end_of_text() const { return impl_->spec.end_of_text; }

std::string Tokenizer::fingerprint() const {
  const TokenizerSpec& spec = impl_->spec;
  std::string all;
  // Lengths before contents: no two specifications may run together to the same bytes.
  const auto put_number = [&](int64_t number) { all += fmt::format("{} ", number); };
  const auto put = [&](std::string_view text) {
    put_number(static_cast<int64_t>(text.size()));
    all += text;
  };
  for (const auto& token : spec.tokens) put(token);
  for (const Merge& merge : spec.merges) {
    for (const int32_t id : {merge.left, merge.right, merge.merged}) put_number(id);
  }
  for (const AddedToken& token : spec.added) {
    put_number(token.id);
    put(token.content);
    put_number(token.special);
  }
  for (const auto& pattern : spec.patterns) put(pattern);
  put_number(spec.ignore_merges);
  put_number(spec.end_of_text);
  if (spec.json_escaped) put("json_escaped");
  return bytes_checksum(all).substr(0, 16);
}

}  // namespace fox::data
