#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fox::dist {

/// A process's place among those that were started together, and where they meet.
struct Launch {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  ///< among those on this machine, which share its cores and have a GPU each
  std::string address;                 ///< of the store by which ranks find each other
  uint16_t port = 0;
  bool hosts_store = false;  ///< this rank is to open the store at `port`; else somebody has or does
  /// Which start this is: when everybody is started again, what the last ones left in the store is not taken for ours.
  std::string attempt = "0";
};

/// What torchrun says in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (else 1), MASTER_ADDR, MASTER_PORT,
/// TORCHELASTIC_USE_AGENT_STORE (else rank 0 opens the store) and TORCHELASTIC_RESTART_COUNT (else 0); nothing when
/// WORLD_SIZE is not set. Throws UsageError when one of them is missing or no number that fits.
std::optional<Launch> read_launch();

}  // namespace fox::dist
