#include "cli/shared_options.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cmath>

#include "base/writable.h"

namespace fox::cli {

CLI::Validator whole_number(int64_t least, int64_t most) {
  const auto check = [least, most](const std::string& text) -> std::string {
    int64_t value;
    if (!CLI::detail::lexical_cast(text, value)) return fmt::format("must be a whole number, not '{}'", text);
    if (value < least) return fmt::format("must be at least {}, not {}", least, value);
    if (value > most) return fmt::format("must be at most {}, not {}", most, value);
    return "";
  };
  return CLI::Validator(check, /*description=*/"");
}

CLI::Validator positive_number() {
  const auto check = [](const std::string& text) -> std::string {
    double value;
    if (CLI::detail::lexical_cast(text, value) && value > 0 && std::isfinite(value)) return "";
    return fmt::format("must be a number above 0, not '{}'", text);
  };
  return CLI::Validator(check, /*description=*/"");
}

void add_threads(CLI::App& command, int64_t& threads) {
  command.add_option("--threads", threads, "CPU threads (0: one a core)")
      ->check(whole_number(0, 4096))
      ->capture_default_str();
}

void check_out(const std::string& file) {
  if (!file.empty()) check_writable(std::filesystem::absolute(file).parent_path());
}

void ComputeOptions::add_to(CLI::App& command) {
  command.add_option("--device", device_name, "Where to compute: cpu, cuda, cuda:1")->capture_default_str();
  command.add_option("--precision", precision, "Of activations: float32, bf16 (many times faster on a GPU)")
      ->check(CLI::IsMember({"float32", "bf16"}))
      ->capture_default_str();
  add_threads(command, threads);
}

void ComputeOptions::apply() const {
  if (threads > 0) at::set_num_threads(static_cast<int>(threads));
}

}  // namespace fox::cli
