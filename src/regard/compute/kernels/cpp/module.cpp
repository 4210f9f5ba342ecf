// The Python door of the native kernel: arrays in, pointers out. Checks nothing twice: what comes
// here is a checked request (see kernels/fused.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <pthread.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cpus.hpp"
#include "dispatch.hpp"
#include "driver.hpp"
#include "measure.hpp"

namespace nb = nanobind;
using namespace regard;

namespace {

// Everything that a Request points to and that must live as long as the call.
struct Call {
    Request request{};
    std::vector<std::unique_ptr<std::vector<int64_t>>> offsets;
    std::vector<Node> program;
};

PyArrayObject* array_of(const nb::object& object) {
    if (!PyArray_Check(object.ptr())) throw nb::type_error("an ndarray is needed here");
    return reinterpret_cast<PyArrayObject*>(object.ptr());
}

Kind kind_of(PyArrayObject* array) {
    switch (PyArray_TYPE(array)) {
        case NPY_HALF: return Kind::float16;
        case NPY_FLOAT: return Kind::float32;
        case NPY_DOUBLE: return Kind::float64;
        default: return Kind::bfloat16;  // the only other type that fused.py lets through
    }
}

// An array (…, heads, rows, columns) whose leading axes are those of the call.
Array view(Call& call, const nb::object& object) {
    PyArrayObject* array = array_of(object);
    const int axes = PyArray_NDIM(array);
    const npy_intp *shape = PyArray_DIMS(array), *strides = PyArray_STRIDES(array);
    Array seen;
    seen.data = PyArray_BYTES(array);
    seen.kind = kind_of(array);
    seen.head = strides[axes - 3];
    seen.row = strides[axes - 2];
    seen.column = strides[axes - 1];
    auto offsets = std::make_unique<std::vector<int64_t>>(1, 0);
    for (int axis = 0; axis < axes - 3; axis++) {
        std::vector<int64_t> next;
        next.reserve(offsets->size() * size_t(shape[axis]));
        for (const int64_t offset : *offsets)
            for (npy_intp n = 0; n < shape[axis]; n++) next.push_back(offset + n * strides[axis]);
        *offsets = std::move(next);
    }
    if (offsets->empty()) offsets->push_back(0);
    seen.batch = offsets->data();
    call.offsets.push_back(std::move(offsets));
    return seen;
}

template <class T> T* numbers(const nb::object& object) {
    return object.is_none() ? nullptr : static_cast<T*>(PyArray_DATA(array_of(object)));
}

Rule rule_of(const std::string& name) {
    static const char* const names[] = {"boolean", "lengths", "segments", "causal",
                                        "window",  "all",     "any",      "negate"};
    for (int32_t n = 0; n < 8; n++)
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
    int32_t depth = 0;
    for (const nb::handle& handle : rules) {
        const nb::tuple rule = nb::borrow<nb::tuple>(handle);
        Node node{};
        node.rule = rule_of(nb::cast<std::string>(rule[0]));
        const nb::object first = nb::borrow(rule[1]), second = nb::borrow(rule[2]);
        switch (node.rule) {
            case Rule::boolean: node.mask = view(call, first); break;
            case Rule::lengths: node.lengths = numbers<int64_t>(first); break;
            case Rule::segments:
                node.queries = numbers<int64_t>(first);
                node.keys = numbers<int64_t>(second);
                break;
            default: break;
        }
        node.left = nb::cast<int64_t>(rule[3]);
        node.right = nb::cast<int64_t>(rule[4]);
        if (node.rule == Rule::all || node.rule == Rule::any) depth--;
        else if (node.rule != Rule::negate) depth++;
        call.request.program_depth = std::max(call.request.program_depth, depth);
        call.program.push_back(node);
    }
    call.request.program = call.program.empty() ? nullptr : call.program.data();
    call.request.program_size = int32_t(call.program.size());
}

// Signals arrive on the main thread only; other threads must not even ask for the lock, which at
// the end of the interpreter would end them in the middle of C++.
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

void run(const nb::object& query, const nb::object& key, const nb::object& value,
         const nb::object& output, const nb::object& weights, const nb::object& lse,
         const nb::object& bias, const nb::object& sink, const nb::object& offset,
         const nb::object& length, int64_t left, int64_t right, const nb::list& rules, double scale,
         double softcap, bool wide, int threads, const std::string& target) {
    const PlainArithmetic plain;
    Call call;
    Request& q = call.request;
    q.query = view(call, query);
    q.key = view(call, key);
    q.value = view(call, value);
    PyArrayObject *qa = array_of(query), *ka = array_of(key), *va = array_of(value);
    const int axes = PyArray_NDIM(qa);
    q.B = 1;
    for (int axis = 0; axis < axes - 3; axis++) q.B *= PyArray_DIM(qa, axis);
    q.H = PyArray_DIM(qa, axes - 3);
    q.L = PyArray_DIM(qa, axes - 2);
    q.D = PyArray_DIM(qa, axes - 1);
    q.G = PyArray_DIM(ka, axes - 3);
    q.S = PyArray_DIM(ka, axes - 2);
    q.E = PyArray_DIM(va, axes - 1);
    if (!bias.is_none()) q.bias = view(call, bias);
    q.sink = numbers<double>(sink);
    q.offset = numbers<int64_t>(offset);
    q.length = numbers<int64_t>(length);
    q.left = left;
    q.right = right;
    read_program(call, rules);
    q.scale = std::isnan(scale) ? (q.D ? 1 / std::sqrt(double(q.D)) : 1.0) : scale;
    q.softcap = softcap;
    q.wide = wide;
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

// What a plain call uses; set once from Python, and again by tests. Without a target none is plain.
const Target* active = nullptr;
int default_threads = 0;

void use(const std::string& target, int threads) {
    active = target.empty() ? nullptr : &target_named(target);
    default_threads = threads;
}

// Below so many multiply-adds a call is over before another Python thread could use the lock.
constexpr double kWorthReleasing = 2e6;

// bfloat16 is not NumPy's own: whoever defines it, its name says what it is.
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

// regard.attention's arguments, all by position, in order. Answers the plain call before anything
// else is built: three aligned arrays of one type, contiguous or views such as a cache has, with
// default options (causal, a scale, threads and an `out` beside the inputs allowed). Returns None for
// every other call, and for every error, so that there is one place that says what is wrong.
PyObject* fast_path(PyObject*, PyObject* const* args, Py_ssize_t count) {
    enum { Query, Key, Value, Mask, Bias, Causal, Window, Offset, Scale, Softcap, Sink, Precision,
           Weights, Lse, Out, Kernel, Threads, Count };
    static PyObject* const working = PyUnicode_InternFromString("working");
    const PlainArithmetic plain_arithmetic;
    if (count != Count || !active) Py_RETURN_NONE;
    for (const int none : {Mask, Bias, Window, Offset, Softcap, Sink, Kernel})
        if (args[none] != Py_None) Py_RETURN_NONE;
    if (args[Precision] != working || args[Weights] != Py_False || args[Lse] != Py_False)
        Py_RETURN_NONE;
    const bool causal = args[Causal] == Py_True;
    if (!causal && args[Causal] != Py_False) Py_RETURN_NONE;
    PyArrayObject* arrays[3];
    for (int n = 0; n < 3; n++) {
        if (!PyArray_CheckExact(args[n])) Py_RETURN_NONE;
        arrays[n] = reinterpret_cast<PyArrayObject*>(args[n]);
        if (!PyArray_ISBEHAVED_RO(arrays[n]) || PyArray_TYPE(arrays[n]) != PyArray_TYPE(arrays[0]) ||
            PyArray_NDIM(arrays[n]) != PyArray_NDIM(arrays[0]))
            Py_RETURN_NONE;
    }
    const int type = PyArray_TYPE(arrays[0]), axes = PyArray_NDIM(arrays[0]);
    constexpr int kMostAxes = 8;
    if (axes < 2 || axes > kMostAxes) Py_RETURN_NONE;
    if (type != NPY_FLOAT && type != NPY_DOUBLE && type != NPY_HALF && !is_bfloat(arrays[0]))
        Py_RETURN_NONE;
    int threads = default_threads;
    if (args[Threads] != Py_None) {
        const long stated = PyLong_CheckExact(args[Threads]) ? PyLong_AsLong(args[Threads]) : 0;
        if (PyErr_Occurred()) PyErr_Clear();
        if (stated < 1 || stated > kMostThreads) Py_RETURN_NONE;
        threads = int(stated);
    }
    const npy_intp *qs = PyArray_DIMS(arrays[0]), *ks = PyArray_DIMS(arrays[1]),
                   *vs = PyArray_DIMS(arrays[2]);
    Request q{};
    q.B = 1;
    for (int axis = 0; axis < axes - 3; axis++) {
        if (ks[axis] != qs[axis] || vs[axis] != qs[axis]) Py_RETURN_NONE;
        q.B *= qs[axis];
    }
    q.H = axes > 2 ? qs[axes - 3] : 1;
    q.G = axes > 2 ? ks[axes - 3] : 1;
    q.L = qs[axes - 2];
    q.D = qs[axes - 1];
    q.S = ks[axes - 2];
    q.E = vs[axes - 1];
    if (ks[axes - 1] != q.D || vs[axes - 2] != q.S || (axes > 2 && vs[axes - 3] != q.G))
        Py_RETURN_NONE;
    // Sizes of 0 and refusals belong to the general way.
    if (!(q.B && q.H && q.G && q.L && q.S && q.D && q.E) || q.H % q.G || (causal && q.L != q.S))
        Py_RETURN_NONE;
    q.scale = 1 / std::sqrt(double(q.D));
    if (args[Scale] != Py_None) {
        if (!PyFloat_CheckExact(args[Scale])) Py_RETURN_NONE;
        q.scale = PyFloat_AS_DOUBLE(args[Scale]);
        const double size = std::fabs(q.scale);
        if (!(size > 1e-30 && size < 1e30)) Py_RETURN_NONE;
    }

    constexpr int64_t kSmallBatch = 32;
    int64_t small[4][kSmallBatch];
    std::vector<int64_t> large;
    int64_t* offsets[4];  // of query, key, value in bytes; of positions
    if (q.B > kSmallBatch) {
        try {
            large.resize(size_t(4 * q.B));
        } catch (const std::bad_alloc&) {
            return PyErr_NoMemory();
        }
    }
    for (int n = 0; n < 4; n++) offsets[n] = q.B > kSmallBatch ? large.data() + n * q.B : small[n];
    Array* const places[3] = {&q.query, &q.key, &q.value};
    for (int n = 0; n < 3; n++) {
        const npy_intp* strides = PyArray_STRIDES(arrays[n]);
        Array& a = *places[n];
        a.data = PyArray_BYTES(arrays[n]);
        a.batch = offsets[n];
        a.column = strides[axes - 1];
        a.row = strides[axes - 2];
        a.head = axes > 2 ? strides[axes - 3] : 0;
        a.kind = kind_of(arrays[0]);
        // The last of the leading axes runs fastest.
        int64_t known = 1;
        offsets[n][0] = 0;
        for (int axis = axes - 4; axis >= 0; known *= qs[axis--])
            for (int64_t b = known; b < known * qs[axis]; b++)
                offsets[n][b] = offsets[n][b - known] + strides[axis];
    }
    for (int64_t b = 0; b < q.B; b++) offsets[3][b] = 0;
    q.offset = offsets[3];
    q.left = -1;
    q.right = causal ? 0 : -1;
    q.wide = type == NPY_DOUBLE;
    q.kind = q.lse_kind = q.query.kind;

    npy_intp shape[kMostAxes];
    for (int axis = 0; axis < axes - 1; axis++) shape[axis] = qs[axis];
    shape[axes - 1] = q.E;
    PyObject* output = args[Out];
    if (output == Py_None) {
        PyArray_Descr* descr = PyArray_DESCR(arrays[0]);
        Py_INCREF(descr);
        output = PyArray_NewFromDescr(&PyArray_Type, descr, axes, shape, nullptr, nullptr, 0, nullptr);
        if (!output) return nullptr;
    } else {
        if (!PyArray_CheckExact(output)) Py_RETURN_NONE;
        PyArrayObject* out = reinterpret_cast<PyArrayObject*>(output);
        if (!PyArray_ISCARRAY(out) || PyArray_TYPE(out) != type || PyArray_NDIM(out) != axes ||
            !PyArray_CompareLists(PyArray_DIMS(out), shape, axes))
            Py_RETURN_NONE;
        for (PyArrayObject* array : arrays)
            if (may_overlap(out, array)) Py_RETURN_NONE;
        Py_INCREF(output);
    }
    q.output = PyArray_BYTES(reinterpret_cast<PyArrayObject*>(output));
    const double work = double(q.B) * double(q.H) * double(q.L) * double(q.S) * double(q.D + q.E);
    const Target& target = *active;
    bool complete = false;
    try {
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

PyMethodDef fast_path_method = {
    "fast_path", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fast_path)), METH_FASTCALL,
    nullptr};

nb::object exponential(const nb::object& x, const std::string& target) {
    PyArrayObject* in = array_of(x);
    const npy_intp n = PyArray_SIZE(in);
    PyObject* out = PyArray_SimpleNew(1, &n, NPY_FLOAT);
    if (!out) throw nb::python_error();
    target_named(target).exponential(static_cast<float*>(PyArray_DATA(in)),
                                     static_cast<float*>(PyArray_DATA((PyArrayObject*)out)), n);
    return nb::steal(out);
}

// For benchmarks: what the machine could do at most, per second.
double multiply_add_peak(int threads, double seconds, bool wide, const std::string& target) {
    const Target& measured = target_named(target);
    Unlocked unlocked;
    return most_operations(measured, wide, threads, seconds);
}

double read_bandwidth(const nb::object& array, int threads, double seconds,
                      const std::string& target) {
    const Target& measured = target_named(target);
    PyArrayObject* data = array_of(array);
    const char* bytes = PyArray_BYTES(data);
    const size_t size = size_t(PyArray_NBYTES(data));
    Unlocked unlocked;
    return most_bytes(measured, bytes, size, threads, seconds);
}

double clock_frequency(int threads, double seconds) {
    Unlocked unlocked;
    return clock_rate(threads, seconds);
}

}  // namespace

NB_MODULE(_fused, module) {
    if (_import_array() < 0) throw nb::python_error();
    main_thread = nb::cast<unsigned long>(
        nb::module_::import_("threading").attr("main_thread")().attr("ident"));
    // Whichever thread forks is the main thread of the child.
    pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });
    module.def("run", &run, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("output"),
               nb::arg("weights").none(), nb::arg("lse").none(), nb::arg("bias").none(),
               nb::arg("sink").none(), nb::arg("offset"), nb::arg("length").none(),
               nb::arg("left"), nb::arg("right"), nb::arg("rules"), nb::arg("scale"),
               nb::arg("softcap"), nb::arg("wide"), nb::arg("threads"),
               nb::arg("target"));
    module.def("use", &use);
    module.attr("fast_path") = nb::steal(PyCFunction_New(&fast_path_method, nullptr));
    module.def("exponential", &exponential);
    module.def("usable_cpus", &usable_cpus);
    module.def("cpu_quota", &cpu_quota, nb::arg("groups"), nb::arg("membership"));
    module.def("lanes", [](const std::string& target) { return target_named(target).lanes; });
    module.def("multiply_add_peak", &multiply_add_peak);
    module.def("read_bandwidth", &read_bandwidth);
    module.def("clock_frequency", &clock_frequency);
    module.def("targets", [] {
        nb::list all;
        for (const Target* const* target = kTargets; *target; target++)
            all.append(nb::make_tuple((*target)->name, usable(**target)));
        return all;
    });
}
