// A tile of rows against a chunk of keys, pass by pass: visible range, score tile, softmax tile,
// accumulate values, merge.
#pragma once
#include "pack.hpp"
#include "products.hpp"
#include "scratch.hpp"

namespace {

struct Tile {
    int64_t row, height;  // the first of its rows in the piece, and how many
    Chunk chunk;
    Visible visible;
};

// Whole vectors that cover a range of keys, from the beginning of a panel.
template <class T> REGARD_INLINE KeyRange whole_vectors(KeyRange keys) {
    return {keys.low / kPanel<T> * kPanel<T>, padded(keys.high, kLanes<T>)};
}

// Keys and values of a chunk as the products read them. panels == nullptr: keys are not packed.
template <class T> struct Operands {
    const T* panels;
    const char* values;  // nullptr: not read yet
    int64_t stride;      // of values, in bytes
    Kind kind = kind_of<T>();  // of values; for a few rows also a half type or int8

    bool known() const { return values; }
};

// A row's bias for a chunk's keys, in place if whole panels can be read there, else in `room`.
template <class T>
REGARD_INLINE const T* bias_of(const Request& q, const Row& row, const Chunk& chunk, T* room) {
    if (!q.bias.data) return nullptr;
    const char* from = bias_at(q, q.bias, row) + chunk.k0 * q.bias.column;
    if (chunk.n % kPanel<T> == 0 && in_place<T>(q.bias, chunk.n)) return (const T*)from;
    // Numbers after the last are read too: none may be a subnormal one that memory held before.
    const int64_t whole = chunk.n / kPanel<T> * kPanel<T>;
    clear(room + whole, padded(chunk.n, kPanel<T>) - whole);
    load_bias(room, from, q.bias.column, q.bias.kind, chunk.n);
    return room;
}

template <class T> REGARD_INLINE Seen<T> seen_by(const Work<T>& w, const Tile& t, int64_t r) {
    const Row& row = w.s.row[t.row + r];
    return {row.low - t.chunk.k0, smaller_of(row.high - t.chunk.k0, t.chunk.n), t.visible.of(r),
            bias_of(w.q, row, t.chunk, w.s.bias)};
}

// Rows of a bias lie far apart: they are prefetched while the scores are made.
template <class T>
REGARD_INLINE void bias_ahead(const Work<T>& w, const Tile& t, Ahead (&ahead)[kTile]) {
    const Request& q = w.q;
    const bool beside = q.bias.data && q.bias.column == size_of(q.bias.kind);
    for (int64_t r = 0; r < t.height; r++) {
        const Row& row = w.s.row[t.row + r];
        ahead[r] = {beside ? bias_at(q, q.bias, row) + t.chunk.k0 * q.bias.column : nullptr,
                    q.bias.column};
    }
}

// Pass 1: scores of the visible keys, with keys from panels or, for a few rows, not packed.
template <class T>
REGARD_INLINE void score_tile(const Work<T>& w, const Tile& t, const T* queries, const T* panels) {
    const Request& q = w.q;
    Ahead ahead[kTile];
    bias_ahead(w, t, ahead);
    if (!panels)
        return with_number<kFew>(t.height, [&](auto rows) {
            scores_unpacked<T, decltype(rows)::value>(q, t.chunk, queries, t.visible.keys, w.s.rows,
                                                      w.s.strip, ahead);
        });
    by_height(t.height, [&](int64_t r, auto rows) {
        scores<T, decltype(rows)::value>(queries + r * q.D, q.D, q.D, panels, t.visible.keys,
                                         w.s.strip + r * kStrip<T>, kStrip<T>, ahead + r);
    });
}

// The largest number of each row, and whether one that it sees left the range of T.
template <class T> struct Largest {
    T most[kTile];
    bool left[kTile];
};
template <class T> REGARD_INLINE Largest<T> prepare_tile(const Work<T>& w, const Tile& t) {
    const KeyRange keys = t.visible.keys, whole = whole_vectors<T>(keys);
    Largest<T> found;
    for (int64_t r = 0; r < t.height; r++) {
        T* x = w.s.strip + r * kStrip<T>;
        const Seen<T> seen = seen_by(w, t, r);
        bool odd = false;
        // A softcap makes a finite number of an infinite score.
        found.left[r] = w.how.has_softcap && !finite(x + whole.low, whole.high - whole.low) &&
                        any_seen_special(seen, x, keys);
        found.most[r] = prepare(w.how, x, whole.low, whole.high, seen, odd);
        found.left[r] |= odd && any_seen_special(seen, x, keys);
    }
    return found;
}

// Pass 2: scores become exponentials, `parts` their states. One step for all rows, then the next.
template <class T>
REGARD_INLINE void softmax_tile(const Work<T>& w, const Tile& t, State<T>* parts) {
    const KeyRange whole = whole_vectors<T>(t.visible.keys);
    const Largest<T> found = prepare_tile(w, t);
    Vec<T> sums[kTile];
    for (int64_t r = 0; r < t.height; r++) {
        T* x = w.s.strip + r * kStrip<T>;
        if (w.how.sigmoid) parts[r] = weigh_alone(w.how, x, whole.low, whole.high, found.most[r]);
        else sums[r] = exponentiate(w.how, x, whole.low, whole.high, found.most[r], parts[r]);
    }
    for (int64_t r = 0; r < t.height; r++) {
        if (!w.how.sigmoid) {
            parts[r].sum = parts[r].divisor = sum_of<T>(sums[r]);
            if (parts[r].sum == 0) parts[r] = kNothing<T>;
        }
        if (found.left[r]) parts[r] = kAgain<T>;
    }
}

// Calls f(Of<kind>) for a kind that values may have in place.
template <class T, class F> REGARD_INLINE void with_values(const Operands<T>& use, F f) {
    with_kind(use.kind, [&](auto of) {
        if constexpr (loads<T>(decltype(of)::kind)) f(of);
    });
}

// Pass 3: exponentials times values.
template <class T>
REGARD_INLINE void accumulate_values(const Work<T>& w, const Tile& t, const Operands<T>& use,
                                     T* part) {
    if (use.kind == kind_of<T>())
        return by_height(t.height, [&](int64_t r, auto rows) {
            outputs<T, decltype(rows)::value>(w.s.strip + r * kStrip<T>, use.values, use.stride,
                                              w.wide, t.visible.keys, part + r * w.wide);
        });
    with_values(use, [&](auto of) {
        with_number<kFew>(t.height, [&](auto rows) {
            outputs<T, decltype(rows)::value, decltype(of)::kind>(w.s.strip, use.values, use.stride,
                                                                  w.wide, t.visible.keys, part);
        });
    });
}

// Calls f(first column, Number<vectors>) for all columns, several independent vectors at a time.
template <class T, class F> REGARD_INLINE void in_columns(int64_t wide, F f) {
    int64_t e = 0;
    for (; e + 4 * kLanes<T> <= wide; e += 4 * kLanes<T>) f(e, Number<4>{});
    for (; e < wide; e += kLanes<T>) f(e, Number<1>{});
}

// A row's output of one chunk again, without hidden keys: a hidden NaN must not meet its weight of 0.
// For finite values the bytes are those of `blend`.
template <class T>
static void accumulate_visible(const Seen<T>& seen, const T* p, const Operands<T>& use,
                               int64_t wide, KeyRange range, T* out) {
    int16_t keys[kChunk];
    int64_t count = 0;
    for (int64_t j = range.low; j < range.high; j++) {
        keys[count] = int16_t(j);
        count += seen(j);
    }
    if (count == range.high - range.low) return;
    in_columns<T>(wide, [&](int64_t e, auto vectors) {
        constexpr int N = decltype(vectors)::value, W = kLanes<T>;
        Vec<T> whole[N] = {};
        for (int64_t begin = range.low, at = 0; begin < range.high; begin = next_run(begin)) {
            Vec<T> sum[N] = {};
            for (; at < count && keys[at] < next_run(begin); at++) {
                const Vec<T> weight = all(p[keys[at]]);
                const char* row = use.values + keys[at] * use.stride;
                with_values(use, [&](auto of) {
                    constexpr Kind K = decltype(of)::kind;
                    const Vec<T> scale = all(scale_at<T, K>(row + wide * size_of(K)));
                    for (int i = 0; i < N; i++) {
                        const Vec<T> v = load_as<T, K>(row + (e + i * W) * size_of(K));
                        sum[i] = fma(weight, scaled<K>(v, scale), sum[i]);
                    }
                });
            }
            for (int i = 0; i < N; i++) whole[i] = begin > range.low ? whole[i] + sum[i] : sum[i];
        }
        for (int i = 0; i < N; i++) store(out + e + i * W, whole[i]);
    });
}

template <class T>
REGARD_INLINE void leave_out_hidden(const Work<T>& w, const Tile& t, const State<T>* parts,
                                    const Operands<T>& use, T* part) {
    if (finite(part, t.height * w.wide)) return;
    for (int64_t r = 0; r < t.height; r++)
        if (!again(parts[r]) && !finite(part + r * w.wide, w.wide))
            accumulate_visible(seen_by(w, t, r), w.s.strip + r * kStrip<T>, use, w.wide,
                               t.visible.keys, part + r * w.wide);
}

// Exponentials of a row as its weights so far, numbers of N, and the maximum they are relative to.
template <class N, class T>
REGARD_INLINE void keep_exponentials(const Work<T>& w, const Tile& t, int64_t r, State<T> part) {
    if (!w.q.weights || nothing(part) || again(part)) return;
    N* weights = (N*)w.q.weights + index_of(w.q, w.s.row[t.row + r]) * w.q.S + t.chunk.k0;
    for (int64_t j = t.visible.keys.low; j < t.visible.keys.high; j++)
        weights[j] = N(w.s.strip[r * kStrip<T> + j]);
    w.s.chunk_maxima[(t.row + r) * w.chunks + t.chunk.k0 / kChunk] = part.maximum;
}

// Pass 4: the tile's part joins the state of each row, or is stored as one of its partial states.
template <class T>
REGARD_INLINE void merge_tile(const Work<T>& w, const Tile& t, const State<T>* parts, const T* part,
                              const Partial<T>& partial) {
    for (int64_t r = 0; r < t.height; r++) {
        const int64_t row = t.row + r, chunk = t.chunk.k0 / kChunk;
        const T* out = part + r * w.wide;
        keep_exponentials<T>(w, t, r, parts[r]);
        if (partial.at) {
            partial.state(chunk, row) = parts[r];
            for (int64_t e = 0; e < w.wide; e++) partial.out(chunk, row)[e] = out[e];
        } else if (out == w.s.out + row * w.wide) {
            w.s.states[row] = parts[r];  // the first part is in place already
        } else {
            merge_part(w.s.states[row], w.s.out + row * w.wide, parts[r], out, w.wide, w.how.unit);
        }
    }
}

}  // namespace
