// Runs every code path of the attention kernels once on short inputs, for compute-sanitizer: a program without torch,
// whose own kernels the tools would have to follow too. Fails if an output is not finite.
//
// build: nvcc -std=c++20 -Isrc tools/gpu/sanitize.cu -Lbuild-cuda -lfox_kernels -Xlinker -rpath=build-cuda -o sanitize
// usage: compute-sanitizer --tool racecheck ./sanitize [forward|backward|decode|sm80|float32 ...] [HEAD_DIM ...]

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/cuda/forgetting_attn.h"
#include "kernels/cuda/forgetting_decode.h"
#include "sanitize.h"

namespace {

using sanitize::Device, sanitize::must;

void must(int failed) {
  if (!failed) return;
  std::fprintf(stderr, "fox: %s\n", fox_kernels_last_error());
  std::exit(2);
}

struct Case {
  const char* name;
  int head_dim, queries, keys, heads, kv_heads;
  bool gated, pruned;
  float bound;  // of the logits; 0: none is given
  bool deterministic;
  int window, padding, documents;
};

constexpr Case kCases[] = {
    {"plain", 64, 200, 200, 2, 2, false, false, 0, false, 0, 0, 0},
    {"gated", 64, 330, 330, 2, 2, true, false, 0, false, 0, 0, 0},
    {"gated, bounded", 64, 330, 330, 2, 1, true, false, 30, false, 0, 0, 0},
    {"gated, far", 64, 500, 500, 2, 2, true, false, 4, false, 0, 0, 0},
    {"pruned", 64, 500, 500, 2, 2, true, true, 4, false, 0, 0, 0},
    {"window, padding", 64, 100, 300, 2, 2, true, false, 0, false, 70, 20, 0},
    {"documents", 64, 300, 300, 2, 2, true, false, 0, true, 0, 0, 3},
    {"plain", 128, 200, 200, 2, 2, false, false, 0, false, 0, 0, 0},
    {"gated", 128, 330, 330, 2, 1, true, false, 0, false, 0, 0, 0},
    {"gated, far", 128, 500, 500, 2, 1, true, false, 4, false, 0, 0, 0},
    {"deterministic", 128, 300, 300, 2, 2, true, false, 0, true, 0, 0, 0},
    {"gated", 32, 200, 200, 2, 2, true, false, 0, false, 0, 0, 0},
    {"gated", 96, 200, 200, 2, 2, true, false, 0, false, 0, 0, 0},
    {"gated", 192, 150, 150, 2, 2, true, false, 0, false, 0, 0, 0},
    {"gated", 256, 200, 200, 2, 2, true, false, 0, false, 0, 0, 0},
    // More blocks than multiprocessors.
    {"crowded", 64, 400, 400, 24, 24, true, false, 4, false, 250, 0, 0},
    {"crowded", 128, 300, 400, 48, 24, true, false, 4, false, 0, 20, 0},
    {"crowded", 256, 300, 300, 24, 24, true, false, 0, false, 0, 0, 0},
};

template <typename T>
bool run_attention(const Case& c, int32_t dtype, bool sm80, bool backward) {
  const int B = c.documents ? 1 : 2, D = c.head_dim, H = c.heads, Hk = c.kv_heads, Tq = c.queries, Tk = c.keys;
  const size_t queries = size_t(B) * Tq * H * D, keys = size_t(B) * Tk * Hk * D;
  Device<T> q(queries), k(keys), v(keys), o(queries), d_o(queries), d_q(queries), d_k(keys), d_v(keys);
  Device<float> f(size_t(B) * Tk * H), d_f(size_t(B) * Tk * H), lse(size_t(B) * H * Tq * 2), bound(H);
  Device<int64_t> start(B), documents(4);
  q.random(0.5f), k.random(0.5f), v.random(1.f), d_o.random(1.f), f.gates();
  must(cudaMemset(o.data, 0, queries * sizeof(T)));  // the copy engine writes them, which initcheck does not see
  must(cudaMemset(d_k.data, 0, keys * sizeof(T)));
  must(cudaMemset(d_v.data, 0, keys * sizeof(T)));
  bound.put(std::vector<float>(H, c.bound));
  start.put(std::vector<int64_t>(B, c.padding));
  documents.put({0, Tk / 3, Tk / 3 + 1, Tk});
  ForgettingAttnParams p{};
  p.dtype = dtype, p.batch = B, p.query_len = Tq, p.key_len = Tk, p.query_heads = H, p.kv_heads = Hk, p.head_dim = D;
  const auto tensor = [&](Device<T>& x, int time, int heads) {
    return FoxTensor{x.data, int64_t(time) * heads * D, int64_t(heads) * D, D};
  };
  p.q = tensor(q, Tq, H), p.k = tensor(k, Tk, Hk), p.v = tensor(v, Tk, Hk), p.o = tensor(o, Tq, H);
  p.d_o = tensor(d_o, Tq, H), p.d_q = tensor(d_q, Tq, H), p.d_k = tensor(d_k, Tk, Hk), p.d_v = tensor(d_v, Tk, Hk);
  p.lse = lse.data, p.scale = 1 / std::sqrt(float(D)), p.window = c.window, p.use_sm80_kernels = sm80;
  p.deterministic = c.deterministic;
  if (c.gated) {
    p.log_f = {f.data, int64_t(Tk) * H, H, 1};
    p.d_log_f = {d_f.data, int64_t(Tk) * H, H, 1};
  }
  if (c.bound > 0) p.logit_bound = bound.data;
  p.pruned = c.pruned, p.log_tolerance = -10.f;
  if (c.padding) p.seq_start = start.data;
  if (c.documents) p.cu_seqlens = documents.data, p.num_documents = c.documents;
  Device<char> forward_space(fox_forgetting_attn_forward_workspace(&p)),
      backward_space(fox_forgetting_attn_backward_workspace(&p));
  p.workspace = forward_space.data, p.workspace_bytes = forward_space.count;
  must(fox_forgetting_attn_forward(&p, nullptr));
  must(cudaDeviceSynchronize());
  bool ok = o.finite();
  if (backward) {
    p.workspace = backward_space.data, p.workspace_bytes = backward_space.count;
    must(fox_forgetting_attn_backward(&p, nullptr));
    must(cudaDeviceSynchronize());
    ok = ok && d_q.finite() && d_k.finite() && d_v.finite() && (!c.gated || d_f.finite());
  }
  return ok;
}

bool run_decode(int D, int H, int Hk, bool gated, bool pruned) {
  using T = __nv_bfloat16;
  const int B = 2, T_max = 700, blocks = (T_max + 63) / 64;
  Device<T> q(size_t(B) * H * D), o(size_t(B) * H * D), k(size_t(B) * T_max * Hk * D), v(size_t(B) * T_max * Hk * D);
  Device<float> f(size_t(B) * T_max * H), r(size_t(B) * H * blocks * 64), block(size_t(B) * H * blocks * 2), bound(H);
  Device<int32_t> length(B);
  q.random(0.5f), k.random(0.5f), v.random(1.f), f.gates();
  must(cudaMemset(r.data, 0, r.count * 4));
  length.put({T_max, 130});
  bound.put(std::vector<float>(H, 8.f));
  ForgettingDecodeParams p{};
  p.batch = B, p.query_len = 1, p.query_heads = H, p.kv_heads = Hk, p.head_dim = D, p.scale = 1 / std::sqrt(float(D));
  p.q = {q.data, int64_t(H) * D, int64_t(H) * D, D}, p.o = {o.data, int64_t(H) * D, int64_t(H) * D, D};
  p.k = {k.data, int64_t(T_max) * Hk * D, int64_t(Hk) * D, D},
  p.v = {v.data, int64_t(T_max) * Hk * D, int64_t(Hk) * D, D};
  p.key_len = length.data, p.max_key_len = T_max, p.logit_bound = bound.data;
  p.pruned = pruned, p.log_tolerance = -10.f;
  if (gated) {
    p.prefix = {r.data, block.data, blocks};
    Device<int32_t> all(B);
    all.put({T_max, T_max});
    must(fox_forgetting_prefix_append(p.prefix, {f.data, int64_t(T_max) * H, H, 1}, B, H, T_max, all.data, nullptr));
  }
  Device<char> space(fox_forgetting_decode_workspace(&p));
  p.workspace = space.data, p.workspace_bytes = space.count;
  must(fox_forgetting_decode(&p, nullptr));
  must(cudaDeviceSynchronize());
  return o.finite();
}

}  // namespace

int main(int argc, char** argv) {
  const auto is_number = [](const std::string& x) { return std::isdigit(x[0]) != 0; };
  const auto wanted = [&](const std::string& what) { return sanitize::is_wanted(argc, argv, what, is_number); };
  int ran = 0, failed = 0;
  const auto count = [&](const char* what, const Case* c, bool ok) {
    ++ran, failed += !ok;
    if (!ok) std::printf("FAIL %s %s D %d\n", what, c ? c->name : "", c ? c->head_dim : 0);
  };
  for (const Case& c : kCases) {
    if (!wanted(std::to_string(c.head_dim))) continue;
    if (wanted("forward")) count("forward", &c, run_attention<__nv_bfloat16>(c, kFoxBfloat16, false, false));
    if (wanted("backward")) count("backward", &c, run_attention<__nv_bfloat16>(c, kFoxBfloat16, false, true));
    if (wanted("sm80")) count("sm80", &c, run_attention<__nv_bfloat16>(c, kFoxBfloat16, true, true));
    if (wanted("float32")) count("float32", &c, run_attention<float>(c, kFoxFloat32, false, true));
  }
  if (wanted("decode"))
    for (int D : {64, 128, 256})
      for (int mode = 0; mode < 3; ++mode)
        count("decode", nullptr, run_decode(D, 4, mode == 1 ? 1 : 4, mode > 0, mode == 2));
  std::printf("%d cases ran, %d failed\n", ran, failed);
  return failed != 0;
}
