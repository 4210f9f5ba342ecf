// The fast path: plain calls, answered before a Request is built; for module.cpp.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "arrays.hpp"
#include "cpus.hpp"

namespace {

// What the fast path uses; set from Python, perhaps while other threads call. Without a target it
// answers no call.
std::atomic<const Target*> active{nullptr};
std::atomic<int> default_threads{0};

// Below so many multiply-adds a call is over before another Python thread could use the lock.
constexpr double kWorthReleasing = 2e6;

// bfloat16 is not NumPy's own; it is recognised by its name.
bool is_bfloat(PyArrayObject* array) {
    if (PyArray_TYPE(array) < NPY_USERDEF || PyArray_ITEMSIZE(array) != 2) return false;
    PyObject* name = PyType_GetName(PyArray_DESCR(array)->typeobj);
    if (!name) PyErr_Clear();
    const bool found = name && PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
    Py_XDECREF(name);
    return found;
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
                Precision, Weights, Lse, Out, KernelName, Threads, Count,
                Positions = Count };
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
        q.scale = PyFloat_AsDouble(args[Scale]);
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

// What positions are to a call of L queries and L keys: nothing, or a bias (H, L, L) of numbers of the
// type that is computed in, or cosines and sines (L, pairs) of queries and keys alike.
struct Placed {
    PyArrayObject *bias = nullptr, *cosines = nullptr, *sines = nullptr;
    bool interleaved = false;
};
bool read_positions(PyObject* given, const Request& q, Placed& to) {
    const auto array = [&](PyObject* object, bool wide, int axes) {
        if (!PyArray_CheckExact(object)) return (PyArrayObject*)nullptr;
        PyArrayObject* one = reinterpret_cast<PyArrayObject*>(object);
        const bool fits = PyArray_ISBEHAVED_RO(one) && PyArray_NDIM(one) == axes &&
                          PyArray_TYPE(one) == (wide ? NPY_DOUBLE : NPY_FLOAT) &&
                          PyArray_DIM(one, axes - 2) == q.L;
        return fits ? one : nullptr;
    };
    if (given == Py_None) return true;
    if (q.L != q.S) return false;
    if (!PyTuple_CheckExact(given)) {
        to.bias = array(given, q.wide, 3);
        return to.bias && PyArray_DIM(to.bias, 0) == q.H && PyArray_DIM(to.bias, 2) == q.S;
    }
    if (PyTuple_Size(given) != 3) return false;
    to.cosines = array(PyTuple_GetItem(given, 0), true, 2);
    to.sines = array(PyTuple_GetItem(given, 1), true, 2);
    to.interleaved = PyTuple_GetItem(given, 2) == Py_True;
    return to.cosines && to.sines && PyArray_IS_C_CONTIGUOUS(to.cosines) &&
           PyArray_IS_C_CONTIGUOUS(to.sines) && PyArray_SAMESHAPE(to.cosines, to.sines) &&
           2 * PyArray_DIM(to.cosines, 1) <= q.D;
}

// A new array, or `out` if the kernel can write into it; else nullptr.
PyObject* output_for(PyObject* out, PyArrayObject* const (&arrays)[3], int64_t columns) {
    const int axes = PyArray_NDIM(arrays[0]);
    npy_intp shape[kMostAxes];
    std::copy_n(PyArray_DIMS(arrays[0]), axes - 1, shape);
    shape[axes - 1] = npy_intp(columns);
    if (out == Py_None) {
        PyArray_Descr* type = PyArray_DESCR(arrays[0]);
        Py_INCREF(reinterpret_cast<PyObject*>(type));
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

// Takes regard.attention's arguments, all by position, and perhaps what positions are to it. Answers a
// call with three aligned arrays of one type and default options (causal, scale, threads and an `out`
// beside the inputs allowed). Returns None for every other call and for every error, so that one place says what is wrong.
template <bool Bytes>
PyObject* fast_path(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const DefaultArithmetic arithmetic;
    Request q{};
    PyArrayObject* arrays[3];
    int threads = default_threads;
    Placed placed;
    const Target* const target = active;
    if ((count != Count && count != Count + !Bytes) || !target) Py_RETURN_NONE;
    if (!read_options(args, q, threads) || !read_inputs<Bytes>(args, q, arrays)) Py_RETURN_NONE;
    q.wide = PyArray_TYPE(arrays[0]) == NPY_DOUBLE;
    if (count > Count && !read_positions(args[Positions], q, placed)) Py_RETURN_NONE;
    if (std::isnan(q.scale)) q.scale = 1 / std::sqrt(double(q.D));
    PyObject* output = output_for(args[Out], arrays, q.E);
    if (!output) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    q.output = PyArray_BYTES(reinterpret_cast<PyArrayObject*>(output));
    q.kind = q.lse_kind = kind_of(arrays[0]);
    const double work = double(q.B) * double(q.H) * double(q.L) * double(q.S) * double(q.D + q.E);
    bool complete = false;
    try {
        constexpr int64_t kSmallBatch = 32;
        int64_t small[4 * kSmallBatch];
        std::vector<int64_t> large(q.B > kSmallBatch ? size_t(4 * q.B) : 0);
        int64_t* offsets = large.empty() ? small : large.data();
        Array* const places[3] = {&q.query, &q.key, &q.value};
        for (int n = 0; n < 3; n++, offsets += q.B) describe(arrays[n], *places[n], offsets, q.B);
        std::fill_n(offsets, q.B, 0);
        if (placed.bias) describe(placed.bias, q.bias, offsets, 1);  // that of all batch elements
        Turns turns{};
        if (placed.cosines)
            for (Turn* turn : {&turns.query, &turns.key})
                *turn = turn_of(turn == &turns.key ? q.key : q.query, q.D, placed.cosines,
                                placed.sines, placed.interleaved);
        const Turns* turned = placed.cosines ? &turns : nullptr;
        if (work < kWorthReleasing) {
            complete = answer(q, *target, 1, nullptr, turned);
        } else {
            const std::function<bool()> interrupted = interruption();
            Unlocked unlocked;
            // 0: as many as there are now; affinity may have changed since the last call.
            complete = answer(q, *target, threads ? threads : usable_cpus(), interrupted, turned);
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

}  // namespace
