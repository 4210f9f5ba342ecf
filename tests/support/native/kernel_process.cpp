// The native kernel as a program of its own: calls come in on standard input, results go out on
// standard output, as plain numbers in the byte order of the machine. Knows nothing of Python, so
// that it can be compiled for a CPU that has none here. The other end is tests/support/kernel_process.py.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <new>
#include <utility>
#include <vector>

#include "driver.hpp"

using namespace regard;

namespace {

// What stands before a message: a call, exponentials, or the question which targets there are.
enum Order : int64_t { Run, Exponentials, Targets, RunBackward };
enum Status : int64_t { Done, NoMemory };

void read_bytes(void* to, size_t bytes) {
    if (bytes && std::fread(to, bytes, 1, stdin) != 1) std::exit(2);
}
void write_bytes(const void* from, size_t bytes) {
    if (bytes && std::fwrite(from, bytes, 1, stdout) != 1) std::exit(3);
}
template <class T> T read_one() {
    T x;
    read_bytes(&x, sizeof x);
    return x;
}
int64_t integer() { return read_one<int64_t>(); }
void write_one(int64_t x) { write_bytes(&x, sizeof x); }

// Memory of one call. Blocks are exactly as long as they have to be, which lets a checker see a
// step beyond, and stand at the address modulo 64 that they had at the other end.
class Memory {
  public:
    char* block(size_t bytes, size_t misaligned = 0) {
        void* start = nullptr;
        if (posix_memalign(&start, 64, misaligned + bytes + !bytes)) throw std::bad_alloc();
        blocks_.push_back(start);
        return static_cast<char*>(start) + misaligned;
    }
    // What comes in: its length in bytes, its place modulo 64, and the bytes. Length -1: nothing.
    char* incoming() {
        const int64_t bytes = integer();
        if (bytes < 0) return nullptr;
        const int64_t misaligned = integer();
        char* here = block(size_t(bytes), size_t(misaligned));
        read_bytes(here, size_t(bytes));
        last_ = size_t(bytes);
        return here;
    }
    // The same, to be sent back at the end as it then is.
    char* returning() {
        char* here = incoming();
        if (here) returning_.push_back({here, last_});
        return here;
    }
    void send_back() const {
        for (const auto& [here, bytes] : returning_) write_bytes(here, bytes);
    }
    template <class T> T* numbers() { return reinterpret_cast<T*>(incoming()); }
    ~Memory() {
        for (void* block : blocks_) std::free(block);
    }

  private:
    std::deque<void*> blocks_;
    std::vector<std::pair<char*, size_t>> returning_;
    size_t last_ = 0;
};

Array read_array(Memory& memory, bool returning = false) {
    Array array;
    const char* block = returning ? memory.returning() : memory.incoming();
    if (!block) return array;
    array.data = block + integer();
    array.kind = Kind(integer());
    array.head = integer();
    array.row = integer();
    array.column = integer();
    array.batch = memory.numbers<int64_t>();
    return array;
}

const Target& target_number(int64_t number) { return *kTargets[number]; }

struct Call {
    Memory memory;
    Request q{};
    const Target& target = target_number(integer());
    const int threads = int(integer());
    std::vector<Node> program;
    std::deque<std::vector<int64_t>> tables;

    Call() {
        for (int64_t* size : {&q.B, &q.H, &q.G, &q.L, &q.S, &q.D, &q.E, &q.left, &q.right})
            *size = integer();
        q.wide = integer();
        q.high = integer();
        q.scale = read_one<double>();
        q.softcap = read_one<double>();
        q.shift = read_one<double>();
        q.sigmoid = q.shift == q.shift;
        for (Array* array : {&q.query, &q.key, &q.value, &q.bias}) *array = read_array(memory);
        q.bias_rows = memory.numbers<int64_t>();
        q.sink = memory.numbers<double>();
        q.positions = memory.numbers<int64_t>();
        q.length = memory.numbers<int64_t>();
        program.resize(static_cast<size_t>(integer()));
        for (Node& node : program) {
            node.rule = Rule(integer());
            node.left = integer();
            node.right = integer();
            node.mask = read_array(memory);
            node.lengths = memory.numbers<int64_t>();
            node.queries = memory.numbers<int64_t>();
            node.keys = memory.numbers<int64_t>();
        }
        take_program(q, program, tables);
    }
};

void run() {
    Call call;
    Request& q = call.q;
    Memory& memory = call.memory;
    q.kind = Kind(integer());
    const bool weights = integer(), lse = integer();
    q.lse_kind = Kind(integer());

    const size_t rows = size_t(q.B * q.H * q.L);
    const size_t sizes[] = {rows * size_t(q.E) * size_t(size_of(q.kind)),
                            weights ? rows * size_t(q.S) * (q.wide ? 8 : 4) : 0,
                            lse ? rows * size_t(size_of(q.lse_kind)) : 0};
    char* results[3];
    for (int n = 0; n < 3; n++) {
        results[n] = memory.block(sizes[n]);
        // Weights are handed over as zeros; all else must be written.
        for (size_t i = 0; i < sizes[n]; i++) results[n][i] = n == 1 ? 0 : char(0xff);
    }
    q.output = results[0];
    q.weights = weights ? results[1] : nullptr;
    q.lse = lse ? results[2] : nullptr;
    try {
        answer(q, call.target, call.threads, nullptr);
    } catch (const std::bad_alloc&) {
        write_one(NoMemory);
        return;
    }
    write_one(Done);
    for (int n = 0; n < 3; n++) write_bytes(results[n], sizes[n]);
}

void run_backward() {
    Call call;
    Memory& memory = call.memory;
    Backward w{};
    w.q = call.q;
    w.output = read_array(memory);
    w.grad_output = read_array(memory);
    w.lse = memory.numbers<double>();
    w.grad_lse = memory.numbers<double>();
    for (Kind* kind : {&w.query_kind, &w.key_kind, &w.value_kind}) *kind = Kind(integer());
    for (char** result : {&w.d_query, &w.d_key, &w.d_value}) *result = memory.returning();
    w.d_bias = read_array(memory, true);
    for (double** result : {&w.d_scale, &w.d_sink, &w.checks, &w.longest})
        *result = reinterpret_cast<double*>(memory.returning());
    w.beyond = reinterpret_cast<uint8_t*>(memory.returning());
    w.head_count = integer();
    w.heads = memory.numbers<int64_t>();
    w.in_order = integer();
    try {
        answer_backward(w, call.target, call.threads, nullptr);
    } catch (const std::bad_alloc&) {
        write_one(NoMemory);
        return;
    }
    write_one(Done);
    memory.send_back();
}

void exponentials() {
    Memory memory;
    const Target& target = target_number(integer());
    const int64_t count = integer();
    const float* x = memory.numbers<float>();
    float* y = reinterpret_cast<float*>(memory.block(size_t(count) * sizeof(float)));
    target.exponential(x, y, count);
    write_bytes(y, size_t(count) * sizeof(float));
}

void targets() {
    int64_t count = 0;
    while (kTargets[count]) count++;
    write_one(count);
    for (int64_t n = 0; n < count; n++) {
        char name[16] = {};
        for (int i = 0; i < 15 && kTargets[n]->name[i]; i++) name[i] = kTargets[n]->name[i];
        write_bytes(name, sizeof name);
        write_one(usable(*kTargets[n]));
    }
}

}  // namespace

int main() {
    for (int64_t order; std::fread(&order, sizeof order, 1, stdin) == 1;) {
        switch (Order(order)) {
            case Run: run(); break;
            case RunBackward: run_backward(); break;
            case Exponentials: exponentials(); break;
            case Targets: targets(); break;
            default: return 4;
        }
        std::fflush(stdout);
    }
    // The pool of threads may sleep: nobody waits for it.
    std::_Exit(0);
}
