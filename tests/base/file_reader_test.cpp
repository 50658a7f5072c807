#include "base/file_reader.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "base/error.h"
#include "support/temporary_folder.h"

namespace fox {
namespace {

TEST(FileReader, ReadsAnyPart) {
  const test::TemporaryFolder folder;
  const auto path = folder.path() / "a";
  std::ofstream(path, std::ios::binary) << "0123456789";
  const FileReader file(path);
  EXPECT_EQ(file.size(), 10);
  for (const auto& [first, count] : {std::pair{0, 10}, {3, 4}, {9, 1}, {10, 0}}) {
    std::string part(static_cast<size_t>(count), '\0');
    file.read(first, count, part.data());
    EXPECT_EQ(part, std::string("0123456789").substr(static_cast<size_t>(first), static_cast<size_t>(count)));
  }
}

TEST(FileReader, MissingAndShortenedFilesAreNamed) {
  const test::TemporaryFolder folder;
  const auto path = folder.path() / "a";
  EXPECT_THROW(FileReader{path}, Error);
  std::ofstream(path, std::ios::binary) << "0123456789";
  const FileReader file(path);
  std::filesystem::resize_file(path, 4);
  std::string part(8, '\0');
  try {
    file.read(2, 8, part.data());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), path.string() + " has become shorter");
  }
}

}  // namespace
}  // namespace fox
