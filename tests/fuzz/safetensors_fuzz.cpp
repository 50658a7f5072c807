// libFuzzer: whatever stands where the header of a safetensors file should be, parsing it ends in a header that tiles
// the data or in a fox::Error.
//
//     cmake -S . -B build-fuzz -G Ninja -DFOX_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++   (Debian: libclang-rt-14-dev)
//     ninja -C build-fuzz safetensors_fuzz && build-fuzz/safetensors_fuzz -max_total_time=300
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "checkpoint/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) return 0;
  uint64_t data_bytes = 0;  // how much data the file claims to have behind its header
  std::memcpy(&data_bytes, data, 8);
  const std::string_view text(reinterpret_cast<const char*>(data) + 8, size - 8);
  try {
    const auto header = fox::checkpoint::parse_header(text, data_bytes, "fuzz");
    uint64_t next = 0;
    for (const auto& entry : header.tensors) {
      if (entry.begin != next || entry.end < entry.begin) std::abort();
      next = entry.end;
      for (const int64_t length : entry.shape) {
        if (length < 0) std::abort();
      }
    }
    if (next != data_bytes) std::abort();
  } catch (const fox::Error& error) {
    if (std::string_view(error.what()).find('\n') != std::string_view::npos) std::abort();  // one line for the user
  }
  return 0;
}
