#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/byte_source.h"
#include "data/tokenizer.h"

namespace fox::data {

/// A place between two blocks of a corpus.
struct CorpusPosition {
  int64_t file = 0;    ///< number of the file
  int64_t offset = 0;  ///< bytes into it, decompressed
  int64_t line = 0;    ///< line breaks before it in the file
};

/// Some text of one file, cut so that it is encoded to the same ids as where it stands.
struct TextBlock {
  std::string bytes;
  std::filesystem::path file;
  bool json_lines = false;       ///< whole lines of JSON, a document each
  bool begins_document = false;  ///< text: the first block of its file, which is one document
  CorpusPosition begin, end;
  int64_t stored = 0;  ///< bytes of all files on disk that were read up to its end
};

/// The ids of a block.
struct EncodedBlock {
  std::vector<int32_t> ids;     ///< each document led by end_of_text
  std::vector<int64_t> starts;  ///< where in `ids` documents begin
  CorpusPosition end;
  int64_t stored = 0;
};

/// Reads files one after another in blocks of about a mebibyte. Memory does not grow with the files; a line of JSON,
/// and a text that the tokenizer does not let cut (Tokenizer::separable_prefix), is one block however long it is.
class CorpusReader {
 public:
  CorpusReader(std::vector<std::filesystem::path> files, const Tokenizer& tokenizer);

  /// Goes to where a block ended when the same files were read before.
  void skip_to(const CorpusPosition& position);
  /// Nothing at the end. Throws Error for files that cannot be read or decompressed.
  std::optional<TextBlock> next();
  /// XXH3-128 of the files that were read to their end, in order; of files before a skip's the sum is empty.
  const std::vector<std::string>& checksums() const { return checksums_; }

 private:
  void open();
  /// How much of the buffer is the next block; 0 when more must be read to know.
  size_t block_size() const;
  TextBlock take(size_t size);

  std::vector<std::filesystem::path> files_;
  const Tokenizer& tokenizer_;
  CorpusPosition position_;
  std::optional<ByteSource> source_;
  std::string buffer_;
  bool at_end_ = false;  // of the file
  int64_t stored_before_ = 0;
  std::vector<std::string> checksums_;
};

/// Thread-safe. Throws Error naming file and line for a line that is no JSON object with a string "text".
EncodedBlock encode_block(const TextBlock& block, const Tokenizer& tokenizer);

}  // namespace fox::data
