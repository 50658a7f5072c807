#include "data/batch_stream.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "base/error.h"
#include "data/permutation.h"
#include "support/temporary_folder.h"

namespace fox::data {
namespace {

namespace fs = std::filesystem;

class BatchStreamTest : public ::testing::Test {
 protected:
  /// A store whose three-byte neighbourhoods are all different: a context tells where it was taken.
  std::shared_ptr<const TokenStore> store_of(int64_t size) {
    std::string text;
    for (int64_t i = 0; std::ssize(text) < size - 1; ++i) {
      text += static_cast<char>(i % 251);
      text += static_cast<char>(i / 251);
    }
    text.resize(static_cast<size_t>(size - 1));
    std::ofstream(dir_ / "a.txt", std::ios::binary) << text;
    auto store =
        std::make_shared<const TokenStore>(build_token_store({dir_ / "a.txt"}, Tokenizer::gpt2(0), dir_ / "store"));
    tokens_.resize(static_cast<size_t>(store->num_tokens()));
    store->read(0, tokens_);
    return store;
  }
  /// The place in the store where each row's labels stand, as on a ring.
  std::vector<int64_t> places(const Batch& batch) const {
    std::vector<int64_t> found;
    const auto n = std::ssize(tokens_);
    for (int64_t row = 0; row < batch.labels_BT.size(0); ++row) {
      const int64_t* labels = batch.labels_BT.data_ptr<int64_t>() + row * batch.labels_BT.size(1);
      for (int64_t at = 0; at < n; ++at) {
        int64_t same = 0;
        while (same < batch.labels_BT.size(1) && tokens_[(at + same) % n] == labels[same]) ++same;
        if (same == batch.labels_BT.size(1)) found.push_back(at);
      }
    }
    return found;
  }

  test::TemporaryFolder folder_;
  fs::path dir_ = folder_.path();
  std::vector<int32_t> tokens_;
};

constexpr int32_t kStart = 256;

TEST_F(BatchStreamTest, InputsAreLabelsShiftedBehindTheStart) {
  const BatchStream stream(store_of(1000), 10, 1, kStart);
  const Batch batch = stream.get(3, 5);
  ASSERT_EQ(batch.ids_BT.sizes(), (std::vector<int64_t>{5, 10}));
  ASSERT_EQ(batch.labels_BT.sizes(), (std::vector<int64_t>{5, 10}));
  EXPECT_EQ(batch.ids_BT.scalar_type(), at::kLong);
  for (int64_t row = 0; row < 5; ++row) EXPECT_EQ(batch.ids_BT[row][0].item<int64_t>(), kStart);
  EXPECT_TRUE(at::equal(batch.ids_BT.slice(1, 1), batch.labels_BT.slice(1, 0, 9)));
  EXPECT_EQ(places(batch).size(), 5u);
}

TEST_F(BatchStreamTest, EachContextComesOnceAnEpoch) {
  for (const int64_t size : {10, 19, 20, 1003, 1999}) {
    const BatchStream stream(store_of(size), 10, 7, kStart);
    const int64_t n = stream.contexts_per_epoch();
    ASSERT_EQ(n, size / 10);
    std::set<int64_t> entries;
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      const std::vector<int64_t> found = places(stream.get(epoch * n, n));
      ASSERT_EQ(std::ssize(found), n);
      std::set<int64_t> covered;
      for (const int64_t at : found) {
        for (int64_t i = 0; i < 10; ++i) covered.insert((at + i) % size);
      }
      EXPECT_EQ(std::ssize(covered), n * 10) << "contexts of one epoch do not overlap";
      EXPECT_TRUE(n < 20 || !std::is_sorted(found.begin(), found.end()));
      entries.insert(found[0]);
    }
    EXPECT_TRUE(n < 20 || entries.size() == 3) << "epochs differ";
  }
}

TEST_F(BatchStreamTest, CanBeEnteredAnywhere) {
  const auto store = store_of(1003);
  const BatchStream stream(store, 10, 7, kStart), again(store, 10, 7, kStart), other(store, 10, 8, kStart);
  const Batch all = stream.get(0, 250);
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {99, 3}, {123, 100}, {249, 1}, {5, 0}}) {
    const Batch part = again.get(first, count);
    EXPECT_TRUE(at::equal(part.ids_BT, all.ids_BT.slice(0, first, first + count)));
    EXPECT_TRUE(at::equal(part.labels_BT, all.labels_BT.slice(0, first, first + count)));
  }
  EXPECT_FALSE(at::equal(other.get(0, 250).labels_BT, all.labels_BT));
}

// The order is part of what a seed means: it must never change, on no machine. These are of a second version, in
// Python.
TEST_F(BatchStreamTest, OrderIsFrozen) {
  EXPECT_EQ(mix_bits(1), 0x5692161D100B05E5u);
  const Permutation order(10, hash_numbers(uint64_t{7}, int64_t{0}));
  std::vector<uint64_t> found;
  for (uint64_t i = 0; i < 10; ++i) found.push_back(order(i));
  EXPECT_EQ(found, (std::vector<uint64_t>{5, 9, 0, 1, 2, 3, 4, 7, 8, 6}));
}

TEST_F(BatchStreamTest, ShortCorpusSaysByHowMuch) {
  try {
    BatchStream(store_of(60), 256, 0, kStart);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "the text has 60 tokens, 196 fewer than one context of 256");
    EXPECT_FALSE(error.hint().empty());
  }
  EXPECT_NO_THROW(BatchStream(store_of(256), 256, 0, kStart).get(0, 3));
}

TEST(Permutation, IsOneForEverySize) {
  for (const uint64_t size : {1u, 2u, 3u, 4u, 5u, 16u, 17u, 1000u, 4096u, 4097u}) {
    const Permutation order(size, 42);
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < size; ++i) seen.insert(order(i));
    EXPECT_EQ(seen.size(), size);
    EXPECT_EQ(*seen.rbegin(), size - 1);
  }
  const Permutation huge(uint64_t{1} << 62, 1);
  EXPECT_LT(huge(12345), uint64_t{1} << 62);
}

// Neighbours must not stay neighbours, nor early ones early: means of the places of the first tenth over many keys.
TEST(Permutation, LooksRandom) {
  constexpr uint64_t kSize = 1000;
  double sum = 0, kept = 0;
  for (uint64_t key = 0; key < 200; ++key) {
    const Permutation order(kSize, key);
    for (uint64_t i = 0; i < 100; ++i) {
      sum += static_cast<double>(order(i));
      kept += order(i + 1) == order(i) + 1;
    }
  }
  // 20,000 draws of deviation 289: the mean's deviation is 2; of 20,000 neighbours about 20 stay so by chance.
  EXPECT_NEAR(sum / 20'000, 499.5, 10);
  EXPECT_LT(kept, 50);
}

}  // namespace
}  // namespace fox::data
