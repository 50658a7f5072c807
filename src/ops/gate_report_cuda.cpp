#include "ops/gate_report_cuda.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "ops/cuda_common.h"

namespace fox::ops {
namespace {

/// One word a device that both sides see, 0 while all gates were good. Never freed: kernels may run until the end.
uint64_t* word_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::array<uint64_t*, 64> words{};
  const std::lock_guard lock(mutex);
  uint64_t*& word = words.at(static_cast<size_t>(device));
  if (!word) {
    check_launch("forgetting_attn", cudaHostAlloc(&word, sizeof *word, cudaHostAllocMapped | cudaHostAllocPortable));
    *word = 0;
  }
  return word;
}

/// What the word says, which is then empty.
std::string take_from(uint64_t* word, const char* call) {
  const uint64_t place = std::atomic_ref(*word).exchange(0);
  if (place == 0) return "";
  return fmt::format("forgetting_attn: log_f[{}, {}, {}] of {} is above 0 or NaN", place >> 48 & 0x7fff,
                     place & 0xffffffff, place >> 32 & 0xffff, call);
}

void refuse(uint64_t* word, const char* call) {
  const std::string report = take_from(word, call);
  if (report.empty()) return;
  throw NonFiniteError(
      report,
      "a log forget gate is at most 0: use logsigmoid of the gate's logits; FOX_SYNCHRONOUS=1 stops at the call");
}

}  // namespace

GateReport::GateReport(c10::Device device) : word_(word_of(device.index())) { refuse(word_, "an earlier call"); }

std::string GateReport::take(c10::Device device) { return take_from(word_of(device.index()), "a call"); }

void GateReport::finish(cudaStream_t stream) const {
  static const char* setting = std::getenv("FOX_SYNCHRONOUS");
  if (!setting || std::strcmp(setting, "0") == 0) return;
  check_launch("forgetting_attn", cudaStreamSynchronize(stream));
  refuse(word_, "this call");
}

}  // namespace fox::ops
