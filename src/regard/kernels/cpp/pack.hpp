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

// Keys k0 … k0 + n as panels of D × kPanel; keys beyond n are zero. `rows` is room for W rows.
template <class T>
static void pack_keys(const Request& q, int64_t b, int64_t g, int64_t k0, int64_t n, T* to,
                      T* rows) {
    constexpr int W = kLanes<T>;
    constexpr int64_t P = kPanel<T>;
    const int64_t wide = padded(q.D, W);
    const bool direct = in_place<T>(q.key, q.D);
    for (int64_t j = 0; j < padded(n, P); j += W) {
        T* panel = to + j / P * P * q.D + j % P;
        if (j >= n) {  // no key at all: whatever the scores are, they are hidden
            for (int64_t d = 0; d < q.D; d++) store(panel + d * P, Vec<T>{});
            continue;
        }
        const T *from[W], *zero = nullptr;
        for (int k = 0; k < W; k++) {
            const char* key = q.key.at(b, g, k0 + j + k);
            if (j + k < n && direct) {
                from[k] = (const T*)key;
                continue;
            }
            if (zero) {  // keys that are not there share one row
                from[k] = zero;
                continue;
            }
            T* row = rows + k * wide;
            for (int64_t d = q.D; d < wide; d++) row[d] = 0;
            if (j + k < n) {
                load_row(row, key, q.key.column, q.key.kind, q.D);
            } else {
                for (int64_t d = 0; d < wide; d++) row[d] = 0;
                zero = row;
            }
            from[k] = row;
        }
        for (int64_t d = 0; d < q.D; d += W) {
            // Keys are read once: ask for the next rows, a line of each, while these turn.
            if (direct && j + 2 * W <= n)
                for (int k = 0; k < W; k++)
                    __builtin_prefetch((const char*)(from[k] + d) + W * q.key.row);
            Vec<T> block[W];
            for (int k = 0; k < W; k++) block[k] = load(from[k] + d);
            transpose<T>(block);
            const int64_t most = smaller_of(W, q.D - d);
            for (int64_t i = 0; i < most; i++) store(panel + (d + i) * P, block[i]);
        }
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
