#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>

namespace fox::checkpoint {

using NamedTensors = std::map<std::string, at::Tensor>;
using Metadata = std::map<std::string, std::string>;

struct SafetensorsFile {
  NamedTensors tensors;
  Metadata metadata;
};

/// Reads a whole .safetensors file (all dtypes of the format that ATen has; tensors own their memory).
/// Throws fox::Error naming the file and, where there is one, the tensor: a header length beyond the file, bad JSON,
/// offsets that overlap, leave holes or run past the end, shapes that are negative, overflow or disagree with the
/// byte count, unknown dtypes, duplicate names, truncated data. Never allocates what a header only claims.
SafetensorsFile read_safetensors(const std::filesystem::path& path);
/// Only names, dtypes, shapes and metadata (`fox inspect`): tensors are on the meta device.
SafetensorsFile read_safetensors_header(const std::filesystem::path& path);

/// Writes tensors (any device, made contiguous) sorted by name; beside the target, synced, then renamed.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata = {});

}  // namespace fox::checkpoint
