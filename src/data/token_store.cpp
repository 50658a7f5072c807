#include "data/token_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
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
  explicit Impl(const fs::path& dir)
      : dtype(token_dtype(dir)),
        tokens(dir / "tokens", dtype),
        num_tokens(length_of(tokens, dir / "tokens")),
        offsets(read_offsets(dir / "doc_offsets", num_tokens)),
        fingerprint(read_fingerprint(dir)) {}

  std::string dtype;
  ZarrArray tokens;
  int64_t num_tokens;
  std::vector<int64_t> offsets;
  std::string fingerprint;
};

TokenStore::TokenStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TokenStore::~TokenStore() = default;
TokenStore::TokenStore(TokenStore&&) noexcept = default;

TokenStore TokenStore::open(const fs::path& dir) {
  if (!fs::exists(dir / ".zgroup")) {
    throw Error(fmt::format("{} is no token store: it has no .zgroup", dir.string()),
                "name a folder that `fox train` made");
  }
  return TokenStore(std::make_unique<Impl>(dir));
}

int64_t TokenStore::num_tokens() const { return impl_->num_tokens; }
int64_t TokenStore::num_documents() const { return static_cast<int64_t>(impl_->offsets.size()) - 1; }
std::span<const int64_t> TokenStore::doc_offsets() const { return impl_->offsets; }
const std::string& TokenStore::tokenizer_fingerprint() const { return impl_->fingerprint; }

void TokenStore::read(int64_t first, std::span<int32_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (impl_->dtype == "<u4") {
    impl_->tokens.read(std::span(&first, 1), std::span(&count, 1), out.data());
    return;
  }
  std::vector<uint16_t> narrow(out.size());
  impl_->tokens.read(std::span(&first, 1), std::span(&count, 1), narrow.data());
  std::copy(narrow.begin(), narrow.end(), out.begin());
}

}  // namespace fox::data
