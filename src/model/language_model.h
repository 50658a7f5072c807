#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "nn/sequence.h"

namespace fox::model {

class Block;

/// What a model remembers of the tokens it was given: one slot a layer.
struct Cache {
  std::vector<std::unique_ptr<nn::CacheSlot>> slots;
  const void* owner = nullptr;          ///< the model that made it; no other may continue it
  int64_t length = 0;                   ///< tokens seen, padding included
  std::optional<at::Tensor> seq_start;  ///< left padding of the first chunk, kept for all later ones
};

/// What a training step keeps of a layer's forward pass for its backward pass; the rest is computed again.
enum class Recompute {
  kNone,  ///< everything is kept
  kMlp,   ///< of an MLP its input
  kFull,  ///< of a whole layer its input
};

struct Loss {
  at::Tensor total;    ///< scalar Σ weight_n loss_n (mean over the labels that count by default); differentiable
  at::Tensor loss_BT;  ///< nats a token, not differentiable
};

struct ParameterCount {
  int64_t total = 0;          ///< every parameter once
  int64_t non_embedding = 0;  ///< without the input embedding, with an untied lm_head (N of arXiv 2503.02130, Table 6)
};

class LanguageModel {
 public:
  /// Parameters in float32 on the CPU, values undefined until init() or a checkpoint sets them.
  explicit LanguageModel(const ModelConfig& config);
  ~LanguageModel();
  LanguageModel(LanguageModel&&) noexcept;

  const ModelConfig& config() const;

  /// The published initialisation of config().model_type (docs/models.md), from `seed`.
  void init(uint64_t seed);

  /// ids_BT (B, T) int64 → hidden states (B, T, C) after the last norm. With a cache, continues it.
  at::Tensor hidden(const at::Tensor& ids_BT, const nn::Sequence& sequence = {}, Cache* cache = nullptr);
  /// Logits (B, T, V) in the compute dtype.
  at::Tensor logits(const at::Tensor& ids_BT, const nn::Sequence& sequence = {}, Cache* cache = nullptr);
  /// Loss of labels_BT (already aligned; -100 = ignored) given ids_BT; token_weight_BT as in linear_cross_entropy.
  Loss loss(const at::Tensor& ids_BT, const at::Tensor& labels_BT, const nn::Sequence& sequence = {},
            const std::optional<at::Tensor>& token_weight_BT = {});

  Cache make_cache() const;

  /// Published names; tensors are the model's own (assigning through copy_ under NoGradGuard changes the model).
  const nn::Parameters& parameters() const;
  /// Moves and casts the parameters (leaf tensors are replaced).
  void to(at::Device device, at::ScalarType dtype);
  /// Activations are computed in this dtype, weights cast on use; default: the parameters' own dtype.
  void set_compute_dtype(at::ScalarType dtype);
  void set_requires_grad(bool on);
  /// Activation checkpointing. The gradients are the same, bit for bit where the operators' are.
  void set_recompute(Recompute what);
  /// Gradients with the same bits each time; on a GPU attention's are then a few percent slower.
  void set_deterministic(bool on);
  /// `ready(n)` is called in each forward pass before it reads any of the first n parameters(), which are in the order
  /// of their use: for weights that are still on their way from other ranks.
  void set_before_weights(std::function<void(size_t n)> ready);

  ParameterCount count_parameters() const;
  /// Forward FLOPs a token at context length L, as arXiv 2503.02130, Table 6 counts them.
  double flops_per_token(int64_t context) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fox::model
