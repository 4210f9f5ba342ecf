// Scores to exponentials, and the merging of what chunks of keys leave.
#pragma once
#include "visibility.hpp"

namespace {

REGARD_INLINE Vec<float> hyperbolic_tangent(Vec<float> x) {
    typedef Bits<float> I;
    const I sign = (I)x & (I)all(-0.0f);
    const Vec<float> size = (Vec<float>)((I)x ^ sign);
    const Vec<float> e = exp2(size * all(float(-2 * kLog2e)));
    const Vec<float> large = (all(1.0f) - e) / (all(1.0f) + e);
    const Vec<float> square = x * x;
    const Vec<float> p = polynomial(square, all(-5.70498872745e-3f), 2.06390887954e-2f,
                                    -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f);
    const Vec<float> small = fma(p * square, x, x);
    return select((I)(size < all(0.625f)), small, (Vec<float>)((I)large | sign));
}
REGARD_INLINE Vec<double> hyperbolic_tangent(Vec<double> x) {
    for (int i = 0; i < kLanes<double>; i++) x[i] = __builtin_tanh(x[i]);
    return x;
}

// How scores become exponents. A row's numbers are kept in units of their own until the largest is
// subtracted: differences are small where numbers are not, and only they are multiplied.
template <class T> struct Softmax {
    T unit;               // a number times this is an exponent in base 2
    double natural;       // a number times this is a logit
    T bias, bias_rest;    // a bias times these two together is a number: rounded once, not twice
    T scale, softcap;     // what makes logits of scores under a softcap
    bool general;         // there is more to do than to find the largest
    // Numbers are logits; else scores, and what is hidden by −∞ in a bias has the bytes of what a
    // mask hides.
    bool in_logits;
    bool has_softcap;
    bool sigmoid;  // each number is a weight by itself: (number · unit + shift), in base 2
    T shift;
};

template <class T> static Softmax<T> softmax_of(const Request& q) {
    // The sign went into the queries; without a scale they are 0.
    const double scale = q.scale < 0 ? -q.scale : q.scale == 0 ? 1 : q.scale;
    Softmax<T> how = {};
    // Far from 1, a scale leads out of the range of numbers on its own, and that has to be seen.
    const bool far = !(scale > 1e-30 && scale < 1e30);
    how.general = q.bias.data || q.softcap != 0 || far;
    // A softcap beyond every number changes none; the smallest leaves little but signs.
    how.has_softcap = q.softcap != 0 && q.softcap * kLog2e < double(largest_number<T>());
    how.in_logits = how.has_softcap || far;
    how.natural = how.in_logits ? 1 : scale;
    how.unit = T(how.natural * kLog2e);
    how.bias = T(1 / how.natural);
    how.bias_rest = T(__builtin_fma(-how.natural, double(how.bias), 1.0) / how.natural);
    how.scale = T(scale);
    how.softcap = T(q.softcap) > 0 ? T(q.softcap) : smallest_number<T>();
    how.sigmoid = q.sigmoid;
    how.shift = T(q.shift * kLog2e);
    return how;
}

// Logits of scores under the softcap, which hardly changes small scores.
template <class T> REGARD_INLINE Vec<T> apply_softcap(const Softmax<T>& how, Vec<T> score) {
    const Vec<T> scaled = score * all(how.scale);
    const Vec<T> part = scaled / all(how.softcap);
    const Vec<T> bounded = hyperbolic_tangent(part) * all(how.softcap);
    const T least = sizeof(T) == 4 ? T(1e-4) : T(1e-9);
    const Bits<T> straight = (Bits<T>)(part < all(least)) & (Bits<T>)(part > all(-least));
    return select(straight, scaled, bounded);
}

// What a row has seen: its largest number, and the sum of 2^((number − largest)·unit).
template <class T> struct State {
    T maximum;  // −∞ while nothing was seen
    T sum;
    T divisor;  // of the output: the sum of the exponentials as they met the values
};
template <class T> constexpr State<T> kNothing = {T(-__builtin_inf()), T(0), T(0)};
template <class T> REGARD_INLINE bool nothing(State<T> state) {
    return state.maximum == -infinity<T>() && state.sum == 0;
}

// The state of a row of which a number left the range of T: it stays so, whatever is merged with it.
template <class T> constexpr State<T> kAgain = {T(0), T(__builtin_nan("")), T(0)};
template <class T> REGARD_INLINE bool again(State<T> state) { return state.sum != state.sum; }

// Whether one of the numbers that a row sees is NaN or infinite.
template <class T> static bool any_seen_special(const Seen<T>& seen, const T* x, KeyRange keys) {
    for (int64_t j = keys.low; j < keys.high; j++)
        if (x[j] - x[j] != 0 && seen(j)) return true;
    return false;
}

// Numbers that are not seen become −∞.
template <class T> REGARD_INLINE Vec<T> kept(Bits<T> seen, Vec<T> x) {
    return select(seen, x, all(-infinity<T>()));
}

// All bits in the first n lanes.
template <class T> REGARD_INLINE Bits<T> first_lanes(int64_t n) {
    Bits<T> lane;
    for (int i = 0; i < kLanes<T>; i++) lane[i] = i;
    return Bits<T>(lane < typename VectorOf<T>::integer(n) - Bits<T>{});
}

// The largest of the scores [from, to) of one row, which become −∞ where hidden; whole vectors, from
// the beginning of a panel. With a bias or a softcap scores become other numbers first; `odd` becomes
// true where one of the numbers, which may be a hidden one, is NaN or infinite.
template <class T>
REGARD_INLINE T prepare(const Softmax<T>& how, T* x, int64_t from, int64_t to, const Seen<T>& seen,
                        bool& odd) {
    constexpr int W = kLanes<T>;
    const Vec<T> absent = all(-infinity<T>());
    const uint64_t* const bits = seen.bits;
    const T* const bias = seen.bias;
    const bool from_first = !bits && seen.low <= from;
    // What step(key, rest, most) leaves in all vectors up to `end`, in two sequences: `rest` becomes NaN
    // where a number is odd, and `most` passes over a NaN.
    const auto largest = [&](int64_t end, auto step) REGARD_INLINED {
        Vec<T> rest0 = {}, rest1 = {}, most0 = absent, most1 = absent;
        int64_t j = from;
        for (; j + W < end; j += 2 * W) {
            step(j, rest0, most0);
            step(j + W, rest1, most1);
        }
        if (j < end) step(j, rest0, most0);
        odd |= any<T>(rest0 + rest1);
        return largest_of<T>(larger(most0, most1));
    };
    if (how.general) {
        const T most = largest(to, [&](int64_t j, Vec<T>& rest, Vec<T>& most) REGARD_INLINED {
            Vec<T> t = load(x + j);
            if (how.has_softcap) t = apply_softcap(how, t);
            else if (how.in_logits) t = t * all(how.scale);
            if (bias) {
                const Vec<T> added = load(bias + j);
                const Bits<T> hidden = (Bits<T>)(added == absent);
                if (how.bias_rest != 0) t = fma(added, all(how.bias_rest), t);
                t = fma(added, all(how.bias), t);
                const Bits<T> number = ~hidden & (Bits<T>)t;
                rest = fma((Vec<T>)number, Vec<T>{}, rest);
                t = (Vec<T>)((hidden & (Bits<T>)absent) | number);
            } else {
                rest = fma(t, Vec<T>{}, rest);
            }
            if (bits) t = kept<T>(lanes_of<T>(bits_from(bits, j)), t);
            store(x + j, t);
            most = larger(t, most);
        });
        if (bits || (from_first && seen.high >= to)) return most;
    } else if (bits) {
        return largest(to, [&](int64_t j, Vec<T>& rest, Vec<T>& most) REGARD_INLINED {
            const Vec<T> score = load(x + j), t = kept<T>(lanes_of<T>(bits_from(bits, j)), score);
            rest = fma(score, Vec<T>{}, rest);
            store(x + j, t);
            most = larger(t, most);
        });
    } else if (from_first) {  // the last may be hidden
        const int64_t end = larger_of(from, smaller_of(seen.high, to)), full = end / W * W;
        const T most = largest(full, [&](int64_t j, Vec<T>& rest, Vec<T>& most) REGARD_INLINED {
            const Vec<T> score = load(x + j);
            rest = fma(score, Vec<T>{}, rest);
            most = larger(score, most);
        });
        for (int64_t j = padded(end, W); j < to; j += W) store(x + j, absent);
        if (full == end) return most;
        const Vec<T> last = load(x + full), t = kept<T>(first_lanes<T>(end - full), last);
        odd |= any<T>(fma(last, Vec<T>{}, Vec<T>{}));
        store(x + full, t);
        return largest_of<T>(larger(t, all(most)));
    } else {
        odd = !finite(x + from, to - from);
    }
    // In whole vectors: they are read again at once, and parts of one are slow to put together.
    const auto keep = [&](int64_t j, Bits<T> seen)
                          REGARD_INLINED { store(x + j, kept<T>(seen, load(x + j))); };
    const int64_t low = smaller_of(seen.low, to), high = larger_of(seen.high, from);
    for (int64_t j = from; j < low; j += W) keep(j, ~first_lanes<T>(low - j));
    for (int64_t j = high / W * W; j < to; j += W) keep(j, first_lanes<T>(high - j));
    return largest(to, [&](int64_t j, Vec<T>&, Vec<T>& most)
                           REGARD_INLINED { most = larger(load(x + j), most); });
}

// Exponentials of what `prepare` left, 0 where hidden; returns their sum in lanes.
template <class T>
REGARD_INLINE Vec<T> exponentiate(const Softmax<T>& how, T* x, int64_t from, int64_t to, T most,
                                  State<T>& state) {
    constexpr int W = kLanes<T>;
    const T maximum = most > -infinity<T>() ? most : T(0);
    const Vec<T> less = all(maximum), times = all(how.unit);
    Vec<T> sum0 = {}, sum1 = {};
    int64_t j = from;
    for (; j + W < to; j += 2 * W) {
        const Vec<T> p0 = exp2((load(x + j) - less) * times);
        const Vec<T> p1 = exp2((load(x + j + W) - less) * times);
        sum0 += p0;
        sum1 += p1;
        store(x + j, p0);
        store(x + j + W, p1);
    }
    if (j < to) {
        const Vec<T> p = exp2((load(x + j) - less) * times);
        sum0 += p;
        store(x + j, p);
    }
    state.maximum = maximum;
    return sum0 + sum1;
}

// The sigmoid of x · unit + shift, and its slope. Only e ≤ 1 is added to 1, which loses none of it.
template <class T> struct Sigmoid {
    Vec<T> weight, slope;
};
template <class T> REGARD_INLINE Sigmoid<T> sigmoid(const Softmax<T>& how, Vec<T> x) {
    const Vec<T> z = fma(x, all(how.unit), all(how.shift)), one = all(T(1));
    const Vec<T> e = exp2(-larger(z, -z)), whole = one + e;
    return {select(Bits<T>(z > Vec<T>{}), one, e) / whole, e / (whole * whole)};
}

// Weights by the sigmoid of what `prepare` left, 0 where hidden. They are relative to nothing: the
// maximum is 0, and the sum is only that something was seen.
template <class T>
REGARD_INLINE State<T> weigh_alone(const Softmax<T>& how, T* x, int64_t from, int64_t to, T most) {
    for (int64_t j = from; j < to; j += kLanes<T>) store(x + j, sigmoid(how, load(x + j)).weight);
    return most > -infinity<T>() ? State<T>{T(0), T(1), T(1)} : kNothing<T>;
}

// What a row's output is divided by, and its weights by `sum`.
template <class T> REGARD_INLINE T divisor_of(const Softmax<T>& how, T sum) {
    return how.sigmoid || sum == 0 ? T(1) : sum;  // without a sum, all is 0
}

// (state, out) becomes the state of both parts. A part that saw nothing changes no byte.
template <class T>
static void merge_part(State<T>& state, T* out, State<T> part, const T* part_out, int64_t wide,
                       T unit) {
    if (nothing(part)) return;
    if (nothing(state)) {
        state = part;
        for (int64_t e = 0; e < wide; e += kLanes<T>) store(out + e, load(part_out + e));
        return;
    }
    const T ahead = (state.maximum - part.maximum) * unit;
    const T keep = ahead >= 0 ? T(1) : exp2_of(ahead);
    const T take = ahead >= 0 ? exp2_of(-ahead) : T(1);
    for (int64_t e = 0; e < wide; e += kLanes<T>)
        store(out + e, fma(load(part_out + e), all(take), load(out + e) * all(keep)));
    state.sum = state.sum * keep + part.sum * take;
    state.divisor = state.divisor * keep + part.divisor * take;
    if (!(ahead >= 0)) state.maximum = part.maximum;
}

}  // namespace
