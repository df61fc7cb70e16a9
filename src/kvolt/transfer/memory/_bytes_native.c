/* Copies pieces between memories and through sockets. `block_bytes_python.py` documents the functions, `checksum.py`
   the checksum.

   Offsets are copied and then checked before a byte moves, since other threads may write to the caller's array while
   the GIL is released. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_X86_FORMS 1
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian: use the Python implementation on this machine"
#endif

#ifndef KVOLT_SOURCE_DIGEST
#define KVOLT_SOURCE_DIGEST ""
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

enum {
    WORD = 8,
    /* Bytes copied before their checksum is computed: they are still in the L2 cache. */
    CHUNK = 64 * 1024,
    MAX_RANGES = 1024, /* per system call */
    /* Minimum bytes for which the GIL is released; below, switching costs more than the work. */
    WORTH_RELEASING = 32 * 1024,
};

static const uint64_t KEY = 0x9E3779B97F4A7C15u, LENGTH_KEY = 0xC2B2AE3D27D4EB4Fu, FINAL_KEY = 0x165667919E3779F9u;

/* -- checksums -- */

typedef uint64_t SumWords(const unsigned char *data, size_t words, uint64_t first);

static uint64_t sum_plain(const unsigned char *data, size_t words, uint64_t first) {
    uint64_t sum = 0;
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, data + WORD * i, WORD);
        const uint64_t x = word ^ (first + i + 1) * KEY;
        sum += (uint64_t)(uint32_t)x * (uint32_t)(x >> 32) + word;
    }
    return sum;
}

#ifdef HAS_X86_FORMS

/* Four vectors at a time with independent keys and sums, to avoid dependency stalls. */
enum { AHEAD = 4 };

__attribute__((target("avx2"))) static uint64_t sum_avx2(const unsigned char *data, size_t words, uint64_t first) {
    enum { LANES = 4, STEP = AHEAD * LANES };
    uint64_t lanes[STEP];
    __m256i keys[AHEAD], sums[AHEAD];
    const __m256i step = _mm256_set1_epi64x((long long)(STEP * KEY));
    for (int lane = 0; lane < STEP; lane++) lanes[lane] = (first + (uint64_t)lane + 1) * KEY;
    for (int k = 0; k < AHEAD; k++) {
        keys[k] = _mm256_loadu_si256((const __m256i *)(lanes + k * LANES));
        sums[k] = _mm256_setzero_si256();
    }
    size_t i = 0;
    for (; i + STEP <= words; i += STEP)
        for (int k = 0; k < AHEAD; k++) {
            const __m256i word = _mm256_loadu_si256((const __m256i *)(data + WORD * (i + (size_t)(k * LANES))));
            const __m256i x = _mm256_xor_si256(word, keys[k]);
            const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
            sums[k] = _mm256_add_epi64(sums[k], _mm256_add_epi64(product, word));
            keys[k] = _mm256_add_epi64(keys[k], step);
        }
    uint64_t sum = sum_plain(data + WORD * i, words - i, first + i);
    for (int k = 0; k < AHEAD; k++) _mm256_storeu_si256((__m256i *)(lanes + k * LANES), sums[k]);
    for (int lane = 0; lane < STEP; lane++) sum += lanes[lane];
    return sum;
}

__attribute__((target("avx512f"))) static uint64_t sum_avx512(const unsigned char *data, size_t words,
                                                              uint64_t first) {
    enum { LANES = 8, STEP = AHEAD * LANES };
    uint64_t lanes[STEP];
    __m512i keys[AHEAD], sums[AHEAD];
    const __m512i step = _mm512_set1_epi64((long long)(STEP * KEY));
    for (int lane = 0; lane < STEP; lane++) lanes[lane] = (first + (uint64_t)lane + 1) * KEY;
    for (int k = 0; k < AHEAD; k++) {
        keys[k] = _mm512_loadu_si512(lanes + k * LANES);
        sums[k] = _mm512_setzero_si512();
    }
    size_t i = 0;
    for (; i + STEP <= words; i += STEP)
        for (int k = 0; k < AHEAD; k++) {
            const __m512i word = _mm512_loadu_si512(data + WORD * (i + (size_t)(k * LANES)));
            const __m512i x = _mm512_xor_si512(word, keys[k]);
            const __m512i product = _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
            sums[k] = _mm512_add_epi64(sums[k], _mm512_add_epi64(product, word));
            keys[k] = _mm512_add_epi64(keys[k], step);
        }
    uint64_t sum = sum_plain(data + WORD * i, words - i, first + i);
    for (int k = 0; k < AHEAD; k++) _mm512_storeu_si512(lanes + k * LANES, sums[k]);
    for (int lane = 0; lane < STEP; lane++) sum += lanes[lane];
    return sum;
}

#endif

typedef struct {
    const char *name;
    SumWords *sum;
} Form;

static Form forms[3]; /* supported by this CPU, slowest first */
static int num_forms;
static SumWords *sum_words;

static void find_forms(void) {
    num_forms = 0;
    forms[num_forms++] = (Form){"plain", sum_plain};
#ifdef HAS_X86_FORMS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) forms[num_forms++] = (Form){"avx2", sum_avx2};
    if (__builtin_cpu_supports("avx512f")) forms[num_forms++] = (Form){"avx512", sum_avx512};
#endif
    sum_words = forms[num_forms - 1].sum;
}

/* `first`: index of the first word in its block. Only the end of a block may be a partial word. */
static uint64_t sum_bytes(const unsigned char *data, size_t bytes, uint64_t first) {
    const size_t words = bytes / WORD, rest = bytes % WORD;
    uint64_t sum = sum_words(data, words, first);
    if (rest) {
        unsigned char last[WORD] = {0};
        memcpy(last, data + WORD * words, rest);
        sum += sum_plain(last, 1, first + words);
    }
    return sum;
}

static uint64_t finish(uint64_t sum, uint64_t length, uint64_t seed) {
    uint64_t h = (sum + length * LENGTH_KEY) ^ seed;
    h ^= h >> 37;
    h *= FINAL_KEY;
    return h ^ h >> 32;
}

/* -- arguments of a call -- */

typedef struct {
    Py_buffer dst, src, seeds, out; /* empty if not given */
    int64_t *to, *from;             /* private copies of the offsets */
    Py_ssize_t num_pieces, piece_bytes, per_block, num_blocks;
} Call;

static void end_call(Call *call) {
    PyBuffer_Release(&call->dst);
    PyBuffer_Release(&call->src);
    PyBuffer_Release(&call->seeds);
    PyBuffer_Release(&call->out);
    free(call->to);
    free(call->from);
}

static bool take_memory(Py_buffer *view, const char *name, PyObject *argument, bool is_written) {
    if (PyObject_GetBuffer(argument, view, PyBUF_FULL_RO) < 0) return false;
    if (!PyBuffer_IsContiguous(view, 'C')) {
        PyErr_Format(PyExc_ValueError, "%s is not contiguous", name);
        return false;
    }
    if (is_written && view->readonly) {
        PyErr_Format(PyExc_ValueError, "%s is read-only", name);
        return false;
    }
    return true;
}

static bool take_numbers(Py_buffer *view, const char *name, PyObject *argument, bool is_written) {
    if (!take_memory(view, name, argument, is_written)) return false;
    const char *format = view->format ? view->format : "B", *kind = format + strspn(format, "@=<");
    const bool is_numbers = view->itemsize == WORD && strlen(kind) == 1 && strchr("lLqQ", *kind);
    if (is_numbers || (strcmp(format, "B") == 0 && view->len % WORD == 0)) return true;
    PyErr_Format(PyExc_ValueError, "%s must be 64-bit integers, not format %s", name, format);
    return false;
}

/* Copies the offsets and checks that all pieces are inside `memory`. */
static bool take_offsets(Call *call, int64_t **offsets, const char *name, PyObject *argument, const Py_buffer *memory) {
    Py_buffer view = {0};
    if (!take_numbers(&view, name, argument, false)) {
        PyBuffer_Release(&view);
        return false;
    }
    const Py_ssize_t count = view.len / WORD;
    int64_t *own = malloc(count ? (size_t)view.len : WORD);
    if (own && count) memcpy(own, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    if (!own) {
        PyErr_NoMemory();
        return false;
    }
    *offsets = own;
    call->num_pieces = count;
    if (call->piece_bytes < 1) {
        PyErr_Format(PyExc_ValueError, "piece size must be at least one byte, not %zd", call->piece_bytes);
        return false;
    }
    const int64_t last = (int64_t)(memory->len - call->piece_bytes);
    bool fits = true;
    for (Py_ssize_t i = 0; i < count; i++) fits &= (own[i] >= 0) & (own[i] <= last); /* branchless, so vectorized */
    for (Py_ssize_t i = 0; !fits && i < count; i++)
        if (own[i] < 0 || own[i] > last) {
            PyErr_Format(PyExc_ValueError, "%s: piece %zd at offset %lld with %zd bytes lies outside of %zd bytes",
                         name, i, (long long)own[i], call->piece_bytes, memory->len);
            break;
        }
    return fits;
}

static int compare_offsets(const void *left, const void *right) {
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* Checks that no destination overlaps a source; only needed if the two memories overlap. */
static bool check_apart(const Call *call) {
    const uintptr_t dst = (uintptr_t)call->dst.buf, src = (uintptr_t)call->src.buf;
    if (dst >= src + (size_t)call->src.len || src >= dst + (size_t)call->dst.len || !call->num_pieces) return true;
    const size_t count = (size_t)call->num_pieces;
    int64_t *read = malloc(count * sizeof *read);
    if (!read) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(read, call->from, count * sizeof *read);
    qsort(read, count, sizeof *read, compare_offsets);
    bool is_apart = true;
    for (size_t i = 0; i < count && is_apart; i++) {
        const int64_t place = call->to[i] + (int64_t)(dst - src); /* in offsets of src */
        size_t low = 0, high = count;                            /* first piece that ends after `place` */
        while (low < high) {
            const size_t middle = low + (high - low) / 2;
            if (read[middle] > place - call->piece_bytes)
                high = middle;
            else
                low = middle + 1;
        }
        is_apart = low == count || read[low] - call->piece_bytes >= place;
    }
    free(read);
    if (!is_apart)
        PyErr_SetString(PyExc_ValueError, "dst and src overlap: a piece would be written over one that is read");
    return is_apart;
}

static bool take_sides(Call *call, PyObject *dst, PyObject *to, PyObject *src, PyObject *from) {
    if (!take_memory(&call->dst, "dst", dst, true) || !take_memory(&call->src, "src", src, false)) return false;
    if (!take_offsets(call, &call->to, "dst_offsets", to, &call->dst)) return false;
    const Py_ssize_t num_places = call->num_pieces;
    if (!take_offsets(call, &call->from, "src_offsets", from, &call->src)) return false;
    if (call->num_pieces != num_places) {
        PyErr_Format(PyExc_ValueError, "%zd source pieces for %zd destination pieces", call->num_pieces, num_places);
        return false;
    }
    return check_apart(call);
}

static bool check_one_each(const Call *call, const char *name, const Py_buffer *numbers) {
    if (numbers->len == WORD * call->num_blocks) return true;
    PyErr_Format(PyExc_ValueError, "%s has %zd numbers for %zd blocks", name, numbers->len / WORD, call->num_blocks);
    return false;
}

static bool take_blocks(Call *call, PyObject *seeds, PyObject *out) {
    if (call->per_block < 1 || call->num_pieces % call->per_block) {
        PyErr_Format(PyExc_ValueError, "%zd pieces are not a multiple of %zd pieces per block", call->num_pieces,
                     call->per_block);
        return false;
    }
    if (call->per_block > 1 && call->piece_bytes % WORD) {
        PyErr_Format(PyExc_ValueError, "piece size %zd must be a multiple of 8 with several pieces per block",
                     call->piece_bytes);
        return false;
    }
    call->num_blocks = call->num_pieces / call->per_block;
    if (seeds != Py_None &&
        (!take_numbers(&call->seeds, "seeds", seeds, false) || !check_one_each(call, "seeds", &call->seeds)))
        return false;
    return take_numbers(&call->out, "out", out, true) && check_one_each(call, "out", &call->out);
}

/* -- the work, without the GIL if it is long -- */

typedef void Work(const Call *call);

static void work_without_gil(const Call *call, Work *work) {
    const bool is_long = call->num_pieces > WORTH_RELEASING / call->piece_bytes;
    PyThreadState *saved = is_long ? PyEval_SaveThread() : NULL;
    work(call);
    if (saved) PyEval_RestoreThread(saved);
}

static void copy_pieces(const Call *call) {
    unsigned char *dst = call->dst.buf;
    const unsigned char *src = call->src.buf;
    const int64_t *to = call->to, *from = call->from;
    const Py_ssize_t size = call->piece_bytes;
    for (Py_ssize_t i = 0, end; i < call->num_pieces; i = end) {
        for (end = i + 1; end < call->num_pieces; end++)
            if (to[end] != to[end - 1] + size || from[end] != from[end - 1] + size) break;
        memcpy(dst + to[i], src + from[i], (size_t)(end - i) * (size_t)size);
    }
}

/* Computes the checksum of the destination, so that a source that changes during the copy is detected. */
static uint64_t copy_and_sum(unsigned char *to, const unsigned char *from, size_t bytes, uint64_t first) {
    uint64_t sum = 0;
    for (size_t at = 0; at < bytes; at += CHUNK) {
        const size_t size = bytes - at < CHUNK ? bytes - at : CHUNK;
        memcpy(to + at, from + at, size);
#if defined(__GNUC__) || defined(__clang__)
        __asm__ volatile("" ::: "memory"); /* prevents the compiler from reading the source again */
#endif
        sum += sum_bytes(to + at, size, first + at / WORD);
    }
    return sum;
}

static void sum_blocks(const Call *call) {
    const uint64_t piece_words = (uint64_t)call->piece_bytes / WORD;
    const uint64_t length = (uint64_t)call->piece_bytes * (uint64_t)call->per_block;
    for (Py_ssize_t block = 0; block < call->num_blocks; block++) {
        uint64_t sum = 0, seed = 0;
        for (Py_ssize_t k = 0; k < call->per_block; k++) {
            const Py_ssize_t i = block * call->per_block + k;
            const unsigned char *piece = (const unsigned char *)call->src.buf + call->from[i];
            const uint64_t first = (uint64_t)k * piece_words;
            if (call->to)
                sum += copy_and_sum((unsigned char *)call->dst.buf + call->to[i], piece, (size_t)call->piece_bytes,
                                    first);
            else
                sum += sum_bytes(piece, (size_t)call->piece_bytes, first);
        }
        if (call->seeds.buf) memcpy(&seed, (const unsigned char *)call->seeds.buf + WORD * block, WORD);
        const uint64_t checksum = finish(sum, length, seed);
        memcpy((unsigned char *)call->out.buf + WORD * block, &checksum, WORD);
    }
}

/* Fills memory ranges for at most `max_bytes` bytes from byte `start` of the pieces on; returns the number of bytes. */
static size_t fill_ranges(const Call *call, const int64_t *offsets, unsigned char *memory, size_t start,
                          size_t max_bytes, struct iovec *ranges, struct msghdr *message) {
    const size_t size = (size_t)call->piece_bytes;
    size_t index = start / size, skipped = start % size, filled = 0, count = 0;
    for (; filled < max_bytes && index < (size_t)call->num_pieces; index++, skipped = 0) {
        unsigned char *base = memory + offsets[index] + skipped;
        const size_t length = size - skipped < max_bytes - filled ? size - skipped : max_bytes - filled;
        if (count && (unsigned char *)ranges[count - 1].iov_base + ranges[count - 1].iov_len == base) {
            ranges[count - 1].iov_len += length;
        } else {
            if (count == MAX_RANGES) break;
            ranges[count++] = (struct iovec){base, length};
        }
        filled += length;
    }
    *message = (struct msghdr){.msg_iov = ranges, .msg_iovlen = count};
    return filled;
}

/* Continues while the socket transfers everything requested; blocks for the first bytes only. An error after some
   bytes were moved is reported by the next call. */
static Py_ssize_t move_ranges(const Call *call, int fd, bool is_send, size_t start, size_t max_bytes) {
    struct iovec ranges[MAX_RANGES];
    struct msghdr message;
    const int64_t *offsets = is_send ? call->from : call->to;
    size_t moved = 0;
    while (moved < max_bytes) {
        const int wait = moved ? MSG_DONTWAIT : 0;
        unsigned char *memory = is_send ? call->src.buf : call->dst.buf;
        const size_t requested = fill_ranges(call, offsets, memory, start + moved, max_bytes - moved, ranges, &message);
        const ssize_t done =
            is_send ? sendmsg(fd, &message, MSG_NOSIGNAL | wait) : recvmsg(fd, &message, wait);
        if (done < 0 && !moved) return -1;
        if (done > 0) moved += (size_t)done;
        if (done < (ssize_t)requested) break;
    }
    return (Py_ssize_t)moved;
}

static PyObject *move_by_socket(Call *call, int fd, bool is_send, Py_ssize_t start, Py_ssize_t max_bytes) {
    Py_ssize_t size;
    if (__builtin_mul_overflow(call->num_pieces, call->piece_bytes, &size)) size = PY_SSIZE_T_MAX;
    if (start < 0 || start >= size || max_bytes < 1)
        return PyErr_Format(PyExc_ValueError, "invalid range: %zd bytes from byte %zd of %zd", max_bytes, start, size);
    if (max_bytes > size - start) max_bytes = size - start;
    for (;;) {
        Py_ssize_t moved;
        int problem;
        Py_BEGIN_ALLOW_THREADS;
        moved = move_ranges(call, fd, is_send, (size_t)start, (size_t)max_bytes);
        problem = errno;
        Py_END_ALLOW_THREADS;
        if (moved >= 0) return PyLong_FromSsize_t(moved);
        errno = problem;
        if (problem != EINTR) return PyErr_SetFromErrno(PyExc_OSError);
        if (PyErr_CheckSignals() < 0) return NULL;
    }
}

/* -- the module -- */

static PyObject *bytes_copy(PyObject *self, PyObject *args) {
    Call call = {0};
    PyObject *dst, *to, *src, *from;
    if (!PyArg_ParseTuple(args, "OOOOn:copy", &dst, &to, &src, &from, &call.piece_bytes)) return NULL;
    const bool fits = take_sides(&call, dst, to, src, from);
    if (fits) work_without_gil(&call, copy_pieces);
    end_call(&call);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

static PyObject *bytes_checksums(PyObject *self, PyObject *args) {
    Call call = {0};
    PyObject *src, *from, *seeds, *out;
    if (!PyArg_ParseTuple(args, "OOnnOO:checksums", &src, &from, &call.piece_bytes, &call.per_block, &seeds, &out))
        return NULL;
    const bool fits = take_memory(&call.src, "src", src, false) &&
                      take_offsets(&call, &call.from, "offsets", from, &call.src) && take_blocks(&call, seeds, out);
    if (fits) work_without_gil(&call, sum_blocks);
    end_call(&call);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

static PyObject *bytes_copy_checked(PyObject *self, PyObject *args) {
    Call call = {0};
    PyObject *dst, *to, *src, *from, *seeds, *out;
    if (!PyArg_ParseTuple(args, "OOOOnnOO:copy_checked", &dst, &to, &src, &from, &call.piece_bytes, &call.per_block,
                          &seeds, &out))
        return NULL;
    const bool fits = take_sides(&call, dst, to, src, from) && take_blocks(&call, seeds, out);
    if (fits) work_without_gil(&call, sum_blocks);
    end_call(&call);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

static PyObject *bytes_send(PyObject *self, PyObject *args) {
    Call call = {0};
    int fd;
    PyObject *src, *from, *sent = NULL;
    Py_ssize_t start, max_bytes;
    if (!PyArg_ParseTuple(args, "iOOnnn:send", &fd, &src, &from, &call.piece_bytes, &start, &max_bytes)) return NULL;
    if (take_memory(&call.src, "src", src, false) && take_offsets(&call, &call.from, "offsets", from, &call.src))
        sent = move_by_socket(&call, fd, true, start, max_bytes);
    end_call(&call);
    return sent;
}

static PyObject *bytes_receive(PyObject *self, PyObject *args) {
    Call call = {0};
    int fd;
    PyObject *dst, *to, *received = NULL;
    Py_ssize_t start, max_bytes;
    if (!PyArg_ParseTuple(args, "iOOnnn:receive", &fd, &dst, &to, &call.piece_bytes, &start, &max_bytes)) return NULL;
    if (take_memory(&call.dst, "dst", dst, true) && take_offsets(&call, &call.to, "offsets", to, &call.dst))
        received = move_by_socket(&call, fd, false, start, max_bytes);
    end_call(&call);
    return received;
}

static PyObject *bytes_use_form(PyObject *self, PyObject *name) {
    for (int i = 0; i < num_forms; i++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, forms[i].name) == 0) {
            sum_words = forms[i].sum;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "unknown implementation %R", name);
}

static PyMethodDef methods[] = {
    {"copy", bytes_copy, METH_VARARGS, "See kvolt.transfer.memory.block_bytes_python.copy."},
    {"checksums", bytes_checksums, METH_VARARGS, "See kvolt.transfer.memory.block_bytes_python.checksums."},
    {"copy_checked", bytes_copy_checked, METH_VARARGS, "See kvolt.transfer.memory.block_bytes_python.copy_checked."},
    {"send", bytes_send, METH_VARARGS, "See kvolt.transfer.memory.block_bytes_python.send."},
    {"receive", bytes_receive, METH_VARARGS, "See kvolt.transfer.memory.block_bytes_python.receive."},
    {"use_form", bytes_use_form, METH_O, "Select one of FORMS, for tests; default: the last."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_bytes_native", "Bytes of blocks in C.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__bytes_native(void) {
    find_forms();
    PyObject *made = PyModule_Create(&module);
    PyObject *names = PyTuple_New(num_forms);
    bool is_complete = made && names && PyModule_AddStringConstant(made, "SOURCE_DIGEST", KVOLT_SOURCE_DIGEST) == 0;
    for (int i = 0; is_complete && i < num_forms; i++) {
        PyObject *name = PyUnicode_FromString(forms[i].name);
        is_complete = name != NULL;
        if (name) PyTuple_SET_ITEM(names, i, name);
    }
    is_complete = is_complete && PyModule_AddObjectRef(made, "FORMS", names) == 0;
    Py_XDECREF(names);
    if (!is_complete) Py_CLEAR(made);
    return made;
}
