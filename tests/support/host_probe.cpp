// What attention/test_config.py, ops/test_layer_norm_kernels.py and tile/test_common.py call of csrc's host code; needs
// neither CUDA nor a GPU.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <variant>

#include "common/divmod.h"
#include "common/environment.h"
#include "flash_attn/bwd/planner.h"
#include "flash_attn/bwd/tiles.h"
#include "flash_attn/dbias_sm80/planner.h"
#include "flash_attn/features.h"
#include "flash_attn/fwd/planner.h"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"
#include "layer_norm/config.h"
#include "probe.h"

namespace flash::flash_attn {
namespace {

// Each function that writes numbers returns null, or the text of its error.
const char* answer(int64_t* target, std::initializer_list<int64_t> numbers) {
  std::ranges::copy(numbers, target);
  return nullptr;
}

}  // namespace

extern "C" {

int find_switch(const char* variable) { return is_switched_on(variable); }

int find_instance_head_dim(int head_dim) { return instance_head_dim(head_dim); }

// dims: of keys and of values, of the instance for sm_80 and of that for sm_90.
const char* find_head_dims(int head_dim, int head_dim_v, int64_t* dims) {
  const HeadDims sm80 = sm80_head_dims(head_dim, head_dim_v), sm90 = sm90_head_dims(head_dim, head_dim_v);
  return answer(dims, {sm80.of_keys, sm80.of_values, sm90.of_keys, sm90.of_values});
}

int find_channel_slices(int head_dim) { return channel_slices(head_dim); }

int find_dmask_width(int head_dim) { return dmask_width(head_dim); }

// tile: rows, keys, warps.
const char* find_fwd_tile(int head_dim, bool plain, int64_t* tile) {
  const FwdTile found = fwd_tile(head_dim, plain ? Features::kPlain : Features::kAll);
  return answer(tile, {found.rows, found.keys, found.warps});
}

// tile: warpgroups, keys, stages, stages of queries, whether O is staged, whether there is a wide one.
const char* find_fwd_sm90_tile(int head_dim, int head_dim_v, Features features, bool wide, int64_t* tile) {
  const FwdSm90Tile found = fwd_sm90_tile(head_dim, features, wide, head_dim_v);
  return answer(tile, {found.warpgroups, found.keys, found.stages, found.query_stages, found.staged_output,
                       has_wide_tile(head_dim, features)});
}

// tile: warpgroups, keys, stages, stages of queries.
const char* find_serving_tile(int head_dim, int head_dim_v, Features features, int warpgroups, int64_t* tile) {
  const FwdSm90Tile found = serving_tile(head_dim, features, warpgroups, head_dim_v);
  return answer(tile, {found.warpgroups, found.keys, found.stages, found.query_stages});
}

const char* find_invariant_tile(int head_dim, int head_dim_v, Features features, int64_t* tile) {
  const FwdSm90Tile found = invariant_tile(head_dim, features, head_dim_v);
  return answer(tile, {found.warpgroups, found.keys, found.stages, found.query_stages});
}

// shape: lanes, rows, tiles.
const char* find_row_shape(int cols, int vec, int vecs, int threads, int splits_warps, int64_t* shape) {
  const layer_norm::RowShape found = layer_norm::row_shape(cols, vec, vecs, threads, splits_warps);
  return answer(shape, {found.lanes, found.rows, found.tiles});
}

int find_ring_bytes(int vecs, int ragged) { return layer_norm::ring_bytes(vecs, ragged); }

int find_splits(int64_t tiles, int64_t key_blocks, int places) { return splits_for(tiles, key_blocks, places); }

// sizes: bytes of shared memory of a warp, warps of a block that has shared_bytes.
const char* find_decode_sizes(int head_dim, int shared_bytes, int64_t* sizes) {
  return answer(sizes, {decode_bytes_per_warp(head_dim), decode_warps(head_dim, shared_bytes)});
}

// Bytes of shared memory for the new rows where a block also appends.
int find_decode_fresh_bytes(int head_dim) { return decode_fresh_bytes(head_dim); }

// What plan_fwd reads, by name as in Problem and FwdHints.
struct FwdProblem {
  int64_t batch, heads, heads_k, head_dim, seqlen_q, packed_q, ragged_k, dropout, plain;
  int64_t longest_q, longest_k, num_splits, multiprocessors, shared_bytes, causal, has_sm90, head_dim_v;
  int64_t paged, ranges, bias, out_lo, row_max, page_size, leftpad, invariance, left;
};

// plan: which alternative of FwdPlan it is, the five sizes of scratch, and its fields by the names of Plan in
// test_config.py; 0 where a plan does not have them.
const char* find_fwd_plan(const FwdProblem* problem, int64_t* plan) {
  static const int any_int[] = {0};
  static const int64_t any_state[] = {0, 0};
  static float any_float[] = {0};
  FwdParams p{};
  p.problem.batch = problem->batch;
  p.problem.heads = problem->heads;
  p.problem.heads_k = problem->heads_k;
  p.problem.head_dim = problem->head_dim;
  p.problem.head_dim_v = problem->head_dim_v ? problem->head_dim_v : problem->head_dim;
  p.problem.seqlen_q = problem->seqlen_q;
  p.problem.cu_seqlens_q = problem->packed_q ? any_int : nullptr;
  p.problem.seqused_k = problem->ragged_k ? any_int : nullptr;
  p.problem.rng_state = problem->dropout ? any_state : nullptr;
  p.problem.seqlen_k = p.problem.capacity_k = problem->longest_k;
  p.problem.window_left = problem->left < 0 ? kUnbounded : static_cast<int>(problem->left);
  p.problem.window_right = problem->causal ? 0 : kUnbounded;
  p.problem.ranges.data = problem->ranges ? any_int : nullptr;
  p.problem.ranges.heads = problem->ranges == 2 ? 1 : 0;
  p.problem.bias.data = problem->bias ? any_int : nullptr;
  p.pages.block_table = problem->paged ? any_int : nullptr;
  p.pages.page_size = Divisor(static_cast<int>(problem->page_size));
  p.problem.leftpad_k = problem->leftpad ? any_int : nullptr;
  p.out_lo.data = problem->out_lo ? any_float : nullptr;
  p.row_max = problem->row_max ? any_float : nullptr;
  p.aligned = problem->plain;
  const FwdHints hints{.longest_q = problem->longest_q,
                       .longest_k = problem->longest_k,
                       .num_splits = static_cast<int>(problem->num_splits),
                       .invariance = static_cast<int>(problem->invariance),
                       .multiprocessors = static_cast<int>(problem->multiprocessors),
                       .shared_bytes = static_cast<int>(problem->shared_bytes),
                       .has_sm90 = problem->has_sm90 != 0};
  return error_of([&] {
    const FwdChoice choice = plan_fwd(p, hints);
    const auto& [out, softmax, totals, records, counters] = choice.scratch;
    const Tiling tiling = std::visit([](const auto& chosen) { return chosen.tiling; }, choice.plan);
    const auto* decoding = std::get_if<DecodePlan>(&choice.plan);
    const auto* on_sm80 = std::get_if<FwdSm80Plan>(&choice.plan);
    const auto* invariant = std::get_if<InvariantPlan>(&choice.plan);
    const FwdSm90Plan* on_sm90 = invariant ? invariant : std::get_if<FwdSm90Plan>(&choice.plan);
    const KeySplits splits = decoding ? decoding->splits : on_sm80 ? on_sm80->splits : KeySplits{};
    const FwdSm90Plan order = on_sm90 ? *on_sm90 : FwdSm90Plan{};
    const auto* serving = std::get_if<ServingPlan>(&choice.plan);
    answer(plan, {static_cast<int64_t>(choice.plan.index()),
                  out,
                  softmax,
                  totals,
                  records,
                  counters,
                  tiling.packed_heads.value,
                  tiling.slots.value,
                  tiling.tiles.value,
                  serving ? serving->num_splits : splits.count,
                  splits.least_n_blocks,
                  decoding ? decoding->warps : 0,
                  serving ? serving->blocks : order.blocks,
                  order.swizzle.heads.value,
                  order.swizzle.tiles.value,
                  order.wide,
                  serving ? serving->warpgroups : 0,
                  serving && serving->even,
                  serving ? serving->slots.count : 0,
                  serving ? serving->box_rows : 0,
                  serving ? serving->pieces.n_blocks : order.pieces.n_blocks});
  });
}

// What decides whether tiles of a bias are copied, by name as in FwdParams, Problem, Bias and BiasRows; `bias` is its
// address.
struct BiasedProblem {
  int64_t batch, head_dim, head_dim_v, packed_q, bias, same_dtype, is_bool;
  int64_t batch1, batch2, batch2_size, heads, seqlen, softcap, alibi, dropout, ranges, row_max, aligned, longest_q;
};

// features: of a problem on sm_90 and on every GPU; how many entries share tiles of a bias on sm_90; features of the
// backward there; whether a copy of the bias would be read in tiles in the forward, and in the backward.
const char* find_features(const BiasedProblem* problem, int64_t* features) {
  static const int any_int[] = {0, 0};
  static const int64_t any_state[] = {0, 0};
  static const float any_slopes[] = {0};
  static float any_maxima[] = {0};
  FwdParams p{};
  p.problem.dtype = DType::kBFloat16;
  p.problem.batch = problem->batch;
  p.problem.heads = p.problem.heads_k = 2;
  p.problem.head_dim = problem->head_dim;
  p.problem.head_dim_v = problem->head_dim_v;
  p.problem.seqlen_q = p.problem.seqlen_k = p.problem.capacity_k = 96;
  p.problem.window_left = p.problem.window_right = kUnbounded;
  p.problem.cu_seqlens_q = problem->packed_q ? any_int : nullptr;
  p.problem.softcap = problem->softcap;
  p.problem.alibi_slopes = problem->alibi ? any_slopes : nullptr;
  p.problem.rng_state = problem->dropout ? any_state : nullptr;
  p.problem.ranges.data = problem->ranges ? any_int : nullptr;
  p.problem.bias = {.data = reinterpret_cast<const void*>(problem->bias),
                    .dtype = problem->same_dtype ? DType::kBFloat16 : DType::kFloat32,
                    .is_bool = problem->is_bool != 0,
                    .keys = 96,
                    .rows = {problem->batch1, problem->batch2, problem->heads, problem->seqlen,
                             Divisor(static_cast<int>(problem->batch2_size))}};
  p.row_max = problem->row_max ? any_maxima : nullptr;
  p.aligned = problem->aligned;
  const FwdHints hints{problem->longest_q, 96, 0, 0, 132, 227 * 1024, true};
  const BwdHints bwd_hints{96, 96, false, true, 132};
  BwdParams bwd{};
  bwd.problem = p.problem;
  bwd.aligned = p.aligned;
  return error_of([&] {
    const auto plan = std::get<FwdSm90Plan>(plan_fwd_sm90(p, hints).plan);
    answer(features,
           {static_cast<int64_t>(instance_for<FwdSm90Kernel>(p)), static_cast<int64_t>(instance_for<FwdSm80Kernel>(p)),
            plan.swizzle.entries_of_bias.value, static_cast<int64_t>(instance_for<BwdSm90Kernel>(bwd)),
            wants_tiled_bias(p, hints), wants_tiled_bias(bwd, bwd_hints)});
  });
}

// Whether a kernel that decodes one entry with one head appends by itself; `shared_bytes` is what a block can have.
int find_appends(int head_dim, int seqlen_q, int seqlen_new, int window_left, int indexed, int padded, int paged,
                 int shared_bytes) {
  static const int any_int[] = {0};
  FwdParams p{};
  p.problem.batch = p.problem.heads = p.problem.heads_k = 1;
  p.problem.head_dim = p.problem.head_dim_v = head_dim;
  p.problem.seqlen_q = seqlen_q;
  p.problem.seqlen_k = p.problem.capacity_k = 1000;
  p.problem.window_left = window_left;
  p.problem.window_right = kUnbounded;
  p.problem.batch_index = indexed ? any_int : nullptr;
  p.problem.leftpad_k = padded ? any_int : nullptr;
  p.pages.block_table = paged ? any_int : nullptr;
  p.aligned = true;
  AppendParams append{};
  append.seqlen_new = seqlen_new;
  const FwdHints hints{seqlen_q, 1000, 0, 0, 132, shared_bytes, true};
  return appends_in_decoding(p, plan_fwd(p, hints).plan, append, hints);
}

// tile: rows, keys, keys of a warp, stages, warps of a team.
const char* find_bwd_tile(int head_dim, bool compact, int64_t* tile) {
  const BwdTile found = bwd_tile(head_dim, compact);
  return answer(tile, {found.rows, found.keys, found.warp_keys, found.stages, found.team_warps});
}

// plan: elements of scratch for dq_accum, row values and semaphores; key heads of the swizzle; whether blocks wait;
// whether the kernels for sm_90 take the problem; and, of them, whether blocks add in order, whether the main kernel
// rounds dq, the order of m_blocks; entries of the swizzle; splits of an n_block by heads and by m_blocks; and the
// scratch for their sums and for the work list.
const char* find_bwd_plan(int64_t batch, int64_t heads, int64_t heads_k, int64_t head_dim, int64_t seqlen_q,
                          int64_t seqlen_k, bool packed, bool causal, bool deterministic, bool has_sm90,
                          int64_t multiprocessors, bool capped, bool ranged, int64_t head_dim_v, int64_t longest,
                          int64_t left, int64_t right, int64_t* plan) {
  static const int any_int[] = {0};
  BwdParams p{};
  p.problem.batch = batch;
  p.problem.heads = heads;
  p.problem.heads_k = heads_k;
  p.problem.head_dim = head_dim;
  p.problem.head_dim_v = head_dim_v ? head_dim_v : head_dim;
  p.problem.seqlen_q = seqlen_q;
  p.problem.seqlen_k = seqlen_k;
  p.problem.cu_seqlens_q = p.problem.cu_seqlens_k = packed ? any_int : nullptr;
  p.problem.window_left = left < 0 ? kUnbounded : left;
  p.problem.window_right = causal ? 0 : right < 0 ? kUnbounded : right;
  p.problem.softcap = capped ? 30 : 0;
  p.problem.ranges.data = ranged ? any_int : nullptr;
  p.aligned = true;
  const auto [chosen, sizes] = plan_bwd(p, {.longest_q = longest ? longest : seqlen_q,
                                            .longest_k = longest ? longest : seqlen_k,
                                            .deterministic = deterministic,
                                            .has_sm90 = has_sm90,
                                            .multiprocessors = static_cast<int>(multiprocessors)});
  const auto* portable = std::get_if<BwdSm80Plan>(&chosen);
  const auto* hopper = std::get_if<BwdSm90Plan>(&chosen);
  return answer(plan, {sizes.dq_accum, sizes.row_values, sizes.semaphores,
                       hopper ? hopper->swizzle_heads : portable->swizzle_heads,
                       hopper ? hopper->waits : portable->waits, hopper != nullptr, hopper && hopper->in_order,
                       hopper && hopper->rounds_dq, hopper ? static_cast<int>(hopper->m_block_order) : 0,
                       hopper ? hopper->swizzle_entries : portable->swizzle_entries, hopper ? hopper->head_splits : 1,
                       hopper ? hopper->m_splits : 1, sizes.key_sums, sizes.work_list()});
}

// The estimate of a call's time, in steps, with so many splits of each n_block.
int find_split_steps(int64_t batch, int64_t heads, int64_t heads_k, int64_t head_dim, int64_t seqlen_q,
                     int64_t seqlen_k, bool causal, int multiprocessors, int of_heads, int of_m_blocks) {
  Problem p{};
  p.batch = batch;
  p.heads = heads;
  p.heads_k = heads_k;
  p.head_dim = p.head_dim_v = head_dim;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.window_left = kUnbounded;
  p.window_right = causal ? 0 : kUnbounded;
  const BwdHints hints{.longest_q = seqlen_q,
                       .longest_k = seqlen_k,
                       .deterministic = false,
                       .has_sm90 = true,
                       .multiprocessors = multiprocessors};
  return static_cast<int>(steps_of_call(split_problem(p, hints), {of_heads, of_m_blocks}));
}

// limits: how many steps an n_block has at most without splits, and how many a split has; and, of an n_block with so
// many steps and m_blocks, how many splits it has.
const char* find_step_limits(int64_t total, int64_t longest, int64_t places, int64_t steps, int64_t m_blocks,
                             int64_t* limits) {
  const StepLimits found(total, longest, places);
  return answer(limits, {found.most, found.of_split, found.splits(steps, static_cast<int>(m_blocks))});
}

// offsets: of dq_accum, lse_log2, softmax_d, lse (-1: none), key_sums, work_tiles (-1: none), split_sums, next_work,
// semaphores and the end of the scratch, in elements.
const char* find_bwd_scratch(int64_t dq_accum, int64_t row_values, int64_t num_row_values, int64_t semaphores,
                             int64_t key_sums, int64_t work_tiles, int64_t split_sums, int64_t* offsets) {
  static float memory[1];
  const BwdScratchSizes sizes{.dq_accum = dq_accum,
                              .row_values = row_values,
                              .num_row_values = static_cast<int>(num_row_values),
                              .semaphores = semaphores,
                              .key_sums = key_sums,
                              .work_tiles = work_tiles,
                              .split_sums = split_sums};
  BwdPlan plan = BwdSm90Plan{};
  Problem problem{};
  use_scratch(problem, plan, sizes, memory);
  const auto& used = std::get<BwdSm90Plan>(plan);
  const auto offset = [](const void* place) {
    return place == nullptr ? -1 : (static_cast<const char*>(place) - reinterpret_cast<const char*>(memory)) / 4;
  };
  return answer(offsets,
                {offset(used.scratch.dq_accum), offset(used.lse_log2), offset(used.softmax_d), offset(used.lse),
                 offset(used.scratch.key_sums), offset(used.scratch.work_tiles), offset(used.scratch.split_sums),
                 offset(used.scratch.next_work), offset(used.scratch.semaphores), sizes.total()});
}

// The problem of a bias whose gradient is wanted: sizes of the bias as in DbiasParams.
struct DbiasProblem {
  int64_t batch, heads, seqlen_q, packed, batch1, batch2, heads_of_bias, rows, keys, multiprocessors;
};

// plan: entries, heads and slots of the tiles, then of the items of one; its other numbers, in their order; floats of
// scratch.
const char* find_dbias_plan(const DbiasProblem* problem, int64_t* plan) {
  static const int any_int[] = {0};
  const auto& [batch, heads, seqlen_q, packed, batch1, batch2, heads_of_bias, rows, keys, multiprocessors] = *problem;
  DbiasParams p{};
  p.bwd.problem.batch = batch;
  p.bwd.problem.heads = heads;
  p.bwd.problem.seqlen_q = seqlen_q;
  p.bwd.problem.cu_seqlens_q = packed ? any_int : nullptr;
  p.keys = keys;
  const int64_t own_batch2 = batch2 > 1 ? batch2 : std::max<int64_t>(batch / std::max<int64_t>(batch1, 1), 1);
  p.rows = {batch1 == 1 ? 0 : batch2 * heads_of_bias * rows * keys, batch2 == 1 ? 0 : heads_of_bias * rows * keys,
            heads_of_bias == 1 ? 0 : rows * keys, rows == 1 ? 0 : keys, Divisor(static_cast<int>(own_batch2))};
  return error_of([&] {
    const DbiasPlan found = plan_dbias(p, multiprocessors);
    const auto& [tiles, items] = std::tie(found.tiles, found.items);
    answer(plan, {tiles.entries.value, tiles.heads.value, tiles.slots.value, items.entries.value, items.heads.value,
                  items.slots.value, found.n_blocks.value, found.num_tiles, found.num_items, found.entries_of_tiles,
                  found.entries_of_items, found.splits, found.items_of_split, found.blocks.value, found.size,
                  scratch_of(found)});
  });
}

// constants: multiplier, shift.
const char* find_divisor(int divisor, int64_t* constants) {
  const Divisor found(divisor);
  return answer(constants, {found.multiplier, found.shift});
}

}  // extern "C"
}  // namespace flash::flash_attn
