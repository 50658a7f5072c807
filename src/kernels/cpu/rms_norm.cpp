// RMSNorm over groups. Forward reads a group twice, the second time from the first-level cache. With r =
// 1/sqrt(mean(x²)
// + eps): dx = r (w dy - x r² mean(w dy x)); r is recomputed in the backward pass, since x must be read there anyway.
#include "kernels/cpu/rms_norm.h"

#include <cmath>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rms_norm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// The activation of gate z, and its derivative.
template <class D>
HWY_INLINE hn::Vec<D> activate(D d, hn::Vec<D> z, bool silu) {
  const auto s = sigmoid(d, z);
  return silu ? hn::Mul(z, s) : s;
}
template <class D>
HWY_INLINE hn::Vec<D> activation_slope(D d, hn::Vec<D> z, bool silu) {
  const auto s = sigmoid(d, z), slope = hn::NegMulAdd(s, s, s);
  return silu ? hn::MulAdd(z, slope, s) : slope;
}

template <class T>
void forward_rows(const RmsNormParams<T>& p, T* out, int64_t begin, int64_t end) {
  const hn::ScalableTag<T> d;
  const T eps = static_cast<T>(p.eps), inverse_width = T(1) / static_cast<T>(p.width);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < p.groups; ++group) {
      const T* x = p.x + row * p.x_stride + group * p.width;
      T* y = out + (row * p.groups + group) * p.width;
      auto squares = hn::Zero(d);
      for_each_vector<T>(p.width, [&](const auto& io, int64_t i) HWY_ATTR {
        const auto v = io.load(x + i);
        squares = hn::MulAdd(v, v, squares);
      });
      const auto r = hn::Set(d, T(1) / std::sqrt(sum_of_lanes(d, squares) * inverse_width + eps));
      if (p.weight == nullptr) {
        for_each_vector<T>(p.width,
                           [&](const auto& io, int64_t i) HWY_ATTR { io.store(hn::Mul(io.load(x + i), r), y + i); });
        continue;
      }
      const T* weight = p.weight + group * p.weight_stride;
      if (p.gate != nullptr) {
        const T* gate = p.gate + row * p.gate_stride + group * p.width;
        for_each_vector<T>(p.width, [&](const auto& io, int64_t i) HWY_ATTR {
          const auto scaled = hn::Mul(hn::Mul(io.load(x + i), r), io.load(weight + i));
          io.store(hn::Mul(scaled, activate(io.d, io.load(gate + i), p.silu)), y + i);
        });
        continue;
      }
      for_each_vector<T>(p.width, [&](const auto& io, int64_t i) HWY_ATTR {
        io.store(hn::Mul(hn::Mul(io.load(x + i), r), io.load(weight + i)), y + i);
      });
    }
  }
}

template <class T, bool kHasWeight>
HWY_INLINE void backward_group(const T* x, const T* weight, const T* dy, T* dx, T* dweight, int64_t width, T eps) {
  const hn::ScalableTag<T> d;
  auto squares = hn::Zero(d), products = hn::Zero(d);
  for_each_vector<T>(width, [&](const auto& io, int64_t i) HWY_ATTR {
    const auto v = io.load(x + i);
    auto g = io.load(dy + i);
    if constexpr (kHasWeight) g = hn::Mul(g, io.load(weight + i));
    squares = hn::MulAdd(v, v, squares);
    products = hn::MulAdd(g, v, products);
  });
  const T scale = T(1) / std::sqrt(sum_of_lanes(d, squares) / static_cast<T>(width) + eps);
  const T pull = sum_of_lanes(d, products) / static_cast<T>(width) * scale * scale;
  const auto r = hn::Set(d, scale), c = hn::Set(d, pull);
  for_each_vector<T>(width, [&](const auto& io, int64_t i) HWY_ATTR {
    const auto v = io.load(x + i);
    const auto g = io.load(dy + i);
    if constexpr (kHasWeight) {
      io.store(hn::Mul(r, hn::NegMulAdd(v, c, hn::Mul(g, io.load(weight + i)))), dx + i);
      if (dweight != nullptr) io.store(hn::MulAdd(hn::Mul(g, v), r, io.load(dweight + i)), dweight + i);
    } else {
      io.store(hn::Mul(r, hn::NegMulAdd(v, c, g)), dx + i);
    }
  });
}

/// As backward_group behind a gate: what the norm gets as its gradient is dy times the activation.
template <class T>
HWY_INLINE void gated_backward_group(const T* x, const T* weight, const T* gate, bool silu, const T* dy, T* dx,
                                     T* dweight, T* dgate, int64_t width, T eps) {
  const hn::ScalableTag<T> d;
  auto squares = hn::Zero(d), products = hn::Zero(d);
  for_each_vector<T>(width, [&](const auto& io, int64_t i) HWY_ATTR {
    const auto v = io.load(x + i);
    const auto g = hn::Mul(io.load(dy + i), activate(io.d, io.load(gate + i), silu));
    squares = hn::MulAdd(v, v, squares);
    products = hn::MulAdd(hn::Mul(g, io.load(weight + i)), v, products);
  });
  const T scale = T(1) / std::sqrt(sum_of_lanes(d, squares) / static_cast<T>(width) + eps);
  const T pull = sum_of_lanes(d, products) / static_cast<T>(width) * scale * scale;
  const auto r = hn::Set(d, scale), c = hn::Set(d, pull);
  for_each_vector<T>(width, [&](const auto& io, int64_t i) HWY_ATTR {
    const auto v = io.load(x + i), w = io.load(weight + i), z = io.load(gate + i), dout = io.load(dy + i);
    const auto g = hn::Mul(dout, activate(io.d, z, silu)), normed = hn::Mul(v, r);
    io.store(hn::Mul(hn::Mul(dout, activation_slope(io.d, z, silu)), hn::Mul(normed, w)), dgate + i);
    io.store(hn::Mul(r, hn::NegMulAdd(v, c, hn::Mul(g, w))), dx + i);
    if (dweight != nullptr) io.store(hn::MulAdd(g, normed, io.load(dweight + i)), dweight + i);
  });
}

/// Adds this piece's share to dweight.
template <class T>
void backward_rows(const RmsNormParams<T>& p, const T* dy, T* dx, T* dweight, T* dgate, int64_t begin, int64_t end) {
  const T eps = static_cast<T>(p.eps);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < p.groups; ++group) {
      const T* x = p.x + row * p.x_stride + group * p.width;
      const int64_t at = (row * p.groups + group) * p.width, at_weight = group * p.weight_stride;
      T* own_weight = dweight == nullptr ? nullptr : dweight + at_weight;
      if (p.gate != nullptr) {
        gated_backward_group(x, p.weight + at_weight, p.gate + row * p.gate_stride + group * p.width, p.silu, dy + at,
                             dx + at, own_weight, dgate + at, p.width, eps);
      } else if (p.weight == nullptr) {
        backward_group<T, false>(x, nullptr, dy + at, dx + at, nullptr, p.width, eps);
      } else {
        backward_group<T, true>(x, p.weight + at_weight, dy + at, dx + at, own_weight, p.width, eps);
      }
    }
  }
}

void forward_f32(const RmsNormParams<float>& p, float* y, int64_t b, int64_t e) { forward_rows(p, y, b, e); }
void forward_f64(const RmsNormParams<double>& p, double* y, int64_t b, int64_t e) { forward_rows(p, y, b, e); }
void backward_f32(const RmsNormParams<float>& p, const float* dy, float* dx, float* dw, float* dg, int64_t b,
                  int64_t e) {
  backward_rows(p, dy, dx, dw, dg, b, e);
}
void backward_f64(const RmsNormParams<double>& p, const double* dy, double* dx, double* dw, double* dg, int64_t b,
                  int64_t e) {
  backward_rows(p, dy, dx, dw, dg, b, e);
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_f64);
HWY_EXPORT(backward_f32);
HWY_EXPORT(backward_f64);

template <class T>
int64_t row_grain(const RmsNormParams<T>& p) {
  return 16384 / (p.groups * p.width + 1) + 1;
}

template <class T>
int64_t weight_size(const RmsNormParams<T>& p) {
  return p.weight_stride * (p.groups - 1) + p.width;
}

void forward_piece(const RmsNormParams<float>& p, float* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(p, y, b, e);
}
void forward_piece(const RmsNormParams<double>& p, double* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(p, y, b, e);
}
void backward_piece(const RmsNormParams<float>& p, const float* dy, float* dx, float* dw, float* dg, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(p, dy, dx, dw, dg, b, e);
}
void backward_piece(const RmsNormParams<double>& p, const double* dy, double* dx, double* dw, double* dg, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(p, dy, dx, dw, dg, b, e);
}

}  // namespace

template <class T>
void rms_norm(const RmsNormParams<T>& p, T* y) {
  parallel_pieces(p.rows, row_grain(p), [&](int64_t begin, int64_t end, int64_t) { forward_piece(p, y, begin, end); });
}

template <class T>
int64_t rms_norm_backward_workspace(const RmsNormParams<T>& p) {
  return (num_pieces(p.rows, row_grain(p)) - 1) * weight_size(p);
}

template <class T>
void rms_norm_backward(const RmsNormParams<T>& p, const T* dy, T* dx, T* dweight, T* workspace, T* dgate) {
  const int64_t size = weight_size(p);
  const auto share = [&](int64_t piece) { return piece == 0 ? dweight : workspace + (piece - 1) * size; };
  if (dweight != nullptr) std::fill_n(dweight, size, T(0));
  parallel_pieces(p.rows, row_grain(p), [&](int64_t begin, int64_t end, int64_t piece) {
    if (dweight != nullptr && piece > 0) std::fill_n(share(piece), size, T(0));
    backward_piece(p, dy, dx, dweight == nullptr ? nullptr : share(piece), dgate, begin, end);
  });
  if (dweight == nullptr) return;
  for (int64_t piece = 1; piece < num_pieces(p.rows, row_grain(p)); ++piece) {
    const T* part = share(piece);
    for (int64_t i = 0; i < size; ++i) dweight[i] += part[i];
  }
}

template void rms_norm(const RmsNormParams<float>&, float*);
template void rms_norm(const RmsNormParams<double>&, double*);
template int64_t rms_norm_backward_workspace(const RmsNormParams<float>&);
template int64_t rms_norm_backward_workspace(const RmsNormParams<double>&);
template void rms_norm_backward(const RmsNormParams<float>&, const float*, float*, float*, float*, float*);
template void rms_norm_backward(const RmsNormParams<double>&, const double*, double*, double*, double*, double*);

}  // namespace fox::kernels
#endif
