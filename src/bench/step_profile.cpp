#include "bench/step_profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

namespace fox::bench {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

/// libkineto's own numbers of what an event is.
enum Activity : uint8_t { kCpuOperator = 0, kCopy = 3, kMemset = 4, kKernel = 5 };

using Event = profiler::KinetoEvent;

/// Time of each event without the events inside it. All of one thread, where they nest.
std::map<std::string, double> own_times(std::vector<const Event*> events) {
  std::sort(events.begin(), events.end(), [](const Event* a, const Event* b) {
    return a->startNs() != b->startNs() ? a->startNs() < b->startNs() : a->endNs() > b->endNs();
  });
  std::map<std::string, double> times;
  std::vector<const Event*> open;
  for (const Event* event : events) {
    while (!open.empty() && open.back()->endNs() <= event->startNs()) open.pop_back();
    const double ns = static_cast<double>(event->durationNs());
    if (!open.empty()) times[open.back()->name()] -= ns;
    times[event->name()] += ns;
    open.push_back(event);
  }
  return times;
}

std::map<std::string, double> cpu_times(const std::vector<Event>& events) {
  std::map<uint64_t, std::vector<const Event*>> by_thread;
  for (const auto& event : events) {
    if (event.activityType() == kCpuOperator) by_thread[event.startThreadId()].push_back(&event);
  }
  std::map<std::string, double> times;
  for (auto& [thread, own] : by_thread) {
    for (const auto& [name, ns] : own_times(std::move(own))) times[name] += ns;
  }
  return times;
}

std::map<std::string, double> gpu_times(const std::vector<Event>& events) {
  std::map<std::string, double> times;
  for (const auto& event : events) {
    const auto activity = event.activityType();
    if (activity == kKernel || activity == kCopy || activity == kMemset) {
      times[event.name()] += static_cast<double>(event.durationNs());
    }
  }
  return times;
}

}  // namespace

// Kernels of cuBLAS are called nvjet_… or …gemm…; ours by their source; ATen's multi-tensor kernels serve the optimizer
// and the gradient norm only.
std::string part_of(const std::string& name) {
  static const std::vector<std::pair<const char*, std::vector<const char*>>> kParts{
      {"communication", {"nccl", "c10d::"}},
      {"optimizer", {"multi_tensor_apply", "lpnorm_cleanup", "_fused_adamw_", "_foreach_", "linalg_vector_norm"}},
      {"attention",
       {"forgetting_attn", "preprocess_kernel", "postprocess_kernel", "gate_gradient_kernel", "gate_blocks_kernel",
        "prefix_kernel", "head_order_kernel", "flash", "sdpa"}},
      {"recurrence",
       {"::states_kernel", "::output_kernel", "::scan_kernel", "::backward_kernel", "::prepare_kernel",
        "::dwritten_kernel", "::link_kernel", "::summary_", "mamba2_scan", "mamba_scan", "hgrn2_scan",
        "delta_net_scan"}},
      {"matmul",
       {"gemm", "nvjet", "cutlass", "splitK", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "aten::linear"}},
      {"data", {"Memcpy HtoD"}},
  };
  for (const auto& [part, words] : kParts) {
    for (const char* word : words) {
      if (name.find(word) != std::string::npos) return part;
    }
  }
  return "elementwise";
}

StepProfile profile_steps(c10::Device device, int64_t steps, const std::function<void()>& work,
                          const std::string& trace) {
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  std::set<ActivityType> activities{device.is_cpu() ? ActivityType::CPU : ActivityType::CUDA};
  if (!trace.empty()) activities.insert(ActivityType::CPU);
  ::setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);  // else libkineto complains of a machine without a GPU
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  work();
  const auto result = profiler::disableProfiler();
  StepProfile profile;
  for (const char* part : {"attention", "recurrence", "matmul", "elementwise", "optimizer", "communication", "data"}) {
    profile.parts[part] = 0;
  }
  for (const auto& [name, ns] : device.is_cpu() ? cpu_times(result->events()) : gpu_times(result->events())) {
    const double ms = ns / 1e6 / static_cast<double>(steps);
    profile.kernels[name] += ms;
    profile.parts[part_of(name)] += ms;
  }
  if (!trace.empty()) result->save(trace);
  return profile;
}

}  // namespace fox::bench
