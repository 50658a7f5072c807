#include "dist/sequence_shard.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <vector>

#include "base/error.h"

namespace fox::dist {

at::Tensor SequenceShard::take(const at::Tensor& x_BT) const {
  const int64_t length = x_BT.size(1);
  if (length % chunks() != 0 || length == 0) {
    throw Error(fmt::format("a sequence of {} tokens cannot be split over {} ranks", length, ranks()),
                fmt::format("each rank takes two chunks of equal length: make it a multiple of {}", chunks()));
  }
  const auto x_BCT = x_BT.unflatten(1, {chunks(), length / chunks()});
  return at::cat({x_BCT.select(1, chunk(rank(), 0)), x_BCT.select(1, chunk(rank(), 1))});
}

at::Tensor SequenceShard::gather(const at::Tensor& part) const {
  const auto mine = part.contiguous();
  std::vector<int64_t> shape = mine.sizes().vec();
  shape[0] *= ranks();
  const auto all = at::empty(shape, mine.options());
  group_.all_gather(all, mine).wait();
  const auto by_rank = all.unflatten(0, {chunks(), -1});
  std::vector<at::Tensor> in_order;
  for (int64_t c = 0; c < chunks(); ++c) in_order.push_back(by_rank[kChunks * owner(c) + slot(c)]);
  return at::cat(in_order, 1);
}

at::Tensor SequenceShard::hand_on(const at::Tensor& x, int64_t by) const {
  const auto mine = x.contiguous();
  auto received = at::zeros_like(mine);
  const auto exists = [&](int64_t c) { return 0 <= c && c < chunks(); };
  // Round n of a ring: everybody to the rank n places on, from the one n places back.
  for (int64_t round = 0; round < ranks(); ++round) {
    const int64_t to = (rank() + round) % ranks(), from = (rank() - round + ranks()) % ranks();
    std::vector<at::Tensor> send, receive;
    // Both sides in the order of the chunks that receive.
    for (int64_t slot = 0; slot < kChunks; ++slot) {
      const int64_t target = chunk(to, slot), source = target - by;
      if (exists(source) && owner(source) == rank()) send.push_back(rows(mine, this->slot(source)));
      const int64_t own = chunk(rank(), slot);
      if (exists(own - by) && owner(own - by) == from) receive.push_back(rows(received, slot));
    }
    if (round > 0) {
      group_.exchange(send, static_cast<int>(to), receive, static_cast<int>(from)).wait();
      continue;
    }
    for (size_t i = 0; i < send.size(); ++i) receive[i].copy_(send[i]);
  }
  return received;
}

}  // namespace fox::dist
