// Cuts a call into pieces: a block of rows of one key head, against all keys or some chunks of them.
// Every cut gives the same bytes, so how to cut is a question of speed alone.
#include "driver.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "unbounded.hpp"
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

// Pieces of work that threads take one by one, and those that are done; on a line of memory of its
// own.
struct alignas(64) Counter {
    std::atomic<int64_t> next{0}, done{0};
};

constexpr size_t kKept = size_t(8) << 20;
// Multiply-adds below which waking another thread costs more than it brings (about 50 µs).
constexpr double kWorthAThread = 2e6;

// As many rows as keys are well used by, in blocks that every thread gets the same number of, and no
// short one left over.
int64_t rows_of_a_piece(const Target& target, int64_t rows, int64_t heads, int threads) {
    constexpr int64_t kPieces = 16, kTiles = 6;
    const int64_t tile = target.rows_per_tile, shortest = (rows + kTiles * tile - 1) / (kTiles * tile);
    int64_t blocks = (rows + target.rows_per_task - 1) / target.rows_per_task;
    if (threads > 1) {
        blocks = std::max(blocks, (kPieces * threads + heads - 1) / heads);
        while (blocks * heads % threads && blocks * heads < 4 * kPieces * threads) blocks++;
        blocks = std::min(blocks, std::max<int64_t>(shortest, 1));
    }
    return ((rows + blocks - 1) / blocks + tile - 1) / tile * tile;
}

size_t checked_product(size_t a, size_t b) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) throw std::bad_alloc();
    return product;
}

enum class Ending { complete, interrupted, forked };

Ending attempt(Request q, const Target& target, int threads,
               const std::function<bool()>& interrupted) {
    const PlainArithmetic plain;
    q.unbounded_row = unbounded_row;
    const int64_t rows = q.G ? q.H / q.G * q.L : 0;
    if (q.B == 0 || rows == 0) return Ending::complete;
    const int64_t chunks = (q.S + kChunk - 1) / kChunk;
    const double work = double(q.B) * double(q.H) * double(q.L) * double(q.S) * double(q.D + q.E);
    threads = int(std::min<double>(threads, 1 + work / kWorthAThread));
    threads = std::clamp(threads, 1, kMostThreads);
    // A signal handler may call back into this function while a call of the same thread is under
    // way: the inner one has memory of its own and leaves the pool alone.
    thread_local bool busy = false;
    const bool nested = busy;
    struct Busy {
        bool before = busy;
        Busy() { busy = true; }
        ~Busy() { busy = before; }
    } const guard;
    if (nested) threads = 1;

    const int64_t block_rows = rows_of_a_piece(target, rows, q.B * q.G, threads);
    const int64_t blocks = (rows + block_rows - 1) / block_rows;
    const int64_t tasks = q.B * q.G * blocks;

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
    // All chunks are kept until they are merged; so much memory threads may take, and no more.
    const size_t most = kKept * size_t(threads) / size_t(tasks);
    if (ranges > 1 && target.partial_bytes(q, block_rows, chunks) > most) ranges = 1;
    const int64_t range = (chunks + ranges - 1) / std::max<int64_t>(ranges, 1);
    if (chunks) ranges = (chunks + range - 1) / range;

    const size_t scratch_size = (target.scratch_bytes(q) + 63) / 64 * 64;
    const size_t packed_size = shared ? (target.packed_bytes(q) + 63) / 64 * 64 : 0;
    const size_t partial_size = ranges > 1 ? target.partial_bytes(q, block_rows, chunks) : 0;

    // Every thread begins with key heads of its own, the same ones in every call: what it reads and
    // writes is then in its own cache. Whoever is done helps the others.
    const int64_t heads = q.B * q.G, shares = std::gcd(heads, int64_t(threads));
    const int64_t heads_each = heads / shares, tasks_each = heads_each * blocks * ranges;
    const size_t packed_heads = first_of.size() * size_t(q.G);
    const size_t counters = size_t(shares) + packed_heads + (ranges > 1 ? size_t(tasks) : 0);

    thread_local Buffer kept[4];
    Buffer own[4];
    Buffer& scratch_buffer = nested ? own[0] : kept[0];
    Buffer& packed_buffer = nested ? own[1] : kept[1];
    Buffer& partial_buffer = nested ? own[2] : kept[2];
    Buffer& counter_buffer = nested ? own[3] : kept[3];
    char* scratch = scratch_buffer.of(checked_product(scratch_size, size_t(threads)));
    char* packed =
        shared ? packed_buffer.of(checked_product(packed_size, packed_heads)) : nullptr;
    char* partial = ranges > 1 ? partial_buffer.of(checked_product(partial_size, size_t(tasks)))
                               : nullptr;

    Counter* const share_of =
        reinterpret_cast<Counter*>(counter_buffer.of(counters * sizeof(Counter)));
    Counter* const packing = share_of + shares;
    Counter* const parts_of = packing + packed_heads;
    for (size_t n = 0; n < counters; n++) new (share_of + n) Counter;
    std::atomic<bool> stop{false}, exhausted{false};
    bool raised = false;  // by a signal handler
    const unsigned before = forks();

    std::chrono::steady_clock::time_point last{};
    auto look = [&] {
        if (!interrupted || raised) return;
        const auto now = std::chrono::steady_clock::now();
        if (now - last < std::chrono::milliseconds(20)) return;
        last = now;
        raised = interrupted();
        if (raised || (threads > 1 && forks() != before)) stop = true;
    };
    // Only the caller's own thread may ask Python; the others look at the flag.
    struct Seat {
        const std::atomic<bool>* stop;
        const std::function<void()>* look;
    };
    const std::function<void()> ask = look;
    auto pieces = [&](int thread) {
        const PlainArithmetic plain_here;
        Seat seat = {&stop, thread == 0 ? &ask : nullptr};
        Request mine = q;
        mine.state = &seat;
        mine.stopped = [](void* state) {
            const Seat& here = *static_cast<Seat*>(state);
            if (here.look) (*here.look)();
            return here.stop->load(std::memory_order_relaxed);
        };
        char* room = scratch + size_t(thread) * scratch_size;
        // The panels of one key head, once for all: whoever needs them first begins, others join in.
        auto keys_of = [&](int64_t b, int64_t g) {
            const int64_t set = head_of[size_t(b)], head = set * q.G + g;
            char* keys = packed + size_t(head) * packed_size;
            Counter& state = packing[head];
            for (int64_t n; !stop && (n = state.next++) < chunks; state.done++) {
                target.pack(mine, first_of[size_t(set)], g, n, keys);
                if (thread == 0) look();
            }
            while (!stop && state.done < chunks) std::this_thread::yield();
            return keys;
        };
        for (int64_t turn = 0; turn < shares; turn++) {
            const int64_t number = (thread + turn) % shares;
            for (int64_t n; !stop && (n = share_of[number].next++) < tasks_each;) {
                // Of a head the longest first: under a causal mask these are the last rows.
                const int64_t block = blocks - 1 - n / ranges % blocks, part = n % ranges;
                const int64_t head = number * heads_each + n / ranges / blocks;
                const int64_t b = head / q.G, g = head % q.G;
                const int64_t first = block * block_rows, last = std::min(rows, first + block_rows);
                const char* keys = shared ? keys_of(b, g) : nullptr;
                if (stop) return;
                const int64_t task = head * blocks + block;
                char* parts = partial ? partial + size_t(task) * partial_size : nullptr;
                target.attend(mine, b, g, first, last, part * range,
                              std::min(chunks, (part + 1) * range), keys, room, parts);
                if (parts && ++parts_of[task].done == ranges && !stop)
                    target.merge(mine, b, g, first, last, chunks, parts, room);
            }
        }
    };
    auto work_on = [&](int thread) {
        try {
            pieces(thread);
        } catch (const std::bad_alloc&) {  // from redoing a row; no exception may leave a thread
            exhausted = true;
            stop = true;
        }
    };
    run_on_threads(threads, work_on, look);
    packed_buffer.trim(kKept);
    partial_buffer.trim(kKept);
    counter_buffer.trim(kKept);
    scratch_buffer.trim(kKept * size_t(threads));
    if (exhausted) throw std::bad_alloc();
    if (!stop) return Ending::complete;
    return raised ? Ending::interrupted : Ending::forked;
}

}  // namespace

bool answer(Request request, const Target& target, int threads,
            const std::function<bool()>& interrupted) {
    // A signal handler may fork. The child has none of the threads that helped: it begins again.
    Ending how;
    do how = attempt(request, target, threads, interrupted);
    while (how == Ending::forked);
    return how == Ending::complete;
}

}  // namespace regard
