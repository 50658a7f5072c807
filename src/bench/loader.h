#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fox::bench {

struct LoaderOptions {
  std::string dir;  ///< a token store, or an array of LongCrawl64; "": both are made, of random tokens
  int64_t context = 16384;
  int64_t batch_tokens = 524288;
  int64_t threads = 2;        ///< that make batches at the same time
  int64_t repetitions = 5;    ///< times the data is read that count; the first one, which warms the files, does not
  int64_t tokens = 64 << 20;  ///< that one repetition reads
};

struct LoaderMeasurement {
  std::string format;  ///< "longcrawl64" or "store"
  int64_t context = 0, batch_tokens = 0, threads = 0, tokens = 0;
  double seconds = 0;  ///< median
  double tokens_per_s() const { return static_cast<double>(tokens) / seconds; }
};

/// How fast training data becomes batches: chunks are read from files that the system has in memory, decompressed, and
/// made into int64 inputs and labels. Nothing else runs.
void bench_loader(const LoaderOptions& options, const std::function<void(const LoaderMeasurement&)>& on_line);

std::string to_json(const LoaderMeasurement& line);

}  // namespace fox::bench
