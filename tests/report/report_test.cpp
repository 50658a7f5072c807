#include "report/report.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"

namespace fox::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Report : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(dir_);
    fs::create_directories(dir_ / "a" / "eval");
    write("a/run.json", R"({"config":{"model":{"model_type":"transformer-project_fox"},"data":{"context":8}}})");
  }
  void TearDown() override { fs::remove_all(dir_); }
  void write(const std::string& name, const std::string& text) { std::ofstream(dir_ / name) << text; }
  std::string error_of(const fs::path& run) {
    try {
      collect_run(run);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  // The JSON that the page carries, read back from its HTML as a browser would: up to the first closing tag.
  static json carried(const std::string& page) {
    const std::string open = R"(<script type="application/json" id="data">)";
    const size_t begin = page.find(open) + open.size();
    return json::parse(page.substr(begin, page.find("</script", begin) - begin));
  }

  fs::path dir_;
};

TEST_F(Report, CarriesEverythingOfARunAndSurvivesHostileText) {
  const std::string hostile = "</script><script>alert(1)</script> @plotly@ @data@ <!-- \xff";
  write("a/metrics.jsonl", json{{"kind", "sample"}, {"text", "x</script>@script@"}}.dump() + "\n\n" +
                               json{{"kind", "train"}, {"loss", 2.5}}.dump() + "\n");
  write("a/eval/loss.json", json{{"per_token", {{"bins", json::array()}}}}.dump());
  write("notes.txt", "# heading\nFirst line\nand its second.\n\n</script> second paragraph\n");
  ReportOptions options;
  options.title = hostile;
  options.notes = dir_ / "notes.txt";
  write_report(std::vector<fs::path>{dir_ / "a"}, dir_ / "out.html", options);

  const std::string page = read_file(dir_ / "out.html");
  EXPECT_LT(page.size(), 10u << 20);
  const json data = carried(page);
  EXPECT_EQ(data["title"], hostile.substr(0, hostile.size() - 1) + "\xef\xbf\xbd");  // invalid UTF-8 becomes U+FFFD
  EXPECT_EQ(data["runs"][0]["metrics"][0]["text"], "x</script>@script@");
  EXPECT_EQ(data["runs"][0]["metrics"][1]["loss"], 2.5);
  EXPECT_TRUE(data["runs"][0].contains("loss"));
  EXPECT_FALSE(data["runs"][0].contains("gates"));
  EXPECT_EQ(data["notes"], (json{"First line and its second.", "</script> second paragraph"}));
  EXPECT_EQ(page.find("<script src"), std::string::npos);  // nothing is loaded from elsewhere
}

TEST_F(Report, NamesWhatIsMissingOrDamaged) {
  EXPECT_NE(error_of(dir_ / "nowhere").find("nowhere: not a run directory"), std::string::npos);
  write("a/eval/gates.json", "{\"heads\": [");
  EXPECT_NE(error_of(dir_ / "a").find("gates.json: not valid JSON"), std::string::npos);
}

TEST_F(Report, AFailedReportLeavesTheOldPage) {
  write("out.html", "old");
  EXPECT_THROW(write_report(std::vector<fs::path>{dir_ / "nowhere"}, dir_ / "out.html"), Error);
  EXPECT_EQ(read_file(dir_ / "out.html"), "old");
}

}  // namespace
}  // namespace fox::report
