#pragma once

#include <string_view>

namespace fox::data {

/// third_party/gpt2/vocab.bpe, which is part of the library: a `#version` line, then 50,000 lines "left right".
std::string_view gpt2_merges();

}  // namespace fox::data
