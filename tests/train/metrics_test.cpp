#include "train/metrics.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "support/temporary_folder.h"

namespace fox::train {
namespace {

using nlohmann::json;

class Metrics : public testing::Test {
 protected:
  std::string content() const { return read_file(file_); }
  test::TemporaryFolder folder_;
  std::filesystem::path file_ = folder_.path() / "metrics.jsonl";
};

TEST_F(Metrics, LinesAreThereAsSoonAsTheyAreWritten) {
  MetricsLog log(file_, 0);
  log.write({{"kind", "train"}, {"step", 1}});
  EXPECT_EQ(content(), "{\"kind\":\"train\",\"step\":1}\n");
  log.write({{"kind", "eval"}, {"step", 1}});
  EXPECT_EQ(content(), "{\"kind\":\"train\",\"step\":1}\n{\"kind\":\"eval\",\"step\":1}\n");
}

TEST_F(Metrics, LinesBeyondTheStepAreCut) {
  {
    MetricsLog log(file_, 0);
    for (int step = 1; step <= 5; ++step) log.write({{"kind", "train"}, {"step", step}});
  }
  { MetricsLog(file_, 3).write({{"kind", "train"}, {"step", 4}, {"again", true}}); }
  EXPECT_EQ(content(),
            "{\"kind\":\"train\",\"step\":1}\n{\"kind\":\"train\",\"step\":2}\n{\"kind\":\"train\",\"step\":3}\n"
            "{\"again\":true,\"kind\":\"train\",\"step\":4}\n");
}

TEST_F(Metrics, ALineThatACrashCutShortIsDropped) {
  for (const char* torn : {"{\"kind\":\"tra", "{\"kind\":\"train\",\"step\":2}", "\0\0\0\n", "not json\n", "[]\n"}) {
    std::ofstream(file_) << "{\"kind\":\"train\",\"step\":1}\n" << torn;
    MetricsLog log(file_, 10);
    EXPECT_EQ(content(), "{\"kind\":\"train\",\"step\":1}\n") << torn;
  }
}

TEST_F(Metrics, WhatJsonCannotSayBecomesNullOrIsReplaced) {
  MetricsLog log(file_, 0);
  log.write({{"step", 1}, {"loss", std::nan("")}, {"grad_norm", INFINITY}, {"text", "half a character: \xe2\x82"}});
  const auto line = json::parse(content());
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
  EXPECT_EQ(line["text"], "half a character: \xef\xbf\xbd");
}

TEST_F(Metrics, SaysWhereItCannotWrite) {
  EXPECT_THROW(MetricsLog(folder_.path() / "missing" / "metrics.jsonl", 0), Error);
}

// A limit on the size of files acts as a full disk does.
TEST_F(Metrics, AFullDiskIsAnError) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10, 10};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      MetricsLog(file_, 0).write({{"kind", "train"}, {"step", 1}});
    } catch (const Error&) {
      ::_exit(0);
    }
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  // What did get written is a torn line, and is cut when the run goes on.
  MetricsLog(file_, 1).write({{"step", 1}});
  EXPECT_EQ(content(), "{\"step\":1}\n");
}

}  // namespace
}  // namespace fox::train
