#include "dist/liveness.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

namespace fox::dist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kBeat{500};
/// Who has not beaten for so long lives no more, or stands still; on a machine with much to do some beats are late.
constexpr milliseconds kSilence{10000};
constexpr const char* kReason = "reason";
constexpr int64_t kLeft = -2;  // the beat of one that has ended in an orderly way

double seconds_of(milliseconds time) { return std::chrono::duration<double>(time).count(); }

std::string sign_key(int rank) { return fmt::format("sign/{}", rank); }
std::string read_key(int rank) { return fmt::format("read/{}", rank); }

}  // namespace

Liveness::Liveness(StorePointer store, int rank, int size, milliseconds timeout, bool waits_for_readers)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      waits_for_readers_(waits_for_readers),
      thread_([this] { beat(); }) {}

Liveness::~Liveness() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopping_changed_.notify_all();
  thread_.join();
}

void Liveness::beat() {
  const auto sign = [this](int64_t beats) {
    store_->set(sign_key(rank_), fmt::format("{} {}", beats, entered_.load()));
  };
  try {
    std::unique_lock lock(mutex_);
    for (int64_t beats = 0; !stopping_; ++beats) {
      lock.unlock();
      sign(beats);
      lock.lock();
      stopping_changed_.wait_for(lock, kBeat, [this] { return stopping_; });
    }
    sign(kLeft);
  } catch (const std::exception&) {
    // The store is gone, with the process that kept it: whoever waits for something will notice.
  }
}

Liveness::Sign Liveness::sign_of(int rank) const {
  const std::string key = sign_key(rank);
  Sign sign;
  if (!store_->check({key})) return sign;
  const std::string text = store_->get_to_str(key);
  const auto first = std::from_chars(text.data(), text.data() + text.size(), sign.beats);
  std::from_chars(first.ptr + 1, text.data() + text.size(), sign.entered);
  return sign;
}

void Liveness::report(const std::string& why) noexcept {
  try {
    store_->compareSet(kReason, "", why);
    if (!waits_for_readers_) return;
    std::vector<Sign> first;
    for (int rank = 0; rank < size_; ++rank) first.push_back(sign_of(rank));
    const auto begin = Clock::now();
    bool waits = true;
    while (waits && Clock::now() - begin < kSilence) {
      std::this_thread::sleep_for(kBeat / 5);
      waits = false;
      for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_ || store_->check({read_key(rank)})) continue;
        // Whoever does not beat meanwhile is not there to read.
        waits = waits || Clock::now() - begin < 4 * kBeat || sign_of(rank).beats != first[rank].beats;
      }
    }
  } catch (const std::exception&) {
    // Without the store there is nobody to tell.
  }
}

std::string Liveness::reported() const {
  if (!store_->check({kReason})) return "";
  std::string why = store_->get_to_str(kReason);
  store_->set(read_key(rank_), "");
  return why;
}

Liveness::Watched Liveness::watch() const {
  std::vector<Sign> first, last;
  for (int rank = 0; rank < size_; ++rank) first.push_back(sign_of(rank));
  last = first;
  const auto deadline = Clock::now() + kSilence;
  std::vector<int> silent;
  do {
    std::this_thread::sleep_for(kBeat);
    if (auto why = reported(); !why.empty()) return {std::move(last), std::move(why)};
    silent.clear();
    for (int rank = 0; rank < size_; ++rank) {
      last[rank] = sign_of(rank);
      if (rank != rank_ && last[rank].beats == first[rank].beats && last[rank].beats != kLeft) silent.push_back(rank);
    }
  } while (!silent.empty() && Clock::now() < deadline);
  if (silent.empty()) return {std::move(last), ""};
  const char* some = silent.size() > 1 ? "s" : "";
  return {std::move(last), fmt::format("rank{} {} of {} {} ended or stand{} still: no sign of life for {} s", some,
                                       fmt::join(silent, ", "), size_, *some ? "have" : "has", *some ? "" : "s",
                                       kSilence.count() / 1000)};
}

std::string Liveness::find_culprit() const {
  auto [last, found] = watch();
  if (!found.empty()) return found;
  const auto fewer = [](const Sign& a, const Sign& b) { return a.entered < b.entered; };
  const auto [least, most] = std::minmax_element(last.begin(), last.end(), fewer);
  if (least->entered == most->entered) return "";
  if (least->beats == kLeft) {
    return fmt::format("rank {} of {} has ended while others wait for it in exchange {}", least - last.begin(), size_,
                       most->entered);
  }
  return fmt::format(
      "rank {} of {} hangs: others wait for it in exchange {}, it has not come beyond {} within {:.3g} s",
      least - last.begin(), size_, most->entered, least->entered, seconds_of(timeout_));
}

Error Liveness::diagnose(const std::string& cause) {
  const std::string hint = fmt::format("its own output may tell more ({})", cause);
  try {
    std::string why = reported();
    if (why.empty()) why = find_culprit();
    if (why.empty()) why = fmt::format("an exchange between {} ranks that all live failed", size_);
    store_->compareSet(kReason, "", why);
    return Error(why, hint);
  } catch (const std::exception&) {
    return Error(fmt::format("the store of {} ranks is gone: rank 0 or torchrun, which kept it, has ended", size_),
                 hint);
  }
}

bool Liveness::sees_fault() {
  const auto [signs, found] = watch();
  if (!found.empty()) {
    store_->compareSet(kReason, "", found);
    return true;
  }
  std::vector<int64_t> entered;
  for (const Sign& sign : signs) entered.push_back(sign.entered);
  if (entered != seen_entered_) {
    seen_entered_ = std::move(entered);
    seen_since_ = Clock::now();
  }
  const auto [least, most] = std::minmax_element(seen_entered_.begin(), seen_entered_.end());
  return *least != *most && Clock::now() - seen_since_ > timeout_;
}

void Liveness::wait_for(c10d::Store& store, const std::string& key, int rank) {
  Sign seen;
  auto seen_at = Clock::now();
  std::string cause;
  try {
    bool over = false;  // whoever has ended may have answered before: then one look more finds it
    while (!store.check({key})) {
      if (over) throw std::runtime_error("while waiting for it");
      const Sign sign = sign_of(rank);
      if (sign.beats != seen.beats) {
        seen = sign;
        seen_at = Clock::now();
      }
      over = !reported().empty() || sign.beats == kLeft || Clock::now() - seen_at > timeout_;
      if (!over) std::this_thread::sleep_for(kBeat / 5);
    }
    return;
  } catch (const std::exception& error) {
    cause = error.what();
  }
  throw diagnose(cause);
}

}  // namespace fox::dist
