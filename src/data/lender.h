#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fox::data {

/// Memory that threads work with, lent and given back, so that each finds what another has warmed up.
template <typename T>
class Lender {
 public:
  /// Calls `work` with one that nobody else has; `make` makes one when there is none. One that `work` throws
  /// with is not given back.
  template <typename Make, typename Work>
  void lend(const Make& make, const Work& work) const {
    std::unique_ptr<T> lent = take();
    if (!lent) lent = make();
    work(*lent);
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(lent));
  }

 private:
  std::unique_ptr<T> take() const {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return nullptr;
    std::unique_ptr<T> last = std::move(idle_.back());
    idle_.pop_back();
    return last;
  }

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<T>> idle_;
};

}  // namespace fox::data
