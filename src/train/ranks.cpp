#include "train/ranks.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/version.h"
#include "ops/device.h"
#include "train/run_directory.h"

namespace fox::train {
namespace {

using nlohmann::json;

std::string host_name() {
  char name[256] = "?";
  ::gethostname(name, sizeof name - 1);
  return name;
}

/// What must be the same everywhere.
json identity(const RunConfig& config) {
  json tables = config.to_json();
  for (const char* own : {"threads", "device"}) tables["train"].erase(own);
  tables["build"] = {{"version", version()}, {"commit", commit()}};
  return tables;
}

void check_same_configuration(const dist::ProcessGroup& ranks, const RunConfig& config) {
  const auto texts = ranks.gather_texts(identity(config).dump());
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const auto differences =
        all_differences(json::parse(texts[0]), json::parse(texts[rank]), "on rank 0", fmt::format("on rank {}", rank));
    if (differences.empty()) continue;
    throw Error(fmt::format("rank {} was started with another configuration than rank 0: {}", rank,
                            fmt::join(differences, "; ")),
                "start every rank with the same run file and the same --set");
  }
}

}  // namespace

void check_sequence_ranks(int64_t together, int ranks) {
  if (ranks % together == 0) return;
  throw Error(fmt::format("{} ranks are to hold a context together, and {} {} started", together, ranks,
                          ranks == 1 ? "was" : "were"),
              fmt::format("start a multiple of {} with torchrun, or set another train.sequence_ranks", together));
}

StepShare::Rows StepShare::rows(int64_t index) const {
  const int64_t step = index / micro_batches, micro = index % micro_batches;
  const int64_t begin = contexts * micro / micro_batches, end = contexts * (micro + 1) / micro_batches;
  return {step * step_contexts + first + begin, end - begin};
}

StepShare share_of_step(const RunConfig& config, int rank, int ranks) {
  const int64_t together = config.train.sequence_ranks;
  check_sequence_ranks(together, ranks);
  const int64_t contexts = config.train.batch_tokens / config.data.context, sharers = ranks / together;
  if (contexts % sharers != 0) {
    throw Error(fmt::format("{}{} ranks cannot share the {} context{} of a step evenly (train.batch_tokens = {}, "
                            "data.context = {})",
                            ranks, together == 1 ? "" : fmt::format(" / {}", together), contexts,
                            contexts == 1 ? "" : "s", config.train.batch_tokens, config.data.context),
                fmt::format("set train.batch_tokens to a multiple of {}, or start {}", sharers * config.data.context,
                            contexts < sharers ? "fewer ranks" : "a number of ranks that divides the contexts"));
  }
  const int64_t own = contexts / sharers, rows = config.train.micro_batch_tokens / config.data.context;
  return {.step_contexts = contexts,
          .first = own * (rank / together),
          .contexts = own,
          .micro_batches = (own + rows - 1) / rows};
}

std::shared_ptr<const dist::SequenceShard> split_sequences(int64_t together, const dist::ProcessGroup& ranks) {
  if (together == 1) return nullptr;
  const auto group = ranks.split(static_cast<int>(ranks.rank() / together), ranks.rank());
  group.barrier();  // NCCL wants all ranks of a group at its first exchange; later ones may concern some of them only
  return std::make_shared<dist::SequenceShard>(group);
}

void choose_device(std::string& device, const dist::Launch& launch) {
  if (launch.size == 1 || !device.starts_with("cuda")) return;
  if (device != "cuda" && launch.local_size > 1) {
    throw UsageError(fmt::format("the device \"{}\" is one GPU for {} ranks", device, launch.local_size),
                     "name it \"cuda\": each rank takes its own");
  }
  if (device == "cuda") device = fmt::format("cuda:{}", launch.local_rank);
}

dist::ProcessGroup join_ranks(const RunConfig& config, const dist::Launch& launch) {
  if (launch.size == 1) return {};
  const StepShare share = share_of_step(config, launch.rank, launch.size);
  std::string name = config.train.device;
  choose_device(name, launch);
  const at::Device device = ops::open_device(name);
  auto ranks = dist::ProcessGroup::join(launch, device, std::chrono::seconds(config.train.rank_timeout_s));
  const int64_t together = config.train.sequence_ranks;
  const auto part = together == 1 ? "" : fmt::format(", part {} of {} of each", launch.rank % together + 1, together);
  fmt::print(stderr, "rank {} of {}: {}, process {}, {}, {} thread{}, {}, contexts {} to {} of each {}{}\n",
             launch.rank, launch.size, host_name(), ::getpid(), name, at::get_num_threads(),
             at::get_num_threads() == 1 ? "" : "s", ranks.backend(), share.first, share.first + share.contexts - 1,
             share.step_contexts, part);
  try {
    check_same_configuration(ranks, config);
  } catch (const Error& error) {
    ranks.report_failure(error.what());
    throw;
  }
  return ranks;
}

void check_same_on_all(const dist::ProcessGroup& ranks, const std::string& what, const std::string& text) {
  const auto texts = ranks.gather_texts(text);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    throw Error(fmt::format("rank {} has another {} than rank 0: {}, and rank 0 {}", rank, what, texts[rank], texts[0]),
                "give all ranks the same files");
  }
}

}  // namespace fox::train
