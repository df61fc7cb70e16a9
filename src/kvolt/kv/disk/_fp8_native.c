/* Encodes 16-bit and 32-bit floats as FP8 and decodes them. `fp8_python.py` documents the functions.

   Loops run over whole groups without branches, so that compilers vectorize them. Floats are compared by their bits as
   integers, which has the same order for positive values. Results do not depend on whether the CPU flushes subnormal
   floats. Offsets are copied and then checked before a byte is read, since other threads may write to the caller's
   array while the GIL is released. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_X86_FORMS 1
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numbers are little-endian: the Python form is right on any machine"
#endif

#ifndef KVOLT_SOURCE_DIGEST
#define KVOLT_SOURCE_DIGEST ""
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
    GROUP = 64,
    WORD = 8,
    FLOAT32 = 0,
    FLOAT16 = 1,
    BFLOAT16 = 2,
    NUM_KINDS = 3,
    LEAST_TOP = 20, /* keeps scales and products normal */
    /* Minimum bytes for which the GIL is released; below, switching costs more than the work. */
    WORTH_RELEASING = 32 * 1024,
};

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define NOT_A_NUMBER 0x7fc00000u
#define LEAST_POWER 0x3c800000u /* 2^-6 */
#define ALMOST_TWO 0x17ffffu /* carries mantissas that round above 1.75 into the next power of two */

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Masks instead of branches, so that the loops are vectorized. */
INLINE uint32_t choose(bool is_first, uint32_t first, uint32_t second) {
    const uint32_t mask = -(uint32_t)is_first;
    return (first & mask) | (second & ~mask);
}

#ifdef __aarch64__
typedef __fp16 Half; /* these CPUs convert between half and float */

INLINE uint32_t wide_of_half(Half half) { return bits_of((float)half); }

INLINE Half half_of_wide(uint32_t wide) { return (Half)float_of(wide); }

#else
typedef uint16_t Half;

INLINE uint32_t wide_of_half(uint32_t half) {
    const uint32_t magnitude = half & 0x7fff, normal = (magnitude << 13) + (112u << 23);
    const uint32_t tiny = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    const uint32_t wide = choose(magnitude < 0x400, tiny, normal);
    return (wide + (-(uint32_t)(magnitude >= 0x7c00) & 112u << 23)) | (half & 0x8000) << 16;
}

INLINE uint16_t half_of_wide(uint32_t wide) {
    const uint32_t magnitude = wide & MAGNITUDE, normal = (magnitude >> 13) - (112u << 10);
    const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t half = choose(magnitude < 0x38800000u, tiny, normal);
    return (uint16_t)(choose(magnitude >= INFINITE, 0x7e00, half) | (wide >> 16 & 0x8000));
}
#endif

/* -- a group -- */

INLINE void widen(uint32_t *wide, const unsigned char *src, int kind) {
    if (kind == FLOAT32) {
        memcpy(wide, src, GROUP * sizeof *wide);
        return;
    }
    Half halves[GROUP];
    uint16_t narrow[GROUP];
    memcpy(kind == FLOAT16 ? (void *)halves : narrow, src, sizeof narrow);
    for (int i = 0; i < GROUP; i++) wide[i] = kind == FLOAT16 ? wide_of_half(halves[i]) : (uint32_t)narrow[i] << 16;
}

INLINE void narrow(unsigned char *dst, const uint32_t *wide, int kind) {
    if (kind == FLOAT32) {
        memcpy(dst, wide, GROUP * sizeof *wide);
        return;
    }
    Half halves[GROUP];
    uint16_t made[GROUP];
    for (int i = 0; i < GROUP; i++)
        if (kind == FLOAT16)
            halves[i] = half_of_wide(wide[i]);
        else
            made[i] = (uint16_t)(wide[i] >> 16);
    memcpy(dst, kind == FLOAT16 ? (void *)halves : made, sizeof made);
}

/* `has_others`: the values may include infinities or NaN; handling them costs a quarter of the time. */
INLINE void encode_values(unsigned char *codes, const uint32_t *wide, uint32_t top, bool has_others) {
    const float factor = float_of((262 - top) << 23);
    for (int i = 0; i < GROUP; i++) {
        const uint32_t magnitude = wide[i] & MAGNITUDE;
        const float scaled = float_of(magnitude) * factor;
        /* Power of two of the value, at least that of the smallest normal value. Adding a number whose last digit is an
           eighth of it rounds the sum to eighths. */
        uint32_t power = bits_of(scaled) & INFINITE;
        power = power > LEAST_POWER ? power : LEAST_POWER;
        const uint32_t shift = power + (20u << 23);
        const uint32_t eighths = bits_of(scaled + float_of(shift)) - shift;
        uint32_t code = ((power - LEAST_POWER) >> 20) + eighths;
        if (has_others) code = choose(magnitude < INFINITE, code, 0x7f);
        codes[i] = (unsigned char)(code | (wide[i] >> 24 & 0x80));
    }
}

INLINE unsigned char encode_group(unsigned char *codes, const uint32_t *wide) {
    uint32_t most = 0;
    for (int i = 0; i < GROUP; i++) {
        const uint32_t magnitude = wide[i] & MAGNITUDE;
        most = magnitude > most ? magnitude : most;
    }
    const bool has_others = most >= INFINITE;
    if (has_others) {
        most = 0;
        for (int i = 0; i < GROUP; i++) {
            const uint32_t magnitude = wide[i] & MAGNITUDE;
            most = magnitude < INFINITE && magnitude > most ? magnitude : most;
        }
    }
    uint32_t top = (most + ALMOST_TWO) >> 23;
    top = top < LEAST_TOP ? LEAST_TOP : top;
    if (has_others)
        encode_values(codes, wide, top, true);
    else
        encode_values(codes, wide, top, false);
    return (unsigned char)top;
}

/* `has_others`: the values may include NaN, or exceed the largest number of the target type. */
INLINE void decode_values(uint32_t *wide, const unsigned char *codes, uint32_t top, uint32_t most, bool has_others) {
    const float factor = float_of((top - 8) << 23);
    for (int i = 0; i < GROUP; i++) {
        const uint32_t magnitude = codes[i] & 0x7f;
        /* Subnormal codes have no leading one: it is added here and subtracted below. */
        const uint32_t is_tiny = -(uint32_t)(magnitude < 8);
        const float more = float_of(((magnitude | (is_tiny & 8)) << 20) + (120u << 23));
        uint32_t bits = bits_of((more - float_of(is_tiny & LEAST_POWER)) * factor);
        if (has_others) {
            bits = bits < most ? bits : most;
            bits = choose(magnitude == 0x7f, NOT_A_NUMBER, bits);
        }
        wide[i] = bits | (uint32_t)(codes[i] & 0x80) << 24;
    }
}

INLINE void decode_group(uint32_t *wide, const unsigned char *codes, uint32_t top, int kind) {
    const uint32_t most = kind == FLOAT32 ? INFINITE - 1 : kind == FLOAT16 ? 0x477fe000u : 0x7f7f0000u;
    unsigned char largest = 0;
    for (int i = 0; i < GROUP; i++) {
        const unsigned char magnitude = codes[i] & 0x7f;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest == 0x7f || top >= most >> 23)
        decode_values(wide, codes, top, most, true);
    else
        decode_values(wide, codes, top, most, false);
}

/* -- a piece: one byte per value, followed by one byte per group -- */

INLINE size_t width_of(int kind) { return kind == FLOAT32 ? 4 : 2; }

INLINE void encode_piece(unsigned char *dst, const unsigned char *src, size_t count, int kind) {
    const size_t width = width_of(kind);
    unsigned char *tops = dst + count;
    uint32_t wide[GROUP];
    size_t i = 0;
    for (; i + GROUP <= count; i += GROUP) {
        widen(wide, src + i * width, kind);
        *tops++ = encode_group(dst + i, wide);
    }
    if (i < count) {
        unsigned char rest[GROUP * 4] = {0}, codes[GROUP];
        memcpy(rest, src + i * width, (count - i) * width);
        widen(wide, rest, kind);
        *tops = encode_group(codes, wide);
        memcpy(dst + i, codes, count - i);
    }
}

INLINE void decode_piece(unsigned char *dst, const unsigned char *src, size_t count, int kind) {
    const size_t width = width_of(kind);
    const unsigned char *tops = src + count;
    uint32_t wide[GROUP];
    size_t i = 0;
    for (; i + GROUP <= count; i += GROUP) {
        decode_group(wide, src + i, *tops++, kind);
        narrow(dst + i * width, wide, kind);
    }
    if (i < count) {
        unsigned char rest[GROUP * 4], codes[GROUP] = {0};
        memcpy(codes, src + i, count - i);
        decode_group(wide, codes, *tops, kind);
        narrow(rest, wide, kind);
        memcpy(dst + i * width, rest, (count - i) * width);
    }
}

/* One function per kind with a constant kind, so that the loops above have no branches. */
#define PIECES(name, form)                                                                                         \
    form static void encode_##name(unsigned char *dst, const unsigned char *src, size_t count, int kind) {         \
        if (kind == FLOAT32) encode_piece(dst, src, count, FLOAT32);                                               \
        else if (kind == FLOAT16) encode_piece(dst, src, count, FLOAT16);                                          \
        else encode_piece(dst, src, count, BFLOAT16);                                                              \
    }                                                                                                              \
    form static void decode_##name(unsigned char *dst, const unsigned char *src, size_t count, int kind) {         \
        if (kind == FLOAT32) decode_piece(dst, src, count, FLOAT32);                                               \
        else if (kind == FLOAT16) decode_piece(dst, src, count, FLOAT16);                                          \
        else decode_piece(dst, src, count, BFLOAT16);                                                              \
    }

PIECES(plain, )
#ifdef HAS_X86_FORMS
PIECES(avx2, __attribute__((target("avx2"))))
#endif

typedef void Piece(unsigned char *dst, const unsigned char *src, size_t count, int kind);

typedef struct {
    const char *name;
    Piece *encode, *decode;
} Form;

static Form forms[2]; /* supported by this CPU, slowest first */
static int num_forms;
static Form used;

static void find_forms(void) {
    num_forms = 0;
    forms[num_forms++] = (Form){"plain", encode_plain, decode_plain};
#ifdef HAS_X86_FORMS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) forms[num_forms++] = (Form){"avx2", encode_avx2, decode_avx2};
#endif
    used = forms[num_forms - 1];
}

/* -- arguments of a call -- */

typedef struct {
    Py_buffer dst, src;
    int64_t *to, *from; /* private copies of the offsets */
    Py_ssize_t num_pieces, num_values;
    int kind;
} Call;

static void end_call(Call *call) {
    PyBuffer_Release(&call->dst);
    PyBuffer_Release(&call->src);
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

/* Copies the offsets and checks that all pieces of this size are inside `memory`; returns -1 otherwise. */
static Py_ssize_t take_offsets(int64_t **offsets, const char *name, PyObject *argument, const Py_buffer *memory,
                               Py_ssize_t piece_bytes) {
    Py_buffer view = {0};
    if (!take_memory(&view, name, argument, false)) {
        PyBuffer_Release(&view);
        return -1;
    }
    const char *format = view.format ? view.format : "B", *kind = format + strspn(format, "@=<");
    if (view.itemsize != WORD || strlen(kind) != 1 || !strchr("lq", *kind)) {
        PyErr_Format(PyExc_ValueError, "%s must be 64-bit integers, not format %s", name, format);
        PyBuffer_Release(&view);
        return -1;
    }
    const Py_ssize_t count = view.len / WORD;
    int64_t *own = malloc(count ? (size_t)view.len : WORD);
    if (own && count) memcpy(own, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    if (!own) {
        PyErr_NoMemory();
        return -1;
    }
    *offsets = own;
    for (Py_ssize_t i = 0; i < count; i++)
        if (own[i] < 0 || own[i] > (int64_t)(memory->len - piece_bytes)) {
            PyErr_Format(PyExc_ValueError, "%s: piece %zd at offset %lld with %zd bytes lies outside of %zd bytes",
                         name, i, (long long)own[i], piece_bytes, memory->len);
            return -1;
        }
    return count;
}

static bool take_call(Call *call, PyObject *args, const char *form, bool is_encoding) {
    PyObject *dst, *to, *src, *from;
    if (!PyArg_ParseTuple(args, form, &dst, &to, &src, &from, &call->num_values, &call->kind)) return false;
    if (call->kind < 0 || call->kind >= NUM_KINDS || call->num_values < 1 || call->num_values > PY_SSIZE_T_MAX / 8) {
        PyErr_Format(PyExc_ValueError, "invalid piece: %zd values of kind %d", call->num_values, call->kind);
        return false;
    }
    if (!take_memory(&call->dst, "dst", dst, true) || !take_memory(&call->src, "src", src, false)) return false;
    const uintptr_t there = (uintptr_t)call->dst.buf, here = (uintptr_t)call->src.buf;
    if (call->dst.len && call->src.len && there < here + (size_t)call->src.len &&
        here < there + (size_t)call->dst.len) {
        PyErr_SetString(PyExc_ValueError, "dst and src overlap");
        return false;
    }
    const Py_ssize_t wide = call->num_values * (Py_ssize_t)width_of(call->kind);
    const Py_ssize_t packed = call->num_values + (call->num_values + GROUP - 1) / GROUP;
    const Py_ssize_t num_places = take_offsets(&call->to, "dst_offsets", to, &call->dst, is_encoding ? packed : wide);
    if (num_places < 0) return false;
    call->num_pieces = take_offsets(&call->from, "src_offsets", from, &call->src, is_encoding ? wide : packed);
    if (call->num_pieces < 0) return false;
    if (call->num_pieces != num_places) {
        PyErr_Format(PyExc_ValueError, "piece counts differ: %zd and %zd", call->num_pieces, num_places);
        return false;
    }
    return true;
}

static PyObject *work(PyObject *args, const char *form, bool is_encoding) {
    Call call = {0};
    const bool fits = take_call(&call, args, form, is_encoding);
    if (fits) {
        Piece *piece = is_encoding ? used.encode : used.decode;
        const bool is_long = call.num_pieces > WORTH_RELEASING / call.num_values;
        PyThreadState *saved = is_long ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t i = 0; i < call.num_pieces; i++)
            piece((unsigned char *)call.dst.buf + call.to[i], (const unsigned char *)call.src.buf + call.from[i],
                  (size_t)call.num_values, call.kind);
        if (saved) PyEval_RestoreThread(saved);
    }
    end_call(&call);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

/* -- the module -- */

static PyObject *fp8_encode(PyObject *self, PyObject *args) { return work(args, "OOOOni:encode", true); }

static PyObject *fp8_decode(PyObject *self, PyObject *args) { return work(args, "OOOOni:decode", false); }

static PyObject *fp8_use_form(PyObject *self, PyObject *name) {
    for (int i = 0; i < num_forms; i++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, forms[i].name) == 0) {
            used = forms[i];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "unknown implementation %R", name);
}

static PyMethodDef methods[] = {
    {"encode", fp8_encode, METH_VARARGS, "See kvolt.kv.disk.fp8_python.encode."},
    {"decode", fp8_decode, METH_VARARGS, "See kvolt.kv.disk.fp8_python.decode."},
    {"use_form", fp8_use_form, METH_O, "Select one of FORMS, for tests; default: the last."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fp8_native", "Numbers in eight bits, in C.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fp8_native(void) {
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
