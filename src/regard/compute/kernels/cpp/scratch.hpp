// The memory that a piece of work computes in, and what its passes share.
#pragma once
#include "softmax.hpp"

namespace {

// NaN and infinite values, which never meet a weight (retry_float64.hpp).
template <class T> struct Specials {
    T* sums;    // (rows, E): those that a row sees, added up; 0 where there are none
    T* chunk;   // (E): the same for the keys of a chunk
    T* values;  // (keys, E): those of a chunk; 0 for all others
    uint8_t *in_key, *in_value;  // (keys): whether there is one in a key, in a value
};

template <class T> struct Scratch {
    T *queries, *out, *part, *strip, *bias, *keys, *values, *rows, *chunk_maxima;
    State<T>* states;
    Row* row;
    uint64_t* bits;
    Specials<T> specials;  // room for a retry
    size_t size;

    // at == nullptr: only the size.
    Scratch(const Request& q, char* at, bool retry) : specials(), size(0) {
        const int64_t wide = padded(q.E, kLanes<T>);
        const auto take = [&](auto*& to, int64_t count) {
            to = at ? (decltype(to + 0))(at + size) : nullptr;
            // One of no numbers has an address of its own: `merge_tile` compares them.
            size += size_t(padded(larger_of(count * int64_t(sizeof *to), 1), 64));
        };
        take(queries, kTask * q.D);
        take(out, kTask * wide);
        take(part, kTile * wide);
        take(strip, kTile * kStrip<T>);
        take(bias, kStrip<T>);
        take(keys, kChunk * q.D);
        take(values, kChunk * wide);
        take(rows, kLanes<T> * padded(q.D, kLanes<T>));
        take(chunk_maxima, q.weights ? kTask * q.chunks() : 0);
        take(states, kTask);
        take(row, kTask);
        take(bits, words_of(q, kTile));
        if (!retry) return;
        take(specials.sums, kTask * wide);
        take(specials.chunk, wide);
        take(specials.values, kChunk * wide);
        take(specials.in_key, kChunk);
        take(specials.in_value, kChunk);
    }
};

// The state of each row after each chunk, where keys are split over threads.
template <class T> struct Partial {
    char* at;
    int64_t rows, wide;
    int64_t one() const { return padded(int64_t(2 * sizeof(State<T>) + sizeof(T) * wide), 64); }
    State<T>& state(int64_t chunk, int64_t r) const {
        return *(State<T>*)(at + (chunk * rows + r) * one());
    }
    T* out(int64_t chunk, int64_t r) const { return (T*)(&state(chunk, r) + 2); }
};

// A row's state on its way from one part of the keys to the next: a State, then E numbers.
template <class T> REGARD_INLINE int64_t carried_size(const Request& q) {
    return int64_t(sizeof(State<T>)) + q.E * int64_t(sizeof(T));
}

template <class T> struct Operands;

template <class T> struct Work {
    typedef T Number;
    typedef Operands<T> Use;
    const Request& q;
    const int64_t b, g, rows, wide, chunks;
    const Softmax<T> how;
    const T sign;  // of the scale: goes into the queries
    const Scratch<T> s;

    Work(const Request& request, int64_t b, int64_t g, int64_t rows, char* at, bool retry = false)
        : q(request), b(b), g(g), rows(rows), wide(padded(q.E, kLanes<T>)), chunks(q.chunks()),
          how(softmax_of<T>(q)), sign(q.scale < 0    ? T(-1)
                                      : q.scale == 0 ? T(0)
                                                     : T(1)),
          s(q, at, retry) {}

    int64_t query_size() const { return q.D; }  // in numbers, as `start_rows` leaves them

    void load_query(int64_t r) const {
        const Row& row = s.row[r];
        T* query = s.queries + r * q.D;
        load_row(query, q.query.at(b, row.h, row.i), q.query.column, q.query.kind, q.D);
        if (sign != 1)
            for (int64_t d = 0; d < q.D; d++) query[d] *= sign;
    }
};

}  // namespace
