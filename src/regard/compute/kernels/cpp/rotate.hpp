// Rows turned by the angles of their positions, pair by pair, in float64 and rounded once.
//
// The textbook's operation "rotate" a second time: for a sine of 0 the other number of the pair does
// not matter, and an addition of 0 makes 0 of −0. No multiply-add is fused here: every target and
// NumPy make the same bytes.
#pragma once
#include "pack.hpp"

namespace {

// One number of a pair: a·cosine + b·sine.
REGARD_INLINE double turned(double a, double cosine, double b, double sine) {
    return a * cosine + (sine == 0 ? 0.0 : b * sine);
}
REGARD_INLINE Vec<double> turned(Vec<double> a, Vec<double> cosine, Vec<double> b,
                                 Vec<double> sine) {
    return a * cosine + select(sine == Vec<double>{}, Vec<double>{}, b * sine);
}

// The type whose vectors numbers of a kind are loaded into, and how many of double these make.
template <Kind K> using Computed = std::conditional_t<K == Kind::float64, double, float>;
template <class T> constexpr int kParts = int(sizeof(double) / sizeof(T));

// The numbers, rounded to T: those on the way to a half type such that it rounds them once.
template <bool Half> REGARD_INLINE Vec<double> rounded(const Vec<double> (&x)[1]) { return x[0]; }
template <bool Half> REGARD_INLINE Vec<float> rounded(const Vec<double> (&x)[2]) {
    if constexpr (Half) return joined(to_odd(x[0]), to_odd(x[1]), LanesOf<float>{});
    else return joined(narrow(x[0]), narrow(x[1]), LanesOf<float>{});
}

// Pairs side by side become their first and their second numbers; `low` and `high` go back.
template <class V, int... I> REGARD_INLINE void part_pairs(V& x, V& y, Indices<I...>) {
    const V firsts = __builtin_shufflevector(x, y, (2 * I)...);
    y = __builtin_shufflevector(x, y, (2 * I + 1)...);
    x = firsts;
}

template <Kind K, class T> REGARD_INLINE void store_as(char* p, Vec<T> x) {
    if constexpr (K == Kind::float16) narrow_half(p, x);
    else if constexpr (K == Kind::bfloat16) narrow_bfloat(p, x);
    else store((T*)p, x);
}

// A vector of pairs, of which the cosines and sines begin at c and s.
template <Kind K, class T>
REGARD_INLINE void turn_vectors(Vec<T>& x, Vec<T>& y, const double* c, const double* s,
                                double sign) {
    constexpr int W = kLanes<double>;
    Vec<double> a[kParts<T>], b[kParts<T>], first[kParts<T>], second[kParts<T>];
    widen(x, a), widen(y, b);
    for (int part = 0; part < kParts<T>; part++) {
        const Vec<double> cosine = load(c + part * W), sine = load(s + part * W) * all(sign);
        first[part] = turned(a[part], cosine, b[part], -sine);
        second[part] = turned(b[part], cosine, a[part], sine);
    }
    constexpr bool half = size_of(K) == 2;
    x = rounded<half>(first), y = rounded<half>(second);
}

// A row of 2n numbers that are turned, in place or not: pairs p and n + p, or 2p and 2p + 1.
template <Kind K, bool Interleaved>
REGARD_INLINE void turn_row(const char* from, char* to, const double* c, const double* s,
                            double sign, int64_t n) {
    typedef Computed<K> T;
    constexpr int W = kLanes<T>;
    constexpr int64_t size = size_of(K);
    int64_t p = 0;
    for (; p + W <= n; p += W) {
        const int64_t one = Interleaved ? 2 * p : p, other = Interleaved ? 2 * p + W : n + p;
        Vec<T> x = load_as<T, K>(from + one * size), y = load_as<T, K>(from + other * size);
        if constexpr (Interleaved) part_pairs(x, y, LanesOf<T>{});
        turn_vectors<K, T>(x, y, c + p, s + p, sign);
        store_as<K, T>(to + one * size, Interleaved ? low(x, y, LanesOf<T>{}) : x);
        store_as<K, T>(to + other * size, Interleaved ? high(x, y, LanesOf<T>{}) : y);
    }
    for (; p < n; p++) {
        const int64_t one = Interleaved ? 2 * p : p, other = Interleaved ? 2 * p + 1 : n + p;
        const double a = load_one<K>(from + one * size), b = load_one<K>(from + other * size);
        const double sine = s[p] * sign;
        store_one(to, one, K, turned(a, c[p], b, -sine));
        store_one(to, other, K, turned(b, c[p], a, sine));
    }
}

// The rows of all heads at positions first … last − 1 of a batch element.
template <Kind K, bool Interleaved>
static void turn_rows(const Turn& t, int64_t b, int64_t first, int64_t last) {
    constexpr int64_t size = size_of(K);
    const int64_t turned = 2 * t.pairs * size, whole = t.D * size;
    for (int64_t h = 0; h < t.H; h++)
        for (int64_t i = first; i < last; i++) {
            const char* from = t.rows.at(b, h, i);
            char* const to = t.output + ((b * t.H + h) * t.L + i) * whole;
            if (t.rows.column != size) {
                for (int64_t d = 0; d < t.D; d++)
                    __builtin_memcpy(to + d * size, from + d * t.rows.column, size_t(size));
                from = to;
            }
            if (from != to) __builtin_memcpy(to + turned, from + turned, size_t(whole - turned));
            const int64_t place = b * t.apart + i * t.pairs;
            turn_row<K, Interleaved>(from, to, t.cosines + place, t.sines + place, t.sign, t.pairs);
        }
}

// Piece number n: some positions of a batch element, for all heads, which share angles.
static void turn(const Turn& t, int64_t n) {
    const int64_t blocks = (t.L + kTurned - 1) / kTurned, first = n % blocks * kTurned;
    with_kind(t.rows.kind, [&](auto of) {
        constexpr Kind K = decltype(of)::kind;
        if constexpr (K != Kind::int8) {
            const int64_t last = smaller_of(t.L, first + kTurned);
            if (t.interleaved) turn_rows<K, true>(t, n / blocks, first, last);
            else turn_rows<K, false>(t, n / blocks, first, last);
        }
    });
}

}  // namespace
