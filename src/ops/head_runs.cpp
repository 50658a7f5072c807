#include "ops/head_runs.h"

#include <ATen/Functions.h>

namespace fox::ops {

HeadRuns::HeadRuns(const std::vector<int64_t>& heads, int64_t group) {
  for (const int64_t head : heads) {
    const bool next = !runs_.empty() && runs_.back().first + runs_.back().count == head * group;
    if (!next) runs_.push_back({head * group, 0});
    runs_.back().count += group;
  }
}

at::Tensor HeadRuns::of(const at::Tensor& tensor, int64_t dim) const {
  if (runs_.size() == 1) return tensor.narrow(dim, runs_[0].first, runs_[0].count);
  std::vector<at::Tensor> parts;
  for (const auto& [first, count] : runs_) parts.push_back(tensor.narrow(dim, first, count));
  return at::cat(parts, dim);
}

template <typename F>
void HeadRuns::each(const at::Tensor& tensor, int64_t dim, const at::Tensor& values, const F& f) const {
  int64_t done = 0;
  for (const auto& [first, count] : runs_) {
    f(tensor.narrow(dim, first, count), values.narrow(dim, done, count));
    done += count;
  }
}

void HeadRuns::put(const at::Tensor& tensor, int64_t dim, const at::Tensor& values) const {
  each(tensor, dim, values, [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
}

void HeadRuns::add(const at::Tensor& tensor, int64_t dim, const at::Tensor& values) const {
  each(tensor, dim, values, [](const at::Tensor& to, const at::Tensor& from) { to.add_(from); });
}

}  // namespace fox::ops
