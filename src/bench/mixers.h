#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Every sequence mixer side by side: the operators at equal width over the length of the context, in turns in one
// process, and a layer's decoding step behind contexts of several lengths.
namespace fox::bench {

struct MixersOptions {
  std::string device = "cpu";
  // What is left out depends on the device, CPU / CUDA:
  std::string dtype = {};               ///< float32 / bfloat16
  std::vector<int64_t> lengths = {};    ///< 512, 1024, 2048 / 2048, 8192, 32768, 65536
  std::vector<int64_t> positions = {};  ///< of decoding: 64, 1024 / 1024, 16384, 65536
  int64_t tokens = 0;                   ///< of a call: a batch has as many sequences as make so many; 2048 / 65536
  int64_t width = 0;                    ///< channels of the model, a multiple of 128: 256 / 1536
  int64_t repetitions = 5;              ///< turns that count; others warm up before
  int64_t threads = 0;                  ///< 0: as many as there are cores
  uint64_t seed = 0;
};

/// One line of the result.
struct MixersMeasurement {
  std::string op = {};         ///< forgetting_attn, mamba2, hgrn2, delta_net, mamba
  std::string direction = {};  ///< forward, forward_backward: the operator; decode: a whole layer, one token
  std::string dtype = {};
  int64_t B = 0, T = 0;         ///< decode: T tokens are in the cache
  int64_t width = 0;            ///< of the model
  int64_t H = 0, K = 0, V = 0;  ///< heads, channels of keys (states) and values of each; mamba: one head of V channels
  double ms = 0;                ///< median
  double ms_spread = 0;         ///< distance of the quartiles
  double tokens_per_s = 0;
  double gflops = 0;         ///< of the products of the chunked form, with gradients 3 times those; 0: none or decode
  double matmul_gflops = 0;  ///< of at::matmul on the same shapes; measured on the CPU for the recurrences
  double ratio = 0;          ///< gflops / matmul_gflops
  double peak_mib = 0;       ///< most memory during a call beside its inputs, on CUDA
  int64_t cache_bytes = 0;   ///< decode: what the layer remembers
};

/// Measures length by length, then position by position, and hands over each line when its group is done.
/// Throws fox::Error on an unknown device or dtype and on sizes that do not fit.
void bench_mixers(const MixersOptions& options, const std::function<void(const MixersMeasurement&)>& report);

/// A JSON object on one line, keys as in MixersMeasurement.
std::string to_json(const MixersMeasurement& measurement);
/// Rows of a table for people, and its head.
std::string mixers_table_head();
std::string table_row(const MixersMeasurement& measurement);

}  // namespace fox::bench
