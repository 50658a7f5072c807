// Token shift. Every (batch, time) row is on its own: backward gathers dx_t from dy_t and dy_{t+1} rather than
// scattering, so threads never meet.
#include "kernels/cpu/token_shift.h"

#include <algorithm>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/token_shift.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// Whether a document begins at token t > 0 of row b.
template <class T>
bool begins(const TokenShiftParams<T>& p, int64_t b, int64_t t) {
  if (p.seq_start != nullptr && p.seq_start[b] == t) return true;
  return p.cu_seqlens != nullptr && std::binary_search(p.cu_seqlens, p.cu_seqlens + p.num_documents + 1, t);
}

/// x_{t-1} of one head, or nullptr for 0.
template <class T>
const T* before(const TokenShiftParams<T>& p, int64_t b, int64_t t, int64_t h, bool first) {
  if (t == 0) return p.prev == nullptr ? nullptr : p.prev + (b * p.heads + h) * p.dim;
  return first ? nullptr : p.x + b * p.x_batch + (t - 1) * p.x_time + h * p.x_head;
}

template <class T>
void forward_rows(const TokenShiftParams<T>& p, T* out, int64_t begin, int64_t end) {
  const hn::ScalableTag<T> d;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / p.time, t = row % p.time;
    const bool first = t > 0 && begins(p, b, t);
    for (int64_t h = 0; h < p.heads; ++h) {
      const T a = p.alpha[row * p.heads + h];
      const auto shift = hn::Set(d, a), stay = hn::Set(d, T(1) - a);
      const T* x = p.x + b * p.x_batch + t * p.x_time + h * p.x_head;
      const T* last = before(p, b, t, h, first);
      T* y = out + (row * p.heads + h) * p.dim;
      if (last == nullptr) {
        for_each_vector<T>(p.dim,
                           [&](const auto& io, int64_t i) HWY_ATTR { io.store(hn::Mul(stay, io.load(x + i)), y + i); });
      } else {
        for_each_vector<T>(p.dim, [&](const auto& io, int64_t i) HWY_ATTR {
          io.store(hn::MulAdd(shift, io.load(last + i), hn::Mul(stay, io.load(x + i))), y + i);
        });
      }
    }
  }
}

template <class T>
void backward_rows(const TokenShiftParams<T>& p, const T* dout, T* dx_out, T* dalpha, T* dprev, int64_t begin,
                   int64_t end) {
  const hn::ScalableTag<T> d;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / p.time, t = row % p.time;
    const bool first = t > 0 && begins(p, b, t);
    const bool has_next = t + 1 < p.time && !begins(p, b, t + 1);
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t at = row * p.heads + h;
      const T a = p.alpha[at];
      const auto stay = hn::Set(d, T(1) - a);
      const auto next_shift = hn::Set(d, has_next ? p.alpha[at + p.heads] : T(0));
      const T* x = p.x + b * p.x_batch + t * p.x_time + h * p.x_head;
      const T* last = before(p, b, t, h, first);
      const T* dy = dout + at * p.dim;
      const T* dy_next = dy + p.heads * p.dim;
      T* dx = dx_out + at * p.dim;
      auto sum = hn::Zero(d);
      for_each_vector<T>(p.dim, [&](const auto& io, int64_t i) HWY_ATTR {
        const auto g = io.load(dy + i);
        const auto own = hn::Mul(stay, g);
        io.store(has_next ? hn::MulAdd(next_shift, io.load(dy_next + i), own) : own, dx + i);
        const auto v = io.load(x + i);
        sum = hn::MulAdd(g, last == nullptr ? hn::Neg(v) : hn::Sub(io.load(last + i), v), sum);
      });
      dalpha[at] = sum_of_lanes(d, sum);
      if (t == 0 && dprev != nullptr) {
        for (int64_t i = 0; i < p.dim; ++i) dprev[(b * p.heads + h) * p.dim + i] = a * dy[i];
      }
    }
  }
}

void forward_f32(const TokenShiftParams<float>& p, float* y, int64_t b, int64_t e) { forward_rows(p, y, b, e); }
void forward_f64(const TokenShiftParams<double>& p, double* y, int64_t b, int64_t e) { forward_rows(p, y, b, e); }
void backward_f32(const TokenShiftParams<float>& p, const float* dy, float* dx, float* da, float* dp, int64_t b,
                  int64_t e) {
  backward_rows(p, dy, dx, da, dp, b, e);
}
void backward_f64(const TokenShiftParams<double>& p, const double* dy, double* dx, double* da, double* dp, int64_t b,
                  int64_t e) {
  backward_rows(p, dy, dx, da, dp, b, e);
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
int64_t row_grain(const TokenShiftParams<T>& p) {
  return 16384 / (p.heads * p.dim + 1) + 1;
}

void forward_piece(const TokenShiftParams<float>& p, float* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(p, y, b, e);
}
void forward_piece(const TokenShiftParams<double>& p, double* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(p, y, b, e);
}
void backward_piece(const TokenShiftParams<float>& p, const float* dy, float* dx, float* da, float* dp, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(p, dy, dx, da, dp, b, e);
}
void backward_piece(const TokenShiftParams<double>& p, const double* dy, double* dx, double* da, double* dp, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(p, dy, dx, da, dp, b, e);
}

}  // namespace

template <class T>
void token_shift(const TokenShiftParams<T>& p, T* y) {
  parallel_pieces(p.batch * p.time, row_grain(p),
                  [&](int64_t begin, int64_t end, int64_t) { forward_piece(p, y, begin, end); });
}

template <class T>
void token_shift_backward(const TokenShiftParams<T>& p, const T* dy, T* dx, T* dalpha, T* dprev) {
  parallel_pieces(p.batch * p.time, row_grain(p),
                  [&](int64_t begin, int64_t end, int64_t) { backward_piece(p, dy, dx, dalpha, dprev, begin, end); });
}

template void token_shift(const TokenShiftParams<float>&, float*);
template void token_shift(const TokenShiftParams<double>&, double*);
template void token_shift_backward(const TokenShiftParams<float>&, const float*, float*, float*, float*);
template void token_shift_backward(const TokenShiftParams<double>&, const double*, double*, double*, double*);

}  // namespace fox::kernels
#endif
