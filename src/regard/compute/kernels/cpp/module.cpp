// The native module: `run` for a checked request (kernels/fused.py), and the fast path.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "cpus.hpp"
#include "driver.hpp"
#include "measure.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;
using namespace regard;

namespace {

PyArrayObject* array_of(const nb::object& object) {
    if (!PyArray_Check(object.ptr())) throw nb::type_error("an ndarray is needed here");
    return reinterpret_cast<PyArrayObject*>(object.ptr());
}

Kind kind_of(PyArrayObject* array) {
    switch (PyArray_TYPE(array)) {
        case NPY_HALF: return Kind::float16;
        case NPY_FLOAT: return Kind::float32;
        case NPY_DOUBLE: return Kind::float64;
        case NPY_BYTE: return Kind::int8;
        default: return Kind::bfloat16;  // the only other type that fused.py lets through
    }
}

// Fills in an array (…, heads, rows, columns) and the offset of each of its B batch elements.
void describe(PyArrayObject* array, Array& a, int64_t* offsets, int64_t B) {
    const int axes = PyArray_NDIM(array);
    const npy_intp *shape = PyArray_DIMS(array), *strides = PyArray_STRIDES(array);
    a = {PyArray_BYTES(array), offsets,           axes > 2 ? strides[axes - 3] : 0,
         strides[axes - 2],    strides[axes - 1], kind_of(array)};
    // The last of the leading axes runs fastest. An empty axis before longer ones leaves none.
    int64_t known = 1;
    offsets[0] = 0;
    for (int axis = axes - 4; axis >= 0 && known < B; known *= shape[axis--])
        for (int64_t b = known; b < known * shape[axis]; b++)
            offsets[b] = offsets[b - known] + strides[axis];
}

// The sizes of a call, from arrays whose shapes fit each other.
void read_sizes(Request& q, PyArrayObject* const (&arrays)[3]) {
    const auto size = [&](int array, int from_end) -> int64_t {
        const int axis = PyArray_NDIM(arrays[array]) - from_end;
        return axis < 0 ? 1 : PyArray_DIM(arrays[array], axis);
    };
    q.B = 1;
    for (int axis = 4; axis <= PyArray_NDIM(arrays[0]); axis++) q.B *= size(0, axis);
    q.H = size(0, 3), q.L = size(0, 2), q.D = size(0, 1);
    q.G = size(1, 3), q.S = size(1, 2), q.E = size(2, 1);
    if (kind_of(arrays[2]) == Kind::int8) q.E -= int64_t(sizeof(float));  // the scale
}

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

// Signals arrive on this thread only; others must not ask for the lock while the interpreter ends.
unsigned long main_thread = 0;

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

// Without the lock while in scope. A thread that outlives the interpreter stays here for ever.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() {
        while (finalizing()) pause();
        PyEval_RestoreThread(state_);
    }

  private:
    PyThreadState* state_;
};

std::function<bool()> interruption() {
    if (PyThread_get_thread_ident() != main_thread) return nullptr;
    return [] {
        const PyGILState_STATE held = PyGILState_Ensure();
        const bool signalled = PyErr_CheckSignals() != 0;
        PyGILState_Release(held);
        return signalled;
    };
}

// The arguments of a call up to `rules`, and its scale, softcap and accumulating type.
void read_call(Call& call, const nb::object& query, const nb::object& key, const nb::object& value,
               const nb::object& bias, const nb::object& sink, const nb::object& offset,
               const nb::object& length, int64_t left, int64_t right, const nb::list& rules,
               double scale, double softcap, bool wide, bool high) {
    Request& q = call.request;
    read_sizes(q, {array_of(query), array_of(key), array_of(value)});
    q.query = call.view(query);
    q.key = call.view(key);
    q.value = call.view(value);
    if (!bias.is_none()) q.bias = call.view(bias);
    q.sink = numbers<double>(sink);
    q.offset = numbers<int64_t>(offset);
    q.length = numbers<int64_t>(length);
    q.left = left;
    q.right = right;
    read_program(call, rules);
    q.scale = std::isnan(scale) ? (q.D ? 1 / std::sqrt(double(q.D)) : 1.0) : scale;
    q.softcap = softcap;
    q.wide = wide;
    q.high = high;
}

void run(const nb::object& query, const nb::object& key, const nb::object& value,
         const nb::object& output, const nb::object& weights, const nb::object& lse,
         const nb::object& bias, const nb::object& sink, const nb::object& offset,
         const nb::object& length, int64_t left, int64_t right, const nb::list& rules, double scale,
         double softcap, bool wide, bool high, int threads, const std::string& target) {
    const DefaultArithmetic arithmetic;
    Call call;
    Request& q = call.request;
    read_call(call, query, key, value, bias, sink, offset, length, left, right, rules, scale,
              softcap, wide, high);
    q.output = numbers<char>(output);
    q.kind = kind_of(array_of(output));
    q.weights = numbers<char>(weights);
    q.lse = numbers<char>(lse);
    q.lse_kind = lse.is_none() ? Kind::float32 : kind_of(array_of(lse));
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
                  const nb::object& bias, const nb::object& sink, const nb::object& offset,
                  const nb::object& length, int64_t left, int64_t right, const nb::list& rules,
                  double scale, double softcap, bool wide, bool high, int threads,
                  const std::string& target) {
    const DefaultArithmetic arithmetic;
    Call call;
    read_call(call, query, key, value, bias, sink, offset, length, left, right, rules, scale,
              softcap, wide, high);
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

// What the fast path uses; set from Python. Without a target it answers no call.
const Target* active = nullptr;
int default_threads = 0;

void use(const std::string& target, int threads) {
    active = target.empty() ? nullptr : &target_named(target);
    default_threads = threads;
}

// Below so many multiply-adds a call is over before another Python thread could use the lock.
constexpr double kWorthReleasing = 2e6;

// bfloat16 is not NumPy's own; it is recognised by its name.
bool is_bfloat(PyArrayObject* array) {
    if (PyArray_TYPE(array) < NPY_USERDEF || PyArray_ITEMSIZE(array) != 2) return false;
    const char* name = PyArray_DESCR(array)->typeobj->tp_name;
    const char* dot = std::strrchr(name, '.');
    return std::strcmp(dot ? dot + 1 : name, "bfloat16") == 0;
}

// Whether two arrays might have bytes in common: whether the stretches that they lie in do.
bool may_overlap(PyArrayObject* one, PyArrayObject* other) {
    const auto stretch = [](PyArrayObject* array, const char*& low, const char*& high) {
        low = high = PyArray_BYTES(array);
        for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
            const npy_intp reach = (PyArray_DIM(array, axis) - 1) * PyArray_STRIDE(array, axis);
            (reach < 0 ? low : high) += reach;
        }
        high += PyArray_ITEMSIZE(array);
    };
    const char *low, *high, *other_low, *other_high;
    stretch(one, low, high);
    stretch(other, other_low, other_high);
    return low < other_high && other_low < high;
}

// clang-format off
enum Argument { Query, Key, Value, Mask, Bias, Causal, Window, Offset, Scale, Softcap, Sink,
                Precision, Weights, Lse, Out, KernelName, Threads, Count };
// clang-format on
constexpr int kMostAxes = 8;

// Whether the options are those of the fast path; sets the window, the scale and the threads.
bool read_options(PyObject* const* args, Request& q, int& threads) {
    static PyObject* const working = PyUnicode_InternFromString("working");
    for (const int none : {Mask, Bias, Window, Offset, Softcap, Sink, KernelName})
        if (args[none] != Py_None) return false;
    if (args[Precision] != working) return false;
    if (args[Weights] != Py_False || args[Lse] != Py_False) return false;
    if (args[Causal] != Py_True && args[Causal] != Py_False) return false;
    q.left = -1;
    q.right = args[Causal] == Py_True ? 0 : -1;
    q.scale = NAN;
    if (args[Scale] != Py_None) {
        if (!PyFloat_CheckExact(args[Scale])) return false;
        q.scale = PyFloat_AS_DOUBLE(args[Scale]);
        const double size = std::fabs(q.scale);
        if (!(size > 1e-30 && size < 1e30)) return false;
    }
    if (args[Threads] == Py_None) return true;
    const long stated = PyLong_CheckExact(args[Threads]) ? PyLong_AsLong(args[Threads]) : 0;
    if (PyErr_Occurred()) PyErr_Clear();
    threads = int(stated);
    return stated >= 1 && stated <= kMostThreads;
}

// Whether query, key and value are aligned arrays of one type whose shapes fit without broadcasting,
// and have no size of 0; sets the sizes. Bytes: keys and values are the rows of an int8 cache.
template <bool Bytes>
bool read_inputs(PyObject* const* args, Request& q, PyArrayObject* (&arrays)[3]) {
    for (int n = 0; n < 3; n++) {
        if (!PyArray_CheckExact(args[n])) return false;
        arrays[n] = reinterpret_cast<PyArrayObject*>(args[n]);
        if (!PyArray_ISBEHAVED_RO(arrays[n]) ||
            PyArray_TYPE(arrays[n]) != (Bytes && n ? int(NPY_BYTE) : PyArray_TYPE(arrays[0])) ||
            PyArray_NDIM(arrays[n]) != PyArray_NDIM(arrays[0]))
            return false;
    }
    const int type = PyArray_TYPE(arrays[0]), axes = PyArray_NDIM(arrays[0]);
    if (axes < 2 || axes > kMostAxes) return false;
    if (type != NPY_FLOAT && (Bytes || type != NPY_DOUBLE) && type != NPY_HALF &&
        !is_bfloat(arrays[0]))
        return false;
    const npy_intp *qs = PyArray_DIMS(arrays[0]), *ks = PyArray_DIMS(arrays[1]),
                   *vs = PyArray_DIMS(arrays[2]);
    for (int axis = 0; axis < axes - 3; axis++)
        if (ks[axis] != qs[axis] || vs[axis] != qs[axis]) return false;
    const npy_intp width = qs[axes - 1] + (Bytes ? npy_intp(sizeof(float)) : 0);
    if (ks[axes - 1] != width || vs[axes - 2] != ks[axes - 2]) return false;
    if (axes > 2 && vs[axes - 3] != ks[axes - 3]) return false;
    read_sizes(q, arrays);
    return q.B && q.H && q.G && q.L && q.S && q.D && q.E && q.H % q.G == 0 &&
           (q.right < 0 || q.L == q.S);
}

// A new array, or `out` if the kernel can write into it; else nullptr.
PyObject* output_for(PyObject* out, PyArrayObject* const (&arrays)[3], int64_t columns) {
    const int axes = PyArray_NDIM(arrays[0]);
    npy_intp shape[kMostAxes];
    std::copy_n(PyArray_DIMS(arrays[0]), axes - 1, shape);
    shape[axes - 1] = npy_intp(columns);
    if (out == Py_None) {
        PyArray_Descr* type = PyArray_DESCR(arrays[0]);
        Py_INCREF(type);
        return PyArray_NewFromDescr(&PyArray_Type, type, axes, shape, nullptr, nullptr, 0, nullptr);
    }
    if (!PyArray_CheckExact(out)) return nullptr;
    PyArrayObject* array = reinterpret_cast<PyArrayObject*>(out);
    if (!PyArray_ISCARRAY(array) || PyArray_TYPE(array) != PyArray_TYPE(arrays[0]) ||
        PyArray_NDIM(array) != axes || !PyArray_CompareLists(PyArray_DIMS(array), shape, axes))
        return nullptr;
    for (PyArrayObject* input : arrays)
        if (may_overlap(array, input)) return nullptr;
    Py_INCREF(out);
    return out;
}

// Takes regard.attention's arguments, all by position. Answers a call with three aligned arrays of
// one type and default options (causal, scale, threads and an `out` beside the inputs allowed).
// Returns None for every other call and for every error, so that one place says what is wrong.
template <bool Bytes>
PyObject* fast_path(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const DefaultArithmetic arithmetic;
    Request q{};
    PyArrayObject* arrays[3];
    int threads = default_threads;
    if (count != Count || !active) Py_RETURN_NONE;
    if (!read_options(args, q, threads) || !read_inputs<Bytes>(args, q, arrays)) Py_RETURN_NONE;
    if (std::isnan(q.scale)) q.scale = 1 / std::sqrt(double(q.D));
    PyObject* output = output_for(args[Out], arrays, q.E);
    if (!output) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    q.output = PyArray_BYTES(reinterpret_cast<PyArrayObject*>(output));
    q.wide = PyArray_TYPE(arrays[0]) == NPY_DOUBLE;
    q.kind = q.lse_kind = kind_of(arrays[0]);
    const double work = double(q.B) * double(q.H) * double(q.L) * double(q.S) * double(q.D + q.E);
    const Target& target = *active;
    bool complete = false;
    try {
        constexpr int64_t kSmallBatch = 32;
        int64_t small[4 * kSmallBatch];
        std::vector<int64_t> large(q.B > kSmallBatch ? size_t(4 * q.B) : 0);
        // In bytes; the last are positions.
        int64_t* offsets = large.empty() ? small : large.data();
        Array* const places[3] = {&q.query, &q.key, &q.value};
        for (int n = 0; n < 3; n++, offsets += q.B) describe(arrays[n], *places[n], offsets, q.B);
        std::fill_n(offsets, q.B, 0);
        q.offset = offsets;
        if (work < kWorthReleasing) {
            complete = answer(q, target, 1, nullptr);
        } else {
            const std::function<bool()> interrupted = interruption();
            Unlocked unlocked;
            // 0: as many as there are now; affinity may have changed since the last call.
            complete = answer(q, target, threads ? threads : usable_cpus(), interrupted);
        }
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    if (complete) return output;
    Py_DECREF(output);
    return nullptr;
}

template <bool Bytes>
PyMethodDef fast_path_method = {
    Bytes ? "fast_path_of_bytes" : "fast_path",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fast_path<Bytes>)), METH_FASTCALL,
    nullptr};

// Turns rows (…, H, L, D) by angles (L, pairs) or (…, L, pairs); the result has their kind.
void rotate(const nb::object& rows, const nb::object& output, const nb::object& cosines,
            const nb::object& sines, bool interleaved, const std::string& target) {
    const DefaultArithmetic arithmetic;
    PyArrayObject *in = array_of(rows), *angles = array_of(cosines);
    const int axes = PyArray_NDIM(in), own = PyArray_NDIM(angles);
    Turn turn{};
    turn.B = 1;
    for (int axis = 0; axis < axes - 3; axis++) turn.B *= PyArray_DIM(in, axis);
    turn.H = PyArray_DIM(in, axes - 3), turn.L = PyArray_DIM(in, axes - 2);
    turn.D = PyArray_DIM(in, axes - 1), turn.pairs = PyArray_DIM(angles, own - 1);
    turn.apart = own > 2 ? turn.L * turn.pairs : 0;
    turn.cosines = numbers<double>(cosines), turn.sines = numbers<double>(sines);
    turn.interleaved = interleaved;
    turn.output = numbers<char>(output);
    std::vector<int64_t> offsets(size_t(std::max<int64_t>(turn.B, 1)));
    describe(in, turn.rows, offsets.data(), turn.B);
    std::vector<double> scratch(size_t(4 * turn.D));
    turn.scratch = reinterpret_cast<char*>(scratch.data());
    const Target& chosen = target_named(target);
    Unlocked unlocked;
    chosen.turn(turn, 0, turn.B * turn.H * turn.L);
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
               optional("lse"), optional("bias"), optional("sink"), "offset"_a, optional("length"),
               "left"_a, "right"_a, "rules"_a, "scale"_a, "softcap"_a, "wide"_a, "high"_a,
               "threads"_a, "target"_a);
    module.def("run_backward", &run_backward, "query"_a, "key"_a, "value"_a, "output"_a,
               "grad_output"_a, "lse"_a, optional("grad_lse"), optional("d_query"),
               optional("d_key"), optional("d_value"), optional("d_bias"), optional("d_scale"),
               optional("d_sink"), "beyond"_a, optional("checks"), optional("longest"), "heads"_a,
               "shared"_a, optional("bias"), optional("sink"), "offset"_a, optional("length"),
               "left"_a, "right"_a, "rules"_a, "scale"_a, "softcap"_a, "wide"_a, "high"_a,
               "threads"_a, "target"_a);
    module.def("use", &use);
    for (PyMethodDef* method : {&fast_path_method<false>, &fast_path_method<true>})
        module.attr(method->ml_name) = nb::steal(PyCFunction_New(method, nullptr));
    module.def("rotate", &rotate);
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
    module.def("targets", [] {
        nb::list all;
        for (const Target* const* target = kTargets; *target; target++)
            all.append(nb::make_tuple((*target)->name, usable(**target)));
        return all;
    });
}
