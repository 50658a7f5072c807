#pragma once

// Forgetting attention of one to eight new queries a sequence against a long cache of keys, values and gate prefixes.

#include "kernels/cuda/forgetting_attn.h"

extern "C" {

/// The prefixes of the gates beside a key/value cache, float32, in units of log2: c_j * log2(e) = block[j / 64] + r[j]
/// with r starting anew in every block of 64 keys and block split into hi + lo.
struct FoxPrefixCache {
  float* r;      ///< (batch, query_heads, max_blocks * 64)
  float* block;  ///< (batch, query_heads, max_blocks, 2)
  int32_t max_blocks;
};

/// All pointers are device pointers; zero-initialise, then fill.
struct ForgettingDecodeParams {
  int32_t dtype;                                              ///< FoxDtype of q, k, v, o
  int32_t batch, query_len, query_heads, kv_heads, head_dim;  ///< query_len * query_heads / kv_heads at most 128
  FoxTensor q, o;                                             ///< (batch, query_len, query_heads, head_dim)
  float* lse;      ///< (batch, query_heads, query_len), packed; NULL: not wanted
  FoxTensor k, v;  ///< (batch, time, kv_heads, head_dim), or with block_table a pool of pages of 64 keys of one head:
                   ///< stride_b from page to page, stride_t from key to key
  const int32_t* block_table;  ///< (batch, kv_heads, max_pages): page of keys 64 n .. 64 n + 63; NULL: not paged.
                               ///< Entries of pruned blocks are not read
  int32_t max_pages;
  const int32_t* key_len;  ///< (batch): keys of each sequence, those of the queries included; 0: o = 0
  int32_t max_key_len;     ///< upper bound of key_len
  FoxPrefixCache prefix;   ///< r = NULL: plain attention
  float scale;
  int32_t window;  ///< keys p - window < j <= p; 0: all
  int32_t pruned;  ///< as in ForgettingAttnParams, with L = key_len
  float log_tolerance;
  const float* logit_bound;  ///< (query_heads)
  void* workspace;           ///< fox_forgetting_decode_workspace() bytes, 256-byte aligned
  size_t workspace_bytes;
};

size_t fox_forgetting_decode_workspace(const ForgettingDecodeParams* params);
int fox_forgetting_decode(const ForgettingDecodeParams* params, cudaStream_t stream);

/// Appends the gates of `new_len` keys to each sequence's prefixes, which hold key_len[b] - new_len keys before.
int fox_forgetting_prefix_append(FoxPrefixCache prefix, FoxGates log_f, int32_t batch, int32_t query_heads,
                                 int32_t new_len, const int32_t* key_len, cudaStream_t stream);

}  // extern "C"
