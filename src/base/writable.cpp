#include "base/writable.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/error.h"

namespace fox {

void check_writable(const std::filesystem::path& dir) {
  if (!std::filesystem::is_directory(dir)) {
    throw Error(fmt::format("there is no folder {} to write in", dir.string()), "make it, or name another");
  }
  if (::access(dir.c_str(), W_OK | X_OK) == 0) return;
  throw Error(fmt::format("cannot write in {}: {}", dir.string(), std::generic_category().message(errno)),
              "name a folder that may be written");
}

}  // namespace fox
