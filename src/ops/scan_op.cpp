#include "ops/scan_op.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "base/error.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

std::vector<at::Tensor> inputs_of_piece(const ScanOp& op, at::TensorList inputs, int64_t start, int64_t length) {
  std::vector<at::Tensor> piece;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool whole = i >= op.in_time || inputs[i].size(1) == 0;
    piece.push_back(whole ? inputs[i] : inputs[i].narrow(1, start, length));
  }
  return piece;
}

/// Where pieces start, and how long they are. Both passes find the same ones.
struct Pieces {
  int64_t length, size;
  Pieces(const ScanOp& op, at::TensorList inputs, int64_t chunk_size) : length(inputs[op.values].size(1)) {
    const int64_t chunk = std::min(chunk_size, length), numbers = std::max<int64_t>(1, op.chunk_numbers(inputs, chunk));
    const int64_t chunks = kPieceNumbers / numbers;
    size = std::min(length, std::max<int64_t>(1, chunks) * chunk);
  }
  int64_t count() const { return (length + size - 1) / size; }
  int64_t start(int64_t i) const { return i * size; }
  int64_t length_of(int64_t i) const { return std::min(size, length - start(i)); }
};

/// One piece again, under autograd: gradients of its inputs and of the state before it.
std::vector<at::Tensor> piece_gradients(const ScanOp& op, const std::vector<at::Tensor>& inputs,
                                        const at::Tensor& first, int64_t chunk_size, const at::Tensor& d_o,
                                        const at::Tensor& dlast) {
  // Operators run below autograd; here it is wanted again.
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard keys(local.included_,
                                              local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const at::AutoGradMode recording(true);
  std::vector<at::Tensor> leaves, wanted;
  for (const auto& x : inputs) {
    leaves.push_back(x.detach());
    if (x.is_floating_point()) wanted.push_back(leaves.back().requires_grad_());
  }
  const auto state = first.detach().requires_grad_();
  wanted.push_back(state);
  const auto result = op.run(leaves, state, chunk_size);
  const auto found = torch::autograd::grad({result.o, result.state}, wanted, {d_o, dlast}, /*retain_graph=*/false,
                                           /*create_graph=*/false, /*allow_unused=*/true);
  std::vector<at::Tensor> gradients;
  size_t next = 0;
  for (const auto& x : inputs) gradients.push_back(x.is_floating_point() ? found[next++] : at::Tensor());
  gradients.push_back(found[next]);
  return gradients;
}

/// The operator recorded for autograd.
class Scan : public torch::autograd::Function<Scan> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::TensorList& inputs,
                                                const at::Tensor& first, const ScanOp* op, int64_t chunk_size) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, last, kept] = find_operator<ScanForward>(op->scan).call(inputs, first, chunk_size);
    auto saved = inputs.vec();
    saved.insert(saved.end(), {first, kept});
    ctx->save_for_backward(saved);
    ctx->saved_data["op"] = reinterpret_cast<int64_t>(op);
    ctx->saved_data["chunk_size"] = chunk_size;
    return {o, last};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto* op = reinterpret_cast<const ScanOp*>(ctx->saved_data["op"].toInt());
    if (at::GradMode::is_enabled()) {
      throw Error(fmt::format("{} cannot be differentiated twice: fox operators have first derivatives only", op->name),
                  "leave out create_graph, or use the operator's reference");
    }
    auto inputs = ctx->get_saved_variables();
    const auto kept = inputs.back(), first = inputs[inputs.size() - 2];
    inputs.resize(inputs.size() - 2);
    auto [gradients, dfirst] =
        find_operator<ScanBackward>(op->backward)
            .call(grads[0], grads[1], inputs, first, kept, ctx->saved_data["chunk_size"].toInt());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].is_floating_point()) gradients[i] = at::Tensor();
    }
    gradients.insert(gradients.end(), {dfirst, at::Tensor(), at::Tensor()});
    return gradients;
  }
};

template <const ScanOp& kOp>
ScanResult scan_op_forward_meta(at::TensorList inputs, const at::Tensor& first, int64_t) {
  return {at::empty(inputs[kOp.values].sizes(), inputs[kOp.values].options()), at::empty_like(first),
          at::empty({0}, first.options())};
}
template <const ScanOp& kOp>
ScanGradients scan_op_backward_meta(const at::Tensor&, const at::Tensor&, at::TensorList inputs,
                                    const at::Tensor& first, const at::Tensor&, int64_t) {
  std::vector<at::Tensor> gradients;
  for (const auto& x : inputs) gradients.push_back(at::empty(x.sizes(), x.options()));
  return {gradients, at::empty_like(first)};
}
template <const ScanOp& kOp>
ScanResult scan_op_forward_autograd(at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
  const auto result = scan(kOp, inputs, first, chunk_size);
  return {result.o, result.state, at::empty({0}, first.options().requires_grad(false))};
}

template <const ScanOp& kOp>
void define(torch::Library& m) {
  const std::string name = kOp.scan + std::string("fox::").size(), backward = name + "_backward";
  const auto schema = name + "(Tensor[] inputs, Tensor first, int chunk_size) -> (Tensor o, Tensor last, Tensor kept)";
  const auto backward_schema = backward +
                               "(Tensor d_o, Tensor dlast, Tensor[] inputs, Tensor first, Tensor kept, "
                               "int chunk_size) -> (Tensor[] dinputs, Tensor dfirst)";
  m.def(schema.c_str());
  m.def(backward_schema.c_str());
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, &scan_op_forward_meta<kOp>));
  m.impl(backward.c_str(), torch::dispatch(c10::DispatchKey::Meta, &scan_op_backward_meta<kOp>));
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, &scan_op_forward_autograd<kOp>));
  m.impl(backward.c_str(), torch::dispatch(c10::DispatchKey::Autograd, once_differentiable()));
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  define<kHgrn2Scan>(m);
  define<kDeltaNetScan>(m);
  define<kMamba2Scan>(m);
  define<kMambaScan>(m);
}

}  // namespace

ScanResult scan_in_pieces(const ScanOp& op, at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
  const Pieces pieces(op, inputs, chunk_size);
  std::vector<at::Tensor> o, before;
  auto state = first;
  for (int64_t i = 0; i < pieces.count(); ++i) {
    before.push_back(state);
    const auto result = op.run(inputs_of_piece(op, inputs, pieces.start(i), pieces.length_of(i)), state, chunk_size);
    o.push_back(cast(result.o, inputs[op.values].scalar_type()));
    state = result.state;
  }
  return {o.size() == 1 ? o[0] : at::cat(o, 1), state, at::stack(before)};
}

ScanGradients scan_in_pieces_backward(const ScanOp& op, const at::Tensor& d_o, const at::Tensor& dlast,
                                      at::TensorList inputs, const at::Tensor& first, const at::Tensor& kept,
                                      int64_t chunk_size) {
  const Pieces pieces(op, inputs, chunk_size);
  std::vector<at::Tensor> gradients;
  for (const auto& x : inputs) gradients.push_back(at::zeros(x.sizes(), x.options()));
  auto dstate = dlast;
  for (int64_t i = pieces.count() - 1; i >= 0; --i) {
    const auto d_piece = cast(d_o.narrow(1, pieces.start(i), pieces.length_of(i)), first.scalar_type());
    const auto piece = inputs_of_piece(op, inputs, pieces.start(i), pieces.length_of(i));
    const auto found = piece_gradients(op, piece, kept[i], chunk_size, d_piece, dstate);
    for (size_t j = 0; j < inputs.size(); ++j) {
      if (!found[j].defined()) continue;
      if (j < op.in_time) {
        gradients[j].narrow(1, pieces.start(i), pieces.length_of(i)).copy_(found[j]);
      } else {
        gradients[j].add_(found[j]);
      }
    }
    dstate = found.back();
  }
  return {gradients, dstate};
}

RecurrenceResult scan(const ScanOp& op, at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
  bool recorded = wants_grad({&first});
  for (const auto& x : inputs) recorded = recorded || wants_grad({&x});
  if (recorded) {
    const auto results = Scan::apply(inputs, first, &op, chunk_size);
    return {results[0], results[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto [o, last, kept] = find_operator<ScanForward>(op.scan).call(inputs, first, chunk_size);
  return {o, last};
}

RecurrenceOptions recurrence_options(const std::optional<at::Tensor>& initial_state,
                                     const std::optional<at::Tensor>& cu_seqlens,
                                     const std::optional<at::Tensor>& seq_start, int64_t chunk_size) {
  return {.cu_seqlens = cu_seqlens, .seq_start = seq_start, .initial_state = initial_state, .chunk_size = chunk_size};
}

std::string recurrence_schema(const char* name, const char* inputs) {
  return fmt::format(
      "{}({}, Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? seq_start=None, int chunk_size=64) "
      "-> (Tensor o, Tensor state)",
      name, inputs);
}

at::Tensor starts_or_empty(const RecurrenceOptions& options, const at::Tensor& like_BT) {
  if (!options.cu_seqlens) return at::empty({1, 0}, like_BT.options().dtype(at::kBool).requires_grad(false));
  return document_starts(options.cu_seqlens->to(like_BT.device()), like_BT.size(1)).unsqueeze(0);
}

}  // namespace fox::ops
