/* Cost model of the router in C: computes what `cost_model.py` defines, for all candidates in one pass.

   In numpy a decision takes about forty operations on short arrays, whose call overhead exceeds the work itself. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdbool.h>
#include <string.h>

#ifndef KVOLT_SOURCE_DIGEST
#define KVOLT_SOURCE_DIGEST ""
#endif

enum { LINEAR_COLUMNS = 7, OCCUPANCY_COLUMNS = 9, PREDICT_INPUTS = 7 };

typedef struct {
    Py_ssize_t num;        /* number of workers */
    const double *columns; /* model coefficients, one array over workers after the other */
    double prompt, output, block;
    const double *overlap, *pace, *decoding, *context, *beside, *reading, *joined;
    double *prefill, *step, *slowdown;
} Job;

static inline double at_least(double value, double least) { return value > least ? value : least; }

static void predict_linear(const Job *job) {
    const Py_ssize_t num = job->num;
    const double *chunk = job->columns, *first = chunk + num, *token = first + num, *read = token + num,
                 *batch = read + num, *context_token = batch + num, *base = context_token + num;
    for (Py_ssize_t i = 0; i < num; i++) {
        const double new = at_least(job->prompt - job->overlap[i] * job->block, 1.0);
        const double chunks = new / chunk[i], full = floor(chunks), rest = new - full * chunk[i];
        const double squares = full * (chunk[i] * chunk[i]) + rest * rest;
        const double reading = read[i] * (new * (job->prompt - 0.5 * new) + 0.5 * squares);
        const double decodes = job->decoding[i] * batch[i] + job->context[i] * context_token[i];
        const double alone = base[i] + job->beside[i] * batch[i] + job->reading[i] * context_token[i];
        const double joined = base[i] + (job->beside[i] + 1.0) * batch[i] +
                              (job->reading[i] + job->joined[i]) * context_token[i];
        job->prefill[i] = job->pace[i] * (ceil(chunks) * first[i] + new *token[i] + reading + chunks * decodes);
        job->step[i] = job->pace[i] * joined;
        job->slowdown[i] = job->pace[i] * at_least(joined - alone, 0.0) * job->output;
    }
}

static void predict_occupancy(const Job *job) {
    const Py_ssize_t num = job->num;
    const double *chunk = job->columns, *first = chunk + num, *token = first + num, *square = token + num,
                 *base = square + num, *share = base + num, *share_square = share + num,
                 *least = share_square + num, *kv_tokens = least + num;
    for (Py_ssize_t i = 0; i < num; i++) {
        const double new = at_least(job->prompt - job->overlap[i] * job->block, 1.0);
        const double chunks = new / chunk[i], full = floor(chunks), rest = new - full * chunk[i];
        const double squares = full * (chunk[i] * chunk[i]) + rest * rest;
        const double contexts[3] = {job->context[i], job->reading[i], job->reading[i] + job->joined[i]};
        double decode[3]; /* step of the current decodes, of those beside the answer, and with the answer */
        for (int at = 0; at < 3; at++) {
            const double used = contexts[at] / kv_tokens[i] < 1.0 ? contexts[at] / kv_tokens[i] : 1.0;
            decode[at] = at_least(base[i] + (share[i] + share_square[i] * used) * used, least[i]);
        }
        const double alone = ceil(chunks) * first[i] + new *token[i] + squares * square[i];
        job->prefill[i] = job->pace[i] * (alone + (job->decoding[i] > 0 ? chunks * decode[0] : 0.0));
        job->step[i] = job->pace[i] * decode[2];
        job->slowdown[i] = job->pace[i] * at_least(decode[2] - decode[1], 0.0) * job->output;
    }
}

static PyObject *cost_model_predict(PyObject *self, PyObject *args) {
    int is_occupancy;
    Job job;
    Py_buffer columns, inputs[PREDICT_INPUTS], out;
    if (!PyArg_ParseTuple(args, "py*dddy*y*y*y*y*y*y*w*", &is_occupancy, &columns, &job.prompt, &job.output,
                          &job.block, &inputs[0], &inputs[1], &inputs[2], &inputs[3], &inputs[4], &inputs[5],
                          &inputs[6], &out))
        return NULL;
    const Py_ssize_t bytes = out.len / 3;
    bool fits = out.len % (3 * (Py_ssize_t)sizeof(double)) == 0 &&
                columns.len == bytes * (is_occupancy ? OCCUPANCY_COLUMNS : LINEAR_COLUMNS);
    for (int i = 0; i < PREDICT_INPUTS; i++) fits = fits && inputs[i].len == bytes;
    if (fits) {
        job.num = bytes / (Py_ssize_t)sizeof(double);
        job.columns = columns.buf;
        job.overlap = inputs[0].buf;
        job.pace = inputs[1].buf;
        job.decoding = inputs[2].buf;
        job.context = inputs[3].buf;
        job.beside = inputs[4].buf;
        job.reading = inputs[5].buf;
        job.joined = inputs[6].buf;
        job.prefill = out.buf;
        job.step = job.prefill + job.num;
        job.slowdown = job.step + job.num;
        if (is_occupancy)
            predict_occupancy(&job);
        else
            predict_linear(&job);
    } else {
        PyErr_SetString(PyExc_ValueError, "every array needs one number per worker");
    }
    PyBuffer_Release(&columns);
    PyBuffer_Release(&out);
    for (int i = 0; i < PREDICT_INPUTS; i++) PyBuffer_Release(&inputs[i]);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

/* Get a buffer of one double per worker. Checks the format, which "y*" does not. */
static bool get_doubles(PyObject *array, int flags, Py_ssize_t bytes, Py_buffer *taken) {
    if (PyObject_GetBuffer(array, taken, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0) return false;
    if (taken->format && strcmp(taken->format, "d") == 0 && (bytes < 0 || taken->len == bytes)) return true;
    PyBuffer_Release(taken);
    PyErr_SetString(PyExc_ValueError, "every array needs one double per worker");
    return false;
}

/* `policy.latency` in one pass, with the same order of operations. */
static PyObject *cost_model_latency_costs(PyObject *self, PyObject *args) {
    enum { INPUTS = 8 };
    double output, arrivals, room, affinity;
    PyObject *arrays[INPUTS], *result;
    Py_buffer in[INPUTS], out;
    if (!PyArg_ParseTuple(args, "ddddOOOOOOOOO", &output, &arrivals, &room, &affinity,
                          &arrays[0], &arrays[1], &arrays[2], &arrays[3], &arrays[4], &arrays[5], &arrays[6],
                          &arrays[7], &result))
        return NULL;
    if (!get_doubles(result, PyBUF_WRITABLE, -1, &out)) return NULL;
    int taken = 0;
    while (taken < INPUTS && get_doubles(arrays[taken], 0, out.len, &in[taken])) taken++;
    if (taken == INPUTS) {
        const Py_ssize_t num = out.len / (Py_ssize_t)sizeof(double);
        const double *beside = in[0].buf, *prefill = in[1].buf, *step = in[2].buf, *slowdown = in[3].buf,
                     *queue = in[4].buf, *until_room = in[5].buf, *served = in[6].buf, *copy = in[7].buf;
        double *costs = out.buf, least = INFINITY;
        for (Py_ssize_t i = 0; i < num; i++) {
            costs[i] = output * step[i] + beside[i] * slowdown[i];
            if (costs[i] < least) least = costs[i];
        }
        for (Py_ssize_t i = 0; i < num; i++) {
            const double delayed = 1.0 + beside[i] + arrivals * (queue[i] + prefill[i]);
            const double first = prefill[i] * delayed + at_least(queue[i], room * until_room[i]);
            costs[i] = first + (costs[i] - least) - copy[i] - affinity * served[i];
        }
    }
    PyBuffer_Release(&out);
    for (int i = 0; i < taken; i++) PyBuffer_Release(&in[i]);
    if (taken < INPUTS) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"latency_costs", cost_model_latency_costs, METH_VARARGS, "Costs by policy.latency."},
    {"predict", cost_model_predict, METH_VARARGS, "Predicted times in seconds: see cost_model.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cost_model_native", "The router's cost model in C.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cost_model_native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddStringConstant(made, "SOURCE_DIGEST", KVOLT_SOURCE_DIGEST) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
