// The two matrix products: register tiles of a few rows by two or four vectors.
#pragma once
#include "rows.hpp"

namespace {
using namespace regard;

// --- pass 1: scores ----------------------------------------------------------------------------

// A sum, or the first of them.
template <class T> REGARD_INLINE void add(T* to, Vec<T> sum, bool first) {
    store(to, first ? sum : load(to) + sum);
}

// Queries against the keys of N vectors of one panel.
template <class T, int R, int N>
static __attribute__((noinline)) void meet(const T* queries, int64_t D, const T* panel, T* strip) {
    constexpr int W = kLanes<T>;
    for (int64_t begin = 0; begin == 0 || begin < D; begin += kDepth) {
        Vec<T> sum[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sum[r][n] = Vec<T>{};
        for (int64_t d = begin; d < smaller_of(begin + kDepth, D); d++) {
            Vec<T> k[N];
            for (int n = 0; n < N; n++) k[n] = load(panel + d * kPanel<T> + n * W);
            for (int r = 0; r < R; r++) {
                const Vec<T> x = all(queries[r * D + d]);
                for (int n = 0; n < N; n++) sum[r][n] = fma(x, k[n], sum[r][n]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) add(strip + r * kStrip<T> + n * W, sum[r][n], begin == 0);
    }
}

// Scores of keys low … high, in whole vectors. Not inlined: on its own, all of its accumulators
// stay in registers.
template <class T, int R>
static __attribute__((noinline)) void scores(const T* queries, int64_t D, const T* panels,
                                             int64_t low, int64_t high, T* strip) {
    constexpr int64_t W = kLanes<T>, P = kPanel<T>;
    // A few rows at a time while a panel is in the nearest cache: a sum of them is over sooner than
    // one of a whole tile, and the next can begin.
    constexpr int H = R % kScoreRows == 0 ? kScoreRows : R;
    const auto panel = [&](int64_t j, auto vectors) {
        for (int r = 0; r < R; r += H)
            meet<T, H, decltype(vectors)::value>(queries + r * D, D, panels + j / P * P * D + j % P,
                                                 strip + r * kStrip<T> + j);
    };
    int64_t j = low / W * W;
    if (j % P) {
        panel(j, Number<1>{});
        j += W;
    }
    for (; j + W < high; j += P) panel(j, Number<2>{});
    if (j < high) panel(j, Number<1>{});
}

// --- pass 3: output ----------------------------------------------------------------------------

template <class T, int R, int N>
REGARD_INLINE void blend(const T* strip, const char* values, int64_t stride, int64_t from,
                         int64_t to, T* out, int64_t out_stride) {
    constexpr int W = kLanes<T>;
    for (int64_t begin = from; begin < to; begin = next_run(begin)) {
        const int64_t end = smaller_of(next_run(begin), to);
        Vec<T> sum[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sum[r][n] = Vec<T>{};
        for (int64_t j = begin; j < end; j++) {
            Vec<T> v[N];
            for (int n = 0; n < N; n++) v[n] = load((const T*)(values + j * stride) + n * W);
            for (int r = 0; r < R; r++) {
                const Vec<T> p = all(strip[r * kStrip<T> + j]);
                for (int n = 0; n < N; n++) sum[r][n] = fma(p, v[n], sum[r][n]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) add(out + r * out_stride + n * W, sum[r][n], begin == from);
    }
}

// Rows in pairs of half tiles with four vectors each where the value is wide enough: each key's
// value is then read in one piece.
template <class T, int R>
static __attribute__((noinline)) void outputs(const T* strip, const char* values, int64_t stride,
                                              int64_t wide, int64_t from, int64_t to, T* out,
                                              int64_t out_stride) {
    constexpr int W = kLanes<T>, H = R >= kTile ? R / 2 : R;
    int64_t e = 0;
    // A few rows read values once: in whole rows of memory, or in pieces as large as they can be.
    constexpr int F = kTile == 12 && R % 2 == 0 ? 2 : 1;
    for (; R <= kFew && e + 8 * W <= wide; e += 8 * W)
        for (int r = 0; r < R; r += F)
            blend<T, F, 8>(strip + r * kStrip<T>, values + e * sizeof(T), stride, from, to,
                           out + r * out_stride + e, out_stride);
    for (; e + 4 * W <= wide && kTile == 12; e += 4 * W)
        for (int r = 0; r < R; r += H)
            blend<T, H, 4>(strip + r * kStrip<T>, values + e * sizeof(T), stride, from, to,
                           out + r * out_stride + e, out_stride);
    for (; e + 2 * W <= wide; e += 2 * W)
        blend<T, R, 2>(strip, values + e * sizeof(T), stride, from, to, out + e, out_stride);
    if (e < wide)
        blend<T, R, 1>(strip, values + e * sizeof(T), stride, from, to, out + e, out_stride);
}

// A tile of any height as tiles of a few fixed ones; a row's bytes do not depend on which.
template <class T, class F12, class F6, class F4, class F2, class F1>
REGARD_INLINE void by_height(int64_t rows, F12 f12, F6 f6, F4 f4, F2 f2, F1 f1) {
    int64_t r = 0;
    if (kTile == 12)
        for (; r + 12 <= rows; r += 12) f12(r);
    for (; r + 6 <= rows; r += 6) f6(r);
    for (; r + 4 <= rows; r += 4) f4(r);
    for (; r + 2 <= rows; r += 2) f2(r);
    for (; r < rows; r++) f1(r);
}
#define REGARD_BY_HEIGHT(ROWS, FUNCTION)                                              \
    by_height<T>(ROWS, [&](int64_t r) { FUNCTION(kTile); }, [&](int64_t r) { FUNCTION(6); }, \
                 [&](int64_t r) { FUNCTION(4); }, [&](int64_t r) { FUNCTION(2); },    \
                 [&](int64_t r) { FUNCTION(1); })

}  // namespace
