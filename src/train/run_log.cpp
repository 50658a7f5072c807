#include "train/run_log.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "train/setup.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

RunLog::RunLog(const RunConfig& config, const TrainerState& start)
    : batch_tokens_(config.train.batch_tokens),
      context_(config.data.context),
      metrics_(fs::path(config.output.dir) / "metrics.jsonl", start.step),
      events_(config.output.tensorboard ? std::make_unique<EventFile>(fs::path(config.output.dir) / "tb", start.step)
                                        : nullptr),
      progress_("train", total_steps(config.train) * config.train.batch_tokens, "tokens") {
  if (start.step > 0) message(fmt::format("continuing at step {}, {} tokens", start.step, start.tokens));
  progress_.update(start.tokens);
}

void RunLog::show(const StepResult& result) {
  if (!result.fault.empty()) {
    const int64_t first = (result.tokens - batch_tokens_) / context_;
    message(fmt::format("warning: step {} was not applied: {} (contexts {} to {} of the data)", result.step,
                        result.fault, first, result.tokens / context_ - 1));
  }
  // A norm may be -nan; its absolute value is nan.
  progress_.update(result.tokens,
                   fmt::format("loss {:.4f}, gradient norm {:.3g}", result.loss, std::abs(result.grad_norm)));
}

void RunLog::write_step(const StepResult& result, double tokens_per_s, double data_wait) {
  json line{{"kind", "train"},
            {"step", result.step},
            {"tokens", result.tokens},
            {"loss", result.loss},
            {"grad_norm", result.grad_norm},
            {"lr", result.lr},
            {"tokens_per_s", tokens_per_s},
            {"data_wait", data_wait},
            {"time", unix_time()}};
  if (!result.fault.empty()) line["fault"] = result.fault;
  metrics_.write(line);
  if (!events_) return;
  events_->scalar(result.step, "train/loss", result.loss);
  events_->scalar(result.step, "train/grad_norm", result.grad_norm);
  events_->scalar(result.step, "train/lr", result.lr);
  events_->scalar(result.step, "train/tokens_per_s", tokens_per_s);
}

void RunLog::write_evaluation(const TrainerState& state, const eval::HeldOutLoss& held_out) {
  metrics_.write({{"kind", "eval"},
                  {"step", state.step},
                  {"tokens", state.tokens},
                  {"loss", held_out.loss},
                  {"perplexity", held_out.perplexity},
                  {"bits_per_byte", held_out.bits_per_byte}});
  message(fmt::format("step {}: held-out loss {:.4f}, perplexity {:.2f}, {:.4f} bits a byte", state.step, held_out.loss,
                      held_out.perplexity, held_out.bits_per_byte));
  if (!events_) return;
  events_->scalar(state.step, "eval/loss", held_out.loss);
  events_->scalar(state.step, "eval/perplexity", held_out.perplexity);
  events_->scalar(state.step, "eval/bits_per_byte", held_out.bits_per_byte);
}

void RunLog::write_gates(const TrainerState& state, const eval::GateAnalysis& gates) {
  json lengths = json::array();
  double skipped = 0;
  for (const auto& head : gates.heads) {
    lengths.push_back(head.memory_length ? json(*head.memory_length) : json(nullptr));
    skipped += head.skipped_share.value_or(0) / static_cast<double>(gates.heads.size());
  }
  metrics_.write({{"kind", "gates"},
                  {"step", state.step},
                  {"tokens", state.tokens},
                  {"memory_lengths", lengths},
                  {"skipped_share", skipped}});
  if (events_) events_->scalar(state.step, "gates/skipped_share", skipped);
}

void RunLog::write_sample(const TrainerState& state, const std::string& text) {
  metrics_.write({{"kind", "sample"}, {"step", state.step}, {"tokens", state.tokens}, {"text", text}});
  if (events_) events_->text(state.step, "sample", text);
}

}  // namespace fox::train
