// Attention from the plain loops to the tiled kernel, one idea per rung, float32.
//
// `ladder.py` builds this, checks every rung against float64, times it, and puts the kernel itself on
// top. What a product needs besides is left out: D is a multiple of four vectors and S of a panel,
// arrays are dense, numbers are ordinary.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpus.hpp"
#include "simd.hpp"
#include "threads.hpp"

struct Call {
    int64_t H, L, S, D;
    const float *query, *key, *value;
    float* out;
    bool causal;  // row i sees the keys 0 … i; rungs 1 and 2 know nothing of it
    int threads;
    float scale() const { return 1 / std::sqrt(float(D)); }
    int64_t visible(int64_t i) const { return causal ? std::min(S, i + 1) : S; }
    const float* q(int64_t h, int64_t i) const { return query + (h * L + i) * D; }
    const float* k(int64_t h, int64_t j) const { return key + (h * S + j) * D; }
    const float* v(int64_t h, int64_t j) const { return value + (h * S + j) * D; }
    float* o(int64_t h, int64_t i) const { return out + (h * L + i) * D; }
};

// --- rung 1: plain loops and an L × S matrix ---------------------------------------------------

static void plain(const Call& c) {
    std::vector<float> scores(size_t(c.L * c.S));
    for (int64_t h = 0; h < c.H; h++) {
        for (int64_t i = 0; i < c.L; i++)
            for (int64_t j = 0; j < c.S; j++) {
                float sum = 0;
                for (int64_t d = 0; d < c.D; d++) sum += c.q(h, i)[d] * c.k(h, j)[d];
                scores[i * c.S + j] = sum * c.scale();
            }
        for (int64_t i = 0; i < c.L; i++) {
            float* row = &scores[i * c.S];
            const float most = *std::max_element(row, row + c.S);
            float total = 0;
            for (int64_t j = 0; j < c.S; j++) total += row[j] = std::exp(row[j] - most);
            for (int64_t j = 0; j < c.S; j++) row[j] /= total;
        }
        for (int64_t i = 0; i < c.L; i++)
            for (int64_t e = 0; e < c.D; e++) {
                float sum = 0;
                for (int64_t j = 0; j < c.S; j++) sum += scores[i * c.S + j] * c.v(h, j)[e];
                c.o(h, i)[e] = sum;
            }
    }
}

// --- rung 2: streaming softmax, no matrix ------------------------------------------------------

static void streaming(const Call& c) {
    for (int64_t h = 0; h < c.H; h++)
        for (int64_t i = 0; i < c.L; i++) {
            float most = -INFINITY, total = 0, *out = c.o(h, i);
            std::fill(out, out + c.D, 0.0f);
            for (int64_t j = 0; j < c.S; j++) {
                float score = 0;
                for (int64_t d = 0; d < c.D; d++) score += c.q(h, i)[d] * c.k(h, j)[d];
                score *= c.scale();
                if (score > most) {  // what was summed so far was relative to a smaller maximum
                    const float keep = std::exp(most - score);
                    total *= keep;
                    for (int64_t e = 0; e < c.D; e++) out[e] *= keep;
                    most = score;
                }
                const float weight = std::exp(score - most);
                total += weight;
                for (int64_t e = 0; e < c.D; e++) out[e] += weight * c.v(h, j)[e];
            }
            for (int64_t e = 0; e < c.D; e++) out[e] /= total;
        }
}

// --- the parts that rungs 3 to 7 are made of ---------------------------------------------------

using V = Vec<float>;
constexpr int W = kLanes<float>;
constexpr int64_t kPanel = 2 * W;  // keys whose scores are made at once
constexpr int64_t kChunk = 256, kTask = 192;
constexpr int64_t kStrip = kChunk + W;  // rows of scores that do not lie a power of two apart
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 12;  // 24 accumulators of 32 registers
#else
constexpr int kTile = 6;  // 12 of 16
#endif

struct alignas(64) Line {
    float x[16];
};  // memory from the start of a cache line

// Keys turned so that lanes run along them: panel after panel, each D × kPanel.
static void pack(const Call& c, int64_t h, float* panels) {
    for (int64_t j = 0; j < c.S; j++)
        for (int64_t d = 0; d < c.D; d++)
            panels[(j / kPanel * c.D + d) * kPanel + j % kPanel] = c.k(h, j)[d];
}

// strip = R queries times n keys. Not inlined: so all accumulators stay in registers.
template <int R>
static __attribute__((noinline)) void scores(const float* q, int64_t D, const float* panels,
                                             int64_t n, float* strip) {
    for (int64_t j = 0; j < n; j += kPanel, panels += D * kPanel) {
        V sum[R][2] = {};
        for (int64_t d = 0; d < D; d++) {
            const V k0 = load(panels + d * kPanel), k1 = load(panels + d * kPanel + W);
            for (int r = 0; r < R; r++) {
                const V x = all(q[r * D + d]);
                sum[r][0] = fma(x, k0, sum[r][0]);
                sum[r][1] = fma(x, k1, sum[r][1]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int u = 0; u < 2; u++) store(strip + r * kStrip + j + u * W, sum[r][u]);
    }
}

// out += R rows of weights times n values, lanes along the columns, four vectors at a time.
template <int R>
static __attribute__((noinline)) void blend(const float* strip, const float* v, int64_t D,
                                            int64_t n, float* out) {
    for (int64_t e = 0; e < D; e += 4 * W) {
        V sum[R][4];
        for (int r = 0; r < R; r++)
            for (int u = 0; u < 4; u++) sum[r][u] = load(out + r * D + e + u * W);
        for (int64_t j = 0; j < n; j++)
            for (int r = 0; r < R; r++) {
                const V x = all(strip[r * kStrip + j]);
                for (int u = 0; u < 4; u++)
                    sum[r][u] = fma(x, load(v + j * D + e + u * W), sum[r][u]);
            }
        for (int r = 0; r < R; r++)
            for (int u = 0; u < 4; u++) store(out + r * D + e + u * W, sum[r][u]);
    }
}

struct Row {
    float most = -INFINITY, total = 0;
};
enum class Power { library, own };

// Scores of one row become weights relative to the largest so far; `out` follows that maximum.
template <Power power>
static void soften(float* x, int64_t n, float scale, Row& row, float* out, int64_t D) {
    if (power == Power::own) scale *= 1.44269504f;  // e^x = 2^(x log2 e)
    V most = all(row.most), total = {};
    for (int64_t j = 0; j < n; j += W) {
        store(x + j, load(x + j) * scale);
        most = larger(load(x + j), most);
    }
    const float top = largest_of<float>(most), behind = row.most - top;
    const float keep = power == Power::own ? exp2_of(behind) : std::exp(behind);
    for (int64_t j = 0; j < n; j += W) {
        if (power == Power::own) store(x + j, exp2(load(x + j) - top));
        else
            for (int64_t i = j; i < j + W; i++) x[i] = std::exp(x[i] - top);
        total += load(x + j);
    }
    if (keep != 1)
        for (int64_t e = 0; e < D; e += W) store(out + e, load(out + e) * keep);
    row = {top, row.total * keep + sum_of<float>(total)};
}

struct Walk {
    int64_t rows, keys;  // rows per task, keys per chunk
    bool skip;  // pass over what causal hides, not only give it a weight of 0
};

// R rows of a head, from row i, meet one chunk of keys, from key k0.
template <int R, Power power>
static void tile(const Call& c, int64_t h, int64_t i, const float* panels, int64_t k0, Walk walk,
                 Row* rows) {
    alignas(64) float strip[R * kStrip];
    const int64_t seen = walk.skip ? c.visible(i + R - 1) : c.S;
    if (k0 >= seen) return;
    const int64_t n = std::min(walk.keys, (seen - k0 + kPanel - 1) / kPanel * kPanel);
    scores<R>(c.q(h, i), c.D, panels + k0 * c.D, n, strip);
    for (int r = 0; r < R; r++) {
        const int64_t hidden = std::max<int64_t>(c.visible(i + r) - k0, 0);
        for (int64_t j = hidden; j < n; j++) strip[r * kStrip + j] = -INFINITY;
        soften<power>(strip + r * kStrip, n, c.scale(), rows[r], c.o(h, i + r), c.D);
    }
    constexpr int half = R > 1 ? R / 2 : 1;  // twice as many vectors per row, half the rows
    for (int r = 0; r < R; r += half)
        blend<half>(strip + r * kStrip, c.v(h, k0), c.D, n, c.o(h, i + r));
}

// One task: some rows of one head walk over the keys together, chunk by chunk.
template <int R, Power power>
static void task(const Call& c, int64_t h, int64_t first, const float* panels, Walk walk) {
    const int64_t last = std::min(first + walk.rows, c.L);
    std::fill(c.o(h, first), c.o(h, first) + (last - first) * c.D, 0.0f);
    std::vector<Row> rows(size_t(last - first));
    for (int64_t k0 = 0; k0 < c.S; k0 += walk.keys) {
        int64_t i = first;
        for (; i + R <= last; i += R) tile<R, power>(c, h, i, panels, k0, walk, &rows[i - first]);
        for (; i < last; i++) tile<1, power>(c, h, i, panels, k0, walk, &rows[i - first]);
    }
    for (int64_t i = first; i < last; i++)
        for (int64_t e = 0; e < c.D; e++) c.o(h, i)[e] /= rows[i - first].total;
}

// f(0) … f(n − 1), each taken by the next free thread.
static void share(int threads, int64_t n, const std::function<void(int64_t)>& f) {
    std::atomic<int64_t> next{0};
    regard::run_on_threads(threads, [&](int) {
        for (int64_t i; (i = next++) < n;) f(i);
    }, nullptr);
}

template <int R, Power power> static void attend(const Call& c, Walk walk) {
    const int64_t size = c.S * c.D, tasks = (c.L + walk.rows - 1) / walk.rows;
    std::vector<Line> memory(size_t(c.H * size / 16));
    float* panels = memory[0].x;
    share(c.threads, c.H, [&](int64_t h) { pack(c, h, panels + h * size); });
    share(c.threads, c.H * tasks, [&](int64_t t) {  // last rows first: causal ones are the longest
        const int64_t h = t % c.H, first = (tasks - 1 - t / c.H) * walk.rows;
        task<R, power>(c, h, first, panels + h * size, walk);
    });
}

// --- rungs 3 to 7 ------------------------------------------------------------------------------

static void vectors(const Call& c) { attend<1, Power::library>(c, {1, kPanel, false}); }
static void tiles(const Call& c) { attend<kTile, Power::library>(c, {kTile, kPanel, false}); }
static void own_power(const Call& c) { attend<kTile, Power::own>(c, {kTile, kPanel, false}); }
static void chunks(const Call& c) { attend<kTile, Power::own>(c, {kTask, kChunk, false}); }
static void skipping(const Call& c) { attend<kTile, Power::own>(c, {kTask, kChunk, true}); }

// --- what ladder.py calls ----------------------------------------------------------------------

extern "C" int lanes() { return W; }
extern "C" int threads() { return regard::usable_cpus(); }

extern "C" void climb(int rung, int64_t H, int64_t L, int64_t S, int64_t D, const float* query,
                      const float* key, const float* value, float* out, bool causal, int threads) {
    void (*const rungs[])(const Call&) = {plain,     streaming, vectors, tiles,
                                          own_power, chunks,    skipping};
    rungs[rung - 1]({H, L, S, D, query, key, value, out, causal, threads});
}

// Multiply-adds on registers alone, 2 · 12 · lanes · steps flops per thread: the machine's peak.
extern "C" float multiply_add(int64_t steps, int threads) {
    std::atomic<float> kept{0};  // keeps the sum from being optimised away
    const auto chains = [&](int) {
        V x[12];  // twelve independent chains, so that nothing waits for a result
        for (int i = 0; i < 12; i++) x[i] = all(float(i));
        for (int64_t s = 0; s < steps; s++)
            for (int i = 0; i < 12; i++) x[i] = fma(x[i], all(0.5f), all(1.0f));
        for (int i = 1; i < 12; i++) x[0] += x[i];
        kept = sum_of<float>(x[0]);
    };
    regard::run_on_threads(threads, chains, nullptr);
    return kept;
}
