// A few rows times rows of weights as they are stored: y = x·Wᵀ, one row of weights after the other.
//
// Lanes run along the columns, so that a row of weights is read as it lies and nothing is turned: a
// number of 8 bits is multiplied in fewer instructions than a turn of keys takes. A lane adds in one
// order, that of a row alone.
#pragma once
#include "rows.hpp"

namespace {

constexpr int kTogether = 4;  // rows of x for which a number of the weights is converted once
// Bytes to prefetch ahead in numbers that must be converted; measured: 4 KiB, not 1, and none in float32.
constexpr int64_t kWeightsAhead = 4 << 10;

// Sums of products with the numbers of one row, two vectors at a time.
template <Kind K, int R>
REGARD_INLINE void add_columns(const Product& p, const float* x, const char* row,
                               Vec<float> (&sum)[R][2]) {
    constexpr int W = kLanes<float>;
    const auto add = [&](int64_t d, const char* from) REGARD_LAMBDA {
        if (K != Kind::float32) __builtin_prefetch(from + kWeightsAhead);
        for (int n = 0; n < 2; n++) {
            const Vec<float> weights = load_as<float, K>(from + n * W * size_of(K));
            for (int r = 0; r < R; r++)
                sum[r][n] = fma(load(x + r * p.stride + d + n * W), weights, sum[r][n]);
        }
    };
    int64_t d = 0;
    for (; d + 2 * W <= p.columns; d += 2 * W) add(d, row + d * size_of(K));
    if (d == p.columns) return;
    alignas(64) char rest[2 * kBytes] = {};
    __builtin_memcpy(rest, row + d * size_of(K), size_t((p.columns - d) * size_of(K)));
    add(d, rest);
}

// The same for groups of integers: each is summed from zero, then multiplied by its scale.
template <int R>
REGARD_INLINE void add_groups(const Product& p, const float* x, const char* row,
                              Vec<float> (&sum)[R][2]) {
    constexpr int W = kLanes<float>;
    for (int64_t d = 0; d < p.columns; d += kGroup, row += kGroupBytes) {
        __builtin_prefetch(row + kWeightsAhead);
        Vec<float> part[R] = {};
        for (int n = 0; n < kGroup; n += W) {
            const Vec<float> weights = wide_bytes(row + kGroupBytes - kGroup + n);
            for (int r = 0; r < R; r++)
                part[r] = fma(load(x + r * p.stride + d + n), weights, part[r]);
        }
        const Vec<float> scale = all(from_half(number_at<uint16_t>(row)));
        for (int r = 0; r < R; r++) sum[r][0] = fma(part[r], scale, sum[r][0]);
    }
}

template <Kind K, int R>
REGARD_OUTERMOST void multiply_rows(const Product& p, int64_t r, int64_t first, int64_t last) {
    const float* const x = p.x + r * p.stride;
    float* const y = p.y + r * p.across;
    for (int64_t n = first; n < last; n++) {
        const char* const row = p.weights + n * p.row;
        Vec<float> sum[R][2] = {};
        if constexpr (K == Kind::int8) add_groups<R>(p, x, row, sum);
        else add_columns<K, R>(p, x, row, sum);
        for (int i = 0; i < R; i++) y[i * p.across + n] = sum_of<float>(sum[i][0] + sum[i][1]);
    }
}

static void multiply(const Product& p, int64_t first, int64_t last) {
    with_kind(p.kind, [&](auto of) {
        constexpr Kind K = decltype(of)::kind;
        if constexpr (loads<float>(K))
            for (int64_t r = 0; r < p.rows; r += kTogether)
                with_number<kTogether>(smaller_of(kTogether, p.rows - r), [&](auto rows) {
                    multiply_rows<K, decltype(rows)::value>(p, r, first, last);
                });
    });
}

}  // namespace
