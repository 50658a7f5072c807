// HGRN2's gate, one pass over memory each way.
#include "kernels/cpu/hgrn2_gate.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/channel_sums.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/hgrn2_gate.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
void forward_rows(const Hgrn2GateParams<T>& p, T* log_g, T* k, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* logits = p.logits + row * p.stride;
    T *log_out = log_g + row * p.channels, *k_out = k + row * p.channels;
    for_each_vector<T>(p.channels, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto d = io.d;
      const auto z = io.load(logits + i), closed = sigmoid(d, hn::Neg(z)), zero = hn::Zero(d);
      if (p.lower == nullptr) {
        // min(z, 0) - log(1 + e^-|z|) neither overflows nor loses the digits of a gate close to 1.
        const auto tail = hn::Log1p(d, hn::Exp(d, hn::Neg(hn::Abs(z))));
        io.store(hn::IfThenElse(hn::IsNaN(z), z, hn::Sub(hn::Min(z, zero), tail)), log_out + i);
        io.store(closed, k_out + i);
      } else {
        const auto lower = io.load(p.lower + i), free = hn::Sub(hn::Set(d, T(1)), lower);
        const auto g = hn::MulAdd(free, sigmoid(d, z), lower);
        const auto log = hn::IfThenElse(hn::Gt(g, zero), hn::Log(d, g), hn::Neg(hn::Inf(d)));
        io.store(hn::IfThenElse(hn::IsNaN(g), g, log), log_out + i);
        io.store(hn::Mul(free, closed), k_out + i);
      }
    });
  }
}

/// Channels [begin, end) of rows [first, last); adds to `sums`, as many as channels.
template <class T>
void backward_rows(const Hgrn2GateParams<T>& p, const T* dlog_g, const T* dk, T* dlogits, int64_t first, int64_t last,
                   int64_t begin, int64_t end, T* sums) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = row * p.channels + begin;
    for_each_vector<T>(end - begin, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto d = io.d;
      const auto z = io.load(p.logits + row * p.stride + begin + i);
      const auto open = sigmoid(d, z), closed = sigmoid(d, hn::Neg(z));
      const auto dlog = io.load(dlog_g + at + i), d_k = io.load(dk + at + i);
      if (p.lower == nullptr) {
        io.store(hn::Mul(hn::NegMulAdd(d_k, open, dlog), closed), dlogits + at + i);
      } else {
        const auto lower = io.load(p.lower + begin + i), free = hn::Sub(hn::Set(d, T(1)), lower);
        // Lanes beyond the end read 0 everywhere: 0 / (1/2).
        const auto dg = hn::Mul(hn::Sub(hn::Div(dlog, hn::MulAdd(free, open, lower)), d_k), closed);
        io.store(hn::Add(io.load(sums + i), dg), sums + i);
        io.store(hn::Mul(hn::Mul(dg, free), open), dlogits + at + i);
      }
    });
  }
}

template <class T>
void backward_channels(const Hgrn2GateParams<T>& p, const T* dlog_g, const T* dk, T* dlogits, T* dlower, int64_t begin,
                       int64_t end) {
  std::vector<T> total(end - begin);
  add_up_rows(p.rows, total, [&](int64_t first, int64_t last, T* sums) {
    backward_rows(p, dlog_g, dk, dlogits, first, last, begin, end, sums);
  });
  if (dlower != nullptr) std::copy(total.begin(), total.end(), dlower + begin);
}

void forward_f32(const Hgrn2GateParams<float>& p, float* log_g, float* k, int64_t b, int64_t e) {
  forward_rows(p, log_g, k, b, e);
}
void forward_f64(const Hgrn2GateParams<double>& p, double* log_g, double* k, int64_t b, int64_t e) {
  forward_rows(p, log_g, k, b, e);
}
void backward_f32(const Hgrn2GateParams<float>& p, const float* dlog_g, const float* dk, float* dlogits, float* dlower,
                  int64_t b, int64_t e) {
  backward_channels(p, dlog_g, dk, dlogits, dlower, b, e);
}
void backward_f64(const Hgrn2GateParams<double>& p, const double* dlog_g, const double* dk, double* dlogits,
                  double* dlower, int64_t b, int64_t e) {
  backward_channels(p, dlog_g, dk, dlogits, dlower, b, e);
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

void forward_piece(const Hgrn2GateParams<float>& p, float* log_g, float* k, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(p, log_g, k, b, e);
}
void forward_piece(const Hgrn2GateParams<double>& p, double* log_g, double* k, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(p, log_g, k, b, e);
}
void backward_piece(const Hgrn2GateParams<float>& p, const float* dlog_g, const float* dk, float* dlogits,
                    float* dlower, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(p, dlog_g, dk, dlogits, dlower, b, e);
}
void backward_piece(const Hgrn2GateParams<double>& p, const double* dlog_g, const double* dk, double* dlogits,
                    double* dlower, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(p, dlog_g, dk, dlogits, dlower, b, e);
}

}  // namespace

template <class T>
void hgrn2_gate(const Hgrn2GateParams<T>& p, T* log_g, T* k) {
  parallel_pieces(p.rows, pass_grain(p.channels),
                  [&](int64_t begin, int64_t end, int64_t) { forward_piece(p, log_g, k, begin, end); });
}

template <class T>
void hgrn2_gate_backward(const Hgrn2GateParams<T>& p, const T* dlog_g, const T* dk, T* dlogits, T* dlower) {
  parallel_channels(p.rows, p.channels,
                    [&](int64_t begin, int64_t end) { backward_piece(p, dlog_g, dk, dlogits, dlower, begin, end); });
}

template void hgrn2_gate(const Hgrn2GateParams<float>&, float*, float*);
template void hgrn2_gate(const Hgrn2GateParams<double>&, double*, double*);
template void hgrn2_gate_backward(const Hgrn2GateParams<float>&, const float*, const float*, float*, float*);
template void hgrn2_gate_backward(const Hgrn2GateParams<double>&, const double*, const double*, double*, double*);

}  // namespace fox::kernels
#endif
