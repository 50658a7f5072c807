#pragma once

#include <filesystem>

namespace fox {

/// Throws Error when no file can be made in the folder `dir`: there is none, or it may not be written.
void check_writable(const std::filesystem::path& dir);

}  // namespace fox
