#include "model/block.h"

#include <cmath>

#include "model/names.h"
#include "nn/recompute.h"

namespace fox::model {

Block::Block(const ModelConfig& config, int64_t layer, const mixers::SharedParameters& shared)
    : config_(config),
      mixer_norm_(config.hidden_size, config.norm_eps),
      mixer_(mixers::make_mixer(config, layer, shared)) {
  const int64_t mlp_width = config.mlp_width(layer);
  if (mlp_width == 0) return;
  mlp_norm_.emplace(config.hidden_size, config.norm_eps);
  mlp_.emplace(config.hidden_size, mlp_width);
}

void Block::forward(nn::ResidualStream& stream, const nn::Sequence& sequence, nn::CacheSlot* slot,
                    at::ScalarType compute) {
  stream.branch_BTC = mixer_->forward(stream.normed(mixer_norm_, compute), sequence, slot);
  if (mlp_) stream.branch_BTC = apply_mlp(stream.normed(*mlp_norm_, compute));
}

at::Tensor Block::apply_mlp(const at::Tensor& x_BTC) const {
  if (!recompute_mlp_) return mlp_->forward(x_BTC);
  const auto forward = [this](const std::vector<at::Tensor>& x) { return std::vector{mlp_->forward(x[0])}; };
  return nn::recomputed(forward, {x_BTC})[0];
}

void Block::collect(const std::string& prefix, nn::Parameters& out) {
  const Names names = names_of(config_);
  mixer_norm_.collect(prefix + names.mixer_norm, out);
  mixer_->collect(prefix + names.mixer, out);
  if (!mlp_) return;
  mlp_norm_->collect(prefix + "mlp_norm.", out);
  mlp_->collect(prefix + "mlp.", out);
}

void Block::init() {
  mixer_norm_.init();
  mixer_->init();
  if (mlp_) init_mlp();
}

void Block::init_mlp() {
  const std::string kind = config_.kind();
  const double residual = 1 / std::sqrt(2.0 * static_cast<double>(config_.num_hidden_layers));  // two branches a layer
  mlp_norm_->init();
  if (kind == "samba") {
    mlp_->gate_proj.init_default();
    mlp_->down_proj.init_default(config_.rescale_prenorm_residual ? residual : 1);
    return;
  }
  const bool rescaled = kind == "hgrn2" || kind == "delta_net";
  mlp_->gate_proj.init(config_.initializer_range);
  mlp_->down_proj.init(config_.initializer_range * (rescaled ? residual : 1));
}

}  // namespace fox::model
