// Runs both passes of the recurrent operators once on short inputs, for compute-sanitizer: a program without torch, as
// sanitize.cu. Fails if an output is not finite.
//
// build: nvcc -std=c++20 -Isrc tools/gpu/sanitize_recurrences.cu -Lbuild-cuda -lfox_kernels -Xlinker -rpath=build-cuda
//        -o sanitize_recurrences
// usage: compute-sanitizer --tool racecheck ./sanitize_recurrences [delta_net|hgrn2|mamba2|mamba ...]

#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/cuda/delta_net.h"
#include "kernels/cuda/hgrn2.h"
#include "kernels/cuda/mamba.h"
#include "kernels/cuda/mamba2.h"
#include "sanitize.h"

namespace {

using sanitize::Device, sanitize::must;
using bf16 = __nv_bfloat16;
using namespace fox::cuda;

struct Case {
  int batch, length, heads, dim;
};

// One token; a few chunks; more chunks than are in flight; so many sequences that DeltaNet takes 32 columns a block.
constexpr Case kCases[] = {{1, 1, 1, 128},  {1, 200, 3, 128}, {1, 700, 1, 128},
                           {6, 65, 3, 128}, {2, 64, 1, 64},   {1, 200, 3, 64}};

/// Keys of length about 1.
float unit(const Case& c) { return 1 / std::sqrt(float(c.dim)); }

/// What hgrn2 and delta_net have in common: packed (B, T, H, D) and states (B, H, D, D).
struct Heads {
  const Case& c;
  size_t tokens = size_t(c.batch) * c.length * c.heads, states = size_t(c.batch) * c.heads * c.dim * c.dim;
  Device<bf16> q{tokens * c.dim}, k{tokens * c.dim}, v{tokens * c.dim}, o{tokens * c.dim}, d_o{tokens * c.dim},
      dq{tokens * c.dim}, dk{tokens * c.dim}, dv{tokens * c.dim};
  Device<float> first{states}, last{states}, dlast{states}, dfirst{states};

  explicit Heads(const Case& size) : c(size) {
    q.random(unit(c)), k.random(unit(c)), v.random(1.f), d_o.random(1.f), first.random(1.f), dlast.random(0.1f);
  }
  HeadTensor<bf16> tensor(const Device<bf16>& x) const {
    return {x.data, int64_t(c.length) * c.heads * c.dim, int64_t(c.heads) * c.dim, c.dim};
  }
  bool finite() const {
    must(cudaDeviceSynchronize());
    return o.finite() && last.finite() && dq.finite() && dk.finite() && dv.finite() && dfirst.finite();
  }
};

bool run_delta_net(const Case& c) {
  Heads x(c);
  Device<float> beta(x.tokens), dbeta(x.tokens);
  beta.put(std::vector<float>(x.tokens, 0.7f));
  // Documents in every case but the long one.
  Device<bool> starts(c.length);
  must(cudaMemset(starts.data, 0, starts.count));
  if (c.length < 700) must(cudaMemset(starts.data + c.length / 2, 1, 1));
  const DeltaNetParams p{x.tensor(x.q), x.tensor(x.k), x.tensor(x.v), beta.data, starts.data,
                         x.first.data,  c.batch,       c.length,      c.heads,   c.dim};
  Device<char> space(delta_net_workspace(p, /*backward=*/true));
  must(delta_net_forward(p, x.o.data, x.last.data, space.data, nullptr));
  must(delta_net_backward(p, {x.d_o.data, x.dlast.data, x.dq.data, x.dk.data, x.dv.data, dbeta.data, x.dfirst.data},
                          space.data, nullptr));
  return x.finite() && dbeta.finite();
}

bool run_hgrn2(const Case& c) {
  Heads x(c);
  Device<float> log_g(x.tokens * c.dim), dlog_g(x.tokens * c.dim);
  log_g.gates();
  const Hgrn2Params p{x.tensor(x.q), x.tensor(x.k),
                      x.tensor(x.v), {log_g.data, int64_t(c.length) * c.heads * c.dim, int64_t(c.heads) * c.dim, c.dim},
                      x.first.data,  c.batch,
                      c.length,      c.heads,
                      c.dim};
  Device<char> space(hgrn2_workspace(p));
  must(hgrn2_forward(p, x.o.data, x.last.data, space.data, nullptr));
  must(hgrn2_backward(p, {x.d_o.data, x.dlast.data, x.dq.data, x.dk.data, x.dv.data, dlog_g.data, x.dfirst.data},
                      space.data, nullptr));
  return x.finite() && dlog_g.finite();
}

/// Heads of 64 channels; the state size is the case's.
bool run_mamba2(const Case& c) {
  const int64_t B = c.batch, T = c.length, H = c.heads, P = kMamba2HeadDim, N = c.dim;
  const size_t tokens = size_t(B * T), states = size_t(B * H * P * N),
               groups = (H + kMamba2HeadGroup - 1) / kMamba2HeadGroup;
  Device<bf16> x(tokens * H * P), b(tokens * N), cc(tokens * N), y(tokens * H * P), dy(tokens * H * P),
      dx(tokens * H * P);
  Device<float> dt(tokens * H), log_decay(tokens * H), d(H), first(states), last(states), dlast(states), dfirst(states);
  Device<float> ddt(tokens * H), dlog_decay(tokens * H), db(groups * tokens * N), dc(groups * tokens * N);
  x.random(1.f), b.random(1.f), cc.random(1.f), dy.random(1.f), d.random(1.f), first.random(1.f), dlast.random(0.1f),
      log_decay.gates();
  dt.put(std::vector<float>(tokens * H, 0.1f));
  const Mamba2Params p{{x.data, T * H * P, H * P, P},
                       {b.data, T * N, N, 0},
                       {cc.data, T * N, N, 0},
                       dt.data,
                       log_decay.data,
                       d.data,
                       first.data,
                       B,
                       T,
                       H,
                       N};
  Device<float> dd(size_t(B * mamba2_chunks(p) * H));
  Device<char> space(mamba2_workspace(p));
  must(mamba2_forward(p, y.data, last.data, space.data, nullptr));
  must(mamba2_backward(
      p, {dy.data, dlast.data, dx.data, ddt.data, dlog_decay.data, db.data, dc.data, dd.data, dfirst.data}, space.data,
      nullptr));
  must(cudaDeviceSynchronize());
  return y.finite() && last.finite() && dx.finite() && ddt.finite() && dlog_decay.finite() && db.finite() &&
         dc.finite() && dd.finite() && dfirst.finite();
}

bool run_mamba(const Case& c) {
  const int64_t B = c.batch, T = c.length, I = int64_t(c.heads) * c.dim, N = kMambaStates;
  const size_t tokens = size_t(B * T), states = size_t(B * I * N),
               blocks = (I + kMambaChannelBlock - 1) / kMambaChannelBlock;
  Device<bf16> x(tokens * I), b(tokens * N), cc(tokens * N), y(tokens * I), dy(tokens * I), dx(tokens * I);
  Device<float> dt(tokens * I), a(I * N), d(I), first(states), last(states), dlast(states), dfirst(states);
  Device<float> ddt(tokens * I), dbc(blocks * tokens * 32);
  x.random(1.f), b.random(1.f), cc.random(1.f), dy.random(1.f), d.random(1.f), first.random(1.f), dlast.random(0.1f);
  dt.put(std::vector<float>(tokens * I, 0.1f)), a.put(std::vector<float>(I * N, -2.f));
  const MambaParams p{x.data,  T * I,  I,      b.data,  cc.data,    T * N, N, T * N, N,
                      dt.data, a.data, d.data, nullptr, first.data, B,     T, I};
  Device<float> da(size_t(B * mamba_chunks(p) * I * N)), dd(size_t(B * mamba_chunks(p) * I));
  Device<char> space(mamba_workspace(p));
  must(mamba_forward(p, y.data, last.data, space.data, nullptr));
  must(mamba_backward(p, {dy.data, dlast.data, dx.data, ddt.data, dbc.data, da.data, dd.data, dfirst.data}, space.data,
                      nullptr));
  must(cudaDeviceSynchronize());
  return y.finite() && last.finite() && dx.finite() && ddt.finite() && dbc.finite() && da.finite() && dd.finite() &&
         dfirst.finite();
}

struct Operator {
  const char* name;
  bool (*run)(const Case&);
};
constexpr Operator kOperators[] = {
    {"delta_net", run_delta_net}, {"hgrn2", run_hgrn2}, {"mamba2", run_mamba2}, {"mamba", run_mamba}};

}  // namespace

int main(int argc, char** argv) {
  const auto one_kind = [](const std::string&) { return 0; };
  const auto wanted = [&](const std::string& name) { return sanitize::is_wanted(argc, argv, name, one_kind); };
  int ran = 0, failed = 0;
  for (const auto& op : kOperators) {
    if (!wanted(op.name)) continue;
    for (const Case& c : kCases) {
      const bool ok = op.run(c);
      ++ran, failed += !ok;
      if (!ok) std::printf("FAIL %s (%d, %d, %d, %d)\n", op.name, c.batch, c.length, c.heads, c.dim);
    }
  }
  std::printf("%d cases ran, %d failed\n", ran, failed);
  return failed != 0;
}
