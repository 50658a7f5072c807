#include "ops/device.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace fox::ops {
namespace {

std::string error_of(const std::string& name) {
  try {
    open_device(name);
  } catch (const Error& error) {
    EXPECT_FALSE(error.hint().empty());
    return error.what();
  }
  return "";
}

TEST(Device, NamesAreChecked) {
  EXPECT_EQ(open_device("cpu"), at::Device(at::kCPU));
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999", "CPU", ""}) {
    EXPECT_EQ(error_of(name), "unknown device '" + std::string(name) + "'");
  }
}

// The test binary stands in the build folder: with a CUDA backend beside it the machine decides, without one the build.
TEST(Device, CudaThatIsNotThereIsOneClearError) {
  const std::string what = error_of("cuda:127");
  EXPECT_TRUE(what == "this build of fox has no CUDA backend" || what.find("this machine has") != std::string::npos)
      << what;
}

}  // namespace
}  // namespace fox::ops
