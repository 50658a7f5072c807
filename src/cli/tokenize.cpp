#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/shared_options.h"
#include "data/token_store.h"
#include "train/corpora.h"

namespace fox::cli {
namespace {

struct TokenizeArguments {
  std::vector<std::string> sources;
  DataConfig data;
  std::string out;
  int64_t threads = 0;
  bool force = false;
};

void run(const TokenizeArguments& arguments) {
  catch_interrupts();
  const data::Tokenizer tokenizer = train::make_tokenizer(arguments.data);
  data::BuildOptions options{.threads = arguments.threads, .replace = arguments.force};
  const char* done = "built";
  options.on_found = [&] { done = "found, made of this text already"; };
  options.on_resume = [] { fmt::print(stderr, "going on where an earlier run stopped\n"); };
  const auto store =
      data::build_token_store({arguments.sources.begin(), arguments.sources.end()}, tokenizer, arguments.out, options);
  const auto count = [](int64_t n, const char* of) {
    return fmt::format("{} {}{}", human_count(static_cast<double>(n)), of, n == 1 ? "" : "s");
  };
  fmt::print(stderr, "{} {}: {}, {} (in a run file: train = [\"{}\"], tokenizer = \"{}\")\n", arguments.out, done,
             count(store.num_documents(), "document"), count(store.num_tokens(), "token"), arguments.out,
             arguments.data.tokenizer);
}

}  // namespace

void register_tokenize(CLI::App& app) {
  auto arguments = std::make_shared<TokenizeArguments>();
  CLI::App* command = app.add_subcommand("tokenize", "Turn text into a token store that 'fox train' reads");
  command
      ->add_option(
          "SOURCES", arguments->sources,
          "Files, or folders that are searched: *.txt (a document each), *.jsonl and *.jsonl.zst (a document a "
          "line, its \"text\")")
      ->required();
  command->add_option("--out", arguments->out, "Folder of the token store")->required();
  command->add_flag("--force", arguments->force, "Replace a store of other text or of another tokenizer");
  command
      ->add_option("--tokenizer", arguments->data.tokenizer,
                   "gpt2, gpt2-json (LongCrawl64's: of text written as a JSON string), bytes, a tokenizer.json, or "
                   "SentencePiece's .model file")
      ->capture_default_str();
  add_threads(*command, arguments->threads);
  command->footer(
      "Example: fox tokenize SlimPajama/train --tokenizer gpt2 --out tokens/train\n"
      "Documents keep their order (sources as given, folders by path), and the store is the same for any number of\n"
      "threads. Stopped or killed, the same command continues, and ends with the same bytes. Then, in a run file:\n"
      "[data] train = [\"tokens/train\"].");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
