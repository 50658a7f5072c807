#pragma once

#include <ATen/ATen.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace fox::naive {

using Weights = std::map<std::string, at::Tensor>;
using Config = nlohmann::json;

inline at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * at::rsqrt(x.square().mean(-1, true) + eps) * weight;
}

}  // namespace fox::naive
