#include "infer/text_stream.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace fox::infer {
namespace {

/// Everything that comes out when `bytes` go in cut at random; `cuts` 0 puts them in byte by byte.
template <typename Stream>
std::string run(Stream stream, std::string_view bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string out;
  while (!bytes.empty()) {
    const size_t n = seed == 0 ? 1 : std::min<size_t>(bytes.size(), random() % 5);
    out += stream.push(bytes.substr(0, n));
    bytes.remove_prefix(n);
  }
  return out + stream.finish();
}

const std::string R = "\xEF\xBF\xBD";

TEST(Utf8Repair, HoldsHalfCharactersBack) {
  Utf8Repair repair;
  EXPECT_EQ(repair.push("a\xC3"), "a");
  EXPECT_EQ(repair.push("\xA9"), "é");
  EXPECT_EQ(repair.push("\xF0\x9F"), "");
  EXPECT_EQ(repair.push("\x98"), "");
  EXPECT_EQ(repair.push("\x80!"), "😀!");
  EXPECT_EQ(repair.push("\xE2\x82"), "");
  EXPECT_EQ(repair.finish(), R);
  EXPECT_EQ(repair.finish(), "");
}

TEST(Utf8Repair, ReplacesAsPythonDoes) {
  // Right-hand sides: bytes.decode("utf-8", errors="replace") of Python 3.11.
  const std::pair<std::string, std::string> cases[] = {
      {"\xFF", R},
      {"\x80\x80", R + R},
      {"\xC0\xAF", R + R},                  // overlong '/'
      {"\xE0\x80\xAF", R + R + R},          // overlong
      {"\xED\xA0\x80", R + R + R},          // a surrogate
      {"\xF4\x90\x80\x80", R + R + R + R},  // above U+10FFFF
      {"\xF0\x9F\x98"
       "A",
       R + "A"},  // a maximal part is one
      {"\xE2\x82"
       "\xE2\x82\xAC",
       R + "€"},
      {"a\xF1\x80\x80\xE1\x80\xC2"
       "b\x80"
       "c\x80\xBF"
       "d",
       "a" + R + R + R + "b" + R + "c" + R + R + "d"},
      {"\xF5\x80", R + R},
      {std::string("\0z", 2), std::string("\0z", 2)},
  };
  for (const auto& [bytes, text] : cases) {
    for (unsigned seed = 0; seed < 20; ++seed) EXPECT_EQ(run(Utf8Repair(), bytes, seed), text);
  }
}

TEST(TextStream, PassesTextThrough) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(run(TextStream(), "In the beginning Gœd\n", seed), "In the beginning Gœd\n");
    EXPECT_EQ(run(TextStream({"\n\n", "END"}), "no stop here EN\nD", seed), "no stop here EN\nD");
  }
}

TEST(TextStream, StopsBeforeAStringThatSpansTokens) {
  TextStream stream({"\nGen"});
  EXPECT_EQ(stream.push("void.\n"), "void.");
  EXPECT_EQ(stream.push("Ge"), "");
  EXPECT_FALSE(stream.stopped());
  EXPECT_EQ(stream.push("n1:2 And"), "");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.push("more"), "");
  EXPECT_EQ(stream.finish(), "");
}

TEST(TextStream, ReleasesWhatWasNoStopAfterAll) {
  TextStream stream({"abcd", "bx"});
  EXPECT_EQ(stream.push("zabc"), "z");
  EXPECT_EQ(stream.push("e"), "abce");
  EXPECT_EQ(stream.push("ab"), "");
  EXPECT_EQ(stream.push("y"), "aby");
  EXPECT_EQ(stream.push("abc"), "");
  EXPECT_EQ(stream.finish(), "abc");
}

TEST(TextStream, SameCutHoweverTheBytesArrive) {
  struct Case {
    std::vector<std::string> stop;
    std::string bytes, text;
  };
  const Case cases[] = {
      {{"abc", "b"}, "xxabcxx", "xxa"},   // "b" is complete first
      {{"bc", "abc"}, "xxabcxx", "xx"},   // both end together: the longest
      {{"aab"}, "aaab", "a"},             // a beginning within a beginning
      {{"é"}, "caf\xC3\xA9!", "caf"},     // a stop of two bytes
      {{R}, "a\xFFz", "a"},               // the replacement itself
      {{"😀"}, "a\xF0\x9F\x98", "a" + R},  // half of a stop string is not it
      {{"end"}, "the end", "the "},
      {{"stop"}, "sto", "sto"},
      {{"a"}, "a", ""},
  };
  for (const Case& c : cases) {
    for (unsigned seed = 0; seed < 30; ++seed) EXPECT_EQ(run(TextStream(c.stop), c.bytes, seed), c.text);
  }
}

TEST(TextStream, MatchesASearchOfTheWholeText) {
  // Random text over two letters and random stop strings, against the definition: the first position where one ends.
  std::mt19937 random(1);
  const auto letters = [&](size_t n) {
    std::string s;
    while (s.size() < n) s += random() % 2 ? 'a' : 'b';
    return s;
  };
  for (int trial = 0; trial < 500; ++trial) {
    const std::string text = letters(1 + random() % 20);
    const std::vector<std::string> stop = {letters(1 + random() % 5), letters(1 + random() % 6)};
    std::string expected = text;
    for (size_t end = 1; end <= text.size() && expected == text; ++end) {
      size_t longest = 0;
      for (const std::string& s : stop) {
        if (text.substr(0, end).ends_with(s)) longest = std::max(longest, s.size());
      }
      if (longest > 0) expected = text.substr(0, end - longest);
    }
    EXPECT_EQ(run(TextStream(stop), text, trial), expected) << text << " / " << stop[0] << " / " << stop[1];
  }
}

TEST(TextStream, RefusesStopsThatCannotOccur) {
  EXPECT_THROW(TextStream({"ok", ""}), Error);
  EXPECT_THROW(TextStream({"\xC3"}), Error);
}

}  // namespace
}  // namespace fox::infer
