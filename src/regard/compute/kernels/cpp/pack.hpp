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

constexpr int64_t kAhead = 14 << 10;  // bytes; measured: 10 to 30 KiB, but not 8, 16 or 20

// W rows of an array's chunk from number j on, `columns` wide, to load vectors from: in place where
// that is possible, else copied to `rows`, which has room for W. Rows from n on are zero.
template <class T> struct KeyRows {
    const Array& array;
    const int64_t columns;
    const char* at[kLanes<T>];
    bool in_place;

    KeyRows(const Array& array, int64_t columns, const Chunk& c, int64_t j, T* rows)
        : array(array), columns(columns), in_place(direct<T>(array, columns)) {
        const int64_t wide = padded(columns, kLanes<T>);
        for (int k = 0; k < kLanes<T>; k++) {
            T* row = rows + k * wide;
            if (in_place && j + k < c.n) {
                at[k] = array.at(c.b, c.g, c.k0 + j + k);
                continue;
            }
            at[k] = (const char*)row;
            clear(row, wide);
            if (j + k < c.n)
                load_row(row, array.at(c.b, c.g, c.k0 + j + k), array.column, array.kind, columns);
        }
    }
};

// Calls f(d, block) for every W columns of W keys, turned so that lanes run along keys.
template <class T, Kind K, class F>
REGARD_INLINE void for_turned(const KeyRows<T>& from, F f) {
    constexpr int W = kLanes<T>;
    // Keys are read once: prefetch later rows, as no CPU does for columns across rows.
    const int64_t D = from.columns, step = from.array.row;
    const int64_t row_bytes = D * size_of(K), rows = larger_of(1, W * W / larger_of(1, D));
    const char* ahead = from.at[0] + kAhead / larger_of(row_bytes, 1) * step;
    for (int64_t d = 0; d < D; d += W) {
        for (int64_t row = 0; from.in_place && row < rows; row++, ahead += step)
            for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
        Vec<T> block[W];
        for (int k = 0; k < W; k++) block[k] = load_as<T, K>(from.at[k] + d * size_of(K));
        transpose<T>(block);
        f(d, block);
    }
}

template <class T, class F>
REGARD_INLINE void for_turned(const KeyRows<T>& from, F f) {
    if (!from.in_place) return for_turned<T, kind_of<T>()>(from, f);
    with_kind(from.array.kind, [&](auto of) {
        if constexpr (loads<T>(decltype(of)::kind)) for_turned<T, decltype(of)::kind>(from, f);
    });
}

// Rows of a chunk as panels of D × kPanel, D numbers of each; rows beyond n are zero.
template <class T>
static void pack_panels(const Array& array, int64_t D, const Chunk& c, T* to, T* rows) {
    constexpr int W = kLanes<T>;
    constexpr int64_t P = kPanel<T>;
    for (int64_t j = 0; j < padded(c.n, P); j += W) {
        T* panel = to + j / P * P * D + j % P;
        for_turned(KeyRows<T>(array, D, c, j, rows), [&](int64_t d, Vec<T>(&block)[W]) {
            if (d + W <= D)
                for (int i = 0; i < W; i++) store(panel + (d + i) * P, block[i]);
            else
                for (int64_t i = 0; i < D - d; i++) store(panel + (d + i) * P, block[i]);
        });
    }
}
template <class T> static void pack_keys(const Request& q, const Chunk& c, T* to, T* rows) {
    pack_panels(q.key, q.D, c, to, rows);
}

// Scores of a few rows from keys that are not packed: each lane adds as in a panel.
template <class T, int R>
static __attribute__((noinline)) void scores_unpacked(const Request& q, const Chunk& c,
                                                      const T* queries, KeyRange keys, T* rows,
                                                      T* strip, const Ahead* ahead) {
    constexpr int W = kLanes<T>;
    for (int64_t j = keys.low / W * W; j < keys.high; j += W) {
        ask_for<R>(ahead, j, W);
        Vec<T> whole[R], sum[R];
        for (int r = 0; r < R; r++) whole[r] = sum[r] = Vec<T>{};
        for_turned(KeyRows<T>(q.key, q.D, c, j, rows), [&](int64_t d, Vec<T>(&block)[W]) {
            const int64_t most = smaller_of(W, q.D - d);
            if (d && d % kDepth == 0)
                for (int r = 0; r < R; r++) {
                    whole[r] = d == kDepth ? sum[r] : whole[r] + sum[r];
                    sum[r] = Vec<T>{};
                }
            if (most == W)
                for (int i = 0; i < W; i++)
                    for (int r = 0; r < R; r++)
                        sum[r] = fma(all(queries[r * q.D + d + i]), block[i], sum[r]);
            else
                for (int64_t i = 0; i < most; i++)
                    for (int r = 0; r < R; r++)
                        sum[r] = fma(all(queries[r * q.D + d + i]), block[i], sum[r]);
        });
        for (int r = 0; r < R; r++)
            store(strip + r * kStrip<T> + j, q.D > kDepth ? whole[r] + sum[r] : sum[r]);
    }
}

template <class T> static void pack_values(const Request& q, const Chunk& c, T* to) {
    const int64_t wide = padded(q.E, kLanes<T>);
    for (int64_t j = 0; j < c.n; j++) {
        T* row = to + j * wide;
        load_row(row, q.value.at(c.b, c.g, c.k0 + j), q.value.column, q.value.kind, q.E);
        for (int64_t e = q.E; e < wide; e++) row[e] = 0;
    }
}

}  // namespace
