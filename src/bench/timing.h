#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace fox::bench {

/// Milliseconds that each of `calls` calls of `work` keeps the device busy: by events on its current stream, which the
/// time a launch takes on the host does not enter as long as the device is the slower of the two; by the clock on a
/// CPU.
double time_ms(c10::Device device, int64_t calls, const std::function<void()>& work);

/// How many calls fill some milliseconds of a GPU, given what one takes; 1 on a CPU.
int64_t calls_a_turn(c10::Device device, double ms);

/// Calls `round` until a GPU's clock has settled under the load (1 s); once on a CPU: code is loaded and caches fill.
void warm_up(c10::Device device, const std::function<void()>& round);

/// Numbers from 0 to count - 1 in an order that depends on the turn alone. A GPU at its power limit carries heat and
/// clock from one contender to the next: each should follow every other.
std::vector<size_t> order_of_turn(size_t count, int64_t turn);

/// The value below which a share q of x lies, between neighbours in proportion. x must not be empty.
double quantile(std::vector<double> x, double q);

}  // namespace fox::bench
