// A small pool of threads that outlives a call and does not survive a fork.
#pragma once
#include <cstdint>
#include <functional>

namespace regard {

// How many forks lie behind this process, counted from the first call that had helpers. Where it
// changes during a call, a signal handler has forked, and this is the child: its helpers are gone.
unsigned forks();

// Runs work(thread) on up to `threads` threads, the caller's own being number 0, and returns when
// all are done. `pulse`, if given, is called by the caller's thread while it waits for others. After
// a fork in `work` or `pulse` it returns in the child too, but what helpers had taken is not done.
void run_on_threads(int threads, const std::function<void(int)>& work,
                    const std::function<void()>& pulse);

// How many microseconds a thread looks for the next call, at most, before it sleeps.
void wait_for_calls(int longest);

}  // namespace regard
