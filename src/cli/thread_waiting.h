#pragma once

namespace fox::cli {

/// Makes threads that wait for each other sleep after ten microseconds instead of spinning for milliseconds, unless
/// OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise. Starts the program anew, since libgomp has read its settings by
/// the time any code of ours runs: call it first in main, for commands that run long enough not to mind.
///
/// libgomp's default is right for a machine that runs nothing else. Where another program wants the same cores, whoever
/// spins keeps off the thread that all wait for: on two cores beside eight busy programs, training fell from 35 to 0.6
/// to 3 thousand tokens/s, and keeps 3.4 to 4.6 thousand with this. On an idle machine no cost could be measured.
void wait_without_spinning(char** argv);

}  // namespace fox::cli
