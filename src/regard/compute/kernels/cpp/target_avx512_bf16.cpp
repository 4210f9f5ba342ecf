// The kernel for one CPU target; flags in CMakeLists.txt.
#include "kernel.hpp"
REGARD_TARGET(regard_target_avx512_bf16, "avx512_bf16")
