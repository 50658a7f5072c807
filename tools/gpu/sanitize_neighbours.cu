// Runs both passes of the memory-bound operators on short inputs, for compute-sanitizer: a program without torch, as
// sanitize.cu. Each dtype's kernels run with and without each option, on packed and on ragged shapes. Fails if an
// output is not finite.
//
// build: nvcc -std=c++20 -Isrc tools/gpu/sanitize_neighbours.cu -Lbuild-cuda -lfox_kernels -Xlinker -rpath=build-cuda
//        -o sanitize_neighbours
// usage: compute-sanitizer --tool racecheck ./sanitize_neighbours [OPERATOR | DTYPE | HEAD_DIM ...]
//        OPERATOR: rms_norm, attn_input, attn_input_runs, short_conv, hgrn2_gate, time_step, swiglu, gate,
//        softmax_xent, sum_rows; DTYPE: bf16, fp16, fp32, fp64; HEAD_DIM: of attn_input

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cctype>
#include <cstdio>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/attn_input.h"
#include "kernels/cuda/gate.h"
#include "kernels/cuda/hgrn2_gate.h"
#include "kernels/cuda/rms_norm.h"
#include "kernels/cuda/short_conv.h"
#include "kernels/cuda/softmax_xent.h"
#include "kernels/cuda/sum_rows.h"
#include "kernels/cuda/swiglu.h"
#include "kernels/cuda/time_step.h"
#include "sanitize.h"

namespace {

using sanitize::Device, sanitize::must;
using namespace fox::cuda;

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Elements between the rows of what lies in a packed projection: whole 16-byte pieces of any dtype.
constexpr int64_t kGap = 24;

template <class... X>
bool finite(const Device<X>&... x) {
  must(cudaDeviceSynchronize());
  return (x.finite() && ...);
}

// ------------------------------------------------------------------------------------------------------------ rms_norm

enum class With { kNothing, kBranch, kSigmoid, kSilu };
enum class Weight { kNone, kPerGroup, kShared };

struct NormCase {
  int64_t rows, groups, width;
};

template <class TX, class TY>
bool run_rms_norm(const NormCase& c, With with, Weight kind) {
  using A = Compute<TX>;
  const bool has_branch = with == With::kBranch, has_gate = with == With::kSigmoid || with == With::kSilu;
  const bool has_weight = kind != Weight::kNone, is_shared = kind == Weight::kShared;
  const int64_t columns = c.groups * c.width, stride = columns + kGap, weights = is_shared ? c.width : columns;
  const size_t n = c.rows * columns;
  Device<TX> x(c.rows * stride), sum(n), dsum(n), dx(n);
  Device<TY> extra(c.rows * stride), y(n), dy(n), dextra(n);
  Device<A> weight(weights), dweight(weights);
  x.random(1.f), dsum.random(1.f), extra.random(1.f), dy.random(1.f), weight.random(1.f);
  RmsNormParams<TX, TY, A> p{.x = x.data,
                             .x_stride = stride,
                             .weight = has_weight ? weight.data : nullptr,
                             .weight_stride = is_shared ? 0 : c.width,
                             .rows = c.rows,
                             .groups = c.groups,
                             .width = c.width,
                             .eps = A(1e-5)};
  if (has_branch) p.branch = extra.data, p.branch_stride = stride;
  if (has_gate) p.gate = extra.data, p.gate_stride = stride;
  if (with == With::kSilu) p.activation = Activation::kSilu;
  must(rms_norm(p, has_branch ? sum.data : nullptr, y.data, nullptr));
  if (has_branch) p.x = sum.data, p.x_stride = columns, p.branch = nullptr;
  const int64_t partials = rms_norm_backward_partials(p);
  Device<A> partial(partials * weights);
  RmsNormGradients<TX, TY, A> grads{.dx = dx.data};
  if (has_branch) grads.dbranch = dextra.data;
  if (has_gate) grads.dgate = dextra.data;
  if (has_weight) grads.partial = partial.data;
  must(rms_norm_backward(p, dy.data, has_branch ? dsum.data : nullptr, grads, nullptr));
  if (has_weight) must(sum_rows(partial.data, partials, weights, dweight.data, nullptr));
  return finite(y, dx) && (!has_branch || finite(sum)) && (with == With::kNothing || finite(dextra)) &&
         (!has_weight || finite(dweight));
}

/// TX: dtype of the residual stream.
template <class TX, class TY, class Count>
void rms_norm_cases(const Count& count) {
  const auto run = [&](const NormCase& c, With with) {
    for (const Weight weight : {Weight::kNone, Weight::kPerGroup, Weight::kShared})
      if (c.groups > 1 || weight != Weight::kShared) count(c.width, run_rms_norm<TX, TY>(c, with, weight));
  };
  // Three or four pieces of 16 bytes a thread, all whole or not; a team of one warp, of two, of all the block has; so
  // many rows that teams have several; heads.
  constexpr int64_t kPiece = 16 / sizeof(TX);
  for (const NormCase c : {NormCase{70, 1, 96 * kPiece},
                           {70, 1, 128 * kPiece},
                           {70, 1, 192 * kPiece},
                           {70, 1, 33 * kPiece},
                           {2200, 1, 97 * kPiece},
                           {70, 1, 512 * kPiece},
                           {70, 1, 768 * kPiece},
                           {300, 4, 64},
                           {130, 6, 8 * kPiece}}) {
    run(c, With::kNothing), run(c, With::kBranch);
    if (std::is_same_v<TX, TY>) run(c, With::kSigmoid), run(c, With::kSilu);
  }
  if (std::is_same_v<TX, TY>)  // any shape
    for (const NormCase c : {NormCase{3, 1, 71}, {300, 5, 10}, {20, 3, 96}, {2, 1, 20000}}) run(c, With::kNothing);
}

// ---------------------------------------------------------------------------------------------------------- attn_input

struct InputCase {
  int64_t batch, time, heads, dim;
};
struct InputSteps {
  bool shift, norm, rotary;
};
/// What steps come with: nothing; a weight for each head, documents and what stands before them; or one weight for all,
/// α itself, a rotation back, and heads of a packed projection.
enum class InputOptions { kNone, kOwn, kCommon };

template <class T>
bool run_attn_input(const InputCase& c, const InputSteps& steps, InputOptions options) {
  using A = Compute<T>;
  const bool is_common = options == InputOptions::kCommon,
             has_documents = steps.shift && options != InputOptions::kNone;
  const int64_t row = c.heads * c.dim, x_time = is_common ? 3 * row : row, weights = is_common ? c.dim : row;
  const size_t n = c.batch * c.time * row, shifts = c.batch * c.time * c.heads;
  Device<T> x(c.batch * c.time * x_time), y(n), dy(n), dx(n), shift(shifts), dshift(shifts);
  Device<T> prev(c.batch * row), dprev(c.batch * row);
  Device<A> weight(weights), angles(c.time * c.dim / 2 + 1), dweight(weights);
  Device<bool> begins(c.batch * c.time);
  x.random(1.f), dy.random(1.f), shift.random(0.2f), prev.random(1.f), weight.random(1.f), angles.random(0.5f);
  must(cudaMemset(begins.data, 0, begins.count));
  must(cudaMemset2D(begins.data + c.time / 2, c.time, 1, 1, c.batch));  // one document begins in each sequence
  AttnInputParams<T, A> p{.x = x.data + (is_common ? row : 0),
                          .x_batch = c.time * x_time,
                          .x_time = x_time,
                          .x_head = c.dim,
                          .batch = c.batch,
                          .time = c.time,
                          .heads = c.heads,
                          .dim = c.dim};
  if (steps.shift) p.shift = shift.data, p.shift_batch = c.time * c.heads, p.shift_time = c.heads;
  if (has_documents) p.shift_is_logit = !is_common, p.prev = prev.data, p.begins = begins.data;
  if (steps.norm) p.weight = weight.data, p.weight_stride = is_common ? 0 : c.dim, p.eps = A(1e-5);
  if (steps.rotary) p.cos = p.sin = angles.data;
  must(attn_input(p, y.data, nullptr));
  if (!steps.shift && !steps.norm) {  // the gradient of a rotation is the rotation back
    p.x = dy.data, p.x_batch = c.time * row, p.x_time = row, p.inverse = true;
    must(attn_input(p, dx.data, nullptr));
    return finite(y, dx);
  }
  const int64_t partials = steps.norm ? attn_input_backward_partials(p) : 0;
  Device<A> partial(partials * weights);
  AttnInputGradients<T, A> grads{.dx = dx.data};
  if (steps.shift) grads.dshift = dshift.data;
  if (has_documents) grads.dprev = dprev.data;
  if (steps.norm) grads.partial = partial.data;
  must(attn_input_backward(p, dy.data, grads, nullptr));
  if (steps.norm) must(sum_rows(partial.data, partials, weights, dweight.data, nullptr));
  return finite(y, dx) && (!steps.shift || finite(dshift)) && (!has_documents || finite(dprev)) &&
         (!steps.norm || finite(dweight));
}

template <class T, class Wanted, class Count>
void attn_input_cases(const Wanted& wanted, const Count& count) {
  // Teams that fill a warp or not, whose lanes all have pieces of their head or not; heads that fill their blocks or
  // not; heads of no whole pieces, and of more than a warp's.
  constexpr InputCase kCases[] = {{2, 200, 4, 64}, {1, 129, 3, 128}, {1, 33, 20, 128}, {2, 50, 2, 256},
                                  {1, 90, 2, 96},  {2, 33, 3, 14},   {1, 70, 2, 15},   {1, 20, 1, 1024}};
  for (const InputCase& c : kCases) {
    if (!wanted(std::to_string(c.dim))) continue;
    for (int steps = 1; steps < 8; ++steps) {
      const InputSteps asked{(steps & 1) != 0, (steps & 2) != 0, (steps & 4) != 0};
      if (asked.rotary && c.dim % 2 != 0) continue;
      for (const InputOptions options : {InputOptions::kNone, InputOptions::kOwn, InputOptions::kCommon})
        if (options != InputOptions::kNone || c.dim == 64) count(c.dim, run_attn_input<T>(c, asked, options));
    }
  }
}

/// So many sequences that a block has several runs of tokens, whose angles take turns in shared memory.
template <class T, class Count>
void attn_input_runs_cases(const Count& count) {
  for (const InputCase& c : {InputCase{300, 100, 2, 64}, {300, 60, 3, 128}})
    for (const bool shift : {false, true}) count(c.dim, run_attn_input<T>(c, {shift, true, true}, InputOptions::kOwn));
  count(64, run_attn_input<T>({500, 100, 2, 64}, {false, false, true}, InputOptions::kOwn));
}

// ---------------------------------------------------------------------------------------------------------- short_conv

struct ConvCase {
  int64_t batch, time;
  int channels, taps;
  bool has_bias, has_before, has_documents;
};

template <class T>
bool run_short_conv(const ConvCase& c) {
  using A = Compute<T>;
  const size_t n = c.batch * c.time * c.channels, before_n = c.batch * (c.taps - 1) * c.channels;
  const int x_time = c.channels + kGap;
  Device<T> x(c.batch * c.time * x_time), y(n), dy(n), dx(n), before(before_n), dbefore(before_n);
  Device<A> weight(c.channels * c.taps), bias(c.channels), sums(c.channels * (c.taps + 1));
  Device<int64_t> reach(c.time);
  x.random(1.f), dy.random(1.f), before.random(1.f), weight.random(0.5f), bias.random(0.5f);
  std::vector<int64_t> in_document(c.time);
  for (int64_t t = 0; t < c.time; ++t) in_document[t] = t % 7;
  reach.put(in_document);
  const ShortConvParams<T, A> p{.x = x.data,
                                .x_batch = c.time * x_time,
                                .x_time = x_time,
                                .weight = weight.data,
                                .bias = c.has_bias ? bias.data : nullptr,
                                .before = c.has_before ? before.data : nullptr,
                                .reach = c.has_documents ? reach.data : nullptr,
                                .batch = c.batch,
                                .time = c.time,
                                .channels = c.channels,
                                .taps = c.taps};
  must(short_conv(p, y.data, nullptr));
  const int64_t rows = short_conv_partials(p);
  Device<A> partials(rows * sums.count);
  must(short_conv_backward(p, dy.data, dx.data, c.has_before ? dbefore.data : nullptr, partials.data, nullptr));
  must(sum_rows(partials.data, rows, sums.count, sums.data, nullptr));
  return finite(y, dx, sums) && (!c.has_before || finite(dbefore));
}

template <class T, class Count>
void short_conv_cases(const Count& count) {
  const auto run = [&](const ConvCase& c) { count(c.channels, run_short_conv<T>(c)); };
  for (int taps = 1; taps <= kShortConvTaps; ++taps) {
    for (const int channels : {264, 263}) {  // several a lane, or one
      run({2, 300, channels, taps, false, false, false});
      run({2, 300, channels, taps, true, taps > 1, false});
      run({1, 300, channels, taps, true, taps > 1, true});
      run({3, 2, channels, taps, true, taps > 1, false});
    }
  }
  for (const int taps : {3, 4})  // runs so long that some tokens are neither first nor last
    for (const int channels : {1536, 1535}) run({8, 512, channels, taps, true, false, false});
}

// ----------------------------------------------------------------------------------------------- hgrn2_gate, time_step

template <class T>
bool run_logit_rows(bool is_hgrn2, int64_t rows, int64_t channels, bool has_channels) {
  using A = Compute<T>;
  const size_t n = rows * channels;
  const int64_t stride = channels + kGap, parts = logit_row_partials(rows);
  Device<T> logits(rows * stride), k(n), dk(n), dlogits(n);
  Device<A> out(n), dout(n), of_channel(channels), sums(channels), partials(parts * channels);
  logits.random(1.f), dk.random(1.f), dout.random(1.f);
  of_channel.put(std::vector<A>(channels, A(0.25)));
  const LogitRows<T, A> p{logits.data, stride, has_channels ? of_channel.data : nullptr, rows, channels};
  if (is_hgrn2) {
    must(hgrn2_gate(p, out.data, k.data, nullptr));
    must(hgrn2_gate_backward(p, dout.data, dk.data, dlogits.data, partials.data, nullptr));
  } else {
    must(time_step(p, out.data, nullptr));
    must(time_step_backward(p, dout.data, dlogits.data, partials.data, nullptr));
  }
  if (has_channels) must(sum_rows(partials.data, parts, channels, sums.data, nullptr));
  return finite(out, dlogits) && (!has_channels || finite(sums)) && (!is_hgrn2 || finite(k));
}

template <class T, class Count>
void logit_rows_cases(bool is_hgrn2, const Count& count) {
  for (const int64_t rows : {3, 300})
    for (const int64_t channels : {48, 50, 1536})
      for (const bool has_channels : {false, true})
        count(channels, run_logit_rows<T>(is_hgrn2, rows, channels, has_channels));
}

// ------------------------------------------------------------------------------- swiglu, gate, softmax_xent, sum_rows

template <class T>
bool run_swiglu(int64_t rows, int64_t width) {
  Device<T> both(rows * 2 * width), out(rows * width), dout(rows * width), dboth(both.count);
  both.random(1.f), dout.random(1.f);
  const SwigluParams<T> p{both.data, both.data + width, 2 * width, 2 * width, rows, width};
  must(swiglu(p, out.data, nullptr));
  must(swiglu_backward(p, dout.data, dboth.data, dboth.data + width, 2 * width, nullptr));
  return finite(out, dboth);
}

template <class T>
bool run_gate(int64_t rows, int64_t heads, bool has_bias) {
  using A = Compute<T>;
  Device<T> logits(rows * heads);
  Device<A> bias(heads), log_f(logits.count), dlog_f(logits.count), dlogits(logits.count);
  logits.random(1.f), bias.random(1.f), dlog_f.random(1.f);
  must(log_sigmoid_gate(logits.data, has_bias ? bias.data : nullptr, log_f.data, rows, heads, nullptr));
  must(log_sigmoid_gate_backward(dlog_f.data, log_f.data, dlogits.data, rows * heads, nullptr));
  return finite(log_f, dlogits);
}

/// The first row's label is ignored.
template <class T>
bool run_softmax_xent(int64_t rows, int64_t vocab, int64_t stride, bool gradient) {
  using A = Compute<T>;
  Device<T> logits(rows * stride);
  Device<A> weight(rows), loss(rows);
  Device<int64_t> labels(rows);
  logits.random(1.f), weight.random(1.f);
  std::vector<int64_t> of_row(rows, -100);
  for (int64_t i = 1; i < rows; ++i) of_row[i] = (i * 37 + vocab - 1) % vocab;
  labels.put(of_row);
  const SoftmaxXentParams<T, A> p{logits.data, stride, labels.data, weight.data, rows, vocab, gradient};
  must(softmax_xent(p, loss.data, nullptr));
  return finite(loss, logits);
}

template <class A>
bool run_sum_rows(int64_t rows, int64_t columns) {
  Device<A> x(rows * columns), sum(columns);
  x.random(1.f);
  must(sum_rows(x.data, rows, columns, sum.data, nullptr));
  return finite(sum);
}

// --------------------------------------------------------------------------------------------------------------- main

/// An operator's cases: wanted(size of heads) and count(size, whether it is right).
template <class T>
void run_cases(const std::string& name, const auto& wanted, const auto& count) {
  if (name == "rms_norm") {
    rms_norm_cases<T, T>(count);
    if constexpr (sizeof(T) == 2) rms_norm_cases<float, T>(count);
  } else if (name == "attn_input") {
    attn_input_cases<T>(wanted, count);
  } else if (name == "attn_input_runs") {
    if (sizeof(T) == 2) attn_input_runs_cases<T>(count);
  } else if (name == "short_conv") {
    short_conv_cases<T>(count);
  } else if (name == "hgrn2_gate" || name == "time_step") {
    logit_rows_cases<T>(name == "hgrn2_gate", count);
  } else if (name == "swiglu") {
    for (const int64_t width : {70, 1024}) count(width, run_swiglu<T>(130, width));
  } else if (name == "gate") {
    for (const bool has_bias : {false, true}) count(24, run_gate<T>(300, 24, has_bias));
  } else if (name == "softmax_xent") {
    for (const bool gradient : {false, true})  // whole pieces and a rest; none, for its length or its stride; all whole
      for (const auto& [vocab, stride] : {std::pair{1001, 1008}, {3, 8}, {1001, 1001}, {50304, 50304}})
        count(vocab, run_softmax_xent<T>(9, vocab, stride, gradient));
  } else if (sizeof(T) >= sizeof(float)) {
    for (const int64_t columns : {3, 264})
      for (const int64_t rows : {1, 3000}) count(columns, run_sum_rows<Compute<T>>(rows, columns));
  }
}

/// What an argument may name.
enum class Kind { kOperator, kDtype, kSize };
Kind kind_of(const std::string& x) {
  if (std::isdigit(x[0])) return Kind::kSize;
  return x.starts_with("fp") || x.starts_with("bf") ? Kind::kDtype : Kind::kOperator;
}

}  // namespace

int main(int argc, char** argv) {
  const auto wanted = [&](const std::string& what) { return sanitize::is_wanted(argc, argv, what, kind_of); };
  int ran = 0, failed = 0;
  const auto run = [&]<class T>(const char* dtype) {
    if (!wanted(dtype)) return;
    for (const char* name : {"rms_norm", "attn_input", "attn_input_runs", "short_conv", "hgrn2_gate", "time_step",
                             "swiglu", "gate", "softmax_xent", "sum_rows"}) {
      if (!wanted(name)) continue;
      run_cases<T>(name, wanted, [&](int64_t size, bool ok) {
        ++ran, failed += !ok;
        if (!ok) std::printf("FAIL %s %s, size %d, case %d\n", name, dtype, int(size), ran);
      });
    }
  };
  run.template operator()<__nv_bfloat16>("bf16");
  run.template operator()<__half>("fp16");
  run.template operator()<float>("fp32");
  run.template operator()<double>("fp64");
  std::printf("%d cases ran, %d failed\n", ran, failed);
  return failed != 0;
}
