// A step before attention for masks that the attention kernels do not know (chunks, causal or not by entry, used rows):
// it intersects all of them into one key range for each row. Row i of n used rows, whose own key is i + D where
// D = seqlen_k - n, sees
//
//   from the window             i + D - left .. i + D + right
//   in an entry that is causal  no key after i + D
//   from chunks of c keys       c floor((i + D) / c) .. that + c - 1
//   from the given range        first .. end - 1
//
// One thread computes one row.
#pragma once

#include "common/launch.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

constexpr int kRangesThreads = 128;

__device__ inline bool is_causal(const RangesParams& p, int entry) {
  if (p.causal == nullptr) return false;
  return p.causal_bytes == 1 ? static_cast<const char*>(p.causal)[entry] != 0
                             : static_cast<const int*>(p.causal)[entry] != 0;
}

// The keys that row `row` of an entry sees, all restrictions together.
__device__ inline Interval keys_for_all_reasons(const RangesParams& p, int entry, int head, int row) {
  Sequence seq(p.problem, entry, p.paged);
  const KeyRanges& given = p.problem.ranges;
  const int64_t at = seq.q.batch * given.batch + head * given.heads + (seq.q.first + row) * given.seqlen;
  if (p.seqused_q != nullptr) seq.q.length = min(max(p.seqused_q[entry], 0), seq.q.length);
  if (row >= seq.q.length) return {0, -1};
  const Mask mask(p.problem, seq);
  const int own = row + mask.diagonal();
  Interval seen = mask.keys_seen_by(row);
  if (is_causal(p, entry)) seen.last = min(seen.last, own);
  if (p.chunk > 0) {
    const int first = own - (own % p.chunk + p.chunk) % p.chunk;
    seen = intersection(seen, {first, first + p.chunk - 1});
  }
  if (given.data != nullptr) {
    seen = intersection(seen, {given.data[at], min(max(given.data[at + 1], 0), seq.k.length) - 1});
  }
  return seen.empty() ? Interval{0, -1} : seen;
}

__global__ __launch_bounds__(kRangesThreads) void ranges_kernel(const __grid_constant__ RangesParams p) {
  const int64_t index = int64_t{blockIdx.x} * kRangesThreads + threadIdx.x;
  const int64_t outer = index / p.problem.seqlen_q;
  const int position = index % p.problem.seqlen_q, head = outer % p.heads;
  const bool packed = p.problem.cu_seqlens_q != nullptr;
  if (outer >= int64_t{p.heads} * (packed ? 1 : p.problem.batch)) return;
  Interval seen{0, -1};  // of packed rows after the last entry, too
  if (!packed) {
    seen = keys_for_all_reasons(p, outer / p.heads, head, position);
  } else if (p.problem.batch > 0 && position < __ldg(p.problem.cu_seqlens_q + p.problem.batch)) {
    const auto start_of = [&](int entry) { return int64_t{__ldg(p.problem.cu_seqlens_q + entry)}; };
    const int entry = last_entry_from(p.problem.batch, position, start_of);
    seen = keys_for_all_reasons(p, entry, head, position - static_cast<int>(start_of(entry)));
  }
  store(p.ranges + 2 * index, Vec<int, 2>{seen.first, seen.last + 1});
}

inline void run_ranges(const RangesParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.problem.seqlen_q} * p.heads * (p.problem.cu_seqlens_q ? 1 : p.problem.batch);
  launch<ranges_kernel>({.grid = dim3(ceil_div(rows, kRangesThreads)), .block = dim3(kRangesThreads)}, p, stream);
}

}  // namespace flash::flash_attn
