#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace fox::kernels {

/// While it lives, this thread takes numbers below the normal range (10^-38 in float32) for 0. Products of decays end
/// there all the time, and each operation on such a number costs a hundred cycles.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned before_;
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

}  // namespace fox::kernels
