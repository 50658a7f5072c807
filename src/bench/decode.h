#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Decoding against a long cache: one new query a sequence, beside torch's attention (cuDNN's on CUDA) on the same
// tensors, in the same process, taking turns. Bound by the memory's speed, so speed is bytes of kept keys and values.
namespace fox::bench {

struct DecodeOptions {
  std::string device = "cpu";
  std::string dtype = {};  ///< bfloat16 or float16, on the CPU also float32; bfloat16, on the CPU float32
  /// Keys × sequences, e.g. {65536, 8}; by default (65536, 1), (65536, 8), (16384, 32), on the CPU (1024, 2).
  std::vector<std::pair<int64_t, int64_t>> sizes = {};
  int64_t heads = 0;  ///< as many as make 1,536 channels
  int64_t head_dim = 64;
  int64_t repetitions = 15;  ///< turns of each contender that count; others warm up before
  uint64_t seed = 0;
};

/// One line of the result.
struct DecodeMeasurement {
  std::string op = {};     ///< forgetting_decode or sdpa
  std::string gates = {};  ///< off; log_spaced: decay times from 8 to 65,536 tokens over heads
  bool pruned = false;
  std::string kernel = {};  ///< cudnn, cuda (ours); on the CPU torch, cpu
  std::string dtype = {};
  int64_t B = 0, T = 0, H = 0, D = 0;
  double ms = 0;         ///< median
  double ms_spread = 0;  ///< distance of the quartiles
  double tb_per_s = 0;   ///< 10^12 bytes of kept keys and values a second
  double ratio = 0;      ///< bytes a second relative to sdpa's
  double kept = 1;       ///< share of the keys that are read
};

/// Measures size by size and hands over each line when its size is done. Throws fox::Error on an unknown device or
/// dtype.
void bench_decode(const DecodeOptions& options, const std::function<void(const DecodeMeasurement&)>& report);

/// A JSON object on one line, keys as in DecodeMeasurement.
std::string to_json(const DecodeMeasurement& measurement);
/// Rows of a table for people, and its head.
std::string decode_table_head();
std::string table_row(const DecodeMeasurement& measurement);

}  // namespace fox::bench
