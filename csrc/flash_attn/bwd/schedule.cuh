// Which keys a thread block of the backward works on, and how many key blocks must add to the same rows of dQ before
// it.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"

namespace flash::flash_attn {

// A key block: block `block` of the keys of an entry, in one key head.
struct KeyWork {
  int entry, head_k;
  int block;
};

// How many key blocks a key head has in an entry or, if packed, in all entries together. The host does not know the
// lengths of packed entries, so there are as many as any lengths could need; some then do not exist.
__host__ __device__ inline int blocks_per_head(const Problem& p, int block_keys) {
  return p.cu_seqlens_k ? p.seqlen_k / block_keys + p.batch : blocks_for(p.seqlen_k, block_keys);
}

// The key block with a given index. Sections of plan.section_heads key heads follow one another; in a section come
// first the first key blocks of all its heads, then the second ones, and so on. With kTakesEntries, packed entries are
// taken plan.section_entries at a time: their first key blocks, in all heads of the section, then their second ones,
// and so on. It is a constant because it costs one per cent of the time where it is not used.
template <int kBlockN, bool kTakesEntries>
__device__ KeyWork key_work(const Problem& p, const BwdCommonPlan& plan, int block) {
  const int per_head = blocks_per_head(p, kBlockN), heads = static_cast<int>(num_key_heads(p));
  const int section = block / (plan.section_heads * per_head), place = block % (plan.section_heads * per_head);
  const int section_heads = min(plan.section_heads, heads - section * plan.section_heads);
  const int head = section * plan.section_heads + place % section_heads, index = place / section_heads;

  if (p.cu_seqlens_k == nullptr) return {head / p.heads_k, head % p.heads_k, index};
  // The key blocks of entry b start at cu_seqlens_k[b] / kBlockN + b: as in entry_of_slot (schedule.cuh).
  const auto start_of = [&](int entry) {
    return entry < p.batch ? __ldg(p.cu_seqlens_k + entry) / kBlockN + entry : per_head;
  };
  const int found = last_entry_from(p.batch, index, start_of);
  if (!kTakesEntries || plan.section_entries == 1) return {found, head, index - start_of(found)};

  const int first = found / plan.section_entries * plan.section_entries;
  const int end = min(first + plan.section_entries, p.batch);
  const auto blocks_of_entry = [&](int entry) { return start_of(entry + 1) - start_of(entry); };
  const auto blocks_before = [&](int number) {  // how many come before the entries' key blocks of this number
    int sum = 0;
    for (int entry = first; entry < end; ++entry) sum += min(number, blocks_of_entry(entry));
    return sum;
  };
  // Before the blocks of number n come at least n, those of the longest entry, and at most n of each entry.
  const int in_entries = index - start_of(first), least = in_entries / plan.section_entries;
  const auto from_least = [&](int above) { return blocks_before(least + above); };
  const int number = least + last_entry_from(in_entries - least + 1, in_entries, from_least);
  int entry = first;
  for (int skipped = in_entries - blocks_before(number); entry < end - 1; ++entry) {
    if (number < blocks_of_entry(entry) && skipped-- == 0) break;
  }
  return {entry, head, number};
}

// How many key blocks a problem has.
template <int kBlockN>
int key_blocks(const Problem& p) {
  const int64_t blocks = blocks_per_head(p, kBlockN) * num_key_heads(p);
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("k has too many keys and heads for one launch: " + std::to_string(blocks) + " blocks");
  }
  return static_cast<int>(blocks);
}

// The place of a key block among those that add to dQ of a row block, in the order of their keys. A semaphore counts
// how many have added. There is no deadlock: thread blocks take key blocks from a counter (BwdScratch::next_block) in
// the order of key_work, so a thread block waits only for key blocks that running thread blocks have already taken. All
// shares of a key block come before those of the next.
template <int kBlockM, int kBlockN>
struct AddOrder {
  int before;  // how many key blocks with earlier keys add to the rows
  bool last;   // whether none with later keys does

  // keys: from the first to the last that the rows see. All key blocks between add, even if their dQ is 0.
  __device__ AddOrder(const Interval& keys, int key_block)
      : before(key_block - keys.first / kBlockN), last(key_block == keys.last / kBlockN) {}

  __device__ AddOrder(const Mask& mask, int row_block, int key_block) {
    const Interval rows = interval_of<kBlockM>(row_block);
    *this = AddOrder(mask.keys_seen_by_any({rows.first, min(rows.last, mask.seqlen_q - 1)}), key_block);
  }
};

}  // namespace flash::flash_attn
