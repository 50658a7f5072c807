// Part of the CUDA backend (cmake/cuda.cmake), which registers it when it is loaded.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "ops/cuda_common.h"
#include "ops/device_graph.h"
#include "ops/gate_report_cuda.h"

namespace fox::ops {
namespace {

class CudaGraph : public DeviceGraph {
 public:
  explicit CudaGraph(at::Device device)
      : device_(device), stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  void run(const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard device(device_);
    const auto outer = c10::cuda::getCurrentCUDAStream();
    pass(outer, stream_);
    {
      const c10::cuda::CUDAStreamGuard stream(stream_);
      work();
    }
    pass(stream_, outer);
  }

  void record(const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard device(device_);
    check_launch("recording a step", cudaDeviceSynchronize());
    c10::cuda::CUDACachingAllocator::emptyCache();
    take_report();  // of what is done: `work` would throw it
    const c10::cuda::CUDAStreamGuard stream(stream_);
    // Relaxed: other threads (of batches, of checkpoints, autograd's) may allocate while this one records.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeRelaxed);
    try {
      work();
    } catch (...) {
      try {
        graph_.capture_end();
      } catch (const c10::Error&) {  // of what work() has left; its own error says more
      }
      throw;
    }
    graph_.capture_end();
    recorded_ = true;
  }
  bool recorded() const override { return recorded_; }

  void replay() override {
    run([this] { graph_.replay(); });
  }

  std::string take_report() override { return GateReport::take(device_); }

 private:
  /// `second` goes on when `first` has done what it has.
  static void pass(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& second) {
    at::cuda::CUDAEvent event;
    event.record(first);
    event.block(second);
  }

  at::Device device_;
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAGraph graph_;
  bool recorded_ = false;
};

std::unique_ptr<DeviceGraph> make_graph(at::Device device) {
  return device.is_cuda() ? std::make_unique<CudaGraph>(device) : nullptr;
}

[[maybe_unused]] const bool kRegistered = (register_device_graph(make_graph), true);

}  // namespace
}  // namespace fox::ops
