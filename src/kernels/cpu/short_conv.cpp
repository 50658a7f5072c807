// Short convolution with SiLU, one pass over memory each way. Forward, rows are each on their own. Backward, a task has
// some channels of the whole batch and walks through time: gradients of taps are then sums in one order whatever the
// number of threads, and a token's gradient goes to the few before it, which lie in the cache.
#include "kernels/cpu/short_conv.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/channel_sums.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/short_conv.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// Token t - back of row b, which may be one of those before the first; nullptr for 0.
template <class T>
const T* token(const ShortConvParams<T>& p, int64_t b, int64_t t) {
  if (t >= 0) return p.x + b * p.x_batch + t * p.x_time;
  return p.before == nullptr ? nullptr : p.before + (b * (p.taps - 1) + p.taps - 1 + t) * p.channels;
}

/// The tokens that token t of row b takes something from, itself first, as many as there are.
template <class T>
int64_t tokens_of(const ShortConvParams<T>& p, int64_t b, int64_t t, const T** from) {
  const int64_t reach = p.reach == nullptr ? p.taps - 1 : std::min(p.taps - 1, p.reach[b * p.time + t]);
  int64_t count = 0;
  while (count <= reach && (from[count] = token(p, b, t - count)) != nullptr) ++count;
  return count;
}

/// The convolution before SiLU, of the lanes from channel i on.
template <class T, class Io>
HWY_INLINE auto convolve(const ShortConvParams<T>& p, const Io& io, int64_t i, const T* const* from, int64_t count) {
  auto sum = p.bias == nullptr ? hn::Zero(io.d) : io.load(p.bias + i);
  for (int64_t back = 0; back < count; ++back) {
    sum = hn::MulAdd(io.load(p.weight + (p.taps - 1 - back) * p.channels + i), io.load(from[back] + i), sum);
  }
  return sum;
}

template <class T>
void forward_rows(const ShortConvParams<T>& p, T* y, int64_t begin, int64_t end) {
  std::vector<const T*> from(p.taps);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t count = tokens_of(p, row / p.time, row % p.time, from.data());
    T* out = y + row * p.channels;
    for_each_vector<T>(p.channels, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto z = convolve(p, io, i, from.data(), count);
      io.store(hn::Mul(z, sigmoid(io.d, z)), out + i);
    });
  }
}

/// Channels [begin, end) of `tokens` of them from `t` on; adds to `sums`, (taps + 1) × (end - begin), bias last.
template <class T>
void backward_tokens(const ShortConvParams<T>& p, const T* dy, const ShortConvGradients<T>& grads, int64_t b, int64_t t,
                     int64_t tokens, int64_t begin, int64_t end, T* sums) {
  const int64_t width = end - begin;
  std::vector<const T*> from(p.taps);
  for (const int64_t last = t + tokens; t < last; ++t) {
    const int64_t row = b * p.time + t, count = tokens_of(p, b, t, from.data());
    for_each_vector<T>(width, [&](const auto& io, int64_t lane) HWY_ATTR {
      const int64_t i = begin + lane;
      const auto z = convolve(p, io, i, from.data(), count);
      const auto s = sigmoid(io.d, z), silu = hn::Mul(z, s);
      // silu' = s + z s (1 - s)
      const auto dz = hn::Mul(io.load(dy + row * p.channels + i), hn::Add(s, hn::NegMulAdd(silu, s, silu)));
      io.store(hn::Add(io.load(sums + p.taps * width + lane), dz), sums + p.taps * width + lane);
      for (int64_t back = 0; back < count; ++back) {
        const int64_t tap = p.taps - 1 - back;
        T* sum = sums + tap * width + lane;
        io.store(hn::MulAdd(dz, io.load(from[back] + i), io.load(sum)), sum);
        const auto share = hn::Mul(dz, io.load(p.weight + tap * p.channels + i));
        if (back <= t) {
          T* dx = grads.x + (row - back) * p.channels + i;
          io.store(back == 0 ? share : hn::Add(io.load(dx), share), dx);
        } else if (grads.before != nullptr) {
          T* dbefore = grads.before + (b * (p.taps - 1) + p.taps - 1 + t - back) * p.channels + i;
          io.store(hn::Add(io.load(dbefore), share), dbefore);
        }
      }
    });
  }
}

template <class T>
void backward_channels(const ShortConvParams<T>& p, const T* dy, const ShortConvGradients<T>& grads, int64_t begin,
                       int64_t end) {
  const int64_t width = end - begin;
  std::vector<T> total((p.taps + 1) * width);
  for (int64_t b = 0; b < p.batch; ++b) {
    add_up_rows(p.time, total, [&](int64_t first, int64_t last, T* sums) {
      backward_tokens(p, dy, grads, b, first, last - first, begin, end, sums);
    });
  }
  for (int64_t tap = 0; tap < p.taps; ++tap) {
    std::copy_n(&total[tap * width], width, grads.weight + tap * p.channels + begin);
  }
  if (grads.bias != nullptr) std::copy_n(&total[p.taps * width], width, grads.bias + begin);
}

void forward_f32(const ShortConvParams<float>& p, float* y, int64_t b, int64_t e) { forward_rows(p, y, b, e); }
void forward_f64(const ShortConvParams<double>& p, double* y, int64_t b, int64_t e) { forward_rows(p, y, b, e); }
void backward_f32(const ShortConvParams<float>& p, const float* dy, const ShortConvGradients<float>& grads, int64_t b,
                  int64_t e) {
  backward_channels(p, dy, grads, b, e);
}
void backward_f64(const ShortConvParams<double>& p, const double* dy, const ShortConvGradients<double>& grads,
                  int64_t b, int64_t e) {
  backward_channels(p, dy, grads, b, e);
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

void forward_piece(const ShortConvParams<float>& p, float* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(p, y, b, e);
}
void forward_piece(const ShortConvParams<double>& p, double* y, int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(p, y, b, e);
}
void backward_piece(const ShortConvParams<float>& p, const float* dy, const ShortConvGradients<float>& grads, int64_t b,
                    int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(p, dy, grads, b, e);
}
void backward_piece(const ShortConvParams<double>& p, const double* dy, const ShortConvGradients<double>& grads,
                    int64_t b, int64_t e) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(p, dy, grads, b, e);
}

}  // namespace

template <class T>
void short_conv(const ShortConvParams<T>& p, T* y) {
  parallel_pieces(p.batch * p.time, pass_grain(p.channels),
                  [&](int64_t begin, int64_t end, int64_t) { forward_piece(p, y, begin, end); });
}

template <class T>
void short_conv_backward(const ShortConvParams<T>& p, const T* dy, const ShortConvGradients<T>& gradients) {
  if (gradients.before != nullptr) std::fill_n(gradients.before, p.batch * (p.taps - 1) * p.channels, T(0));
  parallel_channels(p.batch * p.time, p.channels,
                    [&](int64_t begin, int64_t end) { backward_piece(p, dy, gradients, begin, end); });
}

template void short_conv(const ShortConvParams<float>&, float*);
template void short_conv(const ShortConvParams<double>&, double*);
template void short_conv_backward(const ShortConvParams<float>&, const float*, const ShortConvGradients<float>&);
template void short_conv_backward(const ShortConvParams<double>&, const double*, const ShortConvGradients<double>&);

}  // namespace fox::kernels
#endif
