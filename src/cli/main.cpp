#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "base/nearest.h"
#include "base/version.h"
#include "cli/commands.h"
#include "cli/thread_waiting.h"

namespace fox::cli {
namespace {

int report(const std::string& what, const std::string& hint, int code) {
  fmt::print(stderr, "error: {}\n", what);
  // An error that no user was expected to meet carries no hint.
  fmt::print(stderr, "hint: {}\n", hint.empty() ? "this is a fault of fox itself: please report it" : hint);
  return code;
}

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(sub->get_name());
  return names;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// The subcommand that the words of the command line lead to, and the first word that names none where one is needed.
struct Command {
  const CLI::App* app;
  std::string path;
  std::string unknown;
};

Command find_command(const CLI::App& root, const std::vector<std::string>& words) {
  Command found{&root, root.get_name(), ""};
  for (const auto& word : words) {
    const auto subs = subcommand_names(*found.app);
    if (subs.empty() || word.starts_with("-")) break;
    if (std::find(subs.begin(), subs.end(), word) == subs.end()) {
      found.unknown = word;
      break;
    }
    found.app = found.app->get_subcommand(word);
    found.path += " " + word;
  }
  return found;
}

int report_usage(const CLI::App& root, const std::vector<std::string>& words, const CLI::ParseError& error) {
  const Command command = find_command(root, words);
  const std::string see_help = fmt::format("'{} --help' explains its options", command.path);
  if (!command.unknown.empty()) {
    return report(fmt::format("'{}' is not a command of '{}'", command.unknown, command.path),
                  suggest(command.unknown, subcommand_names(*command.app)), 2);
  }
  const auto known = option_names(*command.app);
  for (const auto& word : words) {
    if (!word.starts_with("--")) continue;
    const std::string name = word.substr(0, word.find('='));
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string match = nearest(name, known);
    return report(fmt::format("{}: unknown option '{}'", command.path, name),
                  match.empty() ? see_help : fmt::format("did you mean '{}'?", match), 2);
  }
  return report(fmt::format("{}: {}", command.path, error.what()), see_help, 2);
}

int run(int argc, char** argv) {
  CLI::App app{"fox: train, measure, explain and run Forgetting Transformers (arXiv 2503.02130)", "fox"};
  app.set_version_flag("--version", fmt::format("fox {} ({})", version(), commit()), "Print version and commit");
  app.set_help_flag("--help,-h", "Print this help");
  app.require_subcommand(1);
  app.footer("'fox COMMAND --help' explains a command and shows an example.");
  register_train(app);
  register_eval(app);
  register_generate(app);
  register_gates(app);
  register_inspect(app);
  register_tokenize(app);
  register_report(app);
  register_bench(app);

  std::vector<std::string> words(argv + 1, argv + argc);
  // `fox help [COMMAND]` is what many type first; it is the same as `fox [COMMAND] --help`.
  if (!words.empty() && words.front() == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  if (words.empty()) words.emplace_back("--help");
  std::vector<std::string> reversed(words.rbegin(), words.rend());  // CLI11 takes them last word first
  try {
    app.parse(reversed);
    return 0;
  } catch (const CLI::Success& request) {
    return app.exit(request);
  } catch (const CLI::RuntimeError& ended) {  // a command that ends with an exit code of its own (it is a ParseError)
    return ended.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return report_usage(app, words, error);
  }
}

}  // namespace
}  // namespace fox::cli

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "train" || command == "eval") fox::cli::wait_without_spinning(argv);
  fox::keep_freed_memory();
  try {
    return fox::cli::run(argc, argv);
  } catch (const fox::Error& error) {
    return fox::cli::report(error.what(), error.hint(), error.exit_code());
  } catch (const c10::Error& error) {
    return fox::cli::report(error.what_without_backtrace(), "", 1);
  } catch (const std::bad_alloc&) {
    return fox::cli::report("out of memory", "use a smaller batch or context, or a machine with more memory", 1);
  } catch (const std::exception& error) {
    return fox::cli::report(error.what(), "", 1);
  }
}
