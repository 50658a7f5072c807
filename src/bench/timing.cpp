#include "bench/timing.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

namespace fox::bench {

double time_ms(c10::Device device, int64_t calls, const std::function<void()>& work) {
  if (device.is_cpu()) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) work();
    const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - start;
    return passed.count() / static_cast<double>(calls);
  }
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT), end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  for (int64_t i = 0; i < calls; ++i) work();
  end.record(stream);
  end.synchronize();
  return begin.elapsedTime(end) / static_cast<double>(calls);
}

int64_t calls_a_turn(c10::Device device, double ms) {
  constexpr double kTurnMs = 5;
  constexpr int64_t kMost = 100;
  return device.is_cpu() ? 1 : std::clamp<int64_t>(std::llround(kTurnMs / std::max(ms, 1e-3)), 1, kMost);
}

void warm_up(c10::Device device, const std::function<void()>& round) {
  const auto start = std::chrono::steady_clock::now();
  do {
    round();
  } while (!device.is_cpu() && std::chrono::steady_clock::now() - start < std::chrono::seconds(1));
}

std::vector<size_t> order_of_turn(size_t count, int64_t turn) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 generator(static_cast<uint32_t>(turn));
  std::shuffle(order.begin(), order.end(), generator);
  return order;
}

double quantile(std::vector<double> x, double q) {
  std::sort(x.begin(), x.end());
  const double at = q * static_cast<double>(x.size() - 1);
  const auto low = static_cast<size_t>(at), high = std::min(low + 1, x.size() - 1);
  return x[low] + (at - static_cast<double>(low)) * (x[high] - x[low]);
}

}  // namespace fox::bench
