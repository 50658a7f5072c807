#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace fox::ops {

/// How a gate above 0 or NaN on a GPU becomes an error although nobody waits for the kernels: the kernel that sums the
/// gates writes the place of a bad one to a word of host memory, and the rows from that gate on give NaN. The next call
/// on the device reads the word, which costs nothing, and throws. With FOX_SYNCHRONOUS=1 in the environment each call
/// waits for its kernels and throws for its own gates.
class GateReport {
 public:
  /// Throws fox::Error if an earlier call on this device had a bad gate.
  explicit GateReport(c10::Device device);
  /// What the device's calls so far would make the next one throw, which it then no longer does; "" when all is well.
  static std::string take(c10::Device device);
  /// For the kernels: ForgettingAttnParams::bad_gate.
  uint64_t* word() const { return word_; }
  /// To be called when the kernels are enqueued.
  void finish(cudaStream_t stream) const;

 private:
  uint64_t* word_;
};

}  // namespace fox::ops
