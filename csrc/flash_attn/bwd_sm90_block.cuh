// The keys and rows that a block of the backward kernels for sm_90 works on, and the parameters of these kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_schedule.cuh"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

// The parameters of the kernels: the planned problem, and its tensors as maps for copies.
struct BwdSm90Launch : BwdSm90Params {
  CUtensorMap q_map, dout_map, k_map, v_map;  // boxes of one page of a tile
  CUtensorMap dq_accum_map, dq_map;           // of bwd_sm90.cuh: boxes of a half of dQ
  int key_blocks;
};

// Tiles of rows of kHeadDim channels and a value for each row.
//
// When the products that read a tile have ended, no warp of the warpgroup reads it any more. But warps read the values
// with ordinary loads, about which this says nothing. So one thread can release a stage for its warpgroup only if all
// warps have met at a barrier since they read the values; otherwise every warp has to. With kValueRounds = 2 a stage
// has the values of two rounds, and a barrier in the next step is early enough.
template <typename Config, int kHeadDim>
struct RowRing {
  using Tile = SharedTile<typename Config::T, Config::kBlockM, kHeadDim>;
  using Cursor = typename Ring<Config::kStages>::Cursor;
  Tile tiles[Config::kStages];
  alignas(128) float values[Config::kValueRounds][Config::kStages][Config::kBlockM];
  Ring<Config::kStages> barriers;

  static constexpr int kValueBytes = Config::kBlockM * sizeof(float);
  __device__ float* values_of(const Cursor& at) { return values[at.round % Config::kValueRounds][at.stage]; }
};

// The keys of a block, and the rows that see them. The blocks of a cluster take neighbouring keys and walk over the
// same rows.
template <typename Config>
struct KeyBlock {
  static constexpr int kClusterKeys = Config::kBlockN * Config::kCluster;
  KeyWork work;  // of the cluster
  Sequence seq;
  Mask mask;
  Interval keys;
  Interval cluster_keys;
  Interval row_blocks;  // that see some of the cluster's keys
  int first_head, num_heads;

  __device__ KeyBlock(const BwdSm90Params& p, int index, int rank = 0)
      : work(key_work<kClusterKeys>(p.problem, p.plan.section_heads, index)),
        seq(p.problem, work.entry),
        mask(p.problem, seq),
        keys(interval_of<Config::kBlockN>(work.block * Config::kCluster + rank)),
        cluster_keys(interval_of<kClusterKeys>(work.block)),
        row_blocks(blocks_of<Config::kBlockM>(
            mask.rows_that_see({cluster_keys.first, min(cluster_keys.last, seq.k.length - 1)}))),
        num_heads(p.problem.heads / p.problem.heads_k) {
    first_head = work.head_k * num_heads;
  }

  __device__ bool exists() const { return cluster_keys.first < seq.k.length; }
  // Index of row 0 of a head among the rows in whole blocks.
  __device__ int64_t padded_index(const BwdSm90Params& p, int head) const {
    return padded_row_index(p.problem, p.plan.scratch, seq.q, work.entry, head);
  }

  __device__ bool has_rows() const { return !row_blocks.empty(); }

  // fn(head, block of rows), in the order in which the block walks over them.
  template <typename Fn>
  __device__ void for_each_row_block(Fn&& fn) const {
#pragma unroll 1
    for (int head = first_head; head < first_head + num_heads; ++head) {
#pragma unroll 1
      for (int block = row_blocks.last; block >= row_blocks.first; --block) fn(head, block);
    }
  }
};

}  // namespace flash::flash_attn
