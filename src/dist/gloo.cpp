// Gloo itself is compiled into libtorch_cpu, whose wheel leaves Gloo's headers out. Those of Debian's libgloo-dev are
// older than the code they describe: here they only let ProcessGroupGloo.hpp compile. Nothing of Gloo is constructed,
// derived from or called in this file except through functions that live in libtorch_cpu, and no other file sees them.
#define USE_C10D_GLOO

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "dist/backend.h"

namespace fox::dist {

BackendPointer make_gloo(const StorePointer& store, int rank, int size, std::chrono::milliseconds timeout) {
  const auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);  // heeds GLOO_SOCKET_IFNAME
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace fox::dist
