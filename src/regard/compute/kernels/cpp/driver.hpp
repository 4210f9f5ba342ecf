// From one request to pieces of work on threads.
#pragma once
#include <cfenv>
#include <deque>
#include <functional>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "request.hpp"

namespace regard {

// The floating-point state of the caller is restored, flags included; meanwhile the
// default holds: rounding to nearest, subnormal numbers kept, no traps.
class DefaultArithmetic {
  public:
#if defined(__x86_64__)
    // The only register that vectors look at; the other one, of long double, is never used.
    DefaultArithmetic() : before_(_mm_getcsr()) {
        if ((before_ & ~0x3fu) != 0x1f80) _mm_setcsr(0x1f80);
    }
    ~DefaultArithmetic() {
        if (_mm_getcsr() != before_) _mm_setcsr(before_);
    }

  private:
    unsigned before_;
#else
    DefaultArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&before_); }

  private:
    std::fenv_t before_;
#endif
};

constexpr int kMostThreads = 256;

// Makes the rules those of the request, with what follows from them; `tables` keeps their spans.
void take_program(Request& q, std::vector<Node>& program, std::deque<std::vector<int64_t>>& tables);

// Computes one row with numbers of any size (extended_range.cpp).
void extended_range_row(const Request& q, int64_t b, int64_t h, int64_t i, bool whole);

// Computes a call; false if `interrupted` ended it. Throws std::bad_alloc.
// `turns` says how queries and keys are turned meanwhile.
struct Turns {
    Turn query, key;
};
bool answer(Request request, const Target& target, int threads,
            const std::function<bool()>& interrupted, const Turns* turns = nullptr);

// Turns rows by the angles of their positions.
void turn_rows(const std::vector<Turn>& turns, const Target& target, int threads);

// Multiplies the same rows by the weights of each product: by one thread more for so many bytes of
// them, below which waking one costs more than it brings.
constexpr int64_t kWeightsOfAThread = 256 << 10;
void multiply(std::vector<Product> products, const Target& target, int threads);

// Computes the backward pass of a call; everything else as `answer`.
bool answer_backward(Backward work, const Target& target, int threads,
                     const std::function<bool()>& interrupted);

}  // namespace regard
