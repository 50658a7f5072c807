#include "dist/process_group.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "base/error.h"
#include "dist/backend.h"
#include "dist/guard.h"
#include "dist/liveness.h"

namespace fox::dist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

constexpr milliseconds kPoll{1};
/// Between two looks at the other ranks, of which NCCL tells nothing.
constexpr milliseconds kPatience{5000};

MakeBackend& nccl_maker() {
  static MakeBackend make = nullptr;
  return make;
}

/// c10d writes pages with stack traces to standard error on the way to exceptions that are told here in a line.
void keep_c10d_quiet() {
  if (!std::getenv("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
}

StorePointer open_store(const Launch& launch, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = launch.hosts_store;
  options.waitWorkers = false;  // join() waits, and knows by name for whom
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(launch.address, options);
  } catch (const std::exception& error) {
    throw Error(fmt::format("rank {} of {} cannot {} the store at {}:{}", launch.rank, launch.size,
                            launch.hosts_store ? "open" : "reach", launch.address, launch.port),
                fmt::format("check MASTER_ADDR and MASTER_PORT, and that rank 0 runs ({})", error.what()));
  }
}

void wait_until_all_are_here(const StorePointer& store, const Launch& launch, milliseconds timeout) {
  const auto key = [](int rank) { return fmt::format("here/{}", rank); };
  std::vector<std::string> keys;
  for (int rank = 0; rank < launch.size; ++rank) keys.push_back(key(rank));
  std::vector<int> missing;
  try {
    store->set(key(launch.rank), "");
    const auto deadline = Clock::now() + timeout;
    while (Clock::now() < deadline) {
      if (store->check(keys)) return;
      std::this_thread::sleep_for(20 * kPoll);
    }
    for (int rank = 0; rank < launch.size; ++rank) {
      if (!store->check({key(rank)})) missing.push_back(rank);
    }
  } catch (const std::exception&) {
    missing = {0};  // the store is gone, which rank 0 or its agent keeps
  }
  throw Error(fmt::format("rank{} {} of {} did not come within {:.3g} s", missing.size() == 1 ? "" : "s",
                          fmt::join(missing, ", "), launch.size, std::chrono::duration<double>(timeout).count()),
              "see why in its own output, or start fewer ranks");
}

}  // namespace

void register_nccl(MakeBackend make) { nccl_maker() = make; }

struct ProcessGroup::State {
  StorePointer store;
  std::shared_ptr<Liveness> liveness;
  at::Device device = at::kCPU;
  milliseconds timeout{0};
  int rank = 0;
  std::vector<int> world_ranks;
  BackendPointer backend;
  std::shared_ptr<Guard> guard;  ///< of all groups of NCCL: Gloo's waits throw by themselves
  // How many of each there have been: every rank counts alike, so the numbers tell one from the next.
  int exchanges = 0, texts = 0, alone = 0, splits = 0;
  bool failed = false;

  int size() const { return static_cast<int>(world_ranks.size()); }

  void connect() {
    if (!device.is_cpu() && !nccl_maker())
      throw Error("NCCL needs GPUs, and no GPU is open", "train on train.device = \"cuda\"");
    try {
      backend = (device.is_cpu() ? make_gloo : nccl_maker())(store, rank, size(), timeout);
    } catch (const std::exception& error) {
      throw liveness->diagnose(error.what());
    }
    if (device.is_cpu()) return;
    if (!guard) guard = std::make_shared<Guard>(liveness, kPatience);
    guard->add([group = c10::weak_intrusive_ptr<c10d::Backend>(backend)] {
      if (const auto alive = group.lock()) alive->abort();
    });
  }
  void check() {
    if (guard) guard->check();
  }
  /// `call` throws when a rank is at fault; that rank is named.
  template <typename Call>
  void attempt(const Call& call) {
    try {
      check();
      call();
    } catch (const Error&) {
      failed = true;
      throw;
    } catch (const std::exception& error) {
      failed = true;
      throw liveness->diagnose(error.what());
    }
  }
  ~State() {
    // What is still under way ends, if ever, by a timeout of its own, and Gloo would wait for it; the process is about
    // to end, so leave it behind. NCCL is told.
    if (!failed) return;
    backend->abort();
    if (device.is_cpu()) backend.release();
  }
};

struct Transfer::State {
  std::shared_ptr<ProcessGroup::State> group;
  std::vector<WorkPointer> works;
  std::vector<at::Tensor> tensors;  ///< kept alive

  template <typename Wait>
  void wait_for_each(const Wait& wait) {
    RECORD_FUNCTION("c10d::wait", {});  // by this name the profiler counts it as communication
    group->attempt([&] {
      for (const auto& work : works) wait(work);
    });
  }
};

void Transfer::wait() {
  if (!state_) return;
  state_->wait_for_each([](const WorkPointer& work) { work->wait(); });
  state_.reset();
}

void Transfer::wait_on_host() {
  if (!state_) return;
  if (!state_->group->device.is_cpu()) {
    const auto deadline = Clock::now() + state_->group->timeout;
    state_->wait_for_each([&](const WorkPointer& work) {
      while (!work->isCompleted()) {
        if (Clock::now() > deadline) throw std::runtime_error("NCCL did not finish");
        state_->group->check();
        std::this_thread::sleep_for(kPoll);
      }
      state_->group->check();  // what was given up is complete too
    });
  }
  wait();
}

ProcessGroup::ProcessGroup() = default;
ProcessGroup::ProcessGroup(std::shared_ptr<State> state) : state_(std::move(state)) {}

ProcessGroup ProcessGroup::join(const Launch& launch, at::Device device, milliseconds timeout) {
  if (launch.size == 1) return {};
  keep_c10d_quiet();
  auto state = std::make_shared<State>();
  const auto tcp = open_store(launch, timeout);
  state->store = c10::make_intrusive<c10d::PrefixStore>("fox/" + launch.attempt, tcp);
  wait_until_all_are_here(state->store, launch, timeout);
  state->liveness =
      std::make_shared<Liveness>(state->store->clone(), launch.rank, launch.size, timeout, launch.hosts_store);
  state->device = device;
  state->timeout = timeout;
  state->rank = launch.rank;
  for (int rank = 0; rank < launch.size; ++rank) state->world_ranks.push_back(rank);
  state->connect();
  return ProcessGroup(std::move(state));
}

int ProcessGroup::rank() const { return state_ ? state_->rank : 0; }
int ProcessGroup::size() const { return state_ ? state_->size() : 1; }
milliseconds ProcessGroup::timeout() const { return state_ ? state_->timeout : milliseconds(0); }
std::string ProcessGroup::backend() const { return state_ ? state_->backend->getBackendName() : "none"; }

template <typename Start>
Transfer ProcessGroup::start(const Start& start, std::vector<at::Tensor> tensors) const {
  Transfer transfer;
  if (!state_) return transfer;
  transfer.state_ = std::make_shared<Transfer::State>();
  transfer.state_->group = state_;
  transfer.state_->tensors = std::move(tensors);
  state_->liveness->entered();
  state_->attempt([&] { start(*state_->backend, transfer.state_->works); });
  return transfer;
}

Transfer ProcessGroup::all_reduce(const at::Tensor& tensor) const {
  return start(
      [&](c10d::Backend& backend, auto& works) {
        std::vector<at::Tensor> tensors{tensor};
        works.push_back(backend.allreduce(tensors));
      },
      {tensor});
}

Transfer ProcessGroup::broadcast(const at::Tensor& tensor, int root) const {
  return start(
      [&](c10d::Backend& backend, auto& works) {
        std::vector<at::Tensor> tensors{tensor};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        works.push_back(backend.broadcast(tensors, options));
      },
      {tensor});
}

Transfer ProcessGroup::all_gather(const at::Tensor& all, const at::Tensor& part) const {
  if (!state_ && all.data_ptr() != part.data_ptr()) at::Tensor(all).copy_(part.view_as(all));
  return start(
      [&](c10d::Backend& backend, auto& works) {
        at::Tensor output = all, input = part;
        works.push_back(backend._allgather_base(output, input));
      },
      {all, part});
}

Transfer ProcessGroup::reduce_scatter(const at::Tensor& part, const at::Tensor& all) const {
  if (!state_ && all.data_ptr() != part.data_ptr()) at::Tensor(part).copy_(all.view_as(part));
  return start(
      [&](c10d::Backend& backend, auto& works) {
        at::Tensor output = part, input = all;
        works.push_back(backend._reduce_scatter_base(output, input));
      },
      {all, part});
}

Transfer ProcessGroup::exchange(std::span<const at::Tensor> send, int to, std::span<const at::Tensor> receive,
                                int from) const {
  if (!state_) {
    for (size_t i = 0; i < receive.size(); ++i) at::Tensor(receive[i]).copy_(send[i]);
    return {};
  }
  std::vector<at::Tensor> tensors(send.begin(), send.end());
  tensors.insert(tensors.end(), receive.begin(), receive.end());
  const int number = state_->exchanges++;
  if (tensors.empty()) {  // others may have something to say to each other
    state_->liveness->entered();
    return {};
  }
  return start(
      [&](c10d::Backend& backend, auto& works) {
        // NCCL takes them as one operation, without which two ranks could each wait for the other to receive.
        const bool together = state_->device.is_cuda();
        if (together) backend.startCoalescing();
        const auto each = [&](std::span<const at::Tensor> list, const auto& move) {
          for (size_t i = 0; i < list.size(); ++i) {
            std::vector<at::Tensor> one{list[i]};
            auto work = move(one, static_cast<int>((number % (1 << 20)) << 8 | i));
            if (!together) works.push_back(std::move(work));
          }
        };
        each(send, [&](auto& one, int tag) { return backend.send(one, to, tag); });
        each(receive, [&](auto& one, int tag) { return backend.recv(one, from, tag); });
        if (together) works.push_back(backend.endCoalescing());
      },
      std::move(tensors));
}

void ProcessGroup::check() const {
  if (state_) state_->attempt([] {});
}

void ProcessGroup::barrier() const {
  if (!state_) return;
  all_reduce(at::zeros({1}, at::TensorOptions(state_->device))).wait_on_host();
}

std::vector<std::string> ProcessGroup::gather_texts(const std::string& mine) const {
  if (!state_) return {mine};
  const int number = state_->texts++;
  const auto key = [&](int rank) { return fmt::format("text/{}/{}", number, rank); };
  std::vector<std::string> texts;
  state_->attempt([&] { state_->store->set(key(rank()), mine); });
  for (int other = 0; other < size(); ++other) {
    state_->liveness->wait_for(*state_->store, key(other), state_->world_ranks[other]);
    state_->attempt([&] { texts.push_back(state_->store->get_to_str(key(other))); });
  }
  return texts;
}

void ProcessGroup::first_alone(const std::function<void()>& work) const {
  if (!state_) return work();
  const std::string done = fmt::format("alone/{}", state_->alone++);
  if (rank() == 0) {
    work();
    state_->attempt([&] { state_->store->set(done, ""); });
  } else {
    state_->liveness->wait_for(*state_->store, done, state_->world_ranks[0]);
  }
}

ProcessGroup ProcessGroup::split(int color, int key) const {
  if (!state_) return {};
  const int number = state_->splits++;
  std::vector<std::pair<int, int>> members;  // key, rank
  const auto texts = gather_texts(fmt::format("{} {}", color, key));
  for (int rank = 0; rank < size(); ++rank) {
    std::istringstream text(texts[rank]);
    int its_color = 0, its_key = 0;
    text >> its_color >> its_key;
    if (its_color == color) members.emplace_back(its_key, rank);
  }
  if (members.size() == 1) return {};
  std::sort(members.begin(), members.end());
  auto part = std::make_shared<State>(*state_);
  part->exchanges = part->texts = part->alone = part->splits = 0;
  part->world_ranks.clear();
  for (const auto& [unused, rank] : members) {
    if (rank == this->rank()) part->rank = static_cast<int>(part->world_ranks.size());
    part->world_ranks.push_back(state_->world_ranks[rank]);
  }
  part->store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("split/{}/{}", number, color), state_->store);
  part->connect();
  return ProcessGroup(std::move(part));
}

void ProcessGroup::report_failure(const std::string& why) const noexcept {
  if (!state_) return;
  state_->liveness->report(
      fmt::format("rank {} of {} stopped: {}", state_->world_ranks[rank()], state_->liveness->size(), why));
}

}  // namespace fox::dist
