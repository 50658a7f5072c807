#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dist/sequence_shard.h"
#include "ops/key_plan.h"

namespace fox::ops {

/// Keys and values of one slice of heads, from where the first is that this rank's queries need to its last own one;
/// those between that no query of the rank needs have no values. Used for their gradients as well.
struct SliceKeys {
  int64_t begin = 0;    ///< position of the first row
  at::Tensor kv_TB2HD;  ///< time first, so that a range of positions is one piece of memory that can be received

  /// Of the positions [range.begin, range.end): contiguous as they lie here, or seen as (2, B, n, H, D).
  at::Tensor piece(const KeyRange& range) const { return kv_TB2HD.narrow(0, range.begin - begin, range.size()); }
  at::Tensor view(const KeyRange& range) const { return piece(range).permute({2, 1, 0, 3, 4}); }
};

/// Keys and values on their way round the ring: in round n of P - 1 everybody sends to the rank n places on what that
/// one needs, and receives from the one n places back.
class KeyExchange {
 public:
  /// Begins to gather the keys and values of plan.slices[slice]; k, v (2B, Tc, Hk, D) are the rank's own.
  KeyExchange(const KeyPlan& plan, size_t slice, const dist::SequenceShard& shard, const at::Tensor& k,
              const at::Tensor& v);
  /// Waits for them.
  const SliceKeys& keys();

 private:
  SliceKeys keys_;
  std::vector<dist::Transfer> transfers_;
};

/// The way back: `grads` has what this rank's queries say of the keys that they saw (the layout of
/// KeyExchange::keys()). Sends others' to them in `type` and adds what they say of this rank's own. Returns (2, 2B, Tc,
/// Hs, D), the gradients of its own keys and values in the dtype of `grads`.
at::Tensor return_gradients(const SliceKeys& grads, const KeyPlan& plan, size_t slice, const dist::SequenceShard& shard,
                            at::ScalarType type);

}  // namespace fox::ops
