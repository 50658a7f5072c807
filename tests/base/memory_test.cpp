#include "base/memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <vector>

namespace fox {
namespace {

long page_faults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// Buffers of the size of activations, freed and allocated again, touch no new page once the process has grown.
TEST(Memory, FreedBuffersAreReusedWithoutPageFaults) {
  keep_freed_memory();
  const auto round = [] {
    std::vector<std::vector<char>> buffers;
    for (size_t kilobytes : {200, 1000, 4000, 9000}) buffers.emplace_back(kilobytes << 10, 'x');
  };
  round();
  const long before = page_faults();
  for (int i = 0; i < 20; ++i) round();
  EXPECT_LT(page_faults() - before, 200) << "20 rounds touch 71,000 pages";
}

}  // namespace
}  // namespace fox
