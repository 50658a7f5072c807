#include "train/checkpoint_writer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <chrono>
#include <utility>

#include "base/files.h"
#include "train/device_numbers.h"

namespace fox::train {
namespace {

using checkpoint::NamedTensors;

/// The host tensor of this name and shape; one that is there already is kept.
at::Tensor room_for(const std::string& name, const at::Tensor& like, NamedTensors& host) {
  auto& room = host[name];
  if (!room.defined()) room = at::empty(like.sizes(), at::dtype(like.dtype()).pinned_memory(!like.is_cpu()));
  return room;
}

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointStore& store,
                                   std::function<void(const std::filesystem::path& dir)> write_rest,
                                   std::function<void()> check_copies)
    : store_(store), write_rest_(std::move(write_rest)), check_copies_(std::move(check_copies)) {}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::prepare(const NamedTensors& weights, const NamedTensors& moments) {
  writing_ = std::async(std::launch::async, [this, weights, moments] {
    for (const auto& [name, tensor] : weights) room_for(name, tensor, weights_);
    for (const auto& [name, tensor] : moments) room_for(name, tensor, moments_);
  });
}

void CheckpointWriter::save(int64_t tokens, const NamedTensors& weights, const Visit& moments,
                            std::map<std::string, std::string> texts) {
  finish();
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : weights) room_for(name, tensor, weights_).copy_(tensor, /*non_blocking=*/true);
  moments([this](const std::string& name, const at::Tensor& tensor) {
    room_for(name, tensor, moments_).copy_(tensor, /*non_blocking=*/true);
  });
  // A number that is queued behind the copies arrives after them.
  if (!weights.empty()) DeviceNumbers(at::zeros({1}, weights.begin()->second.options().dtype(at::kDouble))).read();
  check_copies_();
  writing_ = std::async(std::launch::async, [this, tokens, texts = std::move(texts)] {
    store_.save(tokens, [&](const std::filesystem::path& dir) {
      checkpoint::write_safetensors(dir / "model.safetensors", weights_, {{"format", "pt"}});
      checkpoint::write_safetensors(dir / "trainer.safetensors", moments_);
      for (const auto& [name, content] : texts) write_file_atomically(dir / name, content);
      write_rest_(dir);
    });
  });
}

void CheckpointWriter::check() {
  if (writing_.valid() && writing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) writing_.get();
}

void CheckpointWriter::finish() {
  if (writing_.valid()) writing_.get();
}

}  // namespace fox::train
