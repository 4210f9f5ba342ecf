// Keys in panels whose lanes run along keys, values in rows of whole vectors.
#pragma once
#include "rows.hpp"

namespace {
using namespace regard;

// --- packing keys ------------------------------------------------------------------------------

#define REGARD_INTERLEAVE(LANES, LOW, HIGH)                                       \
    template <class V> REGARD_INLINE V low(V a, V b, Lanes<LANES>) {               \
        return __builtin_shufflevector(a, b, LOW);                                 \
    }                                                                              \
    template <class V> REGARD_INLINE V high(V a, V b, Lanes<LANES>) {              \
        return __builtin_shufflevector(a, b, HIGH);                                \
    }
#define REGARD_LIST(...) __VA_ARGS__
REGARD_INTERLEAVE(16, REGARD_LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                  REGARD_LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
REGARD_INTERLEAVE(8, REGARD_LIST(0, 8, 1, 9, 2, 10, 3, 11), REGARD_LIST(4, 12, 5, 13, 6, 14, 7, 15))
REGARD_INTERLEAVE(4, REGARD_LIST(0, 4, 1, 5), REGARD_LIST(2, 6, 3, 7))
REGARD_INTERLEAVE(2, REGARD_LIST(0, 2), REGARD_LIST(1, 3))

// W rows of W columns become W columns of W rows: log2 W rounds of interleaving.
template <class T> REGARD_INLINE void transpose(Vec<T> (&v)[kLanes<T>]) {
    constexpr int W = kLanes<T>;
    for (int round = 1; round < W; round *= 2) {
        Vec<T> next[W];
        for (int i = 0; i < W / 2; i++) {
            next[2 * i] = low(v[i], v[i + W / 2], Lanes<W>{});
            next[2 * i + 1] = high(v[i], v[i + W / 2], Lanes<W>{});
        }
        for (int i = 0; i < W; i++) v[i] = next[i];
    }
}

constexpr int64_t kAhead = 14 << 10;  // bytes; measured: 10 to 30 KiB, but not 8, 16 or 20

// Where the W keys from k0 + j on stand, as rows that `K` loads: in place where they can be, else
// copied to `rows`, which has room for W. Keys from n on are zero.
template <class T> struct KeyRows {
    const char* at[kLanes<T>];
    bool in_place;

    KeyRows(const Request& q, int64_t b, int64_t g, int64_t k0, int64_t j, int64_t n, T* rows)
        : in_place(direct<T>(q.key, q.D)) {
        const int64_t wide = padded(q.D, kLanes<T>);
        for (int k = 0; k < kLanes<T>; k++) {
            T* row = rows + k * wide;
            if (in_place && j + k < n) {
                at[k] = q.key.at(b, g, k0 + j + k);
                continue;
            }
            at[k] = (const char*)row;
            clear(row, wide);
            if (j + k < n)
                load_row(row, q.key.at(b, g, k0 + j + k), q.key.column, q.key.kind, q.D);
        }
    }
};

// Calls f(d, block) for every W columns of W keys, turned so that lanes run along keys.
template <class T, Kind K, class F>
REGARD_INLINE void for_turned(const Request& q, const KeyRows<T>& from, F f) {
    constexpr int W = kLanes<T>;
    // Keys are read once: while these turn, ask for later ones, row by row as they lie in memory, for
    // columns across rows are a pattern that no prefetcher of a CPU follows.
    const int64_t row_bytes = q.D * size_of(K), rows = larger_of(1, W * W / larger_of(1, q.D));
    const char* ahead = from.at[0] + kAhead / larger_of(row_bytes, 1) * q.key.row;
    for (int64_t d = 0; d < q.D; d += W) {
        for (int64_t row = 0; from.in_place && row < rows; row++, ahead += q.key.row)
            for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
        Vec<T> block[W];
        for (int k = 0; k < W; k++) block[k] = load_as<T, K>(from.at[k] + d * size_of(K));
        transpose<T>(block);
        f(d, block);
    }
}

template <class T, class F>
REGARD_INLINE void for_turned(const Request& q, const KeyRows<T>& from, F f) {
    if (!from.in_place) return for_turned<T, kind_of<T>()>(q, from, f);
    with_kind(q.key.kind, [&](auto of) {
        if constexpr (loads<T>(decltype(of)::kind)) for_turned<T, decltype(of)::kind>(q, from, f);
    });
}

// Keys k0 … k0 + n as panels of D × kPanel; keys beyond n are zero.
template <class T>
static void pack_keys(const Request& q, int64_t b, int64_t g, int64_t k0, int64_t n, T* to,
                      T* rows) {
    constexpr int W = kLanes<T>;
    constexpr int64_t P = kPanel<T>;
    for (int64_t j = 0; j < padded(n, P); j += W) {
        T* panel = to + j / P * P * q.D + j % P;
        for_turned(q, KeyRows<T>(q, b, g, k0, j, n, rows), [&](int64_t d, Vec<T>(&block)[W]) {
            if (d + W <= q.D)
                for (int i = 0; i < W; i++) store(panel + (d + i) * P, block[i]);
            else
                for (int64_t i = 0; i < q.D - d; i++) store(panel + (d + i) * P, block[i]);
        });
    }
}

// Scores of a few rows, low … high, from keys where they stand: each lane adds as in a panel.
template <class T, int R>
static __attribute__((noinline)) void scores_unpacked(const Request& q, int64_t b, int64_t g,
                                                      int64_t k0, int64_t n, const T* queries,
                                                      int64_t low, int64_t high, T* rows,
                                                      T* strip, const Ahead* ahead) {
    constexpr int W = kLanes<T>;
    for (int64_t j = low / W * W; j < high; j += W) {
        ask_for<R>(ahead, j, W);
        Vec<T> whole[R], sum[R];
        for (int r = 0; r < R; r++) whole[r] = sum[r] = Vec<T>{};
        for_turned(q, KeyRows<T>(q, b, g, k0, j, n, rows), [&](int64_t d, Vec<T>(&block)[W]) {
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

template <class T>
static void pack_values(const Request& q, int64_t b, int64_t g, int64_t k0, int64_t n, T* to) {
    const int64_t wide = padded(q.E, kLanes<T>);
    for (int64_t j = 0; j < n; j++) {
        T* row = to + j * wide;
        load_row(row, q.value.at(b, g, k0 + j), q.value.column, q.value.kind, q.E);
        for (int64_t e = q.E; e < wide; e++) row[e] = 0;
    }
}

}  // namespace
