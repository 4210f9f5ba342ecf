// The native module: `run` for a checked request (kernels/fused.py), and what measures and tests need.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "cpus.hpp"
#include "fast_path.hpp"
#include "measure.hpp"
#include "threads.hpp"
#include "subnormals.hpp"

using namespace nanobind::literals;

namespace {

// A Request and what it points to, which must live as long as the call.
struct Call {
    Request request{};
    std::deque<std::vector<int64_t>> tables;
    std::vector<Node> program;

    Array view(const nb::object& object) {
        Array array;
        tables.emplace_back(size_t(std::max<int64_t>(request.B, 1)));
        describe(array_of(object), array, tables.back().data(), request.B);
        return array;
    }
};

template <class T> T* numbers(const nb::object& object) {
    return object.is_none() ? nullptr : static_cast<T*>(PyArray_DATA(array_of(object)));
}

Rule rule_of(const std::string& name) {
    static const char* const names[] = {"boolean", "lengths", "segments", "window",
                                        "all",     "any",     "negate"};
    for (int32_t n = 0; n < 7; n++)
        if (name == names[n]) return Rule(n);
    throw nb::value_error("unknown rule");
}

const Target& target_named(const std::string& name) {
    for (const Target* const* target = kTargets; *target; target++)
        if (name == (*target)->name) return **target;
    throw nb::value_error("no such target");
}

// Rules in postfix order, each a tuple (name, first array, second array, left, right).
void read_program(Call& call, const nb::list& rules) {
    for (const nb::handle& handle : rules) {
        const nb::tuple rule = nb::borrow<nb::tuple>(handle);
        Node node{};
        node.rule = rule_of(nb::cast<std::string>(rule[0]));
        const nb::object first = nb::borrow(rule[1]), second = nb::borrow(rule[2]);
        switch (node.rule) {
            case Rule::boolean: node.mask = call.view(first); break;
            case Rule::lengths: node.lengths = numbers<int64_t>(first); break;
            case Rule::segments:
                node.queries = numbers<int64_t>(first);
                node.keys = numbers<int64_t>(second);
                break;
            default: break;
        }
        node.left = nb::cast<int64_t>(rule[3]);
        node.right = nb::cast<int64_t>(rule[4]);
        call.program.push_back(node);
    }
    take_program(call.request, call.program, call.tables);
}

// The arguments of a call up to `rules`, and its numbers; `sigmoid` is added before a sigmoid makes
// weights of logits, NaN for a softmax.
void read_call(Call& call, const nb::object& query, const nb::object& key, const nb::object& value,
               const nb::object& bias, const nb::object& bias_rows, const nb::object& sink,
               const nb::object& positions, const nb::object& length, int64_t left, int64_t right,
               const nb::list& rules, double scale, double softcap, double sigmoid, bool wide,
               bool high) {
    Request& q = call.request;
    read_sizes(q, {array_of(query), array_of(key), array_of(value)});
    q.query = call.view(query);
    q.key = call.view(key);
    q.value = call.view(value);
    if (!bias.is_none()) q.bias = call.view(bias);
    q.bias_rows = numbers<int64_t>(bias_rows);
    q.sink = numbers<double>(sink);
    q.positions = numbers<int64_t>(positions);
    q.length = numbers<int64_t>(length);
    q.left = left;
    q.right = right;
    read_program(call, rules);
    q.scale = std::isnan(scale) ? (q.D ? 1 / std::sqrt(double(q.D)) : 1.0) : scale;
    q.softcap = softcap;
    q.sigmoid = !std::isnan(sigmoid);
    q.shift = q.sigmoid ? sigmoid : 0;
    q.wide = wide;
    q.high = high;
}

// `turns` is (cosines, sines) of queries, then of keys, and whether pairs are side by side; or None.
void run(const nb::object& query, const nb::object& key, const nb::object& value,
         const nb::object& output, const nb::object& weights, const nb::object& lse,
         const nb::object& bias, const nb::object& bias_rows, const nb::object& sink,
         const nb::object& positions, const nb::object& length, int64_t left, int64_t right,
         const nb::list& rules, double scale, double softcap, double sigmoid, bool wide, bool high,
         int threads, const std::string& target, const nb::object& turns) {
    const DefaultArithmetic arithmetic;
    Call call;
    Request& q = call.request;
    read_call(call, query, key, value, bias, bias_rows, sink, positions, length, left, right, rules,
              scale, softcap, sigmoid, wide, high);
    q.output = numbers<char>(output);
    q.kind = kind_of(array_of(output));
    q.weights = numbers<char>(weights);
    q.lse = numbers<char>(lse);
    q.lse_kind = lse.is_none() ? Kind::float32 : kind_of(array_of(lse));
    Turns turned;
    if (!turns.is_none()) {
        const nb::tuple given = nb::borrow<nb::tuple>(turns);
        const bool interleaved = nb::cast<bool>(given[4]);
        const auto angles = [&](int n) { return array_of(nb::borrow(given[n])); };
        turned.query = turn_of(q.query, q.D, angles(0), angles(1), interleaved);
        turned.key = turn_of(q.key, q.D, angles(2), angles(3), interleaved);
    }
    const Target& chosen = target_named(target);
    bool complete;
    const std::function<bool()> interrupted = interruption();
    {
        Unlocked unlocked;
        complete = answer(q, chosen, threads, interrupted, turns.is_none() ? nullptr : &turned);
    }
    if (!complete) throw nb::python_error();
}

// A part of the keys: `before` are states (parts, …, H, L, 3 + E) to begin with; they go on to `after`,
// which with an axis more has the states of each chunk alone, or become output and lse, where
// `again` is 1 for rows that need all their keys again.
void run_part(const nb::object& query, const nb::object& key, const nb::object& value,
              const nb::object& before, const nb::object& after, const nb::object& output,
              const nb::object& lse, const nb::object& again, const nb::object& bias,
              const nb::object& bias_rows, const nb::object& sink, const nb::object& positions,
              const nb::object& length, int64_t left, int64_t right, const nb::list& rules,
              double scale, double softcap, double sigmoid, bool wide, bool high, int threads,
              const std::string& target) {
    const DefaultArithmetic arithmetic;
    Call call;
    Request& q = call.request;
    read_call(call, query, key, value, bias, bias_rows, sink, positions, length, left, right, rules,
              scale, softcap, sigmoid, wide, high);
    q.before = numbers<char>(before);
    q.before_count = PyArray_DIM(array_of(before), 0);
    q.after = numbers<char>(after);
    q.apart = q.after && PyArray_NDIM(array_of(after)) == PyArray_NDIM(array_of(before));
    q.output = numbers<char>(output);
    q.kind = kind_of(array_of(output));
    q.lse = numbers<char>(lse);
    q.lse_kind = lse.is_none() ? Kind::float32 : kind_of(array_of(lse));
    q.again = numbers<uint8_t>(again);
    const Target& chosen = target_named(target);
    bool complete;
    const std::function<bool()> interrupted = interruption();
    {
        Unlocked unlocked;
        complete = answer(q, chosen, threads, interrupted);
    }
    if (!complete) throw nb::python_error();
}

// The backward pass. Results that are None are not computed; `shared` says that heads share d_bias.
void run_backward(const nb::object& query, const nb::object& key, const nb::object& value,
                  const nb::object& output, const nb::object& grad_output, const nb::object& lse,
                  const nb::object& grad_lse, const nb::object& d_query, const nb::object& d_key,
                  const nb::object& d_value, const nb::object& d_bias, const nb::object& d_scale,
                  const nb::object& d_sink, const nb::object& beyond, const nb::object& checks,
                  const nb::object& longest, const nb::object& heads, bool shared,
                  const nb::object& bias, const nb::object& bias_rows, const nb::object& sink,
                  const nb::object& positions, const nb::object& length, int64_t left,
                  int64_t right, const nb::list& rules, double scale, double softcap,
                  double sigmoid, bool wide, bool high, int threads, const std::string& target) {
    const DefaultArithmetic arithmetic;
    Call call;
    read_call(call, query, key, value, bias, bias_rows, sink, positions, length, left, right, rules,
              scale, softcap, sigmoid, wide, high);
    Backward w{};
    w.output = call.view(output);
    w.grad_output = call.view(grad_output);
    w.lse = numbers<double>(lse);
    w.grad_lse = numbers<double>(grad_lse);
    const auto result = [](const nb::object& array, char*& to, Kind& kind) {
        to = numbers<char>(array);
        if (to) kind = kind_of(array_of(array));
    };
    result(d_query, w.d_query, w.query_kind);
    result(d_key, w.d_key, w.key_kind);
    result(d_value, w.d_value, w.value_kind);
    if (!d_bias.is_none()) w.d_bias = call.view(d_bias);
    w.d_scale = numbers<double>(d_scale);
    w.d_sink = numbers<double>(d_sink);
    w.beyond = numbers<uint8_t>(beyond);
    w.checks = numbers<double>(checks);
    w.longest = numbers<double>(longest);
    w.heads = numbers<int64_t>(heads);
    w.head_count = PyArray_SIZE(array_of(heads));
    w.in_order = shared;
    w.q = call.request;
    const Target& chosen = target_named(target);
    bool complete;
    const std::function<bool()> interrupted = interruption();
    {
        Unlocked unlocked;
        complete = answer_backward(w, chosen, threads, interrupted);
    }
    if (!complete) throw nb::python_error();
}

void use(const std::string& target, int threads, int spin) {
    active = target.empty() ? nullptr : &target_named(target);
    default_threads = threads;
    wait_for_calls(spin);
}

// Turns rows (…, H, L, D), for each (rows, output, cosines, sines); the output has the kind of the
// rows, or a half type where these are float32, and may be the rows themselves.
void rotate(const nb::list& sides, bool interleaved, bool back, int threads,
            const std::string& target) {
    std::vector<Turn> turns;
    std::deque<std::vector<int64_t>> offsets;
    for (const nb::handle& handle : sides) {
        const nb::tuple side = nb::borrow<nb::tuple>(handle);
        PyArrayObject *in = array_of(nb::borrow(side[0])), *out = array_of(nb::borrow(side[1]));
        const int axes = PyArray_NDIM(in);
        int64_t B = 1;
        for (int axis = 0; axis < axes - 3; axis++) B *= PyArray_DIM(in, axis);
        Array rows;
        offsets.emplace_back(size_t(std::max<int64_t>(B, 1)));
        describe(in, rows, offsets.back().data(), B);
        Turn turn = turn_of(rows, PyArray_DIM(in, axes - 1), array_of(nb::borrow(side[2])),
                            array_of(nb::borrow(side[3])), interleaved);
        turn.B = B, turn.H = PyArray_DIM(in, axes - 3), turn.L = PyArray_DIM(in, axes - 2);
        turn.back = back;
        turn.kind = kind_of(out);
        turn.output = PyArray_BYTES(out);
        turns.push_back(turn);
    }
    const Target& chosen = target_named(target);
    Unlocked unlocked;
    turn_rows(turns, chosen, threads);
}

// Rows x (R, K) times each array of rows of weights, side by side in y (R, N); x and y are float32.
// False where no target is active, and where the arrays are others than these.
bool product(const nb::object& x, const nb::tuple& weights, const nb::object& y) {
    const Target* const target = active;
    PyArrayObject *const rows = array_of(x), *const made = array_of(y);
    if (!target || PyArray_TYPE(rows) != NPY_FLOAT || PyArray_TYPE(made) != NPY_FLOAT ||
        !PyArray_ISCARRAY_RO(rows) || !PyArray_ISCARRAY(made) || PyArray_NDIM(rows) != 2 ||
        PyArray_NDIM(made) != 2 || PyArray_DIM(made, 0) != PyArray_DIM(rows, 0))
        return false;
    const int64_t R = PyArray_DIM(rows, 0), K = PyArray_DIM(rows, 1), N = PyArray_DIM(made, 1);
    std::vector<Product> products;
    int64_t done = 0;
    int64_t bytes = 0;
    for (const nb::handle& handle : weights) {
        PyArrayObject* const own = array_of(nb::borrow(handle));
        const Kind kind = kind_of(own);
        const int64_t wide = kind == Kind::int8 ? (K + kGroup - 1) / kGroup * kGroupBytes : K;
        if (PyArray_NDIM(own) != 2 || PyArray_DIM(own, 1) != wide ||
            !PyArray_IS_C_CONTIGUOUS(own) || PyArray_ITEMSIZE(own) != size_of(kind) ||
            kind == Kind::float64)
            return false;
        const int64_t count = PyArray_DIM(own, 0), row = wide * size_of(kind);
        products.push_back({(const float*)PyArray_DATA(rows), R, K, K, PyArray_BYTES(own), count,
                            row, kind, (float*)PyArray_DATA(made) + done, N});
        done += count;
        bytes += count * row;
    }
    if (done != N || !R || !K) return false;
    if (bytes < kWeightsOfAThread) {
        multiply(products, *target, 1);
    } else {
        Unlocked unlocked;
        const int threads = default_threads;
        multiply(products, *target, threads ? threads : usable_cpus());
    }
    return true;
}

nb::object exponential(const nb::object& x, const std::string& target) {
    PyArrayObject* in = array_of(x);
    const npy_intp n = PyArray_SIZE(in);
    PyObject* out = PyArray_SimpleNew(1, &n, NPY_FLOAT);
    if (!out) throw nb::python_error();
    target_named(target).exponential(static_cast<float*>(PyArray_DATA(in)),
                                     static_cast<float*>(PyArray_DATA((PyArrayObject*)out)), n);
    return nb::steal(out);
}

}  // namespace

NB_MODULE(_fused, module) {
    if (_import_array() < 0) throw nb::python_error();
    main_thread = nb::cast<unsigned long>(
        nb::module_::import_("threading").attr("main_thread")().attr("ident"));
    // Whichever thread forks is the main thread of the child.
    pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });
    const auto optional = [](const char* name) { return nb::arg(name).none(); };
    module.def("run", &run, "query"_a, "key"_a, "value"_a, "output"_a, optional("weights"),
               optional("lse"), optional("bias"), optional("bias_rows"), optional("sink"),
               optional("positions"), optional("length"), "left"_a, "right"_a, "rules"_a, "scale"_a,
               "softcap"_a, "sigmoid"_a, "wide"_a, "high"_a, "threads"_a, "target"_a,
               optional("turns"));
    module.def("run_part", &run_part, "query"_a, "key"_a, "value"_a, "before"_a, optional("after"),
               "output"_a, optional("lse"), optional("again"), optional("bias"),
               optional("bias_rows"), optional("sink"), optional("positions"), optional("length"),
               "left"_a, "right"_a, "rules"_a, "scale"_a, "softcap"_a, "sigmoid"_a, "wide"_a,
               "high"_a, "threads"_a, "target"_a);
    module.def("run_backward", &run_backward, "query"_a, "key"_a, "value"_a, "output"_a,
               "grad_output"_a, "lse"_a, optional("grad_lse"), optional("d_query"),
               optional("d_key"), optional("d_value"), optional("d_bias"), optional("d_scale"),
               optional("d_sink"), "beyond"_a, optional("checks"), optional("longest"), "heads"_a,
               "shared"_a, optional("bias"), optional("bias_rows"), optional("sink"),
               optional("positions"), optional("length"), "left"_a, "right"_a, "rules"_a, "scale"_a,
               "softcap"_a, "sigmoid"_a, "wide"_a, "high"_a, "threads"_a, "target"_a);
    module.def("use", &use);
    for (PyMethodDef* method : {&fast_path_method<false>, &fast_path_method<true>})
        module.attr(method->ml_name) = nb::steal(PyCFunction_New(method, nullptr));
    module.def("rotate", &rotate);
    module.def("product", &product);
    module.def("exponential", &exponential);
    module.def("usable_cpus", &usable_cpus);
    module.def("cpu_quota", &cpu_quota, nb::arg("groups"), nb::arg("membership"));
    module.def("lanes", [](const std::string& target) { return target_named(target).lanes; });
    // For benchmarks: what the machine could do at most, per second.
    // For the kernel that computes in float32 (0), in float64 (1), or bfloat16 by pairs (2).
    module.def("multiply_add_peak",
               [](int threads, double seconds, size_t kernel, const std::string& name) {
        const auto& kernels = target_named(name).kernels;
        Unlocked unlocked;
        return kernel < std::size(kernels) ? most_operations(kernels[kernel], threads, seconds)
                                           : 0.0;
    });
    module.def("read_bandwidth",
               [](const nb::object& array, int threads, double seconds, const std::string& name) {
        const Target& target = target_named(name);
        PyArrayObject* data = array_of(array);
        Unlocked unlocked;
        const size_t bytes = size_t(PyArray_NBYTES(data));
        return most_bytes(target, PyArray_BYTES(data), bytes, threads, seconds);
    });
    module.def("clock_frequency", [](int threads, double seconds) {
        Unlocked unlocked;
        return clock_rate(threads, seconds);
    });
#if defined(REGARD_COUNT_SUBNORMALS)
    // How many times each pass met or made a subnormal number since this was asked.
    module.def("subnormals", [] {
        nb::dict counts;
        for (size_t pass = 0; pass < std::size(kPasses); pass++)
            counts[kPasses[pass]] = __atomic_exchange_n(&subnormal_counts[pass], 0,
                                                        __ATOMIC_RELAXED);
        return counts;
    });
#endif
    module.def("targets", [] {
        nb::list all;
        for (const Target* const* target = kTargets; *target; target++)
            all.append(nb::make_tuple((*target)->name, usable(**target)));
        return all;
    });
}
