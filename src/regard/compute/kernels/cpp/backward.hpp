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
// of dV that a NaN of dO reaches (`add_specials`).
#pragma once
#include "tile.hpp"

namespace {

constexpr int64_t kBlockRows = 96;
template <class T> constexpr int64_t kBlockKeys = 256 / int64_t(sizeof(T));

// What the backward pass knows of a row: P = exp2((number − anchor) · unit − rest).
template <class T> struct Known {
    T anchor, rest, delta;
    bool special_query, special_grad;  // whether there is a NaN or an infinity
};

template <class T> struct BackwardScratch {
    T *weights, *grads, *straight;  // (rows, keys): P; dX; dX before the softcap's slope
    T *key_panels, *value_panels, *keys, *d_keys, *d_values;
    T *queries, *grad_rows, *turning, *bias;
    double *d_scale, *checks;
    Row* row;
    uint8_t* bytes;
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
        if (w.d_bias.data && q.softcap != 0) take(straight, R * N);
        else straight = nullptr;
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
        take(bytes, kTile * stack_size(q));
    }
};

// Rows as the products read them: T numbers, whole vectors.
template <class T> struct Rows {
    const T* at;
    int64_t stride;  // in numbers
};

// `count` rows of an array (b, h, first …) in place where that is possible, else copied to `room`;
// with `clean`, NaN and infinity become 0.
template <class T>
static Rows<T> rows_of(const Array& a, int64_t b, int64_t h, int64_t first, int64_t count,
                       int64_t columns, bool clean, T* room) {
    const char* from = a.at(b, h, first);
    if (!clean && in_place<T>(a, columns) && a.row % int64_t(sizeof(T)) == 0 &&
        uintptr_t(from) % alignof(T) == 0)
        return {(const T*)from, a.row / int64_t(sizeof(T))};
    const int64_t wide = padded(columns, kLanes<T>);
    for (int64_t r = 0; r < count; r++) {
        T* row = room + r * wide;
        load_row(row, from + r * a.row, a.column, a.kind, columns);
        for (int64_t i = columns; i < wide; i++) row[i] = 0;
        for (int64_t i = 0; clean && i < columns; i++)
            if (row[i] - row[i] != 0) row[i] = 0;
    }
    return {room, wide};
}

// Whether rows of any kind and stride are finite, in T.
template <class T>
static bool finite_rows(const Array& a, int64_t b, int64_t h, int64_t first, int64_t count,
                        int64_t columns, T* room) {
    for (int64_t r = 0; r < count; r++) {
        const Rows<T> row = rows_of(a, b, h, first + r, 1, columns, false, room);
        if (!finite(row.at, padded(columns, kLanes<T>))) return false;
    }
    return true;
}

template <class T> static bool summed_in_place(const Backward& w) {
    return w.d_query && w.query_kind == kind_of<T>() && w.q.D % kLanes<T> == 0;
}

// δ = Σ dO·O − dlse and lse of the rows of one head, and what they add to the sink's gradient.
template <class T>
static void prepare_rows(const Backward& w, int64_t b, int64_t h, char* scratch) {
    const Request& q = w.q;
    const Softmax<T> how = softmax_of<T>(q);
    Known<T>* known = (Known<T>*)w.rows + (b * q.H + h) * q.L;
    double *o = (double*)scratch, *g = o + padded(q.E, 8), *x = g + padded(q.E, 8);
    for (int64_t i = 0; i < q.L; i++) {
        const int64_t n = (b * q.H + h) * q.L + i;
        load_row(o, w.output.at(b, h, i), w.output.column, w.output.kind, q.E);
        load_row(g, w.grad_output.at(b, h, i), w.grad_output.column, w.grad_output.kind, q.E);
        load_row(x, q.query.at(b, h, i), q.query.column, q.query.kind, q.D);
        double sums[8] = {}, odd = 0;
        for (int64_t e = 0; e < q.E; e++) {
            sums[e % 8] += o[e] * g[e];
            odd += g[e] * 0;
        }
        known[i].special_grad = odd != 0;
        odd = 0;
        for (int64_t d = 0; d < q.D; d++) odd += x[d] * 0;
        known[i].special_query = odd != 0;
        double delta = ((sums[0] + sums[4]) + (sums[1] + sums[5])) +
                       ((sums[2] + sums[6]) + (sums[3] + sums[7]));
        if (w.grad_lse) delta -= w.grad_lse[n];
        const double lse = w.lse[n];
        known[i].anchor = lse == -infinity<double>() ? T(0) : T(lse / how.natural);
        known[i].rest = T((lse - double(known[i].anchor) * how.natural) * kLog2e);
        if (lse == -infinity<double>()) known[i].rest = 0;
        known[i].delta = T(delta);
        const double sink = q.sink ? __builtin_exp(q.sink[b * q.H + h] - lse) : 0;
        if (w.d_sink) w.d_sink[n] = -sink * delta;
        if (w.d_scale) w.d_scale[n] = 0;
        if (!w.checks) continue;
        // What the row's weights add up to, and its gradients of scores.
        w.checks[2 * n] = lse == -infinity<double>() ? 0 : sink - 1;
        w.checks[2 * n + 1] = -sink * delta - (w.grad_lse ? w.grad_lse[n] : 0);
    }
}

// The softcap of scores, and its slope 1 − (y / softcap)².
template <class T> REGARD_INLINE Vec<T> slope_of(const Softmax<T>& how, Vec<T> score) {
    const Vec<T> part = score * all(how.scale) / all(how.softcap);
    const Vec<T> size = larger(part, -part);
    const Vec<T> e = exp2(size * all(T(-2 * kLog2e))), whole = all(T(1)) + e;
    return all(T(4)) * e / (whole * whole);
}

// One row whose keys are all seen: scores become weights, products become gradients of scores.
template <class T>
REGARD_INLINE void plain_gradients(const Softmax<T>& how, const Known<T>& row, KeyRange keys, T* p,
                                   T* d) {
    const Vec<T> anchor = all(row.anchor), rest = all(-row.rest), delta = all(row.delta);
    const Vec<T> unit = all(how.unit);
    for (int64_t j = keys.low; j < keys.high; j += kLanes<T>) {
        const Vec<T> weight = exp2(fma(load(p + j) - anchor, unit, rest));
        store(p + j, weight);
        store(d + j, weight * (load(d + j) - delta));
    }
}

// One row, whatever there is to do. `straight`, if given, receives the gradients before the softcap;
// `checks` the sums of the weights and of these gradients.
template <class T>
static void gradients(const Softmax<T>& how, T sign, const Known<T>& row, const Seen<T>& seen,
                      KeyRange keys, T* p, T* d, T* straight, double* d_scale, double* checks) {
    constexpr int W = kLanes<T>;
    typedef typename VectorOf<T>::integer Integer;
    const Vec<T> unit = all(how.unit);
    Bits<T> lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    Vec<T> sum = {}, weights = {}, grads = {};
    for (int64_t j = keys.low; j < keys.high; j += W) {
        const Integer low = Integer(larger_of(-1, smaller_of(seen.low - j, W)));
        const Integer high = Integer(larger_of(-1, smaller_of(seen.high - j, W)));
        Bits<T> visible = Bits<T>(lane >= low - Bits<T>{}) & Bits<T>(lane < high - Bits<T>{});
        if (seen.bytes) {
            Bits<T> said;
            for (int i = 0; i < W; i++) said[i] = -Integer(seen.bytes[j + i]);
            visible &= said;
        }
        const Vec<T> score = load(p + j) * all(sign);
        Vec<T> t = score, slope = all(T(1));
        if (how.has_softcap) {
            t = apply_softcap(how, score);
            slope = slope_of(how, score);
        } else if (how.in_logits) {
            t = t * all(how.scale);
        }
        if (seen.bias) {
            const Vec<T> added = load(seen.bias + j);
            visible &= ~(Bits<T>)(added == all(-infinity<T>()));
            if (how.bias_rest != 0) t = fma(added, all(how.bias_rest), t);
            t = fma(added, all(how.bias), t);
        }
        const Vec<T> exponent = fma(t - all(row.anchor), unit, all(-row.rest));
        const Vec<T> weight = (Vec<T>)(visible & (Bits<T>)exp2(exponent));
        const Vec<T> grad = (Vec<T>)(visible & (Bits<T>)(weight * (load(d + j) - all(row.delta))));
        const Vec<T> bent = (Vec<T>)(visible & (Bits<T>)(grad * slope));
        if (straight) store(straight + j, grad);
        if (d_scale) sum += (Vec<T>)(visible & (Bits<T>)(bent * load(p + j)));
        weights += weight;
        grads += grad;
        store(p + j, weight);
        store(d + j, bent);
    }
    if (d_scale) *d_scale = double(sum_of<T>(sum));
    if (checks) checks[0] = double(sum_of<T>(weights)), checks[1] = double(sum_of<T>(grads));
}

// out += Σ_j weights(r, j) · row j, for `count` sums r; weights as in `sum_rows`.
template <class T, int64_t Across, int64_t Along>
static void accumulate(const T* weights, int64_t count, KeyRange along, const T* rows,
                       int64_t stride, int64_t wide, T* out) {
    constexpr int W = kLanes<T>;
    constexpr int Many = kTile == 12 ? 4 : 2;
    const auto block = [&](int64_t e, int64_t r, auto height, auto vectors) {
        constexpr int R = decltype(height)::value, N = decltype(vectors)::value;
        Vec<T> sum[R][N];
        sum_rows<T, R, N, Across, Along>(weights + r * Across, (const char*)(rows + e),
                                         stride * int64_t(sizeof(T)), along.low, along.high, sum);
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

// Adds to dV what a NaN or an infinity of dO brings to the keys that its row sees.
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

template <class T> struct BackwardWork {
    const Backward& w;
    const Request& q;
    const Chunk chunk;  // the block of keys
    const int64_t block, blocks, wide_d, wide_e;
    const Softmax<T> how;
    const T sign;
    const BackwardScratch<T> s;
    bool packed = false;
    Rows<T> keys = {};

    BackwardWork(const Backward& w, int64_t b, int64_t g, int64_t block, char* at)
        : w(w), q(w.q), chunk{b, g, block * kBlockKeys<T>,
                              smaller_of(kBlockKeys<T>, w.q.S - block * kBlockKeys<T>)},
          block(block), blocks((w.q.S + kBlockKeys<T> - 1) / kBlockKeys<T>),
          wide_d(padded(w.q.D, kLanes<T>)), wide_e(padded(w.q.E, kLanes<T>)),
          how(softmax_of<T>(w.q)), sign(w.q.scale < 0    ? T(-1)
                                        : w.q.scale == 0 ? T(0)
                                                         : T(1)),
          s(w, at) {}

    void pack() {
        if (packed) return;
        packed = true;
        const bool clean = !finite_rows(q.key, chunk.b, chunk.g, chunk.k0, chunk.n, q.D, s.turning);
        keys = rows_of(q.key, chunk.b, chunk.g, chunk.k0, chunk.n, q.D, clean, s.keys);
        pack_panels(q.key, q.D, chunk, s.key_panels, s.turning);
        pack_panels(q.value, q.E, chunk, s.value_panels, s.turning);
    }

    // Waits until the block of keys before this one, and the head before it where heads share
    // a gradient, are done with `number` blocks of rows; false: the call is given up.
    bool wait(int64_t head, int64_t number, int64_t all) const {
        const auto reached = [&](int64_t h, int64_t b, int64_t n) {
            while (__atomic_load_n(&w.turns[h * blocks + b], __ATOMIC_ACQUIRE) < n) {
                if (q.stopped(q.state)) return false;
                w.idle(q.state);
            }
            return true;
        };
        return (!block || reached(head, block - 1, number)) &&
               (!w.in_order || !head || reached(head - 1, block, all));
    }
};

// Adds the gradients of a row's scores to the bias's gradient, wherever its cells lie.
template <class T>
static void add_to_bias(const Backward& w, const Row& row, int64_t k0, KeyRange keys,
                        const T* grads) {
    char* to = const_cast<char*>(w.d_bias.at(row.b, row.h, row.i)) + k0 * w.d_bias.column;
    if (w.d_bias.column == int64_t(sizeof(T)))
        for (int64_t j = keys.low; j < keys.high; j++) ((T*)to)[j] += grads[j];
    else
        for (int64_t j = keys.low; j < keys.high; j++) *(T*)(to + j * w.d_bias.column) += grads[j];
}

template <class T>
static void backward(const Backward& w, int64_t b, int64_t g, int64_t block, char* sums,
                     char* scratch) {
    BackwardWork<T> k(w, b, g, block, scratch);
    const Request& q = w.q;
    const BackwardScratch<T>& s = k.s;
    constexpr int64_t N = kBlockKeys<T>, R = kBlockRows;
    const int64_t group = q.H / q.G, each = (q.L + R - 1) / R, all_blocks = group * each;
    const int64_t head = b * q.G + g;
    const bool grads = w.d_query || w.d_key || w.d_bias.data || w.d_scale;
    const bool in_turn = w.d_query || w.d_bias.data || w.d_scale || w.checks;
    const bool plain = !k.how.general && k.sign == 1 && !w.d_scale && !w.checks;
    bool beyond = false;
    clear(s.d_keys, N * k.wide_d);
    clear(s.d_values, N * k.wide_e);
    for (int64_t number = 0; number < all_blocks; number++) {
        if (q.stopped(q.state)) return;
        const int64_t h = g * group + number / each, first = number % each * R;
        const int64_t rows = smaller_of(R, q.L - first);
        const Known<T>* known = (const Known<T>*)w.rows + (b * q.H + h) * q.L + first;
        T* d_query = (summed_in_place<T>(w) ? (T*)w.d_query + head * group * q.L * q.D : (T*)sums) +
                     ((number / each) * q.L + first) * k.wide_d;
        KeyRange visible[(R + kTile - 1) / kTile], seen_rows = {rows, 0}, seen_keys = {N, 0};
        Rows<T> queries = {}, grad_rows = {};
        for (int64_t r = 0; r < rows; r++) s.row[r] = row_of(q, b, h, first + r);
        for (int64_t r = 0; r < rows; r += kTile) {
            const int64_t height = smaller_of(kTile, rows - r);
            const Visible found = visible_range(q, s.row + r, height, k.chunk, s.bytes, kPanel<T>);
            T *p = s.weights + r * N, *d = s.grads + r * N;
            KeyRange& whole = visible[r / kTile];
            whole = found.keys;
            if (whole.low >= whole.high) {
                clear(p, height * N);
                clear(d, height * N);
                continue;
            }
            whole = {whole.low / kPanel<T> * kPanel<T>, padded(whole.high, kLanes<T>)};
            if (!queries.at) {
                k.pack();
                bool odd_query = false, odd_grad = false;
                for (int64_t i = 0; i < rows; i++) {
                    odd_query |= known[i].special_query;
                    odd_grad |= known[i].special_grad;
                }
                queries = rows_of(q.query, b, h, first, rows, q.D, odd_query, s.queries);
                grad_rows = rows_of(w.grad_output, b, h, first, rows, q.E, odd_grad, s.grad_rows);
            }
            seen_rows = {smaller_of(seen_rows.low, r), r + height};
            seen_keys = {smaller_of(seen_keys.low, whole.low),
                         larger_of(seen_keys.high, whole.high)};
            const Ahead none[kTile] = {};
            by_height(height, [&](int64_t at, auto tall) {
                constexpr int H = decltype(tall)::value;
                scores<T, H, N>(queries.at + (r + at) * queries.stride, queries.stride, q.D,
                                s.key_panels, whole, p + at * N, none);
                if (grads)
                    scores<T, H, N>(grad_rows.at + (r + at) * grad_rows.stride, grad_rows.stride,
                                    q.E, s.value_panels, whole, d + at * N, none);
            });
            for (int64_t i = 0; i < height; i++, p += N, d += N) {
                const Row& row = s.row[r + i];
                const Seen<T> seen = {row.low - k.chunk.k0,
                                      smaller_of(row.high - k.chunk.k0, k.chunk.n),
                                      found.bytes ? found.bytes + i * stack_size(q) : nullptr,
                                      bias_of(q, row, k.chunk, s.bias)};
                if (plain && !seen.bytes && seen.low <= whole.low && seen.high >= whole.high)
                    plain_gradients(k.how, known[r + i], whole, p, d);
                else
                    gradients(k.how, k.sign, known[r + i], seen, whole, p, d,
                              s.straight ? s.straight + (r + i) * N : nullptr,
                              w.d_scale ? s.d_scale + r + i : nullptr,
                              w.checks ? s.checks + 2 * (r + i) : nullptr);
                for (int64_t j = 0; j < whole.low; j += kLanes<T>) {
                    store(p + j, Vec<T>{});
                    store(d + j, Vec<T>{});
                }
                for (int64_t j = whole.high; j < N; j += kLanes<T>) {
                    store(p + j, Vec<T>{});
                    store(d + j, Vec<T>{});
                }
                if (w.d_value && known[r + i].special_grad)
                    add_specials(w, seen, row, {whole.low, smaller_of(whole.high, k.chunk.n)}, p,
                                 s.d_values);
            }
        }
        const bool some = seen_rows.low < seen_rows.high;
        if (some) {
            const int64_t low = seen_keys.low, count = smaller_of(seen_keys.high, k.chunk.n) - low;
            if (w.d_value)
                accumulate<T, 1, N>(s.weights + low, count, seen_rows, grad_rows.at,
                                    grad_rows.stride, k.wide_e, s.d_values + low * k.wide_e);
            if (w.d_key)
                accumulate<T, 1, N>(s.grads + low, count, seen_rows, queries.at, queries.stride,
                                    k.wide_d, s.d_keys + low * k.wide_d);
        }
        const bool last = block + 1 == k.blocks;
        if (!in_turn || !(some || !block || last)) continue;
        if (!k.wait(head, number + 1, all_blocks)) return;
        if (!block && w.d_query) clear(d_query, rows * k.wide_d);
        for (int64_t r = 0; r < rows && some; r += kTile) {
            const KeyRange whole = visible[r / kTile];
            const int64_t height = smaller_of(kTile, rows - r);
            if (whole.low >= whole.high) continue;
            const KeyRange real = {whole.low, smaller_of(whole.high, k.chunk.n)};
            if (w.d_query)
                accumulate<T, N, 1>(s.grads + r * N, height, real, k.keys.at, k.keys.stride,
                                    k.wide_d, d_query + r * k.wide_d);
            for (int64_t i = r; i < r + height; i++) {
                if (w.d_bias.data)
                    add_to_bias(w, s.row[i], k.chunk.k0, real,
                                (s.straight ? s.straight : s.grads) + i * N);
                if (w.d_scale) w.d_scale[index_of(q, s.row[i])] += s.d_scale[i];
                for (int n = 0; w.checks && n < 2; n++)
                    w.checks[2 * index_of(q, s.row[i]) + n] += s.checks[2 * i + n];
            }
        }
        for (int64_t r = 0; last && w.d_query && r < rows; r++) {
            T* row = d_query + r * k.wide_d;
            for (int64_t d = 0; d < k.wide_d; d += kLanes<T>)
                store(row + d, fma(load(row + d), all(T(q.scale)), Vec<T>{}));
            beyond |= !finite(row, k.wide_d);
            if (!summed_in_place<T>(w))
                store_row(w.d_query + index_of(q, s.row[r]) * q.D * size_of(w.query_kind),
                          w.query_kind, row, q.D);
        }
        __atomic_store_n(&w.turns[head * k.blocks + block], number + 1, __ATOMIC_RELEASE);
    }
    if (in_turn) {
        if (!k.wait(head, all_blocks, all_blocks)) return;
        __atomic_store_n(&w.turns[head * k.blocks + block], all_blocks, __ATOMIC_RELEASE);
    }
    for (int64_t j = 0; j < k.chunk.n; j++) {
        const int64_t to = head * q.S + k.chunk.k0 + j;
        T *d_key = s.d_keys + j * k.wide_d, *d_value = s.d_values + j * k.wide_e;
        for (int64_t d = 0; d < k.wide_d; d += kLanes<T>)
            store(d_key + d, fma(load(d_key + d), all(T(q.scale)), Vec<T>{}));
        if (w.d_key) store_row(w.d_key + to * q.D * size_of(w.key_kind), w.key_kind, d_key, q.D);
        if (w.d_value)
            store_row(w.d_value + to * q.E * size_of(w.value_kind), w.value_kind, d_value, q.E);
    }
    beyond |= !finite(s.d_keys, N * k.wide_d) || !finite(s.d_values, N * k.wide_e);
    if (beyond) __atomic_store_n(&w.beyond[head], uint8_t(1), __ATOMIC_RELAXED);
}

template <class T> static size_t backward_scratch_bytes(const Backward& w) {
    const size_t rows = size_t(3 * padded(larger_of(w.q.D, w.q.E), 8)) * sizeof(double);
    const size_t own = BackwardScratch<T>(w, nullptr).size;
    return (own > rows ? own : rows) + 64;
}
template <class T> static size_t sums_bytes(const Backward& w) {
    if (!w.d_query || summed_in_place<T>(w)) return 0;
    return size_t(w.q.H / w.q.G * w.q.L * padded(w.q.D, kLanes<T>)) * sizeof(T);
}

}  // namespace
