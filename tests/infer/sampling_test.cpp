#include "infer/sampling.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "base/error.h"

namespace fox::infer {
namespace {

at::Tensor logits_of(const std::vector<double>& probabilities) {
  at::Tensor logits = at::empty({static_cast<int64_t>(probabilities.size())}, at::kFloat);
  for (size_t i = 0; i < probabilities.size(); ++i) logits[i] = std::log(probabilities[i]);
  return logits;
}

/// Pearson's χ² of `draws` draws against `expected`; draws of impossible tokens fail the test.
double chi_square(const at::Tensor& logits, const SamplingOptions& options, const std::vector<double>& expected,
                  int64_t draws) {
  Sampler sampler(options);
  std::vector<int64_t> counts(expected.size());
  for (int64_t i = 0; i < draws; ++i) ++counts.at(sampler.draw(logits));
  double chi = 0;
  for (size_t id = 0; id < expected.size(); ++id) {
    const double mean = expected[id] * static_cast<double>(draws);
    if (mean == 0) {
      EXPECT_EQ(counts[id], 0) << "token " << id << " cannot be drawn";
    } else {
      chi += (static_cast<double>(counts[id]) - mean) * (static_cast<double>(counts[id]) - mean) / mean;
    }
  }
  return chi;
}

const std::vector<double> kProbabilities = {0.05, 0.4, 0.1, 0.25, 0.2};
// 99.9 % quantiles of χ² with 4, 2 and 1 degrees of freedom.
constexpr double kChi4 = 18.47, kChi2 = 13.82, kChi1 = 10.83;
constexpr int64_t kDraws = 20000;

TEST(Sampling, TemperatureOneDrawsTheModelsDistribution) {
  EXPECT_LT(chi_square(logits_of(kProbabilities), {.seed = 1}, kProbabilities, kDraws), kChi4);
}

TEST(Sampling, TemperatureRaisesProbabilitiesToItsInverse) {
  for (double temperature : {0.5, 2.0}) {
    std::vector<double> expected;
    for (double p : kProbabilities) expected.push_back(std::pow(p, 1 / temperature));
    const double total = std::accumulate(expected.begin(), expected.end(), 0.0);
    for (double& p : expected) p /= total;
    const SamplingOptions options{.temperature = temperature, .seed = 2};
    const std::vector<double> got = sampling_probabilities(logits_of(kProbabilities), options);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-6);
    EXPECT_LT(chi_square(logits_of(kProbabilities), options, expected, kDraws), kChi4);
  }
}

TEST(Sampling, TopKKeepsTheMostLikely) {
  const std::vector<double> expected = {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0};
  EXPECT_LT(chi_square(logits_of(kProbabilities), {.top_k = 2, .seed = 3}, expected, kDraws), kChi1);
  const std::vector<double> all = sampling_probabilities(logits_of(kProbabilities), {.top_k = 99});
  for (size_t i = 0; i < all.size(); ++i) EXPECT_NEAR(all[i], kProbabilities[i], 1e-6);
}

TEST(Sampling, TopPKeepsTheFewestThatReachIt) {
  const std::vector<double> three = {0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85};
  EXPECT_LT(chi_square(logits_of(kProbabilities), {.top_p = 0.66, .seed = 4}, three, kDraws), kChi2);
  // 0.4 + 0.25 reaches 0.64, so the third is not needed.
  const std::vector<double> two = {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0};
  EXPECT_LT(chi_square(logits_of(kProbabilities), {.top_p = 0.64, .seed = 5}, two, kDraws), kChi1);
  // However small, the most likely token stays.
  EXPECT_EQ(sampling_probabilities(logits_of(kProbabilities), {.top_p = 1e-9})[1], 1.0);
}

TEST(Sampling, FiltersApplyOneAfterTheOther) {
  // Temperature 1/2 squares; top_k 4 leaves .16 .0625 .04 .01; of their sum .2725, .16 + .0625 reach 0.8.
  const SamplingOptions options{.temperature = 0.5, .top_k = 4, .top_p = 0.8, .seed = 6};
  const std::vector<double> expected = {0, 0.16 / 0.2225, 0, 0.0625 / 0.2225, 0};
  EXPECT_LT(chi_square(logits_of(kProbabilities), options, expected, kDraws), kChi1);
}

TEST(Sampling, GreedyTakesTheLowestIdOfEquals) {
  const at::Tensor logits = at::tensor({1.f, 3.f, 2.f, 3.f});
  Sampler sampler({.temperature = 0});
  for (int i = 0; i < 5; ++i) EXPECT_EQ(sampler.draw(logits), 1);
  EXPECT_EQ(sampling_probabilities(logits, {.temperature = 0}), (std::vector<double>{0, 1, 0, 0}));
  EXPECT_GT(sampling_probabilities(logits, {.top_k = 1})[1], 0.999);
}

TEST(Sampling, SameSeedSameTokensOtherSeedOthers) {
  const at::Tensor logits = at::zeros({1000});
  const auto draw = [&](uint64_t seed) {
    Sampler sampler({.seed = seed});
    std::vector<int32_t> ids;
    for (int i = 0; i < 20; ++i) ids.push_back(sampler.draw(logits));
    return ids;
  };
  EXPECT_EQ(draw(7), draw(7));
  EXPECT_NE(draw(7), draw(8));
  // mt19937_64's 10,000th value from its default seed is fixed by the C++ standard; our use of it must be too.
  EXPECT_EQ(draw(5489).front(),
            static_cast<int32_t>(static_cast<double>(std::mt19937_64(5489)() >> 11) * 0x1p-53 * 1000));
}

TEST(Sampling, HugeLogitsAndImpossibleTokens) {
  const std::vector<double> p = sampling_probabilities(at::tensor({1e30f, -INFINITY, 0.f}), {});
  EXPECT_EQ(p, (std::vector<double>{1, 0, 0}));
  EXPECT_EQ(sampling_probabilities(at::tensor({0.5f, 0.5f}).to(at::kBFloat16), {}), (std::vector<double>{0.5, 0.5}));
}

TEST(Sampling, RefusesWhatHasNoMeaning) {
  for (const SamplingOptions& bad :
       {SamplingOptions{.temperature = -1}, SamplingOptions{.temperature = NAN},
        SamplingOptions{.temperature = INFINITY}, SamplingOptions{.top_k = -1}, SamplingOptions{.top_p = 0},
        SamplingOptions{.top_p = 2}, SamplingOptions{.top_p = NAN}}) {
    EXPECT_THROW(Sampler{bad}, Error);
  }
  for (const at::Tensor& bad : {at::tensor({1.f, NAN}), at::tensor({1.f, INFINITY}), at::full({3}, -INFINITY),
                                at::empty({0}), at::zeros({2, 2})}) {
    EXPECT_THROW(sampling_probabilities(bad, {}), Error);
    EXPECT_THROW(sampling_probabilities(bad, {.temperature = 0}), Error);
  }
}

}  // namespace
}  // namespace fox::infer
