#include "model/language_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "base/error.h"
#include "model/block.h"
#include "model/names.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/norm.h"
#include "nn/recompute.h"
#include "ops/linear_cross_entropy.h"

namespace fox::model {
namespace {

// Draws from ATen's default generator as if it had been seeded with `seed`, and leaves it as it was.
class SeededDraws {
 public:
  explicit SeededDraws(uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~SeededDraws() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  SeededDraws(const SeededDraws&) = delete;
  SeededDraws& operator=(const SeededDraws&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// What a batch must be like before anything is computed from it. With a cache, the padding of the first chunk is kept.
nn::Sequence continued(const at::Tensor& ids_BT, nn::Sequence sequence, Cache* cache, const void* owner) {
  if (ids_BT.dim() != 2 || ids_BT.size(1) == 0) {
    throw Error(fmt::format("token ids have {} dimensions and {} elements", ids_BT.dim(), ids_BT.numel()),
                "they are (batch, time), with at least one token");
  }
  if (sequence.shard && (cache || sequence.cu_seqlens || sequence.seq_start)) {
    throw Error("a sequence split over ranks with a cache, packed documents or padding", "it is one whole document");
  }
  if (!cache) return sequence;
  if (cache->owner != owner) {
    throw Error("the cache belongs to another model", "continue it with the model whose make_cache() made it");
  }
  if (sequence.cu_seqlens)
    throw Error("packed documents cannot continue a cache", "give each document a row of its own");
  if (sequence.seq_start && cache->length > 0) {
    throw Error("left padding was given for a cache that holds tokens already", "padding belongs to the first chunk");
  }
  if (sequence.seq_start) cache->seq_start = sequence.seq_start;
  sequence.seq_start = cache->seq_start;
  sequence.offset = cache->length;
  return sequence;
}

}  // namespace

struct LanguageModel::Impl {
  explicit Impl(const ModelConfig& config_in)
      : config(config_in),
        embeddings(config.vocab_size, config.hidden_size),
        norm(config.hidden_size, config.norm_eps),
        lm_head(config.tie_word_embeddings ? 0 : config.hidden_size,
                config.tie_word_embeddings ? 0 : config.vocab_size) {
    if (config.kind() == "hgrn2" && config.use_lower_bound) {
      shared.lower_bounds = at::empty({config.num_hidden_layers, config.hidden_size}, at::kFloat);
    }
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      blocks.push_back(std::make_unique<Block>(config, layer, shared));
    }
    const Names names = names_of(config);
    embeddings.collect(names.root + "embeddings.", parameters);
    if (shared.lower_bounds.defined()) {
      parameters.push_back({names.root + "lower_bounds", shared.lower_bounds, /*decay=*/false});
    }
    parameters_before.push_back(parameters.size());
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      blocks[layer]->collect(fmt::format("{}layers.{}.", names.root, layer), parameters);
      parameters_before.push_back(parameters.size());
    }
    norm.collect(names.root + names.last_norm, parameters);
    if (config.tie_word_embeddings) {
      lm_head.weight = embeddings.weight;
    } else {
      lm_head.collect("lm_head.", parameters);
    }
  }

  at::ScalarType compute() const { return compute_dtype.value_or(embeddings.weight.scalar_type()); }

  ModelConfig config;
  nn::Embedding embeddings;
  mixers::SharedParameters shared;
  std::vector<std::unique_ptr<Block>> blocks;
  nn::RmsNorm norm;
  nn::Linear lm_head;
  nn::Parameters parameters;
  std::vector<size_t> parameters_before;  ///< how many come before layer 0, 1, … and before the last norm
  std::function<void(size_t n)> before_weights = [](size_t) {};
  std::optional<at::ScalarType> compute_dtype;
  Recompute recompute = Recompute::kNone;
  bool deterministic = false;
};

LanguageModel::LanguageModel(const ModelConfig& config) : impl_(std::make_unique<Impl>(config)) {}
LanguageModel::~LanguageModel() = default;
LanguageModel::LanguageModel(LanguageModel&&) noexcept = default;

const ModelConfig& LanguageModel::config() const { return impl_->config; }
const nn::Parameters& LanguageModel::parameters() const { return impl_->parameters; }

void LanguageModel::init(uint64_t seed) {
  const SeededDraws draws(seed);
  const double std = impl_->config.initializer_range;
  impl_->embeddings.init(std);
  if (impl_->shared.lower_bounds.defined()) {
    at::NoGradGuard no_grad;
    impl_->shared.lower_bounds.zero_();
  }
  for (auto& block : impl_->blocks) block->init();
  impl_->norm.init();
  if (impl_->config.tie_word_embeddings) return;
  const std::string kind = impl_->config.kind();
  kind == "mamba2" || kind == "samba" ? impl_->lm_head.init_default() : impl_->lm_head.init(std);
}

at::Tensor LanguageModel::hidden(const at::Tensor& ids_BT, const nn::Sequence& sequence_in, Cache* cache) {
  auto sequence = continued(ids_BT, sequence_in, cache, impl_.get());
  sequence.deterministic = sequence.deterministic || impl_->deterministic;
  // A cache is memory of the past, overwritten as it grows: no gradient passes through it.
  const at::AutoGradMode grad_mode(cache == nullptr && at::GradMode::is_enabled());
  impl_->before_weights(impl_->parameters_before[0]);
  nn::ResidualStream stream{impl_->embeddings.forward(ids_BT), {}};
  const bool recompute = impl_->recompute == Recompute::kFull && at::GradMode::is_enabled();
  for (size_t layer = 0; layer < impl_->blocks.size(); ++layer) {
    auto* block = impl_->blocks[layer].get();
    auto* slot = cache ? cache->slots[layer].get() : nullptr;
    impl_->before_weights(impl_->parameters_before[layer + 1]);
    if (!recompute) {
      block->forward(stream, sequence, slot, impl_->compute());
      continue;
    }
    const nn::TensorFunction forward = [=, compute = impl_->compute()](const std::vector<at::Tensor>& x) {
      nn::ResidualStream own{x[0], x.size() > 1 ? x[1] : at::Tensor()};
      block->forward(own, sequence, slot, compute);
      return std::vector<at::Tensor>{own.sum_BTC, own.branch_BTC};
    };
    std::vector<at::Tensor> inputs{stream.sum_BTC};
    if (stream.branch_BTC.defined()) inputs.push_back(stream.branch_BTC);
    const auto outputs = nn::recomputed(forward, inputs);
    stream = {outputs[0], outputs[1]};
  }
  if (cache) cache->length += ids_BT.size(1);
  impl_->before_weights(impl_->parameters.size());
  return stream.normed(impl_->norm, impl_->compute());
}

at::Tensor LanguageModel::logits(const at::Tensor& ids_BT, const nn::Sequence& sequence, Cache* cache) {
  return impl_->lm_head.forward(hidden(ids_BT, sequence, cache));
}

Loss LanguageModel::loss(const at::Tensor& ids_BT, const at::Tensor& labels_BT, const nn::Sequence& sequence,
                         const std::optional<at::Tensor>& token_weight_BT) {
  if (labels_BT.sizes() != ids_BT.sizes()) {
    throw Error("labels and token ids differ in shape", "each position needs one label, or -100 for none");
  }
  const auto x_NC = hidden(ids_BT, sequence).flatten(0, 1);
  const auto weight_N = token_weight_BT ? std::optional(token_weight_BT->flatten()) : std::nullopt;
  const auto result = ops::linear_cross_entropy(x_NC, impl_->lm_head.weight, labels_BT.flatten(), weight_N);
  return {result.total, result.loss_N.view(labels_BT.sizes())};
}

Cache LanguageModel::make_cache() const {
  Cache cache;
  cache.owner = impl_.get();
  for (const auto& block : impl_->blocks) cache.slots.push_back(block->mixer().make_slot());
  return cache;
}

void LanguageModel::to(at::Device device, at::ScalarType dtype) {
  // The layers and the list of parameters share these tensors, so their data is replaced, not they.
  for (auto& parameter : impl_->parameters) {
    parameter.tensor.mutable_grad() = at::Tensor();
    parameter.tensor.set_data(parameter.tensor.detach().to(device, dtype));
  }
}

void LanguageModel::set_compute_dtype(at::ScalarType dtype) { impl_->compute_dtype = dtype; }

void LanguageModel::set_recompute(Recompute what) {
  impl_->recompute = what;
  for (auto& block : impl_->blocks) block->set_recompute_mlp(what == Recompute::kMlp);
}

void LanguageModel::set_deterministic(bool on) { impl_->deterministic = on; }

void LanguageModel::set_before_weights(std::function<void(size_t n)> ready) {
  impl_->before_weights = std::move(ready);
}

void LanguageModel::set_requires_grad(bool on) {
  for (auto& parameter : impl_->parameters) parameter.tensor.set_requires_grad(on && parameter.trainable);
}

ParameterCount LanguageModel::count_parameters() const {
  ParameterCount count;
  for (const auto& parameter : impl_->parameters) {
    if (parameter.trainable) count.total += parameter.tensor.numel();
  }
  count.non_embedding = count.total - impl_->embeddings.weight.numel();
  return count;
}

double LanguageModel::flops_per_token(int64_t context) const {
  // The head's product is done whether or not its matrix is also the embedding.
  const int64_t tied = impl_->config.tie_word_embeddings ? impl_->embeddings.weight.numel() : 0;
  double flops = 2 * static_cast<double>(count_parameters().non_embedding + tied);
  for (const auto& block : impl_->blocks) flops += block->mixer().extra_flops_per_token(context);
  return flops;
}

}  // namespace fox::model
