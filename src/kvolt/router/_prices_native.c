/* What a prompt takes at each of many workers, in C: `prices.py` says what is computed, this file does it in one pass.

   A decision of the router asks it for all candidates. In numpy that is some forty operations on short arrays, each of
   which costs more to begin than to do. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdbool.h>
#include <string.h>

#ifndef KVOLT_SOURCE_DIGEST
#define KVOLT_SOURCE_DIGEST ""
#endif

enum { LINEAR_COLUMNS = 6, OCCUPANCY_COLUMNS = 9 };

typedef struct {
    Py_ssize_t num;        /* workers */
    const double *columns; /* of the model: one after the other, a number for each worker */
    double prompt, output, block;
    const double *overlap, *pace, *decoding, *context;
    double *prefill, *slowdown;
} Job;

static inline double at_least(double value, double least) { return value > least ? value : least; }

static void price_linear(const Job *job) {
    const Py_ssize_t num = job->num;
    const double *chunk = job->columns, *step = chunk + num, *token = step + num, *read = token + num,
                 *batch = read + num, *context_token = batch + num;
    for (Py_ssize_t i = 0; i < num; i++) {
        const double new = at_least(job->prompt - job->overlap[i] * job->block, 1.0);
        const double chunks = new / chunk[i], full = floor(chunks), rest = new - full * chunk[i];
        const double squares = full * (chunk[i] * chunk[i]) + rest * rest;
        const double reading = read[i] * (new * (job->prompt - 0.5 * new) + 0.5 * squares);
        const double beside = job->decoding[i] * batch[i] + job->context[i] * context_token[i];
        const double more = batch[i] + job->prompt * context_token[i];
        job->prefill[i] = job->pace[i] * (ceil(chunks) * step[i] + new *token[i] + reading + chunks * beside);
        job->slowdown[i] = job->decoding[i] > 0 ? job->pace[i] * at_least(more, 0.0) * job->output : 0.0;
    }
}

static void price_occupancy(const Job *job) {
    const Py_ssize_t num = job->num;
    const double *chunk = job->columns, *step = chunk + num, *token = step + num, *square = token + num,
                 *base = square + num, *share = base + num, *share_square = share + num,
                 *least = share_square + num, *kv_tokens = least + num;
    for (Py_ssize_t i = 0; i < num; i++) {
        const double new = at_least(job->prompt - job->overlap[i] * job->block, 1.0);
        const double chunks = new / chunk[i], full = floor(chunks), rest = new - full * chunk[i];
        const double squares = full * (chunk[i] * chunk[i]) + rest * rest;
        double decode[2]; /* a step as it is, and with this prompt's context */
        for (int joined = 0; joined < 2; joined++) {
            const double context = job->context[i] + (joined ? job->prompt : 0.0);
            const double used = context / kv_tokens[i] < 1.0 ? context / kv_tokens[i] : 1.0;
            decode[joined] = at_least(base[i] + (share[i] + share_square[i] * used) * used, least[i]);
        }
        const bool is_busy = job->decoding[i] > 0;
        const double alone = ceil(chunks) * step[i] + new *token[i] + squares * square[i];
        job->prefill[i] = job->pace[i] * (alone + (is_busy ? chunks * decode[0] : 0.0));
        job->slowdown[i] = is_busy ? job->pace[i] * at_least(decode[1] - decode[0], 0.0) * job->output : 0.0;
    }
}

static PyObject *prices_look(PyObject *self, PyObject *args) {
    int is_occupancy;
    Job job;
    Py_buffer columns, inputs[4], out;
    if (!PyArg_ParseTuple(args, "py*dddy*y*y*y*w*", &is_occupancy, &columns, &job.prompt, &job.output, &job.block,
                          &inputs[0], &inputs[1], &inputs[2], &inputs[3], &out))
        return NULL;
    const Py_ssize_t bytes = out.len / 2;
    bool fits = out.len % (2 * (Py_ssize_t)sizeof(double)) == 0 &&
                columns.len == bytes * (is_occupancy ? OCCUPANCY_COLUMNS : LINEAR_COLUMNS);
    for (int i = 0; i < 4; i++) fits = fits && inputs[i].len == bytes;
    if (fits) {
        job.num = bytes / (Py_ssize_t)sizeof(double);
        job.columns = columns.buf;
        job.overlap = inputs[0].buf;
        job.pace = inputs[1].buf;
        job.decoding = inputs[2].buf;
        job.context = inputs[3].buf;
        job.prefill = out.buf;
        job.slowdown = job.prefill + job.num;
        if (is_occupancy)
            price_occupancy(&job);
        else
            price_linear(&job);
    } else {
        PyErr_SetString(PyExc_ValueError, "every array has a number for each worker");
    }
    PyBuffer_Release(&columns);
    PyBuffer_Release(&out);
    for (int i = 0; i < 4; i++) PyBuffer_Release(&inputs[i]);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

/* A buffer of doubles, as many as there are workers; what it was is not known to a buffer of plain bytes. */
static bool take_doubles(PyObject *array, int flags, Py_ssize_t bytes, Py_buffer *taken) {
    if (PyObject_GetBuffer(array, taken, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0) return false;
    if (taken->format && strcmp(taken->format, "d") == 0 && (bytes < 0 || taken->len == bytes)) return true;
    PyBuffer_Release(taken);
    PyErr_SetString(PyExc_ValueError, "every array has a double for each worker");
    return false;
}

/* `policy.latency` in one pass, in the same order of operations: the costs are the same to the last bit. */
static PyObject *prices_latency(PyObject *self, PyObject *args) {
    enum { INPUTS = 7 };
    double waiting, others, room, affinity;
    PyObject *arrays[INPUTS], *found;
    Py_buffer in[INPUTS], out;
    if (!PyArg_ParseTuple(args, "ddddOOOOOOOO", &waiting, &others, &room, &affinity, &arrays[0], &arrays[1], &arrays[2],
                          &arrays[3], &arrays[4], &arrays[5], &arrays[6], &found))
        return NULL;
    if (!take_doubles(found, PyBUF_WRITABLE, -1, &out)) return NULL;
    int taken = 0;
    while (taken < INPUTS && take_doubles(arrays[taken], 0, out.len, &in[taken])) taken++;
    if (taken == INPUTS) {
        const double *requests = in[0].buf, *decoding = in[1].buf, *prefill = in[2].buf, *slowdown = in[3].buf,
                     *queue = in[4].buf, *until_room = in[5].buf, *served = in[6].buf;
        double *costs = out.buf;
        for (Py_ssize_t i = 0; i < out.len / (Py_ssize_t)sizeof(double); i++) {
            const double own = (at_least(requests[i] - decoding[i], 0.0) * waiting + 1.0) * prefill[i];
            const double theirs = (prefill[i] + slowdown[i]) * decoding[i] * others;
            costs[i] = own + theirs + at_least(queue[i], room * until_room[i]) - affinity * served[i];
        }
    }
    PyBuffer_Release(&out);
    for (int i = 0; i < taken; i++) PyBuffer_Release(&in[i]);
    if (taken < INPUTS) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"latency", prices_latency, METH_VARARGS, "Costs of all workers by kvolt.router.policy.latency."},
    {"look", prices_look, METH_VARARGS, "Prefill and slowdown, in seconds, of all workers: see kvolt.router.prices."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_prices_native", "The router's prices in C.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__prices_native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddStringConstant(made, "SOURCE_DIGEST", KVOLT_SOURCE_DIGEST) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
