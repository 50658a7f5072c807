#include "kernels/cuda/chunk_scan.h"
#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {
namespace {

constexpr int kScanThreads = 128;
constexpr int kAhead = 8;  // chunks whose loads are in flight together: a thread has nothing else to hide them behind

__global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ ChunkScanParams p) {
  const int64_t element = (int64_t(blockIdx.x) * kScanThreads + threadIdx.x) * 4, sequence = blockIdx.y;
  if (element >= p.elements) return;
  const int64_t base = sequence * p.chunks * p.elements + element;
  const float* decay = p.decay + sequence * p.chunks * p.decays + element / (p.elements / p.decays);
  float4 s =
      p.first ? *reinterpret_cast<const float4*>(p.first + sequence * p.elements + element) : make_float4(0, 0, 0, 0);
  for (int64_t i0 = 0; i0 < p.chunks; i0 += kAhead) {
    float4 added[kAhead];
    float keep[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i0 + i >= p.chunks) continue;
      const int64_t c = p.backwards ? p.chunks - 1 - i0 - i : i0 + i;
      added[i] = __ldcs(reinterpret_cast<const float4*>(p.added + base + c * p.elements));
      keep[i] = decay[c * p.decays];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i0 + i >= p.chunks) continue;
      const int64_t c = p.backwards ? p.chunks - 1 - i0 - i : i0 + i;
      const uint2 rounded{ptx::pack2<__nv_bfloat16>(s.x, s.y), ptx::pack2<__nv_bfloat16>(s.z, s.w)};
      *reinterpret_cast<uint2*>(p.seen + base + c * p.elements) = rounded;
      s.x = fmaf(keep[i], s.x, added[i].x), s.y = fmaf(keep[i], s.y, added[i].y);
      s.z = fmaf(keep[i], s.z, added[i].z), s.w = fmaf(keep[i], s.w, added[i].w);
    }
  }
  *reinterpret_cast<float4*>(p.last + sequence * p.elements + element) = s;
}

}  // namespace

cudaError_t chunk_scan(const ChunkScanParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.elements / 4 + kScanThreads - 1) / kScanThreads);
  scan_kernel<<<dim3(blocks, static_cast<unsigned>(p.sequences)), kScanThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fox::cuda
