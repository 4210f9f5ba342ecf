// What the machine could do at most, for benchmarks: multiply-adds, reading, clock.
#pragma once
#include <cstddef>
#include <cstdint>

#include "request.hpp"

namespace regard {

// Each is the fastest of several short windows: a disturbance can only slow one down.
// The multiply-adds of one of the target's kernels, per second; 0 if it has none.
double most_operations(const Kernel& kernel, int threads, double seconds);
double most_bytes(const Target& target, const char* data, size_t bytes, int threads,
                  double seconds);  // per second
double clock_rate(int threads, double seconds);  // cycles of one thread per second

}  // namespace regard
