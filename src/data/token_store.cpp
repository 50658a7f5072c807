#include "data/token_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

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

std::vector<int64_t> read_offsets(const fs::path& dir, int64_t num_tokens) {
  const ZarrArray array(dir, "<i8");
  const int64_t size = length_of(array, dir);
  const auto fail = [&](const std::string& problem) {
    throw Error(fmt::format("{} {}", dir.string(), problem), kRebuild);
  };
  if (size < 1) fail("is empty");
  std::vector<int64_t> offsets;
  // A chunk at a time: a damaged shape shows as a missing chunk before it makes us allocate what it claims.
  for (int64_t first = 0; first < size;) {
    const int64_t count = std::min(size - first, array.meta().chunks[0]);
    std::vector<int64_t> part(static_cast<size_t>(count));
    array.read(std::span(&first, 1), std::span(&count, 1), part.data());
    offsets.insert(offsets.end(), part.begin(), part.end());
    first += count;
  }
  if (offsets.front() != 0 || !std::is_sorted(offsets.begin(), offsets.end())) fail("does not rise from 0");
  if (offsets.back() != num_tokens)
    fail(fmt::format("ends at {}, but there are {} tokens", offsets.back(), num_tokens));
  return offsets;
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
  virtual void read(int64_t first, std::span<int32_t> out) const = 0;

  int64_t num_tokens = 0;
  std::vector<int64_t> offsets;
  std::string fingerprint;
};

namespace {

/// The layout that build_token_store writes.
struct Group : TokenStore::Impl {
  explicit Group(const fs::path& dir) : dtype(token_dtype(dir)), tokens(dir / "tokens", dtype) {
    num_tokens = length_of(tokens, dir / "tokens");
    offsets = read_offsets(dir / "doc_offsets", num_tokens);
    fingerprint = read_fingerprint(dir);
  }

  void read(int64_t first, std::span<int32_t> out) const override {
    const auto count = static_cast<int64_t>(out.size());
    if (dtype == "<u4") return tokens.read(std::span(&first, 1), std::span(&count, 1), out.data());
    std::vector<uint16_t> narrow(out.size());
    tokens.read(std::span(&first, 1), std::span(&count, 1), narrow.data());
    std::copy(narrow.begin(), narrow.end(), out.begin());
  }

  std::string dtype;
  ZarrArray tokens;
};

/// LongCrawl64's rows, one after another.
struct Rows : TokenStore::Impl {
  explicit Rows(const fs::path& dir) : data(dir) {
    num_tokens = data.num_tokens();
    for (int64_t row = 0; row <= data.num_documents(); ++row) offsets.push_back(row * data.document_tokens());
    fingerprint = Tokenizer::gpt2_json().fingerprint();
  }

  void read(int64_t first, std::span<int32_t> out) const override {
    const int64_t width = data.document_tokens();
    std::vector<uint16_t> row;
    for (size_t done = 0; done < out.size(); done += row.size()) {
      const int64_t at = first + static_cast<int64_t>(done);
      row.resize(std::min(static_cast<size_t>(width - at % width), out.size() - done));
      data.read(at / width, 1, at % width, static_cast<int64_t>(row.size()), row.data());
      std::copy(row.begin(), row.end(), out.begin() + static_cast<ptrdiff_t>(done));
    }
  }

  LongCrawl64 data;
};

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
int64_t TokenStore::num_documents() const { return static_cast<int64_t>(impl_->offsets.size()) - 1; }
std::span<const int64_t> TokenStore::doc_offsets() const { return impl_->offsets; }
const std::string& TokenStore::tokenizer_fingerprint() const { return impl_->fingerprint; }

void TokenStore::read(int64_t first, std::span<int32_t> out) const { impl_->read(first, out); }

}  // namespace fox::data
