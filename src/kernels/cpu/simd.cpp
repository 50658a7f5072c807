#include "kernels/cpu/simd.h"

#include <hwy/targets.h>

#include <stdexcept>

namespace fox::kernels {
namespace {

std::vector<int64_t> usable_targets() {
  hwy::SetSupportedTargetsForTest(0);
  auto targets = hwy::SupportedAndGeneratedTargets();
  // The baseline always works, but Highway lists it only when nothing better is there.
  if ((HWY_TARGETS & HWY_STATIC_TARGET) && (targets.empty() || targets.back() != HWY_STATIC_TARGET)) {
    targets.push_back(HWY_STATIC_TARGET);
  }
  return targets;
}

}  // namespace

std::vector<std::string> simd_paths() {
  std::vector<std::string> names;
  for (const auto target : usable_targets()) names.emplace_back(hwy::TargetName(target));
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return names;
}

void force_simd_path(const std::string& name) {
  if (name.empty()) {
    hwy::SetSupportedTargetsForTest(0);
  } else {
    int64_t mask = 0;
    for (const auto target : usable_targets()) {
      if (name == hwy::TargetName(target)) mask = target;
    }
    if (mask == 0) throw std::invalid_argument("no such instruction set here: " + name);
    hwy::SetSupportedTargetsForTest(mask);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace fox::kernels
