#include "infer/generate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "base/error.h"
#include "base/interrupt.h"
#include "support/sentence_piece_file.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace fox::infer {
namespace {

/// A model that writes `script` over and over, whatever it is asked: its token embeddings are one-hot, its layers add
/// nothing (their output projections are 0), and its head leads from each byte of the script to the next. Bytes of the
/// script must differ.
model::LanguageModel scripted_model(const std::string& script, const data::Tokenizer& tokenizer,
                                    bool then_end = false) {
  ModelConfig config = test::tiny_config();
  config.hidden_size = 272;
  config.num_hidden_layers = 1;
  model::LanguageModel model = test::make_model(config);
  std::vector<int32_t> ids;
  for (char c : script) ids.push_back(tokenizer.encode(std::string(1, c)).at(0));
  for (const nn::Parameter& parameter : model.parameters()) {
    if (parameter.name == "model.embeddings.weight") parameter.tensor.copy_(at::eye(257, 272));
    if (parameter.name.ends_with("o_proj.weight") || parameter.name.ends_with("down_proj.weight")) {
      parameter.tensor.zero_();
    }
    if (parameter.name == "lm_head.weight") {
      parameter.tensor.zero_();
      // Whatever came before the script leads to its first byte.
      parameter.tensor[ids[0]].fill_(1);
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool last = i + 1 == ids.size();
        parameter.tensor[last ? (then_end ? tokenizer.end_of_text() : ids[0]) : ids[i + 1]][ids[i]] = 5;
      }
    }
  }
  return model;
}

struct Pieces {
  std::vector<std::string> pieces;
  OnText record() {
    return [this](std::string_view piece) {
      pieces.emplace_back(piece);
      return true;
    };
  }
};

GenerateOptions greedy(int64_t max_tokens, std::vector<std::string> stop = {}) {
  GenerateOptions options;
  options.sampling.temperature = 0;
  options.max_tokens = max_tokens;
  options.stop = std::move(stop);
  return options;
}

TEST(Generate, StreamsWhatItReturns) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model("abcd", tokenizer);
  Pieces pieces;
  const Generation made = generate(model, tokenizer, "zz", greedy(6), pieces.record());
  EXPECT_EQ(made.text, "abcdab");
  EXPECT_EQ(pieces.pieces, (std::vector<std::string>{"a", "b", "c", "d", "a", "b"}));
  EXPECT_EQ(made.reason, FinishReason::kLength);
  EXPECT_EQ(made.ids.size(), 6u);
  EXPECT_EQ(made.prompt_tokens, 3);  // with <|endoftext|>
}

// SentencePiece puts a space before a text; a text that goes on with a word has it between them.
TEST(Generate, ASentencePieceKeepsItsSpaceBehindAPromptOnly) {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "x.model";
  std::ofstream(file, std::ios::binary) << test::SentencePieceFile().bytes();
  const data::Tokenizer tokenizer = data::Tokenizer::load(file);
  model::LanguageModel model = scripted_model("x", tokenizer);
  EXPECT_EQ(generate(model, tokenizer, "", greedy(3)).text, "x x x");
  EXPECT_EQ(generate(model, tokenizer, "  ", greedy(3)).text, "x x x");
  EXPECT_EQ(generate(model, tokenizer, "a", greedy(3)).text, " x x x");
}

TEST(Generate, HoldsHalfCharactersBack) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model("é€", tokenizer);  // tokens are bytes
  Pieces pieces;
  EXPECT_EQ(generate(model, tokenizer, "", greedy(5), pieces.record()).text, "é€");
  EXPECT_EQ(pieces.pieces, (std::vector<std::string>{"é", "€"}));
  // Cut within the second character: what was begun becomes one U+FFFD.
  EXPECT_EQ(generate(model, tokenizer, "", greedy(4)).text, "é\uFFFD");
}

TEST(Generate, InvalidBytesBecomeReplacements) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model(
      "a\xFF"
      "b\x80",
      tokenizer);
  EXPECT_EQ(generate(model, tokenizer, "", greedy(4)).text, "a\uFFFDb\uFFFD");
}

TEST(Generate, StopsBeforeAStopStringThatSpansTokens) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model("abcdef", tokenizer);
  Pieces pieces;
  const Generation made = generate(model, tokenizer, "", greedy(100, {"cde", "zz"}), pieces.record());
  EXPECT_EQ(made.text, "ab");
  EXPECT_EQ(made.reason, FinishReason::kStopString);
  EXPECT_EQ(made.ids.size(), 5u);
  std::string streamed;
  for (const std::string& piece : pieces.pieces) streamed += piece;
  EXPECT_EQ(streamed, "ab");
  // Not reached within the limit: what was held back comes out.
  EXPECT_EQ(generate(model, tokenizer, "", greedy(4, {"cde"})).text, "abcd");
}

TEST(Generate, EndOfText) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model("abc", tokenizer, /*then_end=*/true);
  const Generation made = generate(model, tokenizer, "", greedy(100));
  EXPECT_EQ(made.text, "abc");
  EXPECT_EQ(made.reason, FinishReason::kEndOfText);
  GenerateOptions on = greedy(8);
  on.stop_at_end_of_text = false;
  EXPECT_EQ(generate(model, tokenizer, "", on).text, "abcabc");
}

TEST(Generate, SamplesFromWhatTheWholeSequencePredicts) {
  // Each id drawn is the one that its seed draws from a forward pass over all tokens before it.
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = test::make_model(test::tiny_config());
  GenerateOptions options;
  options.max_tokens = 20;
  options.sampling = {.temperature = 0.9, .top_k = 50, .top_p = 0.95, .seed = 3};
  options.stop_at_end_of_text = false;
  const Generation made = generate(model, tokenizer, "In the", options);
  ASSERT_EQ(made.ids.size(), 20u);
  std::vector<int64_t> ids = {tokenizer.end_of_text()};
  for (int32_t id : tokenizer.encode("In the")) ids.push_back(id);
  Sampler sampler(options.sampling);
  for (int32_t id : made.ids) {
    EXPECT_EQ(sampler.draw(model.logits(at::tensor(ids).unsqueeze(0))[0][-1]), id);
    ids.push_back(id);
  }
  EXPECT_EQ(generate(model, tokenizer, "In the", options).ids, made.ids);
  options.sampling.seed = 4;
  EXPECT_NE(generate(model, tokenizer, "In the", options).ids, made.ids);
}

TEST(Generate, PaddedVocabularyIsNeverDrawn) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  ModelConfig config = test::tiny_config();
  config.vocab_size = 300;
  model::LanguageModel model = test::make_model(config);
  GenerateOptions options;
  options.max_tokens = 200;
  options.sampling.temperature = 100;  // nearly uniform
  options.stop_at_end_of_text = false;
  for (int32_t id : generate(model, tokenizer, "", options).ids) EXPECT_LT(id, 257);
}

TEST(Generate, ListenerEndsIt) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model("abcd", tokenizer);
  int calls = 0;
  const Generation made = generate(model, tokenizer, "", greedy(100), [&](std::string_view) { return ++calls < 3; });
  EXPECT_EQ(made.reason, FinishReason::kCancelled);
  EXPECT_EQ(made.text, "abc");
  EXPECT_EQ(calls, 3);
}

TEST(Generate, NoTokensAndBadOptions) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model("abcd", tokenizer);
  EXPECT_EQ(generate(model, tokenizer, "x", greedy(0)).text, "");
  EXPECT_THROW(generate(model, tokenizer, "x", greedy(-1)), Error);
  EXPECT_THROW(generate(model, tokenizer, "x", greedy(1, {""})), Error);
  GenerateOptions options;
  options.sampling.top_p = 2;
  EXPECT_THROW(generate(model, tokenizer, "x", options), Error);
}

// Last: the flag stays up.
TEST(GenerateInterrupt, EndsWithinAToken) {
  const data::Tokenizer tokenizer = test::byte_tokenizer();
  model::LanguageModel model = scripted_model("abcd", tokenizer);
  catch_interrupts();
  const Generation made = generate(model, tokenizer, "", greedy(100), [&](std::string_view piece) {
    if (piece == "c") raise(SIGINT);
    return true;
  });
  EXPECT_EQ(made.reason, FinishReason::kCancelled);
  EXPECT_EQ(made.text, "abc");
}

}  // namespace
}  // namespace fox::infer
