// What a call computes: tensors, lengths, masks and score transforms. How a kernel computes it is its plan (fwd/plan.h,
// bwd/plan.h). Dimensions are (batch entries, query rows or keys of an entry, query or key heads, channels); "packed"
// tensors hold the tokens of all entries one after the other (varlen).
#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/dtype.h"
#include "common/tensor_ref.h"

struct int2;  // CUDA's vectors of ints; this header does without CUDA's
struct int4;

namespace flash::flash_attn {

// Stands for a window side without bound. Sequences have at most 2^30 tokens, so that sums with it fit an int.
constexpr int kUnbounded = (1 << 30) - 1;
constexpr int kMaxSeqlen = 1 << 30;

// Stands for a softmax scale of 0, which should make all scores 0: but hidden ones are -inf, and -inf * 0 is NaN.
constexpr float kLeastSoftmaxScale = 1e-30f;

// Further restricts, row by row, which keys a row sees: [first, end), counted in keys of the entry. A range may be
// empty or reach beyond the entry's keys.
struct KeyRanges {
  const int* data;               // (batch, heads, rows of an entry, 2); packed: (heads, total_q, 2); null: all keys
  int64_t batch, heads, seqlen;  // strides, in ints; 0 where one range serves all
  // Backward only: for each tile of rows, the smallest interval that holds the keys of all its rows, and the largest
  // that all its rows see, as (first, end, first, end). bwd/ranges.cu fills it before the main kernel.
  int4* of_tiles;
};

// Where a query row starts in a bias or in its gradient: strides in elements, 0 where one element serves all. Entry b
// is at [b / batch2_size, b % batch2_size] of two batch dimensions.
struct BiasRows {
  int64_t batch1, batch2, heads, seqlen;
  Divisor batch2_size = Divisor(1);
};

// A bias that is added to the scores, or a bool mask. The keys of a row are adjacent; kernels read them in aligned
// pairs, or in tiles that TMA copies (has_tiled_bias).
struct Bias {
  const void* data;  // (batch1, batch2, heads, rows of an entry, keys); packed: (heads, total_q, keys); null: none
  DType dtype;       // fp32 or that of the queries; meaningless if is_bool
  bool is_bool;      // a mask: true for a key that is seen
  int keys;          // of a row of the tensor, an even number
  BiasRows rows;
};

// What the codes of a cache in 8 bits (e4m3) are multiplied by, a number for each entry and key head.
struct Descale {
  const float* data;     // (batch, heads_k); null: 1
  int64_t batch, heads;  // strides, in floats; 0 where one number serves all
};

// What forward and backward share: shapes, where sequences lie, which keys a row sees, how scores are computed.
struct Problem {
  DType dtype;
  int batch;
  int heads;
  int heads_k;     // a divisor of heads; query head h reads key head h / (heads / heads_k)
  int head_dim;    // of queries and keys
  int head_dim_v;  // of values and out

  int seqlen_q;             // query rows of every entry; if packed, of all entries together
  int seqlen_k;             // keys of every entry unless seqused_k says otherwise; if packed, of all entries together
  int capacity_k;           // positions for keys that an entry has room for; no entry uses more
  const int* cu_seqlens_q;  // (batch + 1), where the entries of packed rows start; null if there is a batch dimension
  const int* cu_seqlens_k;  // the same for keys; with pages, only the differences are used, as lengths
  const int* seqused_k;     // (batch), how many keys of an entry are used, none if negative; may be null
  int appended_k;           // how many more keys are used than seqused_k says, unless that is negative
  const int* leftpad_k;     // (batch), how many used keys are skipped at the start; may be null
  const int* batch_index;   // (batch), the entry of k and v that an entry reads; may be null

  // How many keys on either side of its own a row sees, inclusive, or kUnbounded. Causal is window_right = 0.
  int window_left;
  int window_right;

  float softmax_scale;        // positive
  float softcap;              // 0: none
  const float* alibi_slopes;  // (batch, heads); may be null
  int64_t alibi_batch_stride;

  KeyRanges ranges;
  Bias bias;
  const void* sink;  // (heads), the score of one more key, whose value is 0; may be null
  DType sink_dtype;

  const int64_t* rng_state;  // (2), seed and offset of dropout, on the device; null without dropout
  int dropout_largest_kept;  // floor(255 (1 - p)): an element is kept if its random byte is at most this
  float dropout_rescale;     // 1 / (1 - p)

  // Only where k and v were given as codes, and dtype is fp16: that of k is a part of the softmax scale, and O is
  // multiplied by that of v before it is rounded.
  Descale k_descale, v_descale;
};

// Keys and values in pages: position m of entry b is at [block_table[b, m / page_size], m % page_size].
struct Pages {
  const int* block_table;  // (batch, pages per entry); null if there are no pages
  int64_t batch_stride;
  Divisor page_size = Divisor(kMaxSeqlen);  // without pages, more than there are positions
  int count = kMaxSeqlen;                   // of pages that k and v have; others must not be read or written
};

// Where k and v are a cache of codes in 8 bits, kernels convert them to fp16, which is exact, and compute in fp16. Most
// kernels know nothing of codes: the cache is converted before (WidenParams).
struct FwdParams {
  Problem problem;
  TensorRef<const void> q;  // (batch, seqlen_q, heads, head_dim); packed: (1, total_q, heads, head_dim)
  TensorRef<const void> k;  // (batch, seqlen_k, heads_k, head_dim); packed likewise; or (pages, page_size, heads_k, ..)
  TensorRef<const void> v;  // like k, with head_dim_v channels
  Pages pages;
  TensorRef<> out;     // like q, with head_dim_v channels
  DType out_dtype;     // that of the problem or, with codes, also bf16
  TensorRef<> out_lo;  // what rounding has taken off out, rounded too, with out's strides; data is null if not wanted
  float* softmax_lse;  // (batch, heads, seqlen_q); packed: (heads, total_q); may be null
  float* lse_lo;       // likewise, what rounding has taken off softmax_lse; only with a bias; may be null
  float* row_max;      // likewise, the largest score of each row, -inf where there is none; may be null

  bool coded;         // whether k and v are codes; q then has out_dtype
  bool aligned;       // whether all rows can be moved in aligned chunks of 16 bytes
  bool one_instance;  // whether calls with pages and without need the same instance, so that they have the same bits
};

// The sizes of the first two dimensions of k and v.
struct KeyExtent {
  int64_t entries, rows;
};
inline KeyExtent extent_of_keys(const FwdParams& p) {
  if (p.pages.block_table) return {p.pages.count, p.pages.page_size.value};
  if (p.problem.cu_seqlens_k) return {1, p.problem.seqlen_k};
  // batch_index may name any entry of k and v, and how many they have is not known here.
  return {p.problem.batch_index ? kMaxSeqlen : p.problem.batch, p.problem.capacity_k};
}

// Keys and values that are codes, converted to fp16 in tensors of their own, and queries with them.
struct WidenParams {
  FwdParams fwd;  // with codes
  TensorRef<> k;  // (entries, rows, heads_k, head_dim), contiguous; data is null if there are none
  TensorRef<> v;
  // Where a key is in them: at the place where it is in the cache, or at [its entry, its position]. With pages, each
  // entry then has one, and `table` is their block table, (batch, 1), which is written, too.
  bool by_entry;
  int* table;
  TensorRef<> q;             // like fwd.q, contiguous; data is null if fwd.q is fp16 already
  int longest_q, longest_k;  // no entry has more rows, or keys
};

// S_dmask: exp(s(i, j) - m(i, j)), negative where dropout drops the element. Keys are cut into blocks of dmask_width
// (fwd/tiles.h), and m(i, j) is the largest score of row i in the block that holds j and in all blocks to its right.
struct DmaskParams {
  FwdParams fwd;
  void* s_dmask;  // (batch, heads, rows, cols), zeros
  int rows;
  int cols;
};

// New keys and values that are copied into a cache. With rotary tables, the keys are rotated, and so are the queries,
// into a tensor of their own.
struct AppendParams {
  Problem problem;  // its lengths are those after appending
  DType dtype;      // of queries, new keys and values, and of the cache unless that is coded
  bool coded;       // whether the cache holds codes: new keys and values are divided by the descales, and rounded
  int seqlen_new;
  TensorRef<const void> q;
  TensorRef<const void> k;  // (batch, seqlen_new, heads_k, head_dim)
  TensorRef<const void> v;
  TensorRef<> q_rotated;  // unused without tables
  TensorRef<> k_cache;
  TensorRef<> v_cache;
  Pages pages;

  const void* cos;  // (positions, rotary_dim / 2), contiguous; null if nothing is rotated
  const void* sin;
  DType table_dtype;
  int positions;
  int rotary_dim;
  bool interleaved;      // pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2)
  bool queries_advance;  // query i is at the position of the i-th new key, not of the first
};

// Key ranges computed from the window, chunks, causal entries, used rows and given ranges, for kernels that know only
// windows and ranges.
struct RangesParams {
  Problem problem;       // with the ranges that are given, if any
  bool paged;            // whether keys are in pages
  int chunk;             // a row sees only keys of its own chunk of this many keys; 0: no chunks
  const int* seqused_q;  // (batch), how many rows of an entry are used; may be null
  const void* causal;    // (batch), whether an entry is causal; may be null
  int causal_bytes;      // of an element of `causal`, 1 or 4
  int heads;             // of the result: 1, or those of the problem
  int* ranges;           // (batch, heads, seqlen_q, 2); packed: (heads, total_q, 2)
};

// The backward stores lse and softmax_d of each entry padded to a multiple of this many rows, so that copies of whole
// blocks of rows stay within the entry.
constexpr int kRowPad = 128;

struct BwdParams {
  Problem problem;
  TensorRef<const void> dout;  // like out
  TensorRef<const void> q;     // as in FwdParams; so are k, v and out, but there are no pages
  TensorRef<const void> k;
  TensorRef<const void> v;
  TensorRef<const void> out;
  TensorRef<const void> out_lo;  // as in FwdParams, with any strides; without data, out counts as exact
  const float* softmax_lse;      // as in FwdParams
  const float* lse_lo;           // likewise; null: softmax_lse counts as exact
  const float* dlse;             // the gradient that arrives for it; may be null
  TensorRef<> dq;                // like q
  TensorRef<> dk;                // like k
  TensorRef<> dv;                // like v
  bool float_dkv;                // whether dk and dv are fp32, with adjacent channels, and not of the problem's dtype
  bool adds_dkv;                 // whether dk and dv, which are fp32, have sums to which this call adds
  // An output: row sums of dout * out, less dlse; 0 for a row that sees no key. (batch, heads, seqlen_q rounded up to
  // kRowPad); packed: (heads, total_q + kRowPad * batch), entry b from cu_seqlens_q[b] + kRowPad * b on.
  float* softmax_d;

  bool aligned;  // whether all rows can be moved in aligned chunks of 16 bytes
};

// The gradient of a problem's sink, after the backward.
struct SinkParams {
  BwdParams bwd;
  void* dsink;     // (heads), of sink_dtype
  int64_t rows;    // of all entries, one after the other
  int chunks;      // of kSinkChunk rows each; at least 1
  float* partial;  // (heads, chunks), their sums; unused if there is one chunk
};
constexpr int kSinkChunk = 8192;

// The gradient of a problem's bias, after the backward: a contiguous tensor like Bias::data. A stride is 0 where, and
// only where, its dimension has size 1.
struct DbiasParams {
  BwdParams bwd;
  void* dbias;
  DType dtype;  // fp32 or that of the queries
  int keys;     // of a row; perhaps fewer or more than an entry has
  BiasRows rows;
};

}  // namespace flash::flash_attn
