#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/gates.h"
#include "eval/held_out_text.h"
#include "eval/per_token_loss.h"
#include "infer/generate.h"
#include "infer/load_model.h"

namespace fox::eval {

struct RunEvaluationOptions {
  std::vector<std::filesystem::path> data;  ///< as HeldOutText
  PerTokenLossOptions loss;                 ///< length and stride 0: default_loss_options
  GateOptions gates;                        ///< length 0: that of `loss`
  infer::GenerateOptions samples;
  std::vector<std::string> prompts;  ///< none: the first line of the held-out text
  at::Device device = at::kCPU;
  at::ScalarType compute = at::kFloat;  ///< of activations
  bool force = false;                   ///< even when the files are those of this checkpoint, text and options
};

/// What a report shows of one run; each value is the content of the file eval/<name>.json (docs/formats.md).
struct RunEvaluation {
  nlohmann::json loss, gates, samples;
};

/// Sets length (4 T for a model that was trained at context T), stride (32, or what divides both lengths) and
/// train_context where they are not given. Throws fox::Error when T is not known and no length was given.
void default_loss_options(const infer::ModelLocation& location, PerTokenLossOptions& options);

/// Per-token loss and the loss over windows of the training length, as eval/loss.json holds them.
nlohmann::json evaluate_loss(infer::LoadedModel& loaded, const HeldOutText& text, const PerTokenLossOptions& options);

/// Throws fox::Error when `location` belongs to no run, eval/ of that run cannot be written, options are out of range,
/// or there is no held-out text: all that can be known before anything is computed.
void check_evaluation(const infer::ModelLocation& location, const RunEvaluationOptions& options);

/// Evaluates the newest checkpoint of a run directory and writes eval/loss.json, eval/gates.json and eval/samples.json
/// there. A file that was made from the same checkpoint, text and options by the same version is read instead.
RunEvaluation evaluate_run(const std::filesystem::path& run_dir, const RunEvaluationOptions& options);

}  // namespace fox::eval
