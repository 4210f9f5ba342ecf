// The end of a row: sink, division, log-sum-exp and weights; or a note to compute it again.
#pragma once
#include "scratch.hpp"

namespace {

// Where a row's output begins, and whether it is stored in whole vectors of T.
REGARD_INLINE char* place_of(const Request& q, const Row& row) {
    return q.output + index_of(q, row) * q.E * size_of(q.kind);
}
template <class T> REGARD_INLINE bool stored_directly(const Request& q) {
    return q.kind == kind_of<T>() && q.E % kLanes<T> == 0;
}

// Quotients by a sum, which is at least 1. Long vectors are slow to divide: there a product with the
// reciprocal, and one step to the nearest number, is the same as long as no bit of the rest is lost.
template <class T> REGARD_INLINE void divide(const T* from, T by, T* to, int64_t wide) {
    const Vec<T> whole = all(by), inverse = all(T(1) / by);
    const Vec<T> least = all(smallest_number<T>() * T(kNarrow<T> ? 0x1p25 : 0x1p54));
    for (int64_t e = 0; e < wide; e += kLanes<T>) {
        const Vec<T> x = load(from + e), near = x * inverse;
        Vec<T> quotient = fma(fma(-near, whole, x), inverse, near);
        const Bits<T> exact = (Bits<T>)(larger(quotient, -quotient) >= least);
        if (kBytes < 64 || any<T>((Vec<T>)~exact)) {
            quotient = x / whole;
            // −0 becomes +0: no sign of a hidden value's tiny product.
            quotient = (Vec<T>)((Bits<T>)quotient & (Bits<T>)(quotient != Vec<T>{}));
        }
        store(to + e, quotient);
    }
}

// Merges the sink: one more exponential, without a value. `top` is the largest logit.
template <class T>
static void add_sink(const Request& q, const Row& row, State<T>& state, double& top, T* out) {
    if (!q.sink) return;
    const double sink = double(T(q.sink[row.b * q.H + row.h]));
    const T ahead = T((top - sink) * kLog2e);
    const T keep = ahead >= 0 ? T(1) : exp2_of(ahead);
    const T own = ahead >= 0 ? exp2_of(-ahead) : T(1);
    state.sum = state.sum * keep + own;
    state.divisor = state.divisor * keep + own;
    for (int64_t e = 0; e < q.E; e++) out[e] *= keep;
    if (!(ahead >= 0)) top = sink;
}

// Whether a state has numbers to divide by and to take logarithms of: the largest score may be
// beyond float64 on either side, though the differences of all scores are not.
template <class T> REGARD_INLINE bool in_range(State<T> state, double top) {
    const bool low = top == -infinity<double>() && state.sum > 0;
    return state.sum < infinity<T>() && top < infinity<double>() && !low;
}

// Stores the results of row r. Weights are numbers of N, each chunk's relative to its maximum.
template <class N, class T>
static void store_results(const Work<T>& w, int64_t r, State<T> state, double top, T* out,
                          const T* maxima) {
    const Request& q = w.q;
    const Row& row = w.s.row[r];
    char* to = place_of(q, row);
    const bool direct = stored_directly<T>(q);
    divide(out, divisor_of(w.how, state.divisor), direct ? (T*)to : out, q.E);
    if (!direct) store_row(to, q.kind, out, q.E);
    if (q.lse) {
        const double lse = state.sum == 0 ? -infinity<double>()
                                          : top + __builtin_log(double(state.sum));
        store_one(q.lse, index_of(q, row), q.lse_kind, lse);
    }
    if (!q.weights || state.sum == 0) return;
    const FlushToZero<T> passes;  // as where the exponentials were made
    N* weights = (N*)q.weights + index_of(q, row) * q.S;
    for (int64_t j = 0; j < q.S;) {
        const double own = double(maxima[j / kChunk]) * w.how.natural;
        const T factor = exp2_of(T((own - top) * kLog2e));
        for (const int64_t end = smaller_of(j + kChunk, q.S); j < end; j++)
            weights[j] = N(T(weights[j]) * factor / divisor_of(w.how, state.sum));
    }
}

// Rows of a piece to compute again: all of a row, or of its output what is not finite, and what is
// smaller than kSmall if that was asked for.
struct Retries {
    struct {
        int64_t row;
        bool whole, small;
    } list[kTask];
    int64_t count = 0;

    REGARD_ALWAYS_INLINE void add(int64_t row, bool whole) { list[count++] = {row, whole, false}; }
    // After `add`, if the row is there already.
    REGARD_ALWAYS_INLINE void add_small(int64_t row) {
        if (!count || list[count - 1].row != row) add(row, false);
        list[count - 1].small = true;
    }
};

// Ends row number r, or adds it to those that are to be computed again.
template <class T>
static void finish_row(const Work<T>& w, int64_t r, State<T> state, T* out, const T* maxima,
                       Retries& retries) {
    double top = double(state.maximum) * w.how.natural;  // as a logit
    add_sink(w.q, w.s.row[r], state, top, out);
    if (!in_range(state, top)) return retries.add(r, true);
    if (!finite(out, w.wide)) retries.add(r, false);
    store_results<T>(w, r, state, top, out, maxima);
}

}  // namespace
