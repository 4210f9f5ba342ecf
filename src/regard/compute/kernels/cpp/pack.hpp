// Keys in panels whose lanes run along keys, values in rows of whole vectors.
#pragma once
#include "rows.hpp"

namespace {

// The lower, and the upper halves of two vectors, a number from each in turn.
template <class V, int... I> REGARD_INLINE V low(V a, V b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * int(sizeof...(I)))...);
}
template <class V, int... I> REGARD_INLINE V high(V a, V b, Indices<I...>) {
    constexpr int W = sizeof...(I);
    return __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...);
}

// W rows of W columns become W columns of W rows: log2 W rounds of interleaving.
template <class T> REGARD_INLINE void transpose(Vec<T> (&v)[kLanes<T>]) {
    constexpr int W = kLanes<T>;
    for (int round = 1; round < W; round *= 2) {
        Vec<T> next[W];
        for (int i = 0; i < W / 2; i++) {
            next[2 * i] = low(v[i], v[i + W / 2], LanesOf<T>{});
            next[2 * i + 1] = high(v[i], v[i + W / 2], LanesOf<T>{});
        }
        for (int i = 0; i < W; i++) v[i] = next[i];
    }
}

// Two quarters of a, then the same two of b: those of `First` 0 and 2, or 1 and 3.
template <int First, class V, int... I> REGARD_INLINE V quarters(V a, V b, Indices<I...>) {
    constexpr int W = sizeof...(I), Q = W / 4;
    return __builtin_shufflevector(a, b,
                                   (I % Q + (I / Q % 2 * 2 + First) * Q + I / (2 * Q) * W)...);
}
// In every four: the lower or the upper two of a and b, `Run` cells from each in turn.
template <int Upper, int Run, class V, int... I> REGARD_INLINE V woven(V a, V b, Indices<I...>) {
    constexpr int W = sizeof...(I);
    return __builtin_shufflevector(
        a, b,
        (I / 4 * 4 + 2 * Upper + (Run == 1 ? I % 4 / 2 + I % 2 * W : I % 2 + I % 4 / 2 * W))...);
}

// Cells as large as a T, W of each of W rows, turned: calls f(Number<i>, column i) in order.
template <class T, class F>
REGARD_NESTED void turn(const char* rows, int64_t step, F f) {
    constexpr int W = kLanes<T>;
    constexpr LanesOf<T> lanes;
    if constexpr (W == 16) {
        // Loads join halves of rows k and k + 4, so that two rounds are left, within quarters.
        each<2>([&](auto half) REGARD_LAMBDA {
            Vec<T> v[8];
            const char* row = rows + 32 * half.value;  // step by step: too few registers for more
            for (int k = 0; k < 8; k++, row += step) {
                if (k == 4) row += 4 * step;
                v[k] = load_halves<T>(row, row + 4 * step);
            }
            each<2>([&](auto part) REGARD_LAMBDA {
                Vec<T> u[4];
                for (int k = 0; k < 4; k++) u[k] = quarters<part.value>(v[k], v[k + 4], lanes);
                const Vec<T> a = woven<0, 1>(u[0], u[1], lanes), b = woven<0, 1>(u[2], u[3], lanes);
                const Vec<T> c = woven<1, 1>(u[0], u[1], lanes), d = woven<1, 1>(u[2], u[3], lanes);
                constexpr int i = 8 * half.value + 4 * part.value;
                f(Number<i>{}, woven<0, 2>(a, b, lanes));
                f(Number<i + 1>{}, woven<1, 2>(a, b, lanes));
                f(Number<i + 2>{}, woven<0, 2>(c, d, lanes));
                f(Number<i + 3>{}, woven<1, 2>(c, d, lanes));
            });
        });
    } else {
        Vec<T> v[W];
        for (int k = 0; k < W; k++) v[k] = load((const T*)(rows + k * step));
        transpose<T>(v);
        each<W>([&](auto i) REGARD_LAMBDA { f(i, v[i.value]); });
    }
}

// Rows to load vectors from, where an array has them or copied: `step` bytes from row to row.
struct Strided {
    const char* first;
    int64_t step;
    bool in_place;
};

// W rows of an array's chunk from number j on, `columns` wide: in place where that is possible, else
// copied to `rows`, which has room for W. Rows from n on are zero.
template <class T> struct KeyRows : Strided {
    const int64_t columns;
    Kind kind;

    KeyRows(const Array& array, int64_t columns, const Chunk& c, int64_t j, T* rows)
        : Strided{array.at(c.b, c.g, c.k0 + j), array.row,
                  direct<T>(array, columns) && j + kLanes<T> <= c.n},
          columns(columns), kind(array.kind) {
        if (in_place) return;
        const int64_t wide = padded(columns, kLanes<T>);
        first = (const char*)rows;
        step = wide * int64_t(sizeof(T));
        kind = kind_of<T>();
        for (int k = 0; k < kLanes<T>; k++) {
            T* row = rows + k * wide;
            clear(row, wide);
            if (j + k < c.n)
                load_row(row, array.at(c.b, c.g, c.k0 + j + k), array.column, array.kind, columns);
        }
    }
};

// Prefetches, line by line, rows that are read once in groups of W: later ones into the second cache,
// the next group into the first. No CPU does so for columns across rows.
template <class T, bool Far = true> struct Prefetch {
    static constexpr int64_t kAhead = 24 << 10;  // bytes; measured: 14 to 40 KiB, but not 6
    static constexpr int kLines = 64 / kBytes;  // cells of a turned block to a line of memory

    const int64_t row_bytes, between, later, next;
    const char* at;
    int64_t left;

    Prefetch(const Strided& from, int64_t row_bytes)
        : row_bytes(row_bytes), between(from.step - padded(row_bytes, 64)),
          later(from.in_place ? kAhead / larger_of(row_bytes, 1) * from.step : 0),
          next(from.in_place ? kLanes<T> * from.step : 0), at(from.first), left(row_bytes) {}

    // Called with each cell of a turned block.
    template <class I> REGARD_ALWAYS_INLINE void line(I cell) {
        if constexpr (cell.value % kLines != 0) return;
        if constexpr (Far) __builtin_prefetch(at + later, 0, 2);
        __builtin_prefetch(at + next, 0, 3);
        at += 64;
        left -= 64;
        if (__builtin_expect(left > 0, 1)) return;  // a branch: each line would wait for a choice
        at += between;
        left = row_bytes;
    }
};

// Calls f(d, Number<i>, column d + i) for every column of W keys, in order, lanes along the keys; d is
// a multiple of W. Half types are turned in pairs, integers in fours.
template <class T, Kind K, class F>
REGARD_NESTED void for_columns(const KeyRows<T>& from, F f) {
    constexpr int W = kLanes<T>;
    const int64_t D = from.columns;
    // Rows of int8 are so close that the CPU fetches far ones itself: measured, 1.3 times as fast.
    Prefetch<T, K != Kind::int8> prefetch(from, D * size_of(K));
    int64_t d = 0;
    if constexpr (K != kind_of<T>()) {
        constexpr int N = kInCell<K>;
        Vec<T> scale;
        for (int k = 0; k < W; k++)
            scale[k] = scale_at<T, K>(from.first + k * from.step + D * size_of(K));
        const auto at = [&](int64_t d) { return from.first + d * size_of(K); };
        for (; d + N * W <= D; d += N * W)
            turn<T>(at(d), from.step, [&](auto i, Vec<T> cells) REGARD_LAMBDA {
                constexpr int first = N * i.value % W;
                prefetch.line(i);
                Vec<T> columns[N];
                split<K>(cells, columns);
                each<N>([&](auto n) REGARD_LAMBDA {
                    f(d + (N * i.value - first), Number<first + n.value>{},
                      scaled<K>(columns[n.value], scale));
                });
            });
        for (; d < D; d += W) {
            Vec<T> block[W];
            for (int k = 0; k < W; k++) block[k] = load_as<T, K>(at(d) + k * from.step);
            transpose<T>(block);
            each<W>([&](auto i) REGARD_LAMBDA {
                prefetch.line(i);
                f(d, i, scaled<K>(block[i.value], scale));
            });
        }
    } else {
        const auto at = [&](int64_t d) { return from.first + d * int64_t(sizeof(T)); };
        for (; d + W <= D; d += W)
            turn<T>(at(d), from.step, [&](auto i, Vec<T> column) REGARD_LAMBDA {
                prefetch.line(i);
                f(d, i, column);
            });
        if (d == D) return;
        turn<T>(at(d), from.step, [&](auto i, Vec<T> column) REGARD_LAMBDA {
            if (d + i.value < D) f(d, i, column);
        });
    }
}

template <class T, Kind K>
REGARD_OUTERMOST void pack_rows(const KeyRows<T>& from, T* panel) {
    for_columns<T, K>(from, [&](int64_t d, auto i, Vec<T> column) REGARD_LAMBDA {
        store(panel + (d + i.value) * kPanel<T>, column);
    });
}

// Calls f(Of<kind>) for a kind that keys may have in place.
template <class T, class F> REGARD_INLINE void with_kind_of(const KeyRows<T>& from, F f) {
    with_kind(from.kind, [&](auto of) {
        if constexpr (loads<T>(decltype(of)::kind)) f(of);
    });
}

// Rows of a chunk as panels of D × kPanel, D numbers of each; rows beyond n are zero.
template <class T>
static void pack_panels(const Array& array, int64_t D, const Chunk& c, T* to, T* rows) {
    constexpr int64_t P = kPanel<T>;
    for (int64_t j = 0; j < padded(c.n, P); j += kLanes<T>) {
        T* const panel = to + j / P * P * D + j % P;
        const int64_t n = c.n - j;
        if (n <= kLanes<T> / 8) {  // so few are not turned but put in place one by one
            for (int64_t d = 0; d < D; d++) store(panel + d * P, Vec<T>{});
            for (int64_t k = 0; k < n; k++) {
                load_row(rows, array.at(c.b, c.g, c.k0 + j + k), array.column, array.kind, D);
                for (int64_t d = 0; d < D; d++) panel[d * P + k] = rows[d];
            }
            continue;
        }
        const KeyRows<T> from(array, D, c, j, rows);
        with_kind_of(from, [&](auto of) { pack_rows<T, decltype(of)::kind>(from, panel); });
    }
}
template <class T> static void pack_keys(const Request& q, const Chunk& c, T* to, T* rows) {
    pack_panels(q.key, q.D, c, to, rows);
}

// R rows of queries against W keys that are not packed: each lane adds as in a panel.
template <class T, int R, Kind K>
REGARD_OUTERMOST void meet_rows(const T* queries, const KeyRows<T>& from, const char* values,
                                T* strip) {
    const int64_t D = from.columns;
    Vec<T> whole[R], sum[R];
    for (int r = 0; r < R; r++) whole[r] = sum[r] = Vec<T>{};
    for_columns<T, K>(from, [&](int64_t d, auto i, Vec<T> column) REGARD_LAMBDA {
        if (i.value == 0 && d && d % kDepth == 0)
            for (int r = 0; r < R; r++) {
                whole[r] = d == kDepth ? sum[r] : whole[r] + sum[r];
                sum[r] = Vec<T>{};
            }
        // Half types: a line of values for two columns.
        if (size_of(K) == 2 && i.value % 2 == 0)
            __builtin_prefetch(values + 32 * (d + i.value), 0, 2);
        for (int r = 0; r < R; r++) sum[r] = fma(all(queries[r * D + d + i.value]), column, sum[r]);
    });
    for (int r = 0; r < R; r++)
        store(strip + r * kStrip<T>, D > kDepth ? whole[r] + sum[r] : sum[r]);
}

// Scores of a few rows from keys that are not packed.
template <class T, int R>
static void scores_unpacked(const Request& q, const Chunk& c, const T* queries, KeyRange keys,
                            T* rows, T* strip, const Ahead* ahead) {
    constexpr int W = kLanes<T>;
    for (int64_t j = keys.low / W * W; j < keys.high; j += W) {
        ask_for<R>(ahead, j, W);
        const KeyRows<T> from(q.key, q.D, c, j, rows);
        const char* values = q.value.at(c.b, c.g, c.k0 + j);
        with_kind_of(from, [&](auto of) {
            meet_rows<T, R, decltype(of)::kind>(queries, from, values, strip + j);
        });
    }
}

template <class T> static void pack_values(const Request& q, const Chunk& c, T* to) {
    const int64_t wide = padded(q.E, kLanes<T>);
    const bool as_they_are = in_place<T>(q.value, q.E);
    for (int64_t j = 0; j < c.n; j++) {
        T* row = to + j * wide;
        const char* from = q.value.at(c.b, c.g, c.k0 + j);
        if (as_they_are) {
            for (int64_t e = 0; e < wide; e += kLanes<T>) store(row + e, load((const T*)from + e));
            continue;
        }
        load_row(row, from, q.value.column, q.value.kind, q.E);
        for (int64_t e = q.E; e < wide; e++) row[e] = 0;
    }
}

}  // namespace
