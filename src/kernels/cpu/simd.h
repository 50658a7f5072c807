#pragma once

// Include before any Highway header. The instruction sets that each kernel is compiled for: one that any processor has
// (plain scalars), AVX2 and AVX-512. The best one that the processor has is chosen when a kernel is first called.
#include <hwy/detect_targets.h>
#if HWY_ARCH_X86
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif

#include <string>
#include <vector>

namespace fox::kernels {

/// Names of the instruction sets that kernels were compiled for and this processor has, best first,
/// e.g. {"AVX3", "AVX2", "SCALAR"} (AVX3 is Highway's name of AVX-512).
std::vector<std::string> simd_paths();

/// Makes all kernels take one of simd_paths(), or the best one again for "". For tests and comparisons; not while
/// another thread computes. Throws std::invalid_argument on a path that is not among them.
void force_simd_path(const std::string& name);

}  // namespace fox::kernels
