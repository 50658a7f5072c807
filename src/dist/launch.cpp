#include "dist/launch.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace fox::dist {
namespace {

constexpr const char* kHint = "start the ranks with torchrun --no-python …, or unset WORLD_SIZE to train alone";

const char* text_of(const char* name) {
  const char* text = std::getenv(name);
  if (!text) throw UsageError(fmt::format("WORLD_SIZE is set and {} is not", name), kHint);
  return text;
}

int number_of(const char* name, int least, int most) {
  const char* text = text_of(name);
  const char* end = text + std::strlen(text);
  int number = 0;
  const auto [stop, error] = std::from_chars(text, end, number);
  if (error != std::errc() || stop != end || number < least || number > most)
    throw UsageError(fmt::format("{} is '{}', not a number from {} to {}", name, text, least, most), kHint);
  return number;
}

}  // namespace

std::optional<Launch> read_launch() {
  if (!std::getenv("WORLD_SIZE")) return std::nullopt;
  Launch launch;
  launch.size = number_of("WORLD_SIZE", 1, 1 << 20);
  launch.rank = number_of("RANK", 0, launch.size - 1);
  launch.local_rank = number_of("LOCAL_RANK", 0, launch.size - 1);
  if (std::getenv("LOCAL_WORLD_SIZE")) launch.local_size = number_of("LOCAL_WORLD_SIZE", 1, launch.size);
  if (launch.size == 1) return launch;
  launch.address = text_of("MASTER_ADDR");
  launch.port = static_cast<uint16_t>(number_of("MASTER_PORT", 1, 65535));
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  launch.hosts_store = launch.rank == 0 && !(agent && std::strcmp(agent, "True") == 0);
  if (const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT")) launch.attempt = restarts;
  return launch;
}

}  // namespace fox::dist
