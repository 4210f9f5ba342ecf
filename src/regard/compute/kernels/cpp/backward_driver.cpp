// Cuts a backward pass into blocks of keys. The blocks of a head are begun in ascending order, and each
// waits for the one before it, block of rows by block of rows, before it adds to the queries' gradients.
#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "crew.hpp"

namespace regard {
namespace {

constexpr double kGradientsWorth = 1e6;  // multiply-adds of one product

// Sums of the queries' gradients, one set for each key head in progress.
class Sums {
  public:
    Sums(size_t bytes, int64_t heads) : bytes_(bytes), of_head_(size_t(heads)) {}

    char* of(int64_t head) {
        if (!bytes_) return nullptr;
        const std::lock_guard<std::mutex> lock(mutex_);
        char*& sums = of_head_[size_t(head)];
        if (sums) return sums;
        if (free_.empty()) {
            all_.push_back(std::make_unique<Buffer>());
            free_.push_back(all_.back()->of(1, bytes_));
        }
        sums = free_.back();
        free_.pop_back();
        return sums;
    }
    void done(int64_t head) {
        if (!bytes_) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(of_head_[size_t(head)]);
    }

  private:
    const size_t bytes_;
    std::mutex mutex_;
    std::vector<char*> of_head_, free_;
    std::vector<std::unique_ptr<Buffer>> all_;
};

Ending attempt(Backward w, const Target& target, int threads,
               const std::function<bool()>& interrupted) {
    const Nested call;
    const Request& q = w.q;
    const Kernel& kernel = target.kernels[q.wide];
    const int64_t heads = w.head_count,
                  blocks = (q.S + kernel.backward_keys - 1) / kernel.backward_keys;
    const double work = double(q.B) * double(q.H) * double(q.L) * double(q.S) * double(q.D + q.E);
    threads = int(
        std::min<double>({double(threads), 1 + work / kGradientsWorth, double(heads * blocks)}));
    threads = call.inner() ? 1 : std::clamp(threads, 1, kMostThreads);
    const size_t scratch = whole_lines(kernel.backward_scratch_bytes(w));
    Buffer memory, rows, turns, counters;
    char* const room = memory.of(scratch, size_t(threads));
    w.rows = rows.of(size_t(q.B * q.H * q.L), kernel.row_bytes);
    w.turns = reinterpret_cast<int64_t*>(turns.of(size_t(q.B * q.G * blocks), sizeof(int64_t)));
    std::fill_n(w.turns, q.B * q.G * blocks, 0);
    w.idle = [](void*) { std::this_thread::yield(); };
    Sums sums(kernel.sums_bytes(w), heads);
    // Every thread begins with a share of key heads that stays in its own cache, then helps others.
    const int64_t shares = w.in_order ? 1 : std::gcd(heads, int64_t(threads));
    const int64_t each = heads / shares * blocks;
    Counter* const share = reinterpret_cast<Counter*>(
        counters.of(size_t(shares + 1), sizeof(Counter)));
    for (int64_t n = 0; n < shares + 1; n++) new (share + n) Counter;
    Crew crew(threads, interrupted);
    const auto prepare = [&](const Request& mine, int thread) {
        Backward own = w;
        own.q = mine;
        const int64_t group = q.H / q.G;
        for (int64_t n; !crew.stopped() && (n = share[shares].next++) < heads * group;) {
            const int64_t head = w.heads[n / group], h = head % q.G * group + n % group;
            kernel.prepare_rows(own, head / q.G, h, room + size_t(thread) * scratch);
            mine.stopped(mine.state);
        }
    };
    const auto compute = [&](const Request& mine, int thread) {
        Backward own = w;
        own.q = mine;
        for (int64_t turn = 0; turn < shares; turn++) {
            const int64_t number = (thread + turn) % shares;
            for (int64_t n; !crew.stopped() && (n = share[number].next++) < each;) {
                const int64_t task = number * each + n, place = task / blocks,
                              block = task % blocks;
                kernel.backward(own, w.heads[place] / q.G, w.heads[place] % q.G, block,
                                sums.of(place), room + size_t(thread) * scratch);
                if (block + 1 == blocks && !crew.stopped()) sums.done(place);
            }
        }
    };
    const Ending how = crew.run(q, prepare);
    return how == Ending::complete ? crew.run(q, compute) : how;
}

}  // namespace

bool answer_backward(Backward work, const Target& target, int threads,
                     const std::function<bool()>& interrupted) {
    const DefaultArithmetic arithmetic;
    if (work.head_count == 0) return true;
    return until_complete([&] { return attempt(work, target, threads, interrupted); });
}

}  // namespace regard
