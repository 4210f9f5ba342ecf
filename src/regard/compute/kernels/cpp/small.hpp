// Rows whose sums are so small that the passes over tiles, which make no subnormal number of float32,
// may have lost some: those are computed again in float64.
#pragma once
#include "tile.hpp"

namespace {

// What is lost of a sum above this size is far below its rounding.
template <class T> constexpr T kSmall = T(kNarrow<T> ? 0x1p-96 : 0);

// Which of the first n numbers of x are smaller than kSmall.
template <class T> REGARD_INLINE Bits<T> small_ones(Vec<T> x, int64_t n) {
    return Bits<T>(larger(x, -x) < all(kSmall<T>)) & first_lanes<T>(smaller_of(n, kLanes<T>));
}
template <class T> REGARD_INLINE bool some(Bits<T> bits) { return any<T>((Vec<T>)bits); }

// Whether a sum of any row is smaller than kSmall: for nearly all calls none is.
template <class T> static bool any_small(const Work<T>& w) {
    constexpr int W = kLanes<T>;
    const Bits<T> sign = (Bits<T>)all(T(-0.0));
    const int64_t whole = w.q.E / W * W;
    Vec<T> nearest = all(-infinity<T>());  // to 0, from below
    Bits<T> rest = {};
    for (int64_t r = 0; r < w.rows; r++) {
        if (!(w.s.states[r].sum > 0)) continue;
        const T* out = w.s.out + r * w.wide;
        for (int64_t e = 0; e < whole; e += W)
            nearest = larger((Vec<T>)((Bits<T>)load(out + e) | sign), nearest);
        if (whole < w.wide) rest |= small_ones<T>(load(out + whole), w.q.E - whole);
    }
    return largest_of<T>(nearest) > -kSmall<T> || some<T>(rest);
}

// Which rows have sums below kSmall of values below it that are not 0, among those that the row sees
// in some chunks. Columns of zeros cost one look at them.
template <class T>
static void find_small(const Work<T>& w, int64_t begin, int64_t end, bool (&found)[kTask]) {
    constexpr int W = kLanes<T>;
    const Request& q = w.q;
    // Dot instructions take subnormal numbers for 0.
    if (!kNarrow<T> || q.dots || q.value.kind == Kind::int8 || !any_small(w)) return;
    for (int64_t e = 0; e < q.E; e += W) {
        const int64_t n = smaller_of(W, q.E - e);
        Bits<T> of_row[kTask], of_key[kChunk], any = {};
        for (int64_t r = 0; r < w.rows; r++) {
            const Vec<T> x = load(w.s.out + r * w.wide + e);
            of_row[r] = w.s.states[r].sum > 0 && !found[r] ? small_ones<T>(x, n) : Bits<T>{};
            any |= of_row[r];
            // No values are here; sums of 0 are those of zeros, or the row has been marked.
            if (q.again) found[r] |= some<T>(of_row[r] & Bits<T>(x != Vec<T>{}));
        }
        for (int64_t number = begin; some<T>(any) && number < end; number++) {
            if (q.stopped(q.state)) return;
            const Chunk chunk = chunk_of(q, w.b, w.g, number);
            Bits<T> values = {};
            for (int64_t j = 0; j < chunk.n; j++) {
                T x[W] = {};
                load_row(x, q.value.at(w.b, w.g, chunk.k0 + j) + e * q.value.column, q.value.column,
                         q.value.kind, n);
                of_key[j] = any & small_ones<T>(load(x), n) & Bits<T>(load(x) != Vec<T>{});
                values |= of_key[j];
            }
            for (int64_t r = 0; some<T>(values) && r < w.rows; r++) {
                if (!some<T>(of_row[r])) continue;
                const Tile t = {r, 1, chunk, visible_range(q, w.s.row + r, 1, chunk, w.s.bits)};
                const Seen<T> seen = seen_by(w, t, 0);
                for (int64_t j = t.visible.keys.low; !found[r] && j < t.visible.keys.high; j++)
                    found[r] = some<T>(of_key[j] & of_row[r]) && seen(j);
            }
        }
    }
}

}  // namespace
