#include "base/progress.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <limits>

namespace fox {
namespace {

TEST(Human, Counts) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(12), "12");
  EXPECT_EQ(human_count(3.14159), "3.14");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(999.9), "1.00K");
  EXPECT_EQ(human_count(1000), "1.00K");
  EXPECT_EQ(human_count(24'560), "24.6K");
  EXPECT_EQ(human_count(1'234'567), "1.23M");
  EXPECT_EQ(human_count(999'950'000), "1.00B");
  EXPECT_EQ(human_count(48e9), "48.0B");
}

TEST(Human, Times) {
  EXPECT_EQ(human_time(0), "0.0s");
  EXPECT_EQ(human_time(12.34), "12.3s");
  EXPECT_EQ(human_time(59.97), "1m 00s");
  EXPECT_EQ(human_time(185), "3m 05s");
  EXPECT_EQ(human_time(3599.7), "1h 00m");
  EXPECT_EQ(human_time(3725), "1h 02m");
  EXPECT_EQ(human_time(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(human_time(std::nan("")), "?");
}

TEST(Human, Bytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.0 KiB");
  EXPECT_EQ(human_bytes(1.2 * (1 << 30)), "1.2 GiB");
  EXPECT_EQ(human_bytes(1024.0 * 1024 - 1), "1.0 MiB");
}

// A test's standard error is no terminal once it is captured: plain lines, no control characters.
TEST(Progress, PrintsPlainLinesAwayFromATerminal) {
  testing::internal::CaptureStderr();
  {
    Progress progress("train", 1000, "tokens", 0);
    progress.update(500, "loss 3.21");
    ::usleep(2000);
    progress.update(750, "loss 3.10");
    progress.message("checkpoint saved");
    progress.finish();
    progress.finish();
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\033'), std::string::npos);
  EXPECT_NE(text.find("train 50% 500/1.00K tokens, loss 3.21\n"), std::string::npos) << text;
  EXPECT_NE(text.find("checkpoint saved\n"), std::string::npos) << text;
  EXPECT_NE(text.find("tokens/s, "), std::string::npos) << text;
  EXPECT_NE(text.find(" left, loss 3.10\n"), std::string::npos) << text;
  EXPECT_NE(text.find("took "), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4) << text;
}

TEST(Progress, PlainLinesKeepTheirInterval) {
  testing::internal::CaptureStderr();
  {
    Progress progress("read", 100, "files", 3600);
    for (int i = 0; i <= 100; ++i) progress.update(i);
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_NE(text.find("read 100% 100/100 files"), std::string::npos) << text;
}

TEST(Progress, WorkThatNeverStartedPrintsNothing) {
  testing::internal::CaptureStderr();
  { Progress progress("read", 100, "files", 0); }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace fox
