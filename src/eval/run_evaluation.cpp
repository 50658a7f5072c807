#include "eval/run_evaluation.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "base/files.h"
#include "base/version.h"
#include "base/writable.h"

namespace fox::eval {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Tokens that bits a byte is measured over, at most: it costs one forward token each.
constexpr int64_t kHeldOutTokens = int64_t{1} << 20;
constexpr int64_t kStride = 32;
constexpr int64_t kLengthsBeyond = 4;

json loss_options_json(const PerTokenLossOptions& o) {
  return {{"length", o.length},
          {"stride", o.stride},
          {"max_tokens", o.max_tokens},
          {"first_word", o.first_word},
          {"train_context", o.train_context ? json(*o.train_context) : json(nullptr)}};
}

json gate_options_json(const GateOptions& o) {
  return {{"length", o.length},
          {"windows", o.windows},
          {"log_pruning_tolerance", o.log_pruning_tolerance},
          {"num_maps", o.num_maps},
          {"map_size", o.map_size}};
}

json sample_options_json(const infer::GenerateOptions& o, const std::vector<std::string>& prompts) {
  return {{"temperature", o.sampling.temperature},
          {"top_k", o.sampling.top_k},
          {"top_p", o.sampling.top_p},
          {"seed", o.sampling.seed},
          {"max_tokens", o.max_tokens},
          {"stop", o.stop},
          {"prompts", prompts}};
}

/// The options with the defaults that follow from the model or from each other.
RunEvaluationOptions complete(RunEvaluationOptions options, const infer::ModelLocation& location) {
  default_loss_options(location, options.loss);
  if (options.gates.length == 0) options.gates.length = options.loss.length;
  return options;
}

/// Everything that decides the numbers, so that a second evaluation can tell whether they still stand.
json made_from(const infer::ModelLocation& location, const HeldOutText& text, const RunEvaluationOptions& run,
               const json& options) {
  const fs::path sums = location.dir / "checksums.json";
  return {{"checkpoint", location.dir.filename().string()},
          {"checksum", fs::exists(sums) ? json(file_checksum(sums)) : json(nullptr)},
          {"trained_tokens", location.tokens ? json(*location.tokens) : json(nullptr)},
          {"data", text.sources()},
          {"data_fingerprint", text.fingerprint()},
          {"options", options},
          {"device", c10::DeviceTypeName(run.device.type(), /*lower_case=*/true)},
          {"precision", run.compute == at::kBFloat16 ? "bf16" : "float32"},
          {"version", version()},
          {"commit", commit()}};
}

/// The file if it stands for `from`, else what `evaluate` returns, written there.
json keep_or_make(const fs::path& path, const json& from, bool force, const std::function<json()>& evaluate) {
  if (!force && fs::exists(path)) {
    json old = json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
    if (old.is_object() && old.value("made_from", json()) == from) return old;
  }
  json made = evaluate();
  made["made_from"] = from;
  fs::create_directories(path.parent_path());
  write_file_atomically(path, made.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
  return made;
}

/// The held-out text up to its first line break.
std::string first_line(const HeldOutText& text, const data::Tokenizer& tokenizer) {
  std::vector<int32_t> ids(std::min<int64_t>(text.store().num_tokens(), 256));
  text.store().read(0, ids);
  const std::string head = tokenizer.decode(ids);
  const size_t end = head.find('\n');
  return end == std::string::npos ? head : head.substr(0, end + 1);
}

json make_samples(infer::LoadedModel& loaded, const infer::GenerateOptions& options,
                  const std::vector<std::string>& prompts) {
  json samples = json::array();
  for (const std::string& prompt : prompts) {
    const infer::Generation made = infer::generate(loaded.model, loaded.tokenizer, prompt, options);
    samples.push_back({{"prompt", prompt},
                       {"text", made.text},
                       {"tokens", made.ids.size()},
                       {"finish", infer::finish_name(made.reason)},
                       {"seed", options.sampling.seed},
                       {"temperature", options.sampling.temperature}});
  }
  return {{"samples", samples}};
}

}  // namespace

void default_loss_options(const infer::ModelLocation& location, PerTokenLossOptions& options) {
  if (!options.train_context) options.train_context = location.train_context();
  if (options.length == 0) {
    if (!options.train_context) {
      throw Error(fmt::format("{} does not say at what length it was trained", location.dir.string()),
                  "give the length of windows with --length");
    }
    options.length = kLengthsBeyond * *options.train_context;
  }
  if (options.stride == 0) {
    options.stride = std::gcd(std::gcd(kStride, options.length), options.train_context.value_or(kStride));
  }
}

nlohmann::json evaluate_loss(infer::LoadedModel& loaded, const HeldOutText& text, const PerTokenLossOptions& options) {
  json out;
  out["per_token"] = to_json(per_token_loss(loaded.model, text.store(), loaded.tokenizer, options));
  out["per_token"]["train_context"] = options.train_context ? json(*options.train_context) : json(nullptr);
  const int64_t context = options.train_context.value_or(options.length);
  out["held_out"] = to_json(held_out_loss(loaded.model, text.store(), loaded.tokenizer, context, kHeldOutTokens));
  out["held_out"]["context"] = context;
  return out;
}

void check_evaluation(const infer::ModelLocation& location, const RunEvaluationOptions& options) {
  if (!location.run_dir) {
    throw Error(fmt::format("{} belongs to no run: run.json is missing", location.dir.string()),
                "`fox eval loss` evaluates any model directory");
  }
  const fs::path out = *location.run_dir / "eval";
  check_writable(fs::exists(out) ? out : *location.run_dir);
  const RunEvaluationOptions x = complete(options, location);
  check_options(x.loss);
  check_options(x.gates);
  infer::check_options(x.samples);
  HeldOutText::check(location, infer::load_tokenizer(location), x.data);
}

RunEvaluation evaluate_run(const fs::path& run_dir, const RunEvaluationOptions& given) {
  infer::LoadedModel loaded = infer::load_model(run_dir, given.device, given.compute);
  check_evaluation(loaded.location, given);
  const RunEvaluationOptions options = complete(given, loaded.location);
  const HeldOutText text(loaded, options.data);
  const PerTokenLossOptions& loss = options.loss;
  const GateOptions& gates = options.gates;
  std::vector<std::string> prompts = options.prompts;
  if (prompts.empty()) prompts.push_back(first_line(text, loaded.tokenizer));

  const fs::path out = *loaded.location.run_dir / "eval";
  const auto from = [&](const json& o) { return made_from(loaded.location, text, options, o); };
  RunEvaluation result;
  result.loss = keep_or_make(out / "loss.json", from(loss_options_json(loss)), options.force,
                             [&] { return evaluate_loss(loaded, text, loss); });
  result.gates = keep_or_make(out / "gates.json", from(gate_options_json(gates)), options.force, [&] {
    return to_json(analyse_gates(loaded.model, text.store(), loaded.tokenizer, gates));
  });
  result.samples = keep_or_make(out / "samples.json", from(sample_options_json(options.samples, prompts)),
                                options.force, [&] { return make_samples(loaded, options.samples, prompts); });
  return result;
}

}  // namespace fox::eval
