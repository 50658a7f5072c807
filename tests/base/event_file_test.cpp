#include "base/event_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/files.h"

namespace fox {
namespace {

namespace fs = std::filesystem;
using namespace std::string_view_literals;

class EventFileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("event_file_test-" + std::to_string(::getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path file() const {
    for (const auto& entry : fs::directory_iterator(folder_)) return entry.path();
    return {};
  }

  fs::path folder_;
};

// CRC-32C bit by bit from its definition (RFC 3720, B.4), unlike the table under test.
uint32_t masked_crc(std::string_view bytes) {
  uint32_t crc = 0xFFFFFFFF;
  for (const char c : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool carry = (crc ^ (static_cast<uint8_t>(c) >> bit)) & 1;
      crc = (crc >> 1) ^ (carry ? 0x82F63B78 : 0);
    }
  }
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8;
}

// The events of a file, every checksum checked.
std::vector<std::string> events_of(const std::string& content) {
  std::vector<std::string> events;
  for (size_t at = 0; at < content.size();) {
    uint64_t length = 0;
    uint32_t crc = 0;
    std::memcpy(&length, &content[at], 8);
    std::memcpy(&crc, &content[at + 8], 4);
    EXPECT_EQ(crc, masked_crc(content.substr(at, 8)));
    const std::string event = content.substr(at + 12, length);
    std::memcpy(&crc, &content[at + 12 + length], 4);
    EXPECT_EQ(crc, masked_crc(event));
    events.push_back(event);
    at += 16 + length;
  }
  return events;
}

TEST(Crc32c, TestVectorOfRfc3720) {
  // CRC-32C("123456789") = E3069283.
  const uint32_t crc = 0xE3069283;
  EXPECT_EQ(masked_crc("123456789"), ((crc >> 15) | (crc << 17)) + 0xA282EAD8);
}

TEST_F(EventFileTest, WritesTheBytesThatTensorBoardReads) {
  EventFile(folder_, 0).scalar(300, "train/loss", 2.5);
  const auto events = events_of(read_file(file()));
  ASSERT_EQ(events.size(), 2u);
  // Field 1 (double) wall time, field 2 (varint) step, then the payload; tags are field * 8 + wire type.
  EXPECT_EQ(events[0][0], '\x09');
  EXPECT_EQ(events[0].substr(9),
            "\x10\x00\x1a\x0d"
            "brain.Event:2"sv);
  EXPECT_EQ(events[1].substr(9),
            "\x10\xac\x02\x2a\x13"
            "\x0a\x11"
            "\x0a\x0a"
            "train/loss"
            "\x15\x00\x00\x20\x40"sv);  // 2.5f
}

TEST_F(EventFileTest, WritesTextForTheTextPlugin) {
  EventFile(folder_, 0).text(1, "sample", "In the beginning");
  const auto events = events_of(read_file(file()));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_NE(events[1].find("\x42\x16"
                           "\x08\x07\x12\x00\x42\x10"
                           "In the beginning"sv),
            std::string::npos);
  EXPECT_NE(events[1].find("\x4a\x08\x0a\x06\x0a\x04text"sv), std::string::npos);
}

TEST_F(EventFileTest, ContinuesOneFileAndCutsLaterSteps) {
  {
    EventFile events(folder_, 0);
    for (int step = 1; step <= 5; ++step) events.scalar(step, "loss", step);
  }
  const auto before = events_of(read_file(file()));
  { EventFile(folder_, 3).scalar(4, "loss", 40); }
  const auto after = events_of(read_file(file()));
  ASSERT_EQ(after.size(), 5u);  // the version, steps 1 to 3 as they were, the new step 4
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(after[i], before[i]);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(EventFileTest, DropsWhatACrashCutShort) {
  {
    EventFile events(folder_, 0);
    events.scalar(1, "loss", 1);
    events.scalar(2, "loss", 2);
  }
  const std::string whole = read_file(file());
  const size_t one_left = 16 * 2 + events_of(whole)[0].size() + events_of(whole)[1].size();
  for (size_t size = one_left; size < whole.size(); ++size) {
    std::ofstream(file(), std::ios::binary) << whole.substr(0, size);
    EventFile(folder_, 100);
    ASSERT_EQ(read_file(file()), whole.substr(0, one_left)) << size;
  }
}

TEST_F(EventFileTest, StartsAgainFromAnEmptyFile) {
  { EventFile(folder_, 0); }
  std::ofstream(file(), std::ios::binary | std::ios::trunc).close();
  { EventFile(folder_, 0); }
  EXPECT_EQ(events_of(read_file(file())).size(), 1u);
}

TEST_F(EventFileTest, SaysWhereItCannotWrite) {
  std::ofstream(folder_.string()) << "a file";
  EXPECT_THROW(EventFile(folder_, 0), Error);
}

}  // namespace
}  // namespace fox
