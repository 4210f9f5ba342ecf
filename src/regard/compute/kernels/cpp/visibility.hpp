// The only place in the kernel that decides which keys a row sees: a range of keys, a program of rules, −∞ in a bias.
#pragma once
#include "rows.hpp"

namespace {

// Saturates: windows and offsets may be as large as an integer gets.
REGARD_INLINE int64_t plus(int64_t a, int64_t b) {
    int64_t sum;
    if (!__builtin_add_overflow(a, b, &sum)) return sum;
    return b > 0 ? INT64_MAX : INT64_MIN;
}

// The keys that a window leaves to a position; a side of −1 is unbounded.
REGARD_INLINE KeyRange window_range(int64_t position, int64_t left, int64_t right) {
    return {left >= 0 ? larger_of(0, plus(position, -left)) : 0,
            right >= 0 ? larger_of(0, plus(plus(position, right), 1)) : INT64_MAX};
}

struct Row {
    int64_t b, h, i;  // batch element, query head, query
    int64_t low, high;  // the keys that causal, window and lengths leave
};

REGARD_INLINE int64_t position_of(const Request& q, int64_t b, int64_t i) {
    return q.positions ? q.positions[b * q.L + i] : i;
}

// A row's numbers in a bias, or in its gradient.
REGARD_INLINE const char* bias_at(const Request& q, const Array& bias, const Row& row) {
    return bias.at(row.b, row.h, q.bias_rows ? q.bias_rows[row.b * q.L + row.i] : row.i);
}

REGARD_INLINE Row row_of(const Request& q, int64_t b, int64_t h, int64_t i) {
    const KeyRange range = window_range(position_of(q, b, i), q.left, q.right);
    const int64_t high = smaller_of(range.high, q.length ? smaller_of(q.S, q.length[b]) : q.S);
    if (range.low >= high) return {b, h, i, 0, 0};
    return {b, h, i, range.low, high};
}

// A row's number among all rows of the call.
REGARD_INLINE int64_t index_of(const Request& q, const Row& row) {
    return (row.b * q.H + row.h) * q.L + row.i;
}

// Calls f(r, row) for the rows of a piece of work.
template <class F> REGARD_INLINE void for_rows(const Request& q, const Piece& piece, F f) {
    int64_t h = piece.g * (q.H / q.G) + piece.first / q.L, i = piece.first % q.L;
    for (int64_t r = 0; r < piece.last - piece.first; r++) {
        f(r, row_of(q, piece.b, h, i));
        if (++i == q.L) i = 0, h++;
    }
}

// Bytes that the program's stack takes for each row.
REGARD_INLINE int64_t stack_size(const Request& q) {
    return larger_of(1, q.program_depth) * kChunk;
}

// Whether the program's rules leave keys k0 … k0 + n to a row, as bytes at the start of `stack`.
static void ask_program(const Request& q, const Row& row, int64_t k0, int64_t n, uint8_t* stack) {
    uint8_t* top = stack;
    const auto push = [&](auto visible) {
        uint8_t* const to = top;
        for (int64_t j = 0; j < n; j++) to[j] = visible(j);
        top = to + kChunk;
    };
    for (int32_t step = 0; step < q.program_size; step++) {
        const Node& node = q.program[step];
        uint8_t *second = top - kChunk, *first = second - kChunk;
        switch (node.rule) {
            case Rule::all:
                for (int64_t j = 0; j < n; j++) first[j] &= second[j];
                top = second;
                break;
            case Rule::any:
                for (int64_t j = 0; j < n; j++) first[j] |= second[j];
                top = second;
                break;
            case Rule::negate:
                for (int64_t j = 0; j < n; j++) second[j] ^= 1;
                break;
            case Rule::boolean: {
                const int64_t stride = node.mask.column;
                const char* from = node.mask.at(row.b, row.h, row.i) + k0 * stride;
                if (stride == 1) push([=](int64_t j) { return from[j] != 0; });
                else push([=](int64_t j) { return from[j * stride] != 0; });
                break;
            }
            case Rule::segments: {
                const int64_t mine = node.queries[row.b * q.L + row.i];
                const int64_t* theirs = node.keys + row.b * q.S + k0;
                push([=](int64_t j) { return theirs[j] == mine; });
                break;
            }
            case Rule::lengths: {
                const int64_t length = node.lengths[row.b];
                push([=](int64_t j) { return k0 + j < length; });
                break;
            }
            case Rule::window: {
                const int64_t position = position_of(q, row.b, row.i);
                const KeyRange range = window_range(position, node.left, node.right);
                push([=](int64_t j) { return k0 + j >= range.low && k0 + j < range.high; });
                break;
            }
        }
    }
}

// Which keys of a chunk rows of a tile may see, relative to the chunk, and whether each sees them all.
struct Span {
    KeyRange keys;
    bool seen;
};

REGARD_INLINE Span segments_span(const Request& q, const Node& node, const Row* rows,
                                 int64_t height, const Chunk& chunk) {
    const int64_t* const queries = node.queries + rows->b * q.L;
    const int64_t* const spans = node.spans + rows->b * ((q.S + kSpan - 1) / kSpan) * 2;
    int64_t least = INT64_MAX, greatest = INT64_MIN;
    for (int64_t r = 0; r < height; r++) {
        const int64_t segment = queries[rows[r].i];
        least = smaller_of(least, segment), greatest = larger_of(greatest, segment);
    }
    Span found = {{chunk.n, 0}, least == greatest};
    int64_t others = 0;  // spans with other segments, between those that count
    for (int64_t j = 0; j < chunk.n; j += kSpan) {
        const int64_t* span = spans + (chunk.k0 + j) / kSpan * 2;
        if (span[1] < least || span[0] > greatest) {
            others += found.keys.low < found.keys.high;
            continue;
        }
        found.keys = {smaller_of(found.keys.low, j), smaller_of(chunk.n, j + kSpan)};
        found.seen &= span[0] == span[1] && !others;
    }
    return found;
}

// The same of the whole program, as far as segments tell.
REGARD_INLINE Span program_span(const Request& q, const Row* rows, int64_t height,
                                const Chunk& chunk) {
    Span all = {{0, chunk.n}, q.conjunction};
    for (int32_t step = 0; q.conjunction && step < q.program_size; step++) {
        const Node& node = q.program[step];
        if (node.rule == Rule::all) continue;
        all.seen &= node.rule == Rule::segments;
        if (node.rule != Rule::segments) continue;
        const Span one = segments_span(q, node, rows, height, chunk);
        all.keys = {larger_of(all.keys.low, one.keys.low),
                    smaller_of(all.keys.high, one.keys.high)};
        all.seen &= one.seen;
    }
    return all;
}

// The keys of one chunk that the rows of a tile see.
struct Visible {
    KeyRange keys;  // that any row may see, relative to the chunk; empty if there are none
    const uint8_t* bytes;  // what the program says, stack_size bytes a row; nullptr: it hides none
};

// `bytes` has room for the program's stacks of all rows.
REGARD_INLINE Visible visible_range(const Request& q, const Row* rows, int64_t height,
                                    const Chunk& chunk, uint8_t* bytes, int64_t panel) {
    const int64_t k0 = chunk.k0, n = chunk.n;
    KeyRange keys = {n, 0};
    for (int64_t r = 0; r < height; r++) {
        if (rows[r].high <= k0 || rows[r].low >= k0 + n) continue;
        keys.low = smaller_of(keys.low, larger_of(0, rows[r].low - k0));
        keys.high = larger_of(keys.high, smaller_of(n, rows[r].high - k0));
    }
    if (!q.program || keys.low >= keys.high) return {keys, nullptr};
    const Span span = program_span(q, rows, height, chunk);
    keys = {larger_of(keys.low, span.keys.low), smaller_of(keys.high, span.keys.high)};
    if (span.seen || keys.low >= keys.high) return {keys, nullptr};
    uint8_t any = 0, every = 1;
    for (int64_t r = 0; r < height; r++) {
        uint8_t* own = bytes + r * stack_size(q);
        ask_program(q, rows[r], k0, n, own);
        for (int64_t j = keys.low; j < keys.high; j++) any |= own[j], every &= own[j];
        for (int64_t j = n; j < padded(n, panel); j++) own[j] = 0;
    }
    if (!any) keys.high = keys.low;
    return {keys, every ? nullptr : bytes};
}

// Which keys of a chunk one row sees, relative to the chunk. bytes, bias: nullptr if there are none.
template <class T> struct Seen {
    int64_t low, high;
    const uint8_t* bytes;
    const T* bias;

    bool operator()(int64_t j) const {
        bool all = (j >= low) & (j < high);  // no branches: a mask may look like chance
        if (bytes) all &= bytes[j] != 0;
        if (bias) all &= bias[j] != -infinity<T>();
        return all;
    }
};

// Calls f(j) for every key that a row sees, until f returns true or the call is stopped.
template <class F> static void for_visible(const Request& q, const Row& row, uint8_t* stack, F f) {
    for (int64_t k0 = row.low / kChunk * kChunk; k0 < row.high; k0 += kChunk) {
        if (q.stopped(q.state)) return;
        double bias[kChunk];
        const int64_t n = smaller_of(kChunk, q.S - k0);
        if (q.program) ask_program(q, row, k0, n, stack);
        if (q.bias.data)
            load_bias(bias, bias_at(q, q.bias, row) + k0 * q.bias.column, q.bias.column,
                      q.bias.kind, n);
        const Seen<double> seen = {row.low - k0, smaller_of(row.high - k0, n),
                                   q.program ? stack : nullptr, q.bias.data ? bias : nullptr};
        for (int64_t j = 0; j < n; j++)
            if (seen(j) && f(k0 + j)) return;
    }
}

}  // namespace
