// Cuts a call into pieces: a block of rows of one key head, against all keys or some chunks of them.
// Every cut gives the same bytes, so how to cut is a question of speed alone.
#include "driver.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "redo.hpp"
#include "threads.hpp"

namespace regard {
namespace {

// Memory that a thread keeps from call to call: page faults cost more than a small call.
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    char* of(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            data_ = nullptr;
            size_ = 0;
            const size_t whole = (bytes + 63) / 64 * 64;
            data_ = static_cast<char*>(std::aligned_alloc(64, whole));
            if (!data_) throw std::bad_alloc();
            size_ = whole;
        }
        return data_;
    }
    void trim(size_t most) {
        if (size_ <= most) return;
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
    }

  private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

// The floating-point state of the caller comes back as it was, flags included; meanwhile the
// default holds: rounding to nearest, subnormal numbers kept, no traps.
class PlainArithmetic {
  public:
#if defined(__x86_64__)
    // Vectors only look at this register; the other one, of long double, costs ten times as much
    // to save and is saved by redo_row, which alone uses it.
    PlainArithmetic() : before_(_mm_getcsr()) {
        if ((before_ & ~0x3fu) != 0x1f80) _mm_setcsr(0x1f80);
    }
    ~PlainArithmetic() {
        if (_mm_getcsr() != before_) _mm_setcsr(before_);
    }

  private:
    unsigned before_;
#else
    PlainArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~PlainArithmetic() { std::fesetenv(&before_); }

  private:
    std::fenv_t before_;
#endif
};

constexpr size_t kKept = size_t(8) << 20;
// Multiply-adds below which waking another thread costs more than it brings (about 100 µs).
constexpr double kWorthAThread = 4e6;

size_t checked_product(size_t a, size_t b) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) throw std::bad_alloc();
    return product;
}

}  // namespace

bool answer(Request q, const Target& target, int threads,
            const std::function<bool()>& interrupted) {
    q.redo = redo_row;
    const int64_t rows = q.G ? q.H / q.G * q.L : 0;
    if (q.B == 0 || rows == 0) return true;
    const int64_t chunks = (q.S + kChunk - 1) / kChunk;
    const int64_t blocks = (rows + target.rows_per_task - 1) / target.rows_per_task;
    const int64_t tasks = q.B * q.G * blocks;

    const double work = double(q.B) * double(q.H) * double(q.L) * double(q.S) * double(q.D + q.E);
    threads = int(std::min<double>(threads, 1 + work / kWorthAThread));
    if (threads < 1) threads = 1;

    // Key heads that broadcast along the batch are packed once.
    const bool shared = blocks > 1;
    std::vector<int64_t> head_of;  // (B): which packed set
    std::vector<int64_t> first_of;
    if (shared) {
        std::map<std::pair<int64_t, int64_t>, int64_t> known;
        for (int64_t b = 0; b < q.B; b++) {
            const auto place = std::make_pair(q.key.batch[b], q.value.batch[b]);
            const auto found = known.emplace(place, int64_t(first_of.size()));
            if (found.second) first_of.push_back(b);
            head_of.push_back(found.first->second);
        }
    }
    // With few pieces of work and many keys, the keys are split over threads too.
    int64_t ranges = 1;
    if (threads > 1 && tasks < 2 * threads && chunks > 1)
        ranges = std::min<int64_t>(chunks, (4 * threads + tasks - 1) / tasks);
    const int64_t range = (chunks + ranges - 1) / std::max<int64_t>(ranges, 1);
    if (chunks) ranges = (chunks + range - 1) / range;

    const size_t scratch_size = (target.scratch_bytes(q) + 63) / 64 * 64;
    const size_t packed_size = shared ? (target.packed_bytes(q) + 63) / 64 * 64 : 0;
    const int64_t block_rows = std::min<int64_t>(rows, target.rows_per_task);
    const size_t partial_size = ranges > 1 ? target.partial_bytes(q, block_rows, chunks) : 0;

    thread_local Buffer scratch_buffer, packed_buffer, partial_buffer;
    char* scratch = scratch_buffer.of(checked_product(scratch_size, size_t(threads)));
    char* packed = shared ? packed_buffer.of(checked_product(
                                packed_size, first_of.size() * size_t(q.G)))
                          : nullptr;
    char* partial = ranges > 1 ? partial_buffer.of(checked_product(partial_size, size_t(tasks)))
                               : nullptr;

    const int64_t packs = shared ? int64_t(first_of.size()) * q.G * chunks : 0;
    std::atomic<int64_t> next_pack{0}, packs_done{0}, next{0};
    std::vector<std::atomic<int64_t>> ranges_done(ranges > 1 ? size_t(tasks) : 0);
    for (auto& count : ranges_done) count = 0;
    std::atomic<bool> stop{false};

    auto look = [&, last = std::chrono::steady_clock::time_point()]() mutable {
        if (!interrupted) return;
        const auto now = std::chrono::steady_clock::now();
        if (now - last < std::chrono::milliseconds(20)) return;
        last = now;
        if (interrupted()) stop = true;
    };
    auto work_on = [&](int thread) {
        const PlainArithmetic plain;
        char* mine = scratch + size_t(thread) * scratch_size;
        for (int64_t n; !stop && (n = next_pack++) < packs;) {
            const int64_t set = n / chunks / q.G, g = n / chunks % q.G;
            target.pack(q, first_of[size_t(set)], g, n % chunks,
                        packed + size_t(set * q.G + g) * packed_size);
            packs_done++;
            if (thread == 0) look();
        }
        while (!stop && packs_done.load(std::memory_order_acquire) < packs)
            std::this_thread::yield();
        for (int64_t n; !stop && (n = next++) < tasks * ranges;) {
            // The longest first: under a causal mask these are the last rows.
            const int64_t task = n / ranges, part = n % ranges;
            const int64_t block = blocks - 1 - task / (q.B * q.G);
            const int64_t b = task % (q.B * q.G) / q.G, g = task % q.G;
            const int64_t first = block * target.rows_per_task;
            const int64_t last = std::min(rows, first + target.rows_per_task);
            const char* keys =
                shared ? packed + size_t(head_of[size_t(b)] * q.G + g) * packed_size : nullptr;
            char* parts = partial ? partial + size_t(task) * partial_size : nullptr;
            target.attend(q, b, g, first, last, part * range,
                          std::min(chunks, (part + 1) * range), keys, mine, parts);
            if (parts && ++ranges_done[size_t(task)] == ranges)
                target.merge(q, b, g, first, last, chunks, parts, mine);
            if (thread == 0) look();
        }
    };
    run_on_threads(threads, work_on, look);
    packed_buffer.trim(kKept);
    partial_buffer.trim(kKept);
    scratch_buffer.trim(kKept * size_t(threads));
    return !stop;
}

}  // namespace regard
