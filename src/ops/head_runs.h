#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fox::ops {

/// Some heads of a tensor, known to the host: neighbours are taken together, as a view where there is no other, and no
/// index travels to the device.
class HeadRuns {
 public:
  /// `heads` ascending; each stands for `group` heads of the tensors (the query heads of a key head).
  explicit HeadRuns(const std::vector<int64_t>& heads, int64_t group = 1);

  /// These heads of `tensor`, whose dimension `dim` is the heads: a view or a copy.
  at::Tensor of(const at::Tensor& tensor, int64_t dim) const;
  /// Makes those of `tensor` equal to `values`, or adds them.
  void put(const at::Tensor& tensor, int64_t dim, const at::Tensor& values) const;
  void add(const at::Tensor& tensor, int64_t dim, const at::Tensor& values) const;

 private:
  struct Run {
    int64_t first, count;
  };
  template <typename F>
  void each(const at::Tensor& tensor, int64_t dim, const at::Tensor& values, const F& f) const;
  std::vector<Run> runs_;
};

}  // namespace fox::ops
