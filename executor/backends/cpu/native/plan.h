// The items of one call of attention, in two rounds.
#pragma once

#include <vector>

#include "interface.h"

namespace octavo {

struct Plan {
    std::vector<Item> first;   // begin from nothing
    std::vector<Item> second;  // begin from what the first leave
    std::vector<State> states;
    std::vector<int32_t> tokens;  // what the items' `tokens` point into
    int num_parts = 0;            // Partials, for each K/V head
};

Plan plan(const Runtime& runtime, const Batch& batch, const Cache& cache, const AttentionArguments& a);

}  // namespace octavo
