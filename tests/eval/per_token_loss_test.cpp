#include "eval/per_token_loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace fox::eval {
namespace {

/// Verses with labels of several tokens, as in the Bible of the demo.
std::string verses(int64_t bytes) {
  std::string text;
  for (int64_t i = 1; static_cast<int64_t>(text.size()) < bytes; ++i) {
    text += "Gen" + std::to_string(i / 9 + 1) + ":" + std::to_string(i % 9 + 1) + " And so on, " +
            std::string(i % 13, 'x') + "\n";
  }
  return text.substr(0, bytes);
}

class PerTokenLossTest : public ::testing::Test {
 protected:
  data::TokenStore make_store(const std::string& text) {
    const std::filesystem::path file = folder_.path() / "text.txt";
    std::ofstream(file, std::ios::binary) << text;
    return data::build_token_store({file}, tokenizer_, folder_.path() / "store");
  }

  static std::vector<int32_t> all_ids(const data::TokenStore& store) {
    std::vector<int32_t> ids(store.num_tokens());
    store.read(0, ids);
    return ids;
  }

  /// -ln p and whether the token has the largest logit, for every token of the window, from the naive model in float64.
  struct Scores {
    std::vector<double> loss;
    std::vector<bool> correct;
  };
  Scores naive_scores(const model::LanguageModel& model, std::span<const int32_t> labels) {
    std::vector<int64_t> ids = {tokenizer_.end_of_text()};
    ids.insert(ids.end(), labels.begin(), labels.end() - 1);
    const at::Tensor logits_TV =
        naive::logits(model.config().to_json(), test::weights_of(model), at::tensor(ids).unsqueeze(0))[0];
    const at::Tensor log_p = at::log_softmax(logits_TV, 1);
    Scores scores;
    for (size_t t = 0; t < labels.size(); ++t) {
      scores.loss.push_back(-log_p[t][labels[t]].item<double>());
      scores.correct.push_back(logits_TV[t].argmax().item<int64_t>() == labels[t]);
    }
    return scores;
  }

  test::TemporaryFolder folder_;
  data::Tokenizer tokenizer_ = test::byte_tokenizer();
};

TEST_F(PerTokenLossTest, WindowsSideBySideAverageByPosition) {
  model::LanguageModel model = test::make_model(test::tiny_config(), at::kDouble);
  const data::TokenStore store = make_store(verses(250));
  const std::vector<int32_t> ids = all_ids(store);
  const int64_t T = 48, M = store.num_tokens() / T;
  const PerTokenLoss got =
      per_token_loss(model, store, tokenizer_, {.length = T, .stride = T, .first_word = true, .progress = false});
  std::vector<double> expected(T);
  int64_t correct = 0;
  for (int64_t w = 0; w < M; ++w) {
    const Scores scores = naive_scores(model, std::span(ids).subspan(w * T, T));
    for (int64_t i = 0; i < T; ++i) {
      expected[i] += scores.loss[i] / static_cast<double>(M);
      correct += scores.correct[i];
    }
  }
  ASSERT_EQ(got.loss.size(), expected.size());
  double sum = 0;
  for (int64_t i = 0; i < T; ++i) {
    EXPECT_NEAR(got.loss[i], expected[i], 1e-9);
    sum += expected[i];
    EXPECT_NEAR(got.perplexity[i], std::exp(sum / static_cast<double>(i + 1)), 1e-6);
    EXPECT_EQ(got.count[i], M);
  }
  EXPECT_FALSE(got.paired);
  EXPECT_EQ(got.windows, M);
  EXPECT_EQ(got.tokens, M * T);
  EXPECT_DOUBLE_EQ(got.accuracy, static_cast<double>(correct) / static_cast<double>(M * T));
  ASSERT_EQ(got.bins.size(), 2u);  // 0-32, 32-48
  double first_bin = 0;
  for (int64_t i = 0; i < 32; ++i) first_bin += expected[i] / 32;
  EXPECT_NEAR(got.bins[0].loss, first_bin, 1e-9);
}

TEST_F(PerTokenLossTest, PairedBinsAverageTheSameTokens) {
  model::LanguageModel model = test::make_model(test::tiny_config(), at::kDouble);
  const data::TokenStore store = make_store(verses(150));
  const std::vector<int32_t> ids = all_ids(store);
  const std::vector<uint8_t> mask = first_word_tokens(ids, tokenizer_);
  const int64_t W = 32, S = 4, T = 8, lead = W - S;
  const PerTokenLoss got = per_token_loss(
      model, store, tokenizer_, {.length = W, .stride = S, .first_word = true, .train_context = T, .progress = false});
  const int64_t N = (store.num_tokens() - lead) / S * S;
  ASSERT_TRUE(got.paired);
  EXPECT_EQ(got.tokens, N);
  EXPECT_EQ(got.units, N);
  ASSERT_EQ(got.bins.size(), 5u);
  const std::vector<int64_t> bounds = {0, 4, 8, 16, 24, 32};  // 0-4, 4-8 = T, then one T each
  // The definition: every token that counts, once for each window start that shows it, grouped by its position there.
  std::vector<std::vector<double>> by_token(N, std::vector<double>(5));
  std::vector<double> position_sum(W);
  std::vector<int64_t> label_correct(5), label_count(5), correct(5);
  std::vector<double> label_loss(5);
  for (int64_t start = 0; start < lead + N; start += S) {
    const int64_t length = std::min<int64_t>(W, store.num_tokens() - start);
    const Scores scores = naive_scores(model, std::span(ids).subspan(start, length));
    for (int64_t p = 0; p < length; ++p) {
      const int64_t token = start + p;
      if (token < lead || token >= lead + N) continue;
      const int64_t b = std::upper_bound(bounds.begin(), bounds.end(), p) - bounds.begin() - 1;
      by_token[token - lead][b] +=
          scores.loss[p] * static_cast<double>(S) / static_cast<double>(bounds[b + 1] - bounds[b]);
      position_sum[p] += scores.loss[p];
      correct[b] += scores.correct[p];
      label_count[b] += mask[token];
      label_correct[b] += mask[token] && scores.correct[p];
      if (mask[token]) label_loss[b] += scores.loss[p];
    }
  }
  for (int64_t p = 0; p < W; ++p) {
    EXPECT_EQ(got.count[p], N / S);
    EXPECT_NEAR(got.loss[p], position_sum[p] / static_cast<double>(N / S), 1e-9);
  }
  for (size_t b = 0; b < 5; ++b) {
    double mean = 0, difference = 0, squares = 0, difference_squares = 0;
    const auto n = static_cast<double>(N);
    for (const auto& token : by_token) mean += token[b] / n, difference += (token[b] - token[1]) / n;
    for (const auto& token : by_token) {
      squares += std::pow(token[b] - mean, 2);
      difference_squares += std::pow(token[b] - token[1] - difference, 2);
    }
    const PositionBin& bin = got.bins[b];
    EXPECT_EQ(bin.begin, bounds[b]);
    EXPECT_EQ(bin.end, bounds[b + 1]);
    EXPECT_NEAR(bin.loss, mean, 1e-9);
    EXPECT_NEAR(*bin.loss_error, std::sqrt(squares / (n - 1) / n), 1e-9);
    EXPECT_NEAR(*bin.difference, difference, 1e-9);
    EXPECT_NEAR(*bin.difference_error, std::sqrt(difference_squares / (n - 1) / n), 1e-9);
    const double seen = n * static_cast<double>(bounds[b + 1] - bounds[b]) / static_cast<double>(S);
    EXPECT_NEAR(bin.accuracy, static_cast<double>(correct[b]) / seen, 1e-12);
    EXPECT_NEAR(*bin.first_word_accuracy, static_cast<double>(label_correct[b]) / static_cast<double>(label_count[b]),
                1e-12);
    EXPECT_NEAR(*bin.first_word_loss, label_loss[b] / static_cast<double>(label_count[b]), 1e-9);
    // Every bin sees the same labels, each as often as the bin is wide.
    EXPECT_EQ(label_count[b] * S, got.first_word_tokens * (bounds[b + 1] - bounds[b]));
    EXPECT_NEAR(bin.loss * seen,
                *bin.first_word_loss * static_cast<double>(label_count[b]) +
                    *bin.other_loss * (seen - static_cast<double>(label_count[b])),
                1e-7);
  }
}

TEST_F(PerTokenLossTest, TokenBudgetIsSpreadOverTheText) {
  model::LanguageModel model = test::make_model(test::tiny_config());
  const data::TokenStore store = make_store(verses(3000));
  const PerTokenLoss got =
      per_token_loss(model, store, tokenizer_, {.length = 32, .stride = 8, .max_tokens = 300, .progress = false});
  // Two runs of 148 tokens (more than 4 windows each), cut to whole strides: 2 × 144.
  EXPECT_EQ(got.tokens, 288);
  for (int64_t count : got.count) EXPECT_EQ(count, 288 / 8);
  EXPECT_EQ(got.windows, 2 * (144 + 24) / 8);
  // Fewer tokens than a stride: one stride.
  EXPECT_EQ(
      per_token_loss(model, store, tokenizer_, {.length = 32, .stride = 8, .max_tokens = 3, .progress = false}).tokens,
      8);
}

TEST_F(PerTokenLossTest, LongWindowsStreamThroughTheCache) {
  // 9,000 tokens are three chunks of a pass; a head that forgets everything makes the loss of each token depend on its
  // neighbours alone, a RoPE Transformer would show any slip of positions: compare with one forward pass over all.
  for (const ModelConfig& config : {test::tiny_config(), test::tiny_transformer_config()}) {
    model::LanguageModel model = test::make_model(config);
    const data::TokenStore store = make_store(verses(9500));
    const std::vector<int32_t> ids = all_ids(store);
    const int64_t T = 9000;
    const PerTokenLoss got = per_token_loss(model, store, tokenizer_, {.length = T, .stride = T, .progress = false});
    std::vector<int64_t> inputs = {tokenizer_.end_of_text()};
    inputs.insert(inputs.end(), ids.begin(), ids.begin() + T - 1);
    const std::vector<int64_t> labels(ids.begin(), ids.begin() + T);
    const at::Tensor loss_T =
        model.loss(at::tensor(inputs).unsqueeze(0), at::tensor(labels).unsqueeze(0)).loss_BT[0].to(at::kDouble);
    const at::Tensor difference = at::tensor(got.loss) - loss_T;
    EXPECT_LT(difference.abs().max().item<double>(), 2e-3) << config.model_type;
    EXPECT_LT(difference.norm().item<double>() / loss_T.norm().item<double>(), 1e-5) << config.model_type;
  }
}

TEST_F(PerTokenLossTest, HeldOutLossCountsEveryByteOnce) {
  model::LanguageModel model = test::make_model(test::tiny_config(), at::kDouble);
  const std::string text = verses(103);
  const data::TokenStore store = make_store(text);
  const std::vector<int32_t> ids = all_ids(store);
  const HeldOutLoss got = held_out_loss(model, store, tokenizer_, 24, 0);
  double sum = 0;
  for (size_t first = 0; first < ids.size(); first += 24) {
    for (double loss :
         naive_scores(model, std::span(ids).subspan(first, std::min<size_t>(24, ids.size() - first))).loss) {
      sum += loss;
    }
  }
  EXPECT_EQ(got.tokens, store.num_tokens());
  EXPECT_EQ(got.bytes, static_cast<int64_t>(text.size()));  // <|endoftext|> has no bytes
  EXPECT_NEAR(got.loss, sum / static_cast<double>(ids.size()), 1e-9);
  EXPECT_NEAR(got.perplexity, std::exp(got.loss), 1e-9);
  EXPECT_NEAR(got.bits_per_byte, sum / std::log(2.0) / static_cast<double>(text.size()), 1e-9);
  EXPECT_EQ(held_out_loss(model, store, tokenizer_, 24, 50).tokens, 50);
}

TEST_F(PerTokenLossTest, RefusesWhatDoesNotFit) {
  model::LanguageModel model = test::make_model(test::tiny_config());
  const data::TokenStore store = make_store(verses(60));
  for (const PerTokenLossOptions& bad : {PerTokenLossOptions{.length = 0, .stride = 1},
                                         {.length = 8, .stride = 0},
                                         {.length = 32, .stride = 5},
                                         {.length = 8, .stride = 8, .max_tokens = -1}}) {
    EXPECT_THROW(per_token_loss(model, store, tokenizer_, bad), Error);
  }
  try {
    per_token_loss(model, store, tokenizer_, {.length = 100, .stride = 100});
    ADD_FAILURE();
  } catch (const Error& error) {
    const std::string missing = std::to_string(100 - store.num_tokens());
    EXPECT_NE(std::string(error.what()).find(missing + " fewer"), std::string::npos) << error.what();
  }
}

TEST_F(PerTokenLossTest, OneWindowTellsNoError) {
  model::LanguageModel model = test::make_model(test::tiny_config());
  const data::TokenStore store = make_store(verses(300));
  PerTokenLossOptions options{.length = 64, .stride = 64, .max_tokens = 64, .train_context = 32, .progress = false};
  for (const PositionBin& bin : per_token_loss(model, store, tokenizer_, options).bins) {
    EXPECT_FALSE(bin.loss_error || bin.difference_error);
    EXPECT_TRUE(bin.difference);
  }
  options.max_tokens = 128;
  for (const PositionBin& bin : per_token_loss(model, store, tokenizer_, options).bins) EXPECT_GT(bin.loss_error, 0);
}

TEST_F(PerTokenLossTest, JsonHoldsEveryNumberAndNullForNone) {
  model::LanguageModel model = test::make_model(test::tiny_config());
  const data::TokenStore store = make_store(verses(300));
  const nlohmann::json json =
      to_json(per_token_loss(model, store, tokenizer_, {.length = 64, .stride = 64, .progress = false}));
  EXPECT_EQ(json["loss"].size(), 64u);
  EXPECT_EQ(json["smoothed"].size(), 64u);
  EXPECT_EQ(json["perplexity"].size(), 64u);
  EXPECT_EQ(json["bins"].size(), 2u);
  EXPECT_TRUE(json["bins"][0]["difference"].is_null());
  EXPECT_TRUE(json["first_word_accuracy"].is_null());
  EXPECT_TRUE(json["bins"][1]["loss"].is_number());
}

TEST(PerTokenLossJson, KeepsPointsForACurveOfAnyLength) {
  for (const int64_t length : {1, 4096, 4097, 65536, 100000}) {
    PerTokenLoss result;
    result.length = length;
    for (int64_t i = 0; i < length; ++i) result.smoothed.push_back(static_cast<double>(i));
    const nlohmann::json json = to_json(result);
    const int64_t every = json["smoothed_every"], points = std::ssize(json["smoothed"]);
    EXPECT_EQ(every == 1, length <= 4096);
    EXPECT_LE(points, 4096);
    EXPECT_EQ(points, (length + every - 1) / every);
    EXPECT_NEAR(json["smoothed"][points - 1].get<double>(), static_cast<double>((points - 1) * every), 1);
  }
}

TEST(PositionBins, DoubleUpToTheTrainingLengthAndRepeatItBeyond) {
  using Bounds = std::vector<int64_t>;
  EXPECT_EQ(position_bins(1024, 32, 256), (Bounds{0, 32, 64, 128, 256, 512, 768, 1024}));
  EXPECT_EQ(position_bins(1024, 32, {}), (Bounds{0, 32, 64, 128, 256, 512, 1024}));
  EXPECT_EQ(position_bins(100, 32, {}), (Bounds{0, 32, 64, 100}));
  EXPECT_EQ(position_bins(20, 32, {}), (Bounds{0, 20}));
  EXPECT_EQ(position_bins(512, 32, 96), (Bounds{0, 32, 64, 96, 192, 288, 384, 480, 512}));
  // Too many lengths beyond: doubling again, from the training length.
  EXPECT_EQ(position_bins(1024, 32, 64), (Bounds{0, 32, 64, 128, 256, 512, 1024}));
  EXPECT_EQ(position_bins(256, 32, 256), (Bounds{0, 32, 64, 128, 256}));
  EXPECT_EQ(position_bins(256, 32, 100), (Bounds{0, 32, 64, 128, 256}));
}

TEST(MovingAverage, IsShortenedAtBothEnds) {
  const std::vector<double> values = {1, 2, 3, 4, 10};
  EXPECT_EQ(moving_average(values, 3), (std::vector<double>{1.5, 2, 3, 17.0 / 3, 7}));
  EXPECT_EQ(moving_average(values, 1), values);
  for (double v : moving_average(values, 101)) EXPECT_DOUBLE_EQ(v, 4);
  EXPECT_TRUE(moving_average({}, 101).empty());
}

TEST(FirstWord, LiesBetweenALineStartAndTheFirstSpace) {
  const data::Tokenizer tokenizer = data::Tokenizer::gpt2(768);
  const auto marked = [&](const std::string& text, bool starts_line) {
    std::string out;
    const std::vector<int32_t> ids = tokenizer.encode(text);
    const std::vector<uint8_t> mask = first_word_tokens(ids, tokenizer, starts_line);
    for (size_t i = 0; i < ids.size(); ++i) out += mask[i] ? "[" + std::string(tokenizer.bytes_of(ids[i])) + "]" : "";
    out.erase(std::remove(out.begin(), out.end(), '['), out.end());
    out.erase(std::remove(out.begin(), out.end(), ']'), out.end());
    return out;
  };
  EXPECT_EQ(marked("2Ki12:19 And the rest\n2Ki12:20 And his servants\n", true), "2Ki12:192Ki12:20");
  EXPECT_EQ(marked("and on 12:3\nRut1:1 Now it\n", false), "Rut1:1");
  EXPECT_EQ(marked("a\n\nb c\n d e\n", true), "ab");
  const std::vector<int32_t> document = {tokenizer.encode(" x")[0], tokenizer.end_of_text(), tokenizer.encode("J")[0]};
  EXPECT_EQ(first_word_tokens(document, tokenizer, false), (std::vector<uint8_t>{0, 0, 1}));
}

}  // namespace
}  // namespace fox::eval
