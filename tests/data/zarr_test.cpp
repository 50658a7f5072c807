#include "data/zarr.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "base/error.h"
#include "base/files.h"
#include "support/temporary_folder.h"

namespace fox::data {
namespace {

using nlohmann::json;

const json kMeta = {{"zarr_format", 2},      {"shape", {100, 50}}, {"chunks", {10, 20}}, {"dtype", "<u2"},
                    {"compressor", nullptr}, {"fill_value", 0},    {"order", "C"},       {"filters", nullptr}};

std::string complaint(const std::function<void(json&)>& change) {
  json meta = kMeta;
  change(meta);
  try {
    ZarrMeta::parse(meta.dump(), "x/.zarray");
  } catch (const Error& error) {
    EXPECT_FALSE(error.hint().empty());
    return error.what();
  }
  return "no error";
}

TEST(ZarrMeta, ReadsWhatItWrites) {
  json meta = kMeta;
  for (const json& compressor :
       {json(nullptr), json{{"id", "blosc"}, {"cname", "lz4"}, {"clevel", 5}, {"shuffle", 1}, {"blocksize", 0}}}) {
    meta["compressor"] = compressor;
    const ZarrMeta parsed = ZarrMeta::parse(meta.dump(), "x");
    EXPECT_EQ(json::parse(parsed.to_json()), meta);
    EXPECT_EQ(parsed.chunk_bytes(), 400);
    EXPECT_EQ(parsed.grid(1), 3);
  }
}

TEST(ZarrMeta, EveryProblemNamesItsKey) {
  const auto with = [](const char* key, json value) { return complaint([&](json& meta) { meta[key] = value; }); };
  EXPECT_EQ(with("zarr_format", 3), "x/.zarray: 'zarr_format' must be 2, not 3");
  EXPECT_EQ(with("order", "F"), "x/.zarray: 'order' must be \"C\", not \"F\"");
  EXPECT_EQ(complaint([](json& meta) { meta.erase("order"); }), "x/.zarray: 'order' must be \"C\", it is missing");
  EXPECT_EQ(with("filters", {{{"id", "delta"}}}), "x/.zarray: 'filters' must be null, not [{\"id\":\"delta\"}]");
  EXPECT_EQ(with("compressor", {{"id", "gzip"}}),
            "x/.zarray: 'compressor' must be null or Blosc's, not {\"id\":\"gzip\"}");
  EXPECT_EQ(with("chunks", {10}), "x/.zarray: 'chunks' must have 2 numbers, as shape has, not [10]");
  EXPECT_EQ(with("dimension_separator", "-"), "x/.zarray: 'dimension_separator' must be \".\" or \"/\", not \"-\"");
  EXPECT_EQ(with("chunks", {1 << 20, 1 << 20}),
            "x/.zarray: 'chunks' must stay below 2147483631 bytes a chunk, not [1048576,1048576]");
  EXPECT_EQ(with("shape", {1LL << 40, 1LL << 40}).substr(0, 62),
            "x/.zarray: 'shape' has more elements than a disk can hold, not");
  for (const json& shape : {json(5), json::array(), json::array({-1, 2}), json::array({1.5, 2}), json::array({"1", 2}),
                            json::array({18446744073709551615u, 2}), json(std::vector<int>(33, 1))}) {
    EXPECT_NE(with("shape", shape).find("'shape' must be a list of 1 to 32 whole numbers"), std::string::npos) << shape;
  }
  EXPECT_NE(with("chunks", {0, 20}).find("'chunks' must be a list"), std::string::npos);
  for (const json& dtype :
       {json(">u2"), json("u2"), json("<U2"), json("<u3"), json("<u16"), json(2), json({{"x", "<u2"}})}) {
    EXPECT_NE(with("dtype", dtype).find("'dtype' must be a little-endian number type"), std::string::npos) << dtype;
  }
}

// The bytes of .zarray may be anything: an error, or a description whose sizes can be computed with.
TEST(ZarrMeta, DamagedMetadataIsRefusedOrSane) {
  const std::string text = kMeta.dump();
  std::mt19937 random(6);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = text;
    for (size_t n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged.erase(at, random() % 8);
          break;
        default:
          damaged[at] = "0123456789-.e[]{},\""[random() % 19];
      }
      if (damaged.empty()) break;
    }
    try {
      const ZarrMeta meta = ZarrMeta::parse(damaged, "x");
      EXPECT_GT(meta.chunk_bytes(), 0);
      EXPECT_LT(meta.chunk_bytes(), int64_t{1} << 31);
      for (size_t d = 0; d < meta.shape.size(); ++d) EXPECT_GE(meta.grid(d), 0);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
  EXPECT_LT(refused, 20000);
}

TEST(ZarrArray, ReadsBackWhatWasWrittenInPieces) {
  const test::TemporaryFolder folder;
  std::vector<int64_t> values(1234);
  std::iota(values.begin(), values.end(), -17);
  ZarrWriter writer(folder.path() / "a", "<i8", 100);
  size_t done = 0;
  for (const int64_t count : {1, 0, 98, 1, 100, 350, 684}) {
    writer.append(values.data() + done, count);
    done += static_cast<size_t>(count);
  }
  ASSERT_EQ(done, values.size());
  EXPECT_THROW(ZarrArray(folder.path() / "a", "<i8"), Error) << "not finished";
  writer.finish();
  const ZarrArray array(folder.path() / "a", "<i8");
  const int64_t first = 0, count = 1234;
  std::vector<int64_t> read(values.size());
  array.read(std::span(&first, 1), std::span(&count, 1), read.data());
  EXPECT_EQ(read, values);
  EXPECT_THROW(ZarrArray(folder.path() / "a", "<u8"), Error);
}

TEST(ZarrArray, EmptyArrayHasNoChunks) {
  const test::TemporaryFolder folder;
  ZarrWriter(folder.path() / "a", "<u2", 100).finish();
  const ZarrArray array(folder.path() / "a", "<u2");
  EXPECT_EQ(array.meta().shape, std::vector<int64_t>{0});
  const int64_t zero = 0;
  array.read(std::span(&zero, 1), std::span(&zero, 1), nullptr);
}

/// A list of u2 in one chunk of several of Blosc's blocks, without checksums as foreign stores are.
class ChunkOfBlocks : public ::testing::Test {
 protected:
  static constexpr int64_t kSize = 200'000;

  void write(uint32_t most) {
    std::mt19937 random(7);
    for (auto& value : values_) value = static_cast<uint16_t>(random() % most);
    ZarrWriter writer(dir_, "<u2", kSize);
    writer.append(values_.data(), kSize);
    writer.finish();
    std::ofstream(dir_ / ".zattrs") << "{}";
  }
  void write_chunk(const std::string& stored) const { std::ofstream(dir_ / "0", std::ios::binary) << stored; }
  std::vector<uint16_t> read(int64_t first, int64_t count) const {
    std::vector<uint16_t> out(static_cast<size_t>(count));
    ZarrArray(dir_, "<u2").read(std::span(&first, 1), std::span(&count, 1), out.data());
    return out;
  }
  void expect_parts(const std::string& what) const {
    std::mt19937 random(8);
    for (int i = 0; i < 100; ++i) {
      const int64_t count = 1 + random() % (kSize / 4), first = random() % (kSize - count + 1);
      EXPECT_EQ(read(first, count), std::vector(values_.begin() + first, values_.begin() + first + count)) << what;
    }
    EXPECT_EQ(read(0, kSize), values_) << what;
  }

  test::TemporaryFolder folder_;
  std::filesystem::path dir_ = folder_.path() / "a";
  std::vector<uint16_t> values_ = std::vector<uint16_t>(kSize);
};

TEST_F(ChunkOfBlocks, PartsAreReadFromTheirBlocksAlone) {
  write(65536);
  EXPECT_GT(read_file(dir_ / "0").size(), size_t{2 * kSize}) << "cannot be compressed: stored as it is";
  expect_parts("stored");
  write(50);
  EXPECT_LT(read_file(dir_ / "0").size(), size_t{2 * kSize});
  expect_parts("compressed");
}

// c-blosc's threads write blocks as they are done: here the last one comes first.
TEST_F(ChunkOfBlocks, BlocksMayLieInAnyOrder) {
  write(50);
  const std::string stored = read_file(dir_ / "0");
  const auto number = [&](size_t at) {
    uint32_t value;
    std::memcpy(&value, stored.data() + at, 4);
    return value;
  };
  const size_t blocks = (2 * kSize + number(8) - 1) / number(8), table = 16, head = table + 4 * blocks;
  ASSERT_GT(blocks, 4u);
  std::string turned = stored.substr(0, head);
  for (size_t b = blocks; b-- > 0;) {
    const uint32_t start = number(table + 4 * b);
    const size_t end = b + 1 < blocks ? number(table + 4 * b + 4) : stored.size();
    const auto place = static_cast<uint32_t>(turned.size());
    std::memcpy(turned.data() + table + 4 * b, &place, 4);
    turned += stored.substr(start, end - start);
  }
  ASSERT_EQ(turned.size(), stored.size());
  ASSERT_NE(turned, stored);
  write_chunk(turned);
  expect_parts("turned");
}

// Blosc's own header and decoder must not be led astray, whether all of a chunk is read or some of it.
TEST_F(ChunkOfBlocks, DamagedChunksWithoutChecksumsAreRefusedOrRead) {
  for (const uint32_t most : {50, 65536}) {
    write(most);
    const std::string stored = read_file(dir_ / "0");
    std::mt19937 random(most);
    int refused = 0;
    for (int i = 0; i < 1500; ++i) {
      std::string damaged = stored;
      for (size_t n = 1 + random() % 4; n > 0; --n) {
        damaged[i % 2 == 0 ? random() % 48 : random() % damaged.size()] = static_cast<char>(random());
      }
      if (i % 5 == 0) damaged.resize(random() % damaged.size());
      write_chunk(damaged);
      try {
        i % 3 == 0 ? read(0, kSize) : read(random() % 150'000, 1 + random() % 50'000);
      } catch (const Error& error) {
        ++refused;
        EXPECT_NE(std::string(error.what()).find((dir_ / "0").string()), std::string::npos);
      }
    }
    EXPECT_GT(refused, 500);
  }
}

TEST(ZarrArray, ChecksumsThatAreNoneAreNamed) {
  const test::TemporaryFolder folder;
  const auto dir = folder.path() / "a";
  ZarrWriter(dir, "<u2", 100).finish();
  for (const char* sums : {"{\"1\": \"01234567890123456789012345678901\"}", "{\"0\": \"0123\"}", "{\"0\": 5}",
                           "{\"0\": null}", "{\"x\": \"01234567890123456789012345678901\"}"}) {
    std::ofstream(dir / ".zattrs") << "{\"chunk_xxh3_128\": " << sums << "}";
    try {
      ZarrArray(dir, "<u2");
      ADD_FAILURE() << sums;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(".zattrs: 'chunk_xxh3_128' must be"), std::string::npos) << error.what();
    }
  }
  std::ofstream(dir / ".zattrs") << R"({"chunk_xxh3_128": {}, "a": {"0": "x", "b": [1]}, "0": "y"})";
  EXPECT_NO_THROW(ZarrArray(dir, "<u2"));
}

}  // namespace
}  // namespace fox::data
