#include "base/memory.h"

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace fox {

void keep_freed_memory() {
#ifdef M_TRIM_THRESHOLD
  // Both at once: either alone switches off the growth of the other and makes things worse (measured). 32 MiB is the
  // largest threshold that glibc takes; larger blocks still come from the system.
  constexpr int kMmapThreshold = 32 << 20, kTrimThreshold = 1 << 30;
  mallopt(M_MMAP_THRESHOLD, kMmapThreshold);
  mallopt(M_TRIM_THRESHOLD, kTrimThreshold);
#endif
}

}  // namespace fox
