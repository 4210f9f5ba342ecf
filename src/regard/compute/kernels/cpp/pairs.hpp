// bfloat16 by dot instructions, for targets that have them: the passes of tile.hpp over pairs.
//
// Two neighbours along the summed axis share 32 bits, the first in the lower half: queries and keys
// along D, weights and values along keys. What is missing at an odd end is 0. Weights are rounded to
// bfloat16, so each row has two sums: that of the rounded ones divides the output, and the other one
// is for all else. A few rows take keys and values as they lie in memory.
#pragma once
#include "finish.hpp"
#include "tile.hpp"

#if defined(__AVX512BF16__)
namespace {

typedef Bits<float> Two;  // pairs

REGARD_INLINE Two load_pairs(const void* p) { return (Two)load((const float*)p); }
REGARD_INLINE void store_pairs(void* p, Two x) { store((float*)p, (Vec<float>)x); }
REGARD_INLINE Two all_pairs(const void* p) { return number_at<int32_t>(p) - Two{}; }
// Lanes of two rows of bfloat16 as pairs.
REGARD_INLINE Two side_by_side(const char* first, const char* second) {
    return (Two)(load_wide(first) | load_wide(second) << 16);
}
// In every quarter: the lower or the upper numbers of two rows of bfloat16 as pairs.
template <int Upper, int... I> REGARD_INLINE Two woven_pairs(Two a, Two b, Indices<I...>) {
    typedef uint16_t Numbers __attribute__((vector_size(kBytes)));
    return (Two)__builtin_shufflevector((Numbers)a, (Numbers)b,
                                        (I / 8 * 8 + 4 * Upper + I % 8 / 2 + I % 2 * 32)...);
}
template <int Upper> REGARD_INLINE Two woven_pairs(Two a, Two b) {
    return woven_pairs<Upper>(a, b, std::make_integer_sequence<int, 2 * kLanes<float>>{});
}
// What was summed from them in order again: two quarters of a and b in turn, the first or the last.
template <int Last, class V, int... I> REGARD_INLINE V paired_quarters(V a, V b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (8 * Last + I / 8 * 4 + I % 4 + I / 4 % 2 * 16)...);
}
REGARD_INLINE constexpr int64_t pairs_of(int64_t n) { return (n + 1) / 2; }

constexpr int kPairLanes = kLanes<float>;
constexpr int64_t kPairPanel = kPanel<float>;
constexpr int64_t kPairStrip = kChunk / 2 + kPairLanes;  // row length of the rounded weights

// n numbers, `stride` bytes apart, next to each other; 0 up to `room`.
static void copy_pairs(uint32_t* to, const char* from, int64_t stride, int64_t n, int64_t room) {
    uint16_t* const numbers = (uint16_t*)to;
    if (stride == 2) __builtin_memcpy(numbers, from, size_t(2 * n));
    else
        for (int64_t i = 0; i < n; i++) numbers[i] = number_at<uint16_t>(from + i * stride);
    for (int64_t i = n; i < 2 * room; i++) numbers[i] = 0;
}

// Values of a chunk: packed, or nullptr and rows in memory, the first `count` of which exist.
struct PairValues {
    const uint32_t* packed;
    const char* rows;
    int64_t stride, wide, count;

    // Lanes e … of the rows 2m and 2m + 1.
    REGARD_ALWAYS_INLINE Two at(int64_t m, int64_t e) const {
        if (packed) return load_pairs(packed + m * wide + e);
        const char* first = rows + 2 * m * stride + 2 * e;
        if (2 * m + 1 == count) return (Two)load_wide(first);
        return side_by_side(first, first + stride);
    }
};

struct PairOperands {
    const uint32_t* panels;  // nullptr: keys are not packed
    PairValues values;

    bool known() const { return values.count; }
};

struct PairWork : Work<float> {
    typedef PairOperands Use;
    uint32_t *query_pairs, *key_pairs, *value_pairs, *key_rows, *weight_pairs;
    size_t size;

    PairWork(const Request& request, int64_t b, int64_t g, int64_t count, char* at)
        : Work<float>(request, b, g, count, at), size(s.size) {
        const auto take = [&](uint32_t*& to, int64_t rows, int64_t columns) {
            to = at ? (uint32_t*)(at + size) : nullptr;
            size += size_t(padded(rows * columns * 4, 64));
        };
        take(query_pairs, kTask, pairs_of(q.D));
        take(key_pairs, kChunk, pairs_of(q.D));
        take(value_pairs, kChunk / 2, wide);
        take(key_rows, kPairLanes, padded(pairs_of(q.D), kPairLanes));
        take(weight_pairs, kTile, kPairStrip);
    }

    int64_t query_size() const { return pairs_of(q.D); }
};

// Whether rows of an array can be read as vectors of pairs, in place.
REGARD_INLINE bool pairs_in_place(const Array& a, int64_t columns) {
    return a.column == 2 && columns % (2 * kPairLanes) == 0;
}
REGARD_INLINE bool values_in_place(const Request& q) {
    return q.value.column == 2 && q.E % kPairLanes == 0;
}

// Calls f(d, pairs number d) for all pairs of kPairLanes keys from number j on, in order, lanes along
// the keys. `rows` has room for them.
template <class F>
REGARD_NESTED void for_turned_pairs(const Request& q, const Chunk& c, int64_t j, uint32_t* rows,
                                    F f) {
    constexpr int W = kPairLanes;
    const int64_t half = pairs_of(q.D), room = padded(half, W);
    Strided from = {q.key.at(c.b, c.g, c.k0 + j), q.key.row,
                    pairs_in_place(q.key, q.D) && j + W <= c.n};
    if (!from.in_place) {
        for (int k = 0; k < W; k++) {
            const bool there = j + k < c.n;
            copy_pairs(rows + k * room, from.first + k * (there ? from.step : 0), q.key.column,
                       there ? q.D : 0, room);
        }
        from.first = (const char*)rows;
        from.step = 4 * room;
    }
    Prefetch<float> prefetch(from, 4 * half);
    int64_t d = 0;
    for (; d + W <= half; d += W)
        turn<float>(from.first + 4 * d, from.step, [&](auto i, Vec<float> pairs) REGARD_LAMBDA {
            prefetch.line(i);
            f(d + i.value, (Two)pairs);
        });
    if (d < half)
        turn<float>(from.first + 4 * d, from.step, [&](auto i, Vec<float> pairs) REGARD_LAMBDA {
            if (d + i.value < half) f(d + i.value, (Two)pairs);
        });
}

REGARD_OUTERMOST void pack_key_pairs(const Request& q, const Chunk& c, uint32_t* to,
                                     uint32_t* rows) {
    constexpr int64_t P = kPairPanel;
    const int64_t half = pairs_of(q.D);
    for (int64_t j = 0; j < padded(c.n, P); j += kPairLanes) {
        uint32_t* panel = to + j / P * P * half + j % P;
        for_turned_pairs(q, c, j, rows, [&](int64_t d, Two pairs) REGARD_LAMBDA {
            store_pairs(panel + d * P, pairs);
        });
    }
}

static void pack_value_pairs(const Request& q, const Chunk& c, uint32_t* to) {
    const int64_t wide = padded(q.E, kPairLanes), stride = q.value.column;
    for (int64_t j = 0; j < c.n; j += 2) {
        uint32_t* row = to + j / 2 * wide;
        const char* first = q.value.at(c.b, c.g, c.k0 + j);
        const char* second = j + 1 < c.n ? q.value.at(c.b, c.g, c.k0 + j + 1) : nullptr;
        int64_t e = 0;
        for (; second && stride == 2 && e + kPairLanes <= q.E; e += kPairLanes)
            store_pairs(row + e, side_by_side(first + 2 * e, second + 2 * e));
        for (; e < q.E; e++)
            row[e] = number_at<uint16_t>(first + e * stride) |
                     (second ? uint32_t(number_at<uint16_t>(second + e * stride)) << 16 : 0);
        for (; e < wide; e++) row[e] = 0;
    }
}

// A packed key head: keys in panels, values in pairs of rows, and scratch rows for each chunk.
struct PackedPairs {
    uint32_t *keys, *values, *rows;
    size_t size;

    PackedPairs(const Request& q, const char* at) : size(0) {
        const auto take = [&](uint32_t*& to, int64_t rows, int64_t columns) {
            to = at ? (uint32_t*)(at + size) : nullptr;
            size += (size_t(rows) * size_t(columns) * 4 + 63) / 64 * 64;
        };
        take(keys, padded(q.S, kPairPanel), pairs_of(q.D));
        take(values, q.chunks() * kChunk / 2, padded(q.E, kPairLanes));
        take(rows, q.chunks() * kPairLanes, padded(pairs_of(q.D), kPairLanes));
    }
};

static void pack_pairs(const Request& q, int64_t b, int64_t g, int64_t number, char* at) {
    const PackedPairs packed(q, at);
    const Chunk chunk = chunk_of(q, b, g, number);
    pack_value_pairs(q, chunk, packed.values + chunk.k0 / 2 * padded(q.E, kPairLanes));
    pack_key_pairs(q, chunk, packed.keys + chunk.k0 * pairs_of(q.D),
                   packed.rows + number * kPairLanes * padded(pairs_of(q.D), kPairLanes));
}

static size_t pair_scratch_bytes(const Request& q) {
    const size_t own = PairWork(q, 0, 0, 0, nullptr).size;
    const size_t retry = Scratch<double>(q, nullptr, true).size;
    return (own > retry ? own : retry) + 64;
}
static size_t packed_pairs_bytes(const Request& q) { return PackedPairs(q, nullptr).size; }

REGARD_INLINE PairOperands operands_of(const PairWork& w, const Chunk& chunk, const char* packed,
                                       bool few) {
    const Request& q = w.q;
    if (packed) {
        const PackedPairs head(q, packed);
        const uint32_t* values = head.values + chunk.k0 / 2 * w.wide;
        return {head.keys + chunk.k0 * pairs_of(q.D), {values, nullptr, 0, w.wide, chunk.n}};
    }
    if (!few) pack_key_pairs(q, chunk, w.key_pairs, w.key_rows);
    const uint32_t* panels = few ? nullptr : w.key_pairs;
    if (few && values_in_place(q)) {
        const char* rows = q.value.at(w.b, w.g, chunk.k0);
        return {panels, {nullptr, rows, q.value.row, w.wide, chunk.n}};
    }
    pack_value_pairs(q, chunk, w.value_pairs);
    return {panels, {w.value_pairs, nullptr, 0, w.wide, chunk.n}};
}

// Sets rows and states; returns the queries as rows of pairs, in place or copied.
REGARD_INLINE const uint32_t* start_rows(const PairWork& w, const Piece& piece) {
    const Request& q = w.q;
    const int64_t half = pairs_of(q.D);
    const char* const first = q.query.at(w.b, w.g * (q.H / q.G) + piece.first / q.L,
                                         piece.first % q.L);
    const bool direct = q.D % 2 == 0 && q.query.column == 2 && q.query.row == 2 * q.D &&
                        (q.H == q.G || q.query.head == q.L * q.query.row) &&
                        uintptr_t(first) % alignof(uint32_t) == 0 && w.sign == 1;
    for_rows(q, piece, [&](int64_t r, Row row) {
        w.s.row[r] = row;
        w.s.states[r] = kNothing<float>;  // and an output that is not written yet
        if (direct) return;
        uint32_t* const query = w.query_pairs + r * half;
        copy_pairs(query, q.query.at(w.b, row.h, row.i), q.query.column, q.D, half);
        uint16_t* const numbers = (uint16_t*)query;
        for (int64_t d = 0; w.sign != 1 && d < q.D; d++)
            numbers[d] = to_bfloat(from_bfloat(numbers[d]) * w.sign);
    });
    return direct ? (const uint32_t*)first : w.query_pairs;
}

// Queries against N vectors of keys of one panel.
template <int R, int N>
static __attribute__((noinline)) void meet_pairs(const uint32_t* queries, int64_t half,
                                                 const uint32_t* panel, float* strip) {
    constexpr int W = kPairLanes;
    Vec<float> sum[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = Vec<float>{};
    for (int64_t d = 0; d < half; d++) {
        Two k[N];
        for (int n = 0; n < N; n++) k[n] = load_pairs(panel + d * kPairPanel + n * W);
        for (int r = 0; r < R; r++) {
            const Two x = all_pairs(queries + r * half + d);
            for (int n = 0; n < N; n++) sum[r][n] = dot(sum[r][n], k[n], x);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(strip + r * kStrip<float> + n * W, sum[r][n]);
}

// Scores of a range of keys, in whole vectors.
template <int R>
static void scores_in_pairs(const uint32_t* queries, int64_t half, const uint32_t* panels,
                            KeyRange keys, float* strip, const Ahead* ahead) {
    constexpr int64_t W = kPairLanes, P = kPairPanel;
    const auto panel = [&](int64_t j, auto vectors) {
        constexpr int N = decltype(vectors)::value;
        ask_for<R>(ahead, j, N * W);
        meet_pairs<R, N>(queries, half, panels + j / P * P * half + j % P, strip + j);
    };
    int64_t j = keys.low / P * P;
    for (; j + W < keys.high; j += P) panel(j, Number<2>{});
    if (j < keys.high) panel(j, Number<1>{});
}

// The same from keys that are not packed.
template <int R>
REGARD_OUTERMOST void scores_of_rows(const PairWork& w, const Chunk& c, const uint32_t* queries,
                                     KeyRange keys, const Ahead* ahead) {
    constexpr int W = kPairLanes;
    const int64_t half = pairs_of(w.q.D);
    for (int64_t j = keys.low / kPairPanel * kPairPanel; j < keys.high; j += W) {
        ask_for<R>(ahead, j, W);
        Vec<float> sum[R];
        for (int r = 0; r < R; r++) sum[r] = Vec<float>{};
        for_turned_pairs(w.q, c, j, w.key_rows, [&](int64_t d, Two pairs) REGARD_LAMBDA {
            ask_for_line(w.q.value, c, j, d);
            for (int r = 0; r < R; r++)
                sum[r] = dot(sum[r], pairs, all_pairs(queries + r * half + d));
        });
        for (int r = 0; r < R; r++) store(w.s.strip + r * kStrip<float> + j, sum[r]);
    }
}

REGARD_INLINE void score_tile(const PairWork& w, const Tile& t, const uint32_t* queries,
                              const uint32_t* panels) {
    Ahead ahead[kTile];
    bias_ahead(w, t, ahead);
    const int64_t half = pairs_of(w.q.D);
    if (!panels)
        return with_number<kFew>(t.height, [&](auto rows) {
            scores_of_rows<decltype(rows)::value>(w, t.chunk, queries, t.visible.keys, ahead);
        });
    by_height(t.height, [&](int64_t r, auto rows) {
        scores_in_pairs<decltype(rows)::value>(queries + r * half, half, panels, t.visible.keys,
                                               w.s.strip + r * kStrip<float>, ahead + r);
    });
}

// Exponentials of what `prepare` left, rounded to pairs, and kept as they are if weights are wanted;
// their sums in lanes, not rounded and rounded.
struct TwoSums {
    Vec<float> sum, rounded;
};
REGARD_INLINE TwoSums exponentiate_pairs(const Softmax<float>& how, float* x, int64_t from,
                                         int64_t to, float maximum, uint32_t* weights, bool keep) {
    constexpr int W = kPairLanes;
    const Vec<float> less = all(maximum), times = all(how.unit);
    const Two ones = Two{} + 0x3f803f80;
    Vec<float> sum0 = {}, sum1 = {}, rounded = {};
    for (int64_t j = from; j < to; j += 2 * W) {
        const Vec<float> p0 = exp2((load(x + j) - less) * times);
        const Vec<float> p1 = j + W < to ? exp2((load(x + j + W) - less) * times) : Vec<float>{};
        sum0 += p0;
        sum1 += p1;
        if (keep) store(x + j, p0);
        if (keep && j + W < to) store(x + j + W, p1);
        const Two pairs = narrow_pairs(p0, p1);
        rounded = dot(rounded, pairs, ones);
        store_pairs(weights + j / 2, pairs);
    }
    return {sum0 + sum1, rounded};
}

REGARD_INLINE void softmax_tile(const PairWork& w, const Tile& t, State<float>* parts) {
    const KeyRange whole = whole_vectors<float>(t.visible.keys);
    const Largest<float> found = prepare_tile(w, t);
    TwoSums sums[kTile];
    for (int64_t r = 0; r < t.height; r++) {
        const float most = found.most[r];
        parts[r].maximum = most > -infinity<float>() ? most : 0.0f;
        sums[r] = exponentiate_pairs(w.how, w.s.strip + r * kStrip<float>, whole.low, whole.high,
                                     parts[r].maximum, w.weight_pairs + r * kPairStrip,
                                     w.q.weights != nullptr);
    }
    for (int64_t r = 0; r < t.height; r++) {
        parts[r].sum = sum_of<float>(sums[r].sum);
        parts[r].divisor = sum_of<float>(sums[r].rounded);
        if (parts[r].sum == 0) parts[r] = kNothing<float>;
        if (found.left[r]) parts[r] = kAgain<float>;
    }
}

// Weights times N vectors of values, from zero.
template <int R, int N>
static __attribute__((noinline)) void blend_pairs(const uint32_t* weights, const PairValues& values,
                                                  KeyRange keys, int64_t e, float* out) {
    constexpr int W = kPairLanes;
    Vec<float> sum[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = Vec<float>{};
    for (int64_t m = keys.low / 2; m < pairs_of(keys.high); m++) {
        Two v[N];
        for (int n = 0; n < N; n++) v[n] = values.at(m, e + n * W);
        for (int r = 0; r < R; r++) {
            const Two p = all_pairs(weights + r * kPairStrip + m);
            for (int n = 0; n < N; n++) sum[r][n] = dot(sum[r][n], v[n], p);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(out + r * values.wide + e + n * W, sum[r][n]);
}

// The same for values that a few rows read where they lie, an even number of vectors.
template <int R, int N>
static __attribute__((noinline)) void blend_rows(const Request& q, const Chunk& c,
                                                 const uint32_t* weights, const PairValues& values,
                                                 KeyRange keys, int64_t e, float* out) {
    constexpr int W = kPairLanes;
    constexpr LanesOf<float> lanes;
    constexpr int64_t bytes = 2 * N * W, ahead = kValuesAhead<float, Kind::bfloat16> / bytes;
    Vec<float> sum[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = Vec<float>{};
    const int64_t last = values.count % 2 && keys.high == values.count ? keys.high / 2 : -1;
    for (int64_t m = keys.low / 2; m < pairs_of(keys.high); m++) {
        const char* row = values.rows + 2 * m * values.stride + 2 * e;
        for (int n = 0; n < N; n++) ask_for_line(q.key, c, kChunk + 2 * m, e / W + n);
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(row + ahead * values.stride + at, 0, 2);
            __builtin_prefetch(row + (ahead + 1) * values.stride + at, 0, 2);
        }
        for (int n = 0; n < N; n += 2) {
            const Two a = load_pairs(row + 2 * n * W);
            const Two b = m == last ? Two{} : load_pairs(row + values.stride + 2 * n * W);
            const Two low = woven_pairs<0>(a, b), high = woven_pairs<1>(a, b);
            for (int r = 0; r < R; r++) {
                const Two p = all_pairs(weights + r * kPairStrip + m);
                sum[r][n] = dot(sum[r][n], low, p);
                sum[r][n + 1] = dot(sum[r][n + 1], high, p);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n += 2) {
            float* to = out + r * values.wide + e + n * W;
            store(to, paired_quarters<0>(sum[r][n], sum[r][n + 1], lanes));
            store(to + W, paired_quarters<1>(sum[r][n], sum[r][n + 1], lanes));
        }
}

REGARD_INLINE void accumulate_values(const PairWork& w, const Tile& t, const PairOperands& use,
                                     float* part) {
    constexpr int W = kPairLanes;
    by_height(t.height, [&](int64_t r, auto rows) {
        constexpr int R = decltype(rows)::value;
        const uint32_t* weights = w.weight_pairs + r * kPairStrip;
        float* out = part + r * w.wide;
        int64_t e = 0;
        const auto in_rows = [&](auto vectors) {
            constexpr int N = decltype(vectors)::value;
            for (; e + N * W <= w.wide; e += N * W)
                blend_rows<R, N>(w.q, t.chunk, weights, use.values, t.visible.keys, e, out);
        };
        if constexpr (R <= kFew)
            if (!use.values.packed) {
                if constexpr (R <= 2) in_rows(Number<8>{});
                in_rows(Number<4>{});
                in_rows(Number<2>{});
            }
        for (; e + 2 * W <= w.wide; e += 2 * W)
            blend_pairs<R, 2>(weights, use.values, t.visible.keys, e, out);
        if (e < w.wide) blend_pairs<R, 1>(weights, use.values, t.visible.keys, e, out);
    });
}

// A row's output of one chunk again, with 0 for the values of hidden keys.
static void accumulate_visible(const Seen<float>& seen, const uint32_t* weights,
                               const PairValues& values, KeyRange keys, float* out) {
    constexpr int W = kPairLanes;
    for (int64_t e = 0; e < values.wide; e += W) {
        Vec<float> sum = {};
        for (int64_t m = keys.low / 2; m < pairs_of(keys.high); m++) {
            const int64_t j = 2 * m;
            const uint32_t low = j >= keys.low && seen(j) ? 0xffff : 0;
            const uint32_t high = j + 1 < keys.high && seen(j + 1) ? 0xffff0000 : 0;
            const Two kept = values.at(m, e) & (int32_t(low | high) - Two{});
            sum = dot(sum, kept, all_pairs(weights + m));
        }
        store(out + e, sum);
    }
}

REGARD_INLINE void leave_out_hidden(const PairWork& w, const Tile& t, const State<float>* parts,
                                    const PairOperands& use, float* part) {
    if (finite(part, t.height * w.wide)) return;
    for (int64_t r = 0; r < t.height; r++)
        if (!again(parts[r]) && !finite(part + r * w.wide, w.wide))
            accumulate_visible(seen_by(w, t, r), w.weight_pairs + r * kPairStrip, use.values,
                               t.visible.keys, part + r * w.wide);
}

}  // namespace
#endif
