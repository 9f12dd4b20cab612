// Where the gradients of many parameters lie, asked in one call of what PyTorch's own Python methods ask.
//
// `torch/csrc/inductor/aoti_torch/c/shim.h` is PyTorch's C interface, which answers with an error code where the methods raise.
// Its handle is an `at::Tensor *`: here of the one in a parameter's Python object, or in its gradient's place. So that nothing
// of PyTorch's C++ headers is compiled, functions and that place are found by `addresses.py`, which also tries them out.
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef void *Handle;

static struct {
    int32_t (*is_defined)(Handle, bool *);
    int32_t (*layout)(Handle, int32_t *);
    int32_t (*dtype)(Handle, int32_t *);
    int32_t (*is_contiguous)(Handle, bool *);
    int32_t (*dim)(Handle, int64_t *);
    int32_t (*strides)(Handle, int64_t **);
    int32_t (*address)(Handle, void **);
    Handle (*gradient)(const void *implementation);  // c10::TensorImpl::grad() const: a reference, never null
    int32_t strided;
} torch_;

// What is known of a row: as `addresses.py` names them.
enum { MISSING = 0, THERE = 1, ODD = 2 };

static const void *implementation(Handle tensor) { return *(const void *const *)tensor; }

static bool same_order(Handle a, Handle b) {
    bool both[2];
    if (torch_.is_contiguous(a, &both[0]) || torch_.is_contiguous(b, &both[1])) return false;
    if (both[0] && both[1]) return true;
    int64_t dims[2], *strides[2];
    if (torch_.dim(a, &dims[0]) || torch_.dim(b, &dims[1]) || dims[0] != dims[1]) return false;
    if (torch_.strides(a, &strides[0]) || torch_.strides(b, &strides[1])) return false;
    for (int64_t d = 0; d < dims[0]; d++)
        if (strides[0][d] != strides[1][d]) return false;
    return true;
}

static bool plain(Handle gradient, Handle weight, int64_t *found) {
    int32_t layout, dtypes[2];
    void *address;
    if (torch_.layout(gradient, &layout) || layout != torch_.strided) return false;  // first: others raise for sparse ones
    if (torch_.dtype(gradient, &dtypes[0]) || torch_.dtype(weight, &dtypes[1]) || dtypes[0] != dtypes[1]) return false;
    if (!same_order(gradient, weight) || torch_.address(gradient, &address)) return false;
    *found = (int64_t)(intptr_t)address;
    return address != NULL;  // of an empty tensor, and of one that only wraps others
}

static void fetch(const void *object) {  // of an object of PyTorch's what is asked for: its first 256 bytes
    for (int line = 0; line < 4; line++) __builtin_prefetch((const char *)object + 64 * line);
}

#define BLOCK 32

// Returns the kinds of all rows, or-ed as bits: 1 << MISSING, 1 << THERE, 1 << ODD.
//
// A fresh gradient is in no cache, and neither, after a backward, is its parameter: each pass over a block asks memory for what
// the next pass reads, so that misses are waited for together.
static int ask_rows(int64_t n, const Handle *weights, const int64_t *lie, int64_t *found, uint8_t *kinds) {
    int seen = 0;
    Handle gradients[BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        int count = n - start < BLOCK ? (int)(n - start) : BLOCK;
        for (int k = 0; k < count; k++) {
            if (start + k + BLOCK < n) __builtin_prefetch(weights[start + k + BLOCK]);
            fetch(implementation(weights[start + k]));
        }
        for (int k = 0; k < count; k++) {
            gradients[k] = torch_.gradient(implementation(weights[start + k]));
            __builtin_prefetch(gradients[k]);
        }
        for (int k = 0; k < count; k++) fetch(implementation(gradients[k]));
        for (int k = 0; k < count; k++) {
            int64_t row = start + k;
            void *address;
            bool defined;
            int kind = ODD;
            found[row] = 0;
            if (!torch_.address(weights[row], &address) && (int64_t)(intptr_t)address == lie[row] &&
                !torch_.is_defined(gradients[k], &defined)) {
                if (!defined) kind = MISSING;
                else if (plain(gradients[k], weights[row], &found[row])) kind = THERE;
            }
            kinds[row] = (uint8_t)kind;
            seen |= 1 << kind;
        }
    }
    return seen;
}

// ---- for Python ------------------------------------------------------------------------------------------------------

static bool pointers(PyObject *const *arguments, Py_ssize_t count, Py_ssize_t expected, void **into) {
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%zd arguments; expected %zd addresses", count, expected);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) into[i] = PyLong_AsVoidPtr(arguments[i]);
    return !PyErr_Occurred();
}

static PyObject *use(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *given[9];
    if (!pointers(arguments, count, 9, given)) return NULL;
    torch_.is_defined = (int32_t (*)(Handle, bool *))given[0];
    torch_.layout = (int32_t (*)(Handle, int32_t *))given[1];
    torch_.dtype = (int32_t (*)(Handle, int32_t *))given[2];
    torch_.is_contiguous = (int32_t (*)(Handle, bool *))given[3];
    torch_.dim = (int32_t (*)(Handle, int64_t *))given[4];
    torch_.strides = (int32_t (*)(Handle, int64_t **))given[5];
    torch_.address = (int32_t (*)(Handle, void **))given[6];
    torch_.gradient = (Handle (*)(const void *))given[7];
    torch_.strided = ((int32_t (*)(void))given[8])();
    Py_RETURN_NONE;
}

static PyObject *ask(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    void *given[5];
    if (!pointers(arguments, count, 5, given)) return NULL;
    return PyLong_FromLong(ask_rows((int64_t)(intptr_t)given[0], given[1], given[2], given[3], given[4]));
}

static PyMethodDef methods[] = {
    {"use", (PyCFunction)(void (*)(void))use, METH_FASTCALL, "use(functions of PyTorch, in the order of the struct)"},
    {"ask", (PyCFunction)(void (*)(void))ask, METH_FASTCALL, "ask(rows, weights, where they lie, found, kinds)"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "weft_addresses", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_weft_addresses(void) { return PyModule_Create(&definition); }
