// The library's entry points: which level this CPU has, and each op's work shared out over the caller's threads.
//
// Work is cut into items that threads take one by one: a thread that the system holds back takes fewer. Attention's
// items are queries of one sequence times one K/V head; where the items are too few or too unlike for the threads, the
// keys of long ones are split, in proportion to what a thread should do.
#include "interface.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace octavo {
namespace {

bool supported(int level) {
    if (level == kBaseline) return true;
#ifdef __x86_64__
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (level == kAvx2) return avx2;
    if (level == kAvx512) return avx512;
    if (level == kAvx512Bf16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return false;
}

const Kernels& kernels(const Runtime& runtime) {
    switch (runtime.level) {
        case kAvx2: return avx2_kernels();
        case kAvx512: return avx512_kernels();
        case kAvx512Bf16: return avx512_bf16_kernels();
        default: return baseline_kernels();
    }
}

// Calls work(0) to work(count - 1), on the threads of the runtime.
template <class Work>
void for_each(const Runtime& runtime, int count, Work work) {
    if (runtime.num_threads <= 1 || runtime.parallel == nullptr || count <= 1) {
        for (int i = 0; i < count; i++) work(i);
        return;
    }
    struct Shared {
        Work& work;
        int count;
        std::atomic<int> next;
    } shared{work, count, {0}};
    runtime.parallel(
        [](void* data) {
            auto& s = *static_cast<Shared*>(data);
            for (int i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.work(i);
        },
        &shared, static_cast<unsigned>(std::min(runtime.num_threads, count)), 0
    );
}

// Rows of `size` elements each, in runs: a thread is woken only for what takes longer than waking it.
template <class Work>
void for_rows(const Runtime& runtime, int num_rows, int64_t size, Work work) {
    constexpr int64_t kRun = 1 << 15;  // elements
    const int rows = static_cast<int>(std::max<int64_t>(1, kRun / std::max<int64_t>(1, size)));
    const int runs = (num_rows + rows - 1) / rows;
    for_each(runtime, runs, [&](int run) {
        for (int row = run * rows; row < std::min(num_rows, (run + 1) * rows); row++) work(row);
    });
}

struct Split {
    Item item;
    int first_part;
    int num_parts;
};

struct Plan {
    std::vector<Item> items;
    std::vector<Split> splits;
    int num_parts = 0;
};

constexpr int kMinSplit = 512;       // keys: below it a part costs more to merge than it saves
constexpr int kItemsPerThread = 4;

int64_t cost(const Item& item) {
    return int64_t(item.num_queries) * (item.key_end - item.key_begin);
}

Plan plan(const Runtime& runtime, const Batch& batch, const Cache& cache, const AttentionArguments& a) {
    Plan plan;
    const int heads = a.num_heads / cache.num_kv_heads;
    const int queries_per_item = std::max(1, kMaxRows / heads);
    int64_t total = 0;
    for (int sequence = 0; sequence < batch.num_seqs; sequence++) {
        const int query_len = batch.query_start_loc[sequence + 1] - batch.query_start_loc[sequence];
        const int first = batch.seq_lens[sequence] - query_len;
        for (int query = 0; query < query_len; query += queries_per_item) {
            const int queries = std::min(queries_per_item, query_len - query);
            const int key_end = first + query + queries;
            const int key_begin =
                a.sliding_window ? std::max(0, first + query - a.sliding_window + 1) / kTile * kTile : 0;
            for (int head = 0; head < cache.num_kv_heads; head++) {
                plan.items.push_back({sequence, head, query, queries, key_begin, key_end, -1, 0});
                total += cost(plan.items.back());
            }
        }
    }
    if (runtime.num_threads <= 1 || runtime.parallel == nullptr) return plan;
    std::vector<Item> whole;
    whole.swap(plan.items);
    const int64_t share = std::max<int64_t>(1, total / (int64_t(runtime.num_threads) * kItemsPerThread));
    for (const Item& item : whole) {
        const int keys = item.key_end - item.key_begin;
        const int64_t wanted = share / item.num_queries;
        const int part = static_cast<int>(std::max<int64_t>(kMinSplit, (wanted + kTile - 1) / kTile * kTile));
        if (!a.may_split || keys < 2 * part) {
            plan.items.push_back(item);
            continue;
        }
        const int num_parts = (keys + part - 1) / part;
        for (int index = 0; index < num_parts; index++) {
            Item piece = item;
            piece.key_begin = item.key_begin + index * part;
            piece.key_end = std::min(item.key_end, piece.key_begin + part);
            piece.split = static_cast<int>(plan.splits.size());
            piece.part = plan.num_parts + index;
            plan.items.push_back(piece);
        }
        plan.splits.push_back({item, plan.num_parts, num_parts});
        plan.num_parts += num_parts;
    }
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& x, const Item& y) { return cost(x) > cost(y); });
    return plan;
}

}  // namespace
}  // namespace octavo

using namespace octavo;

#define EXPORT extern "C" __attribute__((visibility("default")))

// 1 where this CPU and its system can run the level.
EXPORT int32_t octavo_supports(int32_t level) { return level >= 0 && level < kNumLevels && supported(level); }

EXPORT void octavo_attention(
    const Runtime* runtime, const Batch* batch, const Cache* cache, const AttentionArguments* arguments
) {
    const Kernels& level = kernels(*runtime);
    const Plan work = plan(*runtime, *batch, *cache, *arguments);
    std::unique_ptr<Partial[]> parts(work.num_parts ? new Partial[work.num_parts] : nullptr);
    const int num_items = static_cast<int>(work.items.size());
    for_each(*runtime, num_items, [&](int index) {
        const Item& item = work.items[index];
        const Item& next = work.items[std::min(num_items - 1, index + std::max(1, runtime->num_threads))];
        level.attend(*batch, *cache, *arguments, item, next, item.split < 0 ? nullptr : &parts[item.part]);
    });
    for (const Split& split : work.splits)
        level.merge(*batch, *cache, *arguments, split.item, &parts[split.first_part], split.num_parts);
}

EXPORT void octavo_rope(const Runtime* runtime, const Batch* batch, const Cache* cache, const RopeArguments* arguments) {
    const Kernels& level = kernels(*runtime);
    const int64_t size = int64_t(arguments->num_heads + 2 * cache->num_kv_heads) * cache->head_size;
    for_rows(*runtime, batch->num_tokens, size, [&](int token) { level.rope(*batch, *cache, *arguments, token); });
}

EXPORT void octavo_norm(const Runtime* runtime, const NormArguments* arguments) {
    const Kernels& level = kernels(*runtime);
    for_rows(*runtime, arguments->num_rows, arguments->size, [&](int row) { level.norm(*arguments, row); });
}

EXPORT void octavo_largest(const Runtime* runtime, const LargestArguments* arguments) {
    const Kernels& level = kernels(*runtime);
    for_rows(*runtime, arguments->num_rows, arguments->size, [&](int row) { level.largest(*arguments, row); });
}

EXPORT void octavo_silu_mul(const Runtime* runtime, const SiluArguments* arguments) {
    const Kernels& level = kernels(*runtime);
    for_rows(*runtime, arguments->num_rows, arguments->size, [&](int row) { level.silu(*arguments, row); });
}
