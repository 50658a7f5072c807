#include "kernels/cuda/rms_norm.h"

#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/vec.cuh"

// Fast path: a team of whole warps has a row and each of its threads two to four pieces of it, all loaded before the
// first is used: several 16-byte loads on their way a thread are what fills the memory's bandwidth. Pieces stay in
// registers as they came (16-bit ones need half of what float32 would) and are converted twice, for the sums and for
// the result. Rows that are whole pieces of all threads (768, 1024, 1536, 2048, … columns) need no checks for their
// end. A mean over a group that is a power of two of lanes takes no barrier, nor does one over the row of a single
// warp; larger teams have a named barrier each. Any other shape: a warp for each (row, group), without branch or gate.
namespace fox::cuda {
namespace {

// Threads of a block; backward's small ones, where a row is short enough, come and go in finer steps.
constexpr int kBlock = 256, kBackwardBlock = 128, kMaxWarps = kBlock / 32;

// Elements of a piece: one 16-byte access of the wider dtype.
template <class TX, class TY>
constexpr int kElements = kVec<std::conditional_t<(sizeof(TX) > sizeof(TY)), TX, TY>>;

// The place of a thread: threadIdx.y is its team, blockDim.x the team's threads. kWhole: every thread has all its
// pieces.
template <int N, int kPieces, bool kWhole>
struct Place {
  int64_t row, step;  // first row and distance to the next
  int columns;

  template <class Params>
  __device__ explicit Place(const Params& p)
      : row(blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y),
        step(gridDim.x * static_cast<int64_t>(blockDim.y)),
        columns(static_cast<int>(p.groups * p.width)) {}
  __device__ int column(int piece) const { return static_cast<int>(piece * blockDim.x + threadIdx.x) * N; }
  __device__ bool has(int piece) const { return kWhole || column(piece) < columns; }
};

// Sums over the lanes of a group for each piece or, with group_lanes = 0, over the whole team for all of them. Two
// buffers take turns, so one barrier a row suffices.
template <class A, int kCount, int kPieces>
struct TeamSum {
  A buffer[2][kCount][kMaxWarps];

  __device__ __forceinline__ void operator()(A (&values)[kCount][kPieces], int group_lanes, int turn) {
    if (group_lanes) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) values[c][piece] = sum_lanes(values[c][piece], group_lanes);
      }
      return;
    }
    const int warps = blockDim.x / 32, first = threadIdx.y * warps, warp = first + threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      A sum = values[c][0];
#pragma unroll
      for (int piece = 1; piece < kPieces; ++piece) sum += values[c][piece];
      sum = sum_lanes(sum, 32);
      if (warps > 1 && threadIdx.x % 32 == 0) buffer[turn][c][warp] = sum;
      values[c][0] = sum;
    }
    if (warps > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        values[c][0] = 0;
        for (int w = 0; w < warps; ++w) values[c][0] += buffer[turn][c][first + w];
      }
    }
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
#pragma unroll
      for (int piece = 1; piece < kPieces; ++piece) values[c][piece] = values[c][0];
    }
  }
};

template <class A, int N, int kPieces>
struct Weights {
  const A* weight;  // or nullptr for 1
  int at[kPieces];  // where those of the thread's pieces are

  template <class Params, class Place>
  __device__ Weights(const Params& p, const Place& place) : weight(p.weight) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = place.column(piece), width = static_cast<int>(p.width);
      at[piece] = column / width * static_cast<int>(p.weight_stride) + column % width;
    }
  }
  __device__ __forceinline__ void load(int piece, Vec<A, N>& w) const {
    if (weight) {
      w.load(weight + at[piece]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) w.v[i] = 1;
    }
  }
};

template <class TX, class TY, class A, bool kGated, int kPieces, bool kWhole>
__global__ void __launch_bounds__(kBlock, kGated&& kPieces == 4 ? 3 : 4)
    forward_rows(RmsNormParams<TX, TY, A> p, TX* sum, TY* y, int group_lanes) {
  constexpr int N = kElements<TX, TY>;
  __shared__ TeamSum<A, 1, kPieces> team_sum;
  const Place<N, kPieces, kWhole> place(p);
  const Weights<A, N, kPieces> weights(p, place);
  const TY* extra = kGated ? p.gate : p.branch;
  const int64_t extra_stride = kGated ? p.gate_stride : p.branch_stride;
  const A inverse_width = A(1) / p.width;
  int turn = 0;
  for (int64_t row = place.row; row < p.rows; row += place.step, turn ^= 1) {
    Raw<TX, N> x[kPieces];
    Raw<TY, N> e[kPieces];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      x[piece] = {}, e[piece] = {};
      if (!place.has(piece)) continue;
      x[piece].load(p.x + row * p.x_stride + place.column(piece));
      if (extra) e[piece].load(extra + row * extra_stride + place.column(piece));
    }
    A squares[1][kPieces] = {};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (!kGated && extra) {
        // The norm is that of the sum as it is kept, so that the backward pass meets the same numbers.
        A added[N];
#pragma unroll
        for (int i = 0; i < N; ++i) added[i] = x[piece][i] + e[piece][i];
        x[piece].pack(added);
        if (place.has(piece)) x[piece].store(sum + row * place.columns + place.column(piece));
      }
#pragma unroll
      for (int i = 0; i < N; ++i) squares[0][piece] += x[piece][i] * x[piece][i];
    }
    team_sum(squares, group_lanes, turn);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (!place.has(piece)) continue;
      const A r = rsqrt(squares[0][piece] * inverse_width + p.eps);
      Vec<A, N> w;
      Vec<TY, N> out;
      weights.load(piece, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out.v[i] = x[piece][i] * r * w.v[i];
        if constexpr (kGated) {
          const A g = e[piece][i], s = sigmoid<TY>(g);
          out.v[i] *= p.activation == Activation::kSilu ? g * s : s;
        }
      }
      out.store(y + row * place.columns + place.column(piece));
    }
  }
}

// The teams of a block add up what they have in an order of their own, then groups that share a weight meet.
template <class A, int N, int kPieces, class Params, class Place>
__device__ void leave_weight_gradient(const Params& p, const Place& place, const A (&dw)[kPieces][N], A* partial) {
  extern __shared__ __align__(16) unsigned char shared[];
  A* columns = reinterpret_cast<A*>(shared);
  for (int team = 0; team < blockDim.y; ++team) {
    if (threadIdx.y == team) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        if (!place.has(piece)) continue;
        A* own = columns + place.column(piece);
        Vec<A, N> sum = {};
        if (team) sum.load(own);
#pragma unroll
        for (int i = 0; i < N; ++i) sum.v[i] += dw[piece][i];
        sum.store(own);
      }
    }
    __syncthreads();
  }
  const int size = p.weight_stride ? place.columns : static_cast<int>(p.width);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < size; i += blockDim.x * blockDim.y) {
    A total = 0;
    for (int column = i; column < place.columns; column += size) total += columns[column];
    partial[static_cast<int64_t>(blockIdx.x) * size + i] = total;
  }
}

// Threads of a block that have four pieces each: of eight elements, a float32 sum for each of them takes so many
// registers that a multiprocessor has no more than three blocks of 128.
template <class TX, class TY>
constexpr int kMostThreads = kElements<TX, TY> == 8 ? kBackwardBlock : kBlock;

template <class TX, class TY, class A, bool kGated, int kPieces, bool kWhole>
__global__ void __launch_bounds__(kPieces == 4 ? kMostThreads<TX, TY> : kBlock,
                                  kPieces == 4 && kElements<TX, TY> == 8 ? 3 : 2)
    backward_rows(RmsNormParams<TX, TY, A> p, const TY* dy, const TX* dsum, RmsNormGradients<TX, TY, A> out,
                  int group_lanes) {
  constexpr int N = kElements<TX, TY>;
  __shared__ TeamSum<A, 2, kPieces> team_sum;
  const Place<N, kPieces, kWhole> place(p);
  const Weights<A, N, kPieces> weights(p, place);
  const A inverse_width = A(1) / p.width;
  A dw[kPieces][N] = {};
  int turn = 0;
  ptx::wait_for_previous_kernel();
  for (int64_t row = place.row; row < p.rows; row += place.step, turn ^= 1) {
    Raw<TX, N> x[kPieces], d[kPieces];
    Raw<TY, N> g[kPieces], gate[kPieces];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      x[piece] = {}, d[piece] = {}, g[piece] = {}, gate[piece] = {};
      if (!place.has(piece)) continue;
      const int64_t at = row * place.columns + place.column(piece);
      x[piece].load(p.x + row * p.x_stride + place.column(piece));
      g[piece].load(dy + at);
      if constexpr (kGated) {
        gate[piece].load(p.gate + row * p.gate_stride + place.column(piece));
      } else {
        if (dsum) d[piece].load(dsum + at);
      }
    }
    // dy through the activation, and what the activation's derivative takes.
    const auto through_gate = [&](int piece, int i, A& slope) -> A {
      if constexpr (!kGated) return g[piece][i];
      const A z = gate[piece][i], s = sigmoid<TY>(z), dout = g[piece][i];
      const bool silu = p.activation == Activation::kSilu;
      slope = dout * s * (silu ? 1 + z * (1 - s) : 1 - s);
      return dout * (silu ? z * s : s);
    };
    A sums[2][kPieces] = {};
    A slope = 0;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (!place.has(piece)) continue;
      Vec<A, N> w;
      weights.load(piece, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A v = x[piece][i];
        sums[0][piece] += v * v;
        sums[1][piece] += v * through_gate(piece, i, slope) * w.v[i];
      }
    }
    team_sum(sums, group_lanes, turn);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (!place.has(piece)) continue;
      const int64_t at = row * place.columns + place.column(piece);
      const A r = rsqrt(sums[0][piece] * inverse_width + p.eps), pull = sums[1][piece] * r * r * inverse_width;
      Vec<A, N> w;
      weights.load(piece, w);
      Vec<TX, N> dx;
      Vec<TY, N> dgate;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A v = x[piece][i], dn = through_gate(piece, i, slope);
        dw[piece][i] += dn * v * r;
        dx.v[i] = r * (dn * w.v[i] - v * pull) + d[piece][i];
        if constexpr (kGated) dgate.v[i] = slope * v * r * w.v[i];
      }
      dx.store(out.dx + at);
      if constexpr (kGated) {
        dgate.store(out.dgate + at);
      } else if (out.dbranch) {
        Vec<TY, N> dbranch;
#pragma unroll
        for (int i = 0; i < N; ++i) dbranch.v[i] = dx.v[i];
        dbranch.store(out.dbranch + at);
      }
    }
  }
  ptx::start_next_kernel();
  if (out.partial) leave_weight_gradient(p, place, dw, out.partial);
}

// --- any shape -------------------------------------------------------------------------------------------------------

template <class T, class A>
struct Group {
  int64_t row, group;
  const T* x;
  const A* weight;
  __device__ explicit Group(const RmsNormParams<T, T, A>& p) {
    const int64_t item = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
    row = item / p.groups, group = item % p.groups;
    x = p.x + row * p.x_stride + group * p.width;
    weight = p.weight ? p.weight + group * p.weight_stride : nullptr;
  }
};

template <class T, class A>
__device__ A inverse_rms(const RmsNormParams<T, T, A>& p, const T* x) {
  A sum = 0;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) sum += to_compute(x[i]) * to_compute(x[i]);
  return rsqrt(sum_lanes(sum, 32) / p.width + p.eps);
}

template <class T, class A>
__global__ void forward_groups(RmsNormParams<T, T, A> p, T* y) {
  const Group<T, A> at(p);
  if (at.row >= p.rows) return;
  const A r = inverse_rms(p, at.x);
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
    y[(at.row * p.groups + at.group) * p.width + i] =
        from_compute<T>(to_compute(at.x[i]) * r * (at.weight ? at.weight[i] : A(1)));
  }
}

template <class T, class A>
__global__ void backward_groups(RmsNormParams<T, T, A> p, const T* dy, T* dx) {
  const Group<T, A> at(p);
  if (at.row >= p.rows) return;
  const A r = inverse_rms(p, at.x);
  const int64_t base = (at.row * p.groups + at.group) * p.width;
  A dot = 0;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
    dot += to_compute(at.x[i]) * to_compute(dy[base + i]) * (at.weight ? at.weight[i] : A(1));
  }
  const A pull = sum_lanes(dot, 32) * r * r / p.width;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
    const A g = to_compute(dy[base + i]) * (at.weight ? at.weight[i] : A(1));
    dx[base + i] = from_compute<T>(r * (g - to_compute(at.x[i]) * pull));
  }
}

// A warp sums every kGeneralParts-th row of one group.
constexpr int64_t kGeneralParts = 256;

template <class T, class A>
__global__ void weight_gradient(RmsNormParams<T, T, A> p, const T* dy, A* partial) {
  const int64_t columns = p.groups * p.width;
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  const int64_t group = warp % p.groups, part = warp / p.groups, parts = kGeneralParts;
  if (part >= parts) return;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) partial[part * columns + group * p.width + i] = 0;
  for (int64_t row = part; row < p.rows; row += parts) {
    const T* x = p.x + row * p.x_stride + group * p.width;
    const A r = inverse_rms(p, x);
    for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
      partial[part * columns + group * p.width + i] +=
          to_compute(dy[row * columns + group * p.width + i]) * to_compute(x[i]) * r;
    }
  }
}

// --- launching -------------------------------------------------------------------------------------------------------

template <class TX, class TY, class A>
int64_t pieces_of(const RmsNormParams<TX, TY, A>& p) {
  return p.groups * p.width / kElements<TX, TY>;
}

/// Pieces of a thread where rows divide so; backward has three tensors of them with a gate.
constexpr int kMany = 4;
template <class TX, class TY>
constexpr int kGatedBackward = kElements<TX, TY> == 8 ? 2 : kMany;

/// Calls f.template operator()<kGated, kPieces, kWhole>() for the kernel that p takes: kMany pieces a thread (with a
/// gate kManyGated), or three.
template <int kManyGated, class TX, class TY, class A, class F>
auto with_kernel(const RmsNormParams<TX, TY, A>& p, const F& f) {
  const int64_t pieces = pieces_of(p);
  const auto by_pieces = [&]<bool kGated, int kOwn>() {
    const bool many = pieces % (32 * kOwn) == 0 && pieces <= kMany * kMostThreads<TX, TY>, three = pieces % 96 == 0;
    if (many && !(three && kElements<TX, TY> == 8)) return f.template operator()<kGated, kOwn, true>();
    if (three) return f.template operator()<kGated, 3, true>();
    return f.template operator()<kGated, 3, false>();
  };
  if constexpr (std::is_same_v<TX, TY>) {
    if (p.gate) return by_pieces.template operator()<true, kManyGated>();
  }
  return by_pieces.template operator()<false, kMany>();
}

/// The threads of a team, and as many teams as make a block.
template <class TX, class TY, class A>
dim3 row_block(const RmsNormParams<TX, TY, A>& p, int thread_pieces, int threads) {
  const int64_t warp_pieces = 32 * thread_pieces;
  const auto team = static_cast<unsigned>((pieces_of(p) + warp_pieces - 1) / warp_pieces * 32);
  return {team, std::max(threads / team, 1U)};
}

template <class TX, class TY, class A>
int64_t count_blocks(const RmsNormParams<TX, TY, A>& p, dim3 block) {
  return (p.rows + block.y - 1) / block.y;
}

/// Lanes of a group on the fast path; 0: the team makes the sum.
template <class TX, class TY, class A>
int group_lanes(const RmsNormParams<TX, TY, A>& p) {
  return p.groups == 1 ? 0 : static_cast<int>(p.width / kElements<TX, TY>);
}

/// As many blocks as run at once, or fewer where there is less to do: each leaves a partial sum.
template <class TX, class TY, class A>
int64_t backward_blocks(const RmsNormParams<TX, TY, A>& p) {
  return with_kernel<kGatedBackward<TX, TY>>(p, [&]<bool kGated, int kPieces, bool kWhole>() {
    const dim3 block = row_block(p, kPieces, kBackwardBlock);
    const int64_t resident = resident_blocks(backward_rows<TX, TY, A, kGated, kPieces, kWhole>, block.x * block.y,
                                             p.groups * p.width * sizeof(A));
    return std::min(count_blocks(p, block), resident);
  });
}

}  // namespace

template <class TX, class TY, class A>
bool rms_norm_is_fast(const RmsNormParams<TX, TY, A>& p) {
  constexpr int64_t N = kElements<TX, TY>;
  const int64_t lanes = p.width / N;
  const bool fits = with_kernel<kGatedBackward<TX, TY>>(
      p, [&]<bool kGated, int kPieces, bool kWhole>() { return row_block(p, kPieces, kBackwardBlock).x <= kBlock; });
  return fits && p.width % N == 0 && is_aligned(p.x, N, p.x_stride) && is_vectorizable<A>(p.weight) &&
         is_aligned(p.branch, N, p.branch_stride) && is_aligned(p.gate, N, p.gate_stride) &&
         (p.groups == 1 || (lanes <= 32 && (lanes & (lanes - 1)) == 0));
}

template <class TX, class TY, class A>
cudaError_t rms_norm(const RmsNormParams<TX, TY, A>& p, TX* sum, TY* y, cudaStream_t stream) {
  if (p.rows * p.groups * p.width == 0) return cudaSuccess;
  if (rms_norm_is_fast(p)) {
    with_kernel<kMany>(p, [&]<bool kGated, int kPieces, bool kWhole>() {
      const dim3 block = row_block(p, kPieces, kBlock);
      forward_rows<TX, TY, A, kGated, kPieces, kWhole>
          <<<static_cast<unsigned>(count_blocks(p, block)), block, 0, stream>>>(p, sum, y, group_lanes(p));
    });
  } else if constexpr (std::is_same_v<TX, TY>) {
    forward_groups<<<grid_of(p.rows * p.groups * 32), kThreads, 0, stream>>>(p, y);
  }
  return cudaGetLastError();
}

template <class TX, class TY, class A>
int64_t rms_norm_backward_partials(const RmsNormParams<TX, TY, A>& p) {
  if (rms_norm_is_fast(p)) return backward_blocks(p);
  return p.weight_stride ? kGeneralParts : kGeneralParts * p.groups;
}

template <class TX, class TY, class A>
cudaError_t rms_norm_backward(const RmsNormParams<TX, TY, A>& p, const TY* dy, const TX* dsum,
                              const RmsNormGradients<TX, TY, A>& out, cudaStream_t stream) {
  if (p.rows * p.groups * p.width == 0) return cudaSuccess;
  if (rms_norm_is_fast(p)) {
    with_kernel<kGatedBackward<TX, TY>>(p, [&]<bool kGated, int kPieces, bool kWhole>() {
      return launch_early(backward_rows<TX, TY, A, kGated, kPieces, kWhole>, static_cast<unsigned>(backward_blocks(p)),
                          row_block(p, kPieces, kBackwardBlock), static_cast<int>(p.groups * p.width * sizeof(A)),
                          stream, p, dy, dsum, out, group_lanes(p));
    });
  } else if constexpr (std::is_same_v<TX, TY>) {
    backward_groups<<<grid_of(p.rows * p.groups * 32), kThreads, 0, stream>>>(p, dy, out.dx);
    if (out.partial) {
      weight_gradient<<<grid_of(kGeneralParts * p.groups * 32), kThreads, 0, stream>>>(p, dy, out.partial);
    }
  }
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(TX, TY)                                                                           \
  template bool rms_norm_is_fast(const RmsNormParams<TX, TY, Compute<TX>>&);                              \
  template cudaError_t rms_norm(const RmsNormParams<TX, TY, Compute<TX>>&, TX*, TY*, cudaStream_t);       \
  template int64_t rms_norm_backward_partials(const RmsNormParams<TX, TY, Compute<TX>>&);                 \
  template cudaError_t rms_norm_backward(const RmsNormParams<TX, TY, Compute<TX>>&, const TY*, const TX*, \
                                         const RmsNormGradients<TX, TY, Compute<TX>>&, cudaStream_t);
FOX_INSTANTIATE(__nv_bfloat16, __nv_bfloat16)
FOX_INSTANTIATE(__half, __half)
FOX_INSTANTIATE(float, float)
FOX_INSTANTIATE(double, double)
FOX_INSTANTIATE(float, __nv_bfloat16)
FOX_INSTANTIATE(float, __half)

}  // namespace fox::cuda
