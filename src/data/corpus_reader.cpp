#include "data/corpus_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/corpus_files.h"

namespace fox::data {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kBlockBytes = 1 << 20;
/// Longer than any book; a file with such a line is something else.
constexpr size_t kLongestLine = size_t{1} << 30;

/// Takes the string "text" out of an object and passes over the rest. JSON that is not valid stops it.
class TextFinder : public json::json_sax_t {
 public:
  bool found() const { return found_; }
  bool is_object() const { return is_object_; }
  std::string& text() { return text_; }

  bool null() override { return other(); }
  bool boolean(bool) override { return other(); }
  bool number_integer(number_integer_t) override { return other(); }
  bool number_unsigned(number_unsigned_t) override { return other(); }
  bool number_float(number_float_t, const string_t&) override { return other(); }
  bool binary(binary_t&) override { return other(); }
  bool string(string_t& value) override {
    if (depth_ == 1 && wanted_) {
      text_ = std::move(value);
      found_ = true;
      return true;
    }
    return other();
  }
  bool key(string_t& name) override {
    wanted_ = depth_ == 1 && is_object_ && name == "text";
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ == 0) is_object_ = true;
    return deeper();
  }
  bool start_array(size_t) override { return deeper(); }
  bool end_object() override { return shallower(); }
  bool end_array() override { return shallower(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  // A later "text" that is no string takes the place of an earlier one, as in Python.
  bool other() {
    if (depth_ == 1 && wanted_) found_ = false;
    return true;
  }
  bool deeper() {
    other();
    ++depth_;
    return true;
  }
  bool shallower() {
    --depth_;
    return true;
  }

  int depth_ = 0;
  bool wanted_ = false, found_ = false, is_object_ = false;
  std::string text_;
};

std::string text_of_line(std::string_view line, const fs::path& file, int64_t number) {
  TextFinder finder;
  const char* problem = nullptr;
  if (!json::sax_parse(line, &finder)) {
    problem = "is not JSON in UTF-8";
  } else if (!finder.is_object()) {
    problem = "is no JSON object";
  } else if (!finder.found()) {
    problem = "has no string \"text\"";
  }
  if (problem) {
    throw Error(fmt::format("{}: line {} {}", file.string(), number + 1, problem),
                "each line is an object such as {\"text\": \"…\"}");
  }
  return std::move(finder.text());
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

}  // namespace

CorpusReader::CorpusReader(std::vector<fs::path> files, const Tokenizer& tokenizer)
    : files_(std::move(files)), tokenizer_(tokenizer) {}

void CorpusReader::open() {
  source_.emplace(files_[static_cast<size_t>(position_.file)]);
  buffer_.clear();
  at_end_ = false;
}

void CorpusReader::skip_to(const CorpusPosition& position) {
  position_ = position;
  for (int64_t i = 0; i < position.file; ++i) stored_before_ += static_cast<int64_t>(fs::file_size(files_[i]));
  checksums_.resize(static_cast<size_t>(position.file));
  if (position.offset == 0) return;
  open();
  for (int64_t left = position.offset; left > 0 && source_->read(std::min<size_t>(left, kBlockBytes), buffer_);) {
    left -= std::ssize(buffer_);
    buffer_.clear();
  }
}

size_t CorpusReader::block_size() const {
  if (at_end_) return buffer_.size();
  if (buffer_.size() < kBlockBytes) return 0;
  const fs::path& file = files_[static_cast<size_t>(position_.file)];
  if (!is_json_lines(file)) return tokenizer_.separable_prefix(buffer_);
  if (const size_t line_break = buffer_.rfind('\n'); line_break != std::string::npos) return line_break + 1;
  if (buffer_.size() > kLongestLine) {
    throw Error(fmt::format("{}: line {} is longer than {} bytes", file.string(), position_.line + 1, kLongestLine),
                "is this a file of JSON lines?");
  }
  return 0;
}

TextBlock CorpusReader::take(size_t size) {
  TextBlock block;
  block.file = files_[static_cast<size_t>(position_.file)];
  block.json_lines = is_json_lines(block.file);
  block.begins_document = !block.json_lines && position_.offset == 0;
  block.begin = position_;
  block.bytes = buffer_.substr(0, size);
  buffer_.erase(0, size);
  position_.offset += static_cast<int64_t>(size);
  position_.line += std::count(block.bytes.begin(), block.bytes.end(), '\n');
  block.stored = stored_before_ + source_->stored();
  if (at_end_ && buffer_.empty()) {
    stored_before_ += source_->stored();
    checksums_.push_back(source_->checksum());
    source_.reset();
    position_ = {position_.file + 1, 0, 0};
  }
  block.end = position_;
  return block;
}

std::optional<TextBlock> CorpusReader::next() {
  while (position_.file < std::ssize(files_)) {
    if (!source_) open();
    size_t size = block_size();
    // A text without a place to cut is read on by as much as there is of it, so that it is not searched again and
    // again.
    while (size == 0 && !at_end_) {
      const size_t wanted = std::max(kBlockBytes, 2 * buffer_.size());
      while (!at_end_ && buffer_.size() < wanted) at_end_ = !source_->read(wanted - buffer_.size(), buffer_);
      size = block_size();
    }
    TextBlock block = take(size);
    // A file without a byte is still a document, if it is text.
    if (!block.bytes.empty() || block.begins_document) return block;
  }
  return std::nullopt;
}

EncodedBlock encode_block(const TextBlock& block, const Tokenizer& tokenizer) {
  EncodedBlock encoded{{}, {}, block.end, block.stored};
  const auto begin_document = [&] {
    encoded.starts.push_back(std::ssize(encoded.ids));
    encoded.ids.push_back(tokenizer.end_of_text());
  };
  const auto encode = [&](std::string_view text) {
    tokenizer.encode(
        text, [&](std::span<const int32_t> ids) { encoded.ids.insert(encoded.ids.end(), ids.begin(), ids.end()); });
  };
  if (!block.json_lines) {
    if (block.begins_document) begin_document();
    encode(block.bytes);
    return encoded;
  }
  int64_t number = block.begin.line;
  for (std::string_view rest = block.bytes; !rest.empty(); ++number) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (is_blank(line)) continue;
    begin_document();
    encode(text_of_line(line, block.file, number));
  }
  return encoded;
}

}  // namespace fox::data
