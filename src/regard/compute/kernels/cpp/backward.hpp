// The backward pass for one CPU target. Weights are computed again from lse, tile by tile: there is
// never a matrix of them. A task is a block of keys of one key head, which walks over the rows of
// its query heads, block by block:
//   score tile, value tile   P = Q Kᵀ, dP = dO Vᵀ, lanes along keys, K and V packed in panels
//   gradient tile            P = exp(scores − lse), dX = P∘(dP − δ); 0 where a key is hidden
//   sum over rows            dV += Pᵀ dO, dK += dXᵀ Q, in memory of the task's own
//   sum over keys            dQ += dX K, one block of keys after the other, on any thread
// So every sum is made in one order, with any number of threads.
//
// Hidden is absent: a NaN or an infinity never meets a weight of 0. Rows and keys that have one are
// copied with 0 in its place: where it is seen, the row's lse or δ is NaN already, but for the column
// of dV that a NaN of dO reaches (`add_specials`), and for an infinity whose weight is a number, by a
// softcap or as 0: `beyond` then asks for the reference.
#pragma once
#include "gradient_rows.hpp"
#include "subnormals.hpp"

namespace {

constexpr int64_t kBlockRows = 96;
template <class T> constexpr int64_t kBlockKeys = 512 / int64_t(sizeof(T));

template <class T> struct BackwardScratch {
    T *weights, *grads, *before_softcap;  // (rows, keys): P; dX; dX before the softcap's slope
    T *key_panels, *value_panels, *keys, *d_keys, *d_values;
    T *queries, *grad_rows, *turning, *bias;
    double *d_scale, *checks;
    Row* row;
    uint64_t* bits;
    size_t size;

    BackwardScratch(const Backward& w, char* at) : size(0) {
        const Request& q = w.q;
        constexpr int64_t R = kBlockRows, N = kBlockKeys<T>, W = kLanes<T>;
        const int64_t D = padded(q.D, W), E = padded(q.E, W);
        const auto take = [&](auto*& to, int64_t count) {
            to = at ? (decltype(to + 0))(at + size) : nullptr;
            size += size_t(padded(count * int64_t(sizeof *to), 64));
        };
        take(weights, R * N);
        take(grads, R * N);
        if (w.d_bias.data && q.softcap != 0) take(before_softcap, R * N);
        else before_softcap = nullptr;
        take(key_panels, N * q.D);
        take(value_panels, N * q.E);
        take(keys, N * D);
        take(d_keys, N * D);
        take(d_values, N * E);
        take(queries, R * D);
        take(grad_rows, R * E);
        take(turning, W * larger_of(D, E));
        take(bias, N);
        take(d_scale, R);
        take(checks, 2 * R);
        take(row, R);
        take(bits, words_of(q, padded(R, kTile)));
    }
};

// out += Σ_j weights(r, j) · row j, for `count` sums r, j in along(first, last) of neighbouring sums;
// weights as in `sum_rows`.
template <class T, int64_t Across, int64_t Along, class F>
static void accumulate(const T* weights, int64_t count, F along, const T* rows, int64_t stride,
                       int64_t wide, T* out) {
    constexpr int W = kLanes<T>;
    constexpr int Many = kTile == 12 ? 4 : 2;
    const auto block = [&](int64_t e, int64_t r, auto height, auto vectors) {
        constexpr int R = decltype(height)::value, N = decltype(vectors)::value;
        const KeyRange range = along(r, r + R);
        if (range.low >= range.high) return;
        Vec<T> sum[R][N];
        sum_rows<T, R, N, Across, Along>(weights + r * Across, (const char*)(rows + e),
                                         stride * int64_t(sizeof(T)), range.low, range.high, sum);
        T* to = out + r * wide + e;
        for (int i = 0; i < R; i++)
            for (int n = 0; n < N; n++) {
                T* place = to + i * wide + n * W;
                store(place, load(place) + sum[i][n]);
            }
    };
    const auto columns = [&](int64_t e, auto vectors) {
        int64_t r = 0;
        for (; r + kRows <= count; r += kRows) block(e, r, Number<kRows>{}, vectors);
        if (r < count)
            with_number<kRows>(count - r, [&](auto height) { block(e, r, height, vectors); });
    };
    int64_t e = 0;
    for (; e + Many * W <= wide; e += Many * W) columns(e, Number<Many>{});
    for (; e < wide; e += W) columns(e, Number<1>{});
}

// Propagates a NaN or an infinity of dO to dV of the keys that its row sees.
template <class T>
static void add_specials(const Backward& w, const Seen<T>& seen, const Row& row, KeyRange keys,
                         const T* p, T* d_values) {
    const int64_t wide = padded(w.q.E, kLanes<T>), size = size_of(w.grad_output.kind);
    for (int64_t e = 0; e < w.q.E; e++) {
        double x;
        load_row(&x, w.grad_output.at(row.b, row.h, row.i) + e * w.grad_output.column, size,
                 w.grad_output.kind, 1);
        if (x - x == 0) continue;
        for (int64_t j = keys.low; j < keys.high; j++)
            if (seen(j)) d_values[j * wide + e] += p[j] == p[j] ? T(x) : p[j];
    }
}

// Adds the gradients of a row's scores to the bias's gradient, wherever its cells lie; whether all of
// them are finite then.
template <class T>
static bool add_to_bias(const Backward& w, const Row& row, int64_t k0, KeyRange keys,
                        const T* grads) {
    constexpr int W = kLanes<T>;
    char* to = const_cast<char*>(bias_at(w.q, w.d_bias, row)) + k0 * w.d_bias.column;
    int64_t j = keys.low;
    Vec<T> rest = {};
    for (; w.d_bias.column == int64_t(sizeof(T)) && j + W <= keys.high; j += W) {
        const Vec<T> sum = load((const T*)to + j) + load(grads + j);
        rest = fma(sum, Vec<T>{}, rest);
        store((T*)to + j, sum);
    }
    T odd = sum_of<T>(rest);
    for (; j < keys.high; j++) {
        T& sum = *(T*)(to + j * w.d_bias.column);
        sum += grads[j];
        odd += sum * 0;
    }
    return odd == 0;
}

template <class T> static bool summed_in_place(const Backward& w) {
    return w.d_query && w.query_kind == kind_of<T>() && w.q.D % kLanes<T> == 0;
}

// A block of rows of one query head, and what the block of keys means to it.
template <class T> struct RowBlock {
    int64_t number, h, first, rows;  // number: among all blocks of the key head's rows
    const RowConstants<T>* known;
    T* d_query;
    KeyRange visible[(kBlockRows + kTile - 1) / kTile];  // keys of each tile, whole vectors
    KeyRange seen_keys;  // that any tile needs; empty: none
    Rows<T> queries, grad_rows;

    bool some() const { return seen_keys.low < seen_keys.high; }
    // From the first to the last row whose tile needs one of these keys.
    KeyRange seeing(int64_t first, int64_t last) const {
        KeyRange range = {rows, 0};
        for (int64_t r = 0; r < rows; r += kTile) {
            const KeyRange keys = visible[r / kTile];
            if (keys.low >= last || keys.high <= first) continue;
            range = {smaller_of(range.low, r), smaller_of(r + kTile, rows)};
        }
        return range;
    }
};

// One task: a block of keys of a key head.
template <class T> struct BackwardWork {
    static constexpr int64_t N = kBlockKeys<T>, R = kBlockRows;
    const Backward& w;
    const Request& q;
    const int64_t head, block, blocks;  // blocks: of keys
    const Chunk chunk;
    const int64_t group, each, all_blocks;  // query heads; blocks of rows of each, and of all
    const int64_t wide_d, wide_e;
    const Softmax<T> how;
    const T sign;  // of the scale
    const bool grads, in_turn, in_place;
    char* const sums;
    const BackwardScratch<T> s;
    Rows<T> keys = {};
    bool special_keys[N] = {};  // whether there is a NaN or an infinity
    bool any_special = false, beyond = false;
    bool infinite = false;  // whether an infinity of a query or a key has a finite weight

    BackwardWork(const Backward& w, int64_t b, int64_t g, int64_t block, char* sums, char* at)
        : w(w), q(w.q), head(b * q.G + g), block(block), blocks((q.S + N - 1) / N),
          chunk{b, g, block * N, smaller_of(N, q.S - block * N)}, group(q.H / q.G),
          each((q.L + R - 1) / R), all_blocks(group * each), wide_d(padded(q.D, kLanes<T>)),
          wide_e(padded(q.E, kLanes<T>)), how(softmax_of<T>(q)), sign(q.scale < 0    ? T(-1)
                                                                      : q.scale == 0 ? T(0)
                                                                                     : T(1)),
          grads(w.d_query || w.d_key || w.d_bias.data || w.d_scale),
          in_turn(w.d_query || w.d_bias.data || w.d_scale || w.checks),
          in_place(summed_in_place<T>(w)), sums(sums), s(w, at) {}

    bool last() const { return block + 1 == blocks; }
    int64_t& turn(int64_t head, int64_t block) const { return w.turns[head * blocks + block]; }

    void pack() {
        const int64_t b = chunk.b, g = chunk.g;
        for (int64_t j = 0; j < chunk.n; j++) {
            special_keys[j] = !finite_rows(q.key, b, g, chunk.k0 + j, 1, q.D, s.turning);
            any_special |= special_keys[j];
        }
        keys = rows_of(q.key, b, g, chunk.k0, chunk.n, q.D, any_special, s.keys);
        pack_panels(q.key, q.D, chunk, s.key_panels, s.turning);
        pack_panels(q.value, q.E, chunk, s.value_panels, s.turning);
    }

    // Waits until the block of keys before this one, and the head before it where heads share
    // a gradient, are done with `number` blocks of rows; false: the call is given up.
    bool wait(int64_t number) const {
        const auto reached = [&](const int64_t& count, int64_t least) {
            while (__atomic_load_n(&count, __ATOMIC_ACQUIRE) < least) {
                if (q.stopped(q.state)) return false;
                w.idle(q.state);
            }
            return true;
        };
        return (!block || reached(turn(head, block - 1), number)) &&
               (!w.in_order || !head || reached(turn(head - 1, block), all_blocks));
    }
    void done_with(int64_t number) const {
        __atomic_store_n(&turn(head, block), number, __ATOMIC_RELEASE);
    }
};

template <class T>
static RowBlock<T> row_block(const BackwardWork<T>& k, int64_t number) {
    const Request& q = k.q;
    RowBlock<T> t = {};
    t.number = number;
    t.h = k.chunk.g * k.group + number / k.each;
    t.first = number % k.each * kBlockRows;
    t.rows = smaller_of(kBlockRows, q.L - t.first);
    t.known = (const RowConstants<T>*)k.w.rows + (k.chunk.b * q.H + t.h) * q.L + t.first;
    T* const head = k.in_place ? (T*)k.w.d_query + k.head * k.group * q.L * q.D : (T*)k.sums;
    t.d_query = head + (number / k.each * q.L + t.first) * k.wide_d;
    t.seen_keys = {kBlockKeys<T>, 0};
    for (int64_t r = 0; r < t.rows; r++) k.s.row[r] = row_of(q, k.chunk.b, t.h, t.first + r);
    return t;
}

// Rows of a block, of queries and of dO, when the first tile needs them; keys with them.
template <class T> static void load_rows(BackwardWork<T>& k, RowBlock<T>& t) {
    if (t.queries.at) return;
    if (!k.keys.at) k.pack();
    bool odd_query = false, odd_grad = false;
    for (int64_t r = 0; r < t.rows; r++) {
        odd_query |= t.known[r].special_query;
        odd_grad |= t.known[r].special_grad;
    }
    const int64_t b = k.chunk.b;
    t.queries = rows_of(k.q.query, b, t.h, t.first, t.rows, k.q.D, odd_query, k.s.queries);
    t.grad_rows = rows_of(k.w.grad_output, b, t.h, t.first, t.rows, k.q.E, odd_grad, k.s.grad_rows);
}

// One row of a tile: scores become weights, products of dO and values become gradients of scores;
// all that no row of the tile sees, 0.
template <class T>
REGARD_INLINE void gradient_row(BackwardWork<T>& k, const RowBlock<T>& t, int64_t r, KeyRange whole,
                                const uint64_t* bits) {
    constexpr int64_t N = kBlockKeys<T>;
    const Row& row = k.s.row[r];
    T *p = k.s.weights + r * N, *d = k.s.grads + r * N;
    const Seen<T> seen = {row.low - k.chunk.k0, smaller_of(row.high - k.chunk.k0, k.chunk.n), bits,
                          bias_of(k.q, row, k.chunk, k.s.bias)};
    const Gains<T> to = {k.s.before_softcap ? k.s.before_softcap + r * N : nullptr,
                         k.w.d_scale ? k.s.d_scale + r : nullptr,
                         k.w.checks ? k.s.checks + 2 * r : nullptr};
    const bool hides = bits || seen.low > whole.low || seen.high < whole.high;
    const bool bent = k.how.in_logits || k.how.sigmoid || k.sign != 1 || to.before_softcap ||
                      to.d_scale;
    const auto run = [&](auto extra) {
        gradients(extra, k.how, k.sign, t.known[r], seen, whole, p, d, to);
    };
    if (bent || (hides && seen.bias)) run(Extras<true, true, true>{});
    else if (hides) run(Extras<true, false, false>{});
    else if (seen.bias) run(Extras<false, true, false>{});
    else run(Extras<false, false, false>{});
    T* const both[] = {p, d};
    for (T* x : both) {
        clear(x, whole.low);
        clear(x + whole.high, N - whole.high);
    }
    const bool special = t.known[r].special_query;
    for (int64_t j = whole.low; (special || k.any_special) && j < whole.high; j++)
        k.infinite |= seen(j) && p[j] == p[j] && (special || k.special_keys[j]);
    if (k.w.d_value && t.known[r].special_grad)
        add_specials(k.w, seen, row, {whole.low, smaller_of(whole.high, k.chunk.n)}, p,
                     k.s.d_values);
}

// Weights and gradients of scores of a block of rows: one product for all tiles, then the other, so
// that keys, then values, stay in the nearest cache.
template <class T> static void gradient_block(BackwardWork<T>& k, RowBlock<T>& t) {
    constexpr int64_t N = kBlockKeys<T>, P = kPanel<T>;
    Visible found[(kBlockRows + kTile - 1) / kTile];
    uint64_t* bits = k.s.bits;
    for (int64_t r = 0; r < t.rows; r += kTile) {
        const int64_t height = smaller_of(kTile, t.rows - r);
        Visible& f = found[r / kTile] = visible_range(k.q, k.s.row + r, height, k.chunk, bits);
        bits += kTile * kWords;
        KeyRange& whole = t.visible[r / kTile];
        whole = f.keys;
        if (whole.low >= whole.high) {
            clear(k.s.weights + r * N, height * N);
            clear(k.s.grads + r * N, height * N);
            continue;
        }
        whole = {whole.low / P * P, padded(whole.high, kLanes<T>)};
        t.seen_keys = {smaller_of(t.seen_keys.low, whole.low),
                       larger_of(t.seen_keys.high, whole.high)};
    }
    if (!t.some()) return;
    load_rows(k, t);
    // Rows of a bias, and of its gradient, lie far apart: they are prefetched meanwhile.
    const auto products = [&](Rows<T> rows, int64_t columns, const T* panels, T* to,
                              const Array& beside) {
        for (int64_t r = 0; r < t.rows; r += kTile) {
            const KeyRange whole = t.visible[r / kTile];
            const int64_t height = smaller_of(kTile, t.rows - r);
            if (whole.low >= whole.high) continue;
            Ahead ahead[kTile] = {};
            for (int64_t i = 0; beside.column == size_of(beside.kind) && i < height; i++) {
                const Row& row = k.s.row[r + i];
                ahead[i] = {bias_at(k.q, beside, row) + k.chunk.k0 * beside.column, beside.column};
            }
            by_height(height, [&](int64_t at, auto tall) {
                scores<T, decltype(tall)::value>(rows.at + (r + at) * rows.stride, rows.stride,
                                                 columns, panels, whole, to + (r + at) * N, N,
                                                 ahead + at);
            });
        }
    };
    REGARD_PASS(products) products(t.queries, k.q.D, k.s.key_panels, k.s.weights, k.q.bias);
    REGARD_PASS(products)
    if (k.grads) products(t.grad_rows, k.q.E, k.s.value_panels, k.s.grads, k.w.d_bias);
    REGARD_PASS(gradients)
    for (int64_t r = 0; r < t.rows; r++) {
        const Visible& f = found[r / kTile];
        if (t.visible[r / kTile].low < t.visible[r / kTile].high)
            gradient_row(k, t, r, t.visible[r / kTile], f.of(r % kTile));
    }
}

// dV += Pᵀ dO, dK += dXᵀ Q.
template <class T> static void sum_over_rows(const BackwardWork<T>& k, const RowBlock<T>& t) {
    constexpr int64_t N = kBlockKeys<T>;
    const int64_t low = t.seen_keys.low, count = smaller_of(t.seen_keys.high, k.chunk.n) - low;
    const auto seeing = [&](int64_t first, int64_t last) {
        return t.seeing(low + first, low + last);
    };
    if (k.w.d_value)
        accumulate<T, 1, N>(k.s.weights + low, count, seeing, t.grad_rows.at, t.grad_rows.stride,
                            k.wide_e, k.s.d_values + low * k.wide_e);
    if (k.w.d_key)
        accumulate<T, 1, N>(k.s.grads + low, count, seeing, t.queries.at, t.queries.stride,
                            k.wide_d, k.s.d_keys + low * k.wide_d);
}

// dQ += dX K, and what else is summed over keys.
template <class T> static void sum_over_keys(BackwardWork<T>& k, const RowBlock<T>& t) {
    constexpr int64_t N = kBlockKeys<T>;
    const T* const before_softcap = k.s.before_softcap ? k.s.before_softcap : k.s.grads;
    for (int64_t r = 0; r < t.rows; r++) {
        const KeyRange whole = t.visible[r / kTile];
        if (whole.low >= whole.high) continue;
        const KeyRange real = {whole.low, smaller_of(whole.high, k.chunk.n)};
        if (k.w.d_query && r % kTile == 0)
            accumulate<T, N, 1>(k.s.grads + r * N, smaller_of(kTile, t.rows - r),
                                [&](int64_t, int64_t) { return real; }, k.keys.at, k.keys.stride,
                                k.wide_d, t.d_query + r * k.wide_d);
        const int64_t n = index_of(k.q, k.s.row[r]);
        if (k.w.d_bias.data)
            k.beyond |= !add_to_bias(k.w, k.s.row[r], k.chunk.k0, real, before_softcap + r * N);
        if (k.w.d_scale) k.w.d_scale[n] += k.s.d_scale[r];
        for (int sum = 0; k.w.checks && sum < 2; sum++)
            k.w.checks[4 * n + sum] += k.s.checks[2 * r + sum];
    }
}

// Sums of products with keys or queries, times the scale; −0 becomes +0.
template <class T> REGARD_INLINE void times_scale(const BackwardWork<T>& k, T* row) {
    for (int64_t d = 0; d < k.wide_d; d += kLanes<T>)
        store(row + d, fma(load(row + d), all(T(k.q.scale)), Vec<T>{}));
}

template <class T> static void finish_queries(BackwardWork<T>& k, const RowBlock<T>& t) {
    const KeepSubnormals<T> results;
    for (int64_t r = 0; r < t.rows; r++) {
        T* row = t.d_query + r * k.wide_d;
        times_scale(k, row);
        k.beyond |= !finite(row, k.wide_d);
        const Kind kind = k.w.query_kind;
        if (!k.in_place)
            store_row(k.w.d_query + index_of(k.q, k.s.row[r]) * k.q.D * size_of(kind), kind, row,
                      k.q.D);
    }
}

template <class T> static void finish_keys(BackwardWork<T>& k) {
    const KeepSubnormals<T> results;
    const Request& q = k.q;
    for (int64_t j = 0; j < k.chunk.n; j++) {
        const int64_t to = k.head * q.S + k.chunk.k0 + j;
        T *d_key = k.s.d_keys + j * k.wide_d, *d_value = k.s.d_values + j * k.wide_e;
        times_scale(k, d_key);
        k.beyond |= !finite(d_key, k.wide_d) || !finite(d_value, k.wide_e);
        const Kind kind = k.w.key_kind, value_kind = k.w.value_kind;
        if (k.w.d_key) store_row(k.w.d_key + to * q.D * size_of(kind), kind, d_key, q.D);
        if (k.w.d_value)
            store_row(k.w.d_value + to * q.E * size_of(value_kind), value_kind, d_value, q.E);
    }
}

template <class T>
static void backward(const Backward& w, int64_t b, int64_t g, int64_t block, char* sums,
                     char* scratch) {
    const FlushToZero<T> passes;
    BackwardWork<T> k(w, b, g, block, sums, scratch);
    clear(k.s.d_keys, kBlockKeys<T> * k.wide_d);
    clear(k.s.d_values, kBlockKeys<T> * k.wide_e);
    for (int64_t number = 0; number < k.all_blocks; number++) {
        if (w.q.stopped(w.q.state)) return;
        RowBlock<T> t = row_block(k, number);
        gradient_block(k, t);
        REGARD_PASS(row_sums) if (t.some()) sum_over_rows(k, t);
        // The first block of keys sets each row's sums to zero, the last one ends them.
        if (!k.in_turn || !(t.some() || !block || k.last())) continue;
        if (!k.wait(number + 1)) return;
        if (!block && w.d_query) clear(t.d_query, t.rows * k.wide_d);
        REGARD_PASS(key_sums) if (t.some()) sum_over_keys(k, t);
        if (k.last() && w.d_query) finish_queries(k, t);
        k.done_with(number + 1);
    }
    if (k.in_turn) {
        if (!k.wait(k.all_blocks)) return;
        k.done_with(k.all_blocks);
    }
    finish_keys(k);
    if (k.beyond || k.infinite)
        __atomic_fetch_or(&w.beyond[k.head], uint8_t(k.beyond + 2 * k.infinite), __ATOMIC_RELAXED);
}

template <class T> static size_t backward_scratch_bytes(const Backward& w) {
    const size_t rows = size_t(3 * padded(larger_of(w.q.D, w.q.E), kLanes<T>)) * sizeof(T);
    const size_t own = BackwardScratch<T>(w, nullptr).size;
    return (own > rows ? own : rows) + 64;
}
template <class T> static size_t sums_bytes(const Backward& w) {
    if (!w.d_query || summed_in_place<T>(w)) return 0;
    return size_t(w.q.H / w.q.G * w.q.L * padded(w.q.D, kLanes<T>)) * sizeof(T);
}

}  // namespace
