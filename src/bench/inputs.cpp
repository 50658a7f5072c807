#include "bench/inputs.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cmath>
#include <map>

#include "base/error.h"

namespace fox::bench {
namespace {

constexpr double kRounding = 1.01;  // of normalised q and k to 16 bits, in their norms

void select_sdp_kernels(bool cudnn, bool flash, bool others) {
  auto& context = at::globalContext();
  context.setSDPUseCuDNN(cudnn);
  context.setSDPUseFlash(flash);
  context.setSDPUseMemEfficient(others);
  context.setSDPUseMath(others);
}

}  // namespace

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> types{
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
  const auto found = types.find(name);
  if (found == types.end()) throw Error("unknown dtype '" + name + "'", "known: float32, float64, bfloat16, float16");
  return found->second;
}

at::Tensor rms_normalised(const at::Tensor& x) { return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true)); }

at::Tensor logit_bound(int64_t heads, int64_t head_dim, at::Device device) {
  return at::full({heads}, kRounding * std::sqrt(static_cast<double>(head_dim)), at::TensorOptions(device));
}

at::Tensor log_spaced_gates(at::IntArrayRef shape, at::Device device) {
  const auto options = at::TensorOptions(at::kDouble).device(device);
  const auto decay = at::exp(at::linspace(std::log(kShortestDecay), std::log(kLongestDecay), shape[2], options));
  const auto base = -at::log(at::expm1(1 / decay));  // sigmoid(base) = exp(-1 / decay)
  return at::log_sigmoid(base + at::randn(shape, options));
}

SdpKernel::SdpKernel(const std::string& name) {
  if (name != "torch") select_sdp_kernels(name == "cudnn", name == "flash", false);
}
SdpKernel::~SdpKernel() { select_sdp_kernels(true, true, true); }

}  // namespace fox::bench
