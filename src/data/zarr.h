#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fox::data {

/// What .zarray says of a zarr v2 array (https://zarr-specs.readthedocs.io, storage specification version 2).
struct ZarrMeta {
  struct Blosc {
    std::string cname = "lz4";
    int clevel = 5;
    int shuffle = 1;    // bytes
    int blocksize = 0;  // bytes that are compressed together; 0: Blosc chooses
  };

  std::vector<int64_t> shape, chunks;
  std::string dtype;           ///< NumPy's name, e.g. "<u2"
  std::optional<Blosc> blosc;  ///< nothing: chunks are not compressed
  char separator = '.';        ///< between the numbers in a chunk's file name

  int64_t item_bytes() const;
  /// Bytes of one chunk, before compression. Chunks at the edge are stored whole.
  int64_t chunk_bytes() const;
  /// Number of chunks along dimension d.
  int64_t grid(size_t d) const;

  /// Throws Error naming `source` and the key: other formats, orders, compressors and filters are not read.
  static ZarrMeta parse(std::string_view json, const std::string& source);
  /// That of the array `dir`.
  static ZarrMeta read(const std::filesystem::path& dir);
  std::string to_json() const;
};

/// An array on disk, open for reading. A missing chunk is an error, not zeros: a download that stopped half-way must
/// not become data. Chunks that were decoded last are kept; of a list, a small part of a chunk is decoded alone.
/// Thread-safe.
class ZarrArray {
 public:
  /// `dtype`: the element type that the caller expects; `recent_bytes`: how much of decoded chunks to keep. Throws
  /// Error naming the file.
  ZarrArray(std::filesystem::path dir, const std::string& dtype, int64_t recent_bytes = 64 << 20);

  const ZarrMeta& meta() const { return meta_; }
  /// Copies the box [start, start + count) into `out`, last dimension fastest. Throws Error naming a chunk's file that
  /// is missing or damaged; std::out_of_range for a box that is not in the array.
  void read(std::span<const int64_t> start, std::span<const int64_t> count, void* out) const;
  /// Throws Error naming the first chunk of that box that has no file. Reads none.
  void check_complete(std::span<const int64_t> start, std::span<const int64_t> count) const;

 private:
  using Chunk = std::shared_ptr<const std::string>;
  using Index = std::vector<int64_t>;
  /// The chunks that a box touches, none for an empty one: indices from `first` on, below `past`.
  struct Chunks {
    Index first, past;
  };
  std::optional<Chunks> chunks_of(std::span<const int64_t> start, std::span<const int64_t> count) const;
  std::string name_of(std::span<const int64_t> index) const;
  void copy_part(const Index& index, std::span<const int64_t> start, std::span<const int64_t> count, char* out) const;
  Chunk chunk(std::span<const int64_t> index) const;
  Chunk load(std::span<const int64_t> index, const std::string& name) const;
  /// Throws Error when it is missing.
  std::filesystem::path chunk_file(const std::string& name) const;
  /// Throws when a list's chunk of that number is not what its checksum says.
  void check(int64_t number, std::string_view stored) const;
  /// Elements [first, first + count) of a list's chunk.
  void read_part(int64_t number, int64_t first, int64_t count, char* out) const;

  std::filesystem::path dir_;
  ZarrMeta meta_;
  std::string checksums_;  // of a list's chunks, one after another

  mutable std::mutex mutex_;
  mutable std::vector<bool> checked_;                        // chunks whose checksums were right
  mutable std::list<std::pair<std::string, Chunk>> recent_;  // newest first
  size_t most_recent_;
};

/// A chunk as it is stored in a file: elements of one whole chunk, compressed as `meta` says (it must have Blosc).
std::string compress_chunk(const ZarrMeta& meta, const void* elements);

/// Writes a list, an array of one dimension, as its elements come, one chunk in memory. Its .zattrs gets the chunks'
/// checksums, which ZarrArray compares: Blosc itself notices only some kinds of damage. Until it is finished they are
/// lines of .checksums, from which another writer can go on.
class ZarrWriter {
 public:
  /// Makes `dir`. Chunks hold `chunk` elements and are compressed with Blosc's lz4.
  ZarrWriter(std::filesystem::path dir, const std::string& dtype, int64_t chunk);
  /// Goes on where a writer of the same folder had appended `size` elements, `pending` of them not yet in a chunk;
  /// chunks that it wrote afterwards are removed. Returns false when the folder is not what such a writer left.
  bool resume(int64_t size, std::string pending);
  void append(const void* elements, int64_t count);
  /// Makes sure that what was written so far survives a power cut.
  void sync() const;
  /// The last chunk and the metadata, written last: what has no .zarray is not finished.
  void finish();
  int64_t size() const { return meta_.shape[0]; }
  /// Bytes of the elements that are in no chunk yet.
  const std::string& pending() const { return pending_; }

 private:
  void write_chunk();

  std::filesystem::path dir_;
  ZarrMeta meta_;
  std::string pending_;
  int64_t chunks_written_ = 0;
};

}  // namespace fox::data
