#pragma once

namespace fox {

/// From now on Ctrl-C (SIGINT) and SIGTERM only raise a flag; a second one ends the process at once.
void catch_interrupts();
/// True once one arrived.
bool interrupted();

}  // namespace fox
