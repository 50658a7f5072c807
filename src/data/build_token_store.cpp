#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/worker_pool.h"
#include "data/corpus_files.h"
#include "data/corpus_reader.h"
#include "data/token_store.h"
#include "data/zarr.h"

namespace fox::data {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int64_t kTokensPerChunk = 1 << 20;
constexpr int64_t kOffsetsPerChunk = 1 << 17;
/// How far a build has come: a line of JSON, then the tokens and the offsets that are in no chunk yet.
constexpr const char* kSaved = "saved";
constexpr const char* kLock = ".lock";  // DirectoryLock's
/// Less text than this is done before a bar could be read.
constexpr int64_t kBytesWorthABar = 16 << 20;

/// What tells whether a file is still the one that a store was made of; `time` in Unix seconds.
json identity(const fs::path& file) {
  const auto time = std::chrono::file_clock::to_sys(fs::last_write_time(file)).time_since_epoch();
  return {{"path", fs::absolute(file).lexically_normal().string()},
          {"size", fs::file_size(file)},
          {"time", std::chrono::duration<double>(time).count()}};
}

/// What build_token_store is made with.
struct Job {
  std::vector<fs::path> files;
  json identities;  // of the files
  const Tokenizer& tokenizer;
  const BuildOptions& options;
};

/// What tells the store at `dir` from the one to make ("it was made with another tokenizer"), or "" when it is that
/// store. Equal path, size and time are believed; else the contents decide, so a copied or moved corpus is not read
/// again.
std::string difference(const fs::path& dir, const Job& job) {
  const json stored =
      fs::exists(dir / ".zattrs") ? json::parse(read_file(dir / ".zattrs"), nullptr, false) : json::object();
  const json sources = stored.is_object() ? stored.value("sources", json()) : json();
  if (!sources.is_array()) return "it does not say which text it was made of";
  if (stored.value("tokenizer", json()) != job.tokenizer.fingerprint()) return "it was made with another tokenizer";
  if (sources.size() != job.files.size()) {
    return fmt::format("it was made of {} file{}, not of {}", sources.size(), sources.size() == 1 ? "" : "s",
                       job.files.size());
  }
  for (size_t i = 0; i < job.files.size(); ++i) {
    const json& identity = job.identities[i];
    json known = sources[i].is_object() ? sources[i] : json::object();
    const json checksum = known.value("checksum", json());
    known.erase("checksum");
    if (known == identity) continue;
    if (known.value("size", json()) == identity["size"] && checksum == file_checksum(job.files[i])) continue;
    const std::string path = identity["path"];
    if (known.value("path", json()) == path) return path + " has changed since it was made";
    return fmt::format("it was made of other text than {}", path);
  }
  return "";
}

/// A store in the making, in a folder of its own.
class Build {
 public:
  Build(const fs::path& dir, const Job& job)
      : dir_(dir),
        job_(job),
        wide_(job.tokenizer.vocab_size() > 65536),
        tokens_(dir / "tokens", wide_ ? "<u4" : "<u2", kTokensPerChunk),
        offsets_(dir / "doc_offsets", "<i8", kOffsetsPerChunk) {}

  /// True when the folder holds what such a build saved: it then goes on from there.
  bool resume();
  /// Reads, encodes and writes all that is left.
  void run();

 private:
  void put(const EncodedBlock& block);
  void save(const CorpusReader& reader);
  void finish(const CorpusReader& reader);
  /// Sums of the files that are done.
  std::vector<std::string> checksums(const CorpusReader& reader) const;

  fs::path dir_;
  const Job& job_;
  bool wide_;
  ZarrWriter tokens_, offsets_;
  CorpusPosition position_;             // up to which it is written
  std::vector<std::string> checksums_;  // of the files before the position that it started at
  std::vector<uint16_t> narrow_;
};

bool Build::resume() try {
  const fs::path file = dir_ / kSaved;
  if (!fs::exists(file)) return false;
  const std::string content = read_file(file);
  const size_t header_size = content.find('\n');
  if (header_size == std::string::npos) return false;
  const json header = json::parse(content.substr(0, header_size), nullptr, false);
  if (!header.is_object() || header.value("tokenizer", "") != job_.tokenizer.fingerprint() ||
      header.value("sources", json()) != job_.identities) {
    return false;
  }
  const auto pending = header.at("pending").get<size_t>();
  if (header_size + 1 + pending > content.size()) return false;
  if (!tokens_.resume(header.at("tokens"), content.substr(header_size + 1, pending)) ||
      !offsets_.resume(header.at("documents"), content.substr(header_size + 1 + pending))) {
    return false;
  }
  position_ = {header.at("file"), header.at("offset"), header.at("line")};
  checksums_ = header.at("checksums").get<std::vector<std::string>>();
  return true;
} catch (const json::exception&) {
  return false;  // a key is missing
}

std::vector<std::string> Build::checksums(const CorpusReader& reader) const {
  std::vector<std::string> all = reader.checksums();
  std::copy(checksums_.begin(), checksums_.end(), all.begin());
  return all;
}

void Build::save(const CorpusReader& reader) {
  // The reader is ahead of what is written.
  std::vector<std::string> sums = checksums(reader);
  sums.resize(static_cast<size_t>(position_.file));
  const json header = {{"tokenizer", job_.tokenizer.fingerprint()},
                       {"sources", job_.identities},
                       {"checksums", sums},
                       {"file", position_.file},
                       {"offset", position_.offset},
                       {"line", position_.line},
                       {"tokens", tokens_.size()},
                       {"documents", offsets_.size()},
                       {"pending", tokens_.pending().size()}};
  tokens_.sync();
  offsets_.sync();
  write_file_atomically(dir_ / kSaved, header.dump(-1, ' ', false, json::error_handler_t::replace) + "\n" +
                                           tokens_.pending() + offsets_.pending());
  if (job_.options.on_save) job_.options.on_save();
}

void Build::put(const EncodedBlock& block) {
  for (const int64_t start : block.starts) {
    const int64_t offset = tokens_.size() + start;
    offsets_.append(&offset, 1);
  }
  if (wide_) {
    tokens_.append(block.ids.data(), std::ssize(block.ids));
  } else {
    narrow_.assign(block.ids.begin(), block.ids.end());
    tokens_.append(narrow_.data(), std::ssize(narrow_));
  }
  position_ = block.end;
}

void Build::run() {
  using Clock = std::chrono::steady_clock;
  int64_t total = 0;
  for (const json& file : job_.identities) total += file["size"].get<int64_t>();
  std::optional<Progress> progress;
  if (total >= kBytesWorthABar) progress.emplace("tokenize", total, "bytes");
  CorpusReader reader(job_.files, job_.tokenizer);
  reader.skip_to(position_);
  WorkerPool pool(job_.options.threads);
  std::deque<std::future<EncodedBlock>> encoding;  // in the order of the text
  auto saved = Clock::now();
  for (bool at_end = false; !at_end || !encoding.empty();) {
    // Enough blocks that no thread waits for this one, and no more: they are what takes memory.
    while (!at_end && std::ssize(encoding) < 2 * pool.threads() + 2) {
      auto block = reader.next();
      at_end = !block;
      if (block) {
        encoding.push_back(pool.submit(
            [block = std::move(*block), &tokenizer = job_.tokenizer] { return encode_block(block, tokenizer); }));
      }
    }
    if (encoding.empty()) break;
    const EncodedBlock block = encoding.front().get();
    encoding.pop_front();
    put(block);
    if (progress) progress->update(block.stored, human_count(static_cast<double>(tokens_.size())) + " tokens");
    const bool stop = interrupted();
    if (stop || Clock::now() - saved >= std::chrono::duration<double>(job_.options.save_interval_s)) {
      save(reader);
      saved = Clock::now();
    }
    if (stop) throw Error("stopped before all text was tokenized", "the same command continues where it stopped", 130);
  }
  finish(reader);
}

void Build::finish(const CorpusReader& reader) {
  const int64_t end = tokens_.size();
  offsets_.append(&end, 1);
  tokens_.finish();
  offsets_.finish();
  json sources = job_.identities;
  const std::vector<std::string> sums = checksums(reader);
  for (size_t i = 0; i < sources.size(); ++i) sources[i]["checksum"] = sums[i];
  const json attributes = {{"tokenizer", job_.tokenizer.fingerprint()},
                           {"vocab_size", job_.tokenizer.vocab_size()},
                           {"end_of_text", job_.tokenizer.end_of_text()},
                           {"sources", std::move(sources)}};
  write_file_atomically(dir_ / ".zattrs", attributes.dump(1, ' ', false, json::error_handler_t::replace) + "\n");
  write_file_atomically(dir_ / ".zgroup", "{\n  \"zarr_format\": 2\n}\n");
  fs::remove(dir_ / kSaved);
}

void build(const fs::path& dir, const Job& job) {
  // What a killed build was just writing (half a file under another name) must not get into the store.
  remove_others(dir, [](const std::string& name) {
    return name == kLock || name == kSaved || name == "tokens" || name == "doc_offsets";
  });
  {
    Build going_on(dir, job);
    if (going_on.resume()) {
      if (job.options.on_resume) job.options.on_resume();
      return going_on.run();
    }
  }
  // What a build of something else left behind.
  remove_others(dir, [](const std::string& name) { return name == kLock; });
  Build(dir, job).run();
}

/// A folder beside `dir` whose name says what it is for.
fs::path beside(const fs::path& dir, const char* purpose) {
  return dir.parent_path() / fmt::format(".{}.{}", dir.filename().string(), purpose);
}

/// Puts the finished `built` in the place of `dir`. A crash in between leaves no store, never a mixed one.
void replace(const fs::path& built, const fs::path& dir) {
  const fs::path old = beside(dir, "old");
  fs::remove_all(old);
  if (fs::exists(dir)) fs::rename(dir, old);
  fs::rename(built, dir);
  sync_path(dir.parent_path());
  fs::remove_all(old);
}

}  // namespace

TokenStore build_token_store(const std::vector<fs::path>& sources, const Tokenizer& tokenizer, const fs::path& where,
                             const BuildOptions& options) {
  const fs::path dir = fs::absolute(where).lexically_normal();
  Job job{find_text_files(sources), json::array(), tokenizer, options};
  for (const fs::path& file : job.files) job.identities.push_back(identity(file));
  if (fs::exists(dir / ".zgroup")) {
    const std::string differs = difference(dir, job);
    if (differs.empty()) {
      if (options.on_found) options.on_found();
      return TokenStore::open(dir);
    }
    if (!options.replace) {
      throw Error(fmt::format("{} holds another token store: {}", dir.string(), differs),
                  "name another --out, or replace it with --force");
    }
  } else if (fs::exists(dir) && !(fs::is_directory(dir) && fs::is_empty(dir))) {
    throw Error(fmt::format("{} exists and is no token store", dir.string()),
                "name a folder of its own for the tokens");
  }
  try {
    const fs::path building = beside(dir, "building");
    fs::create_directories(building);
    {
      const DirectoryLock lock(building);
      build(building, job);
      fs::remove(building / kLock);
      replace(building, dir);
    }
  } catch (const fs::filesystem_error& error) {
    throw Error(fmt::format("cannot write the token store {}: {}", dir.string(), error.code().message()),
                "check the folder and its disk");
  }
  return TokenStore::open(dir);
}

}  // namespace fox::data
