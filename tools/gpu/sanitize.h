#pragma once

// What the programs for compute-sanitizer share: device memory, filled with the same random numbers in every run, and
// which cases the arguments ask for.

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace sanitize {

inline void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(2);
}
inline std::mt19937 generator(1);  // NOLINT: the same numbers in every run

/// Device memory of one run.
template <typename T>
struct Device {
  T* data = nullptr;
  size_t count;
  explicit Device(size_t n) : count(n) { must(cudaMalloc(&data, n * sizeof(T))); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(data); }
  void put(const std::vector<T>& host) {
    must(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    std::vector<T> host(count);
    must(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  void random(float scale) {
    constexpr size_t kPeriod = 65521;  // the host's time is that of drawing them
    std::normal_distribution<float> normal(0.f, scale);
    std::vector<T> host(count);
    for (size_t i = 0; i < count; ++i) host[i] = i < kPeriod ? T(normal(generator)) : host[i - kPeriod];
    put(host);
  }
  void gates() {
    std::normal_distribution<float> normal(2.f, 1.f);
    std::vector<T> host(count);
    for (auto& x : host) x = -std::log1p(std::exp(-normal(generator)));
    put(host);
  }
  bool finite() const {
    for (const auto& x : get())
      if (!std::isfinite(float(x))) return false;
    return true;
  }
};

/// Whether the arguments ask for `what`: they do for what they name, and for all of a kind of which they name nothing.
template <typename KindOf>
bool is_wanted(int argc, char** argv, const std::string& what, const KindOf& kind_of) {
  bool is_named = false;
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == what) return true;
    is_named |= kind_of(argv[i]) == kind_of(what);
  }
  return !is_named;
}

}  // namespace sanitize
