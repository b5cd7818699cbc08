// Draws one token for each row of logits, by the definition in executor/sampler.py and the stream of
// executor/philox.py.
//
// Problem. From logits [num_rows, vocab] f32: the best token (temperature 0), or a draw after temperature, top-k, top-p
// and min-p; and, where asked, the log probability and the rank of the token under the model's own logits. Rows whose
// logits are changed first (bias, masks, penalties) pass through `adjust_logits`, which writes them to rows of their
// own.
//
// No sort. Top-k and top-p keep what is at least a pivot, and the pivot is found by radix search: a histogram of 2048
// bins over the leading digit of a key that orders tokens, the bin in which the target falls, then the next digit
// inside that bin, until the key is exact or the bin ends on the target. All that ties with the pivot stays, as the
// definition says. For top-k the leading digit is linear in the logit: float bits alone would crowd into a few bins,
// whose atomics would take turns.
//
// Sums are integers. A weight exp((logit - max) / temperature) in [0, 1] counts as floor(weight * 2^40) in 64 bits (a
// vocabulary of at most 2^22 cannot overflow), so that sums do not depend on the order of addition: a draw is a
// function of its row alone, whatever the number of threads, and atomics cannot make it waver. The inverse CDF is then
// exact too: the first id, in id order, whose running sum exceeds floor((2 * word + 1) * total / 2^33).
//
// Grid: one block a draw. Block: THREADS. Shared memory: the histogram (16 KiB) and a word or three a warp. Bound by
// passes over the row in L2: 1 for the maximum, up to 4 for top-k, 3 for top-p, 1 for the inverse CDF, 2 for the
// report.

#include "common.cuh"

#ifndef THREADS
#define THREADS 1024
#endif

constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr int LEAF = 128;  // ids that one warp resolves by itself: four a lane
static_assert(THREADS % 32 == 0 && THREADS <= 1024 && BINS % THREADS == 0, "each thread owns as many bins");

enum Flag : int { FINE = 0, NON_FINITE = 1, NO_TOKEN_LEFT = 2 };

using Mass = uint64_t;  // weights in units of 2^-40, or a count

struct Best {
    float value;
    int id;
};

struct Shared {
    unsigned low[BINS];  // a bin's mass in two words: 32-bit atomics are native in shared memory, 64-bit ones are not
    unsigned high[BINS];
    Mass warp_mass[WARPS];
    Best warp_best[WARPS];
    int found_bin;
    Mass found_mass;
};

// What decides a token's weight. A pivot of 0 keeps all.
struct Draw {
    float maximum;
    float temperature;
    Mass rank_pivot;
    float weight_pivot;
};

__device__ __forceinline__ float scaled(float logit, const Draw& draw) {
    return (logit - draw.maximum) / draw.temperature;
}

// Orders scaled logits, which are 0 at most: 11 bits linear in x, then the 31 bits that tell all floats apart.
__device__ __forceinline__ Mass rank_key(float x) {
    const int steps = int(fminf(-x * 32.0f, float(BINS - 1)));
    const unsigned magnitude = unsigned(__float_as_int(x)) & 0x7fffffffu;
    return Mass(BINS - 1 - steps) << 31 | Mass(0x7f800000u - magnitude);
}

__device__ __forceinline__ Mass weight_key(float weight) { return unsigned(__float_as_int(weight)); }

__device__ __forceinline__ Mass mass_of(float weight) { return Mass(weight * 1099511627776.0f); }

__device__ __forceinline__ float kept_weight(float logit, const Draw& draw) {
    const float x = scaled(logit, draw);
    if (draw.rank_pivot != 0 && rank_key(x) < draw.rank_pivot) return 0.0f;
    const float weight = expf(x);
    return weight < draw.weight_pivot ? 0.0f : weight;
}

template <typename T>
__device__ __forceinline__ T sum_over_warp(T value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

template <typename T>
__device__ __forceinline__ T inclusive_scan(T value, int lane) {
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const T before = __shfl_up_sync(FULL_WARP, value, offset);
        if (lane >= offset) value += before;
    }
    return value;
}

__device__ __forceinline__ bool better(float value, int id, const Best& than) {
    return value > than.value || (value == than.value && id < than.id);
}

// The largest logit, of equal ones the lowest id. A NaN counts as +inf: the row is as bad as one with an infinity.
__device__ Best best_of(Shared& shared, const float* __restrict__ row, int vocab) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Best best = {negative_infinity(), vocab};
    for (int id = threadIdx.x; id < vocab; id += THREADS) {
        float value = row[id];
        if (value != value) value = -negative_infinity();
        if (better(value, id, best)) best = {value, id};
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const float value = __shfl_xor_sync(FULL_WARP, best.value, offset);
        const int id = __shfl_xor_sync(FULL_WARP, best.id, offset);
        if (better(value, id, best)) best = {value, id};
    }
    if (lane == 0) shared.warp_best[warp] = best;
    __syncthreads();
    best = shared.warp_best[0];
    for (int other = 1; other < WARPS; other++) {
        const Best candidate = shared.warp_best[other];
        if (better(candidate.value, candidate.id, best)) best = candidate;
    }
    __syncthreads();  // before anyone uses the array again
    return best;
}

__device__ Mass block_sum(Shared& shared, Mass value) {
    const Mass sum = sum_over_warp(value);
    if (threadIdx.x % 32 == 0) shared.warp_mass[threadIdx.x / 32] = sum;
    __syncthreads();
    Mass total = 0;
    for (int warp = 0; warp < WARPS; warp++) total += shared.warp_mass[warp];
    __syncthreads();
    return total;
}

__device__ __forceinline__ void add_to_bin(Shared& shared, int bin, Mass mass) {
    const unsigned low = unsigned(mass);
    const unsigned before = atomicAdd(&shared.low[bin], low);
    const unsigned high = unsigned(mass >> 32) + (before + low < before ? 1u : 0u);
    if (high != 0) atomicAdd(&shared.high[bin], high);
}

__device__ __forceinline__ Mass bin_mass(const Shared& shared, int bin) {
    return Mass(shared.high[bin]) << 32 | shared.low[bin];
}

// The highest bin at which `above`, the bins over it and the bin itself reach the target (which the whole reaches).
// Sets found_bin, and found_mass to the sum without the bin. Thread t owns the bins t * each .. from the top.
__device__ void find_bin(Shared& shared, Mass above, Mass target) {
    constexpr int EACH = BINS / THREADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top = BINS - 1 - int(threadIdx.x) * EACH;
    Mass own = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) own += bin_mass(shared, top - i);
    const Mass through = inclusive_scan(own, lane);
    if (lane == 31) shared.warp_mass[warp] = through;
    __syncthreads();
    Mass before = above + through - own;
    for (int other = 0; other < warp; other++) before += shared.warp_mass[other];
    if (before < target && before + own >= target) {
        int bin = top;
        while (before + bin_mass(shared, bin) < target) before += bin_mass(shared, bin--);
        shared.found_bin = bin;
        shared.found_mass = before;
    }
    __syncthreads();
}

// The largest key whose tokens, with all of larger key, hold the target mass. SHIFTS: where each digit begins.
template <int WIDTH, int... SHIFTS, typename KeyOf, typename MassOf, typename TargetOf>
__device__ Mass find_pivot(Shared& shared, const float* __restrict__ row, int vocab, KeyOf key_of, MassOf mass_of_key,
                           TargetOf target_of) {
    constexpr int NUM_DIGITS = sizeof...(SHIFTS);
    constexpr int shifts[NUM_DIGITS] = {SHIFTS...};
    Mass prefix = 0, above = 0, target = 0;
    int width = WIDTH;  // keys [prefix, prefix + 2^width) are still in question
#pragma unroll 1
    for (int digit = 0; digit < NUM_DIGITS; digit++) {
        const int shift = shifts[digit];
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.low[bin] = shared.high[bin] = 0;
        __syncthreads();
        Mass seen = 0;
#pragma unroll 2  // 1024 threads leave 64 registers
        for (int id = threadIdx.x; id < vocab; id += THREADS) {
            const Mass key = key_of(row[id]);
            const Mass place = key - prefix;  // wraps far up for a smaller key
            if (place >> width != 0) continue;
            const Mass mass = mass_of_key(key);
            if (digit == 0) seen += mass;
            add_to_bin(shared, int(place >> shift), mass);
        }
        __syncthreads();
        if (digit == 0) target = target_of(block_sum(shared, seen));
        find_bin(shared, above, target);
        const int bin = shared.found_bin;
        const Mass through = shared.found_mass + bin_mass(shared, bin);
        above = shared.found_mass;
        prefix += Mass(bin) << shift;
        width = shift;
        __syncthreads();  // all have read the bins and the find before they are cleared
        if (through == target) break;  // the bin's lowest key parts kept from dropped as well as the exact one
    }
    return prefix;
}

// Philox4x32-10, word 0 of the result.
__device__ unsigned philox(Mass seed, unsigned position, unsigned sample_index) {
    unsigned k0 = unsigned(seed), k1 = unsigned(seed >> 32);
    unsigned c0 = position, c1 = sample_index, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const Mass p0 = Mass(0xD2511F53u) * c0, p1 = Mass(0xCD9E8D57u) * c2;
        const unsigned n0 = unsigned(p1 >> 32) ^ c1 ^ k0, n2 = unsigned(p0 >> 32) ^ c3 ^ k1;
        c1 = unsigned(p1);
        c3 = unsigned(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

// floor(total * (word + 0.5) / 2^32), exactly: 2 * word + 1 has 33 bits, total up to 62.
__device__ __forceinline__ Mass scale_by_uniform(Mass total, unsigned word) {
    const Mass low = (total & 0xffffffffu) * word, high = (total >> 32) * word;  // total * word = high * 2^32 + low
    // (2 * total * word + total) / 2^33 = high + (2 * low + total) / 2^33, and low < 2^64 must not be doubled.
    const Mass whole = low >> 32, rest = (low & 0xffffffffu) * 2;
    return high + whole + ((rest + total) >> 33);
}

// The first id whose running sum of kept weights exceeds uniform * total. Spans of the row, one a warp, are summed; the
// one in which the target falls is cut again, down to one that a warp resolves.
__device__ int inverse_cdf(Shared& shared, const float* __restrict__ row, int vocab, const Draw& draw, unsigned word) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int begin = 0, end = vocab, span;
    Mass target = 0;
    bool whole = true;
    do {
        span = ((end - begin + WARPS * LEAF - 1) / (WARPS * LEAF)) * LEAF;
        const int first = min(begin + warp * span, end), last = min(first + span, end);
        Mass sum = 0;
#pragma unroll 2
        for (int id = first + lane; id < last; id += 32) sum += mass_of(kept_weight(row[id], draw));
        sum = sum_over_warp(sum);
        if (lane == 0) shared.warp_mass[warp] = sum;
        __syncthreads();
        if (whole) {
            Mass total = 0;
            for (int other = 0; other < WARPS; other++) total += shared.warp_mass[other];
            target = scale_by_uniform(total, word);
            whole = false;
        }
        int chosen = 0;
        while (shared.warp_mass[chosen] <= target) target -= shared.warp_mass[chosen++];
        begin += chosen * span;
        end = min(begin + span, end);
        __syncthreads();  // all have read the sums
    } while (span > LEAF);
    Mass masses[LEAF / 32], own = 0;
#pragma unroll
    for (int i = 0; i < LEAF / 32; i++) {
        const int id = begin + lane * (LEAF / 32) + i;
        masses[i] = id < end ? mass_of(kept_weight(row[id], draw)) : 0;
        own += masses[i];
    }
    const Mass through = inclusive_scan(own, lane);
    Mass before = through - own;
    int token = begin + lane * (LEAF / 32);
#pragma unroll
    for (int i = 0; i < LEAF / 32 - 1; i++) {
        before += masses[i];
        if (before <= target) token = begin + lane * (LEAF / 32) + i + 1;
    }
    const unsigned reached = __ballot_sync(FULL_WARP, through > target);
    return __shfl_sync(FULL_WARP, token, __ffs(int(reached)) - 1);
}

// Log probability and rank (1 is best) of a token under the model's own logits.
__device__ void report(Shared& shared, const float* __restrict__ row, int vocab, int token, float* logprob, int* rank) {
    const float maximum = best_of(shared, row, vocab).value, value = row[token];
    Mass mass = 0, larger = 0;
    for (int id = threadIdx.x; id < vocab; id += THREADS) {
        const float logit = row[id];
        mass += mass_of(expf(logit - maximum));
        larger += logit > value ? 1 : 0;
    }
    mass = block_sum(shared, mass);
    larger = block_sum(shared, larger);
    if (threadIdx.x == 0) {
        *logprob = float(double(value) - double(maximum) - log(double(mass) * (1.0 / 1099511627776.0)));
        *rank = int(larger) + 1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(int64_t* __restrict__ token_ids,          // [num_draws]; 0 where flagged
           int* __restrict__ flags,                    // [num_draws] Flag
           float* __restrict__ logprobs,               // [num_draws], written where reported
           int* __restrict__ ranks,                    // [num_draws], likewise
           const float* __restrict__ logits,           // [num_rows, vocab]
           const float* __restrict__ adjusted,         // [num_adjusted, vocab]
           const int* __restrict__ was_finite,         // [num_adjusted] 0: the model's own row was not
           const int* __restrict__ source_rows,        // [num_draws] a row of logits; ~row: a row of adjusted
           const int* __restrict__ report_rows,        // [num_draws] the row of logits to report on; -1: none
           const float* __restrict__ temperatures,     // [num_draws] 0 is greedy
           const int* __restrict__ top_ks,             // [num_draws] 0 keeps all
           const float* __restrict__ top_ps,           // [num_draws]
           const float* __restrict__ min_ps,           // [num_draws]
           const int64_t* __restrict__ seeds,        // [num_draws] the bits of an unsigned number
           const int* __restrict__ positions,          // [num_draws]
           const int* __restrict__ sample_indices,     // [num_draws]
           int vocab) {
    __shared__ Shared shared;
    const int index = blockIdx.x, source = source_rows[index];
    const float* __restrict__ row =
        source >= 0 ? logits + int64_t(source) * vocab : adjusted + int64_t(~source) * vocab;
    const Best best = best_of(shared, row, vocab);
    int flag = FINE;
    if (!(fabsf(best.value) < -negative_infinity())) flag = source >= 0 ? NON_FINITE : NO_TOKEN_LEFT;
    if (source < 0 && was_finite[~source] == 0) flag = NON_FINITE;
    if (flag != FINE) {
        if (threadIdx.x == 0) {
            token_ids[index] = 0;
            flags[index] = flag;
        }
        return;
    }
    int token = best.id;
    const float temperature = temperatures[index];
    if (temperature > 0.0f) {
        Draw draw = {best.value, temperature, 0, 0.0f};
        const int top_k = top_ks[index];
        const float top_p = top_ps[index], min_p = fminf(min_ps[index], 1.0f);
        if (top_k > 0 && top_k < vocab) {
            draw.rank_pivot = find_pivot<42, 31, 20, 10, 0>(
                shared, row, vocab, [&](float logit) { return rank_key(scaled(logit, draw)); },
                [](Mass) { return Mass(1); }, [&](Mass) { return Mass(top_k); });
        }
        if (top_p < 1.0f) {
            const Mass pivot = find_pivot<30, 19, 8, 0>(
                shared, row, vocab, [&](float logit) { return weight_key(kept_weight(logit, draw)); },
                [](Mass key) { return mass_of(__int_as_float(int(key))); },
                [&](Mass total) {
                    const Mass target = Mass(ceil(double(total) * double(top_p)));
                    return target < 1 ? Mass(1) : target < total ? target : total;
                });
            draw.weight_pivot = __int_as_float(int(pivot));
        }
        draw.weight_pivot = fmaxf(draw.weight_pivot, min_p);
        const unsigned word = philox(Mass(seeds[index]), unsigned(positions[index]), unsigned(sample_indices[index]));
        token = inverse_cdf(shared, row, vocab, draw, word);
    }
    if (threadIdx.x == 0) {
        token_ids[index] = token;
        flags[index] = FINE;
    }
    if (report_rows[index] >= 0) {
        const float* __restrict__ own = logits + int64_t(report_rows[index]) * vocab;
        report(shared, own, vocab, token, logprobs + index, ranks + index);
    }
}
