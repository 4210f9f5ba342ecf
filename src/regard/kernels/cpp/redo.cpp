// One row again in long double, plainly: for the rare row that left the range of float32 although
// its inputs are finite (q·k near 1e38 and beyond, sums of values near the largest float).
//
// pass 1 scores of the visible keys, pass 2 maximum, pass 3 exponentials and sum, pass 4 output.
//
// What a NaN of the inputs reaches comes here too. That is found by looking, without arithmetic:
// many times slower than the kernel's own, it would let one NaN hold up a whole call.
#include "redo.hpp"

#include <cfenv>
#include <cmath>
#include <limits>
#include <vector>

#include "rules.hpp"

namespace regard {
namespace {

typedef long double Wide;

Wide number(const Array& a, const char* at) {
    switch (a.kind) {
        case Kind::float32: {
            float x;
            __builtin_memcpy(&x, at, sizeof x);
            return x;
        }
        case Kind::float64: {
            double x;
            __builtin_memcpy(&x, at, sizeof x);
            return x;
        }
        default: {
            uint16_t x;
            __builtin_memcpy(&x, at, sizeof x);
            return a.kind == Kind::float16 ? from_half(x) : from_bfloat(x);
        }
    }
}

// Whether one of n numbers is NaN or infinite: its exponent has every bit.
template <class Bits> bool one_special(const char* at, int64_t stride, int64_t n, Bits exponent) {
    Bits found = 0;
    for (int64_t k = 0; k < n; k++) {
        Bits bits;
        __builtin_memcpy(&bits, at + k * stride, sizeof bits);
        found |= Bits((bits & exponent) == exponent);
    }
    return found != 0;
}
template <class Bits> bool one_special_of(const Array& a, const char* at, int64_t n, Bits exponent) {
    // With a stride known beforehand the loop is one of vectors.
    if (a.column == int64_t(sizeof(Bits))) return one_special(at, sizeof(Bits), n, exponent);
    return one_special(at, a.column, n, exponent);
}
bool any_special(const Array& a, const char* at, int64_t n) {
    switch (a.kind) {
        case Kind::float16: return one_special_of<uint16_t>(a, at, n, 0x7c00);
        case Kind::bfloat16: return one_special_of<uint16_t>(a, at, n, 0x7f80);
        case Kind::float32: return one_special_of<uint32_t>(a, at, n, 0x7f800000);
        case Kind::float64: return one_special_of<uint64_t>(a, at, n, 0x7ff0000000000000);
    }
    return true;
}

bool seen(const Request& q, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t position = i + q.offset[b];
    if (q.length && j >= q.length[b]) return false;
    if (q.right >= 0 && j > plus(position, q.right)) return false;
    if (q.left >= 0 && j < plus(position, -q.left)) return false;
    if (q.bias.data &&
        number(q.bias, q.bias.at(b, h, i) + j * q.bias.column) == -INFINITY)
        return false;
    std::vector<bool> stack;
    for (int32_t step = 0; step < q.program_size; step++) {
        const Node& node = q.program[step];
        switch (node.rule) {
            case Rule::all:
            case Rule::any: {
                const bool second = stack.back();
                stack.pop_back();
                stack.back() = node.rule == Rule::all ? stack.back() && second
                                                      : stack.back() || second;
                break;
            }
            case Rule::negate: stack.back() = !stack.back(); break;
            case Rule::boolean:
                stack.push_back(*(node.mask.at(b, h, i) + j * node.mask.column) != 0);
                break;
            case Rule::lengths: stack.push_back(j < node.lengths[b]); break;
            case Rule::segments:
                stack.push_back(node.queries[b * q.L + i] == node.keys[b * q.S + j]);
                break;
            case Rule::causal: stack.push_back(j <= position); break;
            case Rule::window:
                stack.push_back((node.left < 0 || j >= plus(position, -node.left)) &&
                                (node.right < 0 || j <= plus(position, node.right)));
                break;
        }
    }
    return stack.empty() || stack.back();
}

void put(char* to, int64_t at, Kind kind, Wide x) {
    switch (kind) {
        case Kind::float32: ((float*)to)[at] = float(x); break;
        case Kind::float64: ((double*)to)[at] = double(x); break;
        case Kind::float16: ((uint16_t*)to)[at] = to_half(to_odd(double(x))); break;
        case Kind::bfloat16: ((uint16_t*)to)[at] = to_bfloat(to_odd(double(x))); break;
    }
}

Wide get(const char* from, int64_t at, Kind kind) {
    Array a;
    a.kind = kind;
    const int64_t size = kind == Kind::float64 ? 8 : kind == Kind::float32 ? 4 : 2;
    return number(a, from + at * size);
}

Wide logit(const Request& q, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t g = h / (q.H / q.G);
    Wide x = 0;
    for (int64_t d = 0; d < q.D; d++)
        x += number(q.query, q.query.at(b, h, i) + d * q.query.column) *
             number(q.key, q.key.at(b, g, j) + d * q.key.column);
    x *= q.scale;
    if (q.softcap != 0) x = q.softcap * std::tanh(x / q.softcap);
    if (q.bias.data) x += number(q.bias, q.bias.at(b, h, i) + j * q.bias.column);
    return x;
}

// Whether a NaN or an infinity of the inputs makes every number of the row NaN.
bool poisoned(const Request& q, int64_t b, int64_t h, int64_t i) {
    const int64_t g = h / (q.H / q.G);
    const bool every = any_special(q.query, q.query.at(b, h, i), q.D);
    for (int64_t j = 0; j < q.S; j++) {
        if (j % kChunk == 0 && q.stopped(q.state)) return false;
        const bool special =
            every || any_special(q.key, q.key.at(b, g, j), q.D) ||
            (q.bias.data &&
             any_special(q.bias, q.bias.at(b, h, i) + j * q.bias.column, 1));
        if (!special || !seen(q, b, h, i, j)) continue;
        const Wide x = logit(q, b, h, i, j);
        if (std::isnan(x) || x == INFINITY) return true;
    }
    return false;
}

// Which columns of a row's output arithmetic has to make. Those where a visible value is NaN, or
// infinities of both signs meet, are NaN without it; those that became the one infinity among their
// values are right.
std::vector<int64_t> columns_left(const Request& q, int64_t b, int64_t h, int64_t i,
                                  const std::vector<int64_t>& wanted) {
    enum { Up = 1, Down = 2, Nan = 4 };
    const int64_t g = h / (q.H / q.G);
    std::vector<uint8_t> met(size_t(q.E), 0);
    for (int64_t j = 0; j < q.S; j++) {
        if (j % kChunk == 0 && q.stopped(q.state)) return {};
        const char* values = q.value.at(b, g, j);
        if (!any_special(q.value, values, q.E) || !seen(q, b, h, i, j)) continue;
        for (const int64_t e : wanted) {
            const Wide x = number(q.value, values + e * q.value.column);
            if (std::isnan(x)) met[size_t(e)] |= Nan;
            else if (std::isinf(x)) met[size_t(e)] |= x > 0 ? Up : Down;
        }
    }
    std::vector<int64_t> left;
    const int64_t row = (b * q.H + h) * q.L + i;
    for (const int64_t e : wanted) {
        const uint8_t all = met[size_t(e)];
        const Wide made = get(q.output, row * q.E + e, q.kind);
        if (all & Nan || all == (Up | Down))
            put(q.output, row * q.E + e, q.kind, NAN);
        else if (!(all == Up && made == INFINITY) && !(all == Down && made == -INFINITY))
            left.push_back(e);
    }
    return left;
}

}  // namespace

void redo_row(const Request& q, int64_t b, int64_t h, int64_t i, bool whole_row) {
    struct Restored {
        std::fenv_t before;
        Restored() {
            std::fegetenv(&before);
            std::fesetenv(FE_DFL_ENV);
        }
        ~Restored() { std::fesetenv(&before); }
    } restored;
    const int64_t g = h / (q.H / q.G);
    const int64_t row = (b * q.H + h) * q.L + i;
    const Kind arithmetic = q.wide ? Kind::float64 : Kind::float32;  // the type of the weights
    if (whole_row && poisoned(q, b, h, i)) {
        for (int64_t e = 0; e < q.E; e++) put(q.output, row * q.E + e, q.kind, NAN);
        if (q.lse) put(q.lse, row, q.lse_kind, NAN);
        for (int64_t j = 0; q.weights && j < q.S; j++)
            put(q.weights, row * q.S + j, arithmetic, seen(q, b, h, i, j) ? Wide(NAN) : 0);
        return;
    }
    std::vector<int64_t> columns;
    for (int64_t e = 0; e < q.E; e++)
        if (whole_row || !std::isfinite(get(q.output, row * q.E + e, q.kind))) columns.push_back(e);
    if (!whole_row) columns = columns_left(q, b, h, i, columns);
    if (columns.empty() && !whole_row) return;

    std::vector<int64_t> keys;
    std::vector<Wide> p;
    Wide maximum = -INFINITY;
    bool broken = false;
    for (int64_t j = 0; j < q.S; j++) {
        if (j % kChunk == 0 && q.stopped(q.state)) return;
        if (!seen(q, b, h, i, j)) continue;
        const Wide x = logit(q, b, h, i, j);
        keys.push_back(j);
        p.push_back(x);
        broken |= std::isnan(x);
        maximum = x > maximum ? x : maximum;
    }
    if (q.sink) maximum = std::max(maximum, Wide(q.sink[b * q.H + h]));
    Wide sum = q.sink ? std::exp(Wide(q.sink[b * q.H + h]) - maximum) : 0;
    for (Wide& x : p) sum += x = std::exp(x - maximum);
    if (broken) sum = NAN;
    for (Wide& x : p) x /= sum;
    for (const int64_t e : columns) {
        if (q.stopped(q.state)) return;
        Wide x = 0;
        for (size_t n = 0; n < keys.size(); n++)
            x += p[n] * number(q.value, q.value.at(b, g, keys[n]) + e * q.value.column);
        put(q.output, row * q.E + e, q.kind, x == 0 ? Wide(0) : x);
    }
    if (!whole_row) return;
    if (q.lse) put(q.lse, row, q.lse_kind, maximum + std::log(sum));
    if (q.weights) {
        for (int64_t j = 0; j < q.S; j++) put(q.weights, row * q.S + j, arithmetic, 0);
        for (size_t n = 0; n < keys.size(); n++)
            put(q.weights, row * q.S + keys[n], arithmetic, p[n]);
    }
}

}  // namespace regard
