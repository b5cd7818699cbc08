// How one call of attention is cut into items.
//
// An item is queries of one sequence over all their keys, unless the step allows another order of sums (`may_split`).
// Then two things are done, and one mechanism serves both: an item may leave its rows' softmax state instead of their
// results, and an item of the second round begins from such states.
//
// - Shared prefixes (cascade). Sequences that decode and whose block tables begin with the same blocks see the same
//   keys there: one item takes the queries of as many of them as fit over that range, so it is read and transposed once
//   for all. The tables are sorted, so those that share stand side by side; they form a tree, in which 8 may share 4
//   blocks and 4 of these share 8. A sequence goes on from the states of its branch, over the keys that are left to it.
// - Splits. Where items are too few or too unlike for the threads, the keys of long ones are split, in proportion to
//   what a thread should do.
#include "plan.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

constexpr int kMinShared = 128;  // keys: of a shorter range two sequences gain nothing
constexpr int kMinSplit = 512;   // keys: likewise for a part
constexpr int kItemsPerThread = 4;

int64_t cost(const Item& item) { return int64_t(item.num_queries) * (item.key_end - item.key_begin); }

// Sequences of one query that see all their keys, in the order of their block tables.
class Prefixes {
   public:
    Prefixes(const Batch& batch, const Cache& cache, const AttentionArguments& a, int queries_per_item)
        : queries_per_item_(queries_per_item) {
        order_.reserve(batch.num_seqs);
        for (int sequence = 0; sequence < batch.num_seqs; sequence++) {
            const int32_t token = batch.query_start_loc[sequence], len = batch.seq_lens[sequence];
            const int blocks = (len - 1) / cache.block_size;
            const bool decodes = batch.query_start_loc[sequence + 1] - token == 1;
            const bool sees_all = a.sliding_window == 0 || len <= a.sliding_window;
            if (decodes && sees_all && blocks > 0)
                order_.push_back({batch.block_tables + int64_t(sequence) * batch.max_blocks, blocks, sequence, token});
        }
        std::sort(order_.begin(), order_.end(), [](const Branch& x, const Branch& y) {
            if (x.table[0] != y.table[0]) return x.table[0] < y.table[0];
            const int differ = std::memcmp(x.table, y.table, sizeof(int32_t) * std::min(x.blocks, y.blocks));
            return differ ? differ < 0 : x.blocks < y.blocks;
        });
        common_.reserve(order_.size());
        for (size_t i = 0; i + 1 < order_.size(); i++) {
            const Branch &x = order_[i], &y = order_[i + 1];
            const int32_t* end = x.table + std::min(x.blocks, y.blocks);
            const int same = static_cast<int>(std::mismatch(x.table, end, y.table).first - x.table);
            common_.push_back(same * cache.block_size / kTile * kTile);
        }
    }

    // Items over the shared ranges, a branch after the one that it grows from; `tokens` must not move afterwards.
    std::vector<Item> items(std::vector<int32_t>& tokens) {
        for (const Branch& branch : order_) tokens.push_back(branch.token);
        divide(0, static_cast<int>(order_.size()), 0, tokens.data());
        return std::move(items_);
    }

   private:
    struct Branch {
        const int32_t* table;
        int blocks;  // of keys before the last one, which is a sequence's own
        int32_t sequence;
        int32_t token;
    };

    // The tree below order_[begin, end), whose keys before key_begin are done.
    void divide(int begin, int end, int key_begin, const int32_t* tokens) {
        if (end - begin < 2) return;
        const int key_end = *std::min_element(common_.begin() + begin, common_.begin() + end - 1);
        if (key_end - key_begin >= kMinShared) {
            share(begin, end, key_begin, key_end, tokens);
            key_begin = key_end;
        }
        for (int first = begin, last; first < end; first = last) {
            for (last = first + 1; last < end && common_[last - 1] > key_end;) last++;
            divide(first, last, key_begin, tokens);
        }
    }

    void share(int begin, int end, int key_begin, int key_end, const int32_t* tokens) {
        const int num_items = (end - begin + queries_per_item_ - 1) / queries_per_item_;
        for (int item = 0; item < num_items; item++) {
            const int first = begin + (end - begin) * item / num_items;
            const int last = begin + (end - begin) * (item + 1) / num_items;
            const int queries = last - first, sequence = order_[first].sequence;
            items_.push_back({sequence, 0, tokens[first], queries, key_begin, key_end, -1, -1, tokens + first});
        }
    }

    const int queries_per_item_;
    std::vector<Branch> order_;
    std::vector<int> common_;  // keys, in whole tiles, that order_[i] and order_[i + 1] begin with
    std::vector<Item> items_;
};

// Queries over the keys that shared items leave to them: those from begin[token] on.
void add_own(
    const Batch& batch, const AttentionArguments& a, int queries_per_item, const std::vector<int32_t>& begin,
    std::vector<Item>& items
) {
    for (int sequence = 0; sequence < batch.num_seqs; sequence++) {
        const int start = batch.query_start_loc[sequence];
        const int query_len = batch.query_start_loc[sequence + 1] - start;
        const int first = batch.seq_lens[sequence] - query_len;
        for (int query = 0; query < query_len; query += queries_per_item) {
            const int queries = std::min(queries_per_item, query_len - query);
            const int seen = a.sliding_window ? std::max(0, first + query - a.sliding_window + 1) / kTile * kTile : 0;
            const int key_begin = std::max(seen, begin[start + query]), key_end = first + query + queries;
            items.push_back({sequence, 0, start + query, queries, key_begin, key_end, -1, -1, nullptr});
        }
    }
}

// Puts items into rounds, shared ones before those of their sequences.
class Rounds {
   public:
    Rounds(Plan& plan, int num_tokens, int num_kv_heads, int heads)
        : plan_(plan), state_(num_tokens, -1), num_kv_heads_(num_kv_heads), heads_(heads) {}

    // In parts of so many keys; what is not shared writes its results from the states of all.
    void add(Item item, int part) {
        if (item.tokens || part < item.key_end - item.key_begin) {
            for (int key = item.key_begin; key < item.key_end; key += part) {
                Item piece = item;
                piece.key_begin = key;
                piece.key_end = std::min(item.key_end, key + part);
                leave(piece);
            }
            item.key_begin = item.key_end;
        }
        if (item.tokens) return;
        item.before = state_[item.token];
        for_heads(item, item.before < 0 ? plan_.first : plan_.second);
    }

   private:
    void leave(Item item) {
        item.part = plan_.num_parts++;
        for_heads(item, plan_.first);
        // A chunk of a prompt is known by its first token.
        for (int query = 0; query < (item.tokens ? item.num_queries : 1); query++) {
            int32_t& state = state_[item.tokens ? item.tokens[query] : item.token];
            plan_.states.push_back({item.part, query * heads_, state});
            state = static_cast<int32_t>(plan_.states.size()) - 1;
        }
    }

    void for_heads(Item item, std::vector<Item>& round) {
        for (item.kv_head = 0; item.kv_head < num_kv_heads_; item.kv_head++) round.push_back(item);
    }

    Plan& plan_;
    std::vector<int32_t> state_;  // [num_tokens]: the last State that holds rows of a token; -1: none
    const int num_kv_heads_;
    const int heads_;
};

}  // namespace

Plan plan(const Runtime& runtime, const Batch& batch, const Cache& cache, const AttentionArguments& a) {
    Plan plan;
    const int heads = a.num_heads / cache.num_kv_heads;
    const int queries_per_item = std::max(1, kMaxRows / heads);
    std::vector<Item> items;  // each stands for one of every K/V head
    if (a.may_split && queries_per_item > 1) items = Prefixes(batch, cache, a, queries_per_item).items(plan.tokens);
    std::vector<int32_t> begin(batch.num_tokens, 0);
    for (const Item& item : items)
        for (int query = 0; query < item.num_queries; query++) begin[item.tokens[query]] = item.key_end;
    add_own(batch, a, queries_per_item, begin, items);

    const bool threads = runtime.num_threads > 1 && runtime.parallel != nullptr;
    int64_t total = 0;
    for (const Item& item : items) total += cost(item) * cache.num_kv_heads;
    const int64_t share = total / (int64_t(runtime.num_threads) * kItemsPerThread);
    plan.first.reserve(items.size() * cache.num_kv_heads);
    Rounds rounds(plan, batch.num_tokens, cache.num_kv_heads, heads);
    for (const Item& item : items) {
        const int keys = item.key_end - item.key_begin;
        const int64_t part = std::max<int64_t>(kMinSplit, (share / item.num_queries + kTile - 1) / kTile * kTile);
        rounds.add(item, threads && a.may_split && keys >= 2 * part ? static_cast<int>(part) : keys);
    }
    if (threads)
        for (std::vector<Item>* round : {&plan.first, &plan.second})
            std::stable_sort(round->begin(), round->end(), [](const Item& x, const Item& y) {
                return cost(x) > cost(y);
            });
    return plan;
}

}  // namespace octavo
