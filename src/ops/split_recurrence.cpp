#include "ops/split_recurrence.h"

#include <torch/csrc/autograd/autograd.h>

#include <array>

#include "ops/common.h"
#include "ops/held_shard.h"

namespace fox::ops {
namespace {

using dist::SequenceShard;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool in_time(const at::Tensor& input) { return input.dim() >= 3; }

/// One chunk as it was computed, with what autograd recorded of it.
struct ComputedChunk {
  variable_list inputs;  ///< those given, and the state before
  at::Tensor o, state;
};

struct HeldChunks : torch::CustomClassHolder {
  std::array<ComputedChunk, SequenceShard::kChunks> of_slot;
};

/// Hands a state from the owner of chunk `from` to that of `to`, who gets it; all ranks take part.
at::Tensor pass(const SequenceShard& shard, int64_t from, int64_t to, const at::Tensor& sent, const at::Tensor& like) {
  if (shard.owner(from) == shard.owner(to)) return sent;
  const bool sends = shard.owner(from) == shard.rank(), receives = shard.owner(to) == shard.rank();
  std::vector<at::Tensor> send, receive;
  if (sends) send.push_back(sent.contiguous());
  if (receives) receive.push_back(at::empty_like(like, at::MemoryFormat::Contiguous));
  shard.group().exchange(send, static_cast<int>(shard.owner(to)), receive, static_cast<int>(shard.owner(from))).wait();
  return receives ? receive[0] : at::Tensor();
}

ComputedChunk compute(const Recurrence& recurrence, const variable_list& inputs, int64_t slot, const at::Tensor& first,
                      bool recorded) {
  const at::AutoGradMode grad_mode(recorded);
  ComputedChunk chunk;
  for (const auto& input : inputs) {
    const auto own = in_time(input) ? SequenceShard::rows(input, slot) : input;
    chunk.inputs.push_back(own.detach().requires_grad_(recorded && input.requires_grad()));
  }
  RecurrenceOptions options;
  options.initial_state = first.detach().requires_grad_(recorded);
  const auto result = recurrence(chunk.inputs, options);
  chunk.inputs.push_back(*options.initial_state);
  chunk.o = result.o, chunk.state = result.state;
  return chunk;
}

/// What a sequence begins with: 0, shaped as the state that one token leaves.
at::Tensor zero_state(const Recurrence& recurrence, const variable_list& inputs) {
  const at::NoGradGuard no_grad;
  variable_list token;
  for (const auto& input : inputs) {
    token.push_back(in_time(input) ? SequenceShard::rows(input, 0).narrow(1, 0, 1) : input);
  }
  return at::zeros_like(recurrence(token, {}).state, at::MemoryFormat::Contiguous);
}

class SplitRecurrence : public torch::autograd::Function<SplitRecurrence> {
 public:
  static at::Tensor forward(AutogradContext* ctx, at::TensorList inputs_in, const Recurrence& recurrence, bool recorded,
                            const std::shared_ptr<const SequenceShard>& shard) {
    const auto inputs = inputs_in.vec();
    auto held = c10::make_intrusive<HeldChunks>();
    const auto zero = zero_state(recurrence, inputs);
    at::Tensor state = zero;
    for (int64_t c = 0; c < shard->chunks(); ++c) {
      if (shard->owner(c) == shard->rank()) {
        const int64_t slot = shard->slot(c);
        held->of_slot[slot] = compute(recurrence, inputs, slot, state, recorded);
        state = held->of_slot[slot].state.detach();
      }
      if (c + 1 < shard->chunks()) state = pass(*shard, c, c + 1, state, zero);
    }
    auto o = at::cat({held->of_slot[0].o.detach(), held->of_slot[1].o.detach()});
    ctx->saved_data["chunks"] = c10::IValue::make_capsule(std::move(held));
    hold_shard(ctx, shard);
    return o;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto capsule = ctx->saved_data["chunks"].toCapsule();
    auto& chunks = static_cast<HeldChunks*>(capsule.get())->of_slot;
    const auto shard = held_shard(ctx);
    const auto zero = at::zeros_like(chunks[0].inputs.back());
    std::array<variable_list, SequenceShard::kChunks> of_slot;
    at::Tensor d_state = zero;
    for (int64_t c = shard->chunks() - 1; c >= 0; --c) {
      if (shard->owner(c) == shard->rank()) {
        const int64_t slot = shard->slot(c);
        of_slot[slot] = gradients_of(chunks[slot], SequenceShard::rows(grads[0], slot), d_state);
        d_state = of_slot[slot].back();
        chunks[slot] = {};
      }
      if (c > 0) d_state = pass(*shard, c, c - 1, d_state, zero);
    }
    variable_list result;
    for (size_t i = 0; i + 1 < of_slot[0].size(); ++i) {
      const auto &early = of_slot[0][i], &late = of_slot[1][i];
      if (!early.defined()) {
        result.emplace_back();
      } else {
        result.push_back(in_time(early) ? at::cat({early, late}) : early + late);
      }
    }
    result.resize(result.size() + 3);  // of what are no tensors
    return result;
  }

 private:
  /// Of the inputs and the state before; undefined for inputs that want none.
  static variable_list gradients_of(const ComputedChunk& chunk, const at::Tensor& d_o, const at::Tensor& d_state) {
    variable_list wanted;
    for (const auto& input : chunk.inputs) {
      if (input.requires_grad()) wanted.push_back(input);
    }
    const auto found = torch::autograd::grad({chunk.o, chunk.state}, wanted, {d_o, d_state});
    variable_list all;
    size_t next = 0;
    for (const auto& input : chunk.inputs) all.push_back(input.requires_grad() ? found[next++] : at::Tensor());
    return all;
  }
};

}  // namespace

at::Tensor split_recurrence(const Recurrence& recurrence, const std::vector<at::Tensor>& inputs,
                            const std::shared_ptr<const dist::SequenceShard>& shard) {
  bool recorded = false;
  for (const auto& input : inputs) recorded = recorded || wants_grad({&input});
  return SplitRecurrence::apply(at::TensorList(inputs), recurrence, recorded, shard);
}

}  // namespace fox::ops
