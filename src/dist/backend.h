#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

// The two engines behind a process group.
namespace fox::dist {

using StorePointer = c10::intrusive_ptr<c10d::Store>;
using BackendPointer = c10::intrusive_ptr<c10d::Backend>;
using MakeBackend = BackendPointer (*)(const StorePointer& store, int rank, int size,
                                       std::chrono::milliseconds timeout);

BackendPointer make_gloo(const StorePointer& store, int rank, int size, std::chrono::milliseconds timeout);

/// NCCL is part of the CUDA backend, a library of its own, which says when it is loaded how one is made.
void register_nccl(MakeBackend make);

}  // namespace fox::dist
