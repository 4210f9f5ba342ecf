// Loops that measure the peak of a CPU target: multiply-adds in registers, and reading memory.
#pragma once
#include "request.hpp"
#include "simd.hpp"

namespace {
using namespace regard;

// Latency times units is 8 to 10 on x86, where twelve chains and two operands fit 16 registers; 16 on
// arm64, which has 32 registers.
#if defined(__aarch64__) || defined(_M_ARM64)
constexpr int kChains = 24;
#else
constexpr int kChains = 12;
#endif
constexpr int kSteps = 8;

template <class T> static double multiply_adds(int64_t rounds) {
    volatile T given[2] = {T(0.5), T(1)};  // read at run time: nothing can be computed beforehand
    const Vec<T> a = all(T(given[0])), b = all(T(given[1]));
    Vec<T> chain[kChains];
    for (int n = 0; n < kChains; n++) chain[n] = all(T(n));
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 8
        for (int step = 0; step < kSteps; step++)
#pragma GCC unroll 24
            for (int n = 0; n < kChains; n++)
#if defined(REGARD_FUSED_MULTIPLY_ADD)
                chain[n] = fma(a, b, chain[n]);  // in place on every CPU
#else
                chain[n] = fma(chain[n], a, b);  // no product can be computed beforehand
#endif
    }
    Vec<T> sum = chain[0];
    for (int n = 1; n < kChains; n++) sum += chain[n];
    return double(sum_of<T>(sum));
}

#if defined(__AVX512BF16__)
// The same with pairs of bfloat16: four operations per lane.
static double pair_products(int64_t rounds) {
    volatile int32_t given[2] = {0x3f003f00, 0x3f803f80};  // 0.5 and 1, twice each
    const Bits<float> a = Bits<float>{} + given[0], b = Bits<float>{} + given[1];
    Vec<float> chain[kChains];
    for (int n = 0; n < kChains; n++) chain[n] = all(float(n));
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 8
        for (int step = 0; step < kSteps; step++)
#pragma GCC unroll 24
            for (int n = 0; n < kChains; n++) chain[n] = dot(chain[n], a, b);
    }
    for (int n = 1; n < kChains; n++) chain[0] += chain[n];
    return double(sum_of<float>(chain[0]));
}
#endif

static double read_all(const char* data, size_t bytes, size_t ahead) {
    constexpr int kStreams = 8;
    Vec<float> sum[kStreams] = {};
    for (size_t at = 0; at < bytes; at += kStreams * size_t(kBytes)) {
        const char* here = data + at;
        if (ahead)
#pragma GCC unroll 8
            for (int line = 0; line < kStreams * kBytes; line += 64)
                __builtin_prefetch(here + ahead + line);
#pragma GCC unroll 8
        for (int n = 0; n < kStreams; n++) sum[n] += load((const float*)(here + n * kBytes));
    }
    for (int n = 1; n < kStreams; n++) sum[0] += sum[n];
    return double(sum_of<float>(sum[0]));
}

template <class T> constexpr int64_t kOperations = 2 * kChains * kSteps * kLanes<T>;

}  // namespace
