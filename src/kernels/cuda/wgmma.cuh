#pragma once

// wgmma.mma_async m64nNk16, float32 accumulators, bf16 or fp16 operands, as Wgmma<T, N>::ss (A and B from shared
// memory) and ::rs (A from registers). One warpgroup computes d (+)= A·B with A 64×16 and B 16×N.
//
// Register layouts (r = lane / 4, q = lane % 4, warp w of the warpgroup owns rows 16 w .. 16 w + 15):
//   d[4 g + 0, 1] = row r,     columns 8 g + 2 q + 0, 1;    d[4 g + 2, 3] = row r + 8, the same columns
//   a[0] = row r, columns 2q, 2q+1;  a[1] = row r + 8;  a[2] = row r, columns 8 + 2q, +1;  a[3] = row r + 8
// so two adjacent 8-column groups of an accumulator, packed to 16 bits, are an A operand without any shuffle.
//
// Shared-memory operands use the 128-byte swizzle: panels of 64 elements (128 bytes) a row, 8 rows an atom of 1 KB.
//   K-major (the 16 of k run along the panel's row): descriptor_k_major; the next k16 step is 32 bytes further.
//   MN-major (k runs down the rows; pass kTransB = 1 or kTransA = 1): descriptor_mn_major; the next k16 step is
//   16 rows = 2 KB further; panels of 64 columns lie `panel_bytes` apart.
// The list of operands below is long because inline PTX wants every register by name; it holds no logic.

#include "kernels/cuda/ptx.cuh"

namespace fox::ptx {

/// A descriptor is two words: how the operand lies (compile-time), and where. Only the second moves, in 16-byte units:
/// descriptor(where + bytes / 16, layout). `address` is a shared-memory address, 1 KB aligned up to the k16 step.
constexpr uint32_t kPanelLayout = (1u << 30) | (1024 >> 4);
__device__ __forceinline__ uint32_t descriptor_word(uint32_t address, uint32_t panel_bytes = 16) {
  return (panel_bytes >> 4 << 16) | (address >> 4);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t word) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(word), "r"(kPanelLayout));
  return d;
}
/// K-major operand of rows of 16 bytes, packed without swizzle, for the first 8 of a k16 step; the same rows' second 8
/// lie `second_half` bytes further.
__device__ __forceinline__ uint64_t descriptor_narrow(uint32_t address, uint32_t second_half) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"((second_half >> 4 << 16) | (address >> 4)), "r"(128 >> 4));
  return d;
}
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address) {
  return descriptor(descriptor_word(address));
}
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t address, uint32_t panel_bytes) {
  return descriptor(descriptor_word(address, panel_bytes));
}
/// Byte offset of a 16-byte chunk (0..7) of a row within a 128-byte-swizzled panel.
__device__ __forceinline__ uint32_t swizzle128(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

template <typename T, int kN>
struct Wgmma;

#define FOX_WGMMA(TYPE, NAME, N, ACC, OUT, A0, A1, A2, A3, A4, A5)                                                     \
  template <>                                                                                                          \
  struct Wgmma<TYPE, N> {                                                                                              \
    template <int kTransA = 0, int kTransB = 0>                                                                        \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" ACC "}, " A0 ", " A1 ", p, 1, 1, " A3 ", " A4 ";\n}"                                  \
                   : OUT                                                                                               \
                   : "l"(a), "l"(b), "r"(int(accumulate)), "n"(kTransA), "n"(kTransB));                                \
    }                                                                                                                  \
    template <int kTransB = 0>                                                                                         \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,                   \
                                              bool accumulate) {                                                       \
      rs<kTransB>(d, a[0], a[1], a[2], a[3], b, accumulate);                                                           \
    }                                                                                                                  \
    template <int kTransB = 0>                                                                                         \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,   \
                                              uint64_t b, bool accumulate) {                                           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" ACC "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", p, 1, 1, %" FOX_LAST_##N ";\n}"     \
                   : OUT                                                                                               \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(accumulate)), "n"(kTransB));                  \
    }                                                                                                                  \
  };

#define FOX_LAST_32 "22"
#define FOX_ACC_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FOX_OUT_32                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
FOX_WGMMA(__nv_bfloat16, "bf16", 32, FOX_ACC_32, FOX_OUT_32, "%16", "%17", "%18", "%19", "%20", "%21")
FOX_WGMMA(__half, "f16", 32, FOX_ACC_32, FOX_OUT_32, "%16", "%17", "%18", "%19", "%20", "%21")

#define FOX_LAST_64 "38"
#define FOX_ACC_64                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOX_OUT_64                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
FOX_WGMMA(__nv_bfloat16, "bf16", 64, FOX_ACC_64, FOX_OUT_64, "%32", "%33", "%34", "%35", "%36", "%37")
FOX_WGMMA(__half, "f16", 64, FOX_ACC_64, FOX_OUT_64, "%32", "%33", "%34", "%35", "%36", "%37")

#define FOX_LAST_72 "42"
#define FOX_ACC_72                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35"
#define FOX_OUT_72                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
FOX_WGMMA(__nv_bfloat16, "bf16", 72, FOX_ACC_72, FOX_OUT_72, "%36", "%37", "%38", "%39", "%40", "%41")

#define FOX_LAST_96 "54"
#define FOX_ACC_96                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FOX_OUT_96                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
FOX_WGMMA(__nv_bfloat16, "bf16", 96, FOX_ACC_96, FOX_OUT_96, "%48", "%49", "%50", "%51", "%52", "%53")
FOX_WGMMA(__half, "f16", 96, FOX_ACC_96, FOX_OUT_96, "%48", "%49", "%50", "%51", "%52", "%53")

#define FOX_LAST_128 "70"
#define FOX_ACC_128                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOX_OUT_128                                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
FOX_WGMMA(__nv_bfloat16, "bf16", 128, FOX_ACC_128, FOX_OUT_128, "%64", "%65", "%66", "%67", "%68", "%69")
FOX_WGMMA(__half, "f16", 128, FOX_ACC_128, FOX_OUT_128, "%64", "%65", "%66", "%67", "%68", "%69")

#define FOX_LAST_192 "102"
#define FOX_ACC_192                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FOX_OUT_192                                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), \
      "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), \
      "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), \
      "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), \
      "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
FOX_WGMMA(__nv_bfloat16, "bf16", 192, FOX_ACC_192, FOX_OUT_192, "%96", "%97", "%98", "%99", "%100", "%101")
FOX_WGMMA(__half, "f16", 192, FOX_ACC_192, FOX_OUT_192, "%96", "%97", "%98", "%99", "%100", "%101")

#define FOX_LAST_256 "134"
#define FOX_ACC_256                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FOX_OUT_256                                                                                                   \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),         \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),          \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),         \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),         \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),         \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),         \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),         \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),         \
      "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),         \
      "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),         \
      "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),         \
      "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),         \
      "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),    \
      "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), \
      "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), \
      "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
FOX_WGMMA(__nv_bfloat16, "bf16", 256, FOX_ACC_256, FOX_OUT_256, "%128", "%129", "%130", "%131", "%132", "%133")
FOX_WGMMA(__half, "f16", 256, FOX_ACC_256, FOX_OUT_256, "%128", "%129", "%130", "%131", "%132", "%133")

#undef FOX_WGMMA

}  // namespace fox::ptx
