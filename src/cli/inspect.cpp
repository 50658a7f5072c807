#include "infer/inspect.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/progress.h"
#include "checkpoint/safetensors.h"
#include "cli/commands.h"
#include "cli/shared_options.h"

namespace fox::cli {
namespace {

struct InspectArguments {
  std::string path;
  std::optional<int64_t> context;
  bool json = false;
};

std::string dtype_name(const at::Tensor& tensor) { return c10::getDtypeNames(tensor.scalar_type()).first; }

void inspect_file(const InspectArguments& arguments) {
  const checkpoint::SafetensorsFile file = checkpoint::read_safetensors_header(arguments.path);
  int64_t values = 0, bytes = 0;
  nlohmann::json tensors = nlohmann::json::object();
  for (const auto& [name, tensor] : file.tensors) {
    values += tensor.numel();
    bytes += static_cast<int64_t>(tensor.numel() * tensor.element_size());
    tensors[name] = {{"dtype", dtype_name(tensor)}, {"shape", tensor.sizes().vec()}};
  }
  if (arguments.json) {
    const nlohmann::json out = {
        {"tensors", tensors}, {"metadata", file.metadata}, {"values", values}, {"bytes", bytes}};
    fmt::print("{}\n", out.dump());
    return;
  }
  size_t width = 0;
  for (const auto& [name, tensor] : file.tensors) width = std::max(width, name.size());
  for (const auto& [name, tensor] : file.tensors) {
    fmt::print("{:<{}}  {:<9} ({})\n", name, width, dtype_name(tensor), fmt::join(tensor.sizes().vec(), ", "));
  }
  for (const auto& [key, value] : file.metadata) fmt::print("metadata {}: {}\n", key, value);
  fmt::print("{} tensors, {} values, {}\n", file.tensors.size(), values, human_bytes(static_cast<double>(bytes)));
}

void inspect_model(const InspectArguments& arguments) {
  const infer::ModelSummary summary = infer::summarise_model(std::filesystem::path(arguments.path), arguments.context);
  if (arguments.json) {
    fmt::print("{}\n", infer::to_json(summary).dump());
    return;
  }
  fmt::print("{}", summary.location.dir.string());
  if (summary.location.tokens) fmt::print(", trained on {} tokens", *summary.location.tokens);
  fmt::print("\n\nconfiguration\n");
  const nlohmann::json config = summary.config.to_json();
  for (const auto& [key, value] : config.items()) fmt::print("  {:<32} {}\n", key, value.dump());
  fmt::print("\n{:<24} {:>15} {:>20}\n", "part", "parameters", "FLOPs a token");
  for (const infer::ModelPart& part : summary.parts) {
    fmt::print("{:<24} {:>15} {:>20.0f}\n", part.name, part.parameters, part.flops_per_token);
  }
  fmt::print("{:<24} {:>15} {:>20.0f}\n", "total", summary.parameters.total, summary.flops_per_token);
  fmt::print(
      "\n{} parameters without the input embedding. FLOPs: forward, at a context of {} tokens, counted as in Table 6 "
      "of arXiv 2503.02130.\n",
      summary.parameters.non_embedding, summary.context);
}

}  // namespace

void register_inspect(CLI::App& app) {
  auto arguments = std::make_shared<InspectArguments>();
  CLI::App* command =
      app.add_subcommand("inspect", "What a model is made of: configuration, parameters, FLOPs by part");
  command->add_option("PATH", arguments->path, std::string(kModelHelp) + ", or a .safetensors file")->required();
  command->add_option("--context", arguments->context, "Count FLOPs at this length (default: the training length)")
      ->check(whole_number(1));
  command->add_flag("--json", arguments->json, "Print JSON instead of a table");
  command->footer(
      "Example: fox inspect runs/demo/fox_pro\n"
      "         fox inspect model.safetensors   (names, dtypes and shapes)");
  command->callback([arguments] {
    std::filesystem::is_regular_file(arguments->path) ? inspect_file(*arguments) : inspect_model(*arguments);
  });
}

}  // namespace fox::cli
