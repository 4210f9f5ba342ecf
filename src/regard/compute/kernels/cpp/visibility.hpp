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

// Words of 64 bits, one for each key of a chunk, the lowest for the first.
constexpr int64_t kWord = 64, kWords = kChunk / kWord;

// The bits of key j and of those after it, in one word.
REGARD_INLINE uint64_t bits_from(const uint64_t* bits, int64_t j) {
    return bits[uint64_t(j) / kWord] >> (j & (kWord - 1));
}

REGARD_INLINE uint64_t bits_below(int64_t n) {
    return n <= 0 ? 0 : n >= kWord ? ~uint64_t(0) : ~(~uint64_t(0) << n);
}
// The word of a range of keys that begins with key j.
REGARD_INLINE uint64_t range_word(KeyRange keys, int64_t j) {
    return bits_below(keys.high - j) & ~bits_below(keys.low - j);
}

// The word of keys j …, of n in all, each asked on its own.
template <class F> REGARD_INLINE uint64_t asked_word(int64_t j, int64_t n, F visible) {
    char bytes[kWord] = {};
    const int64_t count = smaller_of(kWord, n - j);
    for (int64_t i = 0; i < count; i++) bytes[i] = visible(j + i);
    return nonzero_bits(bytes);
}

// Words that the bits of some rows take, with what the program's stack needs beyond the last one.
REGARD_INLINE int64_t words_of(const Request& q, int64_t rows) {
    return (rows + q.program_depth) * kWords;
}

// Which of the keys k0 … k0 + n a row sees by its range and the program's rules, as bits at the
// start of `stack`, up to the end of a word. Returns 0 if the program hides none of the range.
static uint64_t ask_program(const Request& q, const Row& row, int64_t k0, int64_t n,
                            uint64_t* stack) {
    uint64_t* top = stack;
    const int64_t words = padded(n, kWord) / kWord;
    const auto push = [&](auto word) {
        for (int64_t w = 0; w < words; w++) top[w] = word(w * kWord);
        top += kWords;
    };
    for (int32_t step = 0; step < q.program_size; step++) {
        const Node& node = q.program[step];
        uint64_t *second = top - kWords, *first = second - kWords;
        switch (node.rule) {
            case Rule::all:
                for (int64_t w = 0; w < words; w++) first[w] &= second[w];
                top = second;
                break;
            case Rule::any:
                for (int64_t w = 0; w < words; w++) first[w] |= second[w];
                top = second;
                break;
            case Rule::negate:
                for (int64_t w = 0; w < words; w++) second[w] = ~second[w];
                break;
            case Rule::boolean: {
                const int64_t stride = node.mask.column;
                const char* from = node.mask.at(row.b, row.h, row.i) + k0 * stride;
                const int64_t later = kTile * node.mask.row;  // rows lie far apart
                push([=](int64_t j) {
                    __builtin_prefetch(from + j * stride + later);
                    if (stride == 0) return *from ? ~uint64_t(0) : 0;
                    if (stride == 1 && j + kWord <= n) return nonzero_bits(from + j);
                    return asked_word(j, n, [=](int64_t j) { return from[j * stride] != 0; });
                });
                break;
            }
            case Rule::segments: {
                const int64_t mine = node.queries[row.b * q.L + row.i];
                const int64_t* theirs = node.keys + row.b * q.S + k0;
                push([=](int64_t j) {
                    if (j + kWord <= n) return equal_bits(theirs + j, mine);
                    return asked_word(j, n, [=](int64_t j) { return theirs[j] == mine; });
                });
                break;
            }
            case Rule::lengths: {
                const int64_t length = node.lengths[row.b];
                push([=](int64_t j) { return bits_below(length - k0 - j); });
                break;
            }
            case Rule::window: {
                const int64_t position = position_of(q, row.b, row.i);
                const KeyRange range = window_range(position, node.left, node.right);
                push([=](int64_t j) { return range_word(range, k0 + j); });
                break;
            }
        }
    }
    uint64_t hidden = 0;
    for (int64_t w = 0; w < words; w++) {
        const uint64_t range = range_word({row.low, row.high}, k0 + w * kWord);
        hidden |= range & ~stack[w];
        stack[w] &= range;
    }
    return hidden;
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
    const uint64_t* bits;  // those that each row sees; nullptr: the program hides none

    REGARD_ALWAYS_INLINE const uint64_t* of(int64_t row) const {
        return bits ? bits + row * kWords : nullptr;
    }
};

// `bits` has room for words_of all rows.
REGARD_INLINE Visible visible_range(const Request& q, const Row* rows, int64_t height,
                                    const Chunk& chunk, uint64_t* bits) {
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
    uint64_t any[kWords] = {}, hidden = 0;
    for (int64_t r = 0; r < height; r++) {
        uint64_t* own = bits + r * kWords;
        hidden |= ask_program(q, rows[r], k0, n, own);
        for (int64_t w = 0; w * kWord < n; w++) any[w] |= own[w];
    }
    keys = {n, 0};
    for (int64_t w = 0; w < kWords; w++) {
        if (!any[w]) continue;
        keys.low = smaller_of(keys.low, w * kWord + __builtin_ctzll(any[w]));
        keys.high = (w + 1) * kWord - __builtin_clzll(any[w]);
    }
    return {keys, hidden ? bits : nullptr};
}

// Which keys of a chunk one row sees, relative to the chunk: those of its bits, or of its range
// without any, but for −∞ in its bias. bits, bias: nullptr if there are none.
template <class T> struct Seen {
    int64_t low, high;
    const uint64_t* bits;
    const T* bias;

    bool operator()(int64_t j) const {
        bool all = (j >= low) & (j < high);  // no branches: a mask may look like chance
        if (bits) all &= bits_from(bits, j) & 1;
        if (bias) all &= bias[j] != -infinity<T>();
        return all;
    }
};

// Calls f(j) for every key that a row sees, until f returns true or the call is stopped.
template <class F> static void for_visible(const Request& q, const Row& row, uint64_t* stack, F f) {
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
