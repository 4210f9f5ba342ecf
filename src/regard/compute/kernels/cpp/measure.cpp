// Short windows of work on all threads, and the fastest of them.
#include "measure.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "driver.hpp"
#include "threads.hpp"

namespace regard {
namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Whatever is computed is added here, so that it cannot be left out.
std::atomic<double> kept{0};

void raise(std::atomic<double>& to, double x) {
    for (double before = to; x > before && !to.compare_exchange_weak(before, x);) {}
}

// work(thread) does a piece and says how much that was. A window begins when all threads are there
// and ends with the last of them; every thread works until it is over, one piece at least.
double fastest(int threads, double window, double seconds, const std::function<double(int)>& work) {
    constexpr double kPatience = 0.002;  // a busy pool gives no threads
    double best = 0;
    const double enough = now() + seconds;
    for (int n = 0; n < 3 || now() < enough; n++) {
        std::atomic<int> here{0};
        std::atomic<double> begin{0}, end{0}, done{0};
        const double called = now();
        run_on_threads(threads, [&](int thread) {
            const DefaultArithmetic arithmetic;
            here++;
            while (here < threads && now() < called + kPatience) {}
            double none = 0;
            begin.compare_exchange_strong(none, now());
            const double until = begin + window;
            double mine = 0;
            do mine += work(thread);
            while (now() < until);
            raise(end, now());
            for (double before = done; !done.compare_exchange_weak(before, before + mine);) {}
        }, nullptr);
        best = std::max(best, done / (end - begin));
    }
    return best;
}

void keep(double x) { kept.store(x, std::memory_order_relaxed); }

// Seconds: shorter than what a scheduler gives one process on a busy machine, so that a window can
// fall between two disturbances; long calls cannot, and short ones would seem faster than the peak.
constexpr double kWindow = 0.001;

}  // namespace

double most_operations(const Kernel& kernel, int threads, double seconds) {
    constexpr int64_t kRounds = 200;  // some 4 to 10 µs
    if (!kernel.multiply_adds) return 0;
    const double piece = double(kRounds) * double(kernel.operations);
    return fastest(threads, kWindow, seconds, [&](int) {
        keep(kernel.multiply_adds(kRounds));
        return piece;
    });
}

double most_bytes(const Target& target, const char* data, size_t bytes, int threads,
                  double seconds) {
    // Every thread reads its own part, a piece per window, again and again: the parts together must
    // be larger than the caches. Every piece prefetches differently from the one before.
    constexpr size_t kPiece = size_t(4) << 20, kAhead[] = {0, 1024, 4096};
    const size_t part = bytes / size_t(threads) / kReadBlock * kReadBlock;
    if (!part) return 0;
    std::vector<size_t> next(size_t(threads), 0);
    return fastest(threads, 0, seconds, [&](int thread) {
        size_t& piece = next[size_t(thread)];
        const size_t pieces = (part + kPiece - 1) / kPiece, at = piece % pieces * kPiece;
        const size_t size = std::min(kPiece, part - at), ahead = kAhead[piece++ % 3];
        keep(target.read(data + size_t(thread) * part + at, size, ahead));
        return double(size);
    });
}

double clock_rate(int threads, double seconds) {
    constexpr int64_t kRounds = 20000;  // some 10 µs
    std::atomic<double> best{0};
    fastest(threads, kWindow, seconds, [&](int) {
        // Each operation waits for the one before it and takes one cycle.
        volatile uint64_t given[3] = {1, 0x5555, 0x3333};
        uint64_t x = given[0];
        const uint64_t a = given[1], b = given[2];
        const double begin = now();
#pragma GCC unroll 4
        for (int64_t n = 0; n < kRounds; n++) x = (x + a) ^ b;
        keep(double(x));
        // For one piece on one thread: a chain of single cycles shares nothing with a neighbour.
        raise(best, 2.0 * kRounds / (now() - begin));
        return 1.0;
    });
    return best;
}

}  // namespace regard
