#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace fox::bench {

/// Where the time of a training step goes.
struct StepProfile {
  std::map<std::string, double>
      parts;  ///< milliseconds: attention, matmul, elementwise, optimizer, communication, data
  std::map<std::string, double> kernels;  ///< the same by name of kernel (GPU) or operator (CPU)
};

/// Runs `work`, which is `steps` steps and ends with nothing pending on the device, under torch's own profiler
/// (libkineto). A GPU's time is that of its kernels and copies, a CPU's that of each operator without those that it
/// calls. `trace`: where to write all events for chrome://tracing, or "".
StepProfile profile_steps(c10::Device device, int64_t steps, const std::function<void()>& work,
                          const std::string& trace);

/// The part that a kernel or operator of this name belongs to.
std::string part_of(const std::string& name);

}  // namespace fox::bench
