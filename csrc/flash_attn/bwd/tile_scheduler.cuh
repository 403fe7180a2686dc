// The tile scheduler of the backward: which n_block a thread block takes, and which other n_blocks must add to the same
// rows of dQ before it.
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

// Tiles are called m_blocks, of query rows, and n_blocks, of keys: n_block `index` of an entry, in one key head.
struct NBlock {
  int entry, head_k;
  int index;
};

// How many n_blocks a key head has in an entry or, if packed, in all entries together. The host does not know the
// lengths of packed entries, so there are as many as any lengths could need; some then do not exist.
__host__ __device__ inline int n_blocks_per_head(const Problem& p, int block_keys) {
  return p.cu_seqlens_k ? p.seqlen_k / block_keys + p.batch : blocks_for(p.seqlen_k, block_keys);
}

// The index of an n_block among those of all entries, with `heads` key heads each.
__device__ inline int64_t n_block_index(const Problem& p, const NBlock& n_block, int block_keys, int heads) {
  const int per_head = n_blocks_per_head(p, block_keys);
  if (p.cu_seqlens_k == nullptr) return (int64_t{n_block.entry} * heads + n_block.head_k) * per_head + n_block.index;
  const int first = __ldg(p.cu_seqlens_k + n_block.entry) / block_keys + n_block.entry;
  return int64_t{n_block.head_k} * per_head + first + n_block.index;
}
__device__ inline int64_t n_block_index(const Problem& p, const NBlock& n_block, int block_keys) {
  return n_block_index(p, n_block, block_keys, p.heads_k);
}

// Whose n_blocks are interleaved, so that those that run at the same time read the same rows from the L2 cache. It is a
// constant because entries cost one per cent of the time where they are not interleaved.
enum class Swizzle {
  kHeads,            // those of plan.swizzle_heads key heads
  kHeadsAndEntries,  // if entries are packed, those of plan.swizzle_entries entries, too
};

// The n_block that is taken as the `place`-th. Groups of plan.swizzle_heads key heads follow one another; in a group
// come first the first n_blocks of all its heads, then the second ones, and so on. With kHeadsAndEntries, packed
// entries are taken plan.swizzle_entries at a time: their first n_blocks, in all heads of the group, then their second
// ones, and so on.
template <int kBlockN, Swizzle kSwizzle>
__device__ NBlock n_block_at(const Problem& p, const BwdCommonPlan& plan, int place) {
  const int per_head = n_blocks_per_head(p, kBlockN), heads = static_cast<int>(num_key_heads(p));
  const int group = place / (plan.swizzle_heads * per_head), in_group = place % (plan.swizzle_heads * per_head);
  const int group_heads = min(plan.swizzle_heads, heads - group * plan.swizzle_heads);
  const int head = group * plan.swizzle_heads + in_group % group_heads, index = in_group / group_heads;

  if (p.cu_seqlens_k == nullptr) return {head / p.heads_k, head % p.heads_k, index};
  // The n_blocks of entry b start at cu_seqlens_k[b] / kBlockN + b, as slots do in the forward (entry_of_slot).
  const auto start_of = [&](int entry) {
    return entry < p.batch ? __ldg(p.cu_seqlens_k + entry) / kBlockN + entry : per_head;
  };
  const int found = last_entry_from(p.batch, index, start_of);
  if (kSwizzle == Swizzle::kHeads || plan.swizzle_entries == 1) return {found, head, index - start_of(found)};

  const int first = found / plan.swizzle_entries * plan.swizzle_entries;
  const int end = min(first + plan.swizzle_entries, p.batch);
  const auto blocks_of_entry = [&](int entry) { return start_of(entry + 1) - start_of(entry); };
  const auto blocks_before = [&](int number) {  // how many come before the entries' n_blocks of this number
    int sum = 0;
    for (int entry = first; entry < end; ++entry) sum += min(number, blocks_of_entry(entry));
    return sum;
  };
  // Before the blocks of number n come at least n, those of the longest entry, and at most n of each entry.
  const int in_entries = index - start_of(first), least = in_entries / plan.swizzle_entries;
  const auto from_least = [&](int above) { return blocks_before(least + above); };
  const int number = least + last_entry_from(in_entries - least + 1, in_entries, from_least);
  int entry = first;
  for (int skipped = in_entries - blocks_before(number); entry < end - 1; ++entry) {
    if (number < blocks_of_entry(entry) && skipped-- == 0) break;
  }
  return {entry, head, number};
}

// How many n_blocks a problem has.
template <int kBlockN>
int num_n_blocks(const Problem& p) {
  const int64_t blocks = n_blocks_per_head(p, kBlockN) * num_key_heads(p);
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("k has too many keys and heads for one launch: " + std::to_string(blocks) + " blocks");
  }
  return static_cast<int>(blocks);
}

// The place of an n_block among those that add to dQ of an m_block, in the order of their keys. A dQ semaphore counts
// how many have added. There is no deadlock: thread blocks take n_blocks from a counter (BwdScratch::next_work) in the
// order of n_block_at, so a thread block waits only for n_blocks that running thread blocks have already taken. All
// splits of an n_block come before those of the next.
template <int kBlockM, int kBlockN>
struct DqOrder {
  int before;  // how many n_blocks with earlier keys add to the rows
  bool last;   // whether none with later keys does

  // keys: from the first to the last that the rows see. All n_blocks between add, even if their dQ is 0.
  __device__ DqOrder(const Interval& keys, int n_block)
      : before(n_block - keys.first / kBlockN), last(n_block == keys.last / kBlockN) {}

  __device__ DqOrder(const Mask& mask, int m_block, int n_block) {
    const Interval rows = interval_of<kBlockM>(m_block);
    *this = DqOrder(mask.keys_seen_by_any({rows.first, min(rows.last, mask.seqlen_q - 1)}), n_block);
  }
};

}  // namespace flash::flash_attn
