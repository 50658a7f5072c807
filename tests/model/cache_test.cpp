// A cache continues what training computes: chunks, decoding, left padding and packed documents (for every mixer).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "model/language_model.h"
#include "support/errors.h"
#include "support/op_check.h"
#include "support/small_models.h"

namespace fox::model {
namespace {

using nlohmann::json;
using test::small_config;

constexpr double kFloat64 = 1e-12;

class CacheTest : public testing::TestWithParam<test::SmallModel> {
 protected:
  CacheTest() : model_(test::random_model(GetParam(), 3)) {}

  at::Tensor ids(int64_t batch, int64_t time, int64_t seed) const {
    auto generator = at::detail::createCPUGenerator(seed);
    return at::randint(1, model_.config().vocab_size, {batch, time}, generator, at::kLong);
  }
  // Logits of ids fed in chunks of these sizes.
  at::Tensor in_chunks(const at::Tensor& ids_BT, const std::vector<int64_t>& sizes, const nn::Sequence& first = {}) {
    auto cache = model_.make_cache();
    std::vector<at::Tensor> parts;
    int64_t at = 0;
    for (const int64_t size : sizes) {
      parts.push_back(model_.logits(ids_BT.narrow(1, at, size), at == 0 ? first : nn::Sequence{}, &cache));
      at += size;
      EXPECT_EQ(cache.length, at);
    }
    EXPECT_EQ(at, ids_BT.size(1));
    return at::cat(parts, 1);
  }

  LanguageModel model_;
};

TEST_P(CacheTest, PrefillInChunksAndDecodingGiveTheTrainingForward) {
  const auto ids_BT = ids(2, 12, 1);
  const auto expected = model_.logits(ids_BT);
  for (const auto& sizes : {std::vector<int64_t>{12}, {7, 5}, {1, 11}, std::vector<int64_t>(12, 1), {3, 1, 1, 7}}) {
    test::expect_close(in_chunks(ids_BT, sizes), expected, kFloat64, 0, fmt::format("{} chunks", sizes.size()));
  }
}

TEST_P(CacheTest, LongDecodingOutlivesEveryBuffer) {
  const auto ids_BT = ids(1, 150, 2);
  std::vector<int64_t> sizes{20};
  sizes.insert(sizes.end(), 130, 1);
  test::expect_close(in_chunks(ids_BT, sizes), model_.logits(ids_BT), kFloat64, 0, "130 decoding steps");
}

TEST_P(CacheTest, ChunksInFloat32AreAsGoodAsOnePass) {
  const auto ids_BT = ids(2, 40, 3);
  const auto expected = model_.logits(ids_BT);
  model_.to(at::kCPU, at::kFloat);
  test::expect_as_good_as_naive(in_chunks(ids_BT, {17, 1, 22}), model_.logits(ids_BT), expected, "chunks in float32",
                                8 * 1.2e-7);
}

TEST_P(CacheTest, LeftPaddedRowsEqualSingleRuns) {
  const std::vector<int64_t> lengths{12, 7, 1};
  const int64_t longest = 12, more = 4;
  const auto tokens = ids(3, longest + more, 4);
  // Padding is id 0, which no prompt uses; each prompt stands at the end of the first twelve columns.
  auto padded = at::zeros({3, longest + more}, at::kLong);
  auto starts = at::zeros({3}, at::kLong);
  for (int64_t row = 0; row < 3; ++row) {
    starts[row] = longest - lengths[row];
    padded[row]
        .narrow(0, longest - lengths[row], lengths[row] + more)
        .copy_(tokens[row].narrow(0, 0, lengths[row] + more));
  }
  nn::Sequence sequence;
  sequence.seq_start = starts;
  const auto whole = model_.logits(padded, sequence);
  const auto chunked = in_chunks(padded, {12, 1, 1, 2}, sequence);
  const auto small_chunks = in_chunks(padded, {5, 3, 4, 4}, sequence);  // padding reaches beyond the first chunk
  for (int64_t row = 0; row < 3; ++row) {
    const int64_t length = lengths[row] + more, start = longest - lengths[row];
    const auto alone = model_.logits(tokens[row].narrow(0, 0, length).unsqueeze(0))[0];
    for (const auto& logits : {whole, chunked, small_chunks}) {
      test::expect_close(logits[row].narrow(0, start, length), alone, kFloat64, 0, fmt::format("row {}", row));
    }
  }
}

TEST_P(CacheTest, PackedDocumentsEqualThemselvesAlone) {
  const std::vector<int64_t> lengths{5, 1, 13, 8};
  std::vector<int64_t> bounds{0};
  for (const int64_t length : lengths) bounds.push_back(bounds.back() + length);
  const auto ids_BT = ids(1, bounds.back(), 5), labels_BT = ids(1, bounds.back(), 6);
  model_.set_requires_grad(true);
  const auto gradients = [&] {
    std::vector<at::Tensor> grads;
    for (const auto& parameter : model_.parameters()) {
      if (!parameter.trainable) continue;
      auto& grad = parameter.tensor.mutable_grad();
      grads.push_back(grad.defined() ? grad.clone() : at::zeros_like(parameter.tensor));
      grad = at::Tensor();
    }
    return grads;
  };
  nn::Sequence sequence;
  sequence.cu_seqlens = at::tensor(bounds, at::kLong);
  const auto weight = at::ones({1, bounds.back()}, at::kDouble);
  const auto packed = model_.loss(ids_BT, labels_BT, sequence, weight);
  packed.total.backward();
  const auto packed_grads = gradients();
  std::vector<at::Tensor> alone;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto part = [&](const at::Tensor& x) { return x.narrow(1, bounds[i], lengths[i]); };
    const auto loss = model_.loss(part(ids_BT), part(labels_BT), {}, part(weight));
    loss.total.backward();
    alone.push_back(loss.loss_BT);
  }
  test::expect_close(packed.loss_BT, at::cat(alone, 1), kFloat64, 0, "loss");
  const auto alone_grads = gradients();
  for (size_t i = 0; i < alone_grads.size(); ++i) {
    test::expect_close(packed_grads[i], alone_grads[i], 1e-11, 1e-14, "gradient " + model_.parameters()[i].name);
  }
}

TEST_P(CacheTest, MisuseIsRefused) {
  auto cache = model_.make_cache();
  nn::Sequence packed, padded;
  packed.cu_seqlens = at::tensor({0, 4}, at::kLong);
  padded.seq_start = at::zeros({1}, at::kLong);
  EXPECT_THROW(model_.logits(ids(1, 4, 7), packed, &cache), Error);
  model_.logits(ids(1, 4, 7), {}, &cache);
  EXPECT_THROW(model_.logits(ids(1, 4, 7), padded, &cache), Error);
  EXPECT_THROW(model_.logits(ids(1, 4, 7).narrow(1, 0, 0), {}, &cache), Error);
  EXPECT_THROW(model_.logits(ids(1, 4, 7)[0]), Error);
  auto other = test::random_model(GetParam(), 3);
  test::expect_error([&] { other.logits(ids(1, 4, 7), {}, &cache); }, {"belongs to another model", "make_cache()"});
}

INSTANTIATE_TEST_SUITE_P(EveryMixer, CacheTest, testing::ValuesIn(test::small_models()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fox::model
