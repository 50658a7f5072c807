// SwiGLU, one pass over memory each way: silu and its derivative are recomputed rather than kept.
#include "kernels/cpu/swiglu.h"

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/swiglu.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
void forward_rows(const SwigluParams<T>& p, T* out, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = p.gate + row * p.gate_stride;
    const T* value = p.value + row * p.value_stride;
    T* o = out + row * p.width;
    for_each_vector<T>(p.width, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto g = io.load(gate + i);
      io.store(hn::Mul(hn::Mul(g, sigmoid(io.d, g)), io.load(value + i)), o + i);
    });
  }
}

template <class T>
void backward_rows(const SwigluParams<T>& p, const T* dout, const SwigluGradients<T>& gradients, int64_t begin,
                   int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = p.gate + row * p.gate_stride;
    const T* value = p.value + row * p.value_stride;
    const T* d_o = dout + row * p.width;
    T* dgate = gradients.gate + row * gradients.stride;
    T* dvalue = gradients.value + row * gradients.stride;
    for_each_vector<T>(p.width, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto g = io.load(gate + i);
      const auto dy = io.load(d_o + i);
      const auto s = sigmoid(io.d, g);
      const auto silu = hn::Mul(g, s);
      // silu' = s + g s (1 - s)
      const auto slope = hn::Add(s, hn::NegMulAdd(silu, s, silu));
      io.store(hn::Mul(dy, silu), dvalue + i);
      io.store(hn::Mul(hn::Mul(dy, io.load(value + i)), slope), dgate + i);
    });
  }
}

void forward_f32(const SwigluParams<float>& p, float* out, int64_t b, int64_t e) { forward_rows(p, out, b, e); }
void forward_f64(const SwigluParams<double>& p, double* out, int64_t b, int64_t e) { forward_rows(p, out, b, e); }
void backward_f32(const SwigluParams<float>& p, const float* dout, const SwigluGradients<float>& d, int64_t b,
                  int64_t e) {
  backward_rows(p, dout, d, b, e);
}
void backward_f64(const SwigluParams<double>& p, const double* dout, const SwigluGradients<double>& d, int64_t b,
                  int64_t e) {
  backward_rows(p, dout, d, b, e);
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

void forward_piece(const SwigluParams<float>& p, float* out, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(p, out, b, e);
}
void forward_piece(const SwigluParams<double>& p, double* out, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(p, out, b, e);
}
void backward_piece(const SwigluParams<float>& p, const float* dout, const SwigluGradients<float>& d, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(p, dout, d, b, e);
}
void backward_piece(const SwigluParams<double>& p, const double* dout, const SwigluGradients<double>& d, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(p, dout, d, b, e);
}

}  // namespace

template <class T>
void swiglu(const SwigluParams<T>& p, T* out) {
  parallel_pieces(p.rows, pass_grain(p.width),
                  [&](int64_t begin, int64_t end, int64_t) { forward_piece(p, out, begin, end); });
}

template <class T>
void swiglu_backward(const SwigluParams<T>& p, const T* dout, const SwigluGradients<T>& gradients) {
  parallel_pieces(p.rows, pass_grain(p.width),
                  [&](int64_t begin, int64_t end, int64_t) { backward_piece(p, dout, gradients, begin, end); });
}

template void swiglu(const SwigluParams<float>&, float*);
template void swiglu(const SwigluParams<double>&, double*);
template void swiglu_backward(const SwigluParams<float>&, const float*, const SwigluGradients<float>&);
template void swiglu_backward(const SwigluParams<double>&, const double*, const SwigluGradients<double>&);

}  // namespace fox::kernels
#endif
