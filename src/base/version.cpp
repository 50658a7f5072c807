#include "base/version.h"

namespace fox {

// Both are set by cmake/version.cmake on this file alone, so that a new commit recompiles nothing else.
std::string version() { return FOX_VERSION; }
std::string commit() { return FOX_COMMIT; }

}  // namespace fox
