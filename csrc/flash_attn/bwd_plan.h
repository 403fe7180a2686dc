// How a backward is carried out: a type for each architecture, with all that its kernels must know besides the problem.
// bwd_planner.h chooses.
#pragma once

#include <cstdint>
#include <variant>

#include "flash_attn/params.h"

namespace flash::flash_attn {

struct Interval;  // see mask.cuh

// Which of a block of keys the rows see, and which rows see any of them, if there are key ranges.
struct alignas(8) KeyUse {
  int first_rows, last_rows;  // blocks of rows; others see none of the keys, nor may some between these
  uint32_t live[4];           // a bit for each key: whether some row sees it
};

constexpr int kSemaphoreRows = 32;  // a semaphore for so many rows; kernels that need one for more rows use the first

// Memory through which the kernels of a call, and the blocks of one kernel, work together. Kernels that store values of
// rows in whole blocks give each head `rows_per_head` rows, in which an entry starts at a multiple of kRowPad.
struct BwdScratch {
  int64_t rows_per_head = 0;
  float* dq_accum = nullptr;  // fp32 dQ, as DqAccum lays it out
  int* semaphores = nullptr;  // (heads of all entries, rows_per_head / kSemaphoreRows), how many blocks have added to
                              // dQ of these rows; unused unless blocks wait
  int* next_block = nullptr;  // (1), how many blocks of keys have been taken
  // With key ranges, as bwd_ranges.cu finds them; where all heads have the same, for one of them.
  Interval* seen = nullptr;    // (heads of all entries, rows_per_head), the keys that a row sees
  KeyUse* key_uses = nullptr;  // (key heads of all entries, blocks of keys)
};

// In which order a block of keys walks over the rows that see them.
enum class RowOrder {
  kLastFirst,
  kFirstFirst,  // each block starts at its own diagonal
  kRotated,     // each block starts one block of rows later than the one before
};

// The part of a plan that the small kernels before and after the main one read.
struct BwdCommonPlan {
  BwdScratch scratch;
  int section_heads = 1;   // key heads whose blocks start together
  bool waits = false;      // blocks wait for others before they touch the same rows of dQ: if deterministic, in the
                           // order of their keys, or if rounds_dq
  bool rounds_dq = false;  // the main kernel rounds dQ, and dq_accum does not start as zeros; otherwise bwd_finish.cu
                           // rounds
  // (heads of all entries, rows_per_head), so that copies of whole blocks can move them; null where nothing moves them.
  // Rows that see no key, or do not exist, have +inf and 0, and with them probabilities and gradients of 0.
  float* lse_log2 = nullptr;  // log2(e) lse
  float* softmax_d = nullptr;
};

struct BwdSm80Plan : BwdCommonPlan {
  static constexpr bool kPlainHasHeadDimV = false, kHasRanged = false;  // as in fwd_plan.h
  static constexpr int kMostBiasedHeadDim = 0;
};

struct BwdSm90Plan : BwdCommonPlan {
  static constexpr bool kPlainHasHeadDimV = true, kHasRanged = true;
  static constexpr int kMostBiasedHeadDim = 128;  // none of bwd_sm90_wide.cuh
  bool in_order = false;                          // deterministic: blocks add in the order of their keys
  int blocks = 0;                                 // that share all blocks of keys, in bwd_sm90.cuh
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
