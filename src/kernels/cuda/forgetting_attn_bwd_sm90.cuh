#pragma once

// Backward of forgetting attention on Hopper (SM90): dK, dV, column sums of dS, and dQ added up in float32.
//
//   P_ij = ex2(σ s_ij + u_i + b_j),  σ = scale·log2e, u_i = (c_i - cref_m - LSE_i)·log2e, b_j = (cref_n - c_j)·log2e,
//   and between tile and block (cref_m - cref_n)·log2e
//   dV_j = Σ_i P_ij dO_i,  dS_ij = P_ij (dO_i·v_j - Δ_i),  dK_j = scale Σ_i dS_ij q_i,  dQ_i = scale Σ_j dS_ij k_j
//   dlog_f_t = Σ_{i >= t} (Σ_j dS_ij) - Σ_{j >= t} (Σ_i dS_ij)   (finished in forgetting_attn_bwd_prepost.cu)
//
// A CTA works on blocks of 128 keys of a KV head, one after the other; K and V stay in shared memory while the query
// tiles at and after the diagonal stream past (all query heads of the group in turn, so dK and dV are sums in registers
// in a fixed order).
// Both products with the tile are computed transposed, Sᵀ = K Qᵀ and dPᵀ = V dOᵀ: each of the two consumer warpgroups
// owns 64 keys, and its Pᵀ and dSᵀ are register operands of dV and dK without a shuffle. Only dS crosses shared memory,
// for dQ = dS K, of which each warpgroup computes half (rows at D <= 64, columns above).
//
// Roles (384 threads): warpgroup 0, warp 0 loads by TMA, warp 1 adds dQ to global memory by bulk reduction and sends dK
// and dV, warps 2 and 3 make biases; warpgroups 1 and 2 compute. The tensor cores see, per tile m and in this order,
//     dP_m, dV_m, S_{m+1}, dQ_m, dK_m
// and the other units work under them: dS_m under dV_m, the barrier between the warpgroups under S_{m+1}, ex2 of tile
// m+1 and the store of dQ_m under dQ_m and dK_m, at kM = 128 half of that ex2 under dP_{m+1}. P is kept as 16-bit
// pairs, which makes this order fit. A turn of the loop goes from dS_m to dS_{m+1}: no other point has as little in
// registers, and dP, which is the larger, never lives from one turn to the next. Tiles that need a mask, and the first
// one, are prepared without any overlap: it keeps the masks' registers out of the loop.
//
// Budget, D = 64 (tile 128×128) / D = 128 (64×128), registers a consumer thread during ex2, the fullest moment:
//     S 64/32, dQ 36/32, dK 36/64, dV 32/64, dS pairs 32/16 = 200/208 of 240; S turns into P pairs in place.
// Shared memory, KB: K, V 32/64; Q three stages, dO two 80/80; dS two stages 64/32; dQ 32/32; tables, ones 13/10.
//
// What ptxas needs (it serialises the WGMMAs otherwise, C7512): nested loops instead of a branch between the kinds
// of step, and a fresh array for every product that starts from zero.
//
// Far tiles (backward_m_near) are worked on as without gates: a row has one bias for all keys, and nothing flows to
// gates. What the gates cost is so a matter of the other tiles. The two loops are as good as the ones of two kernels
// only with nothing alive in one that the other alone uses.
//
// Gates. cref_n is c at the *last* key of the block and cref_m c at the *first* row of the query tile, so that what
// matters (b_j, u_i near 0) is exact and what is lost is far below the last bit of P. Where tile and block overlap
// (the diagonal) no such order exists: if c falls by more than kPreciseRange there, differences are formed in float64
// instead. In the loop float64 would wait for the tensor cores, which share its pipe.

#include "kernels/cuda/forgetting_attn_bwd_common.cuh"

namespace fox::cuda {

template <typename T, int kHeadDim, bool kGate>
struct BackwardTile {
  static_assert(kHeadDim <= 128);
  static constexpr int kD = kHeadDim;
  static constexpr int kM = backward_tile_rows(kHeadDim);   // queries
  static constexpr int kN = backward_block_keys(kHeadDim);  // 64 a warpgroup
  static constexpr bool kSharedKeys = false;
  static constexpr int kPanels = (kHeadDim + 63) / 64;
  static constexpr bool kBiasByMma = bias_by_mma(kGate, kHeadDim);
  static constexpr int kRowTable = row_table_floats(kBiasByMma, kM);
  static constexpr bool kSumsByMma = sums_by_mma(kHeadDim);
  static constexpr int kDeltaFloats = delta_floats(kHeadDim);
  // Whether tiles from which nothing flows that matters (backward_m_near) have a loop of their own.
  static constexpr bool kFarLoop = kGate && has_far_loop(kHeadDim);
  // Columns beside those of K and Q. Only bfloat16 has dS there as it is: a half of 1e-6 has lost four of its bits.
  static constexpr int kOnes = kGate && kSumsByMma && std::is_same_v<T, __nv_bfloat16> ? 8 : 0;
  static constexpr int kQueryStages = 3;  // of Q; S of the next tile is computed while dK of this one still reads its Q
  static constexpr int kGradientStages = 2;      // of dO and dS
  static constexpr bool kSplitRows = kM == 128;  // warpgroups share dQ by rows, else by columns
  // Columns of dQ that warpgroup w computes, and where its part of the float32 tile begins.
  static constexpr int kDqColumns0 = kSplitRows ? kD : 64;
  static constexpr int kDqColumns1 = kSplitRows ? kD : kD - 64;
  static constexpr int kDqPart0 = kSplitRows ? kM / 2 * kD : kM * kDqColumns0;  // floats of warpgroup 0

  struct alignas(1024) Shared {
    T k[kPanels][kN * 64];
    T v[kPanels][kN * 64];
    T q[kQueryStages][kPanels][kM * 64];
    T d_o[kGradientStages][kPanels][kM * 64];
    T ds[kGradientStages][2][kM * 64];  // [stage][panel of 64 keys][query][key]
    float dq[kM * kD];
    alignas(16) float row_bias[kQueryStages][kRowTable];
    float far_rows[kFarLoop ? kQueryStages : 1][kM];
    alignas(128) float delta[kGradientStages][kM * kDeltaFloats];
    KeyBias<kN, kGate, kBiasByMma> key_bias;
    float residual[kM];  // row sums of dS: [group of 8 queries][consumer warp], or of each row
    Ones<T, kSumsByMma> ones;
    BackwardQueue queue;
    uint64_t k_full, v_full, k_empty, v_empty, q_full[kQueryStages], q_empty[kQueryStages];
    uint64_t do_full[kGradientStages], do_empty[kGradientStages];
  };
  /// Where dK lies on its way out, in panels as K: the next block's K comes at once.
  __device__ __forceinline__ static void* dk_place(Shared& smem) { return smem.ds; }
};

/// The first kCount of some registers.
template <int kCount, int kAll>
__device__ __forceinline__ auto first(float (&x)[kAll]) -> float (&)[kCount] {
  static_assert(kCount <= kAll);
  return reinterpret_cast<float(&)[kCount]>(x);
}

template <typename T, int kHeadDim, bool kGate>
struct BackwardConsumer : BackwardScores<T, BackwardTile<T, kHeadDim, kGate>, kGate> {
  using Tile = BackwardTile<T, kHeadDim, kGate>;
  using Layout = Tile;
  using Base = BackwardScores<T, Tile, kGate>;
  static constexpr bool kHasGate = kGate;
  static constexpr int kM = Tile::kM, kN = Tile::kN, kD = Tile::kD, kScores = Base::kScores;
  static constexpr int kEarly = 8;  // groups of 8 columns of P made under dQ; the rest, if any, under dP
  static constexpr int kBeforeDq = kD <= 64 && kGate ? 3 : 4;  // pairs of P made before dQ is waited for
  static constexpr int kKeySums = (kD + Tile::kOnes) / 2;      // of dK a thread, and of dS
  static constexpr bool kRowSums = kGate && Tile::kOnes == 0;  // whether threads add dS up
  static_assert(sizeof(Tile::Shared::ds) >= Tile::kPanels * kN * 128);
  using Base::Base, Base::a, Base::w, Base::smem, Base::wg, Base::warp, Base::lane, Base::q, Base::q_done, Base::d_o;
  using Base::tile_shift, Base::send_dq;
  using Base::wait_q, Base::wait_do, Base::wait_keys, Base::make_masked_p;

  /// S of the tile whose Q is in stage q, with the biases if not `without_bias`.
  template <bool kFar = false>
  __device__ __forceinline__ void issue_scores(float (&s)[kScores], bool without_bias = false) {
    ptx::wgmma_fence();
    if constexpr (!kFar) this->issue_bias(s, without_bias);
    issue_transposed<Tile::kBiasByMma && !kFar>(s, smem.k, smem.q[q.slot]);
  }

  /// 64 keys × kM queries: this warpgroup's rows of `keys` times the rows of `queries`, both K-major.
  template <bool kAdd = false>
  __device__ __forceinline__ void issue_transposed(float (&acc)[kScores], const void* keys, const void* queries) {
    const uint32_t key_word = ptx::descriptor_word(ptx::smem_u32(keys) + wg * 64 * 128);
    const uint32_t query_word = ptx::descriptor_word(ptx::smem_u32(queries));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k)
      ptx::Wgmma<T, kM>::template ss<>(acc, ptx::descriptor(key_word + (k / 4 * kN * 128 + k % 4 * 32) / 16),
                                       ptx::descriptor(query_word + (k / 4 * kM * 128 + k % 4 * 32) / 16),
                                       kAdd || k > 0);
    ptx::wgmma_commit();
  }

  /// Descriptor word of panels of 64 columns, `rows` rows each, rows down k, and what takes it to the next k16 step.
  /// With ones: of one panel and the ones beside it, which stay where they are.
  template <bool kWithOnes>
  __device__ __forceinline__ uint32_t columns_word(const void* panels, int rows) const {
    const uint32_t from = ptx::smem_u32(panels);
    if constexpr (kWithOnes)
      return ptx::descriptor_word(from, ptx::smem_u32(smem.ones.panel) - from);
    else
      return ptx::descriptor_word(from, rows * 128);
  }
  template <bool kWithOnes>
  static constexpr uint32_t kColumnsStep = 2048u / 16 - (kWithOnes ? 2048u / 16 << 16 : 0u);

  /// acc += (64 keys × kM queries in register pairs) · (kM queries × kD), with the ones if acc has room for sums.
  template <int kCount>
  __device__ __forceinline__ void issue_key_gradient(float (&acc)[kCount], const uint32_t (&pairs)[kScores / 2],
                                                     const void* queries) {
    constexpr bool kWithOnes = kCount > kD / 2;
    const uint32_t word = columns_word<kWithOnes>(queries, kM);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kM / 16; ++k)
      ptx::Wgmma<T, 2 * kCount>::template rs<1>(acc, pairs[4 * k], pairs[4 * k + 1], pairs[4 * k + 2], pairs[4 * k + 3],
                                                ptx::descriptor(word + k * kColumnsStep<kWithOnes>), true);
    ptx::wgmma_commit();
  }

  /// 64 queries from `row` on × columns of dQ from panel `panel` on, over all keys of the block.
  template <int kCount>
  __device__ __forceinline__ void issue_dq(float (&acc)[kCount], int row, int panel) {
    constexpr bool kWithOnes = kCount % 8 != 0;
    const uint32_t ds_word = ptx::descriptor_word(ptx::smem_u32(smem.ds[d_o.slot]) + row * 128);
    const uint32_t k_word = columns_word<kWithOnes>(smem.k[panel], kN);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kN / 16; ++k)
      ptx::Wgmma<T, 2 * kCount>::template ss<0, 1>(acc, ptx::descriptor(ds_word + (k / 4 * kM * 128 + k % 4 * 32) / 16),
                                                   ptx::descriptor(k_word + k * kColumnsStep<kWithOnes>), k > 0);
    ptx::wgmma_commit();
  }

  /// dSᵀ fragments into [query][key] rows: each 8×8 block is transposed on its way.
  __device__ __forceinline__ void store_ds(const uint32_t (&ds)[kScores / 2]) {
    const int row = lane % 8 + lane / 16 * 8, chunk = 2 * warp + lane / 8 % 2;
    const uint32_t address = ptx::smem_u32(smem.ds[d_o.slot][wg]) + ptx::swizzle128(row, chunk);
#pragma unroll
    for (int k = 0; k < kM / 16; ++k)
      ptx::stmatrix_x4_trans(address + k * 2048, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
  }

  /// dP of the tile whose dO is in its stage, less Δ if the tensor cores subtract it.
  __device__ __forceinline__ void issue_dp(float (&dp)[kScores]) {
    if constexpr (Tile::kSumsByMma) {
      const uint32_t ones = ptx::smem_u32(smem.ones.rows), zeros = ptx::smem_u32(smem.ones.zeros);
      ptx::wgmma_fence();
      ptx::Wgmma<__nv_bfloat16, kM>::template ss<>(dp, ptx::descriptor_narrow(ones, zeros - ones),
                                                   ptx::descriptor_narrow(ptx::smem_u32(smem.delta[d_o.slot]), 0),
                                                   false);
    }
    issue_transposed<Tile::kSumsByMma>(dp, smem.v, smem.d_o[d_o.slot]);
  }

  /// dS of tile m from its P, and what the tile adds to dV. With kRest s still has the last part of P, which is made
  /// under dP, and dQ of the tile before is sent.
  template <bool kRest, bool kFar>
  __device__ __forceinline__ void make_ds(float (&dv)[kD / 2], float (&s)[kScores], uint32_t (&p)[kScores / 2],
                                          uint32_t (&ds)[kScores / 2], float (&column)[2], float (&group)[kM / 8],
                                          int m, float shift) {
    float dp[kScores];  // a fresh array: WGMMA's asm reads what it overwrites, so another one would stay alive
    this->template wait_do<!kRest>(m);
    issue_dp(dp);
    if constexpr (kRest) {
      this->template make_p<kEarly, kM / 8, kFar>(s, p, shift);
      send_dq();
    }
    q.advance();
    ptx::fence_registers(p);
    issue_key_gradient(dv, p, smem.d_o[d_o.slot]);
    ptx::wgmma_wait<1>();
    ptx::fence_registers(dp);
    score_gradient<T, !kFar && kRowSums, !Tile::kSumsByMma>(dp, p, ds, this->row_values(smem.delta[d_o.slot]), column,
                                                            group);
    store_ds(ds);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(dv);
    if (lane == 0) ptx::mbarrier_arrive(&smem.do_empty[d_o.slot]);
  }

  /// dS of tile m from nothing: the first tile, and those that need a mask.
  __device__ __forceinline__ void prepare(float (&dv)[kD / 2], uint32_t (&ds)[kScores / 2], float (&column)[2],
                                          float (&group)[kM / 8], int m, int head) {
    float s[kScores];
    uint32_t p[kScores / 2];
    wait_q(m);
    issue_scores(s, this->is_steep(m));
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
    make_masked_p(s, p, m, head);
    make_ds<false, false>(dv, s, p, ds, column, group, m, 0.f);
  }

  /// dQ and dK of tile m, given its dS. With kAhead dS of tile m + 1, which needs no mask, comes out in its place; with
  /// kFar both are far.
  template <bool kAhead, bool kFar>
  __device__ __forceinline__ void step(float (&dk)[kKeySums], float (&dv)[kD / 2], uint32_t (&ds)[kScores / 2],
                                       float (&column)[2], float (&group)[kM / 8], int m) {
    float s[kScores];
    if constexpr (kAhead) {
      this->template wait_q<false>(m + 1);
      issue_scores<kFar>(s);
    }
    float residual = 0.f;
    if constexpr (!kFar && kRowSums) residual = transpose_sum(group, lane);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kBarrierDs, 256);
    ptx::fence_registers(ds);
    if constexpr (Tile::kDqColumns0 == Tile::kDqColumns1) {
      finish_step<kAhead, kFar, Tile::kDqColumns0>(dk, dv, ds, s, column, group, m, residual);
    } else {
      if (wg == 0)
        finish_step<kAhead, kFar, Tile::kDqColumns0>(dk, dv, ds, s, column, group, m, residual);
      else
        finish_step<kAhead, kFar, Tile::kDqColumns1>(dk, dv, ds, s, column, group, m, residual);
    }
  }

  /// Until dQ of the tile before has left shared memory. ptxas would make all of P behind the wait for this tile's dQ,
  /// which costs 2 to 4 %; asm statements do not hold it. So the number of a hardware barrier before that wait depends
  /// on some of P: on their signs, which pack2() with kRelu makes 0 and ptxas does not know.
  template <bool kUsesP>
  __device__ __forceinline__ void wait_dq_empty(const uint32_t (&p)[kScores / 2]) {
    uint32_t made = 0;
    if constexpr (kUsesP) {
#pragma unroll
      for (int i = 0; i < kBeforeDq; ++i) made |= p[i];
    }
    ptx::named_barrier_sync(kBarrierDqEmpty + wg + (made >> 31), 160);
  }

  template <bool kAhead, bool kFar, int kColumns>
  __device__ __forceinline__ void finish_step(float (&dk)[kKeySums], float (&dv)[kD / 2], uint32_t (&ds)[kScores / 2],
                                              float (&s)[kScores], float (&column)[2], float (&group)[kM / 8], int m,
                                              float residual) {
    constexpr int kOnes = kFar ? 0 : Tile::kOnes;
    // The same arrays in both loops, or ptxas finds no registers (C7512).
    float dq[(kColumns + Tile::kOnes) / 2];
    uint32_t p[kScores / 2];
    issue_dq(first<(kColumns + kOnes) / 2>(dq), Tile::kSplitRows ? wg * 64 : 0, Tile::kSplitRows ? 0 : wg);
    issue_key_gradient(first<(kD + kOnes) / 2>(dk), ds, smem.q[q_done.slot]);
    float shift = 0.f;
    if constexpr (kAhead) {
      if constexpr (!kFar) shift = tile_shift();
      ptx::wgmma_wait<2>();
      ptx::fence_registers(s);
      this->template make_p<0, kEarly, kFar>(s, p, shift);
    }
    wait_dq_empty<kAhead>(p);
    ptx::wgmma_wait<1>();
    ptx::fence_registers(dq);
    this->template store_dq<!kFar>(dq, residual);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(dk);
    if (lane == 0) ptx::mbarrier_arrive(&smem.q_empty[q_done.slot]);
    q_done.advance();
    d_o.advance();
    if constexpr (kAhead)
      make_ds<true, kFar>(dv, s, p, ds, column, group, m + 1, shift);
    else
      send_dq();
  }

  __device__ __forceinline__ void run() {
    while (this->next()) work();
  }

  __device__ __forceinline__ void work() {
    float dk[kKeySums], dv[kD / 2];
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.f;
    bool have_keys = false;
    for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; ++head) {
      const int m_end = backward_m_end<kM, kN>(a, w, head);
      const int plain_begin = this->plain_begin(), plain_end = min(m_end, this->plain_end());
      const int m_near = Tile::kFarLoop ? backward_m_near<kM, kN>(a, w, head) : m_end;
      float column[2] = {0.f, 0.f};
#pragma unroll
      for (int i = kD / 2; i < kKeySums; ++i) dk[i] = 0.f;  // sums are a head's, dK all of the group's
      if (w.m_begin < m_end) {
        this->wait_key_bias();
        if (!have_keys) wait_keys();
        have_keys = true;
        uint32_t ds[kScores / 2];
        float group[kM / 8];
        for (int m = w.m_begin; m < m_end; ++m) {
          prepare(dv, ds, column, group, m, head);
          const int stop = m + 1 >= plain_begin ? plain_end : 0;
          const int near_stop = Tile::kFarLoop && m_near < stop ? m_near + 1 : stop;
          for (; m + 1 < near_stop; ++m) step<true, false>(dk, dv, ds, column, group, m);
          if constexpr (Tile::kFarLoop)
            for (; m + 1 < stop; ++m) {
              step<true, true>(dk, dv, ds, column, group, m);
#pragma unroll
              for (int g = 0; g < kM / 8; ++g) group[g] = 0.f;  // not kept over the loop: no registers for it
            }
          step<false, false>(dk, dv, ds, column, group, m);
        }
        this->release_key_bias();
      }
      if constexpr (kGate) {
        if constexpr (Tile::kOnes > 0)
          column[0] = dk[kD / 2], column[1] = dk[kD / 2 + 2];
        else
          this->sum_columns(column);
        this->store_column(column[0], this->key0, head);
        this->store_column(column[1], this->key0 + 8, head);
      }
    }
    if (!have_keys) wait_keys();
    ptx::named_barrier_sync(kBarrierConsumers, 256);  // both warpgroups are done with K and dS
    if (lane == 0) ptx::mbarrier_arrive(&smem.k_empty);
    this->template send_key_gradient<kD / 2>(dv, 1.f, smem.v, kBarrierKeyGradients);  // only this warpgroup read its V
    this->template send_key_gradient<kD / 2>(dk, a.scale, smem.ds, kBarrierKeyGradients + 2);
  }
};

template <typename T, int kHeadDim>
cudaError_t launch_backward(const BackwardArgs& a, cudaStream_t stream) {
  return a.prefix.r != nullptr ? launch_backward_kernel<BackwardConsumer<T, kHeadDim, true>>(a, stream)
                               : launch_backward_kernel<BackwardConsumer<T, kHeadDim, false>>(a, stream);
}

}  // namespace fox::cuda
