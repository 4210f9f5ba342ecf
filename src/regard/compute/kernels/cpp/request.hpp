// One checked call as the native kernel sees it: sizes, pointers, strides in bytes, rules.
// Plain data only, shared by the door (module.cpp), the driver and every CPU target.
#pragma once
#include <cstddef>
#include <cstdint>

namespace regard {

enum class Kind : int32_t { float16, bfloat16, float32, float64 };

// An array (B, heads, rows, columns). `batch` has one byte offset per batch element, so that any
// broadcasting of leading axes is a table look-up.
struct Array {
    const char* data = nullptr;
    const int64_t* batch = nullptr;
    int64_t head = 0, row = 0, column = 0;
    Kind kind = Kind::float32;

    __attribute__((always_inline)) const char* at(int64_t b, int64_t h, int64_t r) const {
        return data + batch[b] + h * head + r * row;
    }
};

// The rules beside causal and window, combined by & | ~, as a program in postfix order.
enum class Rule : int32_t { boolean, lengths, segments, causal, window, all, any, negate };

struct Node {
    Rule rule;
    Array mask;                // boolean: one byte per cell
    const int64_t* lengths;    // lengths: one per batch element
    const int64_t* queries;    // segments: (B, L)
    const int64_t* keys;       // segments: (B, S)
    int64_t left, right;       // window; -1: unbounded
};

struct Request {
    int64_t B, H, G, L, S, D, E;
    Array query, key, value;
    Array bias;                // data == nullptr: none
    const double* sink;        // (B, H) or nullptr
    const int64_t* offset;     // (B)
    const int64_t* length;     // keys j < length[b] only; (B) or nullptr
    int64_t left, right;       // j >= i + offset - left, j <= i + offset + right; -1: unbounded
    const Node* program;       // further rules, in postfix order; nullptr: none
    int32_t program_size;
    int32_t program_depth;     // the most values on its stack
    double scale, softcap;     // softcap 0: none
    bool wide;                 // compute in float64
    // Results: contiguous (B, H, L, E), (B, H, L, S), (B, H, L).
    char* output;
    char* weights;             // or nullptr
    char* lse;                 // or nullptr
    Kind kind;                 // of output and weights
    Kind lse_kind;
    // Computes one row with exponents that do not end; called for rows that left the range of float64.
    // Not the whole row: only those numbers of its output that are not finite.
    void (*unbounded_row)(const Request&, int64_t b, int64_t h, int64_t i, bool whole);
    // Asked now and then, at least once per chunk of keys: true means stop, the call is given up.
    bool (*stopped)(void* state);
    void* state;
};

// Rounds of independent multiply-adds, and how many operations (two each) a round has.
struct PeakFlops {
    double (*multiply_adds)(int64_t rounds);
    int64_t operations;
};

constexpr size_t kReadBlock = 1024;

// What one CPU target offers: the only symbol of its translation unit.
struct Target {
    const char* name;
    int32_t lanes;  // of float32
    // How many bytes of scratch one thread needs, and how many a packed key head does.
    size_t (*scratch_bytes)(const Request&);
    size_t (*packed_bytes)(const Request&);
    void (*pack)(const Request&, int64_t b, int64_t g, int64_t chunk, char* packed);
    // Rows first .. last of key head g (rows of all its query heads, head by head), chunks from
    // `begin` to `end`. packed == nullptr: pack chunk by chunk into scratch. With partial !=
    // nullptr the state of every chunk is stored there instead of the result.
    void (*attend)(const Request&, int64_t b, int64_t g, int64_t first, int64_t last,
                   int64_t begin, int64_t end, const char* packed, char* scratch, char* partial);
    size_t (*partial_bytes)(const Request&, int64_t rows, int64_t chunks);
    void (*merge)(const Request&, int64_t b, int64_t g, int64_t first, int64_t last,
                  int64_t chunks, const char* partial, char* scratch);
    int64_t rows_per_task;  // at most
    int64_t rows_per_tile;
    void (*exponential)(const float* x, float* y, int64_t n);  // for tests
    // For measurements (measure.cpp): of float32 and float64; and reading all bytes, a multiple of
    // kReadBlock, while prefetching `ahead` bytes ahead.
    PeakFlops peak[2];
    double (*read)(const char* data, size_t bytes, size_t ahead);
};

constexpr int64_t kChunk = 256;  // keys per chunk, anchored at key 0 on every path

}  // namespace regard
