// How long a backward on Hopper takes if its n_blocks are split: the model by which bwd/planner.h chooses the number of
// splits, and with key ranges, when only the GPU knows how many steps each n_block takes, bwd/work_list.cuh.
//
// Time is counted in steps: a step is what one thread block (above 128 channels, a cluster of two) does for one
// m_block. A call takes
//
//   - the steps of the splits that a place of the GPU takes one after the other, each with kStepsOfBlock more to start
//     and to end;
//   - if there is more than one split, the kernel that adds up dK and dV: kStepsOfSum, and one more for each
//     kChannelsOfStep channels that a multiprocessor adds up for the keys of an n_block.
//
// Where n_blocks have unequal numbers of steps, they have half of the most on average; thread blocks that are done take
// the next ones, so that the time is that of the longest one or the mean, whichever is more.
//
// The constants fit the rows of benchmarks/ladders/flash_attn_few_keys.csv, which were measured on an H100 both without
// splits and with as many as are chosen here; benchmarks/results/flash_attn_h100.csv has later times of some of them.
// In each row the choice is the faster of the two. A step takes 2.5 to 3.75 us in every row with splits, or up to 5.2
// above 128 channels. Without splits it takes 1.9 to 3.2, so that the model sees more in splits than there is: up to
// twice the gain. tests/attention/test_config.py replays the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/divmod.h"

#ifdef __CUDACC__
#define FLASH_HOST_DEVICE __host__ __device__
#else
#define FLASH_HOST_DEVICE
#endif

namespace flash::flash_attn {

constexpr int kMostSplits = 16;
constexpr int kStepsOfBlock = 3, kStepsOfSum = 5, kChannelsOfStep = 24, kFewestSteps = 4;

// The sizes from which the time of a call is estimated.
struct SplitProblem {
  int64_t n_blocks;  // of all key heads and entries
  int64_t m_blocks;  // of a query head: the most that see an n_block
  int group;         // query heads that share a key head
  bool uneven;       // whether some n_blocks are seen by fewer m_blocks, as under a causal mask
  int head_dim;      // of the instance
  int multiprocessors;

  // How many thread blocks, or clusters of two, run at a time.
  int64_t places() const { return multiprocessors / (head_dim > 128 ? 2 : 1); }
};

// How an n_block is split: by the query heads that share its key head, and by its m_blocks.
struct Splits {
  int of_heads = 1, of_m_blocks = 1;

  int count() const { return of_heads * of_m_blocks; }
};

// So many splits, by heads as far as these can be divided evenly.
inline Splits splits_of(const SplitProblem& p, int count) {
  const int of_heads = std::gcd(count, p.group);
  return {of_heads, count / of_heads};
}

// The time of a call, in steps.
inline int64_t steps_of_call(const SplitProblem& p, const Splits& splits) {
  const int64_t steps = p.group / splits.of_heads * ceil_div(p.m_blocks, int64_t{splits.of_m_blocks});
  const int64_t all = p.n_blocks * splits.count(), longest = steps + kStepsOfBlock;
  const int64_t main = p.uneven ? std::max(longest, ceil_div(all * (steps / 2 + kStepsOfBlock), p.places()))
                                : ceil_div(all, p.places()) * longest;
  if (splits.count() == 1) return main;
  return main + kStepsOfSum + all * p.head_dim / (kChannelsOfStep * p.multiprocessors);
}

// The splits with the least time. Those with more than `most` are left out, and more splits must gain 5 %. Where there
// are many n_blocks, there is one split: the last round is short beside the others.
inline Splits best_splits(const SplitProblem& p, int most) {
  Splits best;
  if (p.n_blocks > 4 * p.places()) return best;
  int64_t least = steps_of_call(p, best);
  for (int count = 2; count <= most; ++count) {
    const Splits splits = splits_of(p, count);
    const int64_t steps = steps_of_call(p, splits);
    if (splits.of_m_blocks > p.m_blocks || steps * 20 >= least * 19) continue;
    least = steps, best = splits;
  }
  return best;
}

// With key ranges, n_blocks may have any numbers of steps: one with the first keys, which all rows see, may have a
// hundred times as many as those of a window. Those that would keep a place busy after all others are done are split.
struct StepLimits {
  int64_t most;      // n_blocks with more steps are split
  int64_t of_split;  // into splits of about as many steps

  // An n_block has `longest` steps, all together have `total`. If the longest gains less than what the sum and a
  // quarter of the work of a place take, there are no splits.
  FLASH_HOST_DEVICE StepLimits(int64_t total, int64_t longest, int64_t places) {
    const int64_t mean = (total + places - 1) / places;
    const bool splits = longest > mean + mean / 4 + kStepsOfBlock + kStepsOfSum;
    most = !splits ? longest : mean > 2 * kFewestSteps ? mean : 2 * kFewestSteps;
    of_split = (most + 1) / 2;
  }

  // How many splits an n_block has, of which each visits one m_block at least.
  FLASH_HOST_DEVICE int splits(int64_t steps, int m_blocks) const {
    if (steps <= most) return 1;
    const int64_t count = (steps + of_split - 1) / of_split;
    return static_cast<int>(count < m_blocks ? count : m_blocks);
  }
};

// No more splits of split n_blocks than so many for each place: those n_blocks have more than the mean work of a place,
// so that they are fewer than the places; and their splits, two for the mean work and one for each n_block.
constexpr int kMostSplitsOfPlace = 3;

// There is no work list if no n_block can have more steps than so many: lists and sums take 6 to 8 us of an H200 in all
// calls, as long as three steps.
constexpr int kFewestListedSteps = 64;

// Nor if each place has more n_blocks than so many.
constexpr int kMostListedOfPlace = 64;

}  // namespace flash::flash_attn
