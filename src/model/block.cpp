#include "model/block.h"

#include <ATen/TensorOperators.h>

namespace fox::model {

Block::Block(const ModelConfig& config, int64_t layer)
    : mixer_norm_(config.hidden_size, config.norm_eps),
      mlp_norm_(config.hidden_size, config.norm_eps),
      mixer_(mixers::make_mixer(config, layer)),
      mlp_(config.hidden_size, config.mlp_width()) {}

at::Tensor Block::forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot,
                          at::ScalarType compute) {
  const auto mixed_BTC = x_BTC + mixer_->forward(mixer_norm_.forward(x_BTC).to(compute), sequence, slot);
  return mixed_BTC + mlp_.forward(mlp_norm_.forward(mixed_BTC).to(compute));
}

void Block::collect(const std::string& prefix, nn::Parameters& out) {
  mixer_norm_.collect(prefix + "attn_norm.", out);
  mixer_->collect(prefix + "attn.", out);
  mlp_norm_.collect(prefix + "mlp_norm.", out);
  mlp_.collect(prefix + "mlp.", out);
}

void Block::init(double std) {
  mixer_norm_.init();
  mixer_->init();
  mlp_norm_.init();
  mlp_.init(std);
}

}  // namespace fox::model
