#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fox::checkpoint {

// The header of a safetensors file, apart from files and tensors so that it can be fuzzed on its own. No torch here.

struct HeaderEntry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  ///< bytes after the header
};

struct Header {
  std::vector<HeaderEntry> tensors;  ///< in the order of their bytes
  std::map<std::string, std::string> metadata;
};

/// Parses the JSON text of a header whose file has `data_bytes` bytes behind it, and checks that the tensors tile these
/// bytes exactly. Throws fox::Error led by `where` and the tensor's name; allocates in proportion to the text only.
Header parse_header(std::string_view text, uint64_t data_bytes, const std::string& where);

}  // namespace fox::checkpoint
