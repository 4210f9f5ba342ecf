// The pool: workers sleep on a condition variable after a short spin; the caller always works too,
// so that a call makes progress when no worker wakes. One call at a time has the pool; a call that
// finds it taken runs alone, which keeps many Python threads from waiting for each other.
#include "threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace regard {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

std::atomic<unsigned> forked{0};
std::atomic<microseconds> longest_wait{microseconds{0}};

class Pool {
  public:
    // False if the pool is taken.
    bool run(int threads, const std::function<void(int)>& work,
             const std::function<void()>& pulse) {
        std::unique_lock<std::mutex> taken(one_call_, std::try_to_lock);
        if (!taken) return false;
        const unsigned before = forks();
        const int wanted = threads - 1;
        while (int(threads_.size()) < wanted) {
            try {
                const int number = int(threads_.size()) + 1;
                threads_.emplace_back([this, number] { serve(number); });
            } catch (const std::system_error&) {
                break;  // no more threads to be had: fewer will do
            }
        }
        const int helpers = wanted < int(threads_.size()) ? wanted : int(threads_.size());
        {
            std::lock_guard<std::mutex> lock(mutex_);
            caller_ = current_cpu();
            work_ = &work;
            helpers_ = helpers;
            begun_ = 0;
            running_ = helpers;
            generation_++;
        }
        wake_.notify_all();
        work(0);
        // In a child the others are gone, and one of them may have held the lock.
        if (forks() != before) return true;
        {
            // Nothing is left for those that did not wake so far.
            std::lock_guard<std::mutex> lock(mutex_);
            running_ -= helpers - begun_;
            helpers_ = 0;
        }
        // The others are at most one piece of work behind.
        wait(kPatience, [&] { return running_.load(std::memory_order_acquire) == 0; });
        std::unique_lock<std::mutex> lock(mutex_);
        while (running_.load(std::memory_order_acquire)) {
            done_.wait_for(lock, std::chrono::milliseconds(20));
            if (pulse) {
                lock.unlock();
                pulse();
                if (forks() != before) return true;
                lock.lock();
            }
        }
        work_ = nullptr;
        return true;
    }

  private:
    // Falling asleep and waking cost as much as so long a wait.
    static constexpr microseconds kPatience{100};

    // Looks again and again until `done` or the time is over.
    template <class Done> static void wait(microseconds longest, Done done) {
        const auto until = Clock::now() + longest;
        while (!done() && Clock::now() < until) relax();
    }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

#if defined(__linux__)
    static int current_cpu() { return sched_getcpu(); }

    // A worker woken on the caller's CPU may stay there while another CPU is idle. It gives up that
    // CPU, until it meets the caller on another.
    class Place {
      public:
        void leave(int caller) {
            cpu_set_t now, others;
            if (caller < 0 || sched_getcpu() != caller) return;
            if (sched_getaffinity(0, sizeof now, &now) != 0) return;
            if (!narrowed_ || !CPU_EQUAL(&now, &left_)) whole_ = now;  // or set elsewhere
            others = whole_;
            CPU_CLR(caller, &others);
            if (CPU_COUNT(&others) == 0) return;
            narrowed_ = sched_setaffinity(0, sizeof others, &others) == 0;
            left_ = others;
        }

      private:
        cpu_set_t whole_, left_;
        bool narrowed_ = false;
    };
#else
    static int current_cpu() { return -1; }
    struct Place {
        void leave(int) {}
    };
#endif

    void serve(int number) {
        uint64_t seen = 0;
        Place place;
        bool calls_come = false;
        for (;;) {
            const std::function<void(int)>* work;
            int caller;
            // A call often follows a call: look for it a while before going to sleep, and longer
            // where the last one came as soon as that. When calls stop, one wait is in vain.
            const microseconds longest = longest_wait;
            const auto free = Clock::now();
            wait(calls_come ? longest : std::min(longest, kPatience / 2),
                 [&] { return generation_.load(std::memory_order_acquire) != seen; });
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_ != seen; });
                seen = generation_;
                calls_come = Clock::now() - free < longest;
                if (number > helpers_) continue;
                begun_++;
                work = work_;
                caller = caller_;
            }
            place.leave(caller);
            (*work)(number);
            std::lock_guard<std::mutex> lock(mutex_);
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex one_call_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<int> running_{0};
    std::atomic<uint64_t> generation_{0};
    int helpers_ = 0, begun_ = 0;
    int caller_ = -1;  // the CPU that the call came from
};

// Never destroyed by the C++ runtime: a thread may still be inside when the interpreter exits.
std::atomic<Pool*> pool{nullptr};
std::mutex making;

void forget_after_fork() {
    // The threads are gone in the child and the locks may be held: leave the old pool behind.
    forked++;
    pool.store(nullptr);
    new (&making) std::mutex;
}

Pool* the_pool() {
    Pool* current = pool.load(std::memory_order_acquire);
    if (current) return current;
    std::lock_guard<std::mutex> lock(making);
    current = pool.load();
    if (!current) {
        static bool registered = false;
        if (!registered) {
            pthread_atfork(nullptr, nullptr, forget_after_fork);
            registered = true;
        }
        current = new Pool;
        pool.store(current, std::memory_order_release);
    }
    return current;
}

}  // namespace

unsigned forks() { return forked.load(); }

void wait_for_calls(int longest) { longest_wait = microseconds{longest}; }

void run_on_threads(int threads, const std::function<void(int)>& work,
                    const std::function<void()>& pulse) {
    if (threads > 1 && the_pool()->run(threads, work, pulse)) return;
    work(0);
}

}  // namespace regard
