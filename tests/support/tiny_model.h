#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>

#include "data/tokenizer.h"
#include "model/language_model.h"
#include "support/naive_model.h"

namespace fox::test {

/// A FoX (Pro) of a few thousand parameters over bytes.
inline ModelConfig tiny_config() {
  ModelConfig config;
  config.vocab_size = 257;
  config.hidden_size = 16;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.intermediate_size = 24;
  config.initializer_range = 0.3;  // large, so that predictions are far from uniform
  config.use_output_gate = config.use_output_norm = config.qk_norm = config.use_k_shift = config.use_v_shift = true;
  return config;
}

inline ModelConfig tiny_transformer_config() {
  ModelConfig config = tiny_config();
  config.model_type = "transformer-project_fox";
  config.use_rope = true;
  config.use_output_gate = config.use_output_norm = config.qk_norm = config.use_k_shift = config.use_v_shift = false;
  return config;
}

inline model::LanguageModel make_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat) {
  model::LanguageModel model(config);
  model.init(1);
  model.set_requires_grad(false);
  model.to(at::kCPU, dtype);
  return model;
}

inline data::Tokenizer byte_tokenizer() { return data::Tokenizer::gpt2(0); }

/// Weights in float64, for naive::logits.
inline naive::Weights weights_of(const model::LanguageModel& model) {
  naive::Weights weights;
  for (const nn::Parameter& parameter : model.parameters()) weights[parameter.name] = parameter.tensor.to(at::kDouble);
  return weights;
}

}  // namespace fox::test
