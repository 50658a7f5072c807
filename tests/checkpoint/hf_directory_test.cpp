#include "checkpoint/hf_directory.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"

namespace fox::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class HfDirectory : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(dir_); }
  void TearDown() override { fs::remove_all(dir_); }

  template <typename F>
  std::string complaint(F&& f) {
    try {
      f();
    } catch (const Error& error) {
      std::string message = error.what();
      if (const auto at = message.find(dir_.string()); at != std::string::npos)
        message.replace(at, dir_.string().size(), "DIR");
      return message;
    }
    return "";
  }

  void write_index(const json& weight_map) {
    write_file_atomically(dir_ / "model.safetensors.index.json",
                          json{{"metadata", {{"total_size", 0}}}, {"weight_map", weight_map}}.dump());
  }

  fs::path dir_ = fs::path(testing::TempDir()) / fmt::format("fox_hf_{}", getpid());
};

TEST_F(HfDirectory, ReadsConfigurationsWithPythonsInfinity) {
  write_file_atomically(
      dir_ / "config.json",
      R"({"time_step_limit": [0.0, Infinity], "low": -Infinity, "none": NaN, "text": "a \"NaN, Infinity"})");
  const auto config = read_config_json(dir_);
  EXPECT_GT(config["time_step_limit"][1].get<double>(), 1e308);
  EXPECT_LT(config["low"].get<double>(), -1e308);
  EXPECT_TRUE(config["none"].is_null());
  EXPECT_EQ(config["text"], "a \"NaN, Infinity");
}

TEST_F(HfDirectory, NamesAMissingOrDamagedConfiguration) {
  EXPECT_NE(complaint([&] { read_config_json(dir_); }).find("DIR/config.json"), std::string::npos);
  write_file_atomically(dir_ / "config.json", R"({"a": )");
  EXPECT_EQ(complaint([&] { read_config_json(dir_); }), "DIR/config.json is not JSON (byte 7)");
}

TEST_F(HfDirectory, ReadsOneFileOrShards) {
  EXPECT_EQ(complaint([&] { read_weights(dir_); }), "DIR has no weights");
  write_safetensors(dir_ / "model-00001-of-00002.safetensors", {{"a", at::full({2}, 1.f)}, {"b", at::full({3}, 2.f)}});
  write_safetensors(dir_ / "model-00002-of-00002.safetensors", {{"c", at::full({4}, 3.f)}});
  write_index({{"a", "model-00001-of-00002.safetensors"},
               {"b", "model-00001-of-00002.safetensors"},
               {"c", "model-00002-of-00002.safetensors"}});
  const auto sharded = read_weights(dir_);
  ASSERT_EQ(sharded.size(), 3u);
  EXPECT_EQ(sharded.at("b").sum().item<float>(), 6);
  EXPECT_EQ(sharded.at("c").sum().item<float>(), 12);
  write_safetensors(dir_ / "model.safetensors", {{"d", at::zeros({1})}});
  EXPECT_EQ(read_weights(dir_).size(), 1u);  // the whole file is preferred, as transformers does
}

TEST_F(HfDirectory, EveryDisagreementOfAnIndexIsListed) {
  write_safetensors(dir_ / "s1", {{"a", at::zeros({2})}, {"extra", at::zeros({2})}});
  write_safetensors(dir_ / "s2", {{"b", at::zeros({2})}});
  write_index({{"a", "s1"}, {"b", "s1"}, {"c", "s2"}});
  EXPECT_EQ(complaint([&] { read_weights(dir_); }),
            "DIR/model.safetensors.index.json does not agree with its shards: 'extra' in s1 is not listed there, "
            "'b' in s2 is not listed there, 'b' is not in s1, 'c' is not in s2");
  write_index({{"a", "s3"}});
  EXPECT_NE(complaint([&] { read_weights(dir_); }).find("DIR/s3"), std::string::npos);
  write_index({{"a", "../s1"}});
  EXPECT_NE(complaint([&] { read_weights(dir_); }).find("not a file of this folder"), std::string::npos);
  write_file_atomically(dir_ / "model.safetensors.index.json", "[]");
  EXPECT_EQ(complaint([&] { read_weights(dir_); }), "DIR/model.safetensors.index.json has no weight_map");
}

TEST_F(HfDirectory, LoadingListsAllThatDoesNotFitAndChangesNothing) {
  const NamedTensors model{{"a", at::zeros({2, 3})}, {"b", at::zeros({4})}, {"c", at::zeros({1})}};
  const NamedTensors file{{"a", at::ones({3, 2})}, {"c", at::ones({1})}, {"x", at::ones({})}};
  EXPECT_EQ(
      complaint([&] { load_into(file, model, "w.safetensors"); }),
      "w.safetensors does not fit the model: 'a' is 3x2 instead of 2x3, 'b' is missing, 'x' is not part of the model");
  EXPECT_EQ(model.at("c").item<float>(), 0);
}

TEST_F(HfDirectory, LoadingCastsAndLeavesOutWhatIsTied) {
  const NamedTensors model{{"embeddings", at::zeros({2}, at::kDouble)}, {"lm_head", at::full({2}, 5.f)}};
  load_into({{"embeddings", at::full({2}, 1.5f).to(at::kBFloat16)}}, model, "w", {"lm_head"});
  EXPECT_EQ(model.at("embeddings").sum().item<double>(), 3);
  EXPECT_EQ(model.at("lm_head").sum().item<float>(), 10);
  const NamedTensors only{{"embeddings", at::zeros({2})}};
  load_into({{"embeddings", at::ones({2})}, {"lm_head", at::ones({2})}}, only, "w",
            {"lm_head"});  // a tied copy may be stored too
  EXPECT_EQ(only.at("embeddings").sum().item<float>(), 2);
}

}  // namespace
}  // namespace fox::checkpoint
