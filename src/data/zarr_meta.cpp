#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/zarr.h"

namespace fox::data {

namespace {

using nlohmann::json;

/// What Blosc can hold in one buffer (BLOSC_MAX_BUFFERSIZE).
constexpr int64_t kMostChunkBytes = (int64_t{1} << 31) - 1 - 16;
constexpr size_t kMostDimensions = 32;

class MetaParser {
 public:
  MetaParser(std::string_view text, std::string source) : source_(std::move(source)) {
    try {
      root_ = json::parse(text);
    } catch (const json::parse_error& error) {
      throw Error(fmt::format("{} is not JSON (byte {})", source_, error.byte),
                  "the file may be damaged: fetch or make it again");
    }
    if (!root_.is_object())
      throw Error(fmt::format("{} is no JSON object", source_), "it should describe a zarr v2 array");
  }

  ZarrMeta parse() {
    expect("zarr_format", 2);
    expect("order", "C");
    if (root_.contains("filters") && !root_["filters"].is_null() && root_["filters"] != json::array()) {
      fail("filters", "must be null");
    }
    ZarrMeta meta;
    meta.shape = dimensions("shape", 0);
    meta.chunks = dimensions("chunks", 1);
    if (meta.shape.size() != meta.chunks.size()) {
      fail("chunks", fmt::format("must have {} numbers, as shape has", meta.shape.size()));
    }
    meta.dtype = dtype();
    meta.blosc = compressor();
    if (root_.contains("dimension_separator")) {
      const json& separator = root_["dimension_separator"];
      if (separator != "." && separator != "/") fail("dimension_separator", "must be \".\" or \"/\"");
      meta.separator = separator.get<std::string>()[0];
    }
    check_sizes(meta);
    return meta;
  }

 private:
  [[noreturn]] void fail(const std::string& key, const std::string& problem) const {
    std::string found = "it is missing";
    if (const auto it = root_.find(key); it != root_.end()) {
      found = it->dump(-1, ' ', false, json::error_handler_t::replace);
      found = "not " + (found.size() <= 60 ? found : found.substr(0, 57) + "...");
    }
    throw Error(fmt::format("{}: '{}' {}, {}", source_, key, problem, found),
                "fox reads zarr v2 arrays in C order, raw or with Blosc");
  }

  void expect(const std::string& key, const json& value) const {
    if (!root_.contains(key) || root_.at(key) != value) fail(key, "must be " + value.dump());
  }

  std::vector<int64_t> dimensions(const std::string& key, int64_t least) const {
    const std::string problem =
        fmt::format("must be a list of 1 to {} whole numbers of at least {}", kMostDimensions, least);
    const auto it = root_.find(key);
    if (it == root_.end() || !it->is_array() || it->empty() || it->size() > kMostDimensions) fail(key, problem);
    std::vector<int64_t> numbers;
    for (const json& number : *it) {
      // Beyond 2^62 the arithmetic of offsets would overflow.
      if (!number.is_number_integer() || number < least || number > (int64_t{1} << 62)) fail(key, problem);
      numbers.push_back(number.get<int64_t>());
    }
    return numbers;
  }

  std::string dtype() const {
    const std::string problem = "must be a little-endian number type such as \"<u2\"";
    const auto it = root_.find("dtype");
    const auto* text = it == root_.end() ? nullptr : it->get_ptr<const std::string*>();
    if (!text || text->size() != 3) fail("dtype", problem);
    const char order = (*text)[0], kind = (*text)[1], size = (*text)[2];
    const bool sized = size == '1' || size == '2' || size == '4' || size == '8';
    if (!sized || (kind != 'u' && kind != 'i' && kind != 'f') || order != (size == '1' ? '|' : '<'))
      fail("dtype", problem);
    return *text;
  }

  std::optional<ZarrMeta::Blosc> compressor() const {
    if (!root_.contains("compressor")) fail("compressor", "must be null or Blosc's");
    const json& part = root_.at("compressor");
    if (part.is_null()) return std::nullopt;
    if (!part.is_object() || part.value("id", json()) != "blosc") fail("compressor", "must be null or Blosc's");
    // A chunk tells how it was compressed: the settings only matter to a writer.
    return ZarrMeta::Blosc{};
  }

  void check_sizes(const ZarrMeta& meta) const {
    unsigned __int128 elements = 1, bytes = meta.item_bytes();
    for (size_t d = 0; d < meta.shape.size(); ++d) {
      elements *= static_cast<uint64_t>(meta.shape[d]);
      bytes *= static_cast<uint64_t>(meta.chunks[d]);
      if (elements > (uint64_t{1} << 60)) fail("shape", "has more elements than a disk can hold");
      if (bytes > static_cast<uint64_t>(kMostChunkBytes))
        fail("chunks", fmt::format("must stay below {} bytes a chunk", kMostChunkBytes));
    }
  }

  json root_;
  std::string source_;
};

}  // namespace

int64_t ZarrMeta::item_bytes() const { return dtype[2] - '0'; }

int64_t ZarrMeta::chunk_bytes() const {
  int64_t bytes = item_bytes();
  for (const int64_t size : chunks) bytes *= size;
  return bytes;
}

int64_t ZarrMeta::grid(size_t d) const { return (shape[d] + chunks[d] - 1) / chunks[d]; }

ZarrMeta ZarrMeta::parse(std::string_view text, const std::string& source) { return MetaParser(text, source).parse(); }

std::string ZarrMeta::to_json() const {
  nlohmann::ordered_json root = {{"zarr_format", 2},      {"shape", shape},  {"chunks", chunks}, {"dtype", dtype},
                                 {"compressor", nullptr}, {"fill_value", 0}, {"order", "C"},     {"filters", nullptr}};
  if (separator != '.') root["dimension_separator"] = std::string(1, separator);
  if (blosc) {
    root["compressor"] = {{"id", "blosc"},
                          {"cname", blosc->cname},
                          {"clevel", blosc->clevel},
                          {"shuffle", blosc->shuffle},
                          {"blocksize", blosc->blocksize}};
  }
  return root.dump(2) + "\n";
}

}  // namespace fox::data
