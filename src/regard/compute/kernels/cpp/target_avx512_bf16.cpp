// What this CPU target does otherwise than avx512: dot instructions in the forward pass. targets.cpp puts
// the two together; flags in CMakeLists.txt.
#define REGARD_DOTS 1
#include "request.hpp"

extern "C" const regard::Target regard_target_avx512;

#include "kernel.hpp"

namespace {

constexpr Kernel kPairs = [] {
    Kernel kernel = {};
    kernel.scratch_bytes = pair_scratch_bytes;
    kernel.packed_bytes = packed_pairs_bytes;
    kernel.pack = pack_pairs;
    kernel.attend = attend<PairWork>;
    kernel.multiply_adds = pair_products;
    kernel.operations = 2 * kOperations<float>;
    return kernel;
}();

template <int P> constexpr Kernel kIntegers = [] {
    Kernel kernel = {};
    kernel.scratch_bytes = byte_scratch_bytes<P>;
    kernel.packed_bytes = packed_bytes_size;
    kernel.pack = pack_bytes;
    kernel.attend = attend<ByteWork<P>>;
    return kernel;
}();

}  // namespace

extern "C" const regard::Target regard_target_avx512_bf16 = {
    "avx512_bf16", kLanes<float>, kTask,   kTile,   {{}, {}, kPairs, kIntegers<3>, kIntegers<2>},
    exponentials,  nullptr,       nullptr, read_all};
