#pragma once

#include <string>

namespace fox {

/// "0.1.0".
std::string version();
/// The commit this was built from, "-dirty" appended when the tree was changed, or "unknown".
std::string commit();

}  // namespace fox
