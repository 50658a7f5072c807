#pragma once

#include <c10/core/Device.h>

#include <string>

namespace fox::ops {

/// "cpu", "cuda" or "cuda:1" as a device that is there and ready. The first CUDA device loads the CUDA backend
/// (libfox_cuda.so, beside libfox.so): call this before anything else touches torch's generators or devices.
/// Throws fox::Error when the name is unknown, this build has no CUDA backend, or the machine has no such device.
at::Device open_device(const std::string& name);

}  // namespace fox::ops
