// The forget gate. log σ(x) = min(x, 0) - log1p(e^-|x|) keeps its digits at both ends, and 1 - f = -expm1(log f) needs
// only what forward returned. Heads are few, so vectors run over the flat (rows × heads) array.
#include "kernels/cpu/gate.h"

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gate.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
void forward_flat(T* x, int64_t n) {
  for_each_vector<T>(n, [&](const auto& io, int64_t i) HWY_ATTR {
    const auto v = io.load(x + i);
    const auto zero = hn::Zero(io.d);
    const auto tail = hn::Log1p(io.d, hn::Exp(io.d, hn::Neg(hn::Abs(v))));
    io.store(hn::IfThenElse(hn::IsNaN(v), v, hn::Sub(hn::Min(v, zero), tail)), x + i);
  });
}

template <class T>
void backward_flat(const T* dlog_f, const T* log_f, T* dlogits, int64_t n) {
  for_each_vector<T>(n, [&](const auto& io, int64_t i) HWY_ATTR {
    const auto forget = hn::Neg(hn::Expm1(io.d, io.load(log_f + i)));
    io.store(hn::Mul(io.load(dlog_f + i), forget), dlogits + i);
  });
}

void forward_f32(float* x, int64_t n) { forward_flat(x, n); }
void forward_f64(double* x, int64_t n) { forward_flat(x, n); }
void backward_f32(const float* dy, const float* y, float* dx, int64_t n) { backward_flat(dy, y, dx, n); }
void backward_f64(const double* dy, const double* y, double* dx, int64_t n) { backward_flat(dy, y, dx, n); }

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_f64);
HWY_EXPORT(backward_f32);
HWY_EXPORT(backward_f64);

void forward_piece(float* x, int64_t n) { HWY_DYNAMIC_DISPATCH(forward_f32)(x, n); }
void forward_piece(double* x, int64_t n) { HWY_DYNAMIC_DISPATCH(forward_f64)(x, n); }
void backward_piece(const float* dy, const float* y, float* dx, int64_t n) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(dy, y, dx, n);
}
void backward_piece(const double* dy, const double* y, double* dx, int64_t n) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(dy, y, dx, n);
}

int64_t row_grain(int64_t heads) { return 4096 / (heads + 1) + 1; }

}  // namespace

template <class T>
void log_sigmoid_gate(const T* logits, const T* bias, T* log_f, int64_t rows, int64_t heads) {
  parallel_pieces(rows, row_grain(heads), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        log_f[r * heads + h] = logits[r * heads + h] + (bias == nullptr ? T(0) : bias[h]);
      }
    }
    forward_piece(log_f + begin * heads, (end - begin) * heads);
  });
}

template <class T>
void log_sigmoid_gate_backward(const T* dlog_f, const T* log_f, T* dlogits, T* dbias, int64_t rows, int64_t heads) {
  parallel_pieces(rows, row_grain(heads), [&](int64_t begin, int64_t end, int64_t) {
    const int64_t at = begin * heads;
    backward_piece(dlog_f + at, log_f + at, dlogits + at, (end - begin) * heads);
  });
  if (dbias == nullptr) return;
  // Thousands of rows may add up here: in double, so that float32 loses nothing.
  constexpr int64_t kHeads = 32;
  for (int64_t first = 0; first < heads; first += kHeads) {
    const int64_t n = std::min(kHeads, heads - first);
    double sums[kHeads] = {};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < n; ++h) sums[h] += static_cast<double>(dlogits[r * heads + first + h]);
    }
    for (int64_t h = 0; h < n; ++h) dbias[first + h] = static_cast<T>(sums[h]);
  }
}

template void log_sigmoid_gate(const float*, const float*, float*, int64_t, int64_t);
template void log_sigmoid_gate(const double*, const double*, double*, int64_t, int64_t);
template void log_sigmoid_gate_backward(const float*, const float*, float*, float*, int64_t, int64_t);
template void log_sigmoid_gate_backward(const double*, const double*, double*, double*, int64_t, int64_t);

}  // namespace fox::kernels
#endif
