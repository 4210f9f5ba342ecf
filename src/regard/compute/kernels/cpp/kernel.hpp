// Streaming attention for one CPU target, included by each target_*.cpp.
//
// Every chunk of keys is computed from zero with a maximum of its own and merged into the row's
// state from left to right; every lane adds in one order. So a row's bytes do not depend on the
// rows, threads or tiles it was computed with.
//
// Per tile of rows and chunk of keys (tile.hpp):
//   visible range       the keys that any row of the tile may see; none: the next tile
//   score tile          strip = Q Kᵀ, lanes along keys, K packed in panels of two vectors
//   softmax tile        maximum, exponentials and their sum, row by row; hidden keys are −∞
//   accumulate values   A = strip V, lanes along the value's columns
//   merge               (maximum, sum, O) with (maximum, sum, A)
#pragma once
#include "peak_flops.hpp"
#include "small.hpp"
#if defined(REGARD_DOTS)  // a unit that has the forward passes by dot instructions alone
#include "integers.hpp"
#include "pairs.hpp"
#else
#include "backward.hpp"
#include "retry_float64.hpp"
#include "rotate.hpp"
#include "weights.hpp"
#endif
#include "subnormals.hpp"

namespace {

// A packed key head: keys in panels, values not read in place, and scratch rows for each chunk.
template <class T> struct Packed {
    T *keys, *values, *rows;
    size_t size;

    Packed(const Request& q, const char* at) : size(0) {
        const auto take = [&](T*& to, int64_t rows, int64_t columns) {
            to = at ? (T*)(at + size) : nullptr;
            size += (size_t(rows) * size_t(columns) * sizeof(T) + 63) / 64 * 64;
        };
        take(keys, padded(q.S, kPanel<T>), q.D);
        take(values, in_place<T>(q.value, q.E) ? 0 : q.chunks() * kChunk, padded(q.E, kLanes<T>));
        take(rows, q.chunks() * kLanes<T>, padded(q.D, kLanes<T>));
    }
};

template <class T>
static void pack(const Request& q, int64_t b, int64_t g, int64_t number, char* at) {
    const FlushToZero<T> passes;  // as where rows are made of integers on the way
    const Packed<T> packed(q, at);
    const Chunk chunk = chunk_of(q, b, g, number);
    if (!in_place<T>(q.value, q.E))
        pack_values(q, chunk, packed.values + chunk.k0 * padded(q.E, kLanes<T>));
    pack_keys(q, chunk, packed.keys + chunk.k0 * q.D,
              packed.rows + number * kLanes<T> * padded(q.D, kLanes<T>));
}

// Keys and values of a chunk: from the packed head, or packed now; few rows take both as they are.
template <class T>
REGARD_INLINE Operands<T> operands_of(const Work<T>& w, const Chunk& chunk, const char* packed,
                                      bool few) {
    const Request& q = w.q;
    const Packed<T> head(q, packed);
    const int64_t stride = w.wide * int64_t(sizeof(T));
    Operands<T> use = {few ? nullptr : w.s.keys, (const char*)w.s.values, stride};
    if (packed) use.panels = head.keys + chunk.k0 * q.D;
    else if (!few) pack_keys(q, chunk, w.s.keys, w.s.rows);
    const char* const values = q.value.at(w.b, w.g, chunk.k0);
    const bool there = few ? direct<T>(q.value, q.E) : in_place<T>(q.value, q.E);
    // Where every vector lies across two lines of memory, a copy is worth it for so many rows.
    const bool across = kBytes == 64 && (uintptr_t(values) | uintptr_t(q.value.row)) % 64;
    if (there && !(across && !few && w.rows * q.E >= 96 * 128)) {
        use.values = values;
        use.stride = q.value.row;
        use.kind = q.value.kind;
    } else if (packed && !there) {
        use.values = (const char*)(head.values + chunk.k0 * w.wide);
    } else {
        pack_values(q, chunk, w.s.values);
    }
    return use;
}

// Sets rows and states; returns the queries as rows of D numbers, in place or copied.
template <class T> REGARD_INLINE const T* start_rows(const Work<T>& w, const Piece& piece) {
    const Request& q = w.q;
    const int64_t one = q.D * int64_t(sizeof(T));
    const char* const first = q.query.at(w.b, w.g * (q.H / q.G) + piece.first / q.L,
                                         piece.first % q.L);
    const bool direct = q.query.kind == kind_of<T>() && q.query.column == int64_t(sizeof(T)) &&
                        q.query.row == one && (q.H == q.G || q.query.head == q.L * one) &&
                        uintptr_t(first) % alignof(T) == 0 && w.sign == 1;
    for_rows(q, piece, [&](int64_t r, Row row) {
        w.s.row[r] = row;
        w.s.states[r] = kNothing<T>;  // and an output that is not written yet
        if (!direct) w.load_query(r);
    });
    return direct ? (const T*)first : w.s.queries;
}

// Merges the states that earlier parts of the keys left, in their order.
template <class T> static void take_states(const Work<T>& w) {
    const Request& q = w.q;
    const int64_t one = carried_size<T>(q), rows = q.B * q.H * q.L;
    for (int64_t r = 0; r < w.rows; r++)
        for (int64_t n = 0; n < q.before_count; n++) {
            const char* from = q.before + (n * rows + index_of(q, w.s.row[r])) * one;
            State<T> state;
            __builtin_memcpy(&state, from, sizeof state);
            clear(w.s.part, w.wide);
            __builtin_memcpy(w.s.part, from + sizeof state, size_t(one) - sizeof state);
            merge_part(w.s.states[r], w.s.out + r * w.wide, state, w.s.part, w.wide, w.how.unit);
        }
}

// Leaves the states to what comes next: those of all chunks together, number 0, or of one alone.
template <class T> static void leave_states(const Work<T>& w, int64_t number) {
    const Request& q = w.q;
    bool small[kTask] = {};
    find_small(w, q.apart ? number : 0, q.apart ? number + 1 : w.chunks, small);
    const int64_t one = carried_size<T>(q);
    char* const after = q.after + number * q.B * q.H * q.L * one;
    for (int64_t r = 0; r < w.rows; r++) {
        T* const out = w.s.out + r * w.wide;
        if (nothing(w.s.states[r])) clear(out, w.wide);
        if (small[r]) w.s.states[r] = kAgain<T>;
        char* to = after + index_of(q, w.s.row[r]) * one;
        __builtin_memcpy(to, &w.s.states[r], sizeof(State<T>));
        __builtin_memcpy(to + sizeof(State<T>), out, size_t(one) - sizeof(State<T>));
        w.s.states[r] = kNothing<T>;
    }
}

#if defined(REGARD_DOTS)
// Ends all rows of a piece, which are the same to the target without dot instructions.
REGARD_INLINE void finish_rows(const Work<float>& w, const Piece& piece, char* at) {
    regard_target_avx512.kernels[0].finish(w.q, piece, at);
}
#else
// Ends all rows of a piece; those that left the range of T are computed again.
template <class T> REGARD_INLINE void finish_rows(const Work<T>& w, const Piece& piece, char* at) {
    const KeepSubnormals<T> results;
    const Request& q = w.q;
    Retries retries;
    for (int64_t r = 0; r < w.rows; r++)
        if (nothing(w.s.states[r])) clear(w.s.out + r * w.wide, w.wide);
    bool small[kTask] = {};
    find_small(w, 0, w.chunks, small);
    const bool all_finite = finite(w.s.out, w.rows * w.wide);
    const bool divided_only = !q.sink && !q.lse && !q.weights && stored_directly<T>(q);
    for (int64_t r = 0; r < w.rows; r++) {
        const State<T> state = w.s.states[r];
        T* out = w.s.out + r * w.wide;
        // Nearly every row has nothing left but the division.
        if (divided_only && all_finite && state.sum > 0 && in_range(state, state.maximum))
            divide(out, divisor_of(w.how, state.divisor), (T*)place_of(q, w.s.row[r]), w.wide);
        else finish_row(w, r, state, out, w.s.chunk_maxima + r * w.chunks, retries);
        if (small[r]) retries.add_small(r);
    }
    if (q.again) {  // not all keys are here
        for (int64_t n = 0; n < retries.count; n++)
            q.again[index_of(q, w.s.row[retries.list[n].row])] = 1;
        return;
    }
    if (q.sigmoid) retry_in_extended_range(w, retries);
    else if (retries.count) retry_in_float64(q, piece, retries, at);
}
// The same for rows that are in scratch.
template <class T> static void finish(const Request& q, const Piece& piece, char* at) {
    finish_rows(Work<T>(q, piece.b, piece.g, piece.last - piece.first, at), piece, at);
}
#endif

// W: Work<T>, PairWork or ByteWork<P>.
template <class W>
static void attend(const Request& q, const Piece& piece, int64_t begin, int64_t end,
                   const char* packed, char* at, char* partial_at) {
    typedef typename W::Number T;
    const W w(q, piece.b, piece.g, piece.last - piece.first, at);
    const Partial<T> partial = {partial_at, w.rows, w.wide};
    const bool few = !packed && w.rows <= kFew;  // turning keys on the way costs less than packing
    const auto* queries = start_rows(w, piece);
    const FlushToZero<T> passes;
    if (q.before_count) take_states(w);
    for (int64_t number = begin; number < end; number++) {
        if (q.stopped(q.state)) return;
        const Chunk chunk = chunk_of(q, w.b, w.g, number);
        for (int64_t r = 0; r < w.rows; r++) {
            if (partial_at) partial.state(number, r) = kNothing<T>;
            if (q.weights) w.s.chunk_maxima[r * w.chunks + number] = -infinity<T>();
        }
        typename W::Use use = {};
        for (int64_t row = 0; row < w.rows; row += kTile) {
            Tile t = {row, smaller_of(kTile, w.rows - row), chunk, {}};
            bool given_up = !partial_at, first = !partial_at;
            for (int64_t r = row; r < row + t.height; r++) {
                given_up &= again(w.s.states[r]);
                first &= nothing(w.s.states[r]);
            }
            if (given_up) continue;
            t.visible = visible_range(q, w.s.row + row, t.height, chunk, w.s.bits);
            if (t.visible.keys.low >= t.visible.keys.high) continue;
            if (!use.known()) use = operands_of(w, chunk, packed, few);
            State<T> parts[kTile];
            // The first part of a whole tile needs no merging: it is the rows' output so far.
            T* part = first ? w.s.out + row * w.wide : w.s.part;
            REGARD_PASS(scores) score_tile(w, t, queries + row * w.query_size(), use.panels);
            REGARD_PASS(softmax) softmax_tile(w, t, parts);
            REGARD_PASS(values) accumulate_values(w, t, use, part);
            REGARD_PASS(values) leave_out_hidden(w, t, parts, use, part);
            REGARD_PASS(merge) merge_tile(w, t, parts, part, partial);
        }
        if (q.apart) leave_states(w, number);
    }
    if (q.after && !q.apart) leave_states(w, 0);
    if (!q.after && !partial_at) finish_rows(w, piece, at);
}

// Merges the partial states of every chunk in the order of `attend`, left to right.
template <class T>
static void merge(const Request& q, const Piece& piece, const char* partial_at, char* at) {
    const Work<T> w(q, piece.b, piece.g, piece.last - piece.first, at);
    const Partial<T> partial = {const_cast<char*>(partial_at), w.rows, w.wide};
    const FlushToZero<T> passes;
    for_rows(q, piece, [&](int64_t r, Row row) {
        w.s.row[r] = row;
        w.s.states[r] = kNothing<T>;
        REGARD_PASS(merge)
        for (int64_t chunk = 0; chunk < w.chunks; chunk++) {
            merge_part(w.s.states[r], w.s.out + r * w.wide, partial.state(chunk, r),
                       partial.out(chunk, r), w.wide, w.how.unit);
            if (q.weights) w.s.chunk_maxima[r * w.chunks + chunk] = partial.state(chunk, r).maximum;
        }
    });
    finish_rows(w, piece, at);
}

template <class T> static size_t scratch_bytes(const Request& q) {
    const size_t own = Scratch<T>(q, nullptr, false).size;
    const size_t retry = Scratch<double>(q, nullptr, true).size;
    return (own > retry ? own : retry) + 64;
}
template <class T> static size_t packed_bytes(const Request& q) {
    return Packed<T>(q, nullptr).size;
}
template <class T> static size_t partial_bytes(const Request& q, int64_t rows, int64_t chunks) {
    const Partial<T> partial = {nullptr, 0, padded(q.E, kLanes<T>)};
    return size_t(partial.one()) * size_t(rows) * size_t(chunks);
}
static void exponentials(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = exp2(all(x[i]))[0];
}

#if !defined(REGARD_DOTS)
template <class T>
constexpr Kernel kKernel = {scratch_bytes<T>, packed_bytes<T>,         pack<T>,
                            attend<Work<T>>,  partial_bytes<T>,        merge<T>,
                            finish<T>,        multiply_adds<T>,        kOperations<T>,
                            kBlockKeys<T>,    sizeof(RowConstants<T>), backward_scratch_bytes<T>,
                            sums_bytes<T>,    prepare_rows<T>,         backward<T>};
#endif

}  // namespace

#define REGARD_TARGET(SYMBOL, NAME)                                                        \
    extern "C" const regard::Target SYMBOL = {                                             \
        NAME,         kLanes<float>, kTask,    kTile,   {kKernel<float>, kKernel<double>}, \
        exponentials, turn,          multiply, read_all};
