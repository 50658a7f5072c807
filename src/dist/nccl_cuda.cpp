// Part of the CUDA backend (cmake/cuda.cmake), which registers it when it is loaded.
#define USE_C10D_NCCL

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "dist/backend.h"

namespace fox::dist {
namespace {

/// NCCL's own watchdog ends the process without a word of who is at fault, so it comes after whoever waits here.
constexpr std::chrono::seconds kWatchdogDelay{60};

BackendPointer make(const StorePointer& store, int rank, int size, std::chrono::milliseconds timeout) {
  // Their kernels are few and late ones hold up every rank: ahead of the others.
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = timeout + kWatchdogDelay;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

[[maybe_unused]] const bool kRegistered = (register_nccl(&make), true);

}  // namespace
}  // namespace fox::dist
