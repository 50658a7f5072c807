#include "data/token_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/error.h"
#include "base/files.h"
#include "data/longcrawl64.h"
#include "data/zarr.h"

namespace fox::data {

namespace fs = std::filesystem;

namespace {

constexpr const char* kRebuild = "remove the folder, and it is made again";

std::string token_dtype(const fs::path& dir) {
  const fs::path file = dir / "tokens" / ".zarray";
  const auto meta = ZarrMeta::parse(read_file(file), file.string());
  if (meta.dtype != "<u2" && meta.dtype != "<u4") {
    throw Error(fmt::format("{}: 'dtype' must be \"<u2\" or \"<u4\", not \"{}\"", file.string(), meta.dtype), kRebuild);
  }
  return meta.dtype;
}

/// One dimension, or an error.
int64_t length_of(const ZarrArray& array, const fs::path& dir) {
  if (array.meta().shape.size() == 1) return array.meta().shape[0];
  throw Error(
      fmt::format("{}/.zarray: 'shape' must have one dimension, not {}", dir.string(), array.meta().shape.size()),
      kRebuild);
}

std::string read_fingerprint(const fs::path& dir) {
  const fs::path file = dir / ".zattrs";
  const auto root = nlohmann::json::parse(read_file(file), nullptr, false);
  if (!root.is_object() || !root.contains("tokenizer") || !root["tokenizer"].is_string()) {
    throw Error(fmt::format("{} does not say which tokenizer the tokens are of", file.string()), kRebuild);
  }
  return root["tokenizer"].get<std::string>();
}

}  // namespace

struct TokenStore::Impl {
  virtual ~Impl() = default;
  /// Tokens as they are stored: uint32 when `wide`, else uint16.
  virtual void read(int64_t first, int64_t count, void* out) const = 0;
  virtual void read_doc_offsets(int64_t first, std::span<int64_t> out) const = 0;
  virtual void check_complete(int64_t tokens) const = 0;

  int64_t num_tokens = 0, num_documents = 0;
  bool wide = false;
  std::string fingerprint;
};

namespace {

/// The layout that build_token_store writes.
struct Group : TokenStore::Impl {
  explicit Group(const fs::path& dir)
      : tokens(dir / "tokens", token_dtype(dir)),
        offsets(dir / "doc_offsets", "<i8", kOffsetBytes),
        offsets_dir(dir / "doc_offsets") {
    num_tokens = length_of(tokens, dir / "tokens");
    wide = tokens.meta().dtype == "<u4";
    fingerprint = read_fingerprint(dir);
    num_documents = length_of(offsets, offsets_dir) - 1;
    if (num_documents < 0) throw Error(fmt::format("{} is empty", offsets_dir.string()), kRebuild);
    int64_t begin, end;
    read_doc_offsets(0, std::span(&begin, 1));
    read_doc_offsets(num_documents, std::span(&end, 1));
    if (begin != 0) throw Error(fmt::format("{} does not rise from 0", offsets_dir.string()), kRebuild);
    if (end == num_tokens) return;
    throw Error(fmt::format("{} ends at {}, but there are {} tokens", offsets_dir.string(), end, num_tokens), kRebuild);
  }

  void read(int64_t first, int64_t count, void* out) const override {
    tokens.read(std::span(&first, 1), std::span(&count, 1), out);
  }

  void read_doc_offsets(int64_t first, std::span<int64_t> out) const override {
    const int64_t count = std::ssize(out);
    offsets.read(std::span(&first, 1), std::span(&count, 1), out.data());
    if (out.empty() || (out.front() >= 0 && std::is_sorted(out.begin(), out.end()) && out.back() <= num_tokens)) return;
    throw Error(fmt::format("{} does not rise from 0 to {} between its elements {} and {}", offsets_dir.string(),
                            num_tokens, first, first + count - 1),
                kRebuild);
  }

  void check_complete(int64_t count) const override {
    const int64_t first = 0;
    tokens.check_complete(std::span(&first, 1), std::span(&count, 1));
  }

  static constexpr int64_t kOffsetBytes = 4 << 20;  // of decoded offsets that are kept
  ZarrArray tokens, offsets;
  fs::path offsets_dir;
};

/// LongCrawl64's rows, one after another.
struct Rows : TokenStore::Impl {
  explicit Rows(const fs::path& dir) : data(dir) {
    num_tokens = data.num_tokens();
    num_documents = data.num_documents();
    fingerprint = Tokenizer::gpt2_json().fingerprint();
  }

  void read(int64_t first, int64_t count, void* out) const override {
    const int64_t width = data.document_tokens();
    for (int64_t done = 0; done < count;) {
      const int64_t at = first + done, part = std::min(width - at % width, count - done);
      data.read(at / width, 1, at % width, part, static_cast<uint16_t*>(out) + done);
      done += part;
    }
  }

  void read_doc_offsets(int64_t first, std::span<int64_t> out) const override {
    if (first < 0 || first > num_documents + 1 - std::ssize(out)) throw std::out_of_range("no such documents");
    for (int64_t& offset : out) offset = first++ * data.document_tokens();
  }

  void check_complete(int64_t tokens) const override {
    data.check_complete((tokens + data.document_tokens() - 1) / data.document_tokens(), 0, data.document_tokens());
  }

  LongCrawl64 data;
};

template <typename Stored, typename Id>
void read_widened(const TokenStore::Impl& impl, int64_t first, std::span<Id> out) {
  const auto stored = std::make_unique_for_overwrite<Stored[]>(out.size());
  impl.read(first, std::ssize(out), stored.get());
  const Stored* from = stored.get();
  Id* to = out.data();
#pragma omp simd
  for (size_t i = 0; i < out.size(); ++i) to[i] = static_cast<Id>(from[i]);
}

template <typename Id>
void read_as(const TokenStore::Impl& impl, int64_t first, std::span<Id> out) {
  if (impl.wide) return read_widened<uint32_t>(impl, first, out);
  read_widened<uint16_t>(impl, first, out);
}

}  // namespace

TokenStore::TokenStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TokenStore::~TokenStore() = default;
TokenStore::TokenStore(TokenStore&&) noexcept = default;

bool TokenStore::is_store(const fs::path& dir) { return fs::exists(dir / ".zgroup") || is_longcrawl64(dir); }

TokenStore TokenStore::open(const fs::path& dir) {
  if (is_longcrawl64(dir)) return TokenStore(std::make_unique<Rows>(dir));
  if (!fs::exists(dir / ".zgroup")) {
    throw Error(fmt::format("{} is no token store: it has no .zgroup", dir.string()),
                "name a folder that `fox tokenize` or `fox train` made");
  }
  return TokenStore(std::make_unique<Group>(dir));
}

int64_t TokenStore::num_tokens() const { return impl_->num_tokens; }
int64_t TokenStore::num_documents() const { return impl_->num_documents; }
void TokenStore::read_doc_offsets(int64_t first, std::span<int64_t> out) const { impl_->read_doc_offsets(first, out); }
const std::string& TokenStore::tokenizer_fingerprint() const { return impl_->fingerprint; }

void TokenStore::check_complete(int64_t tokens) const { impl_->check_complete(tokens); }
void TokenStore::read(int64_t first, std::span<int32_t> out) const { read_as(*impl_, first, out); }
void TokenStore::read(int64_t first, std::span<int64_t> out) const { read_as(*impl_, first, out); }

}  // namespace fox::data
