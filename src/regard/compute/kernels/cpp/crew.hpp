// What threads that work on one call share: whether it is given up, and why.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <new>

#include "driver.hpp"
#include "threads.hpp"

namespace regard {

inline size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Memory that a thread keeps from call to call: page faults cost more than a small call.
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    char* of(size_t count, size_t each) {
        size_t bytes;
        if (__builtin_mul_overflow(count, each, &bytes)) throw std::bad_alloc();
        if (bytes <= size_) return data_;
        trim(0);
        const size_t whole = whole_lines(bytes);
        data_ = static_cast<char*>(std::aligned_alloc(64, whole));
        if (!data_) throw std::bad_alloc();
        size_ = whole;
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

struct Buffers {
    Buffer scratch, packed, partial, counters, turned;
};

// Pieces of work that threads take one by one, and those that are done; on a cache line of its own.
struct alignas(64) Counter {
    std::atomic<int64_t> next{0}, done{0};
};

constexpr size_t kKept = size_t(8) << 20;

enum class Ending { complete, interrupted, forked, exhausted };

// The threads of one attempt at a call.
class Crew {
  public:
    Crew(int threads, const std::function<bool()>& interrupted)
        : threads_(threads), interrupted_(interrupted) {}

    // Calls work(request, thread) on every thread, with a request of its own that says when to stop.
    template <class F> Ending run(const Request& q, F work) {
        const auto guarded = [&](int thread) {
            try {
                const DefaultArithmetic arithmetic;
                Seat seat = {this, thread};
                Request mine = q;
                mine.state = &seat;
                mine.stopped = [](void* state) {
                    const Seat& here = *static_cast<Seat*>(state);
                    if (here.thread == 0) here.crew->look();
                    return here.crew->stop_.load(std::memory_order_relaxed);
                };
                work(mine, thread);
            } catch (const std::bad_alloc&) {  // from extended_range_row; none may leave a thread
                exhausted_ = true;
                stop_ = true;
            }
        };
        run_on_threads(threads_, guarded, [this] { look(); });
        if (exhausted_) return Ending::exhausted;
        if (!stop_) return Ending::complete;
        return raised_ ? Ending::interrupted : Ending::forked;
    }

    bool stopped() const { return stop_; }

  private:
    struct Seat {
        Crew* crew;
        int thread;
    };

    // Only the caller's own thread may ask Python; the others look at the flag.
    void look() {
        if (!interrupted_ || raised_) return;
        const auto now = std::chrono::steady_clock::now();
        if (now - last_look_ < std::chrono::milliseconds(20)) return;
        last_look_ = now;
        raised_ = interrupted_();
        if (raised_ || (threads_ > 1 && forks() != forks_before_)) stop_ = true;
    }

    const int threads_;
    const std::function<bool()>& interrupted_;
    std::atomic<bool> stop_{false}, exhausted_{false};
    bool raised_ = false;  // by a signal handler
    const unsigned forks_before_ = forks();
    std::chrono::steady_clock::time_point last_look_{};
};

// Makes attempts until one was not cut short by a fork; false if the call was interrupted. A signal
// handler may fork: the child has none of the threads that helped, and begins again.
template <class F> bool until_complete(F attempt) {
    Ending how;
    do how = attempt();
    while (how == Ending::forked);
    if (how == Ending::exhausted) throw std::bad_alloc();
    return how == Ending::complete;
}

// Whether a call on this thread is in progress: a signal handler may have made another one, which
// takes memory of its own, and no helpers.
class Nested {
  public:
    Nested() : before_(busy_) { busy_ = true; }
    ~Nested() { busy_ = before_; }
    bool inner() const { return before_; }

  private:
    static thread_local bool busy_;
    const bool before_;
};
inline thread_local bool Nested::busy_ = false;

}  // namespace regard
