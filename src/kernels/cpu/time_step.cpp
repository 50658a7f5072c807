// Time steps, one pass over memory each way.
#include "kernels/cpu/time_step.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/channel_sums.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/time_step.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
void forward_rows(const TimeStepParams<T>& p, T* dt, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for_each_vector<T>(p.channels, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto d = io.d;
      const auto x = hn::Add(io.load(p.logits + row * p.stride + i), io.load(p.bias + i));
      // max(x, 0) + log(1 + e^-|x|) neither overflows nor loses the digits of a small step.
      const auto tail = hn::Log1p(d, hn::Exp(d, hn::Neg(hn::Abs(x))));
      io.store(hn::IfThenElse(hn::IsNaN(x), x, hn::Add(hn::Max(x, hn::Zero(d)), tail)), dt + row * p.channels + i);
    });
  }
}

/// Channels [begin, end) of rows [first, last); adds to `sums`, as many as channels.
template <class T>
void backward_rows(const TimeStepParams<T>& p, const T* ddt, T* dlogits, int64_t first, int64_t last, int64_t begin,
                   int64_t end, T* sums) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = row * p.channels + begin;
    for_each_vector<T>(end - begin, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto x = hn::Add(io.load(p.logits + row * p.stride + begin + i), io.load(p.bias + begin + i));
      const auto dx = hn::Mul(io.load(ddt + at + i), sigmoid(io.d, x));
      io.store(dx, dlogits + at + i);
      io.store(hn::Add(io.load(sums + i), dx), sums + i);
    });
  }
}

template <class T>
void backward_channels(const TimeStepParams<T>& p, const T* ddt, T* dlogits, T* dbias, int64_t begin, int64_t end) {
  std::vector<T> total(end - begin);
  add_up_rows(p.rows, total, [&](int64_t first, int64_t last, T* sums) {
    backward_rows(p, ddt, dlogits, first, last, begin, end, sums);
  });
  std::copy(total.begin(), total.end(), dbias + begin);
}

void forward_f32(const TimeStepParams<float>& p, float* dt, int64_t b, int64_t e) { forward_rows(p, dt, b, e); }
void forward_f64(const TimeStepParams<double>& p, double* dt, int64_t b, int64_t e) { forward_rows(p, dt, b, e); }
void backward_f32(const TimeStepParams<float>& p, const float* ddt, float* dlogits, float* dbias, int64_t b,
                  int64_t e) {
  backward_channels(p, ddt, dlogits, dbias, b, e);
}
void backward_f64(const TimeStepParams<double>& p, const double* ddt, double* dlogits, double* dbias, int64_t b,
                  int64_t e) {
  backward_channels(p, ddt, dlogits, dbias, b, e);
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

void forward_piece(const TimeStepParams<float>& p, float* dt, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(p, dt, b, e);
}
void forward_piece(const TimeStepParams<double>& p, double* dt, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(p, dt, b, e);
}
void backward_piece(const TimeStepParams<float>& p, const float* ddt, float* dlogits, float* dbias, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(p, ddt, dlogits, dbias, b, e);
}
void backward_piece(const TimeStepParams<double>& p, const double* ddt, double* dlogits, double* dbias, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(p, ddt, dlogits, dbias, b, e);
}

}  // namespace

template <class T>
void time_step(const TimeStepParams<T>& p, T* dt) {
  parallel_pieces(p.rows, pass_grain(p.channels),
                  [&](int64_t begin, int64_t end, int64_t) { forward_piece(p, dt, begin, end); });
}

template <class T>
void time_step_backward(const TimeStepParams<T>& p, const T* ddt, T* dlogits, T* dbias) {
  parallel_channels(p.rows, p.channels,
                    [&](int64_t begin, int64_t end) { backward_piece(p, ddt, dlogits, dbias, begin, end); });
}

template void time_step(const TimeStepParams<float>&, float*);
template void time_step(const TimeStepParams<double>&, double*);
template void time_step_backward(const TimeStepParams<float>&, const float*, float*, float*);
template void time_step_backward(const TimeStepParams<double>&, const double*, double*, double*);

}  // namespace fox::kernels
#endif
