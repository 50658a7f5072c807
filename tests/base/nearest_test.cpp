#include "base/nearest.h"

#include <gtest/gtest.h>

namespace fox {
namespace {

const std::vector<std::string> kWords{"hidden_size", "num_heads", "num_hidden_layers", "use_rope", "lr"};

TEST(Nearest, FindsEachKindOfSlip) {
  EXPECT_EQ(nearest("hiden_size", kWords), "hidden_size");  // missing letter
  EXPECT_EQ(nearest("num_headss", kWords), "num_heads");    // one too many
  EXPECT_EQ(nearest("use_rpoe", kWords), "use_rope");       // swapped
  EXPECT_EQ(nearest("num_hidden_layer", kWords), "num_hidden_layers");
}

TEST(Nearest, DoesNotGuessWildly) { EXPECT_EQ(nearest("temperature", kWords), ""); }

TEST(Nearest, SuggestListsWhatIsKnown) {
  EXPECT_EQ(suggest("use_rop", kWords), "did you mean 'use_rope'?");
  EXPECT_EQ(suggest("temperature", kWords), "known: hidden_size, num_heads, num_hidden_layers, use_rope, lr");
}

}  // namespace
}  // namespace fox
