#pragma once

// Thread blocks of a cluster that work together, and warps of a block that each have a task of their own: thin
// wrappers, as in ptx.cuh.

#include "kernels/cuda/ptx.cuh"

namespace fox::ptx {

/// This block's place in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// All threads of all blocks of the cluster; what they wrote to shared memory is visible.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
/// The address, as all blocks of the cluster see it, of what stands where `p` does in block `rank`.
__device__ __forceinline__ uint32_t map_to_block(const void* p, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_u32(p)), "r"(rank));
  return address;
}
/// Arrives on a barrier of any block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

/// Flat copy of `bytes` to where `dst` stands in each block of the cluster whose bit is set in `blocks`; the `bar` of
/// each counts its own.
__device__ __forceinline__ void bulk_load_multicast(void* dst, const void* src, uint32_t bytes, uint64_t* bar,
                                                    uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(smem_u32(dst)),
      "l"(src), "r"(bytes), "r"(smem_u32(bar)), "h"(blocks)
      : "memory");
}

/// Whether the phase of the given parity is over.
__device__ __forceinline__ bool mbarrier_test(uint64_t* bar, uint32_t parity) {
  uint32_t is_over;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(is_over)
               : "r"(smem_u32(bar)), "r"(parity)
               : "memory");
  return is_over != 0;
}

/// Flat copy of `bytes` from shared to global memory, of this thread's current group.
__device__ __forceinline__ void bulk_store(void* dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem_u32(src)), "r"(bytes)
               : "memory");
}

}  // namespace fox::ptx
