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

/// What is measured: a call, and how many of them at a time.
struct Work {
  std::function<void()> run = {};
  int64_t calls = 1;
};

/// Milliseconds of a call of each, all measured once in the order given and indexed like `works`.
///
/// A GPU at its power limit has the clock that the last tens of milliseconds allow it, between 1.45 and 1.8 GHz on an
/// H200. So all pieces are in its queue, one right behind the other, before the host waits for any: calls of some
/// milliseconds then share a clock, and what it does from round to round drops out of ratios within a round. Two runs
/// of forgetting attention's bench at T 16K put the gate's cost 0.0 to 0.7 points apart that way (at T 64K, where a
/// call outlasts the clock, quartiles are still 4 to 10 points apart). Tried before: the host waiting for each piece,
/// 5 ms a piece, forward behind another one's backward, 0.7 to 4.5 points; untimed calls of the same contender first,
/// as triton.testing.do_bench has them, up to 10, since each then has a clock of its own. With a rest before each, as
/// FlashAttention sleeps for a second, or keeping only what ran at the highest clock, as NVBench does, it repeats
/// within 1.3 points, but at clocks that no training run has.
std::vector<double> time_round(c10::Device device, const std::vector<Work>& works, const std::vector<size_t>& order);

/// How many calls fill `turn_ms` milliseconds of a GPU, given what one takes; 1 on a CPU.
int64_t calls_a_turn(c10::Device device, double ms, double turn_ms = 5);

/// How many rounds of `round_ms` fit `seconds`; at least 5, so that quartiles mean something, and at most 100.
int64_t rounds_within(double seconds, double round_ms);

/// Calls `round` once, so that code is loaded and caches fill, and on a GPU again until its clock has settled under the
/// load (1 s). Returns the milliseconds that the last call took by the clock: what a round costs, with what it does not
/// measure.
double warm_up(c10::Device device, const std::function<void()>& round);

/// Numbers from 0 to count - 1 in an order that depends on the turn alone. A GPU at its power limit carries heat and
/// clock from one contender to the next: each should follow every other.
std::vector<size_t> order_of_turn(size_t count, int64_t turn);

/// The value below which a share q of x lies, between neighbours in proportion. x must not be empty.
double quantile(std::vector<double> x, double q);

/// What repeated measurements say: their median, and the distance of the quartiles around it. x must not be empty.
struct Summary {
  double median = 0, spread = 0;
};
Summary summarise(const std::vector<double>& x);

/// x[i] / y[i], of what was measured in the same rounds.
std::vector<double> quotients(const std::vector<double>& x, const std::vector<double>& y);

}  // namespace fox::bench
