// What this library offers, as plain C: pointers and sizes, no types of Python or torch.
//
// Owns the structs that the caller fills in (executor/backends/cpu/native/library.py mirrors them field by field) and
// the table of kernels that each instruction set provides. Nothing here allocates for the caller or keeps state:
// tensors, threads and the choice of the level come in with every call.
#pragma once

#include <cstdint>

namespace octavo {

enum Format : int32_t { kFloat32 = 0, kBFloat16 = 1 };

// Instruction sets, each containing those before it.
enum Level : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kNumLevels = 4 };

// GOMP_parallel of the OpenMP that the caller's own products run on: one team of threads, so none waits by spinning
// for a core that another holds.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);

struct Runtime {
    int32_t level;
    int32_t num_threads;
    Parallel parallel;  // null: everything runs on the calling thread
};

// Where the tokens of a step stand; see AttentionMetadata.
struct Batch {
    int32_t num_seqs;
    int32_t num_tokens;
    int32_t max_blocks;
    const int32_t* query_start_loc;  // [num_seqs + 1]
    const int32_t* seq_lens;         // [num_seqs]
    const int32_t* block_tables;     // [num_seqs, max_blocks]
    const int64_t* slot_mapping;     // [num_tokens]
    const int64_t* positions;        // [num_tokens]
};

// One layer of the cache: keys and values [num_blocks, num_kv_heads, block_size, head_size] of `format`.
struct Cache {
    int32_t format;
    int32_t num_kv_heads;
    int32_t block_size;  // a multiple of 16
    int32_t head_size;   // even, at most kMaxHeadSize
    void* keys;
    void* values;
};

struct AttentionArguments {
    int32_t num_heads;
    int32_t sliding_window;  // 0: none
    float softmax_scale;
    float softcap;    // 0: none
    int32_t may_split;  // 0: every query sums its keys in one order, whatever else the step holds
    const void* queries;  // [num_tokens, num_heads, head_size] of the cache's format
    void* out;            // the same
};

struct RopeArguments {
    int32_t num_heads;
    float norm_eps;
    const void* qkv;       // [num_tokens, num_heads + 2 * num_kv_heads, head_size] of the cache's format
    const float* cos_sin;  // [max_positions, head_size]: cosines, then sines
    const void* q_norm;    // [head_size] or null
    const void* k_norm;    // [head_size] or null
    void* queries;         // [num_tokens, num_heads, head_size]
};

struct NormArguments {
    int32_t format;
    int32_t num_rows;
    int32_t size;
    float eps;
    const void* x;         // [num_rows, size]
    const void* residual;  // [num_rows, size] or null
    const void* weight;    // [size]
    void* out;             // [num_rows, size]: norm(x + residual) * weight
    void* total;           // [num_rows, size]: x + residual; null where residual is
};

struct SiluArguments {
    int32_t format;
    int32_t num_rows;
    int32_t size;
    const void* gate_up;  // [num_rows, 2 * size]
    void* out;            // [num_rows, size]
};

struct LargestArguments {
    int32_t num_rows;
    int32_t size;
    const float* rows;  // [num_rows, size]
    int64_t* places;    // [num_rows]: of the largest, of equal ones the first
    float* values;      // [num_rows]: the largest; NaN where the row holds one, and the place is then any
};

// Blocks of quantized weights; see quantized.inc.
enum Kind : int32_t { kQ8_0 = 0, kQ4_0 = 1, kQ4_1 = 2 };

constexpr int kBlock = 32;     // inputs with one scale
constexpr int kPanel = 16;     // outputs that lie side by side
constexpr int kRowChunk = 64;  // rows that are multiplied with a panel at a time

struct QuantizedArguments {
    int32_t format;  // of x, bias and out
    int32_t kind;
    int32_t num_rows;
    int32_t in_features;
    int32_t out_features;
    const void* x;        // [num_rows, in_features]
    const void* weights;  // [out_features / kPanel, in_features / kBlock] tiles, both rounded up
    const void* bias;     // [out_features] or null
    void* out;            // [num_rows, out_features]
};

constexpr int kMaxHeadSize = 256;
constexpr int kMaxRows = 48;  // query rows that share one pass over the keys; also the most heads of one K/V head
constexpr int kTile = 64;     // keys per pass
constexpr int kGroup = 16;    // keys that lie in one block for certain

// One pass: some queries, all heads of one K/V head, over a range of keys. Its rows are queries times heads: row r is
// head r % heads of query r / heads.
struct Item {
    int32_t sequence;  // whose block table is read
    int32_t kv_head;
    int32_t token;  // of the first query; the others follow on it
    int32_t num_queries;
    int32_t key_begin;  // [key_begin, key_end), key_begin a multiple of kTile
    int32_t key_end;
    int32_t before;  // the State that its rows go on from; -1: none
    int32_t part;    // the Partial that it leaves, one for each K/V head; -1: it writes its rows' results
    const int32_t* tokens;  // [num_queries], where they are of several sequences, which all see these keys; or null
};

// Softmax of an item's rows over its keys.
struct Partial {
    float maxima[kMaxRows];
    float sums[kMaxRows];
    float values[kMaxRows][kMaxHeadSize];  // in the order of dimensions that the level computes in
};

// Where rows stand after some of their keys: in rows of a part from `row` on, and in the State `before`.
struct State {
    int32_t part;
    int32_t row;
    int32_t before;  // -1: none
};

struct Kernels {
    // `next` is what this thread is likely to do next: a hint for the caches.
    void (*attend)(
        const Batch&, const Cache&, const AttentionArguments&, const Item&, const Item& next, const State*, Partial*
    );
    void (*rope)(const Batch&, const Cache&, const RopeArguments&, int token);
    void (*norm)(const NormArguments&, int row);
    void (*silu)(const SiluArguments&, int row);
    void (*largest)(const LargestArguments&, int row);
    // `inputs`: kBlock + 1 floats for each block of each row, in the level's own form.
    void (*gather)(const QuantizedArguments&, int row, float* inputs);
    void (*multiply)(const QuantizedArguments&, const float* inputs, int panel);
};

const Kernels& baseline_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();

}  // namespace octavo
