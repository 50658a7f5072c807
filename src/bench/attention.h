#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

// Forgetting attention against torch's own operators: the same tensors, the same process, in rounds in which each has
// one turn, forward rounds first, then backward ones. What is compared is compared within a round. On a CUDA device
// those are cuDNN's and the flash kernel of scaled_dot_product_attention, on the CPU its kernel without bias and with
// the gates as a float mask. q and k are RMS-normalised per head, and our operator is told the bound of the logits
// which follows from that, as a model with QK-norm tells it.
namespace fox::bench {

struct AttentionOptions {
  std::string device = "cpu";
  // What is left out depends on the device, CPU / CUDA:
  std::string dtype = {};             ///< float32, float64, bfloat16 or float16; float32 / bfloat16
  std::vector<int64_t> lengths = {};  ///< 1024, 2048, 4096 / 4096, 16384, 65536
  int64_t batch = 0;                  ///< 1 / as many as make 32,768 tokens, at least 1
  int64_t heads = 0;                  ///< 4 / as many as make 1,536 channels
  int64_t head_dim = 64;
  bool prune = true;        ///< also measure adaptive pruning (log-spaced gates, tolerance e^-10)
  double seconds = 10;      ///< measure each length for so long, but 5 rounds at least and 100 at most
  int64_t repetitions = 0;  ///< so many rounds instead; 0: as `seconds` says. Others warm up before
  int64_t threads = 0;      ///< 0: as many as there are cores
  uint64_t seed = 0;
};

/// One line of the result.
struct AttentionMeasurement {
  static constexpr double kNotMeasured = std::numeric_limits<double>::quiet_NaN();  ///< null in JSON

  std::string op = {};         ///< forgetting_attn, sdpa (causal, no bias) or sdpa_float_mask (the gates as a mask)
  std::string direction = {};  ///< forward, backward, forward_backward
  std::string gates = {};  ///< off; on: logsigmoid(N(4, 1)); log_spaced: decay times from 8 to 65,536 tokens over heads
  bool pruned = false;
  std::string kernel =
      {};  ///< what ran: the instruction set on the CPU; cudnn, flash, cuda (ours), torch (its own choice)
  std::string dtype = {};
  int64_t B = 0, T = 0, H = 0, D = 0;
  int64_t rounds = 0;    ///< over which all medians and spreads are
  double ms = 0;         ///< median
  double ms_spread = 0;  ///< distance of the quartiles, as are the other spreads
  double tflops = 0;     ///< of dense causal attention: 2 B H T² D forward, 2.5 times that backward
  double ratio = 0;  ///< speed relative to sdpa (on CUDA cuDNN's) in the same direction and round; above 1 is faster
  double ratio_spread = 0;
  double gate_cost = kNotMeasured;  ///< per cent of time above gates off in the same round; dense calls with gates
  double gate_cost_spread = kNotMeasured;
  double kept = 1;  ///< share of causal 64×64 blocks computed
};

/// Measures everything length by length and hands over each line when its length is done.
/// Throws fox::Error on an unknown device or dtype, or when a size is not supported.
void bench_attention(const AttentionOptions& options, const std::function<void(const AttentionMeasurement&)>& report);

/// A JSON object on one line, keys as in AttentionMeasurement.
std::string to_json(const AttentionMeasurement& measurement);
/// Rows of a table for people, and its head.
std::string table_head();
std::string table_row(const AttentionMeasurement& measurement);

}  // namespace fox::bench
