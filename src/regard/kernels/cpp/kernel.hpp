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
#include "products.hpp"
#include "rules.hpp"
#include "softmax.hpp"

namespace {
using namespace regard;

// --- one piece of work -------------------------------------------------------------------------

// Scratch memory of one thread, laid out in one place.
template <class T> struct Scratch {
    T *queries, *out, *part, *strip, *bias, *keys, *values, *rows, *chunk_maxima;
    State<T>* states;
    Row* row;
    uint8_t* bytes;
    size_t size;

    Scratch(const Request& q, char* at) : size(0) {
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

// A part's output once more for one row, hidden keys skipped: what is stored in a hidden value
// (NaN, infinity) must not meet its weight of 0. Bytes are those of `blend` for finite values.
template <class T>
static void blend_visible(const Row& row, const T* p, const char* values,
                          int64_t stride, int64_t wide, int64_t k0, int64_t from, int64_t to,
                          const uint8_t* bytes, const T* bias, T* out) {
    for (int64_t e = 0; e < wide; e += kLanes<T>) {
        Vec<T> whole = {};
        for (int64_t begin = from; begin < to; begin = next_run(begin)) {
            Vec<T> sum = {};
            for (int64_t j = begin; j < smaller_of(next_run(begin), to); j++) {
                if (k0 + j < row.low || k0 + j >= row.high) continue;
                if (bytes && !bytes[j]) continue;
                if (bias && bias[j] == -infinity<T>()) continue;
                sum = fma(all(p[j]), load((const T*)(values + j * stride) + e), sum);
            }
            whole = begin > from ? whole + sum : sum;
        }
        store(out + e, whole);
    }
}

// Calls f(j) for every key that a row may see, until f says stop.
template <class T, class F>
static void for_visible(const Request& q, const Row& row, uint8_t* stack, F f) {
    for (int64_t k0 = row.low / kChunk * kChunk; k0 < row.high; k0 += kChunk) {
        const int64_t n = smaller_of(kChunk, q.S - k0);
        const uint8_t* bytes = q.program ? allowed(q, row, k0, n, stack) : nullptr;
        for (int64_t j = larger_of(0, row.low - k0); j < smaller_of(n, row.high - k0); j++) {
            if (bytes && !bytes[j]) continue;
            if (q.bias.data) {
                T added;
                const char* from = q.bias.at(row.b, row.h, row.i) + (k0 + j) * q.bias.column;
                load_bias(&added, from, 0, q.bias.kind, 1);
                if (added == -infinity<T>()) continue;
            }
            if (f(k0 + j)) return;
        }
    }
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

// The sink, the division, and what the caller gets of one row; `in_range`: whether `out` is finite.
template <class T>
static void finish(const Request& q, const Softmax<T>& how, const Row& row, State<T> state, T* out,
                   bool in_range, const T* maxima, uint8_t* stack) {
    double top = double(state.maximum) * how.natural;  // as a logit
    if (state.sum == 0 && (q.narrow || !q.sink)) {
        // Empty is decided by the rules: visible scores that are all −∞ leave NaN, where there is no
        // sink for the row to go to. (A narrow row is redone: they may have overflowed.)
        for_visible<T>(q, row, stack, [&](int64_t) {
            state.sum = T(__builtin_nan(""));
            return true;
        });
    }
    if (q.sink) {
        // One more part, of a single exponential and no value.
        const double sink = double(T(q.sink[row.b * q.H + row.h]));
        const T ahead = T((top - sink) * kLog2e);
        const T keep = ahead >= 0 ? T(1) : exp2_of(ahead);
        state.sum = state.sum * keep + (ahead >= 0 ? exp2_of(-ahead) : T(1));
        for (int64_t e = 0; e < q.E; e++) out[e] *= keep;
        if (!(ahead >= 0)) top = sink;
    }
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
    const bool broken = !(state.sum - state.sum == 0) || !(top < infinity<double>());
    if (q.weights && state.sum != 0) {
        T* weights = (T*)q.weights + number * q.S;
        if (broken) {
            for (int64_t j = 0; j < q.S; j++) weights[j] = 0;
            for_visible<T>(q, row, stack, [&](int64_t j) {
                weights[j] = T(__builtin_nan(""));
                return false;
            });
        } else {
            for (int64_t k0 = 0; k0 < q.S; k0 += kChunk) {
                const double own = double(maxima[k0 / kChunk]) * how.natural;
                const T factor = exp2_of(T((own - top) * kLog2e));
                for (int64_t j = k0; j < smaller_of(k0 + kChunk, q.S); j++)
                    weights[j] = weights[j] * factor / state.sum;
            }
        }
    }
    if (q.narrow && (broken || !in_range)) q.redo(q, row.b, row.h, row.i, broken);
}

template <class T> static Softmax<T> softmax_of(const Request& q) {
    // The sign went into the queries; without a scale they are 0.
    const double scale = q.scale < 0 ? -q.scale : q.scale == 0 ? 1 : q.scale;
    Softmax<T> how = {};
    how.general = q.bias.data || q.softcap != 0;
    // A cap beyond every number bends none; the smallest of them leaves little but signs.
    how.capped = q.softcap != 0 && q.softcap * kLog2e < double(largest_number<T>());
    // A bias in units of the scores must not leave the range of numbers by that alone.
    how.in_logits = how.capped || (how.general && !(scale > 1e-30 && scale < 1e30));
    how.natural = how.in_logits ? 1 : scale;
    how.unit = T(how.natural * kLog2e);
    how.bias = T(1 / how.natural);
    how.bias_rest = T(__builtin_fma(-how.natural, double(how.bias), 1.0) / how.natural);
    how.scale = T(scale);
    how.cap = T(q.softcap) > 0 ? T(q.softcap) : smallest_number<T>();
    return how;
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
            // The keys that any row of the tile may see, relative to the chunk.
            int64_t low = n, high = 0;
            for (int64_t r = tile; r < tile + height; r++) {
                const Row& row = s.row[r];
                if (row.high <= k0 || row.low >= k0 + n) continue;
                low = smaller_of(low, larger_of(0, row.low - k0));
                high = larger_of(high, smaller_of(n, row.high - k0));
            }
            if (low >= high) continue;
            bool some_hidden = false;
            if (q.program) {
                uint8_t any = 0, every = 1;
                for (int64_t r = 0; r < height; r++) {
                    const uint8_t* bytes = allowed(q, s.row[tile + r], k0, n, s.bytes + r * depth);
                    for (int64_t j = low; j < high; j++) any |= bytes[j], every &= bytes[j];
                    for (int64_t j = n; j < padded(n, P); j++) s.bytes[r * depth + j] = 0;
                }
                if (!any) continue;
                some_hidden = !every;
            }
            const auto seen = [&](int64_t r) { return some_hidden ? s.bytes + r * depth : nullptr; };
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
            for (int64_t r = 0; r < height; r++) {
                const Row& row = s.row[tile + r];
                most[r] = prepare(how, s.strip + r * kStrip<T>, from, to, row.low - k0,
                                  smaller_of(row.high - k0, n), seen(r),
                                  bias_of(q, row, k0, n, s.bias));
            }
            for (int64_t r = 0; r < height; r++)
                sums[r] = exponentiate(how, s.strip + r * kStrip<T>, from, to, most[r], parts[r]);
            for (int64_t r = 0; r < height; r++) {
                parts[r].sum = sum_of<T>(sums[r]);
                if (parts[r].sum == 0) parts[r] = kNothing<T>;
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
                if (!all_finite && !finite(out, wide)) {
                    blend_visible(row, s.strip + r * kStrip<T>, values, stride, wide, k0, low, high,
                                  seen(r), bias_of(q, row, k0, n, s.bias), out);
                    // Scores that are all −∞ leave no number, but a NaN among their values stays.
                    if (parts[r].sum == 0 && !finite(out, wide))
                        parts[r].maximum = -largest_number<T>();
                }
                if (q.weights && parts[r].maximum != -infinity<T>()) {
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
    const bool in_range = finite(s.out, rows * wide);
    const bool divided_only = !q.sink && !q.lse && !q.weights && stored_as_is<T>(q);
    for (int64_t r = 0; r < rows; r++) {
        const State<T> state = s.states[r];
        T* out = s.out + r * wide;
        // Nearly every row has nothing left but the division.
        if (divided_only && in_range && state.sum > 0 && state.sum < infinity<T>() &&
            state.maximum < infinity<T>())
            divide(out, state.sum, (T*)place_of(q, s.row[r]), wide);
        else
            finish(q, how, s.row[r], state, out, in_range || finite(out, wide),
                   q.weights ? s.chunk_maxima + r * chunks : nullptr, s.bytes);
    }
}

// The parts of every chunk, left to right: the same merging in the same order as in `attend`.
template <class T>
static void merge(const Request& q, int64_t b, int64_t g, int64_t first, int64_t last,
                  int64_t chunks, const char* partial_at, char* at) {
    Scratch<T> s(q, at);
    const int64_t rows = last - first, wide = padded(q.E, kLanes<T>);
    const Partial<T> partial = {const_cast<char*>(partial_at), rows, wide};
    const Softmax<T> how = softmax_of<T>(q);
    for_rows(q, b, g, first, last, [&](int64_t r, Row row) {
        State<T> state = kNothing<T>;
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            merge_part(state, s.out, partial.state(chunk, r), partial.out(chunk, r), wide, how.unit);
            if (q.weights) s.chunk_maxima[chunk] = partial.state(chunk, r).maximum;
        }
        if (nothing(state)) clear(s.out, wide);
        finish(q, how, row, state, s.out, finite(s.out, wide), s.chunk_maxima, s.bytes);
    });
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
    return REGARD_EITHER(Scratch<float>(q, nullptr).size, Scratch<double>(q, nullptr).size) + 64;
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
        partial_bytes, merge_rows,    kTask,         kTile,        exponentials};
