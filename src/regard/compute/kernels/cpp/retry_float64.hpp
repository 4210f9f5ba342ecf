// Rows once more, in float64, that the first pass gave up: a number left the range of its type, or a
// NaN or an infinity of the inputs reaches the row. Where only values do, it reaches some columns, and
// the others keep the bytes that they have.
//
// Values that are NaN or infinite never meet a weight. They are packed as 0, so that the product with
// the weights is one of finite numbers, and are added up on their own: a weight that underflows to 0
// is still positive, so an infinite value that a row sees makes its column infinite.
//
// A row that leaves the range of float64 although its inputs are finite is left to q.unbounded_row.
#pragma once
#include "pack.hpp"
#include "mask_rules.hpp"
#include "softmax.hpp"

namespace {

template <class T> REGARD_INLINE bool special(T x) { return x - x != 0; }

// The values of a chunk: finite ones into s.values, all others into s.apart.values. Returns whether
// there are others; s.apart.chunk has their sum.
static bool pack_values_apart(const Request& q, int64_t b, int64_t g, int64_t k0, int64_t n,
                              const Scratch<double>& s) {
    const int64_t wide = padded(q.E, kLanes<double>);
    bool some = false;
    pack_values(q, b, g, k0, n, s.values);
    clear(s.apart.chunk, wide);
    for (int64_t j = 0; j < n; j++) {
        double *row = s.values + j * wide, *apart = s.apart.values + j * wide;
        s.apart.special_values[j] = !finite(row, wide);
        if (!s.apart.special_values[j]) continue;
        some = true;
        for (int64_t e = 0; e < wide; e++) {
            apart[e] = special(row[e]) ? row[e] : 0;
            row[e] = special(row[e]) ? 0 : row[e];
            s.apart.chunk[e] += apart[e];
        }
    }
    return some;
}

static void find_special_keys(int64_t D, int64_t n, const Scratch<double>& s) {
    constexpr int64_t P = kPanel<double>;
    for (int64_t j = 0; j < n; j++) {
        const double* key = s.keys + j / P * P * D + j % P;
        bool found = false;
        for (int64_t d = 0; d < D; d++) found |= special(key[d * P]);
        s.apart.special_keys[j] = found;
    }
}

// The score of a query and a packed key of which one has a NaN or an infinity. Finite products make no
// difference to it; left out, they cannot overflow either.
static double special_score(const double* query, const double* key, int64_t D) {
    double sum = 0;
    for (int64_t d = 0; d < D; d++) {
        const double k = key[d * kPanel<double>];
        if (special(query[d]) || special(k)) sum += query[d] * k;
    }
    return sum;
}

// Adds to a row's sums what it sees of a chunk's values that are not finite. x: its logits, −∞ where
// hidden. Only a score that is itself −∞ weighs 0, and 0 · ∞ is NaN.
static void add_apart(const Scratch<double>& s, const Seen<double>& seen, const double* x, Range range,
                      int64_t n, int64_t wide, double* sums) {
    bool whole = range.low == 0 && range.high == n;
    for (int64_t j = 0; j < n && whole; j++) whole = x[j] != -infinity<double>();
    if (whole) {
        for (int64_t e = 0; e < wide; e++) sums[e] += s.apart.chunk[e];
        return;
    }
    int16_t keys[kChunk];
    int64_t count = 0;
    for (int64_t j = range.low; j < range.high; j++) {
        keys[count] = int16_t(j);
        count += (s.apart.special_values[j] != 0) & seen(j);
    }
    in_columns<double>(wide, [&](int64_t e, auto vectors) {
        constexpr int N = decltype(vectors)::value, W = kLanes<double>;
        Vec<double> sum[N];
        for (int i = 0; i < N; i++) sum[i] = load(sums + e + i * W);
        for (int64_t at = 0; at < count; at++) {
            const double weight = x[keys[at]] == -infinity<double>() ? 0 : 1;
            const double* values = s.apart.values + keys[at] * wide + e;
            for (int i = 0; i < N; i++) sum[i] = fma(all(weight), load(values + i * W), sum[i]);
        }
        for (int i = 0; i < N; i++) store(sums + e + i * W, sum[i]);
    });
}

// Calls f(j) for every key that a row sees, until f says stop.
template <class F>
static void for_visible(const Request& q, const Row& row, uint8_t* stack, F f) {
    for (int64_t k0 = row.low / kChunk * kChunk; k0 < row.high; k0 += kChunk) {
        const int64_t n = smaller_of(kChunk, q.S - k0);
        const uint8_t* bytes = q.program ? allowed(q, row, k0, n, stack) : nullptr;
        for (int64_t j = larger_of(0, row.low - k0); j < smaller_of(n, row.high - k0); j++) {
            if (bytes && !bytes[j]) continue;
            if (q.bias.data) {
                double added;
                const char* from = q.bias.at(row.b, row.h, row.i) + (k0 + j) * q.bias.column;
                load_bias(&added, from, 0, q.bias.kind, 1);
                if (added == -infinity<double>()) continue;
            }
            if (f(k0 + j)) return;
        }
    }
}

// Ends one row; false if it left the range of float64 although no NaN and no infinity reaches it.
template <class W>
static bool settle_retry(const Request& q, const Softmax<double>& how, const Scratch<double>& s,
                             int64_t r, bool whole) {
    const int64_t wide = padded(q.E, kLanes<double>), chunks = (q.S + kChunk - 1) / kChunk;
    const Row& row = s.row[r];
    const int64_t number = (row.b * q.H + row.h) * q.L + row.i;
    double *out = s.out + r * wide, *apart = s.apart.sums + r * wide;
    const double nan = __builtin_nan("");
    State<double> state = s.states[r];
    double top = state.maximum * how.natural;
    if (state.sum == 0) {
        clear(out, wide);
        // Empty is decided by the rules: visible scores that are all −∞ are no empty row.
        if (!q.sink) for_visible(q, row, s.bytes, [&](int64_t) { return state = kAgain<double>, true; });
    }
    if (again(state)) {
        for (int64_t e = 0; e < q.E; e++) out[e] = nan;
        store_row(place_of(q, row), q.kind, out, q.E);
        if (q.lse) store_one(q.lse, number, q.lse_kind, nan);
        if (!q.weights) return true;
        W* weights = (W*)q.weights + number * q.S;
        for (int64_t j = 0; j < q.S; j++) weights[j] = 0;
        for_visible(q, row, s.bytes, [&](int64_t j) { return weights[j] = W(nan), false; });
        return true;
    }
    if (!finite(out, wide)) return false;
    add_sink(q, row, state, top, out);
    if (!in_range(state, top)) return false;
    for (int64_t e = 0; e < q.E; e++)
        if (special(apart[e])) out[e] = apart[e];
    if (whole) {
        finish<double, W>(q, how, row, state, top, out,
                          q.weights ? s.chunk_maxima + r * chunks : nullptr);
        return true;
    }
    const int64_t size = size_of(q.kind);
    for (int64_t e = 0; e < q.E; e++) {
        double stored;
        load_row(&stored, place_of(q, row) + e * size, size, q.kind, 1);
        const double x = out[e] / state.sum;
        if (special(stored)) store_one(place_of(q, row), e, q.kind, x == 0 ? 0 : x);
    }
    return true;
}

// Rows of key head g against all keys. Weights are numbers of W.
template <class W>
static void retry_in_float64(const Request& q, int64_t b, int64_t g, const Left* left, int64_t rows,
                             char* at) {
    typedef double T;
    const Scratch<T> s(q, at, true);
    const Softmax<T> how = softmax_of<T>(q);
    const int64_t wide = padded(q.E, kLanes<T>), chunks = (q.S + kChunk - 1) / kChunk, D = q.D;
    const int64_t depth = larger_of(1, q.program_depth) * kChunk;
    const T sign = q.scale < 0 ? T(-1) : q.scale == 0 ? T(0) : T(1);
    const Ahead nothing_ahead[kTile] = {};
    // Products of numbers of narrower types cannot leave the range of float64.
    const bool overflows = q.query.kind == Kind::float64 || q.key.kind == Kind::float64;
    bool special_row[kTask], beyond[kTask] = {};
    for (int64_t r = 0; r < rows; r++) {
        const int64_t h = g * (q.H / q.G) + left[r].number / q.L, i = left[r].number % q.L;
        T* query = s.queries + r * D;
        s.row[r] = row_of(q, b, h, i);
        s.states[r] = kNothing<T>;
        load_row(query, q.query.at(b, h, i), q.query.column, q.query.kind, D);
        special_row[r] = false;
        for (int64_t d = 0; d < D; d++) special_row[r] |= special(query[d] *= sign);
        clear(s.apart.sums + r * wide, wide);
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        if (q.stopped(q.state)) return;
        const int64_t k0 = chunk * kChunk, n = smaller_of(kChunk, q.S - k0);
        for (int64_t r = 0; q.weights && r < rows; r++)
            s.chunk_maxima[r * chunks + chunk] = -infinity<T>();
        bool packed = false, apart = false;
        for (int64_t tile = 0; tile < rows; tile += kTile) {
            const int64_t height = smaller_of(kTile, rows - tile);
            const Range range = range_of(s.row + tile, height, k0, n);
            bool decided = true;
            for (int64_t r = tile; r < tile + height; r++) decided &= beyond[r] || again(s.states[r]);
            if (range.low >= range.high || decided) continue;
            if (q.program)
                if (!allowed_of(q, s.row + tile, height, k0, n, range, s.bytes, depth, kPanel<T>).any)
                    continue;
            if (!packed) {
                pack_keys(q, b, g, k0, n, s.keys, s.rows);
                find_special_keys(D, n, s);
                apart = pack_values_apart(q, b, g, k0, n, s);
                packed = true;
            }
            by_height(height, [&](int64_t r, auto rows) {
                scores<T, decltype(rows)::value>(s.queries + (tile + r) * D, D, s.keys, range.low,
                                                 range.high, s.strip + r * kStrip<T>, nothing_ahead);
            });
            const int64_t from = range.low / kPanel<T> * kPanel<T>, to = padded(range.high, kLanes<T>);
            State<T> parts[kTile];
            for (int64_t r = 0; r < height; r++) {
                T* x = s.strip + r * kStrip<T>;
                const Row& row = s.row[tile + r];
                const Seen<T> seen = {row.low - k0, smaller_of(row.high - k0, n),
                                      q.program ? s.bytes + r * depth : nullptr,
                                      bias_of(q, row, k0, n, s.bias)};
                const auto from_inputs = [&](int64_t j) {
                    return special_row[tile + r] || s.apart.special_keys[j];
                };
                if (!finite(x + from, to - from))
                    for (int64_t j = range.low; j < range.high; j++) {
                        if (!special(x[j]) || !seen(j)) continue;
                        const T* key = s.keys + j / kPanel<T> * kPanel<T> * D + j % kPanel<T>;
                        if (!from_inputs(j)) beyond[tile + r] = true;
                        else if (overflows) x[j] = special_score(s.queries + (tile + r) * D, key, D);
                        if (x[j] != x[j]) break;  // one NaN decides the row
                    }
                bool odd = false;
                const T most = prepare(how, x, from, to, seen, odd);
                for (int64_t j = range.low; odd && j < range.high; j++)
                    beyond[tile + r] |= special(x[j]) && seen(j) && !from_inputs(j) &&
                                        !(seen.bias && special(seen.bias[j]));
                if (apart) add_apart(s, seen, x, range, n, wide, s.apart.sums + (tile + r) * wide);
                parts[r].sum = sum_of<T>(exponentiate(how, x, from, to, most, parts[r]));
                if (parts[r].sum == 0) parts[r] = kNothing<T>;
            }
            by_height(height, [&](int64_t r, auto rows) {
                outputs<T, decltype(rows)::value>(s.strip + r * kStrip<T>, (const char*)s.values,
                                                  wide * int64_t(sizeof(T)), wide, range.low,
                                                  range.high, s.part + r * wide, wide);
            });
            for (int64_t r = 0; r < height; r++) {
                if (q.weights && left[tile + r].whole && !nothing(parts[r])) {
                    const Row& row = s.row[tile + r];
                    W* weights = (W*)q.weights + ((b * q.H + row.h) * q.L + row.i) * q.S + k0;
                    for (int64_t j = range.low; j < range.high; j++)
                        weights[j] = W(s.strip[r * kStrip<T> + j]);
                    s.chunk_maxima[(tile + r) * chunks + chunk] = parts[r].maximum;
                }
                merge_part(s.states[tile + r], s.out + (tile + r) * wide, parts[r], s.part + r * wide,
                           wide, how.unit);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++)
        if (beyond[r] || !settle_retry<W>(q, how, s, r, left[r].whole))
            q.unbounded_row(q, b, s.row[r].h, s.row[r].i, left[r].whole);
}

static void retry_in_float64(const Request& q, int64_t b, int64_t g, const Left* left, int64_t rows,
                             char* at) {
    if (q.wide) return retry_in_float64<double>(q, b, g, left, rows, at);
    retry_in_float64<float>(q, b, g, left, rows, at);
}

}  // namespace
