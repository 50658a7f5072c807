#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "dist/process_group.h"
#include "nn/sequence.h"

namespace fox::train {

/// Called with one named tensor after another.
using TensorSink = std::function<void(const std::string& name, const at::Tensor& tensor)>;

/// The trainable parameters, laid out in flat buckets through which the ranks of a group add up their gradients: a
/// bucket is on its way as soon as the backward pass has filled it, beside the rest of the pass. Sharded (ZeRO-1, arXiv
/// 1910.02054), each rank gets the sum of its share of every bucket only, updates that share of the weights, and all
/// hand theirs round: the same traffic, and 1 / ranks of the optimizer's memory and work. All ranks call the same
/// functions in the same order.
class ParameterBuckets {
 public:
  /// When sharded, the parameters become views of flat memory (the same tensors, other storage). A bucket holds at most
  /// `bytes`, or one parameter.
  ParameterBuckets(const nn::Parameters& parameters, dist::ProcessGroup ranks, bool sharded, int64_t bytes);
  ~ParameterBuckets();
  ParameterBuckets(const ParameterBuckets&) = delete;
  ParameterBuckets& operator=(const ParameterBuckets&) = delete;

  bool sharded() const { return sharded_; }
  /// What this rank's optimizer updates: the trainable parameters, or its stretches of them, 1-D with gradients set.
  const nn::Parameters& own() const { return own_; }
  /// Which parameters (place in the list given) those are, int64 on the parameters' device.
  const at::Tensor& own_indices() const { return own_indices_; }

  /// Forgets the gradients of the step before, or of a pass of this one that was broken off (what is on its way already
  /// stays so). Several backward passes add up.
  void begin_step(bool several_passes);
  /// The backward pass that comes now is the step's last.
  void last_pass() { last_pass_ = true; }
  /// Waits until the sums over all ranks are there: own()'s gradients when sharded, every parameter's otherwise. With
  /// `faulty`, for a pass that broke off, what has not been sent is sent as NaN, so that every rank knows.
  void finish_gradients(bool faulty);
  /// Asks for the weights from the ranks that have updated them, those of the first parameters first, and waits for
  /// none. Does nothing when each rank has updated all.
  void gather_weights();
  /// What is computed after this sees the first `n` of the parameters given, as gathered.
  void wait_for_weights(size_t n);

  /// `own` holds tensors of own() by `kind` + name; `sink` gets them for whole parameters, put together from all ranks.
  void gather(const checkpoint::NamedTensors& own, const std::string& kind, const TensorSink& sink) const;
  /// The reverse: what rank 0 has of whole parameters (others give nothing) into everybody's own.
  void scatter(const checkpoint::NamedTensors& whole, const std::string& kind,
               const checkpoint::NamedTensors& own) const;

 private:
  struct Hook;
  struct Piece {  // a parameter in its bucket
    size_t parameter;
    int64_t offset;
    at::Tensor gradient;  // view of the bucket's, shaped as the parameter
    bool came = false;
  };
  struct Bucket {
    std::vector<Piece> pieces;
    int64_t length = 0;             // in elements, a multiple of the number of ranks
    at::Tensor gradients, weights;  // flat; the latter only when sharded
    int64_t missing = 0;            // pieces that have not come
    bool sent = false;
    dist::Transfer transfer, weights_transfer;
  };
  struct Stretch {  // what own() updates
    size_t bucket, piece;
    int64_t offset, length;  // in the bucket
  };

  void lay_out(int64_t bytes);
  void allocate(Bucket& bucket);
  void choose_own();
  void gradient_came(size_t bucket, size_t piece);
  void take(Piece& piece);
  void send_full_buckets();
  at::Tensor share_of(const at::Tensor& flat) const;

  nn::Parameters parameters_;
  dist::ProcessGroup ranks_;
  bool sharded_;
  std::vector<Bucket> buckets_;
  nn::Parameters own_;
  std::vector<Stretch> stretches_;  // of own_
  at::Tensor own_indices_;
  bool last_pass_ = false;
  size_t next_ = 0;  // bucket to be sent: in the same order on every rank
  size_t gathering_ =
      0;  // buckets whose weights have not been waited for: the first ones, which have the last parameters
};

}  // namespace fox::train
