// Attention of prompt chunks over the paged cache, on tensor cores.
//
// Problem: sequence i brings the queries of its last n tokens, all of whose K/V is in cache; query t (its own place in
//   the chunk) stands at position seq_len - n + t and sees keys (position - window, position]. Its G = num_heads /
//   num_kv_heads heads share each K/V row, so they are packed into the rows of one tile: packed row r is token r / G,
//   head r % G of the group. A chunk of a few tokens fills a tile that way, and a long one reads K/V once for all
//   heads.
// Layout: q [num_tokens, >= num_heads * HEAD_SIZE] SCALAR with a stride between tokens (it may lie inside the fused qkv
//   row); out [num_tokens, num_heads, HEAD_SIZE] SCALAR; caches [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_SIZE] KV.
//   tiles [num_tiles, 2] int32: (sequence, first token in the chunk), ROWS / G tokens each.
// Grid (num_tiles, num_kv_heads); 4 warps of ROWS / 4 rows. Tiles of KEYS keys that no row of the block sees are
//   skipped; only those that some row sees in part are masked.
// Shared memory: Q [ROWS], K [KEYS], V [KEYS] rows of HEAD_SIZE + 8 elements (eight rows then lie in 32 different banks
//   for every head size here). K and V have one buffer each, and the copy of either runs beneath the product with the
//   other. With an fp8 cache the copy lands in raw bytes, and each thread widens what it copied itself.
// Bound by: tensor cores; at HEAD_SIZE 128 each byte of K/V read serves ROWS rows.
//
// The softmax is online (FlashAttention-2, arXiv 2307.08691): scores stay in registers, laid out as mma's result, which
// is what the product with V takes as its left operand.
#include "common.cuh"

#ifndef ROWS
#define ROWS 64
#endif
#ifndef KEYS
#define KEYS 64
#endif

constexpr int THREADS = 128;
constexpr int WARP_ROWS = ROWS / 4;
constexpr int BANDS = WARP_ROWS / 16;  // m16 tiles of a warp
constexpr int PITCH = HEAD_SIZE + 8;
constexpr int K_STEPS = HEAD_SIZE / 16;
constexpr int KEY_PAIRS = KEYS / 16;
constexpr int CHUNKS = HEAD_SIZE / 8;  // 16 bytes of SCALAR
constexpr bool WIDENS = is_same<KV, fp8>::value;
constexpr int KV_CHUNKS = HEAD_SIZE * int(sizeof(KV)) / 16;
static_assert(sizeof(SCALAR) == 2 && (WIDENS || is_same<KV, SCALAR>::value), "fp32 has a kernel of its own");
static_assert(HEAD_SIZE % 16 == 0 && ROWS % 64 == 0 && KEYS % 16 == 0, "whole mma tiles");
static_assert(KEYS % BLOCK_SIZE == 0, "tiles begin where blocks begin");

// Where the keys of one sequence lie.
struct Pages {
    const int* __restrict__ table;  // the sequence's block table
    int end;                        // keys from here on are not read: they come out as zeros
};

// What is asked for once a tile or once a block, kept out of the registers that the accumulators need.
struct Place {
    int group;           // heads that share the K/V head
    int num_rows;        // packed rows that count
    int first_row;       // of q and out: the tile's first token
    int first_position;  // of that token in its sequence
    int inner_begin;     // keys [inner_begin, inner_end) are seen by all rows
    int inner_end;
};

// Starts the copy of tile `tile`'s keys, of this block's K/V head: into shared memory as they will be read, or (fp8) as
// raw bytes. Registers are scarce here: where threads fall on whole rows, a thread's pieces are STEP rows apart and
// their places follow from the first one's; only four pieces' addresses are held at once, and sizes come from the grid.
__device__ __forceinline__ void copy_tile(SCALAR* rows, uint8_t* raw, const KV* __restrict__ cache, const Pages& pages,
                                          int tile) {
    constexpr int VEC = 16 / int(sizeof(KV));
    constexpr bool WHOLE_ROWS = THREADS % KV_CHUNKS == 0;
    constexpr int STEP = THREADS / KV_CHUNKS;
    static_assert(!WHOLE_ROWS || STEP % BLOCK_SIZE == 0 || BLOCK_SIZE % STEP == 0, "pieces keep their places");
    const int* __restrict__ blocks = pages.table + tile * (KEYS / BLOCK_SIZE);
#pragma unroll 4
    for (int first = 0; first < KEYS * KV_CHUNKS; first += THREADS) {
        const int i = first + threadIdx.x;
        if (!WHOLE_ROWS && i >= KEYS * KV_CHUNKS) break;
        int row = i / KV_CHUNKS, block_index = row / BLOCK_SIZE, inside = row % BLOCK_SIZE;
        if constexpr (WHOLE_ROWS) {
            const int first_row = threadIdx.x / KV_CHUNKS, further = first / KV_CHUNKS;
            row = first_row + further;
            block_index = first_row / BLOCK_SIZE + further / BLOCK_SIZE;
            inside = first_row % BLOCK_SIZE + further % BLOCK_SIZE;
        }
        const int chunk = WHOLE_ROWS ? threadIdx.x % KV_CHUNKS : i % KV_CHUNKS;
        const bool valid = tile * KEYS + row < pages.end;
        const int block = valid ? blocks[block_index] : 0;
        const int64_t block_row = int64_t(block) * (int(gridDim.y) * BLOCK_SIZE);
        const int offset = (int(blockIdx.y) * BLOCK_SIZE + inside) * HEAD_SIZE + chunk * VEC;
        const KV* from = cache + block_row * HEAD_SIZE + offset;
        void* to = WIDENS ? static_cast<void*>(raw + i * 16) : static_cast<void*>(rows + row * PITCH + chunk * 8);
        ptx::cp_async16(to, from, valid);
    }
    ptx::cp_async_commit();
}

// From raw bytes to the tile: each thread the pieces it copied, so that its own wait is enough.
__device__ __forceinline__ void widen_tile(SCALAR* rows, const uint8_t* raw) {
#pragma unroll 1
    for (int i = threadIdx.x; i < KEYS * KV_CHUNKS; i += THREADS) {
        const int row = i / KV_CHUNKS, chunk = i % KV_CHUNKS;
        const Vec16<fp8> from = Vec16<fp8>::load(reinterpret_cast<const fp8*>(raw + i * 16));
        SCALAR* to = rows + row * PITCH + chunk * 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Vec16<SCALAR> wide;
#pragma unroll
            for (int e = 0; e < 8; e++) wide.v[e] = from_float<SCALAR>(to_float(from.v[half * 8 + e]));
            wide.store(to + half * 8);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill(SCALAR* __restrict__ out, const SCALAR* __restrict__ q, const KV* __restrict__ k_cache,
            const KV* __restrict__ v_cache, const int* __restrict__ tiles,
            const int* __restrict__ query_start_loc,  // [num_seqs + 1]
            const int* __restrict__ seq_lens,         // [num_seqs]
            const int* __restrict__ block_tables,     // [num_seqs, max_blocks]
            int max_blocks, int num_heads, int64_t q_stride,
            float score_scale,  // softmax_scale times the scale of K
            int window,         // keys that a query sees, its own counted; 0: all
            float softcap,      // 0: none
            float v_scale) {
    const int seq = tiles[blockIdx.x * 2], first_token = tiles[blockIdx.x * 2 + 1];
    const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, group = num_heads / num_kv_heads;
    const int query_start = query_start_loc[seq], num_queries = query_start_loc[seq + 1] - query_start;
    const int seq_len = seq_lens[seq], offset = seq_len - num_queries;
    const int num_tokens = min(ROWS / group, num_queries - first_token), num_rows = num_tokens * group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    DYN_SMEM(SCALAR, shared_q);
    SCALAR* shared_k = shared_q + ROWS * PITCH;
    SCALAR* shared_v = shared_k + KEYS * PITCH;
    uint8_t* raw_k = reinterpret_cast<uint8_t*>(shared_v + KEYS * PITCH);  // fp8 only
    uint8_t* raw_v = raw_k + KEYS * HEAD_SIZE;

    __shared__ Place place;
    // Keys [begin, end) are seen by some row.
    const int first_position = offset + first_token, last_position = first_position + num_tokens - 1;
    const int begin = window > 0 ? max(first_position - window + 1, 0) : 0, end = last_position + 1;
    if (threadIdx.x == 0) {
        place.group = group;
        place.num_rows = num_rows;
        place.first_row = query_start + first_token;
        place.first_position = first_position;
        place.inner_begin = window > 0 ? max(last_position - window + 1, 0) : 0;
        place.inner_end = first_position + 1;
    }
    const int first_tile = begin / KEYS, last_tile = (end - 1) / KEYS;
    const Pages pages = {block_tables + int64_t(seq) * max_blocks, end};

    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = row < num_rows;
        const int token = valid ? query_start + first_token + row / group : 0;
        const int head = kv_head * group + (valid ? row % group : 0);
        ptx::cp_async16(shared_q + row * PITCH + chunk * 8, q + token * q_stride + head * HEAD_SIZE + chunk * 8, valid);
    }
    copy_tile(shared_k, raw_k, k_cache, pages, first_tile);  // one group with Q

    const float to_log2 = softcap > 0.0f ? LOG2E : score_scale * LOG2E;  // from scores to logits in base 2
    OnlineSoftmax softmax[BANDS][2];
    float acc[BANDS][HEAD_SIZE / 8][4];
#pragma unroll
    for (int band = 0; band < BANDS; band++) {
#pragma unroll
        for (int r = 0; r < 2; r++) softmax[band][r].init();
#pragma unroll
        for (int d = 0; d < HEAD_SIZE / 8; d++)
            acc[band][d][0] = acc[band][d][1] = acc[band][d][2] = acc[band][d][3] = 0.0f;
    }

    for (int tile = first_tile; tile <= last_tile; tile++) {
        const int first_key = tile * KEYS;
        ptx::cp_async_wait<0>();
        if constexpr (WIDENS) widen_tile(shared_k, raw_k);
        __syncthreads();  // K is there, and all are done with the last V
        copy_tile(shared_v, raw_v, v_cache, pages, tile);

        float scores[BANDS][KEYS / 8][4];
#pragma unroll
        for (int band = 0; band < BANDS; band++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                scores[band][j][0] = scores[band][j][1] = scores[band][j][2] = scores[band][j][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            uint32_t a[BANDS][4];
#pragma unroll
            for (int band = 0; band < BANDS; band++)
                ptx::ldmatrix_x4(a[band], shared_q + (warp * WARP_ROWS + band * 16 + lane % 16) * PITCH + step * 16 +
                                              lane / 16 * 8);
#pragma unroll
            for (int pair = 0; pair < KEY_PAIRS; pair++) {
                uint32_t b[4];
                ptx::ldmatrix_x4(b, shared_k + (pair * 16 + lane / 16 * 8 + lane % 8) * PITCH + step * 16 +
                                        lane / 8 % 2 * 8);
#pragma unroll
                for (int band = 0; band < BANDS; band++) {
                    ptx::mma_m16n8k16<SCALAR>(scores[band][2 * pair], a[band], b[0], b[1]);
                    ptx::mma_m16n8k16<SCALAR>(scores[band][2 * pair + 1], a[band], b[2], b[3]);
                }
            }
        }

        ptx::cp_async_wait<0>();
        if constexpr (WIDENS) widen_tile(shared_v, raw_v);
        __syncthreads();  // V is there, and all are done with K

        const bool partly = first_key < place.inner_begin || first_key + KEYS > place.inner_end;
#pragma unroll
        for (int band = 0; band < BANDS; band++) {
            if (softcap > 0.0f) {
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        scores[band][j][e] = soft_cap(scores[band][j][e] * score_scale, softcap);
            }
            if (partly) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    // Rows past the end do as the last one.
                    const int row = min(warp * WARP_ROWS + band * 16 + g + r * 8, place.num_rows - 1);
                    const int position = place.first_position + row / place.group;
#pragma unroll
                    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                        for (int e = 2 * r; e < 2 * r + 2; e++) {
                            const int key = first_key + j * 8 + t * 2 + e % 2;
                            const bool seen = key <= position && (window == 0 || key > position - window);
                            if (!seen) scores[band][j][e] = negative_infinity();
                        }
                }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float largest = negative_infinity();
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
                    largest = fmaxf(largest, fmaxf(scores[band][j][2 * r], scores[band][j][2 * r + 1]));
                largest = warp_max<4>(largest);  // over the four lanes of a row
                const float factor = softmax[band][r].raise(largest * to_log2);
#pragma unroll
                for (int d = 0; d < HEAD_SIZE / 8; d++) {
                    acc[band][d][2 * r] *= factor;
                    acc[band][d][2 * r + 1] *= factor;
                }
                const float base = softmax[band][r].base();
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        scores[band][j][e] = ptx::ex2(fmaf(scores[band][j][e], to_log2, -base));
                        softmax[band][r].sum += scores[band][j][e];
                    }
            }
        }

        uint32_t weights[BANDS][KEY_PAIRS][4];  // as the left operand of the product with V
#pragma unroll
        for (int band = 0; band < BANDS; band++)
#pragma unroll
            for (int step = 0; step < KEY_PAIRS; step++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    weights[band][step][i] = pack<SCALAR>(scores[band][2 * step + i / 2][i % 2 * 2],
                                                          scores[band][2 * step + i / 2][i % 2 * 2 + 1]);
        // Only now, when scores have shrunk to half the registers: the copy's addresses need some.
        if (tile < last_tile) copy_tile(shared_k, raw_k, k_cache, pages, tile + 1);

#pragma unroll
        for (int step = 0; step < KEY_PAIRS; step++) {
#pragma unroll
            for (int d = 0; d < HEAD_SIZE / 16; d++) {
                uint32_t b[4];
                ptx::ldmatrix_x4_trans(b, shared_v + (step * 16 + lane % 16) * PITCH + d * 16 + lane / 16 * 8);
#pragma unroll
                for (int band = 0; band < BANDS; band++) {
                    ptx::mma_m16n8k16<SCALAR>(acc[band][2 * d], weights[band][step], b[0], b[1]);
                    ptx::mma_m16n8k16<SCALAR>(acc[band][2 * d + 1], weights[band][step], b[2], b[3]);
                }
            }
        }
    }

    // A warp's results pass through its own rows of Q, which no other warp reads, and leave in pieces of 16 bytes.
    SCALAR* staged = shared_q + warp * WARP_ROWS * PITCH;
    __syncwarp();
#pragma unroll
    for (int band = 0; band < BANDS; band++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            softmax[band][r].sum = warp_sum<4>(softmax[band][r].sum);
            const float scale = softmax[band][r].normalizer() * v_scale;
#pragma unroll
            for (int d = 0; d < HEAD_SIZE / 8; d++) {
                const uint32_t word = pack<SCALAR>(acc[band][d][2 * r] * scale, acc[band][d][2 * r + 1] * scale);
                *reinterpret_cast<uint32_t*>(staged + (band * 16 + g + r * 8) * PITCH + d * 8 + t * 2) = word;
            }
        }
    __syncwarp();
    for (int i = lane; i < WARP_ROWS * CHUNKS; i += 32) {
        const int row = warp * WARP_ROWS + i / CHUNKS, chunk = i % CHUNKS;
        if (row >= place.num_rows) break;
        const int64_t token = place.first_row + row / place.group;
        const int head = blockIdx.y * place.group + row % place.group;
        Vec16<SCALAR>::load(staged + (i / CHUNKS) * PITCH + chunk * 8)
            .store(out + (token * num_heads + head) * HEAD_SIZE + chunk * 8);
    }
}
