// CPU detection, compiled without any target flags: it must run on the oldest CPU.
#include "request.hpp"

#include <cmath>
#include <cstring>

extern "C" {
extern const regard::Target regard_target_baseline;
#if defined(REGARD_X86_TARGETS)
extern const regard::Target regard_target_avx2;
extern const regard::Target regard_target_avx512;
extern const regard::Target regard_target_avx512_bf16;
#endif
}

namespace regard {

const Target* const kTargets[] = {
#if defined(REGARD_X86_TARGETS)
    &regard_target_avx512_bf16, &regard_target_avx512,
    &regard_target_avx2,
#endif
    &regard_target_baseline,    nullptr,
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

bool usable(const Target& target) {
#if defined(REGARD_X86_TARGETS)
    // The built-in asks the CPU and the operating system (xgetbv) alike.
    __builtin_cpu_init();
    if (!std::strcmp(target.name, "avx512_bf16") &&
        !(__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")))
        return false;
    if (!std::strncmp(target.name, "avx512", 6))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!std::strcmp(target.name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    (void)target;
#endif
    return true;
}

}  // namespace regard
