#include "data/longcrawl64.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "data/token_store.h"
#include "support/longcrawl64_store.h"
#include "support/temporary_folder.h"

namespace fox::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int32_t kStart = 50256;

std::string complaint(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_FALSE(error.hint().empty());
    return error.what();
  }
  return "no error";
}

class LongCrawl64Test : public ::testing::Test {
 protected:
  test::TemporaryFolder folder_;
  fs::path dir_ = folder_.path() / "train.zarr";
};

// The published layout itself: chunks of 2048 x 2048, the last ones of both dimensions padded.
TEST_F(LongCrawl64Test, ReadsThePublishedLayout) {
  const test::LongCrawl64Store store(dir_, 2050, 4096 + 1024, 2048);
  ASSERT_TRUE(is_longcrawl64(dir_));
  ASSERT_TRUE(fs::exists(dir_ / "1.2"));
  const LongCrawl64 data(dir_);
  EXPECT_EQ(data.num_documents(), 2050);
  EXPECT_EQ(data.document_tokens(), 5120);
  std::vector<uint16_t> out(4 * 3000);
  data.read(2046, 4, 2000, 3000, out.data());
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t i = 0; i < 3000; ++i) ASSERT_EQ(out[row * 3000 + i], store.token(2046 + row, 2000 + i));
  }
}

// The published reader, written down as its description says it.
TEST_F(LongCrawl64Test, OrderIsThePublishedOne) {
  const int64_t D = 11, width = 32, S = 8, B = 3, G = 3;  // 11 documents are 3 batches of 3
  const test::LongCrawl64Store store(dir_, D, width, 4);
  const LongCrawl64Stream stream(dir_, S, B, kStart, 50257);
  ASSERT_EQ(stream.contexts_per_epoch(), B * G * (width / S));
  for (int64_t b = 0; b < G * (width / S); ++b) {
    const Batch batch = stream.get(b * B, B);
    ASSERT_EQ(batch.labels_BT.sizes(), (std::vector<int64_t>{B, S}));
    const int64_t column = b / G, row = b % G;
    for (int64_t i = 0; i < B; ++i) {
      for (int64_t t = 0; t < S; ++t) {
        const int64_t label = store.token(row * B + i, column * S + t);
        EXPECT_EQ(batch.labels_BT[i][t].item<int64_t>(), label) << b << " " << i << " " << t;
        const int64_t input = t == 0 ? kStart : store.token(row * B + i, column * S + t - 1);
        EXPECT_EQ(batch.ids_BT[i][t].item<int64_t>(), input);
      }
    }
  }
}

// Case 30: entered anywhere, cut into pieces of any size, it is the same order.
TEST_F(LongCrawl64Test, CanBeEnteredAnywhere) {
  const test::LongCrawl64Store store(dir_, 11, 32, 4);
  const LongCrawl64Stream stream(dir_, 8, 3, kStart, 50257);
  const Batch all = stream.get(0, 36);
  for (const int64_t size : {1, 2, 5, 9, 12, 35}) {
    for (int64_t first = 0; first + size <= 36; first += size) {
      const Batch part = stream.get(first, size);
      EXPECT_TRUE(at::equal(part.ids_BT, all.ids_BT.slice(0, first, first + size)));
      EXPECT_TRUE(at::equal(part.labels_BT, all.labels_BT.slice(0, first, first + size)));
    }
  }
}

TEST_F(LongCrawl64Test, IsATokenStoreToReadFrom) {
  const test::LongCrawl64Store made(dir_, 5, 32, 4);
  const TokenStore store = TokenStore::open(dir_);
  EXPECT_EQ(store.num_tokens(), 160);
  EXPECT_EQ(store.num_documents(), 5);
  std::vector<int64_t> offsets(2);
  store.read_doc_offsets(1, offsets);
  EXPECT_EQ(offsets[1], 64);
  EXPECT_EQ(store.tokenizer_fingerprint(), Tokenizer::gpt2_json().fingerprint());
  std::vector<int32_t> out(100);
  store.read(30, out);
  for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(out[i], made.token((30 + i) / 32, (30 + i) % 32));
  EXPECT_THROW(store.read(100, out), std::out_of_range);
}

TEST_F(LongCrawl64Test, WrongStoresAreNamed) {
  const auto fresh = [&] {
    fs::remove_all(dir_);
    test::LongCrawl64Store(dir_, 11, 32, 4);
  };
  const auto reading = [&] { return complaint([&] { LongCrawl64Stream(dir_, 8, 3, kStart, 50257).get(0, 36); }); };
  const auto with = [&](const char* key, const json& value) {
    fresh();
    json meta = json::parse(read_file(dir_ / ".zarray"));
    meta[key] = value;
    std::ofstream(dir_ / ".zarray") << meta;
    return reading();
  };
  fresh();
  EXPECT_EQ(reading(), "no error");
  const std::string file = (dir_ / ".zarray").string();
  EXPECT_EQ(with("dtype", "<u4"), file + ": 'dtype' must be \"<u2\", not \"<u4\"");
  EXPECT_EQ(with("order", "F"), file + ": 'order' must be \"C\", not \"F\"");
  EXPECT_EQ(with("zarr_format", 3), file + ": 'zarr_format' must be 2, not 3");
  EXPECT_NE(with("chunks", {8, 8}).find("but a chunk has 128"), std::string::npos);
  fresh();
  std::ofstream(dir_ / ".zarray") << R"({"zarr_format": 2, "shape": [352], "chunks": [16], "dtype": "<u2", "order": "C",
    "compressor": null, "filters": null, "fill_value": 0})";
  EXPECT_EQ(reading(), file + ": 'shape' must have two dimensions, not 1");

  // A missing chunk means zeros to zarr; here it means that the download is not complete.
  for (const char* chunk : {"0.0", "2.7", "1.3"}) {
    fresh();
    const std::string stored = read_file(dir_ / chunk);
    fs::remove(dir_ / chunk);
    EXPECT_EQ(reading(), (dir_ / chunk).string() + " is missing");
    for (const size_t size : {size_t{0}, size_t{15}, stored.size() - 1}) {
      std::ofstream(dir_ / chunk, std::ios::binary) << stored.substr(0, size);
      EXPECT_NE(reading().find((dir_ / chunk).string()), std::string::npos) << reading();
    }
  }
}

// 11 documents of 32 tokens in chunks of 4 by 4; batches of 3, so documents 9 and 10 are not read.
TEST_F(LongCrawl64Test, MissingChunksAreFoundBeforeTheirTurn) {
  const test::LongCrawl64Store made(dir_, 11, 32, 4);
  const LongCrawl64Stream stream(dir_, 8, 3, kStart, 50257);
  const auto checking = [&](int64_t contexts) { return complaint([&] { stream.check_complete(contexts); }); };
  const std::string missing = (dir_ / "1.3").string() + " is missing";
  EXPECT_EQ(checking(36), "no error");
  fs::remove(dir_ / "1.3");  // documents 4 to 7, tokens 12 to 15: in the second column of contexts, from its fifth on
  EXPECT_EQ(checking(0), "no error");
  EXPECT_EQ(checking(9 + 4), "no error");
  EXPECT_EQ(checking(9 + 5), missing);
  EXPECT_EQ(checking(2 * 9), missing);
  const TokenStore store = TokenStore::open(dir_);
  EXPECT_EQ(complaint([&] { store.check_complete(4 * 32); }), "no error");
  EXPECT_EQ(complaint([&] { store.check_complete(4 * 32 + 1); }), missing);
}

TEST_F(LongCrawl64Test, WrongShapesAndSizesSayByHowMuch) {
  const test::LongCrawl64Store store(dir_, 11, 32, 4);
  const std::string name = dir_.string();
  const auto opening = [&](int64_t context, int64_t batch) {
    return complaint([&] { LongCrawl64Stream(dir_, context, batch, kStart, 50257); });
  };
  EXPECT_EQ(opening(7, 1), name + ": a context of 7 tokens does not divide its documents of 32");
  EXPECT_EQ(opening(64, 1), name + ": a context of 64 tokens does not divide its documents of 32");
  EXPECT_EQ(opening(8, 13), name + " has 11 documents, 2 fewer than one batch of 13 contexts");
  EXPECT_EQ(complaint([&] { LongCrawl64Stream(dir_, 8, 3, kStart, 50257).get(30, 7); }),
            name + " holds 36 contexts of 8 tokens, not 37");
  EXPECT_NE(
      complaint([&] { LongCrawl64Stream(dir_, 8, 3, kStart, 100).get(0, 36); }).find("but the vocabulary has 100 ids"),
      std::string::npos);
}

}  // namespace
}  // namespace fox::data
