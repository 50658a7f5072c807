#include "bench/loader.h"

#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "data/batch_stream.h"
#include "data/longcrawl64.h"
#include "data/zarr.h"

namespace fox::bench {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int32_t kStart = 50256;
constexpr int64_t kArrayChunk = 2048, kDocumentTokens = 65536, kStoreChunk = 1 << 20;

/// Ids as common as words are, so that they compress about as text does.
std::vector<uint16_t> random_tokens(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint16_t> tokens(static_cast<size_t>(count));
  for (uint16_t& token : tokens) {
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;
    token = static_cast<uint16_t>(std::pow(50256.0, u));  // log-uniform: Zipf's law
  }
  return tokens;
}

void write_array(const fs::path& dir, const data::ZarrMeta& meta, int64_t chunks, const auto& name_of) {
  fs::create_directories(dir);
  for (int64_t i = 0; i < chunks; ++i) {
    const auto tokens = random_tokens(meta.chunk_bytes() / 2, static_cast<uint64_t>(i));
    write_file_atomically(dir / name_of(i), data::compress_chunk(meta, tokens.data()));
  }
  write_file_atomically(dir / ".zarray", meta.to_json());
}

/// One row of chunks: 2048 documents.
void write_longcrawl64(const fs::path& dir) {
  data::ZarrMeta meta;
  meta.shape = {kArrayChunk, kDocumentTokens};
  meta.chunks = {kArrayChunk, kArrayChunk};
  meta.dtype = "<u2";
  meta.blosc = data::ZarrMeta::Blosc{};
  write_array(dir, meta, kDocumentTokens / kArrayChunk, [](int64_t i) { return "0." + std::to_string(i); });
}

void write_store(const fs::path& dir, int64_t tokens) {
  data::ZarrWriter writer(dir / "tokens", "<u2", kStoreChunk), offsets(dir / "doc_offsets", "<i8", kStoreChunk);
  const int64_t chunks = std::max<int64_t>(1, tokens / kStoreChunk);
  for (int64_t i = 0; i < chunks; ++i)
    writer.append(random_tokens(kStoreChunk, static_cast<uint64_t>(i)).data(), kStoreChunk);
  writer.finish();
  const int64_t ends[] = {0, writer.size()};
  offsets.append(ends, 2);
  offsets.finish();
  write_file_atomically(dir / ".zattrs", R"({"tokenizer": ""})");
  write_file_atomically(dir / ".zgroup", R"({"zarr_format": 2})");
}

/// Seconds to make all batches, each by the next thread that is free.
double read_once(const data::TrainingStream& stream, int64_t contexts, int64_t batch, int64_t threads) {
  std::atomic<int64_t> next = 0;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::jthread> workers;
  for (int64_t i = 0; i < threads; ++i) {
    workers.emplace_back([&] {
      for (int64_t first; (first = next.fetch_add(batch)) < contexts;) stream.get(first, batch);
    });
  }
  workers.clear();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

LoaderMeasurement measure(const fs::path& dir, const LoaderOptions& options) {
  const int64_t batch = options.batch_tokens / options.context;
  std::unique_ptr<const data::TrainingStream> stream;
  const bool published = data::is_longcrawl64(dir);
  if (published) {
    stream = std::make_unique<const data::LongCrawl64Stream>(dir, options.context, batch, kStart, 65536);
  } else {
    auto store = std::make_shared<const data::TokenStore>(data::TokenStore::open(dir));
    stream = std::make_unique<const data::BatchStream>(std::move(store), options.context, 0, kStart);
  }
  const int64_t there = published ? stream->contexts_per_epoch() : options.tokens / options.context;
  const int64_t contexts = std::min(options.tokens / options.context, there) / batch * batch;
  if (contexts == 0) throw Error("less than one batch to read", "choose more --tokens, or a smaller batch");
  std::vector<double> seconds;
  for (int64_t i = 0; i <= options.repetitions; ++i)
    seconds.push_back(read_once(*stream, contexts, batch, options.threads));
  seconds.erase(seconds.begin());
  std::nth_element(seconds.begin(), seconds.begin() + std::ssize(seconds) / 2, seconds.end());
  return {published ? "longcrawl64" : "store",
          options.context,
          options.batch_tokens,
          options.threads,
          contexts * options.context,
          seconds[seconds.size() / 2]};
}

}  // namespace

void bench_loader(const LoaderOptions& options, const std::function<void(const LoaderMeasurement&)>& on_line) {
  if (options.batch_tokens < options.context)
    throw UsageError("a batch is shorter than a context", "choose more --batch-tokens");
  if (!options.dir.empty()) return on_line(measure(options.dir, options));
  std::string folder = (fs::temp_directory_path() / "fox-loader-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr)
    throw Error("cannot make a folder in " + fs::temp_directory_path().string(),
                "set TMPDIR to one that can be written");
  const std::shared_ptr<void> remove(nullptr, [&](void*) { fs::remove_all(folder); });
  write_longcrawl64(fs::path(folder) / "train.zarr");
  on_line(measure(fs::path(folder) / "train.zarr", options));
  write_store(fs::path(folder) / "store", options.tokens);
  on_line(measure(fs::path(folder) / "store", options));
}

std::string to_json(const LoaderMeasurement& m) {
  return json{{"bench", "loader"},    {"format", m.format}, {"context", m.context}, {"batch_tokens", m.batch_tokens},
              {"threads", m.threads}, {"tokens", m.tokens}, {"seconds", m.seconds}, {"tokens_per_s", m.tokens_per_s()}}
      .dump();
}

}  // namespace fox::bench
