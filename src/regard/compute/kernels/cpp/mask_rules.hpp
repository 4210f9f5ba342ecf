// Which keys a row may see: a run of keys, and further rules as bytes.
#pragma once
#include "rows.hpp"

namespace {
using namespace regard;

// --- which keys a row may see ------------------------------------------------------------------

// Windows and offsets may be as large as an integer gets.
REGARD_INLINE int64_t plus(int64_t a, int64_t b) {
    int64_t sum;
    if (!__builtin_add_overflow(a, b, &sum)) return sum;
    return b > 0 ? INT64_MAX : INT64_MIN;
}

struct Row {
    int64_t b, h, i;     // batch element, query head, query
    int64_t low, high;   // the keys that causal, window and lengths leave: [low, high)
};

REGARD_INLINE Row row_of(const Request& q, int64_t b, int64_t h, int64_t i) {
    const int64_t position = i + q.offset[b];
    Row row = {b, h, i, 0, q.S};
    if (q.length) row.high = smaller_of(row.high, q.length[b]);
    if (q.right >= 0)
        row.high = smaller_of(row.high, larger_of(0, plus(plus(position, q.right), 1)));
    if (q.left >= 0) row.low = larger_of(0, plus(position, -q.left));
    if (row.low >= row.high) row.low = row.high = 0;
    return row;
}

// Calls f(r, row) for the rows first … last of a key head: those of all its query heads, head by
// head.
template <class F>
REGARD_INLINE void for_rows(const Request& q, int64_t b, int64_t g, int64_t first, int64_t last,
                            F f) {
    int64_t h = g * (q.H / q.G) + first / q.L, i = first % q.L;
    for (int64_t r = 0; r < last - first; r++) {
        f(r, row_of(q, b, h, i));
        if (++i == q.L) {
            i = 0;
            h++;
        }
    }
}

// The further rules for keys k0 … k0 + n of one row, as bytes; `stack` holds program_depth rows.
static const uint8_t* allowed(const Request& q, const Row& row, int64_t k0, int64_t n,
                              uint8_t* stack) {
    uint8_t* top = stack;
    for (int32_t step = 0; step < q.program_size; step++) {
        const Node& node = q.program[step];
        const int64_t position = row.i + q.offset[row.b];
        switch (node.rule) {
            case Rule::all:
            case Rule::any: {
                uint8_t *second = top - kChunk, *first = second - kChunk;
                if (node.rule == Rule::all)
                    for (int64_t j = 0; j < n; j++) first[j] &= second[j];
                else
                    for (int64_t j = 0; j < n; j++) first[j] |= second[j];
                top = second;
                continue;
            }
            case Rule::negate:
                for (int64_t j = 0; j < n; j++) (top - kChunk)[j] ^= 1;
                continue;
            case Rule::boolean: {
                const char* from = node.mask.at(row.b, row.h, row.i) + k0 * node.mask.column;
                if (node.mask.column == 1)
                    for (int64_t j = 0; j < n; j++) top[j] = from[j] != 0;
                else
                    for (int64_t j = 0; j < n; j++) top[j] = from[j * node.mask.column] != 0;
                break;
            }
            case Rule::lengths:
                for (int64_t j = 0; j < n; j++) top[j] = k0 + j < node.lengths[row.b];
                break;
            case Rule::segments: {
                const int64_t mine = node.queries[row.b * q.L + row.i];
                const int64_t* theirs = node.keys + row.b * q.S + k0;
                for (int64_t j = 0; j < n; j++) top[j] = theirs[j] == mine;
                break;
            }
            case Rule::causal:
                for (int64_t j = 0; j < n; j++) top[j] = k0 + j <= position;
                break;
            case Rule::window:
                for (int64_t j = 0; j < n; j++)
                    top[j] = (node.left < 0 || k0 + j >= plus(position, -node.left)) &&
                             (node.right < 0 || k0 + j <= plus(position, node.right));
                break;
        }
        top += kChunk;
    }
    return stack;
}

}  // namespace
