// CPU detection, compiled without any target flags: it must run on the oldest CPU.
#include "request.hpp"

#include <cmath>
#include <cstring>

#if defined(REGARD_X86_TARGETS)
#include <cpuid.h>

#include <initializer_list>
#endif

extern "C" {
extern const regard::Target regard_target_baseline;
#if defined(REGARD_X86_TARGETS)
extern const regard::Target regard_target_avx2;
extern const regard::Target regard_target_avx512;
extern const regard::Target regard_target_avx512_bf16;
#endif
}

namespace regard {

#if defined(REGARD_X86_TARGETS)
namespace {

// A target with dot instructions, whose unit has little else, and the one without them.
Target put_together(Target dots, const Target& rest) {
    for (Kernel& kernel : dots.kernels) {
        const Kernel own = kernel;
        kernel = rest.kernels[&kernel == dots.kernels + 1];
        if (!own.attend) continue;
        kernel.scratch_bytes = own.scratch_bytes;
        kernel.packed_bytes = own.packed_bytes;
        kernel.pack = own.pack;
        kernel.attend = own.attend;
        if (!own.multiply_adds) continue;
        kernel.multiply_adds = own.multiply_adds;
        kernel.operations = own.operations;
    }
    dots.turn = rest.turn;
    dots.multiply = rest.multiply;
    return dots;
}
const Target kAvx512Bf16 = put_together(regard_target_avx512_bf16, regard_target_avx512);

}  // namespace
#endif

const Target* const kTargets[] = {
#if defined(REGARD_X86_TARGETS)
    &kAvx512Bf16,
    &regard_target_avx512,
    &regard_target_avx2,
#endif
    &regard_target_baseline,
    nullptr,
};

const Kernel& kernel_of(const Request& q, const Target& target) {
    // The dot instructions take subnormal numbers as 0. A scale beyond this could show it.
    constexpr double kMostScale = 1e6;
    constexpr int64_t kMostColumns = 1 << 15;  // whose sums of integers stay below 2³¹
    constexpr Kind bfloat = Kind::bfloat16;
    const bool half = q.kind == Kind::float16 || q.kind == bfloat;
    const Kernel &pairs = target.kernels[2], &integers = target.kernels[half ? 4 : 3];
    const bool dots = !q.wide && !q.high && !q.sigmoid;
    if (dots && pairs.attend && std::fabs(q.scale) <= kMostScale && q.query.kind == bfloat &&
        q.key.kind == bfloat && q.value.kind == bfloat && q.kind == bfloat)
        return pairs;
    if (dots && integers.attend && q.D <= kMostColumns && q.key.kind == Kind::int8 &&
        q.value.kind == Kind::int8)
        return integers;
    return target.kernels[q.wide];
}

#if defined(REGARD_X86_TARGETS)
namespace {

// Registers of the CPUID instruction: leaf 1, leaf 7, and what follows leaf 7.
enum Where { ecx1, ebx7, ecx7, eax7_1 };
struct Feature {
    Where where;
    int bit;
};
constexpr Feature kFma{ecx1, 12}, kF16c{ecx1, 29}, kAvx2{ebx7, 5}, kAvx512f{ebx7, 16},
    kAvx512dq{ebx7, 17}, kAvx512bw{ebx7, 30}, kAvx512vl{ebx7, 31}, kAvx512vnni{ecx7, 11},
    kAvx512bf16{eax7_1, 5};

// What the operating system keeps of each thread (XCR0): halves of ymm; masks and zmm too.
constexpr uint32_t kYmm = 0x06, kZmm = 0xe6;

// Asks the CPU itself: not every compiler's __builtin_cpu_supports can (Zig's is always 0).
class Cpu {
  public:
    Cpu() {
        constexpr unsigned kSavesRegisters = 1u << 27;  // OSXSAVE
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kSavesRegisters)) return;
        words_[ecx1] = c;
        unsigned kept_high;
        __asm__("xgetbv" : "=a"(kept_), "=d"(kept_high) : "c"(0));
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        words_[ebx7] = b, words_[ecx7] = c;
        const bool more = a >= 1;
        if (more && __get_cpuid_count(7, 1, &a, &b, &c, &d)) words_[eax7_1] = a;
    }

    bool keeps(uint32_t registers) const { return (kept_ & registers) == registers; }

    bool has(std::initializer_list<Feature> features) const {
        for (const Feature& one : features)
            if (!(words_[one.where] >> one.bit & 1)) return false;
        return true;
    }

  private:
    uint32_t words_[4] = {}, kept_ = 0;
};

}  // namespace
#endif

bool usable(const Target& target) {
#if defined(REGARD_X86_TARGETS)
    static const Cpu cpu;
    const bool bf16 = !std::strcmp(target.name, "avx512_bf16");
    const bool avx512 = bf16 || !std::strcmp(target.name, "avx512");
    const bool avx2 = avx512 || !std::strcmp(target.name, "avx2");
    if (avx2 && !(cpu.keeps(kYmm) && cpu.has({kAvx2, kFma, kF16c}))) return false;
    if (avx512 && !(cpu.keeps(kZmm) && cpu.has({kAvx512f, kAvx512bw, kAvx512dq, kAvx512vl})))
        return false;
    if (bf16 && !cpu.has({kAvx512bf16, kAvx512vnni})) return false;
#else
    (void)target;
#endif
    return true;
}

}  // namespace regard
