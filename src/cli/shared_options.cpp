#include "cli/shared_options.h"

#include <ATen/Parallel.h>

namespace fox::cli {

void ComputeOptions::add_to(CLI::App& command) {
  command.add_option("--device", device_name, "Where to compute: cpu, cuda, cuda:1")->capture_default_str();
  command.add_option("--precision", precision, "Of activations: float32, bf16 (many times faster on a GPU)")
      ->check(CLI::IsMember({"float32", "bf16"}))
      ->capture_default_str();
  command.add_option("--threads", threads, "CPU threads (default: all cores)")->check(CLI::PositiveNumber);
}

void ComputeOptions::apply() const {
  if (threads > 0) at::set_num_threads(static_cast<int>(threads));
}

}  // namespace fox::cli
