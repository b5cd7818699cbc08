// The level that every machine has: four lanes, which is SSE2 on x86-64 and NEON on ARM.
#include "interface.h"

#define OCTAVO_LEVEL baseline
#define OCTAVO_LANES 4
#include "level.inc"

namespace octavo {
const Kernels& baseline_kernels() {
    static constexpr Kernels kernels = {
        baseline::attend, baseline::rope, baseline::norm, baseline::silu, baseline::largest,
        baseline::gather, baseline::multiply,
    };
    return kernels;
}
}  // namespace octavo
