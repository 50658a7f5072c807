#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// The memory-bound operators against a copy of as many bytes, in turns in one process; and the LM head with its loss.
namespace fox::bench {

struct ElementwiseOptions {
  std::string device = "cpu";
  std::string dtype = {};            ///< empty: float32, on CUDA bfloat16
  std::vector<int64_t> rows = {};    ///< tokens; empty: 4096, on CUDA 65536 and 16384
  std::vector<int64_t> widths = {};  ///< channels; empty: 768, on CUDA 768, 1024 and 1536
  int64_t head_dim = 64;
  bool lm_head = true;       ///< also measure the LM head, at the last of rows and widths
  int64_t vocab = 0;         ///< of the LM head; 0: 4096, on CUDA 50304
  int64_t repetitions = 10;  ///< turns of each operator; the first, which warms up, is not counted
  int64_t threads = 0;       ///< 0: as many as there are cores
  uint64_t seed = 0;
};

/// One line of the result: an operator in one direction.
struct ElementwiseMeasurement {
  std::string op = {};         ///< an operator's name; attn_input followed by its steps; by ATen: what it replaced
  std::string direction = {};  ///< forward, backward; of the LM head forward_backward
  std::string dtype = {};
  int64_t rows = 0, width = 0;
  double ms = 0;             ///< median
  double ms_spread = 0;      ///< distance of the quartiles
  double gb_per_s = 0;       ///< each input and output once
  double copy_gb_per_s = 0;  ///< of a copy of as many bytes, median of the same turns
  double ratio = 0;          ///< gb_per_s / copy_gb_per_s
  int64_t vocab = 0;         ///< of the LM head; its bandwidth is left at 0
  double extra_mib = 0;      ///< largest memory beside the inputs during the call, LM head on a GPU
};

/// Measures all operators at each number of rows and each width, and hands over the lines of each when it is done.
/// Throws fox::Error on an unknown device or dtype, or a width that is no multiple of head_dim.
void bench_elementwise(const ElementwiseOptions& options,
                       const std::function<void(const ElementwiseMeasurement&)>& report);

/// A JSON object on one line, keys as in ElementwiseMeasurement; vocab and extra_mib in those of the LM head alone, the
/// bandwidths in the others.
std::string to_json(const ElementwiseMeasurement& measurement);
/// Rows of a table for people, and its head.
std::string elementwise_table_head();
std::string elementwise_table_row(const ElementwiseMeasurement& measurement);

}  // namespace fox::bench
