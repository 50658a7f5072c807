#include "checkpoint/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "base/error.h"

namespace fox::checkpoint {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 8;  // a header needs 3; a million brackets would exhaust the stack of whoever walks them

const char* const kDamaged = "the file is damaged or incomplete: fetch or save it again";

[[noreturn]] void fail(const std::string& where, const std::string& problem) {
  throw Error(fmt::format("{} {}", where, problem), kDamaged);
}

// A name as a message shows it: a line break or a quote in it must not break the message.
std::string shown(const std::string& name) {
  const auto text = json(name).dump(-1, ' ', false, json::error_handler_t::replace);
  return "'" + text.substr(1, text.size() - 2) + "'";
}

// 0 for a dtype that the format does not have.
uint64_t bytes_of_dtype(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 1;
  return 0;
}

// JSON keeps the last of two equal keys without a word; here the same name twice is damage.
json parse_without_duplicates(std::string_view text, const std::string& where) {
  std::vector<std::set<std::string>> open;
  std::string duplicate;
  bool too_deep = false;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    too_deep = too_deep || depth > kMaxDepth;
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second) {
      duplicate = parsed.get<std::string>();
    }
    return depth <= kMaxDepth;
  };
  json parsed;
  try {
    parsed = json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& error) {
    fail(where + ":", fmt::format("the header is not JSON (byte {})", error.byte));
  } catch (const json::out_of_range&) {
    fail(where + ":", "the header holds a number that is out of range");
  }
  if (too_deep) fail(where + ":", "the header is nested too deeply");
  if (!duplicate.empty()) fail(where + ":", fmt::format("tensor {} appears twice in the header", shown(duplicate)));
  if (!parsed.is_object()) fail(where + ":", "the header is not a JSON object");
  return parsed;
}

const json& member(const json& object, const char* key, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end()) fail(where, fmt::format("has no {}", key));
  return *it;
}

uint64_t unsigned_number(const json& value, const char* what, const std::string& where) {
  if (!value.is_number_unsigned()) fail(where, fmt::format("has {} that are not whole numbers from 0", what));
  return value.get<uint64_t>();
}

// The number of bytes a tensor needs; sizes whose product overflows are refused.
uint64_t bytes_needed(const HeaderEntry& entry, const std::string& where) {
  const uint64_t item = bytes_of_dtype(entry.dtype);
  if (item == 0) fail(where, fmt::format("has the unknown dtype {}", shown(entry.dtype)));
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  // A zero anywhere makes the product 0, but the other sizes must still not overflow where ATen multiplies them.
  uint64_t bytes = item;
  for (const int64_t size : entry.shape) {
    const uint64_t factor = std::max<uint64_t>(static_cast<uint64_t>(size), 1);
    if (bytes > kMax / factor) fail(where, "has a shape whose number of bytes overflows");
    bytes *= factor;
  }
  return std::find(entry.shape.begin(), entry.shape.end(), 0) == entry.shape.end() ? bytes : 0;
}

HeaderEntry parse_entry(const std::string& name, const json& value, uint64_t data_bytes, const std::string& file) {
  const auto where = fmt::format("{}: tensor {}", file, shown(name));
  if (!value.is_object()) fail(where, "is not described by a JSON object");
  HeaderEntry entry{.name = name, .dtype = "", .shape = {}};
  const auto& dtype = member(value, "dtype", where);
  if (!dtype.is_string()) fail(where, "has a dtype that is not a string");
  entry.dtype = dtype.get<std::string>();
  const auto& shape = member(value, "shape", where);
  if (!shape.is_array()) fail(where, "has a shape that is not a list");
  for (const auto& size : shape) {
    const uint64_t n = unsigned_number(size, "sizes", where);
    if (n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fail(where, "has a shape whose number of bytes overflows");
    entry.shape.push_back(static_cast<int64_t>(n));
  }
  const auto& offsets = member(value, "data_offsets", where);
  if (!offsets.is_array() || offsets.size() != 2) fail(where, "has data_offsets that are not a pair");
  entry.begin = unsigned_number(offsets[0], "data_offsets", where);
  entry.end = unsigned_number(offsets[1], "data_offsets", where);
  if (entry.begin > entry.end)
    fail(where, fmt::format("ends at byte {} before it begins at {}", entry.end, entry.begin));
  if (entry.end > data_bytes) {
    fail(where, fmt::format("runs to byte {} of data, but the file has only {}", entry.end, data_bytes));
  }
  const uint64_t needed = bytes_needed(entry, where);
  if (needed != entry.end - entry.begin) {
    fail(where, fmt::format("needs {} bytes for its shape and dtype, but its data_offsets hold {}", needed,
                            entry.end - entry.begin));
  }
  return entry;
}

void check_tiling(const std::vector<HeaderEntry>& entries, uint64_t data_bytes, const std::string& where) {
  uint64_t next = 0;
  for (const auto& entry : entries) {
    if (entry.begin < next) fail(where + ":", fmt::format("tensor {} overlaps the one before it", shown(entry.name)));
    if (entry.begin > next) {
      fail(where + ":",
           fmt::format("{} bytes before tensor {} belong to no tensor", entry.begin - next, shown(entry.name)));
    }
    next = entry.end;
  }
  if (next != data_bytes) fail(where + ":", fmt::format("the last {} bytes belong to no tensor", data_bytes - next));
}

}  // namespace

Header parse_header(std::string_view text, uint64_t data_bytes, const std::string& where) {
  const json parsed = parse_without_duplicates(text, where);
  Header header;
  for (const auto& [name, value] : parsed.items()) {
    if (name != "__metadata__") {
      header.tensors.push_back(parse_entry(name, value, data_bytes, where));
      continue;
    }
    if (!value.is_object()) fail(where + ":", "__metadata__ is not an object");
    for (const auto& [key, text_value] : value.items()) {
      if (!text_value.is_string()) fail(where + ":", fmt::format("__metadata__ {} is not a string", shown(key)));
      header.metadata.emplace(key, text_value.get<std::string>());
    }
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_tiling(header.tensors, data_bytes, where);
  return header;
}

}  // namespace fox::checkpoint
