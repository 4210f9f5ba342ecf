// What the machine could do at most, for benchmarks: multiply-adds, reading, clock.
#pragma once
#include <cstddef>
#include <cstdint>

#include "request.hpp"

namespace regard {

// Each is the fastest of several short windows: a disturbance can only slow one down.
double most_operations(const Target& target, bool wide, int threads, double seconds);  // per second
double most_bytes(const Target& target, const char* data, size_t bytes, int threads,
                  double seconds);  // per second
double clock_rate(int threads, double seconds);  // cycles of one thread per second

}  // namespace regard
