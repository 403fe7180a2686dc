// How a backward is carried out: for each architecture a plan with all that its kernels must know besides the problem.
// bwd/planner.h chooses the plan.
#pragma once

#include <cstdint>
#include <variant>

#include "flash_attn/params.h"

namespace flash::flash_attn {

struct Interval;  // see mask.cuh

// With key ranges: which keys of a key block some row sees, and which rows see any of them.
struct alignas(8) KeyUse {
  int first_rows, last_rows;  // row blocks; those outside see none of the keys, and some of those inside may not either
  uint32_t live[4];           // a bit for each key: whether some row sees it
};

// There is a semaphore for every kSemaphoreRows rows of a head, the fewest of any tile. A kernel with larger tiles uses
// the first ones of each tile.
constexpr int kSemaphoreRows = 32;

// Memory through which the kernels of a call, and the thread blocks of one kernel, work together. Values of rows are
// stored padded: each head has rows_per_head rows, and each entry in it starts at a multiple of kRowPad.
struct BwdScratch {
  int64_t rows_per_head = 0;
  float* dq_accum = nullptr;  // fp32 dQ, as DqAccum lays it out
  int* semaphores = nullptr;  // (heads of all entries, rows_per_head / kSemaphoreRows), how many key blocks have added
                              // to dQ of these rows; unused unless thread blocks wait
  int* next_block = nullptr;  // (1), how many shares of key blocks have been taken
  float* key_sums = nullptr;  // where key blocks are shared: each share's sums of dK and dV (KeySums)
  // With key ranges, found by bwd/ranges.cu. If all heads have the same ranges, these are stored for one head.
  Interval* seen = nullptr;    // (heads of all entries, rows_per_head), the keys that a row sees
  KeyUse* key_uses = nullptr;  // (key heads of all entries, blocks of keys)
};

// In which order a key block visits the row blocks that see it.
enum class RowOrder {
  kLastFirst,
  kFirstFirst,  // under a causal mask, each key block thus starts at its own diagonal
  kRotated,     // each key block starts one row block later than the key block before it
};

// The part of a plan that also the small kernels before and after the main one read.
struct BwdCommonPlan {
  BwdScratch scratch;
  int section_heads = 1;    // key heads of a section: see key_work in bwd/schedule.cuh
  int section_entries = 1;  // packed entries whose key blocks are taken together, with kTakesEntries
  // How many thread blocks work on one key block: more than one if there are too few key blocks to occupy the GPU. The
  // query heads of its key head are divided into head_shares, its rows into row_shares; each thread block takes one
  // combination, and bwd/finish.cu adds up their dK and dV.
  int head_shares = 1, row_shares = 1, shares = 1;  // shares = head_shares * row_shares
  bool waits = false;      // thread blocks wait for one another before they touch the same rows of dQ: if the call is
                           // deterministic, or if rounds_dq
  bool rounds_dq = false;  // the main kernel rounds dQ, and dq_accum need not start as zeros; otherwise bwd/finish.cu
                           // rounds
  // (heads of all entries, rows_per_head), padded so that TMA can copy whole row blocks; null for bwd_sm80. Rows
  // that see no key or do not exist have +inf and 0, which make their probabilities and gradients 0.
  float* lse_log2 = nullptr;  // log2(e) times lse; with a bias, log2(e) times its rounding error
  float* lse = nullptr;       // with a bias: lse
  float* softmax_d = nullptr;
};

struct BwdSm80Plan : BwdCommonPlan {
  static constexpr bool kPlainHasHeadDimV = false, kHasRanged = false;  // as in fwd/plan.h
  static constexpr int kMostBiasedHeadDim = 0;
};

struct BwdSm90Plan : BwdCommonPlan {
  static constexpr bool kPlainHasHeadDimV = true, kHasRanged = true;
  static constexpr int kMostBiasedHeadDim = 128;  // bwd_sm90_wide has no such instances
  bool in_order = false;                          // deterministic: key blocks add to dQ in the order of their keys
  int blocks = 0;                                 // persistent thread blocks of bwd_sm90
  RowOrder row_order = RowOrder::kLastFirst;
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
