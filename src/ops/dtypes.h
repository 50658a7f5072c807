#pragma once

#include <ATen/ATen.h>

/// In which dtype what is computed.
namespace fox::ops {

/// float32 for bfloat16 and float16, else the type itself.
inline at::ScalarType compute_type(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type;
}
/// A tensor in `type`, undefined ones left alone.
inline at::Tensor cast(const at::Tensor& t, at::ScalarType type) {
  return !t.defined() || t.scalar_type() == type ? t : t.to(type);
}

/// Calls f.template operator()<float>() or <double>().
template <class F>
void dispatch_real(at::ScalarType type, const F& f) {
  if (type == at::kDouble) {
    f.template operator()<double>();
  } else {
    f.template operator()<float>();
  }
}

}  // namespace fox::ops
