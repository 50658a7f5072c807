#include "train/device_numbers.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <c10/core/Event.h>

namespace fox::train {

struct DeviceNumbers::Arrival {
  explicit Arrival(at::Device device) : event(device.type()) {
    event.record(at::accelerator::getCurrentStream(device.index()));
  }
  c10::Event event;
};

DeviceNumbers::DeviceNumbers(const at::Tensor& numbers) {
  if (numbers.is_cpu()) {
    host_ = numbers;
    return;
  }
  host_ = at::empty(numbers.sizes(), at::TensorOptions(at::kDouble).pinned_memory(true));
  host_.copy_(numbers, /*non_blocking=*/true);
  arrival_ = std::make_shared<Arrival>(numbers.device());
}

std::vector<double> DeviceNumbers::read() const {
  if (arrival_) arrival_->event.synchronize();
  const double* data = host_.const_data_ptr<double>();
  return {data, data + host_.numel()};
}

}  // namespace fox::train
