// Rows turned by the angles of their positions, pair by pair, in float64 and rounded once.
//
// The textbook's operation "rotate" a second time: for a sine of 0 the other number of the pair does
// not matter, and an addition of 0 makes 0 of −0. No multiply-add is fused here: every target and
// NumPy make the same bytes.
#pragma once
#include "pack.hpp"

namespace {

// A pair (a, b) becomes a·cosine − b·sine and b·cosine + a·sine. Without a difference: of one beside a
// sum GCC 12 makes a fused multiply-add, whatever it is told.
REGARD_INLINE void turn_pair(double& a, double& b, double cosine, double sine) {
    const double from_b = sine == 0 ? 0.0 : b * -sine, from_a = sine == 0 ? 0.0 : a * sine;
    a = a * cosine + from_b, b = b * cosine + from_a;
}
REGARD_INLINE void turn_pair(Vec<double>& a, Vec<double>& b, Vec<double> cosine, Vec<double> sine) {
    const Vec<double> from_b = sine == Vec<double>{} ? all(-0.0) : b * sine;
    const Vec<double> from_a = sine == Vec<double>{} ? Vec<double>{} : a * sine;
    a = a * cosine - from_b, b = b * cosine + from_a;
}

// The type whose vectors numbers of a kind are loaded into, and how many of double these make.
template <Kind K> using Computed = std::conditional_t<K == Kind::float64, double, float>;
template <class T> constexpr int kParts = int(sizeof(double) / sizeof(T));

// The numbers of a kind, rounded to T: those on the way to a half type such that it rounds them once.
// Rounding twice is rounding once but for what the first one leaves halfway.
template <Kind K> REGARD_INLINE Vec<double> rounded(const Vec<double> (&x)[1]) { return x[0]; }
template <Kind K> REGARD_INLINE Vec<float> rounded(const Vec<double> (&x)[2]) {
    if constexpr (K != Kind::float16) {
        const Vec<float> near = joined(narrow(x[0]), narrow(x[1]), LanesOf<float>{});
        if (K != Kind::bfloat16 || !some_halfway(near)) return near;
    }
    return joined(to_odd(x[0]), to_odd(x[1]), LanesOf<float>{});
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

// A row of 2n numbers that are turned, in place or not: pairs p and n + p, or 2p and 2p + 1. Sines are
// multiplied by `way`: 1, or −1 to turn back.
template <Kind K, Kind To, bool Interleaved>
static void turn_row(const char* from, char* to, const double* c, const double* s, double way,
                     int64_t n) {
    typedef Computed<K> T;
    constexpr int W = kLanes<T>, D = kLanes<double>;
    constexpr int64_t size = size_of(K), wide = size_of(To);
    int64_t p = 0;
    for (; p + W <= n; p += W) {
        const int64_t one = Interleaved ? 2 * p : p, other = Interleaved ? 2 * p + W : n + p;
        Vec<T> x = load_as<T, K>(from + one * size), y = load_as<T, K>(from + other * size);
        if constexpr (Interleaved) part_pairs(x, y, LanesOf<T>{});
        Vec<double> a[kParts<T>], b[kParts<T>];
        widen(x, a), widen(y, b);
        for (int part = 0; part < kParts<T>; part++)
            turn_pair(a[part], b[part], load(c + p + part * D), load(s + p + part * D) * all(way));
        // A half type from float32 is rounded to float32 first.
        x = rounded<K>(a), y = rounded<K>(b);
        store_as<To, T>(to + one * wide, Interleaved ? low(x, y, LanesOf<T>{}) : x);
        store_as<To, T>(to + other * wide, Interleaved ? high(x, y, LanesOf<T>{}) : y);
    }
    for (; p < n; p++) {
        const int64_t one = Interleaved ? 2 * p : p, other = Interleaved ? 2 * p + 1 : n + p;
        double x = load_one<K>(from + one * size), y = load_one<K>(from + other * size);
        turn_pair(x, y, c[p], s[p] * way);
        store_one(to, one, To, K == To ? x : double(T(x)));
        store_one(to, other, To, K == To ? y : double(T(y)));
    }
}

template <Kind K, Kind To, bool Interleaved>
static void turn_rows(const Turn& t, int64_t b, int64_t h, int64_t first, int64_t last, char* to) {
    constexpr int64_t size = size_of(K), wide = size_of(To);
    const int64_t n = t.pairs;
    for (int64_t i = first; i < last; i++, to += t.D * wide) {
        const char* from = t.rows.at(b, h, i);
        if (K == To && t.rows.column != size) {
            for (int64_t d = 0; d < t.D; d++)
                __builtin_memcpy(to + d * size, from + d * t.rows.column, size_t(size));
            from = to;
        }
        const int64_t place = b * t.apart + i * n;
        turn_row<K, To, Interleaved>(from, to, t.cosines + place, t.sines + place, t.back ? -1 : 1,
                                     n);
        if (from == to) continue;
        for (int64_t d = 2 * n; d < t.D; d++)
            store_one(to, d, To, double(load_one<K>(from + d * size)));
    }
}

// Rows first … last − 1 of a head, one after the other.
static void turn(const Turn& t, int64_t b, int64_t h, int64_t first, int64_t last, char* to) {
    const auto with = [&](auto of, auto result) {
        constexpr Kind K = decltype(of)::kind, To = decltype(result)::kind;
        const auto rows = t.interleaved ? turn_rows<K, To, true> : turn_rows<K, To, false>;
        rows(t, b, h, first, last, to);
    };
    with_kind(t.kind, [&](auto to_kind) {
        constexpr Kind To = decltype(to_kind)::kind;
        if constexpr (size_of(To) == 2) {
            if (t.rows.kind == Kind::float32) return with(Of<Kind::float32>{}, to_kind);
        }
        if constexpr (To != Kind::int8) with(to_kind, to_kind);
    });
}

}  // namespace
