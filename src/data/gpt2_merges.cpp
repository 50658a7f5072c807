#include "data/gpt2_merges.h"

#include <cstddef>

// Put there by cmake/embed.cmake: no table to parse at compile time, no path to find at run time.
extern "C" {
extern const char fox_embedded_gpt2_merges[];
extern const size_t fox_embedded_gpt2_merges_size;
}

namespace fox::data {

std::string_view gpt2_merges() { return {fox_embedded_gpt2_merges, fox_embedded_gpt2_merges_size}; }

}  // namespace fox::data
