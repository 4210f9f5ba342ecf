// Constants of one CPU target, and rows of any kind and stride in and out of its vectors.
#pragma once
#include "request.hpp"
#include "simd.hpp"

namespace {
using namespace regard;

constexpr double kLog2e = 1.4426950408889634074;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 12;  // rows that share a look at the keys
#else
constexpr int kTile = 6;
#endif
constexpr int64_t kTask = 192;  // rows per piece of work: K and V are read once for so many

constexpr int64_t kFew = 4;  // rows for which keys are not packed

// Rounding grows with the length of a sum: so many numbers are added from zero, and their sums then.
constexpr int64_t kDepth = 16;  // of a dot product's D
constexpr int64_t kRun = 64;  // of a chunk's keys

template <class T> constexpr int64_t kPanel = 2 * kLanes<T>;  // keys per panel
template <class T> constexpr int64_t kStrip = kChunk + kLanes<T>;  // row length of the strip

REGARD_INLINE constexpr int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
REGARD_INLINE constexpr int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
REGARD_INLINE constexpr int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Keys low … high − 1.
struct KeyRange {
    int64_t low, high;
};

REGARD_INLINE Chunk chunk_of(const Request& q, int64_t b, int64_t g, int64_t number) {
    return {b, g, number * kChunk, smaller_of(kChunk, q.S - number * kChunk)};
}
// Line number n of the rows from j on of a chunk, side by side, prefetched into the second cache.
// Where keys and values are read once, each are asked for while the others are read, besides well
// ahead of themselves: measured, 1.1 times as fast in bfloat16 as either alone, 1.3 times in int8.
REGARD_INLINE void ask_for_line(const Array& array, const Chunk& c, int64_t j, int64_t n) {
    __builtin_prefetch(array.at(c.b, c.g, c.k0 + j) + 64 * n, 0, 2);
}
REGARD_INLINE int64_t next_run(int64_t key) { return (key / kRun + 1) * kRun; }

template <class T> constexpr T infinity() { return T(__builtin_inf()); }

template <class T> constexpr bool kNarrow = sizeof(T) == 4;
template <class T> constexpr T largest_number() {
    return T(kNarrow<T> ? __FLT_MAX__ : __DBL_MAX__);
}
template <class T> constexpr T smallest_number() {
    return T(kNarrow<T> ? __FLT_MIN__ : __DBL_MIN__);
}
template <class T> constexpr Kind kind_of() { return kNarrow<T> ? Kind::float32 : Kind::float64; }

template <int N> struct Number {
    static constexpr int value = N;
};
// Calls f(Number<n>) for an n of 1 … Most.
template <int Most, class F> REGARD_INLINE void with_number(int64_t n, F f) {
    if constexpr (Most > 1)
        if (n < Most) return with_number<Most - 1>(n, f);
    f(Number<Most>{});
}

// Calls f(Number<n>) for n = 0 … N − 1.
template <class F, int... I> REGARD_NESTED void each(F f, std::integer_sequence<int, I...>) {
    (f(Number<I>{}), ...);
}
template <int N, class F> REGARD_NESTED void each(F f) {
    each(f, std::make_integer_sequence<int, N>{});
}

// A kind as a type, to choose loads when compiling.
template <Kind K> struct Of {
    static constexpr Kind kind = K;
};
template <class F> REGARD_INLINE void with_kind(Kind kind, F f) {
    switch (kind) {
        case Kind::float16: return f(Of<Kind::float16>{});
        case Kind::bfloat16: return f(Of<Kind::bfloat16>{});
        case Kind::float32: return f(Of<Kind::float32>{});
        case Kind::float64: return f(Of<Kind::float64>{});
        case Kind::int8: return f(Of<Kind::int8>{});
    }
}
// Whether a vector of T can be made from consecutive numbers of a kind.
template <class T> constexpr bool loads(Kind kind) {
    return kind == kind_of<T>() || (sizeof(T) == 4 && (size_of(kind) == 2 || kind == Kind::int8));
}
template <class N> REGARD_INLINE N number_at(const void* p) {
    N x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
// One number, and as many as fit a vector of T, from consecutive numbers of a kind.
template <Kind K> REGARD_INLINE auto load_one(const char* p) {
    if constexpr (K == Kind::float64) return number_at<double>(p);
    else if constexpr (K == Kind::float32) return number_at<float>(p);
    else if constexpr (K == Kind::float16) return from_half(number_at<uint16_t>(p));
    else if constexpr (K == Kind::int8) return float(number_at<int8_t>(p));
    else return from_bfloat(number_at<uint16_t>(p));
}
template <class T, Kind K> REGARD_INLINE Vec<T> load_as(const char* p) {
    static_assert(loads<T>(K), "no such load");
    if constexpr (K == Kind::float16) return wide_half(p);
    else if constexpr (K == Kind::bfloat16) return wide_bfloat(p);
    else if constexpr (K == Kind::int8) return wide_bytes(p);
    else return load((const T*)p);
}

// Numbers of a kind that are as large together as a T, as they lie in memory, in order.
template <Kind K> constexpr int kInCell = K == Kind::int8 ? 4 : 2;
template <Kind K>
REGARD_INLINE void split(Vec<float> cells, Vec<float> (&to)[kInCell<K>]) {
    if constexpr (K == Kind::float16) split_half(cells, to[0], to[1]);
    else if constexpr (K == Kind::bfloat16) split_bfloat(cells, to[0], to[1]);
    else each<4>([&](auto n) REGARD_LAMBDA { to[n.value] = bytes_at<n.value>(cells); });
}

// The scale of a row that ends at p; 1 where the kind has none. Products with integers are exact.
template <class T, Kind K> REGARD_INLINE T scale_at(const char* p) {
    if constexpr (K == Kind::int8) return number_at<float>(p);
    else return T(1);
}
template <Kind K, class V, class S> REGARD_INLINE V scaled(V x, S scale) {
    if constexpr (K == Kind::int8) return x * scale;
    else return x;
}

template <class T>
static void load_row(T* to, const char* from, int64_t stride, Kind kind, int64_t n) {
    with_kind(kind, [&](auto of) {
        constexpr Kind K = decltype(of)::kind;
        int64_t i = 0;
        if (n == 0) return;
        const T scale = scale_at<T, K>(from + n);
        if constexpr (loads<T>(K))
            if (stride == size_of(K))
                for (; i + kLanes<T> <= n; i += kLanes<T>)
                    store(to + i, scaled<K>(load_as<T, K>(from + i * stride), scale));
        for (; i < n; i++) to[i] = scaled<K>(T(load_one<K>(from + i * stride)), scale);
    });
}

static void store_one(char* to, int64_t i, Kind kind, double x) {
    switch (kind) {
        case Kind::float32: ((float*)to)[i] = float(x); break;
        case Kind::float64: ((double*)to)[i] = x; break;
        case Kind::float16: ((uint16_t*)to)[i] = to_half(to_odd(x)); break;
        case Kind::bfloat16: ((uint16_t*)to)[i] = to_bfloat(to_odd(x)); break;
        case Kind::int8: break;  // is read only
    }
}

template <class T> static void store_row(char* to, Kind kind, const T* from, int64_t n) {
    int64_t i = 0;
    if constexpr (sizeof(T) == 4) {
        constexpr int W = kLanes<float>;
        for (; size_of(kind) == 2 && i + W <= n; i += W)
            if (kind == Kind::float16) narrow_half(to + 2 * i, load(from + i));
            else narrow_bfloat(to + 2 * i, load(from + i));
    }
    if (kind == kind_of<T>()) {
        __builtin_memcpy(to, from, size_t(n) * sizeof(T));
        return;
    }
    for (; i < n; i++) store_one(to, i, kind, double(from[i]));
}

// A bias that is finite in its own type stays finite: only −∞ itself hides.
template <class T>
static void load_bias(T* to, const char* from, int64_t stride, Kind kind, int64_t n) {
    load_row(to, from, stride, kind, n);
    if (sizeof(T) == 8 || kind != Kind::float64) return;
    for (int64_t i = 0; i < n; i++)
        if (to[i] == -infinity<T>() && number_at<double>(from + i * stride) != -infinity<double>())
            to[i] = -largest_number<T>();
}

// A row that will be read soon: `from` its first number, or nullptr for none.
struct Ahead {
    const char* from;
    int64_t size;  // of a number
};
// Prefetches the numbers j … j + n of some rows.
template <int R> REGARD_INLINE void ask_for(const Ahead* rows, int64_t j, int64_t n) {
    if (!rows->from) return;
    for (int r = 0; r < R; r++)
        for (int64_t at = 0; at < n * rows->size; at += 64)
            __builtin_prefetch(rows[r].from + j * rows->size + at, 0, 3);
}

// Whether rows of an array can be read as vectors of T, in place.
template <class T> REGARD_INLINE bool direct(const Array& a, int64_t columns) {
    return loads<T>(a.kind) && a.column == size_of(a.kind) && columns % kLanes<T> == 0;
}
template <class T> REGARD_INLINE bool in_place(const Array& a, int64_t columns) {
    return a.kind == kind_of<T>() && direct<T>(a, columns);
}

}  // namespace
