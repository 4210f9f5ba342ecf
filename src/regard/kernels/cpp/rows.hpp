// Constants of one CPU target, and rows of any kind and stride in and out of its vectors.
#pragma once
#include "request.hpp"
#include "simd.hpp"

namespace {
using namespace regard;

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 12;  // rows whose accumulators fit the registers, two vectors each
#else
constexpr int kTile = 6;
#endif
constexpr int64_t kTask = 192;  // rows per piece of work: K and V are read once for so many

template <class T> constexpr int64_t kPanel = 2 * kLanes<T>;  // keys per panel
template <class T> constexpr int64_t kStrip = kChunk + kLanes<T>;  // row length of the strip

REGARD_INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
REGARD_INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
REGARD_INLINE int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class T> constexpr T infinity() { return T(__builtin_inf()); }

template <class T> constexpr T largest_number();
template <> constexpr float largest_number<float>() { return __FLT_MAX__; }
template <> constexpr double largest_number<double>() { return __DBL_MAX__; }

template <class T> constexpr T smallest_number();
template <> constexpr float smallest_number<float>() { return __FLT_MIN__; }
template <> constexpr double smallest_number<double>() { return __DBL_MIN__; }

template <class T> constexpr Kind kind_of();
template <> constexpr Kind kind_of<float>() { return Kind::float32; }
template <> constexpr Kind kind_of<double>() { return Kind::float64; }

// --- rows in, rows out -------------------------------------------------------------------------

template <class T>
static void load_row(T* to, const char* from, int64_t stride, Kind kind, int64_t n) {
    if (kind == kind_of<T>() && stride == int64_t(sizeof(T))) {
        __builtin_memcpy(to, from, size_t(n) * sizeof(T));
        return;
    }
    switch (kind) {
        case Kind::float32:
            for (int64_t i = 0; i < n; i++) {
                float x;
                __builtin_memcpy(&x, from + i * stride, sizeof x);
                to[i] = T(x);
            }
            break;
        case Kind::float64:
            for (int64_t i = 0; i < n; i++) {
                double x;
                __builtin_memcpy(&x, from + i * stride, sizeof x);
                to[i] = T(x);
            }
            break;
        case Kind::float16:
        case Kind::bfloat16:
            for (int64_t i = 0; i < n; i++) {
                uint16_t x;
                __builtin_memcpy(&x, from + i * stride, sizeof x);
                to[i] = T(kind == Kind::float16 ? from_half(x) : from_bfloat(x));
            }
            break;
    }
}

static void store_one(char* to, int64_t i, Kind kind, double x) {
    switch (kind) {
        case Kind::float32: ((float*)to)[i] = float(x); break;
        case Kind::float64: ((double*)to)[i] = x; break;
        case Kind::float16: ((uint16_t*)to)[i] = to_half(to_odd(x)); break;
        case Kind::bfloat16: ((uint16_t*)to)[i] = to_bfloat(to_odd(x)); break;
    }
}

// A bias that is finite in its own type stays finite: only −∞ itself hides.
template <class T>
static void load_bias(T* to, const char* from, int64_t stride, Kind kind, int64_t n) {
    load_row(to, from, stride, kind, n);
    if (sizeof(T) == 8 || kind != Kind::float64) return;
    for (int64_t i = 0; i < n; i++) {
        double x;
        __builtin_memcpy(&x, from + i * stride, sizeof x);
        if (to[i] == -infinity<T>() && x != -infinity<double>()) to[i] = -largest_number<T>();
    }
}

// Whether rows of an array can be used where they stand, as vectors of T.
template <class T> REGARD_INLINE bool in_place(const Array& a, int64_t columns) {
    return a.kind == kind_of<T>() && a.column == int64_t(sizeof(T)) && columns % kLanes<T> == 0;
}

}  // namespace
