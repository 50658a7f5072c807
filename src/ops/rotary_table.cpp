#include "ops/rotary_table.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace fox::ops {
namespace {

RotaryTable compute(int64_t begin, int64_t end, int64_t dim, double base, const at::TensorOptions& options) {
  const at::NoGradGuard no_grad;
  const auto doubles = at::TensorOptions(at::kDouble);
  const auto inverse_wavelength = at::pow(base, at::arange(0, dim, 2, doubles) / static_cast<double>(-dim));
  const auto angle = at::outer(at::arange(begin, end, doubles), inverse_wavelength);
  return {angle.cos().to(options), angle.sin().to(options)};
}

}  // namespace

RotaryTable rotary_table(int64_t time, int64_t dim, double base, int64_t offset, const at::TensorOptions& options) {
  constexpr int64_t kMaxKept = int64_t{1} << 20;
  const int64_t end = offset + time;
  if (end > kMaxKept) return compute(offset, end, dim, base, options);

  using Key = std::tuple<double, int64_t, at::ScalarType, std::string>;
  static std::mutex mutex;
  static std::map<Key, std::vector<RotaryTable>> kept;  // the last is the longest
  const std::lock_guard lock(mutex);
  auto& tables = kept[Key(base, dim, c10::typeMetaToScalarType(options.dtype()), options.device().str())];
  const int64_t old = tables.empty() ? 0 : tables.back().cos.size(0);
  if (old < end)
    tables.push_back(compute(0, std::min(kMaxKept, std::max({end, 2 * old, int64_t{512}})), dim, base, options));
  const auto& [cos, sin] = tables.back();
  return {cos.narrow(0, offset, time), sin.narrow(0, offset, time)};
}

}  // namespace fox::ops
