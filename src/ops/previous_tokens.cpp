#include "ops/previous_tokens.h"

#include "ops/common.h"
#include "ops/held_shard.h"

namespace fox::ops {
namespace {

class PreviousTokens : public torch::autograd::Function<PreviousTokens> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& last_BN,
                            const std::shared_ptr<const dist::SequenceShard>& shard) {
    hold_shard(ctx, shard);
    return shard->hand_on(last_BN, 1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    return {held_shard(ctx)->hand_on(grads[0], -1), at::Tensor()};
  }
};

}  // namespace

at::Tensor previous_tokens(const at::Tensor& last_BN, const std::shared_ptr<const dist::SequenceShard>& shard) {
  return PreviousTokens::apply(last_BN, shard);
}

}  // namespace fox::ops
