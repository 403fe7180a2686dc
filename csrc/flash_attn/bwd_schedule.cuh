// Which keys a block of the backward works on.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"

namespace flash::flash_attn {

// A block of the keys of an entry, in one key head.
struct KeyWork {
  int entry, head_k;
  int block;
};

// How many blocks share a key head: of an entry or, if packed, of all entries, as many as the tokens could need.
template <int kBlockN>
__host__ __device__ int blocks_per_head(const BwdParams& p) {
  return p.problem.cu_seqlens_k ? p.problem.seqlen_k / kBlockN + p.problem.batch
                                : blocks_for<kBlockN>(p.problem.seqlen_k);
}

// Of all entries unless they are packed.
__host__ __device__ inline int num_key_heads(const BwdParams& p) {
  return p.problem.heads_k * (p.problem.cu_seqlens_k != nullptr ? 1 : p.problem.batch);
}

// Blocks come in sections of key heads; in a section, those of the first keys come first.
template <int kBlockN>
__device__ KeyWork key_work(const BwdParams& params, int block) {
  const Problem& p = params.problem;
  const int per_head = blocks_per_head<kBlockN>(params), heads = num_key_heads(params);
  const int section_size = params.section_heads;
  const int section = block / (section_size * per_head), place = block % (section_size * per_head);
  const int section_heads = min(section_size, heads - section * section_size);
  const int head = section * section_size + place % section_heads, index = place / section_heads;

  if (p.cu_seqlens_k == nullptr) return {head / p.heads_k, head % p.heads_k, index};
  // The blocks of entry b start at cu_seqlens_k[b] / kBlockN + b.
  const auto start_of = [&](int entry) { return __ldg(p.cu_seqlens_k + entry) / kBlockN + entry; };
  const int entry = last_entry_from(p.batch, index, start_of);
  return {entry, head, index - start_of(entry)};
}

// How many blocks a launch has.
template <int kBlockN>
int64_t key_blocks(const BwdParams& p) {
  const int64_t blocks = int64_t{blocks_per_head<kBlockN>(p)} * num_key_heads(p);
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("k has too many keys and heads for one launch: " + std::to_string(blocks) + " blocks");
  }
  return blocks;
}

}  // namespace flash::flash_attn
