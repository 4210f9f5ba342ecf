// Streaming attention for one CPU target, included by each target_*.cpp.
//
// Keys are cut into chunks of kChunk, anchored at key 0. Every chunk is computed from zero with a
// maximum of its own and merged into the row's running state from left to right; every lane adds
// in one order. So a row's bytes do not depend on which rows, threads or tiles it was computed
// with.
//
// Per tile of rows and chunk of keys:
//   pass 1  scores:        strip = Q Kᵀ, lanes along keys, K packed in panels of two vectors
//   pass 2  softmax:       maximum, exponentials and their sum, row by row; hidden keys are −∞
//   pass 3  output:        A = strip V, lanes along the value's columns
//   pass 4  merge:         (maximum, sum, O) with (maximum, sum, A)
#pragma once
#include "pack.hpp"
#include "peak_flops.hpp"
#include "products.hpp"
#include "mask_rules.hpp"
#include "softmax.hpp"

namespace {
using namespace regard;

// --- one piece of work -------------------------------------------------------------------------

// What a careful look keeps apart (retry_float64.hpp).
template <class T> struct Apart {
    T* sums;    // (rows, E): NaN and infinite values that a row sees, added up; 0 where there are none
    T* chunk;   // (E): the same for the keys of a chunk
    T* values;  // (keys, E): NaN and infinite values of a chunk; 0 for all others
    uint8_t *special_keys, *special_values;  // (keys): whether there is one in a key, in a value
};

// Scratch memory of one thread, laid out in one place.
template <class T> struct Scratch {
    T *queries, *out, *part, *strip, *bias, *keys, *values, *rows, *chunk_maxima;
    State<T>* states;
    Row* row;
    uint8_t* bytes;
    Apart<T> apart;  // room for a second, careful look
    size_t size;

    Scratch(const Request& q, char* at, bool careful = false) : apart(), size(0) {
        const int64_t wide = padded(q.E, kLanes<T>), chunks = (q.S + kChunk - 1) / kChunk;
        auto take = [&](int64_t bytes) {
            char* here = at ? at + size : nullptr;
            size += size_t(padded(bytes, 64));
            return here;
        };
        queries = (T*)take(kTask * q.D * sizeof(T));
        out = (T*)take(kTask * wide * sizeof(T));
        part = (T*)take(kTile * wide * sizeof(T));
        strip = (T*)take(kTile * kStrip<T> * sizeof(T));
        bias = (T*)take(kStrip<T> * sizeof(T));
        keys = (T*)take(kChunk * q.D * sizeof(T));
        values = (T*)take(kChunk * wide * sizeof(T));
        rows = (T*)take(kLanes<T> * padded(q.D, kLanes<T>) * sizeof(T));
        chunk_maxima = (T*)take(q.weights ? kTask * chunks * sizeof(T) : 0);
        states = (State<T>*)take(kTask * sizeof(State<T>));
        row = (Row*)take(kTask * sizeof(Row));
        bytes = (uint8_t*)take(kTile * larger_of(1, q.program_depth) * kChunk);
        if (!careful) return;
        apart.sums = (T*)take(kTask * wide * sizeof(T));
        apart.chunk = (T*)take(wide * sizeof(T));
        apart.values = (T*)take(kChunk * wide * sizeof(T));
        apart.special_keys = (uint8_t*)take(kChunk);
        apart.special_values = (uint8_t*)take(kChunk);
    }
};

// A row's bias for keys k0 … k0 + n: where it stands if it can be read as whole panels, else copied
// to `room`.
template <class T>
static const T* bias_of(const Request& q, const Row& row, int64_t k0, int64_t n, T* room) {
    if (!q.bias.data) return nullptr;
    const char* from = q.bias.at(row.b, row.h, row.i) + k0 * q.bias.column;
    if (n == kChunk && in_place<T>(q.bias, n)) return (const T*)from;
    load_bias(room, from, q.bias.column, q.bias.kind, n);
    return room;
}

// Calls f(first column, Number<vectors>) for all columns: additions of several vectors at a time do
// not wait for each other.
template <class T, class F> REGARD_INLINE void in_columns(int64_t wide, F f) {
    int64_t e = 0;
    for (; e + 4 * kLanes<T> <= wide; e += 4 * kLanes<T>) f(e, Number<4>{});
    for (; e < wide; e += kLanes<T>) f(e, Number<1>{});
}

// A row's output of one chunk again, hidden keys skipped: what is stored in a hidden value (NaN,
// infinity) must not meet its weight of 0. Bytes are those of `blend` for finite values.
template <class T>
static void blend_visible(const Seen<T>& seen, const T* p, const char* values, int64_t stride,
                          int64_t wide, int64_t from, int64_t to, T* out) {
    int16_t keys[kChunk];
    int64_t count = 0;
    for (int64_t j = from; j < to; j++) {
        keys[count] = int16_t(j);
        count += seen(j);
    }
    if (count == to - from) return;
    in_columns<T>(wide, [&](int64_t e, auto vectors) {
        constexpr int N = decltype(vectors)::value, W = kLanes<T>;
        Vec<T> whole[N] = {};
        for (int64_t begin = from, at = 0; begin < to; begin = next_run(begin)) {
            Vec<T> sum[N] = {};
            for (; at < count && keys[at] < next_run(begin); at++) {
                const Vec<T> weight = all(p[keys[at]]);
                const T* row = (const T*)(values + keys[at] * stride) + e;
                for (int i = 0; i < N; i++) sum[i] = fma(weight, load(row + i * W), sum[i]);
            }
            for (int i = 0; i < N; i++) whole[i] = begin > from ? whole[i] + sum[i] : sum[i];
        }
        for (int i = 0; i < N; i++) store(out + e + i * W, whole[i]);
    });
}

// The keys of a chunk that any row of a tile may see: [low, high), relative to the chunk.
struct Range {
    int64_t low, high;
};
static Range range_of(const Row* rows, int64_t height, int64_t k0, int64_t n) {
    Range range = {n, 0};
    for (int64_t r = 0; r < height; r++) {
        if (rows[r].high <= k0 || rows[r].low >= k0 + n) continue;
        range.low = smaller_of(range.low, larger_of(0, rows[r].low - k0));
        range.high = larger_of(range.high, smaller_of(n, rows[r].high - k0));
    }
    return range;
}

// The further rules for a tile's keys, as bytes, and whether they allow any of them, or every one.
struct Allowed {
    bool any, every;
};
static Allowed allowed_of(const Request& q, const Row* rows, int64_t height, int64_t k0, int64_t n,
                          Range range, uint8_t* bytes, int64_t depth, int64_t panel) {
    uint8_t any = 0, every = 1;
    for (int64_t r = 0; r < height; r++) {
        const uint8_t* own = allowed(q, rows[r], k0, n, bytes + r * depth);
        for (int64_t j = range.low; j < range.high; j++) any |= own[j], every &= own[j];
        for (int64_t j = n; j < padded(n, panel); j++) bytes[r * depth + j] = 0;
    }
    return {any != 0, every != 0};
}

// Where a row's output stands, and whether it is stored in whole vectors of T.
REGARD_INLINE char* place_of(const Request& q, const Row& row) {
    return q.output + ((row.b * q.H + row.h) * q.L + row.i) * q.E * size_of(q.kind);
}
template <class T> REGARD_INLINE bool stored_as_is(const Request& q) {
    return q.kind == kind_of<T>() && q.E % kLanes<T> == 0;
}

// The division that ends a row.
template <class T> REGARD_INLINE void divide(const T* from, T by, T* to, int64_t wide) {
    const Vec<T> whole = all(by);
    for (int64_t e = 0; e < wide; e += kLanes<T>) {
        const Vec<T> x = load(from + e) / whole;
        // −0 becomes +0: no sign of a hidden value's tiny product.
        store(to + e, (Vec<T>)((Bits<T>)x & (Bits<T>)(x != Vec<T>{})));
    }
}

// A row's state with the sink in it: one more part, of a single exponential and no value. `top` is the
// largest logit.
template <class T>
static void add_sink(const Request& q, const Row& row, State<T>& state, double& top, T* out) {
    if (!q.sink) return;
    const double sink = double(T(q.sink[row.b * q.H + row.h]));
    const T ahead = T((top - sink) * kLog2e);
    const T keep = ahead >= 0 ? T(1) : exp2_of(ahead);
    state.sum = state.sum * keep + (ahead >= 0 ? exp2_of(-ahead) : T(1));
    for (int64_t e = 0; e < q.E; e++) out[e] *= keep;
    if (!(ahead >= 0)) top = sink;
}

// Whether a state has numbers to divide by and to take logarithms of.
template <class T> REGARD_INLINE bool in_range(State<T> state, double top) {
    return state.sum < infinity<T>() && top < infinity<double>();
}

// The sink, the division, and what the caller gets of one row whose numbers are all in range, weights
// as numbers of W.
template <class T, class W = T>
static void finish(const Request& q, const Softmax<T>& how, const Row& row, State<T> state,
                   double top, T* out, const T* maxima) {
    const int64_t number = (row.b * q.H + row.h) * q.L + row.i;
    char* to = place_of(q, row);
    const bool direct = stored_as_is<T>(q);
    // Where nothing was seen, out is 0.
    divide(out, state.sum == 0 ? T(1) : state.sum, direct ? (T*)to : out, q.E);
    if (!direct) store_row(to, q.kind, out, q.E);
    if (q.lse) {
        const double lse = state.sum == 0 ? -infinity<double>()
                                          : top + __builtin_log(double(state.sum));
        store_one(q.lse, number, q.lse_kind, lse);
    }
    if (!q.weights || state.sum == 0) return;
    W* weights = (W*)q.weights + number * q.S;
    for (int64_t k0 = 0; k0 < q.S; k0 += kChunk) {
        const double own = double(maxima[k0 / kChunk]) * how.natural;
        const T factor = exp2_of(T((own - top) * kLog2e));
        for (int64_t j = k0; j < smaller_of(k0 + kChunk, q.S); j++)
            weights[j] = W(T(weights[j]) * factor / state.sum);
    }
}

template <class T> static Softmax<T> softmax_of(const Request& q) {
    // The sign went into the queries; without a scale they are 0.
    const double scale = q.scale < 0 ? -q.scale : q.scale == 0 ? 1 : q.scale;
    Softmax<T> how = {};
    // Far from 1, a scale leads out of the range of numbers on its own, and that has to be seen.
    const bool far = !(scale > 1e-30 && scale < 1e30);
    how.general = q.bias.data || q.softcap != 0 || far;
    // A cap beyond every number bends none; the smallest of them leaves little but signs.
    how.capped = q.softcap != 0 && q.softcap * kLog2e < double(largest_number<T>());
    how.in_logits = how.capped || far;
    how.natural = how.in_logits ? 1 : scale;
    how.unit = T(how.natural * kLog2e);
    how.bias = T(1 / how.natural);
    how.bias_rest = T(__builtin_fma(-how.natural, double(how.bias), 1.0) / how.natural);
    how.scale = T(scale);
    how.cap = T(q.softcap) > 0 ? T(q.softcap) : smallest_number<T>();
    return how;
}

// A row to compute again, by its number among those of a key head: all of it, or only the columns of
// its output that are not finite.
struct Left {
    int64_t number;
    bool whole;
};

// Ends one row, or adds it to those that are to be computed again.
template <class T>
static void settle(const Request& q, const Softmax<T>& how, const Row& row, State<T> state, T* out,
                   const T* maxima, int64_t number, Left* left, int64_t& count) {
    double top = double(state.maximum) * how.natural;  // as a logit
    add_sink(q, row, state, top, out);
    if (!in_range(state, top)) {
        left[count++] = {number, true};
        return;
    }
    if (!finite(out, padded(q.E, kLanes<T>))) left[count++] = {number, false};
    finish(q, how, row, state, top, out, maxima);
}

// What one chunk leaves of one row, when keys are split over threads.
template <class T> struct Partial {
    char* at;
    int64_t rows, wide;
    size_t one() const { return sizeof(State<T>) * 2 + size_t(wide) * sizeof(T); }
    State<T>& state(int64_t chunk, int64_t r) const {
        return *(State<T>*)(at + size_t(chunk * rows + r) * padded(one(), 64));
    }
    T* out(int64_t chunk, int64_t r) const { return (T*)(&state(chunk, r) + 2); }
};

#include "retry_float64.hpp"

template <class T>
static void attend(const Request& q, int64_t b, int64_t g, int64_t first, int64_t last,
                   int64_t begin, int64_t end, const char* packed, char* at, char* partial_at) {
    constexpr int64_t P = kPanel<T>;
    Scratch<T> s(q, at);
    const Softmax<T> how = softmax_of<T>(q);
    const int64_t rows = last - first, wide = padded(q.E, kLanes<T>);
    const int64_t chunks = (q.S + kChunk - 1) / kChunk, D = q.D;
    const bool values_in_place = in_place<T>(q.value, q.E);
    const size_t key_bytes = size_t(padded(q.S, P)) * size_t(D) * sizeof(T);
    const Partial<T> partial = {partial_at, rows, wide};
    const int64_t depth = larger_of(1, q.program_depth) * kChunk;
    const bool few = !packed && rows <= kFew;  // turning keys on the way costs less than packing

    // Aligned rows that follow one another in memory are read where they stand.
    const T sign = q.scale < 0 ? T(-1) : q.scale == 0 ? T(0) : T(1);
    const int64_t one = D * int64_t(sizeof(T));
    const char* const standing = q.query.at(b, g * (q.H / q.G) + first / q.L, first % q.L);
    const bool stand = q.query.kind == kind_of<T>() && q.query.column == int64_t(sizeof(T)) &&
                       q.query.row == one && (q.H == q.G || q.query.head == q.L * one) &&
                       uintptr_t(standing) % alignof(T) == 0 && sign == 1;
    for_rows(q, b, g, first, last, [&](int64_t r, Row row) {
        s.row[r] = row;
        if (!stand) {
            T* query = s.queries + r * D;
            load_row(query, q.query.at(b, row.h, row.i), q.query.column, q.query.kind, D);
            if (sign != 1)
                for (int64_t d = 0; d < D; d++) query[d] *= sign;
        }
        s.states[r] = kNothing<T>;  // and an output that nobody has written yet
    });
    const T* queries = stand ? (const T*)standing : s.queries;

    for (int64_t chunk = begin; chunk < end; chunk++) {
        if (q.stopped(q.state)) return;
        const int64_t k0 = chunk * kChunk, n = smaller_of(kChunk, q.S - k0);
        for (int64_t r = 0; r < rows; r++) {
            if (partial_at) partial.state(chunk, r) = kNothing<T>;
            if (q.weights) s.chunk_maxima[r * chunks + chunk] = -infinity<T>();
        }
        const T* panels = packed ? (const T*)packed + k0 * D : nullptr;
        const char* values = nullptr;
        int64_t stride = 0;
        for (int64_t tile = 0; tile < rows; tile += kTile) {
            const int64_t height = smaller_of(kTile, rows - tile);
            bool doomed = !partial_at;
            for (int64_t r = tile; r < tile + height; r++) doomed &= again(s.states[r]);
            if (doomed) continue;
            const Range range = range_of(s.row + tile, height, k0, n);
            const int64_t low = range.low, high = range.high;
            if (low >= high) continue;
            bool some_hidden = false;
            if (q.program) {
                const Allowed found = allowed_of(q, s.row + tile, height, k0, n, range, s.bytes,
                                                 depth, P);
                if (!found.any) continue;
                some_hidden = !found.every;
            }
            const auto seen = [&](int64_t r) -> Seen<T> {
                const Row& row = s.row[tile + r];
                return {row.low - k0, smaller_of(row.high - k0, n),
                        some_hidden ? s.bytes + r * depth : nullptr,
                        bias_of(q, row, k0, n, s.bias)};
            };
            if (!panels && !few) {
                pack_keys(q, b, g, k0, n, s.keys, s.rows);
                panels = s.keys;
            }
            if (!values) {
                if (values_in_place) {
                    values = q.value.at(b, g, k0);
                    stride = q.value.row;
                } else {
                    const int64_t whole = wide * int64_t(sizeof(T));
                    if (packed) {
                        values = packed + padded(key_bytes, 64) + k0 * whole;
                    } else {
                        pack_values(q, b, g, k0, n, s.values);
                        values = (const char*)s.values;
                    }
                    stride = whole;
                }
            }
            const int64_t from = low / P * P, to = padded(high, kLanes<T>);
            // Rows of a bias lie far apart: they are asked for while the scores are made.
            const bool beside = q.bias.data && q.bias.column == size_of(q.bias.kind);
            Ahead ahead[kTile];
            for (int64_t r = 0; r < height; r++) {
                const Row& row = s.row[tile + r];
                ahead[r] = {beside ? q.bias.at(row.b, row.h, row.i) + k0 * q.bias.column : nullptr,
                            q.bias.column};
            }
            if (few)
                with_number<kFew>(height, [&](auto rows) {
                    scores_unpacked<T, decltype(rows)::value>(
                        q, b, g, k0, n, queries + tile * D, low, high, s.rows, s.strip, ahead);
                });
            else
                by_height(height, [&](int64_t r, auto rows) {
                    scores<T, decltype(rows)::value>(queries + (tile + r) * D, D, panels, low, high,
                                                     s.strip + r * kStrip<T>, ahead + r);
                });
            // Row after row, one thing at a time: what a row waits for, the next ones hide.
            State<T> parts[kTile];
            T most[kTile];
            Vec<T> sums[kTile];
            bool left[kTile];  // whether a number that the row sees left the range of T
            for (int64_t r = 0; r < height; r++) {
                T* x = s.strip + r * kStrip<T>;
                const Seen<T> own = seen(r);
                bool odd = false;
                // A softcap makes numbers of scores that are none.
                left[r] = how.capped && !finite(x + from, to - from) &&
                          any_seen_special(own, x, low, high);
                most[r] = prepare(how, x, from, to, own, odd);
                left[r] |= odd && any_seen_special(own, x, low, high);
            }
            for (int64_t r = 0; r < height; r++)
                sums[r] = exponentiate(how, s.strip + r * kStrip<T>, from, to, most[r], parts[r]);
            for (int64_t r = 0; r < height; r++) {
                parts[r].sum = sum_of<T>(sums[r]);
                if (parts[r].sum == 0) parts[r] = kNothing<T>;
                if (left[r]) parts[r] = kAgain<T>;
            }
            // The first part of a whole tile needs no merging: it is the rows' output so far.
            bool first = !partial_at;
            for (int64_t r = tile; r < tile + height; r++) first &= nothing(s.states[r]);
            T* part = first ? s.out + tile * wide : s.part;
            by_height(height, [&](int64_t r, auto rows) {
                outputs<T, decltype(rows)::value>(s.strip + r * kStrip<T>, values, stride, wide, low,
                                                  high, part + r * wide, wide);
            });
            const bool all_finite = finite(part, height * wide);
            for (int64_t r = 0; r < height; r++) {
                T* out = part + r * wide;
                const Row& row = s.row[tile + r];
                if (!all_finite && !again(parts[r]) && !finite(out, wide))
                    blend_visible(seen(r), s.strip + r * kStrip<T>, values, stride, wide, low, high,
                                  out);
                if (q.weights && !nothing(parts[r]) && !again(parts[r])) {
                    const int64_t number = (b * q.H + row.h) * q.L + row.i;
                    T* weights = (T*)q.weights + number * q.S + k0;
                    for (int64_t j = low; j < high; j++) weights[j] = s.strip[r * kStrip<T> + j];
                    s.chunk_maxima[(tile + r) * chunks + chunk] = parts[r].maximum;
                }
                if (partial_at) {
                    partial.state(chunk, tile + r) = parts[r];
                    for (int64_t e = 0; e < wide; e++) partial.out(chunk, tile + r)[e] = out[e];
                } else if (first) {
                    s.states[tile + r] = parts[r];
                } else {
                    merge_part(s.states[tile + r], s.out + (tile + r) * wide, parts[r], out, wide,
                               how.unit);
                }
            }
        }
    }
    if (partial_at) return;
    for (int64_t r = 0; r < rows; r++)
        if (nothing(s.states[r])) clear(s.out + r * wide, wide);
    const bool all_finite = finite(s.out, rows * wide);
    const bool divided_only = !q.sink && !q.lse && !q.weights && stored_as_is<T>(q);
    Left left[kTask];
    int64_t count = 0;
    for (int64_t r = 0; r < rows; r++) {
        const State<T> state = s.states[r];
        T* out = s.out + r * wide;
        // Nearly every row has nothing left but the division.
        if (divided_only && all_finite && state.sum > 0 && in_range(state, state.maximum))
            divide(out, state.sum, (T*)place_of(q, s.row[r]), wide);
        else
            settle(q, how, s.row[r], state, out, q.weights ? s.chunk_maxima + r * chunks : nullptr,
                   first + r, left, count);
    }
    if (count) retry_in_float64(q, b, g, left, count, at);
}

// The parts of every chunk, left to right: the same merging in the same order as in `attend`.
template <class T>
static void merge(const Request& q, int64_t b, int64_t g, int64_t first, int64_t last,
                  int64_t chunks, const char* partial_at, char* at) {
    Scratch<T> s(q, at);
    const int64_t rows = last - first, wide = padded(q.E, kLanes<T>);
    const Partial<T> partial = {const_cast<char*>(partial_at), rows, wide};
    const Softmax<T> how = softmax_of<T>(q);
    Left left[kTask];
    int64_t count = 0;
    for_rows(q, b, g, first, last, [&](int64_t r, Row row) {
        State<T> state = kNothing<T>;
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            merge_part(state, s.out, partial.state(chunk, r), partial.out(chunk, r), wide, how.unit);
            if (q.weights) s.chunk_maxima[chunk] = partial.state(chunk, r).maximum;
        }
        if (nothing(state)) clear(s.out, wide);
        settle(q, how, row, state, s.out, s.chunk_maxima, first + r, left, count);
    });
    if (count) retry_in_float64(q, b, g, left, count, at);
}

template <class T>
static void pack(const Request& q, int64_t b, int64_t g, int64_t chunk, char* packed) {
    const int64_t k0 = chunk * kChunk, n = smaller_of(kChunk, q.S - k0);
    const size_t key_bytes = size_t(padded(q.S, kPanel<T>)) * size_t(q.D) * sizeof(T);
    const int64_t wide = padded(q.E, kLanes<T>);
    T* keys = (T*)packed + k0 * q.D;
    // Rows in the making stand at the end of the packed head, one set per chunk.
    char* end = packed + padded(key_bytes, 64);
    if (!in_place<T>(q.value, q.E)) {
        pack_values(q, b, g, k0, n, (T*)end + k0 * wide);
        end += padded(size_t(padded(q.S, kChunk)) * size_t(wide) * sizeof(T), 64);
    }
    T* room = (T*)end + chunk * kLanes<T> * padded(q.D, kLanes<T>);
    pack_keys(q, b, g, k0, n, keys, room);
}

template <class T> static size_t packed_size(const Request& q) {
    const size_t wide = size_t(padded(q.E, kLanes<T>));
    const size_t chunks = size_t((q.S + kChunk - 1) / kChunk);
    size_t bytes = size_t(padded(size_t(padded(q.S, kPanel<T>)) * size_t(q.D) * sizeof(T), 64));
    if (!in_place<T>(q.value, q.E))
        bytes += size_t(padded(size_t(padded(q.S, kChunk)) * wide * sizeof(T), 64));
    return bytes + chunks * kLanes<T> * size_t(padded(q.D, kLanes<T>)) * sizeof(T) + 64;
}

#define REGARD_EITHER(CALL_FLOAT, CALL_DOUBLE) (q.wide ? CALL_DOUBLE : CALL_FLOAT)

static size_t scratch_bytes(const Request& q) {
    const size_t careful = Scratch<double>(q, nullptr, true).size;
    const size_t own = REGARD_EITHER(Scratch<float>(q, nullptr).size, Scratch<double>(q, nullptr).size);
    return (own > careful ? own : careful) + 64;
}
static size_t packed_bytes(const Request& q) {
    return REGARD_EITHER(packed_size<float>(q), packed_size<double>(q));
}
static void pack_chunk(const Request& q, int64_t b, int64_t g, int64_t chunk, char* packed) {
    REGARD_EITHER(pack<float>(q, b, g, chunk, packed), pack<double>(q, b, g, chunk, packed));
}
static void attend_rows(const Request& q, int64_t b, int64_t g, int64_t first, int64_t last,
                        int64_t begin, int64_t end, const char* packed, char* scratch,
                        char* partial) {
    REGARD_EITHER(attend<float>(q, b, g, first, last, begin, end, packed, scratch, partial),
                  attend<double>(q, b, g, first, last, begin, end, packed, scratch, partial));
}
static size_t partial_bytes(const Request& q, int64_t rows, int64_t chunks) {
    const int64_t wide = padded(q.E, kLanes<float>);
    const size_t one = REGARD_EITHER(
        padded((Partial<float>{nullptr, 0, wide}.one()), 64),
        padded((Partial<double>{nullptr, 0, padded(q.E, kLanes<double>)}.one()), 64));
    return one * size_t(rows) * size_t(chunks);
}
static void merge_rows(const Request& q, int64_t b, int64_t g, int64_t first, int64_t last,
                       int64_t chunks, const char* partial, char* scratch) {
    REGARD_EITHER(merge<float>(q, b, g, first, last, chunks, partial, scratch),
                  merge<double>(q, b, g, first, last, chunks, partial, scratch));
}
static void exponentials(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = exp2(all(x[i]))[0];
}

}  // namespace

#define REGARD_TARGET(SYMBOL, NAME)                                                       \
    extern "C" const regard::Target SYMBOL = {                                            \
        NAME,          kLanes<float>, scratch_bytes, packed_bytes, pack_chunk, attend_rows, \
        partial_bytes, merge_rows,    kTask,         kTile,        exponentials,              \
        {{multiply_adds<float>, kOperations<float>},                                        \
         {multiply_adds<double>, kOperations<double>}},                                     \
        read_all};
