/* Attention of one token to its context, included by cpu_kernels.c.
 *
 * Owns the order of the work: a context is read in parts of PART tokens, each first for its scores and then for its
 * sums, with prefetches of the next memory: blocks are scattered, so the hardware cannot predict their addresses.
 *
 * PAIR elements of a head are two vectors: for bfloat16 the even and the odd elements, since each is extracted from
 * 32-bit words by one instruction; for float32 the first and the second half. Queries and sums are kept in that order;
 * only the final output is reordered. */

INLINE void load_pair(const char *at, vf *a, vf *b, const int narrow)
{
    if (narrow) {
        vu words;
        memcpy(&words, at, sizeof words);
        *a = (vf)(words << 16);
        *b = (vf)(words & 0xffff0000u);
    } else {
        memcpy(a, at, sizeof *a);
        memcpy(b, at + sizeof *a, sizeof *b);
    }
}

INLINE vf load(const float *at)
{
    vf x;
    memcpy(&x, at, sizeof x);
    return x;
}

INLINE void store(float *at, vf x) { memcpy(at, &x, sizeof x); }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

INLINE vf halved1(vf a, vf b)
{
    return SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
INLINE vf halved2(vf a, vf b)
{
    return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
INLINE vf halved4(vf a, vf b)
{
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

/* Horizontal sums of eight vectors. */
INLINE vf sums(const vf *x)
{
    vf left = halved2(halved1(x[0], x[1]), halved1(x[2], x[3]));
    vf right = halved2(halved1(x[4], x[5]), halved1(x[6], x[7]));
    return halved4(left, right);
}

/* Result of a part of a context for one head: sums [head_dim], the largest score, the sum of weights. */
INLINE int64_t state_size(int64_t head_dim) { return head_dim + 2; }

/* A part of one sequence's context: offsets of its tokens from `keys` and `values`. */
typedef struct {
    const char *keys, *values;
    int64_t count;
    int64_t offsets[PART + LANES]; /* the last one is repeated to fill a vector of tokens */
} part_t;

INLINE void prefetch(const char *at, int64_t num_bytes)
{
    for (int64_t i = 0; i < num_bytes; i += 64)
        __builtin_prefetch(at + i, 0, 3);
}

/* Computes scores[g][t] of `group` heads; prefetches the values of these tokens. */
INLINE void score(const part_t *part, const float *q, int64_t head_dim, float *scores, const int group,
                  const int narrow)
{
    for (int64_t t = 0; t < part->count; t += LANES) {
        vf products[4][LANES];
        for (int u = 0; u < LANES; u += 2) {
            const int64_t at0 = part->offsets[t + u], at1 = part->offsets[t + u + 1];
            vf sum0[4] = {0}, sum1[4] = {0};
            prefetch(part->values + at0, bytes(head_dim, narrow));
            prefetch(part->values + at1, bytes(head_dim, narrow));
            for (int64_t d = 0; d < head_dim; d += PAIR) {
                vf a0, b0, a1, b1;
                load_pair(part->keys + at0 + bytes(d, narrow), &a0, &b0, narrow);
                load_pair(part->keys + at1 + bytes(d, narrow), &a1, &b1, narrow);
                for (int g = 0; g < group; g++) {
                    vf qa = load(q + g * head_dim + d), qb = load(q + g * head_dim + d + LANES);
                    sum0[g] += qa * a0 + qb * b0;
                    sum1[g] += qa * a1 + qb * b1;
                }
            }
            for (int g = 0; g < group; g++) {
                products[g][u] = sum0[g];
                products[g][u + 1] = sum1[g];
            }
        }
        for (int g = 0; g < group; g++)
            store(scores + g * PART + t, sums(products[g]));
    }
}

/* Weighted sums of values for `group` heads and PAIR * columns elements from d; prefetches the keys of `next`. */
INLINE void weigh(const part_t *part, const part_t *next, const float *weights, float *states, int64_t head_dim,
                  int64_t d, const int group, const int columns, const int narrow)
{
    vf a[4][2] = {0}, b[4][2] = {0};
    for (int64_t t = 0; t < part->count; t++) {
        if (t < next->count)
            prefetch(next->keys + next->offsets[t] + bytes(d, narrow), bytes(columns * PAIR, narrow));
        for (int column = 0; column < columns; column++) {
            vf left, right;
            load_pair(part->values + part->offsets[t] + bytes(d + column * PAIR, narrow), &left, &right, narrow);
            for (int g = 0; g < group; g++) {
                a[g][column] += weights[g * PART + t] * left;
                b[g][column] += weights[g * PART + t] * right;
            }
        }
    }
    for (int g = 0; g < group; g++)
        for (int column = 0; column < columns; column++) {
            float *state = states + g * state_size(head_dim) + d + column * PAIR;
            store(state, a[g][column]);
            store(state + LANES, b[g][column]);
        }
}

/* Converts scores to weights, in place. */
INLINE void soften(float *scores, int64_t count, float *largest_out, float *total_out)
{
    float largest = -INFINITY, total = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t t = 0; t < count; t++)
        largest = scores[t] > largest ? scores[t] : largest;
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < count; t++) {
        scores[t] = exponential(scores[t] - largest);
        total += scores[t];
    }
    *largest_out = largest;
    *total_out = total;
}

/* Registers hold the sums of four heads, and of two columns if there are many registers. */
#if defined(__AVX512VL__) || defined(__aarch64__)
#define COLUMNS 2
#else
#define COLUMNS 1
#endif

INLINE void attend_heads(const part_t *part, const part_t *next, const float *q, float *states, int64_t head_dim,
                         const int group, const int narrow)
{
    float scores[4 * PART];
    score(part, q, head_dim, scores, group, narrow);
    for (int g = 0; g < group; g++) {
        float *state = states + g * state_size(head_dim);
        soften(scores + g * PART, part->count, state + head_dim, state + head_dim + 1);
    }
    int64_t d = 0;
    for (; d + COLUMNS * PAIR <= head_dim; d += COLUMNS * PAIR)
        weigh(part, next, scores, states, head_dim, d, group, COLUMNS, narrow);
    for (; d < head_dim; d += PAIR)
        weigh(part, next, scores, states, head_dim, d, group, 1, narrow);
}

INLINE void attend_part(const part_t *part, const part_t *next, const float *q, float *states, int64_t head_dim,
                        int64_t group, const int narrow)
{
    for (int64_t g = 0; g < group; g += 4, q += 4 * head_dim, states += 4 * state_size(head_dim))
        switch (group - g) {
        case 1: attend_heads(part, next, q, states, head_dim, 1, narrow); break;
        case 2: attend_heads(part, next, q, states, head_dim, 2, narrow); break;
        case 3: attend_heads(part, next, q, states, head_dim, 3, narrow); break;
        default: attend_heads(part, next, q, states, head_dim, 4, narrow); break;
        }
}

typedef void attend_part_t(const part_t *, const part_t *, const float *, float *, int64_t, int64_t);

static void attend_part_narrow(const part_t *part, const part_t *next, const float *q, float *states,
                               int64_t head_dim, int64_t group)
{
    attend_part(part, next, q, states, head_dim, group, 1);
}

static void attend_part_wide(const part_t *part, const part_t *next, const float *q, float *states, int64_t head_dim,
                             int64_t group)
{
    attend_part(part, next, q, states, head_dim, group, 0);
}

/* The part of a sequence's context from `start` on; empty at the end of the context. */
static void locate(part_t *part, const call_t *c, int64_t row, int64_t kv_head, int64_t start)
{
    const shape_t *shape = c->shape;
    const int32_t *table = c->step->tables + row * c->step->table_width;
    int64_t left = c->step->context_lens[row] - start;
    part->keys = c->layer->keys + kv_head * shape->head_stride;
    part->values = c->layer->values + kv_head * shape->head_stride;
    part->count = left < PART ? left : PART;
    int64_t block = start / shape->block_size, inside = start % shape->block_size, at = 0;
    for (int64_t t = 0; t < part->count; block++, inside = 0) {
        at = table[block] * shape->block_stride + inside * shape->token_stride;
        for (; inside < shape->block_size && t < part->count; inside++, t++, at += shape->token_stride)
            part->offsets[t] = at;
    }
    for (int64_t t = part->count; t < part->count + LANES; t++)
        part->offsets[t] = at - shape->token_stride;
}

/* Adds a part's state to that of the parts before it. Parts are fixed and merged in order, so results depend neither on
 * the threads nor on the rest of the batch. */
static void merge(float *state, const float *next, int64_t head_dim)
{
    float largest = state[head_dim] > next[head_dim] ? state[head_dim] : next[head_dim];
    float scale = exponential(state[head_dim] - largest), next_scale = exponential(next[head_dim] - largest);
#pragma omp simd
    for (int64_t d = 0; d < head_dim; d++)
        state[d] = state[d] * scale + next[d] * next_scale;
    state[head_dim] = largest;
    state[head_dim + 1] = state[head_dim + 1] * scale + next[head_dim + 1] * next_scale;
}

/* Reorders elements from the order of load_pair to memory order. */
INLINE void finish(const float *state, char *out, int64_t head_dim, const int narrow)
{
    float scale = 1.0f / state[head_dim + 1];
    for (int64_t d = 0; d < head_dim; d += PAIR)
        for (int64_t i = 0; i < LANES; i++) {
            put(out, d + (narrow ? 2 * i : i), state[d + i] * scale, narrow);
            put(out, d + (narrow ? 2 * i + 1 : LANES + i), state[d + LANES + i] * scale, narrow);
        }
}

/* Scales queries and stores them in the order of load_pair. */
INLINE void gather_queries(const call_t *c, int64_t row, int64_t first, int64_t count, float *q, const int narrow)
{
    int64_t head_dim = c->shape->head_dim;
    const char *at = c->q + row * c->stride + bytes(first * head_dim, narrow);
    for (int64_t d = 0; d < count * head_dim; d += PAIR) {
        vf a, b;
        load_pair(at + bytes(d, narrow), &a, &b, narrow);
        store(q + d, a * c->shape->scale);
        store(q + d + LANES, b * c->shape->scale);
    }
}

/* The heads of a work item: at most MAX_GROUP of those that share a KV head. */
typedef struct {
    int64_t row, kv_head, first, count;
} item_t;

INLINE int64_t groups_per_kv_head(const shape_t *shape)
{
    return (shape->num_heads / shape->num_kv_heads + MAX_GROUP - 1) / MAX_GROUP;
}

INLINE item_t item_of(const shape_t *shape, int64_t number)
{
    int64_t ratio = shape->num_heads / shape->num_kv_heads, groups = groups_per_kv_head(shape);
    int64_t per_row = groups * shape->num_kv_heads;
    item_t item = {.row = number / per_row, .kv_head = number % per_row / groups};
    int64_t skipped = number % groups * MAX_GROUP;
    item.first = item.kv_head * ratio + skipped;
    item.count = ratio - skipped < MAX_GROUP ? ratio - skipped : MAX_GROUP;
    return item;
}

/* The whole context of a sequence, one KV head after the other. */
INLINE void attend_whole(const call_t *c, int64_t row, const int narrow)
{
    const shape_t *shape = c->shape;
    attend_part_t *attend = OF_TYPE(attend_part, narrow);
    int64_t head_dim = shape->head_dim, size = state_size(head_dim), length = c->step->context_lens[row];
    int64_t per_row = groups_per_kv_head(shape) * shape->num_kv_heads;
    float q[MAX_GROUP * MAX_HEAD_DIM], states[MAX_GROUP * (MAX_HEAD_DIM + 2)], more[MAX_GROUP * (MAX_HEAD_DIM + 2)];
    part_t parts[2];
    int now = 0;
    locate(&parts[now], c, row, 0, 0);
    for (int64_t number = 0; number < per_row; number++) {
        item_t item = item_of(shape, number);
        gather_queries(c, row, item.first, item.count, q, narrow);
        for (int64_t start = 0; start < length; start += PART, now = !now) {
            if (start + PART < length)
                locate(&parts[!now], c, row, item.kv_head, start + PART);
            else if (number + 1 < per_row)
                locate(&parts[!now], c, row, item_of(shape, number + 1).kv_head, 0);
            else
                parts[!now].count = 0;
            attend(&parts[now], &parts[!now], q, start ? more : states, head_dim, item.count);
            for (int64_t g = 0; start && g < item.count; g++)
                merge(states + g * size, more + g * size, head_dim);
        }
        char *out = c->out + bytes((row * shape->num_heads + item.first) * head_dim, narrow);
        for (int64_t g = 0; g < item.count; g++)
            finish(states + g * size, out + bytes(g * head_dim, narrow), head_dim, narrow);
    }
}

/* One part of a context, for steps with too few sequences to use all threads. */
INLINE void attend_split(const call_t *c, int64_t number, const int narrow)
{
    const shape_t *shape = c->shape;
    int64_t max_parts = c->step->max_parts, which = number % max_parts;
    item_t item = item_of(shape, number / max_parts);
    if (which * PART >= c->step->context_lens[item.row])
        return;
    float q[MAX_GROUP * MAX_HEAD_DIM];
    gather_queries(c, item.row, item.first, item.count, q, narrow);
    part_t part, none = {.count = 0};
    locate(&part, c, item.row, item.kv_head, which * PART);
    int64_t at = (item.row * max_parts + which) * shape->num_heads + item.first;
    float *states = c->step->partials + at * state_size(shape->head_dim);
    OF_TYPE(attend_part, narrow)(&part, &none, q, states, shape->head_dim, item.count);
}

INLINE void merge_row(const call_t *c, int64_t row, const int narrow)
{
    const shape_t *shape = c->shape;
    int64_t size = state_size(shape->head_dim), part_size = shape->num_heads * size;
    for (int64_t head = 0; head < shape->num_heads; head++) {
        float *state = c->step->partials + row * c->step->max_parts * part_size + head * size, *more = state;
        for (int64_t start = PART; start < c->step->context_lens[row]; start += PART)
            merge(state, more += part_size, shape->head_dim);
        finish(state, c->out + bytes((row * shape->num_heads + head) * shape->head_dim, narrow), shape->head_dim,
               narrow);
    }
}
