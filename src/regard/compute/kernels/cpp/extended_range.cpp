// One row again with numbers of any size, in plain loops: for the rare row that leaves the range of
// float64 although its inputs are finite (q·k near 1e308 and beyond, sums near the largest number).
//
// Sums are brought into range by powers of two, which round nothing, and logits have exponents of
// their own. A long double would not do: where it is no wider than a double it has no more range.
#include <algorithm>
#include <cmath>
#include <vector>

#include "driver.hpp"
#include "visibility.hpp"

namespace regard {
namespace {

// fraction · 2^exponent: the fraction is 0, NaN, infinite, or of a size from ½ to 1.
struct Number {
    double fraction = 0;
    int64_t exponent = 0;

    Number(double x = 0, int64_t power = 0) : fraction(x) {
        if (x == 0 || !std::isfinite(x)) return;
        int own;
        fraction = std::frexp(x, &own);
        exponent = power + own;
    }
    // The nearest double; infinite or 0 where it is beyond.
    double near() const {
        return std::ldexp(fraction, int(std::clamp<int64_t>(exponent, -9999, 9999)));
    }
};

Number operator-(Number x) { return {-x.fraction, x.exponent}; }
Number operator*(Number x, Number y) { return {x.fraction * y.fraction, x.exponent + y.exponent}; }
Number operator/(Number x, Number y) { return {x.fraction / y.fraction, x.exponent - y.exponent}; }
Number operator+(Number x, Number y) {
    if (!std::isfinite(x.fraction + y.fraction)) return x.fraction + y.fraction;
    if (x.fraction == 0) return y;
    if (y.fraction != 0 && x.exponent < y.exponent) std::swap(x, y);
    const int64_t down = std::max<int64_t>(y.exponent - x.exponent, -9999);
    return {x.fraction + std::ldexp(y.fraction, int(down)), x.exponent};
}
bool operator<(Number x, Number y) { return (x + -y).fraction < 0; }

double get(const char* from, int64_t at, Kind kind) {
    double x = 0;
    with_kind(kind, [&](auto of) { x = load_one<decltype(of)::kind>(from + at * size_of(kind)); });
    return x;
}

// The power of two that brings numbers down to 2^500, so that sums of their products are finite.
int down_to_range(const std::vector<double>& x) {
    double most = 0;
    for (const double one : x) most = std::isfinite(one) ? std::max(most, std::fabs(one)) : most;
    return std::max(0, (most > 0 ? std::ilogb(most) : 0) - 500);
}

Number dot(const std::vector<double>& x, const std::vector<double>& y) {
    double sum = 0, of_special = 0;
    for (size_t d = 0; d < x.size(); d++) {
        sum += x[d] * y[d];
        if (!std::isfinite(x[d]) || !std::isfinite(y[d])) of_special += x[d] * y[d];
    }
    // Finite products make no difference to a NaN or an infinity.
    if (of_special != 0) return of_special;
    if (std::isfinite(sum)) return sum;
    const int x_down = down_to_range(x), y_down = down_to_range(y);
    sum = 0;
    for (size_t d = 0; d < x.size(); d++)
        sum += std::ldexp(x[d], -x_down) * std::ldexp(y[d], -y_down);
    return {sum, x_down + y_down};
}

Number logit(const Request& q, const std::vector<double>& query, const std::vector<double>& key,
             int64_t b, int64_t h, int64_t i, int64_t j) {
    Number x = dot(query, key) * Number(q.scale);
    if (q.softcap != 0) {
        // A softcap changes a number far below it by less than rounding does.
        const Number part = x / Number(q.softcap);
        if (!std::isfinite(part.fraction) || part.exponent > -30)
            x = q.softcap * std::tanh(part.near());
    }
    if (q.bias.data) x = x + get(q.bias.at(b, h, i) + j * q.bias.column, 0, q.bias.kind);
    return x;
}

double sigmoid(double x) {
    const double e = std::exp(-std::fabs(x));
    return (x > 0 ? 1 : e) / (1 + e);
}

// One number of the output. A NaN or an infinity weighs 1, or 0 with a score of −∞, however small its
// weight in a softmax.
double output(const Request& q, int64_t b, int64_t g, int64_t e, const std::vector<int64_t>& keys,
              const std::vector<Number>& logits, const std::vector<double>& weights) {
    double sum = 0, small = 0, special = 0, low = q.sink ? 0 : INFINITY, high = -low;
    for (size_t n = 0; n < keys.size(); n++) {
        const char* row = q.value.at(b, g, keys[n]);
        double v = get(row + e * q.value.column, 0, q.value.kind);
        if (q.value.kind == Kind::int8) v *= double(number_at<float>(row + q.E));
        if (std::isfinite(v)) {
            sum += weights[n] * v;
            small += weights[n] * (v * 0x1p-63);  // no sum of these overflows
            low = std::min(low, v);
            high = std::max(high, v);
        } else {
            const bool weighs = q.sigmoid ? weights[n] > 0 : !std::isinf(logits[n].fraction);
            special += weighs ? v : v * 0;
        }
    }
    if (special != 0) return special;
    if (!std::isfinite(sum)) sum = small * 0x1p63;
    if (!q.sigmoid) sum = low <= high ? std::clamp(sum, low, high) : 0;  // a mean lies between them
    return sum + 0.0;
}

}  // namespace

void extended_range_row(const Request& q, int64_t b, int64_t h, int64_t i, bool whole) {
    const int64_t g = h / (q.H / q.G), row = (b * q.H + h) * q.L + i;
    const Kind weight = q.wide ? Kind::float64 : Kind::float32;
    std::vector<double> query(size_t(q.D)), key(size_t(q.D)), weights;
    std::vector<uint64_t> stack(size_t(words_of(q, 1)));
    std::vector<int64_t> keys;
    std::vector<Number> logits;
    Number most = -INFINITY;
    bool nan = false;
    load_row(query.data(), q.query.at(b, h, i), q.query.column, q.query.kind, q.D);
    for_visible(q, row_of(q, b, h, i), stack.data(), [&](int64_t j) {
        keys.push_back(j);
        load_row(key.data(), q.key.at(b, g, j), q.key.column, q.key.kind, q.D);
        logits.push_back(nan && !q.sigmoid ? Number() : logit(q, query, key, b, h, i, j));
        const double fraction = logits.back().fraction;
        nan |= std::isnan(fraction) || (fraction == INFINITY && !q.sigmoid);
        if (most < logits.back()) most = logits.back();
        return false;
    });
    if (q.stopped(q.state)) return;
    double total = 0;
    if (q.sink) {
        const Number sink = q.sink[b * q.H + h];
        if (most < sink) most = sink;
        total = std::exp((sink + -most).near());
    }
    if (q.sigmoid) {
        for (const Number x : logits) weights.push_back(sigmoid((x + q.shift).near()));
    } else {
        nan |= std::isinf(most.fraction);  // all of them −∞
        for (const Number x : logits) weights.push_back(std::exp((x + -most).near()));
        for (const double x : weights) total += x;
        if (nan) total = NAN;
        for (double& x : weights) x /= total;
    }

    for (int64_t e = 0; e < q.E; e++) {
        if (!whole && std::isfinite(get(q.output, row * q.E + e, q.kind))) continue;
        if (q.stopped(q.state)) return;
        const double x = nan ? NAN : output(q, b, g, e, keys, logits, weights);
        store_one(q.output, row * q.E + e, q.kind, x);
    }
    if (!whole) return;
    if (q.lse) store_one(q.lse, row, q.lse_kind, (most + std::log(total)).near());
    if (!q.weights) return;
    for (int64_t j = 0; j < q.S; j++) store_one(q.weights, row * q.S + j, weight, 0);
    for (size_t n = 0; n < keys.size(); n++)
        store_one(q.weights, row * q.S + keys[n], weight, weights[n]);
}

}  // namespace regard
