// NumPy arrays as the kernels read them, and the interpreter's lock; for module.cpp.
#pragma once
#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <dlfcn.h>
#include <unistd.h>

#include <functional>

#include "driver.hpp"

namespace nb = nanobind;
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

// How rows, D wide, are turned, by cosines and sines (L, pairs) or (…, L, pairs).
Turn turn_of(const Array& rows, int64_t D, PyArrayObject* cosines, PyArrayObject* sines,
             bool interleaved) {
    const int axes = PyArray_NDIM(cosines);
    Turn turn{};
    turn.D = D;
    turn.rows = rows;
    turn.kind = rows.kind;
    turn.cosines = static_cast<const double*>(PyArray_DATA(cosines));
    turn.sines = static_cast<const double*>(PyArray_DATA(sines));
    turn.pairs = PyArray_DIM(cosines, axes - 1);
    turn.apart = axes > 2 ? PyArray_DIM(cosines, axes - 2) * turn.pairs : 0;
    turn.interleaved = interleaved;
    return turn;
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

// Signals arrive on this thread only; others must not ask for the lock while the interpreter ends.
unsigned long main_thread = 0;

// Whether the interpreter ends. No function of the stable ABI says so without the lock; the one that
// does is looked up, under its name since Python 3.13 and the one before.
bool finalizing() {
    using Asked = int (*)();
    static const Asked asked = [] {
        void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
        if (!found) found = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
        return reinterpret_cast<Asked>(found);
    }();
    return asked && asked();
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

}  // namespace
