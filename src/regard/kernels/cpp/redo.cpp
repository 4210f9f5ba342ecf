// One row again in long double, plainly: for the rare row that left the range of float32 although
// its inputs are finite (q·k near 1e38 and beyond, sums of values near the largest float).
//
// pass 1 scores of the visible keys, pass 2 maximum, pass 3 exponentials and sum, pass 4 output.
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
    std::vector<int64_t> keys;
    std::vector<Wide> p;
    Wide maximum = -INFINITY;
    bool poisoned = false;
    for (int64_t j = 0; j < q.S; j++) {
        if (j % kChunk == 0 && q.stopped(q.state)) return;
        if (!seen(q, b, h, i, j)) continue;
        Wide x = 0;
        for (int64_t d = 0; d < q.D; d++)
            x += number(q.query, q.query.at(b, h, i) + d * q.query.column) *
                 number(q.key, q.key.at(b, g, j) + d * q.key.column);
        x *= q.scale;
        if (q.softcap != 0) x = q.softcap * std::tanh(x / q.softcap);
        if (q.bias.data) x += number(q.bias, q.bias.at(b, h, i) + j * q.bias.column);
        keys.push_back(j);
        p.push_back(x);
        poisoned |= std::isnan(x);
        maximum = x > maximum ? x : maximum;
    }
    if (q.sink) maximum = std::max(maximum, Wide(q.sink[b * q.H + h]));
    Wide sum = q.sink ? std::exp(Wide(q.sink[b * q.H + h]) - maximum) : 0;
    for (Wide& x : p) sum += x = std::exp(x - maximum);
    if (poisoned) sum = NAN;
    const int64_t row = (b * q.H + h) * q.L + i;
    for (int64_t e = 0; e < q.E; e++) {
        if (q.stopped(q.state)) return;
        if (!whole_row && std::isfinite(get(q.output, row * q.E + e, q.kind))) continue;
        Wide x = 0;
        for (size_t n = 0; n < keys.size(); n++)
            x += p[n] / sum * number(q.value, q.value.at(b, g, keys[n]) + e * q.value.column);
        put(q.output, row * q.E + e, q.kind, x == 0 ? Wide(0) : x);
    }
    if (!whole_row) return;
    if (q.lse) put(q.lse, row, q.lse_kind, maximum + std::log(sum));
    if (q.weights) {  // in the type of the arithmetic
        const Kind kind = q.wide ? Kind::float64 : Kind::float32;
        for (int64_t j = 0; j < q.S; j++) put(q.weights, row * q.S + j, kind, 0);
        for (size_t n = 0; n < keys.size(); n++)
            put(q.weights, row * q.S + keys[n], kind, p[n] / sum);
    }
}

}  // namespace regard
