#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fox::train {

/// Numbers on their way from a device to the host: the copy is queued behind the work that makes them, and only read()
/// waits for it.
class DeviceNumbers {
 public:
  DeviceNumbers() = default;
  /// `numbers` (N,) float64 on any device.
  explicit DeviceNumbers(const at::Tensor& numbers);
  std::vector<double> read() const;

 private:
  struct Arrival;
  at::Tensor host_;
  std::shared_ptr<Arrival> arrival_;  ///< nothing when the numbers are there already
};

}  // namespace fox::train
