// The tile scheduler of serving instances of fwd_sm90. Lengths are on the device, and entries of a batch may differ a
// lot: one prompt of thousands of rows, and a hundred entries that decode a single row over thousands of keys. So the
// keys of a tile may be cut into pieces, which thread blocks compute side by side and merge_pieces puts together.
//
// At its start, each thread block reads the lengths of all entries and finds out how much work there is before each of
// them. There are two ways to divide it:
//
// - even: all n_blocks of all tiles form one line, of which each thread block takes an equal share. So all of them end
//   at the same time, and a thread block has at most two pieces that are not whole tiles. This suits tiles that read
//   keys of their own: where all rows that share a key head fit one tile.
// - in pieces: a counter gives one piece after the other, neighbours being tiles that read the same keys at the same
//   time. Only where there are few tiles, or long ones among short ones, is there more than one piece in a tile.
//
// With pieces of fixed length (FixedPieces), a tile that is cut has all of its pieces to itself. A tile that is not is
// handed out as a whole, and the thread block folds its pieces: the results are the same.
#pragma once

#include <cstdint>
#include <limits>

#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "tile/fragment.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// A piece of a tile: its index among `count`, and the slot of its partial result. A whole tile has none.
struct Piece {
  int index = 0, count = 1, slot = -1;
  int first_slot = -1, second_slot = -1, stride = 0;  // of the tile's pieces, as in PieceRecord

  __device__ bool is_whole() const { return count == 1; }
};

template <typename Config>
struct ServingWork : FwdWork<Config> {
  Piece piece;

  // The n_blocks of `tile` that are among those of its piece.
  __device__ ServingWork(const ServingParams& p, const WorkTile& tile, const Piece& piece, const Interval& n_blocks)
      : FwdWork<Config>(p, p.plan.tiling, tile), piece(piece) {
    this->n_blocks = intersection(this->n_blocks, n_blocks);
  }

  __device__ bool exists() const { return this->rows.count > 0; }
};

// How much there is to do for an entry: m_blocks for each group of packed heads, and the n_blocks that its rows see (at
// least 1, for which the results of rows without keys are written).
struct EntryWork {
  int m_blocks, num_n_blocks, first_n_block;

  template <typename Config>
  __device__ static EntryWork of(const ServingParams& p, int entry) {
    const Sequence seq(p.problem, entry, p.pages.block_table != nullptr);
    const int rows = seq.q.length * static_cast<int>(p.plan.tiling.packed_heads.value);
    const Interval seen = rows > 0 ? Mask(p.problem, seq).keys_seen_by_any({0, seq.q.length - 1}) : Interval{0, -1};
    const Interval n_blocks = blocks_of(seen, Config::kKeys);
    return {(rows + Config::kRows - 1) / Config::kRows, max(1, n_blocks.last - n_blocks.first + 1), n_blocks.first};
  }
};

// The work of all entries, in shared memory: how much there is before each record, in n_blocks if the plan is `even`,
// else in pieces. A record stands for `stride` entries, more than one in large batches.
struct WorkList {
  static constexpr int kRecords = kWarpgroup;  // one for each thread of the producer's warpgroup
  int64_t before[kRecords + 1];
  int slots_before[kRecords + 1];  // slots of pieces; unused if the plan is `even`
  int64_t sums[2][kRecords / 32];
  int piece_n_blocks;  // about how many n_blocks a piece has
};

// How the n_blocks of an entry's tiles are cut into pieces: how many there are, and the n_blocks of each, which begin
// at multiples of `each` from `origin` on.
struct Cut {
  int pieces, origin, each;

  __device__ Interval n_blocks(int index) const { return {origin + index * each, origin + (index + 1) * each - 1}; }
};

__device__ inline Cut cut_of(const ServingPlan& plan, const WorkList& list, const EntryWork& work) {
  const int first = work.first_n_block, count = work.num_n_blocks, fixed = plan.pieces.n_blocks;
  const auto equal = [&](int pieces) { return Cut{pieces, first, (count + pieces - 1) / pieces}; };
  if (plan.num_splits > 0) return equal(min(plan.num_splits, count));
  if (2 * int64_t{count} <= 3 * int64_t{list.piece_n_blocks}) return equal(1);
  if (fixed == 0) return equal((count + list.piece_n_blocks - 1) / list.piece_n_blocks);
  return {(first + count - 1) / fixed - first / fixed + 1, first / fixed * fixed, fixed};
}

template <typename Config>
struct ListScheduler {
  static constexpr int kBarrier = 15;  // of the producer's warps
  const ServingParams& p;
  WorkList& list;
  const int num_entries, stride;
  int blocks;       // even: how many thread blocks share the work
  int64_t at, end;  // even: the n_blocks of this thread block; else `at` is its piece, and `end` how many there are
  int count;        // even: how many n_blocks the current piece has
  int taken;        // valid in lane 0, which calls take_next

  __device__ ListScheduler(const ServingParams& p, WorkList& list)
      : p(p),
        list(list),
        num_entries(p.problem.batch + (p.problem.cu_seqlens_q != nullptr)),
        stride((num_entries + WorkList::kRecords - 1) / WorkList::kRecords) {}

  __device__ static int thread() { return threadIdx.x % WorkList::kRecords; }
  __device__ static void sync() { ptx::sync_barrier<WorkList::kRecords>(kBarrier); }

  // What there is to do for an entry: its work; how many units there are in the line, n_blocks or pieces; and how many
  // slots these need.
  struct Amount {
    EntryWork entry;
    int64_t tiles, units, slots;
  };
  __device__ Amount amount_of(int entry, bool in_n_blocks) const {
    if (entry >= num_entries) return {};
    const auto work = EntryWork::of<Config>(p, entry);
    const int64_t tiles = int64_t{p.plan.tiling.head_groups.value} * work.m_blocks;
    if (in_n_blocks) return {work, tiles, tiles * work.num_n_blocks, 0};
    const int pieces = cut_of(p.plan, list, work).pieces;
    return {work, tiles, tiles * pieces, pieces > 1 ? tiles * pieces : 0};
  }
  // The sum over the entries of this thread's record.
  __device__ Amount amount_of_record(bool in_n_blocks) const {
    Amount sum{};
    for (int entry = thread() * stride; entry < (thread() + 1) * stride; ++entry) {
      const Amount own = amount_of(entry, in_n_blocks);
      sum.tiles += own.tiles, sum.units += own.units, sum.slots += own.slots;
    }
    return sum;
  }

  // Sums over the lanes of a warp up to this one.
  __device__ static int64_t sum_of_lanes(int64_t x) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int64_t other = __shfl_up_sync(~0u, x, lanes);
      if (lane_id() >= lanes) x += other;
    }
    return x;
  }
  // The sum over the threads before this one; total: over all.
  __device__ int64_t sum_before(int64_t x, int64_t& total, int64_t (&sums)[WorkList::kRecords / 32]) {
    const int64_t sum = sum_of_lanes(x);
    if (lane_id() == 31) sums[thread() / 32] = sum;
    sync();
    int64_t before = sum - x;
    total = 0;
    for (int warp = 0; warp < WorkList::kRecords / 32; ++warp) {
      if (warp < thread() / 32) before += sums[warp];
      total += sums[warp];
    }
    sync();
    return before;
  }

  // About how many n_blocks a piece has, where the call does not say: the average tile in as many pieces as occupy all
  // thread blocks well, and at most four pieces for each of them.
  __device__ int choose_piece(int64_t tiles, int64_t n_blocks) const {
    const int64_t blocks = gridDim.x;
    int best = 1;
    float best_use = 0;
    for (int pieces = 1; pieces <= 16 && (pieces == 1 || tiles * pieces <= 4 * blocks); ++pieces) {
      const int64_t waves = (tiles * pieces + blocks - 1) / blocks;
      const float use = static_cast<float>(tiles * pieces) / static_cast<float>(waves * blocks);
      if (use > 1.1f * best_use) best = pieces, best_use = use;
    }
    const int64_t of_average = n_blocks / max(tiles * best, int64_t{1}) + 1, least = n_blocks / (4 * blocks) + 1;
    return static_cast<int>(max(max(of_average, least), int64_t{4}));
  }

  // All of the producer's threads fill the list together. Then one of its warps asks for pieces.
  __device__ void begin() {
    Amount own = amount_of_record(/*in_n_blocks=*/true);
    int64_t all_units, all_tiles, slots_before = 0;
    int64_t before = sum_before(own.units, all_units, list.sums[0]);
    if (p.plan.even) {
      // A thread block has at least four n_blocks: for fewer, merging would take longer than they do.
      blocks = static_cast<int>(min(int64_t{gridDim.x}, max(int64_t{1}, all_units / 4)));
      const int block = min(static_cast<int>(blockIdx.x), blocks);
      at = all_units * block / blocks, end = all_units * min(block + 1, blocks) / blocks;
    } else {
      sum_before(own.tiles, all_tiles, list.sums[1]);
      int piece_n_blocks =
          p.plan.slots.count > 0 ? choose_piece(all_tiles, all_units) : std::numeric_limits<int>::max();
      for (;; piece_n_blocks *= 2) {
        if (thread() == 0) list.piece_n_blocks = piece_n_blocks;
        sync();
        own = amount_of_record(/*in_n_blocks=*/false);
        before = sum_before(own.units, all_units, list.sums[0]);
        int64_t all_slots;
        slots_before = sum_before(own.slots, all_slots, list.sums[1]);
        // Pieces of fixed length may need more slots than there are: then fewer tiles are cut.
        if (p.plan.num_splits > 0 || all_slots <= p.plan.slots.count) break;
      }
      at = blockIdx.x, end = all_units;
    }
    list.before[thread()] = before;
    list.slots_before[thread()] = static_cast<int>(slots_before);
    if (thread() == 0) list.before[WorkList::kRecords] = all_units;
    sync();
  }

  __device__ bool has_tile() const { return at < end; }

  // Which unit of the line comes next. Pieces of several entries come from both ends of the line in turn: in a mixed
  // batch, where prompts stand before or after the rows that are decoded, some thread blocks then compute while others
  // read from memory.
  __device__ int64_t position() const {
    if (p.plan.even || p.problem.batch == 1) return at;
    return at % 2 == 0 ? at / 2 : end - 1 - at / 2;
  }

  // Where a position of the line is: the entry, and how much lies before it in the line and in slots.
  struct Place {
    int entry;
    EntryWork work;
    int64_t before;
    int slots_before;
  };
  // All lanes of a warp call it together.
  __device__ Place find(int64_t position) const {
    int record = 0;
#pragma unroll
    for (int first = 0; first < WorkList::kRecords; first += 32) {
      record += __popc(__ballot_sync(~0u, list.before[first + lane_id()] <= position));
    }
    --record;
    int64_t before = list.before[record], slots_before = list.slots_before[record];
    for (int first = record * stride;; first += 32) {
      const Amount own = amount_of(first + lane_id(), p.plan.even);
      const int64_t units = sum_of_lanes(own.units), slots = sum_of_lanes(own.slots);
      const unsigned reached = __ballot_sync(~0u, position < before + units);
      const int lane = reached ? __ffs(reached) - 1 : 31;
      const auto of = [&](auto x) { return __shfl_sync(~0u, x, lane); };
      if (reached) {
        return {first + lane,
                {of(own.entry.m_blocks), of(own.entry.num_n_blocks), of(own.entry.first_n_block)},
                before + of(units - own.units),
                static_cast<int>(slots_before + of(slots - own.slots))};
      }
      before += of(units), slots_before += of(slots);
    }
  }

  // The thread block that has the n_block at a position of the line.
  __device__ int block_of(int64_t position) const {
    return static_cast<int>(((position + 1) * blocks - 1) / list.before[WorkList::kRecords]);
  }

  __device__ WorkTile tile_of(int entry, int head_group, int m_block) const {
    const Tiling& tiling = p.plan.tiling;
    const int head = head_group * static_cast<int>(tiling.packed_heads.value);
    return {entry, head, tiling.group.divide(head), m_block * Config::kRows, /*split=*/0, /*index=*/0};
  }

  // The next piece. All lanes of a warp call it together.
  __device__ ServingWork<Config> work() {
    const int64_t position = this->position();
    const Place place = find(position);
    const auto [m_blocks, num_n_blocks, first_n_block] = place.work;
    const int64_t rest = position - place.before;
    if (p.plan.even) {
      const int tile = static_cast<int>(rest / num_n_blocks), skipped = static_cast<int>(rest % num_n_blocks);
      count = static_cast<int>(min(end - at, int64_t{num_n_blocks - skipped}));
      Piece piece;
      if (count < num_n_blocks) {
        const int first = block_of(at - skipped), last = block_of(at - skipped + num_n_blocks - 1);
        const int index = static_cast<int>(blockIdx.x) - first, slot = 2 * static_cast<int>(blockIdx.x) + (index == 0);
        piece = {index, last - first + 1, slot, 2 * first + 1, 2 * first + 2, 2};
      }
      const int begin = first_n_block + skipped;
      return {p, tile_of(place.entry, tile / m_blocks, tile % m_blocks), piece, {begin, begin + count - 1}};
    }
    // Neighbours have the same keys. The last rows, which see the most keys, come first.
    const Cut cut = cut_of(p.plan, list, place.work);
    const int pieces = cut.pieces, own = static_cast<int>(rest), m_block = own % m_blocks;
    const int index = own / m_blocks % pieces, head_group = own / (m_blocks * pieces);
    Piece piece;
    if (pieces > 1) {
      const int first = place.slots_before + head_group * m_blocks * pieces + m_block;
      piece = {index, pieces, first + index * m_blocks, first, first + m_blocks, m_blocks};
    }
    return {p, tile_of(place.entry, head_group, m_blocks - 1 - m_block), piece, cut.n_blocks(index)};
  }

  __device__ void take_next() {
    if (!p.plan.even && lane_id() == 0) taken = atomicAdd(p.plan.taken, 1);
  }
  __device__ void advance() { at = p.plan.even ? at + count : int64_t{gridDim.x} + __shfl_sync(~0u, taken, 0); }
  // Called by one thread after the last piece: as in PersistentScheduler.
  __device__ void finish() const {
    if (!p.plan.even && at == end + gridDim.x - 1) *p.plan.taken = 0;
  }
};

}  // namespace flash::flash_attn
