/* Operations of a decode step between its matrix products, each in one pass over memory.
 *
 * Owns no memory and no state except the function that starts threads. The plain forms in operations.py and
 * attention_cpu.py define the results; cpu_kernels.py builds this file and mirrors its structures.
 *
 * Values are float32 or bfloat16 ("narrow"), sums are float32. Uses vector types of GCC and clang, so the compiler
 * selects the instructions; loops over elements are vectorised by it (-fopenmp-simd, no OpenMP runtime).
 */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 8,
    PAIR = 2 * LANES, /* elements read at a time; head_dim is a multiple */
    PART = 64,        /* context tokens whose scores are kept at a time */
    MAX_GROUP = 8,    /* query heads processed together */
    MAX_HEAD_DIM = 512,
};

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

API const int64_t kvolt_part = PART, kvolt_pair = PAIR, kvolt_max_head_dim = MAX_HEAD_DIM;

/* ---- Threads of torch's OpenMP runtime; a second runtime would compete with it for the cores. */

typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
static parallel_t parallel;

API void kvolt_use_threads(parallel_t gomp_parallel) { parallel = gomp_parallel; }

enum { SHARES_PER_THREAD = 8 }; /* few, to limit contention for the counter; several, because threads differ in speed */

typedef struct {
    void (*run)(const void *arguments, int64_t item);
    const void *arguments;
    int64_t count, share;
    _Atomic int64_t next;
} job_t;

static void work(void *data)
{
    job_t *job = data;
    int64_t first;
    while ((first = atomic_fetch_add(&job->next, job->share)) < job->count) {
        int64_t last = first + job->share < job->count ? first + job->share : job->count;
        for (int64_t item = first; item < last; item++)
            job->run(job->arguments, item);
    }
}

static void each(void (*run)(const void *, int64_t), const void *arguments, int64_t count, int64_t num_threads)
{
    if (num_threads > 1 && count > 1 && parallel) {
        int64_t shares = num_threads * SHARES_PER_THREAD;
        job_t job = {run, arguments, count, (count + shares - 1) / shares, 0};
        parallel(work, &job, (unsigned)num_threads, 0);
        return;
    }
    for (int64_t item = 0; item < count; item++)
        run(arguments, item);
}

/* ---- Numbers. */

INLINE float widen(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* Round to nearest, ties to even. NaN stays NaN: those from arithmetic have few bits set. */
INLINE uint16_t narrowed(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float get(const void *at, int64_t i, const int narrow)
{
    return narrow ? widen(((const uint16_t *)at)[i]) : ((const float *)at)[i];
}

INLINE void put(void *at, int64_t i, float x, const int narrow)
{
    if (narrow)
        ((uint16_t *)at)[i] = narrowed(x);
    else
        ((float *)at)[i] = x;
}

INLINE float rounded(float x, const int narrow) { return narrow ? widen(narrowed(x)) : x; }

INLINE int64_t bytes(int64_t count, const int narrow) { return count * (narrow ? 2 : 4); }

/* Defines a function of (arguments, item) for each type, and selects the one for a type. */
#define BOTH(name)                                                                           \
    static void name##_narrow(const void *arguments, int64_t item) { name(arguments, item, 1); } \
    static void name##_wide(const void *arguments, int64_t item) { name(arguments, item, 0); }
#define OF_TYPE(name, narrow) ((narrow) ? name##_narrow : name##_wide)

/* exp(x) within 2 ulp for -60 to 60, clamped outside: such values are negligible beside 1, and products with them do
 * not become denormal, which would be a hundred times slower. */
INLINE float exponential(float x)
{
    x = x < -60.0f ? -60.0f : x;
    x = x > 60.0f ? 60.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* rounds to an integer: no bits are left for the fraction */
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return y * power;
}

/* ---- Rows: norm with residual, and the gate of the MLP. */

typedef struct {
    const void *x;
    void *residual;
    const void *weight;
    void *out;
    int64_t width;
    float eps;
} norm_t;

/* Rounded to the type of the values before the weight is applied. */
INLINE void normalise(void *out, const void *x, const void *weight, int64_t width, float eps, const int narrow)
{
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) {
        float wide = get(x, i, narrow);
        squares += wide * wide;
    }
    float scale = 1.0f / sqrtf(squares / (float)width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++)
        put(out, i, get(weight, i, narrow) * rounded(get(x, i, narrow) * scale, narrow), narrow);
}

INLINE void norm_row(const norm_t *a, int64_t row, const int narrow)
{
    int64_t at = bytes(row * a->width, narrow);
    const char *x = (const char *)a->x + at;
    if (a->residual) {
        char *residual = (char *)a->residual + at;
#pragma omp simd
        for (int64_t i = 0; i < a->width; i++)
            put(residual, i, get(residual, i, narrow) + get(x, i, narrow), narrow);
        x = residual;
    }
    normalise((char *)a->out + at, x, a->weight, a->width, a->eps, narrow);
}

BOTH(norm_row)

API void kvolt_add_rmsnorm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t width,
                           float eps, int64_t narrow, int64_t num_threads)
{
    norm_t arguments = {x, residual, weight, out, width, eps};
    each(OF_TYPE(norm_row, narrow), &arguments, rows, num_threads);
}

typedef struct {
    const void *gate_up;
    void *out;
    int64_t width;
} gate_t;

INLINE void gate_row(const gate_t *a, int64_t row, const int narrow)
{
    int64_t row_bytes = bytes(a->width, narrow);
    const char *gate = (const char *)a->gate_up + 2 * row * row_bytes, *up = gate + row_bytes;
    char *out = (char *)a->out + row * row_bytes;
#pragma omp simd
    for (int64_t i = 0; i < a->width; i++) {
        float x = get(gate, i, narrow);
        put(out, i, rounded(x / (1.0f + exponential(-x)), narrow) * get(up, i, narrow), narrow);
    }
}

BOTH(gate_row)

API void kvolt_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t width, int64_t narrow,
                        int64_t num_threads)
{
    gate_t arguments = {gate_up, out, width};
    each(OF_TYPE(gate_row, narrow), &arguments, rows, num_threads);
}

/* ---- Layout of keys and values. */

typedef struct { /* a slab; strides in bytes */
    int64_t num_blocks, block_size, block_stride, head_stride, token_stride;
    int64_t head_dim, num_heads, num_kv_heads, num_positions, narrow;
    float scale;
} shape_t;

typedef struct { /* data shared by all layers of a step */
    int64_t num_tokens, num_sequences, num_decodes;
    const int64_t *positions, *slots;
    const int32_t *tables, *context_lens;
    int64_t table_width;
    float *partials; /* [decodes, max_parts, heads, head_dim + 2], or null if contexts are not split */
    int64_t max_parts;
    int64_t rotate_threads, attend_threads;
} step_t;

typedef struct {
    char *keys, *values;
    const float *cosines, *sines;      /* [num_positions, head_dim / 2] */
    const void *query_norm, *key_norm; /* [head_dim], or null */
    float eps;
} layer_t;

typedef struct {
    const shape_t *shape;
    const step_t *step;
    const layer_t *layer;
    char *q, *k, *v; /* rows of heads, `stride` bytes apart */
    int64_t stride;
    char *out;
} call_t;

/* Returns 0 if a step stays inside its slab. The functions below do not check it again. */
API int64_t kvolt_check(const shape_t *shape, const step_t *step)
{
    int wrong = 0;
    for (int64_t row = 0; row < step->num_tokens; row++) {
        wrong |= step->positions[row] < 0 || step->positions[row] >= shape->num_positions;
        wrong |= step->slots[row] < 0 || step->slots[row] >= shape->num_blocks * shape->block_size;
    }
    for (int64_t row = 0; row < step->num_sequences; row++) {
        int64_t length = step->context_lens[row], num_blocks = (length + shape->block_size - 1) / shape->block_size;
        if (length < 1 || num_blocks > step->table_width)
            return 1;
        for (int64_t i = 0; i < num_blocks; i++) {
            int32_t block = step->tables[row * step->table_width + i];
            wrong |= block < 0 || block >= shape->num_blocks;
        }
    }
    return wrong;
}

/* ---- Rotary embedding, and writing of keys and values. */

INLINE void turn(void *head, const void *norm, const call_t *c, int64_t position, const int narrow)
{
    int64_t half = c->shape->head_dim / 2;
    const float *cosines = c->layer->cosines + position * half, *sines = c->layer->sines + position * half;
    if (norm)
        normalise(head, head, norm, 2 * half, c->layer->eps, narrow);
    char *second_half = (char *)head + bytes(half, narrow);
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float first = get(head, i, narrow), second = get(second_half, i, narrow);
        put(head, i, first * cosines[i] - second * sines[i], narrow);
        put(second_half, i, second * cosines[i] + first * sines[i], narrow);
    }
}

INLINE void rotate_row(const call_t *c, int64_t row, const int narrow)
{
    const shape_t *shape = c->shape;
    int64_t head_bytes = bytes(shape->head_dim, narrow);
    int64_t position = c->step->positions[row], slot = c->step->slots[row];
    char *q = c->q + row * c->stride, *k = c->k + row * c->stride, *v = c->v + row * c->stride;
    int64_t at = slot / shape->block_size * shape->block_stride + slot % shape->block_size * shape->token_stride;
    for (int64_t head = 0; head < shape->num_heads; head++)
        turn(q + head * head_bytes, c->layer->query_norm, c, position, narrow);
    for (int64_t head = 0; head < shape->num_kv_heads; head++) {
        turn(k + head * head_bytes, c->layer->key_norm, c, position, narrow);
        memcpy(c->layer->keys + at + head * shape->head_stride, k + head * head_bytes, (size_t)head_bytes);
        memcpy(c->layer->values + at + head * shape->head_stride, v + head * head_bytes, (size_t)head_bytes);
    }
}

BOTH(rotate_row)

#include "cpu_attention.h"

BOTH(attend_whole)
BOTH(attend_split)
BOTH(merge_row)

/* Rotates queries and keys in place, writes keys and values, and computes attention for the first num_decodes rows. */
API void kvolt_attend(const shape_t *shape, const step_t *step, const layer_t *layer, char *q, char *k, char *v,
                      int64_t stride, char *out)
{
    call_t call = {shape, step, layer, q, k, v, stride, out};
    each(OF_TYPE(rotate_row, shape->narrow), &call, step->num_tokens, step->rotate_threads);
    if (!step->partials) {
        each(OF_TYPE(attend_whole, shape->narrow), &call, step->num_decodes, step->attend_threads);
        return;
    }
    int64_t per_row = shape->num_kv_heads * groups_per_kv_head(shape) * step->max_parts;
    each(OF_TYPE(attend_split, shape->narrow), &call, step->num_decodes * per_row, step->attend_threads);
    each(OF_TYPE(merge_row, shape->narrow), &call, step->num_decodes, 1);
}

/* ---- Gathers the context of one sequence: [kv_heads, length, head_dim]. */

API void kvolt_gather(const shape_t *shape, const char *view, const int32_t *table, int64_t length, char *out)
{
    for (int64_t head = 0; head < shape->num_kv_heads; head++)
        for (int64_t start = 0, block = 0; start < length; start += shape->block_size, block++) {
            int64_t count = length - start < shape->block_size ? length - start : shape->block_size;
            const char *from = view + table[block] * shape->block_stride;
            size_t num_bytes = (size_t)(count * shape->token_stride);
            memcpy(out, from + head * shape->head_stride, num_bytes);
            out += num_bytes;
        }
}
