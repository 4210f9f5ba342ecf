// A small pool of threads that outlives a call and does not survive a fork.
#pragma once
#include <cstdint>
#include <functional>

namespace regard {

// Runs work(thread) on up to `threads` threads, the caller's own being number 0, and returns when
// all are done. `pulse`, if given, is called by the caller's thread while it waits for others.
void run_on_threads(int threads, const std::function<void(int)>& work,
                    const std::function<void()>& pulse);

}  // namespace regard
