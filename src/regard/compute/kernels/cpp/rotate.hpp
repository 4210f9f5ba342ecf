// Rows turned by the angles of their positions, pair by pair, in float64 and rounded once.
//
// The textbook's operation "rotate" a second time: for a sine of 0 the other number of the pair does
// not matter, and an addition of 0 makes 0 of −0.
#pragma once
#include "rows.hpp"

namespace {

// A number on its way to a kind; a half type takes a float that rounds as this number would.
template <class T, bool Half> REGARD_INLINE T on_its_way(double x) {
    if constexpr (Half) return to_odd(x);
    else return T(x);
}

// The numbers of all pairs, the first ones and then the second ones.
template <class T, bool Half>
static void turn_pairs(const T* __restrict x, const T* __restrict y,
                       const double* __restrict cosine, const double* __restrict sine,
                       T* __restrict first, T* __restrict second, int64_t pairs) {
    for (int64_t p = 0; p < pairs; p++) {
        const double a = double(x[p]), b = double(y[p]), c = cosine[p], s = sine[p];
        const double from_b = s == 0 ? 0.0 : b * -s, from_a = s == 0 ? 0.0 : a * s;
        first[p] = on_its_way<T, Half>(a * c + from_b);
        second[p] = on_its_way<T, Half>(b * c + from_a);
    }
}

template <class T, bool Half> static void turn_row(const Turn& t, const double* c,
                                                   const double* s) {
    T* const in = (T*)t.scratch;
    T* const out = in + t.D;
    const int64_t n = t.pairs;
    __builtin_memcpy(out + 2 * n, in + 2 * n, size_t(t.D - 2 * n) * sizeof(T));
    if (!t.interleaved) return turn_pairs<T, Half>(in, in + n, c, s, out, out + n, n);
    T *const x = out + t.D, *const y = x + n, *const first = y + n, *const second = first + n;
    for (int64_t p = 0; p < n; p++) x[p] = in[2 * p], y[p] = in[2 * p + 1];
    turn_pairs<T, Half>(x, y, c, s, first, second, n);
    for (int64_t p = 0; p < n; p++) out[2 * p] = first[p], out[2 * p + 1] = second[p];
}

template <class T, bool Half> static void turn_rows(const Turn& t, int64_t begin, int64_t end) {
    for (int64_t one = begin; one < end; one++) {
        const int64_t i = one % t.L, h = one / t.L % t.H, b = one / t.L / t.H;
        const int64_t place = b * t.apart + i * t.pairs;
        T* const in = (T*)t.scratch;
        load_row(in, t.rows.at(b, h, i), t.rows.column, t.rows.kind, t.D);
        turn_row<T, Half>(t, t.cosines + place, t.sines + place);
        store_row(t.output + one * t.D * size_of(t.rows.kind), t.rows.kind, in + t.D, t.D);
    }
}

static void turn(const Turn& t, int64_t begin, int64_t end) {
    switch (t.rows.kind) {
        case Kind::float64: return turn_rows<double, false>(t, begin, end);
        case Kind::float32: return turn_rows<float, false>(t, begin, end);
        default: return turn_rows<float, true>(t, begin, end);
    }
}

}  // namespace
