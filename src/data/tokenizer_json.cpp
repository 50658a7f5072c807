#include "data/tokenizer_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "data/byte_alphabet.h"
#include "data/pre_tokenizer.h"

namespace fox::data {

namespace {

using nlohmann::json;

constexpr const char* kReadableTokenizers = "fox reads byte-level BPE tokenizers, such as GPT-2's and Llama 3's";
/// Our word for TokenizerSpec::json_escaped, in pre_tokenizer.
constexpr const char* kJsonEscaped = "json_escaped";
/// The largest vocabularies in use have 256 thousand; a wild id must not make us allocate gigabytes.
constexpr int64_t kMostIds = 1 << 22;

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

class Parser {
 public:
  Parser(std::string_view text, std::string source) : source_(std::move(source)) {
    try {
      root_ = json::parse(text);
    } catch (const json::parse_error& error) {
      throw Error(fmt::format("{} is not JSON (byte {})", source_, error.byte),
                  "the file may be damaged: fetch it again");
    }
    if (!root_.is_object()) throw Error(fmt::format("{} is no JSON object", source_), kReadableTokenizers);
  }

  TokenizerSpec parse() {
    check_nothing("", root_, "normalizer");
    read_added_tokens();
    const json& model = object("", root_, "model");
    check_model(model);
    read_vocab(object("model.", model, "vocab"));
    read_merges(array("model.", model, "merges"));
    const json& pre_tokenizer = object("", root_, "pre_tokenizer");
    spec_.json_escaped = flag("pre_tokenizer.", pre_tokenizer, kJsonEscaped, false);
    read_pre_tokenizer(pre_tokenizer, "pre_tokenizer.");
    choose_end_of_text();
    return std::move(spec_);
  }

 private:
  [[noreturn]] void fail(const std::string& key, const std::string& problem) const {
    throw Error(fmt::format("{}: '{}' {}", source_, key, problem), kReadableTokenizers);
  }

  const json& member(const std::string& prefix, const json& parent, const std::string& key) const {
    const auto it = parent.find(key);
    if (it == parent.end()) fail(prefix + key, "is missing");
    return *it;
  }
  const json& object(const std::string& prefix, const json& parent, const std::string& key) const {
    const json& value = member(prefix, parent, key);
    if (!value.is_object()) fail(prefix + key, "must be an object, not " + shown(value));
    return value;
  }
  const json& array(const std::string& prefix, const json& parent, const std::string& key) const {
    const json& value = member(prefix, parent, key);
    if (!value.is_array()) fail(prefix + key, "must be a list, not " + shown(value));
    return value;
  }
  std::string string(const std::string& prefix, const json& parent, const std::string& key) const {
    const json& value = member(prefix, parent, key);
    if (!value.is_string()) fail(prefix + key, "must be a string, not " + shown(value));
    return value.get<std::string>();
  }
  bool flag(const std::string& prefix, const json& parent, const std::string& key, bool otherwise) const {
    const auto it = parent.find(key);
    if (it == parent.end() || it->is_null()) return otherwise;
    if (!it->is_boolean()) fail(prefix + key, "must be true or false, not " + shown(*it));
    return it->get<bool>();
  }
  int32_t id(const std::string& key, const json& value) const {
    if (!value.is_number_integer() || value < 0 || value >= kMostIds) {
      fail(key, fmt::format("must be an id from 0 to {}, not {}", kMostIds - 1, shown(value)));
    }
    return value.get<int32_t>();
  }
  /// A part that would change the encoding and that we do not have.
  void check_nothing(const std::string& prefix, const json& parent, const std::string& key) const {
    const auto it = parent.find(key);
    if (it == parent.end() || it->is_null() || *it == "" || *it == false || *it == 0.0) return;
    fail(prefix + key, "is not supported: " + shown(*it));
  }

  void read_added_tokens() {
    const auto it = root_.find("added_tokens");
    if (it == root_.end() || it->is_null()) return;
    if (!it->is_array()) fail("added_tokens", "must be a list, not " + shown(*it));
    for (size_t i = 0; i < it->size(); ++i) {
      const json& entry = (*it)[i];
      const std::string prefix = fmt::format("added_tokens[{}].", i);
      if (!entry.is_object()) fail(prefix.substr(0, prefix.size() - 1), "must be an object, not " + shown(entry));
      AddedToken token{id(prefix + "id", member(prefix, entry, "id")), string(prefix, entry, "content"),
                       flag(prefix, entry, "special", false)};
      if (token.content.empty()) fail(prefix + "content", "is empty");
      // Special tokens are text here unless asked for, and then stand alone: how far they reach is of no concern.
      if (!token.special) {
        for (const char* key : {"lstrip", "rstrip", "single_word"}) check_nothing(prefix, entry, key);
      }
      if (!added_ids_.insert(token.id).second) fail(prefix + "id", fmt::format("{} is there twice", token.id));
      spec_.added.push_back(std::move(token));
    }
    std::sort(spec_.added.begin(), spec_.added.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  }

  void check_model(const json& model) {
    // Files from before 2020 do not say the type.
    if (model.contains("type") && model.at("type") != "BPE")
      fail("model.type", "must be \"BPE\", not " + shown(model["type"]));
    for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
      check_nothing("model.", model, key);
    }
    spec_.ignore_merges = flag("model.", model, "ignore_merges", false);
  }

  void read_vocab(const json& vocab) {
    for (const auto& [name, value] : vocab.items()) {
      const std::string key = "model.vocab." + name;
      const int32_t number = id(key, value);
      if (added_ids_.contains(number)) continue;
      const auto bytes = from_alphabet(name);
      if (!bytes || bytes->empty()) fail(key, "is not written in GPT-2's alphabet of bytes");
      if (spec_.tokens.size() <= static_cast<size_t>(number)) spec_.tokens.resize(number + 1);
      if (!spec_.tokens[number].empty()) fail(key, fmt::format("has the id {} of another token", number));
      spec_.tokens[number] = *bytes;
      id_of_.emplace(*bytes, number);
    }
    for (const AddedToken& token : spec_.added) {
      if (spec_.tokens.size() <= static_cast<size_t>(token.id)) spec_.tokens.resize(token.id + 1);
    }
    for (int byte = 0; byte < 256; ++byte) {
      const std::string single(1, static_cast<char>(byte));
      if (!id_of_.contains(single))
        fail("model.vocab", fmt::format("has no token '{}' for the byte {}", to_alphabet(single), byte));
    }
  }

  void read_merges(const json& merges) {
    spec_.merges.reserve(merges.size());
    for (size_t i = 0; i < merges.size(); ++i) {
      const std::string key = fmt::format("model.merges[{}]", i);
      const json& entry = merges[i];
      std::string left, right;
      if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
        left = entry[0].get<std::string>();
        right = entry[1].get<std::string>();
      } else if (const auto* text = entry.get_ptr<const std::string*>()) {
        const size_t space = text->find(' ');
        if (space == std::string::npos) fail(key, "must be two tokens with a space between, not " + shown(entry));
        left = text->substr(0, space);
        right = text->substr(space + 1);
      } else {
        fail(key, "must be a pair of tokens, not " + shown(entry));
      }
      spec_.merges.push_back({merge_id(key, left), merge_id(key, right), merge_id(key, left + right)});
    }
  }

  int32_t merge_id(const std::string& key, const std::string& token) const {
    const auto bytes = from_alphabet(token);
    const auto it = bytes ? id_of_.find(*bytes) : id_of_.end();
    if (it == id_of_.end()) fail(key, fmt::format("names '{}', which is not in model.vocab", token));
    return it->second;
  }

  /// ByteLevel, or a Sequence of Splits with a ByteLevel at its end.
  void read_pre_tokenizer(const json& part, const std::string& prefix) {
    const std::string type = string(prefix, part, "type");
    if (type == "Sequence") {
      const json& parts = array(prefix, part, "pretokenizers");
      for (size_t i = 0; i < parts.size(); ++i) {
        const std::string name = fmt::format("{}pretokenizers[{}]", prefix, i);
        if (!parts[i].is_object()) fail(name, "must be an object, not " + shown(parts[i]));
        if (parts[i].contains("pretokenizers")) fail(name, "is a Sequence within a Sequence, which is not supported");
        if (byte_level_) fail(name, "stands behind ByteLevel");
        read_pre_tokenizer(parts[i], name + ".");
      }
      if (!byte_level_) fail(prefix + "pretokenizers", "has no ByteLevel");
    } else if (type == "ByteLevel") {
      check_nothing(prefix, part, "add_prefix_space");
      if (flag(prefix, part, "use_regex", true)) spec_.patterns.emplace_back(kGpt2Pattern);
      byte_level_ = true;
    } else if (type == "Split") {
      check_nothing(prefix, part, "invert");
      if (string(prefix, part, "behavior") != "Isolated") fail(prefix + "behavior", "must be \"Isolated\"");
      spec_.patterns.push_back(string(prefix + "pattern.", object(prefix, part, "pattern"), "Regex"));
    } else {
      fail(prefix + "type", fmt::format("must be ByteLevel or Split, not \"{}\"", type));
    }
    if (prefix == "pre_tokenizer." && !byte_level_) fail(prefix + "type", "must be ByteLevel or end with it");
  }

  void choose_end_of_text() {
    for (const char* name : {"<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<s>", "</s>"}) {
      for (const AddedToken& token : spec_.added) {
        if (token.content == name) {
          spec_.end_of_text = token.id;
          return;
        }
      }
    }
    if (spec_.added.size() != 1) fail("added_tokens", "has no <|endoftext|>, which stands before each document");
    spec_.end_of_text = spec_.added[0].id;
  }

  json root_;
  std::string source_;
  TokenizerSpec spec_;
  std::set<int32_t> added_ids_;
  std::unordered_map<std::string, int32_t> id_of_;
  bool byte_level_ = false;
};

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source) {
  return Parser(text, source).parse();
}

std::string to_tokenizer_json(const TokenizerSpec& spec) {
  using nlohmann::ordered_json;
  ordered_json added = ordered_json::array();
  for (const AddedToken& token : spec.added) {
    added.push_back({{"id", token.id},
                     {"content", token.content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", token.special}});
  }
  // Appended without looking whether a name is there already, which would take seconds for GPT-2's: no two are the
  // same.
  ordered_json vocab = ordered_json::object();
  auto& members = vocab.get_ref<ordered_json::object_t&>();
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (!spec.tokens[id].empty()) members.emplace_back(to_alphabet(spec.tokens[id]), id);
  }
  for (const AddedToken& token : spec.added) members.emplace_back(token.content, token.id);
  // "left right", not pairs: older versions of `tokenizers` read these too, and no byte-level token holds a space.
  ordered_json merges = ordered_json::array();
  for (const Merge& merge : spec.merges) {
    merges.push_back(to_alphabet(spec.tokens[merge.left]) + " " + to_alphabet(spec.tokens[merge.right]));
  }
  const bool gpt2 = spec.patterns.size() == 1 && spec.patterns[0] == kGpt2Pattern;
  const ordered_json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", gpt2}};
  ordered_json pre_tokenizer = byte_level;
  if (!gpt2) {
    ordered_json parts = ordered_json::array();
    for (const std::string& pattern : spec.patterns) {
      parts.push_back(
          {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
    }
    parts.push_back(byte_level);
    pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", parts}};
  }
  if (spec.json_escaped) pre_tokenizer[kJsonEscaped] = true;
  const ordered_json root = {{"version", "1.0"},
                             {"truncation", nullptr},
                             {"padding", nullptr},
                             {"added_tokens", added},
                             {"normalizer", nullptr},
                             {"pre_tokenizer", pre_tokenizer},
                             {"post_processor", byte_level},
                             {"decoder", byte_level},
                             {"model",
                              {{"type", "BPE"},
                               {"dropout", nullptr},
                               {"unk_token", nullptr},
                               {"continuing_subword_prefix", nullptr},
                               {"end_of_word_suffix", nullptr},
                               {"fuse_unk", false},
                               {"byte_fallback", false},
                               {"ignore_merges", spec.ignore_merges},
                               {"vocab", vocab},
                               {"merges", merges}}}};
  return root.dump(1, ' ', false) + "\n";
}

}  // namespace fox::data
