#include "ops/head_runs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace fox::ops {
namespace {

// Against ATen's indexing by the same heads.
TEST(HeadRuns, AreTheHeadsByTheirNumbers) {
  const std::vector<std::vector<int64_t>> cases{{0},       {5},          {0, 1, 2, 3, 4, 5}, {2, 3},
                                                {0, 2, 4}, {0, 1, 4, 5}, {1, 3, 4}};
  for (const int64_t group : {1, 3}) {
    for (const auto& heads : cases) {
      const HeadRuns runs(heads, group);
      const auto index = (at::tensor(heads, at::kLong).unsqueeze(1) * group + at::arange(group, at::kLong)).flatten();
      const auto t = at::randn({2, 7, 6 * group, 4});
      const auto values = at::randn({2, 7, index.size(0), 4});
      EXPECT_TRUE(at::equal(runs.of(t, 2), t.index_select(2, index)));
      const auto turned = t.transpose(1, 2);  // heads elsewhere, and not contiguous
      EXPECT_TRUE(at::equal(runs.of(turned, 1), turned.index_select(1, index)));

      const auto put = t.clone(), added = t.clone();
      runs.put(put, 2, values);
      runs.add(added, 2, values);
      EXPECT_TRUE(at::equal(put, t.index_copy(2, index, values)));
      EXPECT_TRUE(at::equal(added, t.index_add(2, index, values)));
    }
  }
}

TEST(HeadRuns, OfNeighboursIsAView) {
  const auto t = at::randn({2, 7, 6, 4});
  EXPECT_TRUE(HeadRuns({2, 3, 4}).of(t, 2).is_alias_of(t));
  EXPECT_FALSE(HeadRuns({2, 4}).of(t, 2).is_alias_of(t));
}

}  // namespace
}  // namespace fox::ops
