// Products with weights, cut into pieces of rows of weights. Every cut gives the same bytes.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "crew.hpp"

namespace regard {
namespace {

constexpr int64_t kPiece = 64 << 10;  // bytes of weights that a thread takes at once, at least

// The rows as they are, or copied so that whole groups can be read.
const float* padded_rows(const Product& p, std::vector<float>& room) {
    if (p.columns % kGroup == 0) return p.x;
    const size_t wide = size_t((p.columns + kGroup - 1) / kGroup * kGroup);
    room.assign(size_t(p.rows) * wide, 0.0f);
    for (size_t r = 0; r < size_t(p.rows); r++)
        std::memcpy(&room[r * wide], p.x + r * size_t(p.stride), size_t(p.columns) * sizeof(float));
    return room.data();
}

}  // namespace

void multiply(std::vector<Product> products, const Target& target, int threads) {
    const Nested call;
    std::vector<float> room;
    const float* const x = padded_rows(products[0], room);
    std::vector<int64_t> ends;  // the number of pieces up to the end of each
    int64_t bytes = 0, pieces = 0;
    for (const Product& p : products) bytes += p.count * p.row;
    const int64_t size = std::max(kPiece, bytes / (16 * threads));
    const auto rows_of = [size](const Product& p) { return std::max<int64_t>(1, size / p.row); };
    for (Product& p : products) {
        if (!room.empty()) p.stride = int64_t(room.size()) / p.rows;
        p.x = x;
        ends.push_back(pieces += (p.count + rows_of(p) - 1) / rows_of(p));
    }
    threads = call.inner() ? 1 : int(std::min<int64_t>(threads, 1 + bytes / kWeightsOfAThread));
    std::atomic<int64_t> next{0};
    const auto work = [&](int) {
        const DefaultArithmetic arithmetic;
        for (int64_t n; (n = next++) < pieces;) {
            const auto end = std::upper_bound(ends.begin(), ends.end(), n);
            const Product& p = products[size_t(end - ends.begin())];
            const int64_t left = *end - n, rows = rows_of(p);  // the last piece of each is shorter
            const int64_t number = (p.count + rows - 1) / rows - left;
            target.multiply(p, number * rows, std::min(p.count, (number + 1) * rows));
        }
    };
    run_on_threads(threads, work, nullptr);
}

}  // namespace regard
