#pragma once

#include <tuple>

#include "ops/common.h"

/// The C++ types of fox::forgetting_decode and fox::append_gate_prefixes, and what their kernels on all devices share.
namespace fox::ops {
using ForgettingDecodeOutputs = std::tuple<at::Tensor, at::Tensor>;
using AppendGatePrefixes = void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&);
using ForgettingDecode = ForgettingDecodeOutputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                 const at::Tensor&, int64_t, const OptionalTensor&,
                                                 const OptionalTensor&, const OptionalTensor&, std::optional<double>,
                                                 std::optional<int64_t>, std::optional<double>, const OptionalTensor&);
constexpr int64_t kDecodePage = 64;  // keys

/// Throw fox::Error unless shapes, dtypes, devices and options are what the header promises.
void check_append(const at::Tensor& r, const at::Tensor& block, const at::Tensor& log_f, const at::Tensor& key_len);
void check_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& key_len,
                  int64_t max_key_len, const std::optional<at::Tensor>& r, const std::optional<at::Tensor>& block,
                  const std::optional<at::Tensor>& table, std::optional<double> tolerance,
                  const std::optional<at::Tensor>& bound);

/// o and lse, not filled.
ForgettingDecodeOutputs empty_result(const at::Tensor& q);

}  // namespace fox::ops
