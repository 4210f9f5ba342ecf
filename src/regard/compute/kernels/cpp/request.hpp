// One checked call as plain data, and what a CPU target offers; shared by all parts of the kernel.
#pragma once
#include <cstddef>
#include <cstdint>

namespace regard {

constexpr int64_t kChunk = 256;  // the most keys of a chunk; chunks begin at multiples of it

// int8 is for keys and values alone: a float32 after the columns of a row is their scale.
enum class Kind : int32_t { float16, bfloat16, float32, float64, int8 };

__attribute__((always_inline)) inline constexpr int64_t size_of(Kind kind) {
    switch (kind) {
        case Kind::float64: return 8;
        case Kind::float32: return 4;
        case Kind::int8: return 1;
        default: return 2;
    }
}

// An array (B, heads, rows, columns), strides in bytes; `batch` has one offset per batch element.
struct Array {
    const char* data = nullptr;
    const int64_t* batch = nullptr;
    int64_t head = 0, row = 0, column = 0;
    Kind kind = Kind::float32;

    __attribute__((always_inline)) const char* at(int64_t b, int64_t h, int64_t r) const {
        return data + batch[b] + h * head + r * row;
    }
};

// Rules combined by & | ~, as a program in postfix order. Causal is a window without later keys.
enum class Rule : int32_t { boolean, lengths, segments, window, all, any, negate };

constexpr int64_t kSpan = 64;

struct Node {
    Rule rule;
    Array mask;                // boolean: one byte per cell
    const int64_t* lengths;    // lengths: one per batch element
    const int64_t* queries;    // segments: (B, L)
    const int64_t* keys;       // segments: (B, S)
    const int64_t* spans;      // segments: least and greatest of kSpan keys, (B, ⌈S/kSpan⌉, 2)
    int64_t left, right;       // window; -1: unbounded
};

struct Request {
    int64_t B, H, G, L, S, D, E;
    Array query, key, value;
    Array bias;                // data == nullptr: none
    const int64_t* bias_rows;  // (B, L): each query's row of the bias; nullptr: row i
    const double* sink;        // (B, H) or nullptr
    const int64_t* positions;  // (B, L) of the queries; nullptr: query i is at i
    const int64_t* length;     // keys j < length[b] only; (B) or nullptr
    int64_t left, right;       // j >= position - left, j <= position + right; -1: unbounded
    const Node* program;       // further rules, in postfix order; nullptr: none
    int32_t program_size;
    int32_t program_depth;     // the most values on its stack
    bool conjunction;          // a key is seen if all rules of the program leave it
    double scale, softcap;     // softcap 0: none
    bool sigmoid;              // weights are 1 / (1 + exp(−(logit + shift))); no sink, no lse
    double shift;
    bool wide;                 // compute in float64
    bool high;                 // compute bfloat16 in float32, on every target
    bool dots;                 // by dot instructions on pairs: set by the driver
    // Results: contiguous (B, H, L, E), (B, H, L, S), (B, H, L).
    char* output;
    char* weights;             // or nullptr
    char* lse;                 // or nullptr
    // A part of the keys: states of the rows, in the accumulating type, each 3 + E numbers. Those
    // `before`, (before_count, B, H, L, 3 + E), are merged in order; those after the part go to `after`,
    // or, where that is nullptr, rows are ended, and `again` says which need all their keys again.
    const char* before;
    int64_t before_count;
    char* after;  // (B, H, L, 3 + E), or `apart` (chunks, B, H, L, 3 + E): of each alone
    bool apart;
    uint8_t* again;  // (B, H, L); both nullptr: all keys are here
    Kind kind;  // of output and weights
    Kind lse_kind;
    // Computes one row with numbers of any size, for rows that left the range of float64; unless
    // `whole`, only those numbers of its output that are not finite.
    void (*extended_range_row)(const Request&, int64_t b, int64_t h, int64_t i, bool whole);
    // Asked at least once per chunk of keys; true: the call is given up, return at once.
    bool (*stopped)(void* state);
    void* state;

    __attribute__((always_inline)) int64_t chunks() const { return (S + kChunk - 1) / kChunk; }
    __attribute__((always_inline)) bool is_part() const { return after || again; }
};

// Rows first … last − 1 of key head g, counted over all its query heads, head by head.
struct Piece {
    int64_t b, g, first, last;
};

// Keys k0 … k0 + n − 1 of key head g.
struct Chunk {
    int64_t b, g, k0, n;
};

// The backward pass of a call: its own results, and what it reads besides the request.
struct Backward {
    Request q;
    Array output, grad_output;  // (B, H, L, E)
    const double* lse;  // (B, H, L)
    const double* grad_lse;  // (B, H, L) or nullptr
    // Results, contiguous; nullptr: not asked for.
    char *d_query, *d_key, *d_value;
    Kind query_kind, key_kind, value_kind;
    Array d_bias;  // numbers of the accumulating type, added to; no data: not asked for
    double* d_scale;  // (B, H, L): what each row adds to it
    double* d_sink;  // (B, H, L): the same
    // (B, G): 1 where a result is not finite, 2 where a visible infinity has a finite weight.
    uint8_t* beyond;
    // (B, H, L, 4), or nullptr: what is left of two sums that must be 0, and the squared lengths of
    // the query and of grad_output; (B, G, 2): those of the longest key and value.
    double *checks, *longest;
    const int64_t* heads;  // the key heads to compute, b · G + g, in ascending order
    int64_t head_count;
    // Set by the driver.
    char* rows;  // (B, H, L): what `prepare_rows` found
    int64_t* turns;  // (B, G, blocks): blocks of rows that a block of keys is done with
    bool in_order;  // d_bias is shared by heads: one after the other, all of them
    void (*idle)(void* state);  // called while a block waits for its turn
};

constexpr int64_t kTurned = 16;  // positions whose rows are turned together: angles stay in a cache

// Rows (B, H, L, D) to turn by the angles of their positions, and where they go, contiguous, or these
// rows themselves. Cosines and sines are (B, L, pairs), `apart` numbers between two batch elements; 0:
// all have the same.
struct Turn {
    int64_t B, H, L, D, pairs, apart;
    Array rows;
    const double *cosines, *sines;
    bool interleaved, back;  // back: by the opposite angles
    Kind kind;  // of the results: that of the rows, or a half type where these are float32
    char* output;

    int64_t pieces() const { return B * ((L + kTurned - 1) / kTurned); }
};

// Rows of weights in float32 or a half type, or in groups of kGroup integers of 8 bits, each after its
// scale in float16; and rows x that they are multiplied by, whole groups with zeros at their end.
constexpr int64_t kGroup = 32, kGroupBytes = 2 + kGroup;
struct Product {
    const float* x;
    int64_t rows, columns, stride;  // of x; numbers from row to row
    const char* weights;
    int64_t count, row;  // rows of weights; bytes from row to row
    Kind kind;
    float* y;  // (rows, count), `across` numbers from row to row
    int64_t across;
};

// One CPU target's functions that accumulate in one type.
struct Kernel {
    // Bytes of scratch that one thread needs, and bytes of a packed key head.
    size_t (*scratch_bytes)(const Request&);
    size_t (*packed_bytes)(const Request&);
    void (*pack)(const Request&, int64_t b, int64_t g, int64_t chunk, char* packed);
    // Chunks `begin` … `end` − 1 for a piece. packed == nullptr: each chunk is packed into scratch.
    // partial != nullptr: the state after every chunk is stored there instead of the result.
    void (*attend)(const Request&, const Piece&, int64_t begin, int64_t end, const char* packed,
                   char* scratch, char* partial);
    size_t (*partial_bytes)(const Request&, int64_t rows, int64_t chunks);
    void (*merge)(const Request&, const Piece&, const char* partial, char* scratch);
    // Ends rows whose states are in scratch, as `attend` and `merge` do by themselves.
    void (*finish)(const Request&, const Piece&, char* scratch);
    // For measurements: rounds of independent multiply-adds, and operations (two each) in a round.
    double (*multiply_adds)(int64_t rounds);
    int64_t operations;
    // The backward pass: first the rows of each head, then blocks of keys, in ascending order for
    // each head. `sums` has room for the sums of a key head's d_query where they are not made in place.
    int64_t backward_keys;  // of a block
    size_t row_bytes;  // of Backward.rows, per row
    size_t (*backward_scratch_bytes)(const Backward&);
    size_t (*sums_bytes)(const Backward&);  // 0: d_query is summed in place
    void (*prepare_rows)(const Backward&, int64_t b, int64_t h, char* scratch);
    void (*backward)(const Backward&, int64_t b, int64_t g, int64_t block, char* sums,
                     char* scratch);
};

constexpr size_t kReadBlock = 1024;

// What one CPU target offers: the only symbol of its translation unit. One that is another with dot
// instructions has only what these change; all else is nullptr.
struct Target {
    const char* name;
    int32_t lanes;  // of float32
    int64_t rows_per_task, rows_per_tile;  // at most
    // Accumulating in float32, in float64; bfloat16 by pairs in float32, int8 by integers, and the same
    // for results of half types: attend == nullptr if not.
    Kernel kernels[5];
    void (*exponential)(const float* x, float* y, int64_t n);  // for tests
    // Rows first … last − 1 of a head turned, one after the other.
    void (*turn)(const Turn&, int64_t b, int64_t h, int64_t first, int64_t last, char* to);
    // Products with the rows first … last − 1 of weights.
    void (*multiply)(const Product&, int64_t first, int64_t last);
    // For measurements: reads all bytes, a multiple of kReadBlock, prefetching so far ahead.
    double (*read)(const char* data, size_t bytes, size_t ahead);
};

// What computes a request: by its dtypes, its scale and its options alone.
const Kernel& kernel_of(const Request& q, const Target& target);

// The targets of this build, best first, then nullptr; and whether this machine can run one.
extern const Target* const kTargets[];
bool usable(const Target& target);

}  // namespace regard
