#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <vector>

#include "ops/recurrence.h"

/// How a linear recurrence becomes an operator of the dispatcher, fox::NAME_scan with fox::NAME_scan_backward. A
/// recurrence is given as one function in ATen calls (ScanOp::run); it is computed piece by piece of time, only the
/// states between pieces are kept, and the backward pass runs each piece again under autograd. That is what devices
/// fall back to for shapes and dtypes that have no kernel; on the CPU everything has one.
namespace fox::ops {

struct ScanOp {
  const char* name;      ///< of the recurrence, for errors
  const char* scan;      ///< "fox::NAME_scan"
  const char* backward;  ///< "fox::NAME_scan_backward"
  size_t in_time;        ///< so many inputs, the first ones, are (B, T, ...) or empty; the others have no time
  size_t values;         ///< the input whose shape and dtype the output has
  /// Numbers in the largest tensor that a chunk needs; a piece has as many chunks as keep it at kPieceNumbers.
  int64_t (*chunk_numbers)(at::TensorList inputs, int64_t chunk_size);
  /// Tokens of a piece, from `state` on, chunk_size at a time; the state in the dtype of the computation.
  /// Differentiable.
  RecurrenceResult (*run)(at::TensorList inputs, const at::Tensor& state, int64_t chunk_size);
};

/// So many numbers may the largest tensor of a piece have: a GPU wants few and large calls.
constexpr int64_t kPieceNumbers = 1 << 26;

using ScanResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;      ///< o, last state, what the backward pass needs
using ScanGradients = std::tuple<std::vector<at::Tensor>, at::Tensor>;  ///< of the inputs (empty: none), of `first`
using ScanForward = ScanResult(at::TensorList inputs, const at::Tensor& first, int64_t chunk_size);
using ScanBackward = ScanGradients(const at::Tensor& d_o, const at::Tensor& dlast, at::TensorList inputs,
                                   const at::Tensor& first, const at::Tensor& kept, int64_t chunk_size);

/// The operator by its pieces, on any device.
ScanResult scan_in_pieces(const ScanOp& op, at::TensorList inputs, const at::Tensor& first, int64_t chunk_size);
ScanGradients scan_in_pieces_backward(const ScanOp& op, const at::Tensor& d_o, const at::Tensor& dlast,
                                      at::TensorList inputs, const at::Tensor& first, const at::Tensor& kept,
                                      int64_t chunk_size);

/// Whether the operator is what x (B, T, ...) should go through: it is made for many tokens, and on the CPU for one
/// too. Elsewhere a single token is a few calls, those of the reference.
inline bool has_scan(const at::Tensor& x_BT) { return x_BT.size(1) > 1 || x_BT.is_cpu(); }

/// Calls the operator, recording it for autograd if a gradient is wanted. first: float32, or float64 for float64
/// inputs.
RecurrenceResult scan(const ScanOp& op, at::TensorList inputs, const at::Tensor& first, int64_t chunk_size);

/// Options as the dispatcher's operators fox::NAME take them.
RecurrenceOptions recurrence_options(const std::optional<at::Tensor>& initial_state,
                                     const std::optional<at::Tensor>& cu_seqlens,
                                     const std::optional<at::Tensor>& seq_start, int64_t chunk_size);
/// Schema of fox::NAME: `inputs`, then those options.
std::string recurrence_schema(const char* name, const char* inputs);

/// Whether each position starts a document, (1, T) bool, for inputs that may be empty: (1, 0) when there is one
/// document.
at::Tensor starts_or_empty(const RecurrenceOptions& options, const at::Tensor& like_BT);

extern const ScanOp kHgrn2Scan, kDeltaNetScan, kMamba2Scan, kMambaScan;

}  // namespace fox::ops
