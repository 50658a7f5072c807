#include "infer/generate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/interrupt.h"
#include "cli/commands.h"
#include "cli/shared_options.h"
#include "infer/load_model.h"

namespace fox::cli {
namespace {

struct GenerateArguments {
  std::string dir;
  std::optional<std::string> prompt;
  infer::GenerateOptions options;
  ComputeOptions compute;
  bool json = false;
};

std::string read_prompt(const GenerateArguments& arguments) {
  if (arguments.prompt) return *arguments.prompt;
  if (isatty(STDIN_FILENO)) fmt::print(stderr, "Type the prompt; Ctrl-D ends it.\n");
  return {std::istreambuf_iterator<char>(std::cin), {}};
}

void print_json(const infer::Generation& made) {
  const nlohmann::json out = {{"text", made.text},
                              {"tokens", made.ids.size()},
                              {"finish", infer::finish_name(made.reason)},
                              {"prompt_tokens", made.prompt_tokens},
                              {"prompt_seconds", made.prompt_seconds},
                              {"seconds", made.seconds}};
  fmt::print("{}\n", out.dump());
}

void run(const GenerateArguments& arguments) {
  infer::check_options(arguments.options);
  arguments.compute.apply();
  infer::LoadedModel loaded = arguments.compute.load(arguments.dir);
  const std::string prompt = read_prompt(arguments);
  catch_interrupts();
  const auto show = [&](std::string_view text) {
    if (arguments.json) return true;
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;  // a reader that is gone (`| head`) ends the generation
  };
  const infer::Generation made = infer::generate(loaded.model, loaded.tokenizer, prompt, arguments.options, show);
  if (arguments.json) {
    print_json(made);
  } else if (!made.text.ends_with('\n')) {
    fmt::print("\n");
  }
  fmt::print(stderr, "{} tokens in {:.1f} s ({:.0f} tokens/s) after a prompt of {}; ended by: {}\n", made.ids.size(),
             made.seconds, static_cast<double>(made.ids.size()) / std::max(made.seconds, 1e-9), made.prompt_tokens,
             infer::finish_name(made.reason));
  if (interrupted()) throw CLI::RuntimeError(130);
}

}  // namespace

void register_generate(CLI::App& app) {
  auto arguments = std::make_shared<GenerateArguments>();
  infer::GenerateOptions& options = arguments->options;
  CLI::App* command = app.add_subcommand("generate", "Continue a text; prints what the model writes as it is written");
  command->add_option("DIR", arguments->dir, kModelHelp)->required();
  command->add_option("--prompt,-p", arguments->prompt, "Text to continue (default: standard input)");
  command->add_option("--max-tokens,-n", options.max_tokens, "New tokens at most")
      ->check(whole_number(0))
      ->capture_default_str();
  command
      ->add_option("--temperature,-t", options.sampling.temperature,
                   "Below 1 keeps to likely tokens, 0 always takes the most likely")
      ->capture_default_str();
  command->add_option("--top-k", options.sampling.top_k, "Draw only from the k most likely tokens; 0: from all")
      ->capture_default_str();
  command
      ->add_option("--top-p", options.sampling.top_p,
                   "Draw only from the fewest tokens whose probabilities reach this sum")
      ->capture_default_str();
  command->add_option("--seed,-s", options.sampling.seed, "The same seed gives the same text")->capture_default_str();
  command->add_option("--stop", options.stop, "End before this text; may be given several times")
      ->expected(1)
      ->take_all();
  command->add_flag("--json", arguments->json, "Print one JSON object at the end instead of streaming text");
  arguments->compute.add_to(*command);
  command->footer(
      "Example: fox generate runs/demo/fox_pro --prompt 'Gen1:1 In the beginning' --temperature 0.8 --stop $'\\n'");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
