#include "bench/timing.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace fox::bench {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// Events of a device around some calls on its current stream.
struct TimedCalls {
  c10::Event begin, end;
  int64_t calls;

  TimedCalls(c10::Device device, int64_t count, const std::function<void()>& work)
      : begin(device.type(), c10::EventFlag::BACKEND_DEFAULT),
        end(device.type(), c10::EventFlag::BACKEND_DEFAULT),
        calls(count) {
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    begin.record(stream);
    for (int64_t i = 0; i < calls; ++i) work();
    end.record(stream);
  }

  /// Waits for them.
  double ms() {
    end.synchronize();
    return begin.elapsedTime(end) / static_cast<double>(calls);
  }
};

}  // namespace

double time_ms(c10::Device device, int64_t calls, const std::function<void()>& work) {
  if (!device.is_cpu()) return TimedCalls(device, calls, work).ms();
  const auto start = Clock::now();
  for (int64_t i = 0; i < calls; ++i) work();
  return ms_since(start) / static_cast<double>(calls);
}

std::vector<double> time_round(c10::Device device, const std::vector<Work>& works, const std::vector<size_t>& order) {
  std::vector<double> ms(works.size());
  if (device.is_cpu()) {
    for (const size_t i : order) ms[i] = time_ms(device, works[i].calls, works[i].run);
    return ms;
  }
  works[order.back()].run();  // while it runs the host gets ahead: an idle device would wait for the first launch
  std::vector<TimedCalls> timed;
  timed.reserve(order.size());
  for (const size_t i : order) timed.emplace_back(device, works[i].calls, works[i].run);
  for (size_t place = 0; place < order.size(); ++place) ms[order[place]] = timed[place].ms();
  return ms;
}

int64_t calls_a_turn(c10::Device device, double ms, double turn_ms) {
  constexpr int64_t kMost = 100;
  return device.is_cpu() ? 1 : std::clamp<int64_t>(std::llround(turn_ms / std::max(ms, 1e-3)), 1, kMost);
}

int64_t rounds_within(double seconds, double round_ms) {
  constexpr double kFewest = 5, kMost = 100;
  return static_cast<int64_t>(std::clamp(1e3 * seconds / std::max(round_ms, 1e-3), kFewest, kMost));
}

double warm_up(c10::Device device, const std::function<void()>& round) {
  constexpr double kSettledMs = 1000;
  auto last = Clock::now();
  round();  // its time is that of loading and compiling
  if (device.is_cpu()) return ms_since(last);
  const auto start = Clock::now();
  do {
    last = Clock::now();
    round();
  } while (ms_since(start) < kSettledMs);
  return ms_since(last);
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

Summary summarise(const std::vector<double>& x) { return {quantile(x, 0.5), quantile(x, 0.75) - quantile(x, 0.25)}; }

std::vector<double> quotients(const std::vector<double>& x, const std::vector<double>& y) {
  std::vector<double> result(x.size());
  std::transform(x.begin(), x.end(), y.begin(), result.begin(), std::divides<>());
  return result;
}

}  // namespace fox::bench
