#pragma once

// Backward of forgetting attention on Hopper for head sizes above 128; see forgetting_attn_bwd_sm90.cuh for the
// formulas and roles. dK and dV of 64 keys × 256 are two 64 KB accumulators, so here the two consumer warpgroups share
// the same 64 keys: each computes S and dP of half of a tile's 64 queries, both write P and dS to shared memory, and
// each then computes half of the columns of dV, dK and dQ from there.
//
// Shared memory: K, V, Q, dO 32 KB each in one stage, P and dS 8 KB each, dQ 64 KB = 208 KB: nothing is left to overlap
// one tile with the next, and the order is the plain one.

#include "kernels/cuda/forgetting_attn_bwd_common.cuh"

namespace fox::cuda {

template <typename T, int kHeadDim, bool kGate>
struct WideBackwardTile {
  static constexpr int kD = kHeadDim, kM = backward_tile_rows(kHeadDim), kN = backward_block_keys(kHeadDim);
  static_assert(kM == 64 && kN == 64 && kD % 128 == 0);
  static constexpr bool kFarLoop = false;
  static constexpr bool kSharedKeys = true;
  static constexpr int kPanels = kD / 64, kQueryStages = 1, kGradientStages = 1;
  static constexpr bool kBiasByMma = bias_by_mma(kGate, kHeadDim);
  static constexpr int kRowTable = row_table_floats(kBiasByMma, kM);
  static constexpr int kDqPart0 = kM * kD / 2;
  static constexpr int kDeltaFloats = delta_floats(kHeadDim), kOnes = 0;

  struct alignas(1024) Shared {
    T k[kPanels][kN * 64];
    T v[kPanels][kN * 64];
    T q[1][kPanels][kM * 64];
    T d_o[1][kPanels][kM * 64];
    T p[kN * 64];   // [key][query]
    T ds[kN * 64];  // [key][query]
    float dq[kM * kD];
    alignas(16) float row_bias[1][kRowTable];
    alignas(16) float delta[1][kM];
    float residual[kM];  // [group of 8 queries][consumer warp]
    float column[kN];
    KeyBias<kN, kGate, kBiasByMma> key_bias;
    Ones<T, false> ones;
    BackwardQueue queue;
    uint64_t k_full, v_full, k_empty, v_empty, q_full[1], q_empty[1], do_full[1], do_empty[1];
  };
  /// Where dK lies on its way out.
  __device__ __forceinline__ static void* dk_place(Shared& smem) { return smem.k; }
};

template <typename T, int kHeadDim, bool kGate>
struct WideBackwardConsumer : BackwardScores<T, WideBackwardTile<T, kHeadDim, kGate>, kGate> {
  using Tile = WideBackwardTile<T, kHeadDim, kGate>;
  using Layout = Tile;
  using Base = BackwardScores<T, Tile, kGate>;
  static constexpr bool kHasGate = kGate;
  static constexpr int kM = Tile::kM, kN = Tile::kN, kD = Tile::kD, kScores = Base::kScores;
  static constexpr int kColumns = kD / 2;  // of dV, dK and dQ a warpgroup
  using Base::Base, Base::a, Base::w, Base::smem, Base::wg, Base::warp, Base::lane, Base::q, Base::d_o;

  /// 64 keys × this warpgroup's half of the queries.
  template <bool kAdd = false>
  __device__ __forceinline__ void issue_transposed(float (&acc)[kScores], const void* keys, const void* queries) {
    const uint32_t key_word = ptx::descriptor_word(ptx::smem_u32(keys));
    const uint32_t query_word = ptx::descriptor_word(ptx::smem_u32(queries) + wg * (kM / 2) * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k)
      ptx::Wgmma<T, kM / 2>::template ss<>(acc, ptx::descriptor(key_word + (k / 4 * kN * 128 + k % 4 * 32) / 16),
                                           ptx::descriptor(query_word + (k / 4 * kM * 128 + k % 4 * 32) / 16),
                                           kAdd || k > 0);
    ptx::wgmma_commit();
  }

  /// acc += A · B over 64 of k: A is P or dS, [key][query] in one panel, as it lies (rows are keys) or transposed (rows
  /// are queries); B the warpgroup's columns of a tile of 64 rows.
  template <bool kTransposed>
  __device__ __forceinline__ void issue_columns(float (&acc)[kColumns / 2], const T* left, const void* right,
                                                bool accumulate) {
    const uint32_t left_word = ptx::descriptor_word(ptx::smem_u32(left));
    const uint32_t right_word = ptx::descriptor_word(ptx::smem_u32(right) + wg * (kColumns / 64) * 64 * 128, 64 * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ptx::Wgmma<T, kColumns>::template ss<kTransposed, 1>(
          acc, ptx::descriptor(left_word + k * (kTransposed ? 2048 : 32) / 16),
          ptx::descriptor(right_word + k * 2048 / 16), accumulate || k > 0);
    ptx::wgmma_commit();
  }

  /// Fragments of 64 keys × 32 queries into [key][query] rows.
  __device__ __forceinline__ void store_scores(T* panel, const uint32_t (&pairs)[kScores / 2]) {
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int g = 0; g < kScores / 4; g += 2)
      ptx::stmatrix_x4(ptx::smem_u32(panel) + ptx::swizzle128(row, wg * 4 + g + lane / 16), pairs[2 * g],
                       pairs[2 * g + 1], pairs[2 * g + 2], pairs[2 * g + 3]);
  }

  __device__ __forceinline__ void step(float (&dk)[kColumns / 2], float (&dv)[kColumns / 2], int m, int head,
                                       float (&column)[2]) {
    uint32_t p[kScores / 2], ds[kScores / 2];
    float s[kScores], dp[kScores], group[kScores / 4];
    this->wait_q(m);
    const bool without_bias = this->is_steep(m);
    ptx::wgmma_fence();
    this->issue_bias(s, without_bias);
    issue_transposed<Tile::kBiasByMma>(s, smem.k, smem.q[0]);
    this->wait_do(m);
    issue_transposed(dp, smem.v, smem.d_o[0]);
    ptx::wgmma_wait<1>();
    ptx::fence_registers(s);
    this->make_masked_p(s, p, m, head);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(dp);
    score_gradient<T, kGate, true>(dp, p, ds, this->row_values(smem.delta[0]), column, group);
    ptx::named_barrier_sync(kBarrierConsumers, 256);  // the other warpgroup may still read P and dS of the last tile
    store_scores(smem.p, p);
    store_scores(smem.ds, ds);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kBarrierDs, 256);
    float dq[kColumns / 2];
    issue_columns<true>(dq, smem.ds, smem.k, false);
    issue_columns<false>(dv, smem.p, smem.d_o[0], true);
    issue_columns<false>(dk, smem.ds, smem.q[0], true);
    const float residual = kGate ? transpose_sum(group, lane) : 0.f;
    ptx::wgmma_wait<2>();
    ptx::fence_registers(dq);
    ptx::named_barrier_sync(kBarrierDqEmpty + wg, 160);
    this->store_dq(dq, residual);
    this->send_dq();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(dv);
    ptx::fence_registers(dk);
    if (lane == 0) {
      ptx::mbarrier_arrive(&smem.q_empty[0]);
      ptx::mbarrier_arrive(&smem.do_empty[0]);
    }
    q.advance();
    d_o.advance();
  }

  /// Both warpgroups hold a part of each key's sum.
  __device__ __forceinline__ void store_column_sums(float (&column)[2], int head) {
    this->sum_columns(column);
    const int row = warp * 16 + lane / 4;
    if (wg == 1 && lane % 4 == 0) {
      smem.column[row] = column[0];
      smem.column[row + 8] = column[1];
    }
    ptx::named_barrier_sync(kBarrierConsumers, 256);
    if (wg == 0) {
      this->store_column(column[0] + smem.column[row], this->key0, head);
      this->store_column(column[1] + smem.column[row + 8], this->key0 + 8, head);
    }
    ptx::named_barrier_sync(kBarrierConsumers, 256);
  }

  __device__ __forceinline__ void run() {
    // A warp fills in the groups of its own half of the queries; the others of its row stay 0.
    if (lane < kM / 8) smem.residual[8 * lane + wg * 4 + warp] = 0.f;
    __syncwarp();
    while (this->next()) work();
  }

  __device__ __forceinline__ void work() {
    float dk[kColumns / 2], dv[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) dk[i] = dv[i] = 0.f;
    bool have_keys = false;
    for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; ++head) {
      const int m_end = backward_m_end<kM, kN>(a, w, head);
      float column[2] = {0.f, 0.f};
      if (w.m_begin < m_end) {
        this->wait_key_bias();
        if (!have_keys) this->wait_keys();
        have_keys = true;
        for (int m = w.m_begin; m < m_end; ++m) step(dk, dv, m, head, column);
        this->release_key_bias();
      }
      if constexpr (kGate) store_column_sums(column, head);
    }
    if (!have_keys) this->wait_keys();
    ptx::named_barrier_sync(kBarrierConsumers, 256);  // both warpgroups read all of K and V
    this->template send_key_gradient<kColumns / 2>(dv, 1.f, smem.v, kBarrierKeyGradients);
    this->template send_key_gradient<kColumns / 2>(dk, a.scale, smem.k, kBarrierKeyGradients + 2);
  }
};

template <typename T, int kHeadDim>
cudaError_t launch_backward(const BackwardArgs& a, cudaStream_t stream) {
  return a.prefix.r != nullptr ? launch_backward_kernel<WideBackwardConsumer<T, kHeadDim, true>>(a, stream)
                               : launch_backward_kernel<WideBackwardConsumer<T, kHeadDim, false>>(a, stream);
}

}  // namespace fox::cuda
