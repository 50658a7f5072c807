#include "base/protobuf_fields.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace fox {
namespace {

using Fields = std::vector<std::tuple<int, uint64_t, std::string>>;

Fields fields_of(std::string_view message, bool whole = true) {
  Fields fields;
  EXPECT_EQ(read_protobuf(message,
                          [&](const ProtobufField& field) {
                            fields.emplace_back(field.number, field.value, std::string(field.bytes));
                          }),
            whole);
  return fields;
}

// The examples of https://protobuf.dev/programming-guides/encoding.
TEST(Protobuf, ReadsTheExamplesOfItsDescription) {
  EXPECT_EQ(fields_of(""), Fields{});
  EXPECT_EQ(fields_of("\x08\x96\x01"), (Fields{{1, 150, ""}}));
  EXPECT_EQ(fields_of("\x12\x07testing"), (Fields{{2, 0, "testing"}}));
  EXPECT_EQ(fields_of("\x1A\x03\x08\x96\x01"), (Fields{{3, 0, "\x08\x96\x01"}}));
  EXPECT_EQ(fields_of("\x22\x05hello\x28\x01\x28\x02\x28\x03"),
            (Fields{{4, 0, "hello"}, {5, 1, ""}, {5, 2, ""}, {5, 3, ""}}));
}

TEST(Protobuf, ReadsNumbersOfFixedSize) {
  EXPECT_EQ(fields_of(std::string("\x0D\x00\x00\x80\x3F", 5)), (Fields{{1, 0x3F800000, ""}}));  // 1.0f
  EXPECT_EQ(fields_of(std::string("\x09\x01\x02\x03\x04\x05\x06\x07\x08", 9)), (Fields{{1, 0x0807060504030201, ""}}));
}

TEST(Protobuf, CutAndForeignBytesAreNoMessage) {
  fields_of("\x08", false);                      // no number
  fields_of("\x08\x96", false);                  // half of one
  fields_of("\x12\x07test", false);              // a string that is cut
  fields_of("\x12\xFF\xFF\xFF\xFF\x0F", false);  // of four gigabytes
  fields_of("\x0D\x01", false);
  fields_of("\x0B\x0C", false);  // a group
  fields_of(std::string(1, '\0'), false);
  fields_of("{\"model\": 1}", false);
}

TEST(Protobuf, AnyBytesAreReadOrRefused) {
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string message(random() % 40, '\0');
    for (char& byte : message) byte = static_cast<char>(random() % (i % 2 == 0 ? 256 : 32));
    read_protobuf(message, [&](const ProtobufField& field) {
      EXPECT_GT(field.number, 0);
      EXPECT_LE(field.bytes.size(), message.size());
    });
  }
}

}  // namespace
}  // namespace fox
