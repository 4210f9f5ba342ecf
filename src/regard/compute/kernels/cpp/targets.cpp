// CPU detection, compiled without any target flags: it must run on the oldest CPU.
#include "request.hpp"

#include <cstring>

extern "C" {
extern const regard::Target regard_target_baseline;
#if defined(REGARD_X86_TARGETS)
extern const regard::Target regard_target_avx2;
extern const regard::Target regard_target_avx512;
#endif
}

namespace regard {

const Target* const kTargets[] = {
#if defined(REGARD_X86_TARGETS)
    &regard_target_avx512,
    &regard_target_avx2,
#endif
    &regard_target_baseline,
    nullptr,
};

bool usable(const Target& target) {
#if defined(REGARD_X86_TARGETS)
    // The built-in asks the CPU and the operating system (xgetbv) alike.
    __builtin_cpu_init();
    if (!std::strcmp(target.name, "avx512"))
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
