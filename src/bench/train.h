#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "dist/launch.h"

// Whole training steps of a published model: how fast, and where the time goes.
namespace fox::bench {

struct TrainOptions {
  std::string model = "fox_pro";  ///< published_models(), or a size, which means FoX (Pro) of that size
  std::string size = "125m";      ///< published_sizes()
  int64_t length = 16384;
  int64_t batch = 1;            ///< sequences a micro-batch
  int64_t micro_batches = 1;    ///< a step
  std::string gates = "dense";  ///< dense: as published; log_spaced: decay times from 8 to 65,536 tokens over heads
  bool prune = false;           ///< adaptive pruning, tolerance e^-10
  std::string activation_checkpointing = "none";  ///< none, mlp, full
  std::string device = "cpu";
  std::string precision = "bf16";   ///< float32, bf16, float64
  int64_t sequence_ranks = 1;       ///< so many ranks hold their sequences together
  std::string cuda_graph = "auto";  ///< on, off: whether one GPU repeats the step as a CUDA graph
  int64_t steps = 10;               ///< that are timed
  int64_t warm_up = 3;              ///< steps before them; with a CUDA graph at least 3
  int64_t threads = 0;              ///< 0: as many as there are cores
  uint64_t seed = 0;
  dist::Launch launch = {};  ///< this process's place among those that measure together, each with batches of its own
  std::string trace = "";    ///< file for a trace of the profiled steps (chrome://tracing), or none
};

struct TrainMeasurement {
  std::string model = {}, size = {};
  std::string gates = {};  ///< dense or pruned
  bool log_spaced = false;
  int64_t T = 0, B = 0, micro_batches = 1, ranks = 1, sequence_ranks = 1;
  std::string precision = {}, device = {}, activation_checkpointing = {};
  bool cuda_graph = false;  ///< whether steps were repeated as a CUDA graph
  double tokens_per_s = 0;  ///< of all ranks together
  double ms = 0;            ///< of a step, median
  double ms_spread = 0;     ///< distance of the quartiles
  double mfu = 0;  ///< share of 989 TFLOP/s a GPU (dense bf16 of H100 and H200 SXM); as Table 6 counts; 0 on a CPU
  /// Milliseconds of a step on this rank: attention, recurrence (of Mamba-2, HGRN2, DeltaNet, Mamba), matmul,
  /// elementwise (short convolutions too), optimizer, communication, data, idle. On a GPU by kernel, idle being what
  /// the step takes beyond them (those of NCCL run beside others, so that communication may take no time of its own);
  /// on a CPU by operator, communication being what it waits for.
  std::map<std::string, double> parts = {};
  std::map<std::string, double> kernels = {};  ///< the same by kernel or operator; not in the JSON
  double peak_gib = 0;  ///< most memory that was allocated (GPU), most that the process held (CPU)
};

/// Times steps of train::Trainer on random tokens that come as in training, through the same prefetching, then profiles
/// some. Several ranks (x.launch) each call this and get the same speed. Throws fox::Error on names it does not know
/// and sizes that are not supported.
TrainMeasurement bench_train(const TrainOptions& options);

/// A JSON object on one line, keys as in TrainMeasurement.
std::string to_json(const TrainMeasurement& measurement);
/// Some lines for a reader.
std::string describe(const TrainMeasurement& measurement);

}  // namespace fox::bench
