// Computes rows again in float64 where a number left the range of its type, or where a NaN or an
// infinity of the inputs reaches the row. Where only a value does, finite columns keep their bytes.
// So are small outputs of small values, which the passes over tiles do not know well.
//
// Values that are NaN or infinite are packed as 0 and added up on their own: a weight that underflows
// to 0 is still positive, so an infinite value that a row sees makes its column infinite. A row that
// leaves the range of float64 although its inputs are finite is left to q.extended_range_row.
#pragma once
#include "finish.hpp"
#include "small.hpp"

namespace {

REGARD_INLINE bool special(double x) { return x - x != 0; }

// Packs finite values into s.values, others into s.specials.values; returns whether there are any.
static bool pack_values_apart(const Work<double>& w, const Chunk& chunk) {
    const Specials<double>& specials = w.s.specials;
    bool some = false;
    pack_values(w.q, chunk, w.s.values);
    clear(specials.chunk, w.wide);
    for (int64_t j = 0; j < chunk.n; j++) {
        double *row = w.s.values + j * w.wide, *apart = specials.values + j * w.wide;
        specials.in_value[j] = !finite(row, w.wide);
        if (!specials.in_value[j]) continue;
        some = true;
        for (int64_t e = 0; e < w.wide; e++) {
            apart[e] = special(row[e]) ? row[e] : 0;
            row[e] = special(row[e]) ? 0 : row[e];
            specials.chunk[e] += apart[e];
        }
    }
    return some;
}

// Number d of a packed key.
REGARD_INLINE double key_at(const Work<double>& w, int64_t j, int64_t d) {
    constexpr int64_t P = kPanel<double>;
    return w.s.keys[(j / P * w.q.D + d) * P + j % P];
}

static void find_special_keys(const Work<double>& w, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        bool found = false;
        for (int64_t d = 0; d < w.q.D; d++) found |= special(key_at(w, j, d));
        w.s.specials.in_key[j] = found;
    }
}

// The score where query or key is special, without finite products: they could overflow.
static double special_score(const Work<double>& w, const double* query, int64_t j) {
    double sum = 0;
    for (int64_t d = 0; d < w.q.D; d++) {
        const double k = key_at(w, j, d);
        if (special(query[d]) || special(k)) sum += query[d] * k;
    }
    return sum;
}

// Adds the special values that a row sees. Only a score of −∞ weighs 0, and 0 · ∞ is NaN.
static void add_specials(const Work<double>& w, const Seen<double>& seen, const double* x,
                         const Tile& t, double* sums) {
    const KeyRange range = t.visible.keys;
    bool whole = range.low == 0 && range.high == t.chunk.n;
    for (int64_t j = 0; j < t.chunk.n && whole; j++) whole = x[j] != -infinity<double>();
    if (whole) {
        for (int64_t e = 0; e < w.wide; e++) sums[e] += w.s.specials.chunk[e];
        return;
    }
    int16_t keys[kChunk];
    int64_t count = 0;
    for (int64_t j = range.low; j < range.high; j++) {
        keys[count] = int16_t(j);
        count += (w.s.specials.in_value[j] != 0) & seen(j);
    }
    in_columns<double>(w.wide, [&](int64_t e, auto vectors) {
        constexpr int N = decltype(vectors)::value, W = kLanes<double>;
        Vec<double> sum[N];
        for (int i = 0; i < N; i++) sum[i] = load(sums + e + i * W);
        for (int64_t at = 0; at < count; at++) {
            const double weight = x[keys[at]] == -infinity<double>() ? 0 : 1;
            const double* values = w.s.specials.values + keys[at] * w.wide + e;
            for (int i = 0; i < N; i++) sum[i] = fma(all(weight), load(values + i * W), sum[i]);
        }
        for (int i = 0; i < N; i++) store(sums + e + i * W, sum[i]);
    });
}

// Pass 2 of row r. Sets `beyond` where finite inputs lead out of the range of float64.
static State<double> softmax_row_apart(const Work<double>& w, const Tile& t, int64_t r,
                                       bool special_query, bool special_values, bool& beyond) {
    // Products of numbers of narrower types cannot leave the range of float64.
    const bool overflows = w.q.query.kind == Kind::float64 || w.q.key.kind == Kind::float64;
    const KeyRange keys = t.visible.keys, whole = whole_vectors<double>(keys);
    double* x = w.s.strip + r * kStrip<double>;
    const Seen<double> seen = seen_by(w, t, r);
    const auto from_inputs = [&](int64_t j) { return special_query || w.s.specials.in_key[j]; };
    if (!finite(x + whole.low, whole.high - whole.low))
        for (int64_t j = keys.low; j < keys.high; j++) {
            if (!special(x[j]) || !seen(j)) continue;
            if (!from_inputs(j)) beyond = true;
            else if (overflows) x[j] = special_score(w, w.s.queries + (t.row + r) * w.q.D, j);
            if (x[j] != x[j]) break;  // one NaN decides the row
        }
    bool odd = false;
    const double most = prepare(w.how, x, whole.low, whole.high, seen, odd);
    for (int64_t j = keys.low; odd && j < keys.high; j++)
        beyond |= special(x[j]) && seen(j) && !from_inputs(j) &&
                  !(seen.bias && special(seen.bias[j]));
    if (special_values) add_specials(w, seen, x, t, w.s.specials.sums + (t.row + r) * w.wide);
    State<double> part;
    part.sum = part.divisor = sum_of<double>(
        exponentiate(w.how, x, whole.low, whole.high, most, part));
    return part.sum == 0 ? kNothing<double> : part;
}

// A row that a NaN decides.
template <class N> static void store_nan(const Work<double>& w, int64_t r) {
    const Request& q = w.q;
    const Row& row = w.s.row[r];
    const double nan = __builtin_nan("");
    for (int64_t e = 0; e < q.E; e++) store_one(place_of(q, row), e, q.kind, nan);
    if (q.lse) store_one(q.lse, index_of(q, row), q.lse_kind, nan);
    if (!q.weights) return;
    N* weights = (N*)q.weights + index_of(q, row) * q.S;
    for (int64_t j = 0; j < q.S; j++) weights[j] = 0;
    for_visible(q, row, w.s.bits, [&](int64_t j) { return weights[j] = N(nan), false; });
}

// Ends one row; false if it left the range of float64 although no NaN and no infinity reaches it.
template <class N>
static bool finish_retry(const Work<double>& w, int64_t r, bool whole, bool small) {
    const Request& q = w.q;
    const Row& row = w.s.row[r];
    double *out = w.s.out + r * w.wide, *apart = w.s.specials.sums + r * w.wide;
    State<double> state = w.s.states[r];
    double top = state.maximum * w.how.natural;
    if (state.sum == 0) {
        clear(out, w.wide);
        // Empty is decided by the rules: visible scores that are all −∞ are no empty row.
        if (!q.sink)
            for_visible(q, row, w.s.bits, [&](int64_t) { return state = kAgain<double>, true; });
    }
    if (again(state)) return store_nan<N>(w, r), true;
    if (!finite(out, w.wide)) return false;
    add_sink(q, row, state, top, out);
    if (!in_range(state, top)) return false;
    for (int64_t e = 0; e < q.E; e++)
        if (special(apart[e])) out[e] = apart[e];
    if (whole) {
        store_results<N>(w, r, state, top, out, w.s.chunk_maxima + r * w.chunks);
        return true;
    }
    const int64_t size = size_of(q.kind);
    for (int64_t e = 0; e < q.E; e++) {
        double stored;
        load_row(&stored, place_of(q, row) + e * size, size, q.kind, 1);
        const double x = out[e] / state.divisor;
        if (special(stored) || (small && __builtin_fabs(stored) < double(kSmall<float>)))
            store_one(place_of(q, row), e, q.kind, x == 0 ? 0 : x);
    }
    return true;
}

// Rows of weights that no maximum and no sum bring into range.
template <class T>
static void retry_in_extended_range(const Work<T>& w, const Retries& retries) {
    for (int64_t n = 0; n < retries.count; n++) {
        const Row& row = w.s.row[retries.list[n].row];
        const auto& one = retries.list[n];
        w.q.extended_range_row(w.q, w.b, row.h, row.i, one.whole || one.small);
    }
}

// Weights are numbers of the type that the call is computed in.
static void retry_in_float64(const Request& q, const Piece& piece, const Retries& retries,
                             char* at) {
    const auto keep = q.wide ? keep_exponentials<double, double> : keep_exponentials<float, double>;
    const auto finish = q.wide ? finish_retry<double> : finish_retry<float>;
    const Work<double> w(q, piece.b, piece.g, retries.count, at, true);
    bool special_query[kTask] = {}, beyond[kTask] = {};
    for (int64_t r = 0; r < w.rows; r++) {
        const int64_t number = piece.first + retries.list[r].row;
        w.s.row[r] = row_of(q, w.b, w.g * (q.H / q.G) + number / q.L, number % q.L);
        w.s.states[r] = kNothing<double>;
        w.load_query(r);
        for (int64_t d = 0; d < q.D; d++) special_query[r] |= special(w.s.queries[r * q.D + d]);
        clear(w.s.specials.sums + r * w.wide, w.wide);
        for (int64_t n = 0; q.weights && n < w.chunks; n++)
            w.s.chunk_maxima[r * w.chunks + n] = -infinity<double>();
    }
    for (int64_t number = 0; number < w.chunks; number++) {
        if (q.stopped(q.state)) return;
        const Chunk chunk = chunk_of(q, w.b, w.g, number);
        bool packed = false, special_values = false;
        for (int64_t row = 0; row < w.rows; row += kTile) {
            Tile t = {row, smaller_of(kTile, w.rows - row), chunk, {}};
            bool decided = true;
            for (int64_t r = row; r < row + t.height; r++)
                decided &= beyond[r] || again(w.s.states[r]);
            if (decided) continue;
            t.visible = visible_range(q, w.s.row + row, t.height, chunk, w.s.bits);
            if (t.visible.keys.low >= t.visible.keys.high) continue;
            if (!packed) {
                pack_keys(q, chunk, w.s.keys, w.s.rows);
                find_special_keys(w, chunk.n);
                special_values = pack_values_apart(w, chunk);
                packed = true;
            }
            const int64_t stride = w.wide * int64_t(sizeof(double));
            score_tile<double>(w, t, w.s.queries + row * q.D, w.s.keys);
            State<double> parts[kTile];
            for (int64_t r = 0; r < t.height; r++)
                parts[r] = softmax_row_apart(w, t, r, special_query[row + r], special_values,
                                             beyond[row + r]);
            accumulate_values<double>(w, t, {w.s.keys, (const char*)w.s.values, stride}, w.s.part);
            for (int64_t r = 0; r < t.height; r++) {
                if (retries.list[row + r].whole) keep(w, t, r, parts[r]);
                merge_part(w.s.states[row + r], w.s.out + (row + r) * w.wide, parts[r],
                           w.s.part + r * w.wide, w.wide, w.how.unit);
            }
        }
    }
    for (int64_t r = 0; r < w.rows; r++)
        if (beyond[r] || !finish(w, r, retries.list[r].whole, retries.list[r].small))
            q.extended_range_row(q, w.b, w.s.row[r].h, w.s.row[r].i, retries.list[r].whole);
}

}  // namespace
