#include "ops/device.h"

#include <ATen/Context.h>
#include <c10/core/AllocatorConfig.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>

#include "base/error.h"

namespace fox::ops {
namespace {

// Not linked: a laptop never needs it, and loading libtorch_cuda takes a second and half a gigabyte.
void load_cuda_backend() {
  static bool loaded = false;
  if (loaded) return;
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&load_cuda_backend), &self);
  const auto beside = std::filesystem::path(self.dli_fname).parent_path() / "libfox_cuda.so";
  if (!std::filesystem::exists(beside)) {
    throw Error("this build of fox has no CUDA backend", "build on a machine with nvcc, or use --device cpu");
  }
  // Activations of growing batches and contexts then share memory that would else be lost between segments.
  if (!std::getenv("PYTORCH_ALLOC_CONF") && !std::getenv("PYTORCH_CUDA_ALLOC_CONF")) {
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  }
  if (!dlopen(beside.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    throw Error(fmt::format("the CUDA backend does not load: {}", dlerror()),
                "install torch with its CUDA libraries (pip install torch), or use --device cpu");
  }
  loaded = true;
}

}  // namespace

at::Device open_device(const std::string& name) {
  const std::string hint = "devices are cpu, cuda, cuda:0, cuda:1, …";
  if (name == "cpu") return at::kCPU;
  const size_t colon = name.find(':');
  const std::string index = colon == std::string::npos ? "0" : name.substr(colon + 1);
  if (name.substr(0, colon) != "cuda" || index.empty() || index.size() > 3 ||
      index.find_first_not_of("0123456789") != std::string::npos) {
    throw Error(fmt::format("unknown device '{}'", name), hint);
  }
  load_cuda_backend();
  const int count = at::hasCUDA() ? static_cast<int>(at::detail::getCUDAHooks().deviceCount()) : 0;
  if (count == 0) throw Error(fmt::format("device '{}': this machine has no CUDA GPU", name), "use --device cpu");
  if (std::stoi(index) >= count) {
    throw Error(fmt::format("device '{}': this machine has {} CUDA GPU{}", name, count, count == 1 ? "" : "s"), hint);
  }
  at::globalContext().lazyInitDevice(at::kCUDA);
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(std::stoi(index)));
}

}  // namespace fox::ops
