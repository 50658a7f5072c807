#include "train/parameter_buckets.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/packed_weights.h"

namespace fox::train {
namespace {

/// Elements that parameters begin at multiples of: vector loads and cuBLAS want aligned weights.
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

/// Called by autograd when a parameter's gradient of a backward pass has been added up.
struct ParameterBuckets::Hook : torch::autograd::PostAccumulateGradHook {
  Hook(ParameterBuckets& owner, size_t bucket, size_t piece) : owner_(owner), bucket_(bucket), piece_(piece) {}
  void operator()(const at::Tensor& /*parameter*/) override { owner_.gradient_came(bucket_, piece_); }

  ParameterBuckets& owner_;
  size_t bucket_, piece_;
};

ParameterBuckets::ParameterBuckets(const nn::Parameters& parameters, dist::ProcessGroup ranks, bool sharded,
                                   int64_t bytes)
    : parameters_(parameters), ranks_(std::move(ranks)), sharded_(sharded) {
  const at::NoGradGuard no_grad;
  lay_out(bytes);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    allocate(buckets_[b]);
    for (size_t p = 0; p < buckets_[b].pieces.size(); ++p) {
      torch::autograd::impl::set_post_acc_grad_hooks(parameters_[buckets_[b].pieces[p].parameter].tensor,
                                                     std::make_unique<Hook>(*this, b, p));
    }
  }
  choose_own();
}

ParameterBuckets::~ParameterBuckets() {
  for (const auto& parameter : parameters_) {
    if (parameter.trainable) torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
  }
}

// From the last parameter to the first, about as the backward pass comes to them.
void ParameterBuckets::lay_out(int64_t bytes) {
  for (size_t i = parameters_.size(); i-- > 0;) {
    if (!parameters_[i].trainable) continue;
    const auto& tensor = parameters_[i].tensor;
    const auto element = static_cast<int64_t>(tensor.element_size());
    if (buckets_.empty() || (buckets_.back().length + tensor.numel()) * element > bytes) buckets_.emplace_back();
    Bucket& bucket = buckets_.back();
    bucket.pieces.push_back({i, bucket.length, {}});
    bucket.length += round_up(tensor.numel(), kAlignment);
  }
  for (Bucket& bucket : buckets_) bucket.length = round_up(bucket.length, kAlignment * ranks_.size());
}

void ParameterBuckets::allocate(Bucket& bucket) {
  const auto options = parameters_[bucket.pieces.front().parameter].tensor.options().requires_grad(false);
  bucket.gradients = at::zeros({bucket.length}, options);
  if (sharded_) bucket.weights = at::zeros({bucket.length}, options);
  for (Piece& piece : bucket.pieces) {
    at::Tensor parameter = parameters_[piece.parameter].tensor;
    const auto place = [&](const at::Tensor& flat) {
      return flat.narrow(0, piece.offset, parameter.numel()).view(parameter.sizes());
    };
    piece.gradient = place(bucket.gradients);
    if (!sharded_) continue;
    const auto weights = place(bucket.weights);
    weights.copy_(parameter);
    parameter.set_data(weights);
  }
}

void ParameterBuckets::choose_own() {
  std::vector<int64_t> indices;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    const int64_t share = bucket.length / ranks_.size();
    const int64_t first = sharded_ ? share * ranks_.rank() : 0, last = sharded_ ? first + share : bucket.length;
    for (size_t p = 0; p < bucket.pieces.size(); ++p) {
      const Piece& piece = bucket.pieces[p];
      nn::Parameter parameter = parameters_[piece.parameter];
      const int64_t begin = std::max(first, piece.offset);
      const int64_t end = std::min(last, piece.offset + parameter.tensor.numel());
      if (begin >= end) continue;
      if (sharded_) {
        parameter.tensor = bucket.weights.narrow(0, begin, end - begin);
        parameter.tensor.mutable_grad() = bucket.gradients.narrow(0, begin, end - begin);
      }
      own_.push_back(parameter);
      stretches_.push_back({b, p, begin, end - begin});
      indices.push_back(static_cast<int64_t>(piece.parameter));
    }
  }
  own_indices_ = at::tensor(indices, at::kLong).to(parameters_.front().tensor.device());
}

void ParameterBuckets::begin_step(bool several_passes) {
  const at::NoGradGuard no_grad;
  last_pass_ = false;
  for (Bucket& bucket : buckets_) {
    // Added up where they are sent from; those of a single pass are moved there, which saves the zeros.
    if (several_passes && !bucket.sent) bucket.gradients.zero_();
    for (Piece& piece : bucket.pieces) {
      auto& gradient = parameters_[piece.parameter].tensor.mutable_grad();
      gradient.reset();
      if (several_passes && !bucket.sent) gradient = piece.gradient;
      piece.came = false;
    }
    bucket.missing = std::ssize(bucket.pieces);
  }
}

void ParameterBuckets::gradient_came(size_t bucket, size_t piece) {
  if (!last_pass_ || buckets_[bucket].sent) return;
  take(buckets_[bucket].pieces[piece]);
  if (--buckets_[bucket].missing == 0) send_full_buckets();
}

void ParameterBuckets::take(Piece& piece) {
  const at::NoGradGuard no_grad;
  auto& gradient = parameters_[piece.parameter].tensor.mutable_grad();
  if (!gradient.defined()) {
    piece.gradient.zero_();
  } else if (gradient.data_ptr() != piece.gradient.data_ptr()) {
    piece.gradient.copy_(gradient);
  }
  gradient = piece.gradient;
  piece.came = true;
}

void ParameterBuckets::send_full_buckets() {
  for (; next_ < buckets_.size() && (buckets_[next_].missing == 0 || buckets_[next_].sent); ++next_) {
    Bucket& bucket = buckets_[next_];
    if (bucket.sent) continue;
    bucket.sent = true;
    bucket.transfer = sharded_ ? ranks_.reduce_scatter(share_of(bucket.gradients), bucket.gradients)
                               : ranks_.all_reduce(bucket.gradients);
  }
}

void ParameterBuckets::finish_gradients(bool faulty) {
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    if (bucket.sent) continue;
    for (Piece& piece : bucket.pieces) {
      if (!piece.came) take(piece);
    }
    if (faulty) bucket.gradients.fill_(std::nan(""));
    bucket.missing = 0;
  }
  send_full_buckets();
  for (Bucket& bucket : buckets_) {
    bucket.transfer.wait();
    bucket.sent = false;
    for (Piece& piece : bucket.pieces) parameters_[piece.parameter].tensor.mutable_grad() = piece.gradient;
  }
  next_ = 0;
  last_pass_ = false;
}

at::Tensor ParameterBuckets::share_of(const at::Tensor& flat) const {
  const int64_t share = flat.numel() / ranks_.size();
  return flat.narrow(0, share * ranks_.rank(), share);
}

void ParameterBuckets::gather_weights() {
  if (!sharded_) return;
  wait_for_weights(parameters_.size());  // a pass that broke off has not waited for all of the step before
  for (size_t b = buckets_.size(); b-- > 0;) {
    buckets_[b].weights_transfer = ranks_.all_gather(buckets_[b].weights, share_of(buckets_[b].weights));
  }
  gathering_ = buckets_.size();
  for (const auto& parameter : parameters_) nn::mark_changed(parameter.tensor);
}

void ParameterBuckets::wait_for_weights(size_t n) {
  // A bucket's last piece is its first parameter.
  for (; gathering_ > 0 && buckets_[gathering_ - 1].pieces.back().parameter < n; --gathering_) {
    buckets_[gathering_ - 1].weights_transfer.wait();
  }
}

void ParameterBuckets::gather(const checkpoint::NamedTensors& own, const std::string& kind,
                              const TensorSink& sink) const {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    const auto flat = at::empty_like(bucket.gradients);  // a bucket at a time: the whole would not fit beside training
    for (size_t i = 0; i < own_.size(); ++i) {
      const auto& [its_bucket, piece, offset, length] = stretches_[i];
      if (its_bucket == b) flat.narrow(0, offset, length).copy_(own.at(kind + own_[i].name).view(-1));
    }
    if (sharded_) ranks_.all_gather(flat, share_of(flat)).wait();
    for (const Piece& piece : bucket.pieces) {
      const auto& parameter = parameters_[piece.parameter];
      const auto whole = flat.narrow(0, piece.offset, parameter.tensor.numel());
      sink(kind + parameter.name, whole.view(parameter.tensor.sizes()));
    }
  }
}

void ParameterBuckets::scatter(const checkpoint::NamedTensors& whole, const std::string& kind,
                               const checkpoint::NamedTensors& own) const {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    const auto flat = at::zeros_like(bucket.gradients);
    for (const Piece& piece : bucket.pieces) {
      const auto& parameter = parameters_[piece.parameter];
      if (ranks_.rank() != 0) break;
      flat.narrow(0, piece.offset, parameter.tensor.numel()).copy_(whole.at(kind + parameter.name).reshape(-1));
    }
    ranks_.broadcast(flat).wait();
    for (size_t i = 0; i < own_.size(); ++i) {
      const auto& [its_bucket, piece, offset, length] = stretches_[i];
      if (its_bucket == b) at::Tensor(own.at(kind + own_[i].name)).view(-1).copy_(flat.narrow(0, offset, length));
    }
  }
}

}  // namespace fox::train
