#pragma once

#include <CLI/CLI.hpp>

namespace fox::cli {

// One function a subcommand, each in the file of its name: adds the subcommand, its options and its callback.
void register_train(CLI::App& app);
void register_eval(CLI::App& app);
void register_generate(CLI::App& app);
void register_gates(CLI::App& app);
void register_inspect(CLI::App& app);
void register_tokenize(CLI::App& app);
void register_report(CLI::App& app);
void register_bench(CLI::App& app);
void register_bench_elementwise(CLI::App& bench);  // a subcommand of bench, as those below
void register_bench_train(CLI::App& bench);
void register_bench_mixers(CLI::App& bench);
void register_bench_loader(CLI::App& bench);

}  // namespace fox::cli
