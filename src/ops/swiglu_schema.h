#pragma once

#include <tuple>

#include "ops/common.h"

/// The types of fox::swiglu (of gate_up), fox::swiglu_of_two (of gate and value) and their backward operators, for the
/// CPU and CUDA sides.
namespace fox::ops {

using SwigluForward = at::Tensor(const at::Tensor&);
/// d_gate_up of dout, gate_up.
using SwigluBackward = at::Tensor(const at::Tensor&, const at::Tensor&);

using SwigluOfTwoForward = at::Tensor(const at::Tensor&, const at::Tensor&);
/// dgate, dvalue of dout, gate, value.
using SwigluOfTwoGradients = std::tuple<at::Tensor, at::Tensor>;
using SwigluOfTwoBackward = SwigluOfTwoGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&);

/// Gate and value as rows, in the dtype and layout that the kernels read; it must outlive their parameters.
struct SwigluInputs {
  Rows gate, value;

  SwigluInputs(const at::Tensor& gate_in, const at::Tensor& value_in, at::ScalarType type)
      : gate(as_rows(cast(gate_in, type))), value(as_rows(cast(value_in, type))) {}

  /// Params: SwigluParams<T> of either kind of kernel.
  template <class Params, class T>
  Params params() const {
    const auto data = [](const Rows& rows) { return static_cast<const T*>(rows.tensor.const_data_ptr()); };
    return {.gate = data(gate),
            .value = data(value),
            .gate_stride = gate.stride,
            .value_stride = value.stride,
            .rows = gate.rows,
            .width = gate.width};
  }
};

}  // namespace fox::ops
