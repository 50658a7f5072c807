#include "config/key_reader.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace fox {
namespace {

using nlohmann::json;

// What the user is told: "message | hint", or "" when nothing is wrong.
template <typename F>
std::string complaint(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return std::string(error.what()) + " | " + error.hint();
  }
  return "";
}

TEST(KeyReader, MissingKeysKeepTheirDefaultsAndPresentOnesAreRead) {
  KeyReader reader(json::parse(R"({"heads": 4, "lr": 1e-3, "on": true, "tokens": 1e6, "names": "one", "top": null})"),
                   "x");
  int64_t heads = 1, tokens = 0, other = 7;
  double lr = 0;
  bool on = false;
  std::vector<std::string> names;
  std::optional<int64_t> top = 3;
  reader.read("heads", heads, Range::at_least(1));
  reader.read("tokens", tokens);
  reader.read("other", other);
  reader.read("lr", lr, Range::above(0));
  reader.read("on", on);
  reader.read("names", names);
  reader.read("top", top);
  reader.finish();
  EXPECT_EQ(heads, 4);
  EXPECT_EQ(tokens, 1000000);
  EXPECT_EQ(other, 7);
  EXPECT_EQ(lr, 1e-3);
  EXPECT_TRUE(on);
  EXPECT_EQ(names, std::vector<std::string>{"one"});
  EXPECT_FALSE(top);
}

TEST(KeyReader, EachWrongTypeIsNamed) {
  const std::vector<std::string> bad{"\"4\"", "true", "[1]", "{}", "null", "1.5", "1e300"};
  for (const auto& text : bad) {
    KeyReader reader(json::parse("{\"heads\": " + text + "}"), "config.json", "model.");
    int64_t heads = 0;
    const auto said = complaint([&] { reader.read("heads", heads); });
    EXPECT_NE(said.find("config.json: 'model.heads' must be a whole number, not "), std::string::npos)
        << text << ": " << said;
  }
  KeyReader reader(
      json::parse(R"({"on": 1, "name": 2, "x": "y", "n": -1, "list": [1, "a"], "big": 18446744073709551615})"), "c");
  bool on;
  std::string name;
  double x;
  uint64_t n;
  int64_t big;
  std::vector<double> list;
  EXPECT_EQ(complaint([&] { reader.read("on", on); }), "c: 'on' must be true or false, not 1 | for example: on = true");
  EXPECT_EQ(complaint([&] { reader.read("name", name); }), "c: 'name' must be a string, not 2 | in quotes: \"text\"");
  EXPECT_EQ(complaint([&] { reader.read("x", x); }),
            "c: 'x' must be a number, not \"y\" | written like 0.1 or 1e-3, without quotes");
  EXPECT_EQ(complaint([&] { reader.read("n", n); }),
            "c: 'n' must be a whole number that is not negative, not -1 | written like 4, without quotes");
  EXPECT_EQ(complaint([&] { reader.read("big", big); }),
            "c: 'big' must be a whole number, not 18446744073709551615 | written like 4, without quotes");
  EXPECT_EQ(complaint([&] { reader.read("list", list); }),
            "c: 'list' must be a list of numbers, not [1,\"a\"] | written like [1, 2]");
}

TEST(KeyReader, RangesAreChecked) {
  KeyReader reader(json::parse(R"({"a": 0, "b": 2.5})"), "c");
  int64_t a = 0;
  double b = 0.5;
  EXPECT_EQ(complaint([&] { reader.read("a", a, Range::at_least(1)); }),
            "c: 'a' must be at least 1, not 0 | choose one in that range");
  EXPECT_EQ(complaint([&] { reader.read("b", b, Range::between(0, 1)); }),
            "c: 'b' must be at least 0 and at most 1, not 2.5 | left out, it is 0.5");
  EXPECT_EQ(complaint([&] { reader.read("a", b, Range::above(0)); }),
            "c: 'a' must be above 0, not 0 | left out, it is 0.5");
  EXPECT_EQ(complaint([&] { reader.read("b", b, Range::at_least(2.5)); }), "");
}

TEST(KeyReader, UnknownKeysAreAllListedWithWhatWasMeant) {
  int64_t x = 0;
  KeyReader one(json::parse(R"({"num_heds": 4})"), "config.json");
  one.read("num_heads", x);
  EXPECT_EQ(complaint([&] { one.finish(); }), "config.json: 'num_heds' is not a known key | did you mean 'num_heads'?");
  KeyReader two(json::parse(R"({"model": {"num_heds": 4, "hiden": 1}})"), "run.toml");
  auto model = two.table("model");
  model.set_locator([](const std::string& path) { return "run.toml:7 (" + path + ")"; });
  model.read("num_heads", x);
  model.read("hidden", x);
  EXPECT_EQ(complaint([&] { model.finish(); }),
            "run.toml:7 (model.hiden): 'model.hiden', 'model.num_heds' are not known keys | "
            "for 'hiden' did you mean 'hidden'? for 'num_heds' did you mean 'num_heads'?");
  two.finish();
}

TEST(KeyReader, ChoicesAreOffered) {
  KeyReader reader(json::parse(R"({"gate": "ful"})"), "c");
  std::string gate = "none";
  EXPECT_EQ(complaint([&] {
              reader.read_choice("gate", gate, {"full", "fixed", "none"});
            }),
            "c: 'gate' cannot be \"ful\" | did you mean 'full'?");
  EXPECT_EQ(gate, "none");
}

TEST(KeyReader, RefusesWhatIsNotAnObject) {
  EXPECT_EQ(complaint([] { KeyReader(json::parse("[1]"), "c"); }),
            "c must be an object of keys and values, not [1] | docs/formats.md shows one");
}

}  // namespace
}  // namespace fox
