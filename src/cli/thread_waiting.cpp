#include "cli/thread_waiting.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace fox::cli {

void wait_without_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
  std::error_code failed;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", failed);
  if (failed) return;
  setenv("GOMP_SPINCOUNT", "3000", /*overwrite=*/0);
  ::execv(self.c_str(), argv);  // returns only if it fails; then the threads spin
}

}  // namespace fox::cli
