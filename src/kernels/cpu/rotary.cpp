// Rotary embedding. A rotation's backward is the rotation back, so one kernel serves both.
#include "kernels/cpu/rotary.h"

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rotary.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
void rotate_rows(const RotaryParams<T>& p, bool inverse, T* out, int64_t begin, int64_t end) {
  const int64_t half = p.dim / 2;
  const T sign = inverse ? T(-1) : T(1);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / p.time, t = row % p.time;
    const T* cos = p.cos + t * half;
    const T* sin = p.sin + t * half;
    for (int64_t h = 0; h < p.heads; ++h) {
      const T* x = p.x + b * p.x_batch + t * p.x_time + h * p.x_head;
      T* y = out + (row * p.heads + h) * p.dim;
      for_each_vector<T>(half, [&](const auto& io, int64_t i) HWY_ATTR {
        const auto c = io.load(cos + i), s = hn::Mul(io.load(sin + i), hn::Set(io.d, sign));
        const auto first = io.load(x + i), second = io.load(x + half + i);
        io.store(hn::NegMulAdd(second, s, hn::Mul(first, c)), y + i);
        io.store(hn::MulAdd(first, s, hn::Mul(second, c)), y + half + i);
      });
    }
  }
}

void rotate_f32(const RotaryParams<float>& p, bool inverse, float* y, int64_t b, int64_t e) {
  rotate_rows(p, inverse, y, b, e);
}
void rotate_f64(const RotaryParams<double>& p, bool inverse, double* y, int64_t b, int64_t e) {
  rotate_rows(p, inverse, y, b, e);
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

HWY_EXPORT(rotate_f32);
HWY_EXPORT(rotate_f64);

void rotate_piece(const RotaryParams<float>& p, bool inverse, float* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(rotate_f32)(p, inverse, y, b, e);
}
void rotate_piece(const RotaryParams<double>& p, bool inverse, double* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(rotate_f64)(p, inverse, y, b, e);
}

}  // namespace

template <class T>
void rotary(const RotaryParams<T>& p, bool inverse, T* y) {
  parallel_pieces(p.batch * p.time, 16384 / (p.heads * p.dim + 1) + 1,
                  [&](int64_t begin, int64_t end, int64_t) { rotate_piece(p, inverse, y, begin, end); });
}

template void rotary(const RotaryParams<float>&, bool, float*);
template void rotary(const RotaryParams<double>&, bool, double*);

}  // namespace fox::kernels
#endif
