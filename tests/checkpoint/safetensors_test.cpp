#include "checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <random>

#include "base/error.h"
#include "base/files.h"

namespace fox::checkpoint {
namespace {

namespace fs = std::filesystem;

class Safetensors : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(dir_); }
  void TearDown() override { fs::remove_all(dir_); }

  // A file of a header's text and some bytes of data; the length field may lie.
  fs::path file(const std::string& header, size_t data_bytes, std::optional<uint64_t> claimed = {}) {
    const uint64_t length = claimed.value_or(header.size());
    std::string content;
    for (int i = 0; i < 8; ++i) content += static_cast<char>(length >> 8 * i);
    content += header + std::string(data_bytes, '\1');
    write_file_atomically(dir_ / "x.safetensors", content);
    return dir_ / "x.safetensors";
  }

  std::string complaint(const fs::path& path) {
    try {
      read_safetensors(path);
    } catch (const Error& error) {
      EXPECT_FALSE(std::string(error.what()).find('\n') != std::string::npos) << error.what();
      return error.what();
    }
    return "";
  }

  // What is said of a header (after the file's name) whose data has `data_bytes` bytes.
  std::string said(const std::string& header, size_t data_bytes) {
    const auto path = file(header, data_bytes);
    const auto message = complaint(path);
    EXPECT_TRUE(message.empty() || message.starts_with(path.string())) << message;
    return message.empty() ? "" : message.substr(path.string().size());
  }

  fs::path dir_ = fs::path(testing::TempDir()) / fmt::format("fox_safetensors_{}", getpid());
};

TEST_F(Safetensors, RoundTripsEveryDtypeAndShape) {
  NamedTensors tensors;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors[std::string("t.") + c10::toString(dtype)] = at::arange(6, at::kFloat).reshape({2, 3}).to(dtype);
  }
  tensors["scalar"] = at::scalar_tensor(3.5);
  tensors["empty"] = at::empty({0, 4});
  tensors["strided"] = at::arange(12, at::kFloat).reshape({3, 4}).t();
  const auto path = dir_ / "round.safetensors";
  write_safetensors(path, tensors, {{"format", "pt"}, {"note", "a \"quoted\" line\n"}});
  const auto back = read_safetensors(path);
  EXPECT_EQ(back.metadata, (Metadata{{"format", "pt"}, {"note", "a \"quoted\" line\n"}}));
  const auto header = read_safetensors_header(path);
  ASSERT_EQ(back.tensors.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto& got = back.tensors.at(name);
    EXPECT_EQ(got.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(got.sizes(), tensor.sizes()) << name;
    EXPECT_EQ(std::memcmp(got.data_ptr(), tensor.contiguous().data_ptr(), tensor.nbytes()), 0) << name;
    EXPECT_TRUE(header.tensors.at(name).is_meta());
    EXPECT_EQ(header.tensors.at(name).sizes(), tensor.sizes()) << name;
    EXPECT_EQ(header.tensors.at(name).scalar_type(), tensor.scalar_type()) << name;
  }
}

// The format's own document: 8 bytes of little-endian length, JSON, data; an example written out by hand.
TEST_F(Safetensors, ReadsAHandWrittenFile) {
  const auto path = file(
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"b":{"dtype":"I8","shape":[],"data_offsets":[0,1]}}  )",
      3);
  const auto back = read_safetensors(path);
  EXPECT_EQ(back.tensors.at("a").sizes(), (std::vector<int64_t>{2}));
  EXPECT_EQ(back.tensors.at("b").item<int>(), 1);
}

TEST_F(Safetensors, AHeaderLengthBeyondTheFileIsNotAllocated) {
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  for (const uint64_t claimed : {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{1} << 40, uint64_t{4}}) {
    const auto message = complaint(file("{}", 1, claimed));
    EXPECT_NE(message.find(fmt::format("claims a header of {} bytes but has only", claimed)), std::string::npos)
        << message;
  }
  getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 64 << 10);  // kilobytes
}

TEST_F(Safetensors, NamesEachKindOfDamage) {
  const auto one = [](const std::string& rest) { return "{\"w\":{" + rest + "}}"; };
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,9])"), 9),
            ": tensor 'w' needs 8 bytes for its shape and dtype, but its data_offsets hold 9");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 7),
            ": tensor 'w' runs to byte 8 of data, but the file has only 7");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 10),
            ": the last 2 bytes belong to no tensor");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8),
            ": tensor 'w' ends at byte 0 before it begins at 8");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8),
            ": tensor 'w' has sizes that are not whole numbers from 0");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8),
            ": tensor 'w' has sizes that are not whole numbers from 0");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0),
            ": tensor 'w' has a shape whose number of bytes overflows");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0])"), 0),
            ": tensor 'w' has a shape whose number of bytes overflows");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0])"), 0),
            ": tensor 'w' has a shape whose number of bytes overflows");
  EXPECT_EQ(said(one(R"("dtype":"F31","shape":[2],"data_offsets":[0,8])"), 8),
            ": tensor 'w' has the unknown dtype 'F31'");
  EXPECT_EQ(said(one(R"("dtype":7,"shape":[2],"data_offsets":[0,8])"), 8),
            ": tensor 'w' has a dtype that is not a string");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":8,"data_offsets":[0,8])"), 8),
            ": tensor 'w' has a shape that is not a list");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), 8),
            ": tensor 'w' has data_offsets that are not a pair");
  EXPECT_EQ(said(one(R"("dtype":"F32","shape":[2])"), 8), ": tensor 'w' has no data_offsets");
  EXPECT_EQ(said(R"({"w\n'x":3})", 8), ": tensor 'w\\n'x' is not described by a JSON object");
}

TEST_F(Safetensors, OverlapsHolesAndDuplicatesAreFound) {
  const auto two = [](int b0, int e0, int b1, int e1) {
    return fmt::format(
        R"({{"a":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}},"b":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}}})",
        e0 - b0, b0, e0, e1 - b1, b1, e1);
  };
  EXPECT_EQ(said(two(0, 4, 4, 8), 8), "");
  EXPECT_EQ(said(two(4, 8, 0, 4), 8), "");
  EXPECT_EQ(said(two(0, 5, 4, 8), 8), ": tensor 'b' overlaps the one before it");
  EXPECT_EQ(said(two(0, 8, 0, 8), 8), ": tensor 'b' overlaps the one before it");
  EXPECT_EQ(said(two(0, 3, 4, 8), 8), ": 1 bytes before tensor 'b' belong to no tensor");
  EXPECT_EQ(said(two(1, 4, 4, 8), 8), ": 1 bytes before tensor 'a' belong to no tensor");
  EXPECT_EQ(
      said(
          R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
          0),
      ": tensor 'a' appears twice in the header");
}

TEST_F(Safetensors, HeadersThatAreNotWhatTheyShouldBe) {
  EXPECT_EQ(said("[]", 0), ": the header is not a JSON object");
  EXPECT_EQ(said("{\"a\":", 0), ": the header is not JSON (byte 6)");
  EXPECT_EQ(said("", 0), ": the header is not JSON (byte 1)");
  EXPECT_EQ(said(R"({"__metadata__":{"a":1}})", 0), ": __metadata__ 'a' is not a string");
  EXPECT_EQ(said(R"({"__metadata__":[]})", 0), ": __metadata__ is not an object");
  EXPECT_EQ(said("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", 0),
            ": the header is nested too deeply");
  EXPECT_NE(said("{\"a\xff\":1}", 0).find("not JSON"), std::string::npos);
  write_file_atomically(dir_ / "short", "1234567");
  EXPECT_NE(complaint(dir_ / "short").find("it has only 7 bytes"), std::string::npos);
  EXPECT_NE(complaint(dir_ / "absent").find("cannot read"), std::string::npos);
  EXPECT_NE(complaint(dir_).find("is not a file"), std::string::npos);
}

// A valid file cut at any length, or with any few bytes changed, is read or refused; nothing else.
TEST_F(Safetensors, NoMutationOfAFileDoesMoreThanThrow) {
  write_safetensors(dir_ / "good",
                    {{"a.weight", at::ones({3, 5})}, {"b", at::zeros({7}, at::kLong)}, {"c", at::empty({0})}},
                    {{"format", "pt"}});
  const std::string good = read_file(dir_ / "good");
  std::mt19937 random(7);
  int refused = 0;
  const auto attempt = [&](const std::string& content) {
    std::ofstream(dir_ / "bad", std::ios::binary) << content;  // no fsync: two thousand would take seconds
    try {
      read_safetensors(dir_ / "bad");
    } catch (const Error&) {
      ++refused;
    }
  };
  for (size_t length = 0; length < good.size(); length += 3) attempt(good.substr(0, length));
  EXPECT_EQ(refused, static_cast<int>((good.size() + 2) / 3));  // every cut file is refused
  const std::string interesting = "0123456789-\"{}[],:eE.\\\xff ";
  for (int i = 0; i < 1500; ++i) {
    std::string content = good;
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
      const size_t at = random() % (random() % 2 ? content.size() : 300);
      if (random() % 4 == 0)
        content.insert(at, 1, interesting[random() % interesting.size()]);
      else if (random() % 4 == 0)
        content.erase(at, 1 + random() % 8);
      else
        content[at] = random() % 2 ? static_cast<char>(random()) : interesting[random() % interesting.size()];
    }
    attempt(content);
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace fox::checkpoint
