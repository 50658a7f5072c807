#pragma once

namespace fox {

/// Keeps memory that is freed for the next allocation instead of returning it to the system. A training step frees and
/// allocates the same buffers again and again; without this each of them costs page faults anew (1,500 a step of the
/// demo's model, a tenth of its time). The process then holds its largest use until it ends. Does nothing where the C
/// library is not glibc.
void keep_freed_memory();

}  // namespace fox
