// The library's entry points: which level this CPU has, and each op's work shared out over the caller's threads.
//
// Work is cut into items that threads take one by one: a thread that the system holds back takes fewer.
#include "interface.h"
#include "plan.h"

#include <algorithm>
#include <atomic>
#include <functional>
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
    std::unique_ptr<Partial[]> partials(new Partial[int64_t(work.num_parts) * cache->num_kv_heads]);
    for (const std::vector<Item>& round : {std::cref(work.first), std::cref(work.second)}) {
        const int count = static_cast<int>(round.size());
        for_each(*runtime, count, [&](int index) {
            const Item& next = round[std::min(count - 1, index + std::max(1, runtime->num_threads))];
            level.attend(*batch, *cache, *arguments, round[index], next, work.states.data(), partials.get());
        });
    }
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

EXPORT void octavo_quantized_linear(const Runtime* runtime, const QuantizedArguments* arguments) {
    const Kernels& level = kernels(*runtime);
    const int blocks = (arguments->in_features + kBlock - 1) / kBlock;
    const int panels = (arguments->out_features + kPanel - 1) / kPanel;
    std::unique_ptr<float[]> inputs(new float[int64_t(arguments->num_rows) * blocks * (kBlock + 1)]);
    for_rows(*runtime, arguments->num_rows, arguments->in_features, [&](int row) {
        level.gather(*arguments, row, inputs.get());
    });
    const int64_t work = int64_t(kPanel) * arguments->in_features * arguments->num_rows;
    for_rows(*runtime, panels, work, [&](int panel) { level.multiply(*arguments, inputs.get(), panel); });
}
