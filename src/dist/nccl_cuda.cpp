// Part of the CUDA backend (cmake/cuda.cmake), which registers it when it is loaded.
#define USE_C10D_NCCL

#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "dist/backend.h"

namespace fox::dist {
namespace {

/// torch's watchdog ends the process without a word of who is at fault: Guard looks after that.
void turn_watchdog_off() { setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0); }

BackendPointer make(const StorePointer& store, int rank, int size, std::chrono::milliseconds timeout) {
  turn_watchdog_off();
  // Their kernels are few and late ones hold up every rank: ahead of the others.
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

[[maybe_unused]] const bool kRegistered = (register_nccl(&make), true);

}  // namespace
}  // namespace fox::dist
