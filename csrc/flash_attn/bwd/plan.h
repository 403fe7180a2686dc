// How a backward is carried out: for each architecture a plan with all that its kernels must know besides the problem.
// bwd/planner.h chooses the plan; bwd/kernels.h says which problems the kernels take.
#pragma once

#include <cstdint>
#include <variant>

#include "flash_attn/bwd/kernels.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

struct Interval;  // see mask.cuh

// With key ranges: which keys of an n_block some row sees, and which rows see any of them.
struct alignas(8) KeyUse {
  int first_m, last_m;  // m_blocks; those outside see none of the keys, and some of those inside may not either
  int steps;            // m_blocks to visit, in all query heads of a key head
  uint32_t live[4];     // a bit for each key: whether some row sees it
};

// What a thread block of the main kernel takes at a time: a split of an n_block, mostly the only one.
struct alignas(16) BwdWorkTile {
  int place;  // of the n_block in the order in which they are taken (n_block_at)
  int split, splits;
};

// Which of BwdScratch::key_sums the splits of an n_block have, if there are several.
struct alignas(8) SplitSums {
  int first, count;
};

// There is a semaphore for every kSemaphoreRows rows of a head, the fewest of any tile. A kernel with larger tiles uses
// the first ones of each tile.
constexpr int kSemaphoreRows = 32;

// Memory through which the kernels of a call, and the thread blocks of one kernel, work together. Values of rows are
// stored padded: each head has rows_per_head rows, and each entry in it starts at a multiple of kRowPad.
struct BwdScratch {
  int64_t rows_per_head = 0;
  float* dq_accum = nullptr;  // fp32 dQ, as DqAccum lays it out
  int* semaphores = nullptr;  // (heads of all entries, rows_per_head / kSemaphoreRows), how many n_blocks have added
                              // to dQ of these rows; unused unless thread blocks wait
  int* next_work = nullptr;   // (2), how many work tiles have been taken; and with a work list, how many there are
  float* key_sums = nullptr;  // where n_blocks are split: each split's sums of dK and dV (KeySums)
  // With key ranges, found by bwd/ranges.cu. If all heads have the same ranges, these are stored for one head.
  Interval* seen = nullptr;    // (heads of all entries, rows_per_head), the keys that a row sees
  KeyUse* key_uses = nullptr;  // (key heads of all entries, n_blocks)
  // The work list (bwd/work_list.cuh), with key ranges if some n_blocks may need splits: all work tiles in their order;
  // and for n_blocks of each key head where their sums are.
  BwdWorkTile* work_tiles = nullptr;
  SplitSums* split_sums = nullptr;  // (key heads of all entries, n_blocks)
};

// In which order the m_blocks that see an n_block are visited.
enum class MBlockOrder {
  kLastFirst,
  kFirstFirst,  // under a causal mask, each n_block thus starts at its own diagonal
  kRotated,     // each n_block starts one m_block later than the n_block before it
};

// The part of a plan that also the small kernels before and after the main one read.
struct BwdCommonPlan {
  BwdScratch scratch;
  // The swizzle, the order in which n_blocks are taken for the sake of the L2 cache (bwd/tile_scheduler.cuh):
  int swizzle_heads = 1;    // key heads whose n_blocks are taken together
  int swizzle_entries = 1;  // packed entries whose n_blocks are taken together, with Swizzle::kHeadsAndEntries
  // Into how many splits an n_block is divided, each for a thread block of its own: more than one if there are too few
  // n_blocks to occupy the GPU. The query heads of its key head are divided into head_splits, its m_blocks into
  // m_splits; each split is one combination, and bwd/finish.cu adds up their dK and dV. With a work list, each n_block
  // has as many splits as that says, all by m_blocks.
  int head_splits = 1, m_splits = 1, splits = 1;  // splits = head_splits * m_splits
  int block_keys = 0;                             // keys of an n_block
  int places = 0;                                 // how many thread blocks, or clusters of two, run at a time
  bool waits = false;      // thread blocks wait at dQ semaphores before they touch rows of dQ that others touch, too:
                           // if the call is deterministic, or if rounds_dq
  bool rounds_dq = false;  // the main kernel rounds dQ, and dq_accum need not start as zeros; otherwise bwd/finish.cu
                           // rounds
  // (heads of all entries, rows_per_head), padded so that TMA can copy whole m_blocks; null for bwd_sm80. Rows
  // that see no key or do not exist have +inf and 0, which make their probabilities and gradients 0.
  float* lse_log2 = nullptr;  // log2(e) times lse; with a bias, log2(e) times its rounding error
  float* lse = nullptr;       // with a bias: lse
  float* softmax_d = nullptr;
};

struct BwdSm80Plan : BwdCommonPlan {
  using Kernel = BwdSm80Kernel;
};

struct BwdSm90Plan : BwdCommonPlan {
  using Kernel = BwdSm90Kernel;
  bool in_order = false;  // deterministic: n_blocks add to dQ in the order of their keys
  int blocks = 0;         // persistent thread blocks of bwd_sm90
  MBlockOrder m_block_order = MBlockOrder::kLastFirst;
};

using BwdPlan = std::variant<BwdSm80Plan, BwdSm90Plan>;

// The parameters of a kernel: the problem and the plan of this kernel.
template <typename Plan>
struct PlannedBwd : BwdParams {
  Plan plan;
};
using BwdCommonParams = PlannedBwd<BwdCommonPlan>;
using BwdSm80Params = PlannedBwd<BwdSm80Plan>;
using BwdSm90Params = PlannedBwd<BwdSm90Plan>;

}  // namespace flash::flash_attn
