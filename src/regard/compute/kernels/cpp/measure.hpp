// What the machine could do at most, for benchmarks: multiply-adds, reading, clock.
#pragma once
#include <cstddef>
#include <cstdint>

namespace regard {

// Loops that one CPU target can run; meter.cpp is compiled once per target.
struct Meter {
    const char* name;
    int32_t bytes;  // of a vector
    // Rounds of independent multiply-adds, and how many operations (two each) one round has.
    double (*multiply_adds)(int64_t rounds, bool wide);
    int64_t (*operations)(bool wide);
    // Reads all bytes (a multiple of kReadBlock), fetching so many bytes ahead.
    double (*read)(const char* data, size_t bytes, size_t ahead);
};

constexpr size_t kReadBlock = 1024;

// The fastest of several short windows of all threads together: a disturbance can only slow one
// down, so the fastest cannot make the machine look weaker than it is.
double most_operations(const Meter& meter, bool wide, int threads, double seconds);  // per second
double most_bytes(const Meter& meter, const char* data, size_t bytes, int threads,
                  double seconds);  // per second
double clock_rate(int threads, double seconds);  // cycles of one thread per second

}  // namespace regard
