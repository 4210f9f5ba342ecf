// The two matrix products: register tiles of a few rows by two or four vectors.
#pragma once
#include "rows.hpp"

namespace {

constexpr int kRows = 6;  // whose sums are held in registers at the same time

// A sum, or the first of them.
template <class T> REGARD_INLINE void add(T* to, Vec<T> sum, bool first) {
    store(to, first ? sum : load(to) + sum);
}

// Queries, `stride` numbers apart, against N vectors of keys of one panel or, from its beginning, of
// two; the strip's rows are `across` numbers apart. Sums of runs are in registers too where they fit.
template <class T, int R, int N>
static __attribute__((noinline)) void meet(const T* queries, int64_t stride, int64_t D,
                                           const T* panel, T* strip, int64_t across) {
    constexpr int W = kLanes<T>;
    constexpr bool in_registers = kTile == 12 && R * N <= 12;
    const auto to = [&](int r, int n) { return strip + r * across + n * W; };
    Vec<T> whole[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) whole[r][n] = Vec<T>{};
    int64_t d = 0;
    do {
        const bool first = d == 0;
        const int64_t end = smaller_of(d + kDepth, D);
        Vec<T> sum[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sum[r][n] = Vec<T>{};
        for (; d < end; d++) {
            Vec<T> k[N];
            for (int n = 0; n < N; n++)
                k[n] = load(panel + (n / 2 * D + d) * kPanel<T> + n % 2 * W);
            for (int r = 0; r < R; r++) {
                const Vec<T> x = all(queries[r * stride + d]);
                for (int n = 0; n < N; n++) sum[r][n] = fma(x, k[n], sum[r][n]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++)
                if (in_registers) whole[r][n] = first ? sum[r][n] : whole[r][n] + sum[r][n];
                else add(to(r, n), sum[r][n], first);
    } while (d < D);
    for (int r = 0; in_registers && r < R; r++)
        for (int n = 0; n < N; n++) store(to(r, n), whole[r][n]);
}

// Scores of a range of keys, in whole vectors. Not inlined, so that its sums stay in registers.
template <class T, int R>
static __attribute__((noinline)) void scores(const T* queries, int64_t stride, int64_t D,
                                             const T* panels, KeyRange keys, T* strip,
                                             int64_t across, const Ahead* ahead) {
    constexpr int64_t W = kLanes<T>, P = kPanel<T>;
    constexpr int H = smaller_of(R, kRows);
    const auto panel = [&](int64_t j, auto vectors) {
        ask_for<R>(ahead, j, decltype(vectors)::value * W);
        for (int r = 0; r < R; r += H)
            meet<T, H, decltype(vectors)::value>(queries + r * stride, stride, D,
                                                 panels + j / P * P * D + j % P,
                                                 strip + r * across + j, across);
    };
    int64_t j = keys.low / W * W;
    if (j % P) {
        panel(j, Number<1>{});
        j += W;
    }
    if constexpr (kBytes == 64) {
        // Four at a time, and no single one at the end, whose sums would wait for each other.
        const auto left = [&] { return padded(keys.high - j, W) / W; };
        for (; left() == 4 || left() > 5; j += 2 * P) panel(j, Number<4>{});
        if (left() == 5) {
            panel(j, Number<2>{});
            j += P;
        }
        if (left() == 3) return panel(j, Number<3>{});
    }
    for (; j + W < keys.high; j += P) panel(j, Number<2>{});
    if (j < keys.high) panel(j, Number<1>{});
}

// Bytes to prefetch ahead where values are read once; measured: 2 KiB in float32, not 4 or 8, and 8 or
// 16 KiB in half types, not 4; none in int8, where rows are so close that the CPU fetches them itself.
template <class T, Kind K>
constexpr int64_t kValuesAhead = K == kind_of<T>() ? 2 << 10 : 16 << 10;

// Sums, from zero, of rows j = from … to − 1 times weights; the weight of row j in sum r is
// weights[r · Across + j · Along]. A row of int8 has its scale `end` bytes after `rows`.
template <class T, int R, int N, int64_t Across, int64_t Along, Kind K = kind_of<T>()>
REGARD_INLINE void sum_rows(const T* weights, const char* rows, int64_t stride, int64_t from,
                            int64_t to, Vec<T> (&sum)[R][N], int64_t end = 0, bool once = false) {
    constexpr int64_t vector = kLanes<T> * size_of(K);  // bytes
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = Vec<T>{};
    for (int64_t j = from; j < to; j++) {
        Vec<T> v[N];
        const Vec<T> scale = all(scale_at<T, K>(rows + j * stride + end));
        for (int n = 0; n < N; n++)
            v[n] = scaled<K>(load_as<T, K>(rows + j * stride + n * vector), scale);
        for (int64_t at = 0; once && K != Kind::int8 && at < N * vector; at += 64)
            __builtin_prefetch(rows + (j + kValuesAhead<T, K> / (N * vector)) * stride + at, 0, 2);
        for (int r = 0; r < R; r++) {
            const Vec<T> p = all(weights[r * Across + j * Along]);
            for (int n = 0; n < N; n++) sum[r][n] = fma(p, v[n], sum[r][n]);
        }
    }
}

template <class T, int R, int N, Kind K>
REGARD_INLINE void blend(const T* strip, const char* values, int64_t stride, int64_t from,
                         int64_t to, T* out, int64_t out_stride, int64_t end, bool once = false) {
    for (int64_t begin = from; begin < to; begin = next_run(begin)) {
        Vec<T> sum[R][N];
        sum_rows<T, R, N, kStrip<T>, 1, K>(strip, values, stride, begin,
                                           smaller_of(next_run(begin), to), sum, end, once);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++)
                add(out + r * out_stride + n * kLanes<T>, sum[r][n], begin == from);
    }
}

// Half tiles of rows by four vectors where the value is wide enough.
template <class T, int R, Kind K = kind_of<T>()>
static __attribute__((noinline)) void outputs(const T* strip, const char* values, int64_t stride,
                                              int64_t wide, KeyRange keys, T* out) {
    constexpr int W = kLanes<T>, H = smaller_of(R, kRows);
    int64_t e = 0;
    const auto block = [&](int64_t r, auto rows, auto vectors, bool once = false) {
        blend<T, decltype(rows)::value, decltype(vectors)::value, K>(
            strip + r * kStrip<T>, values + e * size_of(K), stride, keys.low, keys.high,
            out + r * wide + e, wide, (wide - e) * size_of(K), once);
    };
    // A few rows read values once: in whole rows of memory, or in pieces as large as they can be; half
    // types are converted once for all rows.
    constexpr int F = kTile == 12 && R % 2 == 0 ? 2 : 1;
    constexpr bool few = R <= kFew, narrow = K != kind_of<T>();
    constexpr bool in_rows = few && (!narrow || R == F || kTile != 12);
    for (; in_rows && e + 8 * W <= wide; e += 8 * W)
        for (int r = 0; r < R; r += F) block(r, Number<F>{}, Number<8>{}, true);
    for (; e + 4 * W <= wide && kTile == 12; e += 4 * W)
        for (int r = 0; r < R; r += H) block(r, Number<H>{}, Number<4>{}, few && narrow);
    for (; e + 2 * W <= wide; e += 2 * W) block(0, Number<R>{}, Number<2>{});
    if (e < wide) block(0, Number<R>{}, Number<1>{});
}

// Calls f(first row, Number<rows>) for a whole tile, or for one or two parts that fit registers.
template <class F> REGARD_INLINE void by_height(int64_t height, F f) {
    if (height == kTile) return f(0, Number<kTile>{});
    const int64_t first = height > kRows ? (height + 1) / 2 : height;
    with_number<kRows>(first, [&](auto rows) { f(0, rows); });
    if (first < height) with_number<kRows>(height - first, [&](auto rows) { f(first, rows); });
}

}  // namespace
