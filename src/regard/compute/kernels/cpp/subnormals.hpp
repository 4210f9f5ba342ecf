// For a build that counts subnormal numbers (the CMake option REGARD_COUNT_SUBNORMALS): how many times
// each pass over a tile met one, or made one that was kept. Elsewhere REGARD_PASS is nothing.
//
// A CPU may take a hundred times as long for an instruction with such an operand, or such a result where
// it is not flushed to zero. The CPU's own flags say that there was one: of operands, the one for subnormal
// operands; of results, the one for underflow, which an exact one does not set.
#pragma once

#if defined(REGARD_COUNT_SUBNORMALS)
#include <immintrin.h>

#include <cstdint>

namespace regard {

enum class Pass { scores, softmax, values, merge, products, gradients, row_sums, key_sums };
constexpr const char* kPasses[] = {"scores",   "softmax",   "values",   "merge",
                                   "products", "gradients", "row_sums", "key_sums"};
inline int64_t subnormal_counts[sizeof(kPasses) / sizeof(*kPasses)] = {};

// Numbers go through memory from one pass to the next, so none is computed on the other side.
inline unsigned arithmetic_flags() {
    __asm__ volatile("" ::: "memory");
    return _mm_getcsr();
}

class CountedPass {
  public:
    explicit CountedPass(Pass pass) : pass_(pass), before_(arithmetic_flags()) {
        _mm_setcsr(before_ & ~kBoth);
        __asm__ volatile("" ::: "memory");
    }
    ~CountedPass() {
        const unsigned now = arithmetic_flags(), costly = now & kFlush ? kOperand : kBoth;
        if (now & costly) __atomic_fetch_add(&subnormal_counts[int(pass_)], 1, __ATOMIC_RELAXED);
        _mm_setcsr(now | before_);
    }

  private:
    static constexpr unsigned kOperand = 0x02, kBoth = 0x12, kFlush = 0x8000;
    const Pass pass_;
    const unsigned before_;
};

}  // namespace regard

#define REGARD_PASS(NAME) if (const regard::CountedPass counted(regard::Pass::NAME); true)
#else
#define REGARD_PASS(NAME)
#endif
