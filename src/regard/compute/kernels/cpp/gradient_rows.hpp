// What the backward pass does with single rows: δ and the length of each, and weights and gradients
// of scores from the products of a tile.
#pragma once
#include "tile.hpp"

namespace {

// What is the same for all keys of a row: P = exp2((number − anchor) · unit − rest).
template <class T> struct RowConstants {
    T anchor, rest, delta;
    bool special_query, special_grad;  // whether there is a NaN or an infinity
};

// Rows as the products read them: T numbers, whole vectors.
template <class T> struct Rows {
    const T* at;
    int64_t stride;  // in numbers
};

// `count` rows of an array (b, h, first …) in place where that is possible, else copied to `room`;
// with `clean`, NaN and infinity become 0.
template <class T>
static Rows<T> rows_of(const Array& a, int64_t b, int64_t h, int64_t first, int64_t count,
                       int64_t columns, bool clean, T* room) {
    const char* from = a.at(b, h, first);
    if (!clean && in_place<T>(a, columns) && a.row % int64_t(sizeof(T)) == 0 &&
        uintptr_t(from) % alignof(T) == 0)
        return {(const T*)from, a.row / int64_t(sizeof(T))};
    const int64_t wide = padded(columns, kLanes<T>);
    for (int64_t r = 0; r < count; r++) {
        T* row = room + r * wide;
        load_row(row, from + r * a.row, a.column, a.kind, columns);
        for (int64_t i = columns; i < wide; i++) row[i] = 0;
        for (int64_t i = 0; clean && i < columns; i++)
            if (row[i] - row[i] != 0) row[i] = 0;
    }
    return {room, wide};
}

// Whether rows of any kind and stride are finite, in T.
template <class T>
static bool finite_rows(const Array& a, int64_t b, int64_t h, int64_t first, int64_t count,
                        int64_t columns, T* room) {
    for (int64_t r = 0; r < count; r++) {
        const Rows<T> row = rows_of(a, b, h, first + r, 1, columns, false, room);
        if (!finite(row.at, padded(columns, kLanes<T>))) return false;
    }
    return true;
}

// Half a vector of numbers, as a vector of doubles.
REGARD_INLINE Vec<double> widened(const double* p) { return load(p); }
REGARD_INLINE Vec<double> widened(const float* p) {
    typedef float Half __attribute__((vector_size(kBytes / 2)));
    Half x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Vec<double>);
}
// Σ a·b of whole vectors of T, in float64.
template <class T> static double dot(const T* a, const T* b, int64_t n) {
    constexpr int W = kLanes<double>, N = kLanes<T> / W;
    Vec<double> sum[N] = {};
    for (int64_t i = 0; i < n; i += kLanes<T>)
        for (int part = 0; part < N; part++)
            sum[part] = fma(widened(a + i + part * W), widened(b + i + part * W), sum[part]);
    return sum_of<double>(N == 1 ? sum[0] : sum[0] + sum[N - 1]);
}

// The squared length of the longest of `count` rows; NaN if there is one.
template <class T>
static double longest_of(const Array& a, int64_t b, int64_t h, int64_t count, int64_t columns,
                         T* room) {
    double most = 0;
    for (int64_t r = 0; r < count; r++) {
        const Rows<T> row = rows_of(a, b, h, r, 1, columns, false, room);
        const double square = dot(row.at, row.at, padded(columns, kLanes<T>));
        if (square > most || square != square) most = square;
    }
    return most;
}

// δ = Σ dO·O − dlse and lse of the rows of one head, and what they add to the sink's gradient.
template <class T>
static void prepare_rows(const Backward& w, int64_t b, int64_t h, char* scratch) {
    const Request& q = w.q;
    const Softmax<T> how = softmax_of<T>(q);
    RowConstants<T>* known = (RowConstants<T>*)w.rows + (b * q.H + h) * q.L;
    const int64_t D = padded(q.D, kLanes<T>), E = padded(q.E, kLanes<T>), group = q.H / q.G;
    T *o_room = (T*)scratch, *g_room = o_room + E, *x_room = g_room + E;
    for (int64_t i = 0; i < q.L; i++) {
        const int64_t n = (b * q.H + h) * q.L + i;
        const Rows<T> o = rows_of(w.output, b, h, i, 1, q.E, false, o_room);
        const Rows<T> g = rows_of(w.grad_output, b, h, i, 1, q.E, false, g_room);
        const Rows<T> x = rows_of(q.query, b, h, i, 1, q.D, false, x_room);
        known[i].special_grad = !finite(g.at, E);
        known[i].special_query = !finite(x.at, D);
        double delta = how.sigmoid ? 0 : dot(o.at, g.at, E);
        if (w.grad_lse) delta -= w.grad_lse[n];
        const double lse = w.lse[n];
        known[i].anchor = lse == -infinity<double>() ? T(0) : T(lse / how.natural);
        known[i].rest = T((lse - double(known[i].anchor) * how.natural) * kLog2e);
        if (lse == -infinity<double>()) known[i].rest = 0;
        known[i].delta = T(delta);
        const double sink = q.sink ? __builtin_exp(q.sink[b * q.H + h] - lse) : 0;
        if (w.d_sink) w.d_sink[n] = -sink * delta;
        if (w.d_scale) w.d_scale[n] = 0;
        if (!w.checks) continue;
        // What the row's weights add up to, and its gradients of scores.
        double* const checks = w.checks + 4 * n;
        checks[0] = lse == -infinity<double>() ? 0 : sink - 1;
        checks[1] = -sink * delta - (w.grad_lse ? w.grad_lse[n] : 0);
        checks[2] = dot(x.at, x.at, D);
        checks[3] = dot(g.at, g.at, E);
    }
    if (!w.checks || h % group) return;
    double* const longest = w.longest + 2 * (b * q.G + h / group);
    longest[0] = longest_of(q.key, b, h / group, q.S, q.D, o_room);
    longest[1] = longest_of(q.value, b, h / group, q.S, q.E, o_room);
}

// The slope of a softcap, 1 − (y / softcap)².
template <class T> REGARD_INLINE Vec<T> slope_of(const Softmax<T>& how, Vec<T> score) {
    const Vec<T> part = score * all(how.scale) / all(how.softcap);
    const Vec<T> size = larger(part, -part);
    const Vec<T> e = exp2(size * all(T(-2 * kLog2e))), whole = all(T(1)) + e;
    return all(T(4)) * e / (whole * whole);
}

// What there is to do in a row beyond a plain one, which sees all its keys: each known when compiling.
template <bool Hides, bool Biased, bool Bent> struct Extras {
    static constexpr bool hides = Hides, biased = Biased, bent = Bent;
};

// Where the gradients of one row go, each nullptr if it is not wanted.
template <class T> struct Gains {
    T* before_softcap;  // gradients before the softcap's slope
    double *d_scale, *checks;  // checks: sums of the weights and of the gradients
};

// One row: scores become weights, products become gradients of scores, 0 where a key is hidden.
template <class T, class Extra>
static void gradients(Extra, const Softmax<T>& how, T sign, const RowConstants<T>& row,
                      const Seen<T>& seen, KeyRange keys, T* p, T* d, const Gains<T>& to) {
    constexpr int W = kLanes<T>;
    typedef typename VectorOf<T>::integer Integer;
    const Vec<T> anchor = all(row.anchor), rest = all(-row.rest), delta = all(row.delta);
    const Vec<T> unit = all(how.unit);
    Bits<T> lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    Vec<T> sum = {}, weights = {}, grads = {};
    for (int64_t j = keys.low; j < keys.high; j += W) {
        Bits<T> visible = ~Bits<T>{};
        if (Extra::hides && seen.bits) {
            visible = lanes_of<T>(bits_from(seen.bits, j));
        } else if (Extra::hides) {
            const Integer low = Integer(larger_of(-1, smaller_of(seen.low - j, W)));
            const Integer high = Integer(larger_of(-1, smaller_of(seen.high - j, W)));
            visible = Bits<T>(lane >= low - Bits<T>{}) & Bits<T>(lane < high - Bits<T>{});
        }
        const auto kept = [&](Vec<T> x) {
            return Extra::hides || Extra::biased ? (Vec<T>)(visible & (Bits<T>)x) : x;
        };
        const Vec<T> score = Extra::bent ? load(p + j) * all(sign) : load(p + j);
        Vec<T> t = score, slope = all(T(1));
        if (Extra::bent && how.has_softcap) {
            t = apply_softcap(how, score);
            slope = slope_of(how, score);
        } else if (Extra::bent && how.in_logits) {
            t = t * all(how.scale);
        }
        if (Extra::biased && seen.bias) {
            const Vec<T> added = load(seen.bias + j);
            visible &= ~(Bits<T>)(added == all(-infinity<T>()));
            t = fma(added, all(how.bias), fma(added, all(how.bias_rest), t));
        }
        Vec<T> weight, grad;
        if (Extra::bent && how.sigmoid) {
            const Sigmoid<T> found = sigmoid(how, t);
            weight = kept(found.weight);
            grad = kept(found.slope * load(d + j));
        } else {
            weight = kept(exp2(fma(t - anchor, unit, rest)));
            grad = kept(weight * (load(d + j) - delta));
        }
        const Vec<T> bent = Extra::bent ? kept(grad * slope) : grad;
        if (Extra::bent && to.before_softcap) store(to.before_softcap + j, grad);
        if (Extra::bent && to.d_scale) sum += kept(bent * load(p + j));
        if (to.checks) weights += weight, grads += grad;
        store(p + j, weight);
        store(d + j, bent);
    }
    if (to.d_scale) *to.d_scale = double(sum_of<T>(sum));
    if (to.checks) {
        to.checks[0] = double(sum_of<T>(weights));
        to.checks[1] = double(sum_of<T>(grads));
    }
}

}  // namespace
