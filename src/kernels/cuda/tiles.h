#pragma once

// Tuning tables of the forgetting attention kernels: one row per head size that has a kernel of its own. Other head
// sizes run in the next larger one, the copy engine filling up with zeros.

namespace fox::cuda {

/// SM90 forward. A thread block owns kWarpgroups * 64 query rows and walks over tiles of kBlockN keys (64 or 128).
template <int kHeadDim>
struct ForwardTile;

// Three consumer warpgroups of 160 registers while O is small, else two of 232. All fill the register file, so one
// thread block runs on a multiprocessor; shared memory is cut to fit its 227 KB.
template <>
struct ForwardTile<32> {
  static constexpr int kWarpgroups = 3, kBlockN = 128, kStages = 2, kQueryStages = 2;
};
template <>
struct ForwardTile<64> {
  static constexpr int kWarpgroups = 3, kBlockN = 128, kStages = 2, kQueryStages = 2;
};
template <>
struct ForwardTile<96> {
  static constexpr int kWarpgroups = 2, kBlockN = 128, kStages = 2, kQueryStages = 2;
};
template <>
struct ForwardTile<128> {
  static constexpr int kWarpgroups = 2, kBlockN = 128, kStages = 2, kQueryStages = 2;
};
template <>
struct ForwardTile<192> {
  static constexpr int kWarpgroups = 2, kBlockN = 64, kStages = 2, kQueryStages = 2;
};
template <>
struct ForwardTile<256> {
  static constexpr int kWarpgroups = 2, kBlockN = 64, kStages = 2, kQueryStages = 1;
};

/// SM80, and float32 everywhere. A thread block of kWarps warps owns 16 rows a warp; tiles of kColumns rows of the
/// other side pass by in kStages stages. Shared memory fits the 99 KB of SM86, SM89 and SM120; 16-bit types need
/// kColumns to be a multiple of 16, all of them a divisor of 64.
template <int kElementBytes, int kHeadDim>
struct ForwardTileSm80;
template <>
struct ForwardTileSm80<2, 64> {
  static constexpr int kWarps = 4, kColumns = 64, kStages = 2;
};
template <>
struct ForwardTileSm80<2, 128> {
  static constexpr int kWarps = 4, kColumns = 64, kStages = 2;
};
template <>
struct ForwardTileSm80<2, 256> {
  static constexpr int kWarps = 4, kColumns = 32, kStages = 1;
};
template <>
struct ForwardTileSm80<4, 64> {
  static constexpr int kWarps = 4, kColumns = 32, kStages = 2;
};
template <>
struct ForwardTileSm80<4, 128> {
  static constexpr int kWarps = 4, kColumns = 32, kStages = 1;
};
template <>
struct ForwardTileSm80<4, 256> {
  static constexpr int kWarps = 2, kColumns = 16, kStages = 1;
};

template <int kElementBytes, int kHeadDim>
struct BackwardTileSm80;
template <>
struct BackwardTileSm80<2, 64> {
  static constexpr int kWarps = 4, kColumns = 64, kStages = 2;
};
template <>
struct BackwardTileSm80<2, 128> {
  static constexpr int kWarps = 4, kColumns = 32, kStages = 2;
};
template <>
struct BackwardTileSm80<2, 256> {
  static constexpr int kWarps = 4, kColumns = 16, kStages = 1;
};
template <>
struct BackwardTileSm80<4, 64> {
  static constexpr int kWarps = 4, kColumns = 32, kStages = 2;
};
template <>
struct BackwardTileSm80<4, 128> {
  static constexpr int kWarps = 4, kColumns = 16, kStages = 1;
};
template <>
struct BackwardTileSm80<4, 256> {
  static constexpr int kWarps = 2, kColumns = 8, kStages = 1;
};

/// Keys and values of this many bytes are worked on at a time, so that all multiprocessors read them from L2.
constexpr long long kL2WorkingSet = 32ll << 20;

}  // namespace fox::cuda
