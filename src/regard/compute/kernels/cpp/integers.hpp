// int8 by dot instructions, for targets that have them: the passes of tile.hpp over integers.
//
// A row of keys or of values is integers times one scale. A query, and the exponentials of a chunk
// times their values' scales, are rounded to integers relative to the largest of the row: 24 bits, or
// 16 if the result is of a half type. They are P digits of 8 bits. Products of digits and integers are
// added exactly, whatever the order; the scales come last. Four neighbours share 32 bits: along D in
// queries and keys, along keys in weights and values.
#pragma once
#include "finish.hpp"
#include "tile.hpp"

#if defined(__AVX512VNNI__)
namespace {

typedef Bits<float> Cells;  // of four integers

constexpr int kCellLanes = kLanes<float>;
constexpr int64_t kCellPanel = kPanel<float>;
constexpr int64_t kByteStrip = kStrip<float>;

REGARD_INLINE Cells cells_at(const void* p) { return (Cells)load((const float*)p); }
REGARD_INLINE Cells all_cells(const void* p) { return number_at<int32_t>(p) - Cells{}; }
REGARD_INLINE constexpr int64_t cells_of(int64_t n) { return (n + 3) / 4; }

// Sums of digits times integers, the digits put together.
template <int P> REGARD_INLINE Vec<float> joined(const Cells (&sums)[P]) {
    const auto number = [&](int p)
                            REGARD_LAMBDA { return __builtin_convertvector(sums[p], Vec<float>); };
    Vec<float> whole = fma(number(1), all(0x1p8f), number(0));
    if constexpr (P > 2) whole = fma(number(2), all(0x1p16f), whole);
    return whole;
}

// The power of two that makes integers of at most `bits` bits of numbers up to the one with these
// bits; a NaN where that is no finite number. `room` is at least 1, the share that must be left.
REGARD_INLINE float power_for(uint32_t most, int bits, float room) {
    if (most >= 0x7f800000) return __builtin_nanf("");
    return float(bits + 126 - int(bits_of(float_of(most) * room) >> 23));
}
// The largest of whole vectors of numbers as bits; not a finite number's if one is none or negative.
REGARD_INLINE uint32_t largest_bits(const float* x, int64_t from, int64_t to) {
    typedef Modular<float> Unsigned;
    Unsigned most = {};
    for (int64_t j = from; j < to; j += kCellLanes) {
        const Unsigned bits = (Unsigned)load(x + j);
        most = bits > most ? bits : most;
    }
    uint32_t largest = 0;
    for (int i = 0; i < kCellLanes; i++) largest = most[i] > largest ? most[i] : largest;
    return largest;
}

// A query as digits: their sums, and the power of two that they are multiplied by.
template <int P> struct Digits {
    int32_t sums[P];
    float power;
};

struct KeyPanels {
    const uint32_t* cells;  // nullptr: keys are not packed
    const float* scales;
};

struct ByteOperands {
    KeyPanels panels;
    const char* values;
    int64_t stride, count;

    bool known() const { return values; }
};

template <int P> struct ByteWork : Work<float> {
    typedef ByteOperands Use;
    int32_t* query_digits;  // of kFew rows: cell by cell, those of each row
    Digits<P>* digits;
    uint32_t* key_cells;
    float *key_scales, *value_scales, *scaled;
    uint8_t* weight_digits;
    size_t size;

    ByteWork(const Request& request, int64_t b, int64_t g, int64_t count, char* at)
        : Work<float>(request, b, g, count, at), size(s.size) {
        const auto take = [&](auto*& to, int64_t count) {
            to = at ? (decltype(to + 0))(at + size) : nullptr;
            size += size_t(padded(count * int64_t(sizeof *to), 64));
        };
        take(query_digits, kTask * query_size());
        take(digits, kTask);
        take(key_cells, kChunk * cells_of(q.D));
        take(key_scales, kChunk);
        take(value_scales, kByteStrip);
        take(scaled, kByteStrip);
        take(weight_digits, kTile * P * kByteStrip);
    }

    int64_t query_size() const { return P * cells_of(q.D); }
};

// A packed key head: keys in panels, and their scales.
struct PackedBytes {
    uint32_t* keys;
    float* scales;
    size_t size;

    PackedBytes(const Request& q, const char* at) : size(0) {
        const auto take = [&](auto*& to, int64_t columns) {
            to = at ? (decltype(to + 0))(at + size) : nullptr;
            size += (size_t(padded(q.S, kCellPanel)) * size_t(columns) * 4 + 63) / 64 * 64;
        };
        take(keys, cells_of(q.D));
        take(scales, 1);
    }
};

// Calls f(c, cells number c) for all cells of kCellLanes keys from number j on, in order, lanes along
// the keys; their integers are 128 too large, so that none is negative.
template <class F>
REGARD_NESTED void for_turned_cells(const Request& q, const Chunk& c, int64_t j, F f) {
    constexpr int W = kCellLanes;
    const int64_t step = q.key.row;
    const char* const from = q.key.at(c.b, c.g, c.k0 + j);
    const auto cell = [&](int64_t d, int i, Vec<float> cells)
                          REGARD_LAMBDA { f(d / 4 + i, (Cells)cells ^ kCellOffset); };
    int64_t d = 0;
    if (j + W <= c.n)
        for (; d + kBytes <= q.D; d += kBytes)
            turn<float>(from + d, step,
                        [&](auto i, Vec<float> cells) REGARD_LAMBDA { cell(d, i.value, cells); });
    for (; d < q.D; d += kBytes) {
        alignas(64) char rows[W * kBytes];
        for (int k = 0; k < W; k++)
            store_bytes(rows + k * kBytes,
                        load_bytes(from + k * step + d, j + k < c.n ? q.D - d : 0));
        turn<float>(rows, kBytes, [&](auto i, Vec<float> cells) REGARD_LAMBDA {
            if (d + 4 * i.value < q.D) cell(d, i.value, cells);
        });
    }
}

// The scales of rows from … to − 1 of a chunk of keys or values, 0 from n on.
static void load_scales(const Array& array, int64_t columns, const Chunk& c, int64_t from,
                        int64_t to, float* scales) {
    const char* at = array.at(c.b, c.g, c.k0) + columns;
    for (int64_t j = from; j < to; j++)
        scales[j] = j < c.n ? number_at<float>(at + j * array.row) : 0.0f;
}

REGARD_OUTERMOST void pack_key_cells(const Request& q, const Chunk& c, uint32_t* to,
                                     float* scales) {
    constexpr int64_t P = kCellPanel;
    for (int64_t j = 0; j < padded(c.n, P); j += kCellLanes) {
        uint32_t* panel = to + j / P * P * cells_of(q.D) + j % P;
        for_turned_cells(q, c, j, [&](int64_t i, Cells cells) REGARD_LAMBDA {
            store_bytes(panel + i * P, cells);
        });
    }
    load_scales(q.key, q.D, c, 0, padded(c.n, P), scales);
}

static void pack_bytes(const Request& q, int64_t b, int64_t g, int64_t number, char* at) {
    const PackedBytes packed(q, at);
    const Chunk chunk = chunk_of(q, b, g, number);
    pack_key_cells(q, chunk, packed.keys + chunk.k0 * cells_of(q.D), packed.scales + chunk.k0);
}

template <int P> static size_t byte_scratch_bytes(const Request& q) {
    const size_t own = ByteWork<P>(q, 0, 0, 0, nullptr).size;
    const size_t retry = Scratch<double>(q, nullptr, true).size;
    return (own > retry ? own : retry) + 64;
}
static size_t packed_bytes_size(const Request& q) { return PackedBytes(q, nullptr).size; }

template <int P>
REGARD_INLINE ByteOperands operands_of(const ByteWork<P>& w, const Chunk& chunk, const char* packed,
                                       bool few) {
    const Request& q = w.q;
    KeyPanels panels = {};
    if (packed) {
        const PackedBytes head(q, packed);
        panels = {head.keys + chunk.k0 * cells_of(q.D), head.scales + chunk.k0};
    } else if (!few) {
        pack_key_cells(q, chunk, w.key_cells, w.key_scales);
        panels = {w.key_cells, w.key_scales};
    }
    return {panels, q.value.at(w.b, w.g, chunk.k0), q.value.row, chunk.n};
}

// A query as digits. The first one is at most 127, as the others are, so a little must be left.
template <int P> static void write_digits(const ByteWork<P>& w, int64_t r) {
    constexpr int32_t borrow = P == 3 ? 0x808080 : 0x8080;
    const int64_t D = w.q.D, wide = padded(D, kCellLanes);
    float* const x = w.s.rows;  // whole vectors
    clear(x, wide);
    __builtin_memcpy(x, w.s.queries + r * D, size_t(D) * sizeof(float));
    uint32_t most = 0;
    for (int64_t d = 0; d < D; d++) most = larger_of(bits_of(x[d]) & 0x7fffffff, most);
    Digits<P>& own = w.digits[r];
    own = {{}, power_for(most, 8 * P - 1, 1.004f)};
    int32_t* const to = w.query_digits + r / kFew * kFew * w.query_size() + r % kFew * P;
    for (int64_t d = 0; d < wide; d += kCellLanes) {
        const Cells number = to_integers(times_power(load(x + d), own.power));
        // From −128 to 127: 128 is added to all but the first, and subtracted without a carry.
        const Cells all_digits = (number + borrow) ^ borrow;
        for (int p = 0; p < P; p++) {
            int8_t digits[kCellLanes];
            store_lowest(digits, all_digits >> 8 * p);
            for (int i = 0; i < kCellLanes; i++) own.sums[p] += digits[i];
            for (int64_t c = d / 4; c < smaller_of(d / 4 + 4, cells_of(D)); c++)
                to[c * kFew * P + p] = number_at<int32_t>(digits + 4 * c - d);
        }
    }
}

// Sets rows and states; returns the queries as digits.
template <int P>
REGARD_INLINE const int32_t* start_rows(const ByteWork<P>& w, const Piece& piece) {
    for_rows(w.q, piece, [&](int64_t r, Row row) {
        w.s.row[r] = row;
        w.s.states[r] = kNothing<float>;  // and an output that is not written yet
        w.load_query(r);
        write_digits(w, r);
    });
    return w.query_digits;
}

// Sums that make up for the offset of keys.
template <int R, int P>
REGARD_INLINE void start_sums(const Digits<P>* digits, Cells (&sums)[R][P]) {
    each<R>([&](auto r) REGARD_LAMBDA {
        for (int p = 0; p < P; p++) sums[r.value][p] = -128 * digits[r.value].sums[p] - Cells{};
    });
}
template <int R, int P>
REGARD_INLINE void store_scores(const Digits<P>* digits, const Cells (&sums)[R][P],
                                Vec<float> scale, float* strip) {
    each<R>([&](auto r) REGARD_LAMBDA {
        store(strip + r.value * kByteStrip,
              times_power(joined(sums[r.value]), -digits[r.value].power) * scale);
    });
}
template <int R, int P>
REGARD_INLINE void add_cells(const int32_t* queries, int64_t c, Cells cells, Cells (&sums)[R][P]) {
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            sums[r][p] = dot_integers(sums[r][p], cells,
                                      all_cells(queries + (c * kFew + r) * P + p));
}

// Queries against keys, a panel at a time.
template <int R, int P>
REGARD_OUTERMOST void scores_of_panels(const ByteWork<P>& w, const int32_t* queries,
                                       const Digits<P>* digits, KeyPanels panels, KeyRange keys,
                                       float* strip, const Ahead* ahead) {
    constexpr int64_t W = kCellLanes;
    const int64_t cells = cells_of(w.q.D);
    for (int64_t j = keys.low / kCellPanel * kCellPanel; j < keys.high; j += W) {
        ask_for<R>(ahead, j, W);
        const uint32_t* panel = panels.cells + j / kCellPanel * kCellPanel * cells + j % kCellPanel;
        Cells sums[R][P];
        start_sums(digits, sums);
        for (int64_t c = 0; c < cells; c++)
            add_cells(queries, c, cells_at(panel + c * kCellPanel), sums);
        store_scores(digits, sums, load(panels.scales + j), strip + j);
    }
}

// The same from keys that are not packed.
template <int R, int P>
REGARD_OUTERMOST void scores_of_bytes(const ByteWork<P>& w, const Chunk& chunk,
                                      const int32_t* queries, KeyRange keys, const Ahead* ahead) {
    constexpr int64_t W = kCellLanes;
    const int64_t first = keys.low / kCellPanel * kCellPanel;
    load_scales(w.q.key, w.q.D, chunk, first, padded(keys.high, W), w.key_scales);
    for (int64_t j = first; j < keys.high; j += W) {
        ask_for<R>(ahead, j, W);
        Cells sums[R][P];
        start_sums(w.digits, sums);
        const auto soon = [&](int64_t line) REGARD_LAMBDA {
            ask_for_line(w.q.key, chunk, kChunk + j, line);
            ask_for_line(w.q.value, chunk, j, line);
        };
        soon(cells_of(w.q.D));  // 16 rows have a line for each cell, and one for their scales
        for_turned_cells(w.q, chunk, j, [&](int64_t c, Cells cells) REGARD_LAMBDA {
            soon(c);
            add_cells(queries, c, cells, sums);
        });
        store_scores(w.digits, sums, load(w.key_scales + j), w.s.strip + j);
    }
}

template <int P>
REGARD_INLINE void score_tile(const ByteWork<P>& w, const Tile& t, const int32_t* queries,
                              KeyPanels panels) {
    Ahead ahead[kTile];
    bias_ahead(w, t, ahead);
    if (!panels.cells)
        return with_number<kFew>(t.height, [&](auto rows) {
            scores_of_bytes<decltype(rows)::value>(w, t.chunk, queries, t.visible.keys, ahead);
        });
    for (int64_t r = 0; r < t.height; r += kFew)
        with_number<kFew>(smaller_of(kFew, t.height - r), [&](auto rows) {
            scores_of_panels<decltype(rows)::value>(w, queries + r * w.query_size(),
                                                    w.digits + t.row + r, panels, t.visible.keys,
                                                    w.s.strip + r * kByteStrip, ahead + r);
        });
}

// A row's exponentials times the values' scales as digits; returns the power of two that they are
// multiplied by, NaN where the row sees a value that is no number.
template <int P>
static float weigh(const ByteWork<P>& w, const Tile& t, int64_t r, const float* exponentials,
                   uint8_t* digits) {
    const KeyRange keys = whole_vectors<float>(t.visible.keys);
    float* const x = w.scaled;
    for (int64_t j = keys.low; j < keys.high; j += kCellLanes)
        store(x + j, load(exponentials + j) * load(w.value_scales + j));
    uint32_t most = largest_bits(x, keys.low, keys.high);
    if (most >= 0x7f800000) {  // perhaps hidden
        const Seen<float> seen = seen_by(w, t, r);
        for (int64_t j = keys.low; j < keys.high; j++)
            if (!seen(j)) x[j] = 0;
        most = largest_bits(x, keys.low, keys.high);
    }
    // Rounding to fewer digits than float32 has must not need one more.
    const float power = power_for(most, 8 * P, P == 3 ? 1 : 1.0001f);
    for (int64_t j = keys.low; j < keys.high; j += kCellLanes) {
        const Cells number = to_integers(times_power(load(x + j), power));
        for (int p = 0; p < P; p++) store_lowest(digits + p * kByteStrip + j, number >> 8 * p);
    }
    return power;
}

// Weights times the columns e … of values, four rows of memory at a time.
template <int R, int P>
REGARD_OUTERMOST void blend_bytes(const ByteWork<P>& w, const Chunk& chunk, bool once,
                                  const uint8_t* weights, const float* powers,
                                  const ByteOperands& use, KeyRange keys, int64_t e,
                                  int64_t columns, float* out, int64_t wide) {
    constexpr int N = 4;
    Cells sums[R][P][N] = {};
    for (int64_t j = keys.low / N * N; j < keys.high; j += N) {
        for (int64_t line = 0; once && 16 * line < w.q.E + 4; line++) {
            ask_for_line(w.q.key, chunk, kChunk + j, line);
            ask_for_line(w.q.value, chunk, kChunk + j, line);
        }
        const auto row = [&](int64_t i) REGARD_LAMBDA {  // beyond the last one, weights are 0
            return load_bytes(use.values + smaller_of(i, use.count - 1) * use.stride + e, columns);
        };
        Cells cells[N] = {row(j), row(j + 1), row(j + 2), row(j + 3)};
        weave_bytes(cells);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) {
                const Cells digit = all_cells(weights + (r * P + p) * kByteStrip + j);
                for (int n = 0; n < N; n++)
                    sums[r][p][n] = dot_integers(sums[r][p][n], digit, cells[n]);
            }
    }
    each<R * N>([&](auto place) REGARD_LAMBDA {
        constexpr int r = place.value / N, n = place.value % N;
        Cells of[P];
        for (int p = 0; p < P; p++) of[p] = sums[r][p][n];
        const Vec<float> x = times_power(joined(of), -powers[r]);
        // Four columns of every sixteen.
        for (int64_t at = 0; at < kCellLanes && e + N * at < wide; at += N)
            __builtin_memcpy(out + r * wide + e + N * at + N * n, (const float*)&x + at,
                             N * sizeof(float));
    });
}

template <int P>
REGARD_INLINE void accumulate_values(const ByteWork<P>& w, const Tile& t, const ByteOperands& use,
                                     float* part) {
    constexpr int64_t most = 2;  // rows whose sums fit registers
    const Request& q = w.q;
    const KeyRange keys = t.visible.keys, whole = whole_vectors<float>(keys);
    load_scales(q.value, q.E, t.chunk, whole.low, whole.high, w.value_scales);
    float powers[kTile];
    for (int64_t r = 0; r < t.height; r++)
        powers[r] = weigh(w, t, r, w.s.strip + r * kByteStrip,
                          w.weight_digits + r * P * kByteStrip);
    for (int64_t e = 0; e < q.E; e += kBytes)
        for (int64_t r = 0; r < t.height; r += most)
            with_number<most>(smaller_of(most, t.height - r), [&](auto rows) {
                const bool once = !use.panels.cells && e == 0 && r == 0;
                blend_bytes<decltype(rows)::value>(
                    w, t.chunk, once, w.weight_digits + r * P * kByteStrip, powers + r, use, keys,
                    e, q.E - e, part + r * w.wide, w.wide);
            });
}

// Hidden values have met no weight.
template <int P>
REGARD_INLINE void leave_out_hidden(const ByteWork<P>&, const Tile&, const State<float>*,
                                    const ByteOperands&, float*) {}

}  // namespace
#endif
