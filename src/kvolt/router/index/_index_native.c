/* Prefix index in C. `prefix_index_python.py` defines the behaviour; this file makes it fast and compact.

     table   open addressing, one word per entry: 32 bits of the keyed hash | block id + 1
       |
     blocks  hash 8 bytes | id of the holder set 4 | time of last use 4
       |
     sets    distinct sets of holders, reference-counted by blocks: sorted lists for few holders, bitmaps for many.
             A set of one holder is encoded in its id and takes no memory.

   Blocks of one prompt mostly have the same holders, so a find compares 32-bit ids and reads a set only where it
   differs from the previous one; store and remove compute a new set once per run of blocks.

   The blocks of a worker are lists of block ids per tier, appended to by store. A removal leaves its id in the list;
   lists with many stale ids are swept, so that they stay proportional to what is held. Ids are reused, so an id in a
   list counts only if its block names the holder.

   All allocations are counted. At the limit, blocks are evicted that were not used recently: a clock hand evicts
   those that are older than fifteen of sixteen blocks in a sample. Memory is freed before a block is accessed, never
   while a pointer to it is held. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef KVOLT_SOURCE_DIGEST
#define KVOLT_SOURCE_DIGEST ""
#endif

enum {
    NUM_TIERS = 5,
    OWN_TIERS = 3,
    SLOT_BITS = 13,
    MAX_SLOTS = 1 << SLOT_BITS,
    MAX_WORDS = MAX_SLOTS / 64,
    MAX_HOLDERS = NUM_TIERS << SLOT_BITS,
    FIRST_SET = 1 << 16, /* smaller ids are sets of one holder */
    FEW = 4,             /* holders stored inline in the set */
    CHUNK = 64,          /* concurrent look-ups */
    USED_SPAN = 64,      /* maximum ticks between the first and last block of a call */
    SAMPLE = 128,
    LEAST_BLOCKS = 64,
    LEAST_SETS = 64,
    LEAST_IDS = 16,
};
#define NONE UINT32_MAX
#define MARK 0x80000000u /* flag of a block's set: visited in this sweep */
#define FREE 0x7fffffffu /* set value of a free block */
#define MIN_MAX_BYTES ((size_t)64 * 1024)
#define DEFAULT_MAX_BYTES ((size_t)1024 * 1024 * 1024)

typedef struct {
    uint64_t hash;
    uint32_t set;
    uint32_t used; /* free block: next free one */
} Block;

typedef struct {
    uint64_t print; /* xor of its mixed holders */
    uint32_t refs;
    uint32_t next; /* next in the bucket; free set: next free one */
    uint16_t count;
    uint16_t width; /* bitmap: words per tier */
    uint8_t tiers;  /* bitmap: tiers; list: 0 */
    union {
        uint16_t few[FEW];
        uint16_t *list;
        uint64_t word;
        uint64_t *bits;
    } at;
} HolderSet;

typedef struct {
    uint32_t *ids; /* may contain stale and duplicate ids */
    uint32_t len, cap;
    uint32_t count; /* blocks held */
    uint64_t digest;
    uint64_t evicted;
} Held;

typedef struct {
    bool is_there;
    Held held[NUM_TIERS];
} Worker;

typedef struct {
    PyObject_HEAD
    uint64_t key; /* key of the table's hashing, against chosen collisions */
    uint64_t *table;
    uint32_t table_cap;
    Block *blocks;
    uint32_t blocks_len, blocks_cap, num_blocks, free_block;
    HolderSet *sets;
    uint32_t sets_len, sets_cap, num_sets, free_set;
    uint32_t *buckets;
    uint32_t num_buckets;
    Worker *workers;
    uint32_t num_slots, slots_cap;
    size_t bytes, max_bytes;
    size_t payload_bound;  /* maximum size of one more set */
    uint64_t num_pairs;
    uint64_t ids_cap;      /* capacity of all workers' lists */
    uint32_t clock;        /* increases with every use; may wrap around */
    uint64_t moves;        /* changes whenever blocks may have been evicted or renumbered */
    uint32_t hand;
    uint32_t old_limit;    /* blocks last used before this are old */
    uint32_t until_sample; /* evictions until old_limit is sampled again */
    uint64_t random;
    bool out_of_memory;
} Index;

/* The GIL is held throughout, so these may be static. */
static uint16_t scratch_list[MAX_HOLDERS + 1];
static uint64_t scratch_bits[NUM_TIERS * MAX_WORDS];

static PyObject *numpy_empty, *int32_dtype;

static inline uint64_t mix(uint64_t value) { /* SplitMix64's finalizer, like core.kv_digest */
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

static inline uint32_t make_holder(uint32_t slot, uint32_t tier) { return tier << SLOT_BITS | slot; }
static inline uint32_t slot_of(uint32_t holder) { return holder & (MAX_SLOTS - 1); }
static inline uint32_t tier_of(uint32_t holder) { return holder >> SLOT_BITS; }

/* Memory that malloc uses for this many bytes. */
static inline size_t charge(size_t bytes) { return bytes ? (bytes + 8 + 15) & ~(size_t)15 : 0; }

/* ---- the table ---- */

static inline uint32_t tag_of(const Index *x, uint64_t hash) { return (uint32_t)(mix(hash ^ x->key) >> 32); }
static inline uint32_t home_of(const Index *x, uint32_t tag) {
    return (uint32_t)(((uint64_t)tag * x->table_cap) >> 32);
}
static inline uint32_t after(const Index *x, uint32_t place) { return ++place == x->table_cap ? 0 : place; }

/* Table entry of the block with this hash, or NONE. */
static inline uint32_t place_of(const Index *x, uint64_t hash, uint32_t tag) {
    for (uint32_t place = home_of(x, tag);; place = after(x, place)) {
        uint64_t entry = x->table[place];
        if (!(uint32_t)entry) return NONE;
        if ((uint32_t)(entry >> 32) == tag && x->blocks[(uint32_t)entry - 1].hash == hash) return place;
    }
}

static inline uint32_t look_up(const Index *x, uint64_t hash) {
    if (!x->num_blocks) return NONE; /* the table may not exist yet */
    uint32_t place = place_of(x, hash, tag_of(x, hash));
    return place == NONE ? NONE : (uint32_t)x->table[place] - 1;
}

static void table_insert(Index *x, uint32_t tag, uint32_t id) {
    uint32_t place = home_of(x, tag);
    while ((uint32_t)x->table[place]) place = after(x, place);
    x->table[place] = (uint64_t)tag << 32 | (id + 1);
}

static void table_delete(Index *x, uint64_t hash) {
    uint32_t hole = place_of(x, hash, tag_of(x, hash));
    /* Backward-shift deletion: entries move up unless that would put them before their home. */
    for (uint32_t place = after(x, hole); (uint32_t)x->table[place]; place = after(x, place)) {
        uint32_t home = home_of(x, (uint32_t)(x->table[place] >> 32));
        bool stays = hole <= place ? hole < home && home <= place : hole < home || home <= place;
        if (stays) continue;
        x->table[hole] = x->table[place];
        hole = place;
    }
    x->table[hole] = 0;
}

/* Looks up all blocks of a chunk at once, so that cache misses overlap. With `prefix_only` stops at the first missing
   one. Returns the number of ids. */
static uint32_t look_up_chunk(const Index *x, const uint64_t *hashes, uint32_t n, uint32_t *ids, bool prefix_only) {
    uint32_t tags[CHUNK], places[CHUNK];
    for (uint32_t i = 0; i < n; i++) {
        tags[i] = tag_of(x, hashes[i]);
        places[i] = home_of(x, tags[i]);
        __builtin_prefetch(&x->table[places[i]]);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t place = places[i];
        uint64_t entry;
        while ((uint32_t)(entry = x->table[place]) && (uint32_t)(entry >> 32) != tags[i]) place = after(x, place);
        places[i] = place;
        if ((uint32_t)entry) __builtin_prefetch(&x->blocks[(uint32_t)entry - 1], 1);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t place = places[i];
        ids[i] = NONE;
        for (uint64_t entry; (uint32_t)(entry = x->table[place]); place = after(x, place)) {
            uint32_t id = (uint32_t)entry - 1;
            if ((uint32_t)(entry >> 32) == tags[i] && x->blocks[id].hash == hashes[i]) {
                ids[i] = id;
                break;
            }
        }
        if (ids[i] == NONE && prefix_only) return i;
        if (ids[i] != NONE && x->blocks[ids[i]].set >= FIRST_SET)
            __builtin_prefetch(&x->sets[x->blocks[ids[i]].set - FIRST_SET]);
    }
    return n;
}

/* ---- sets of holders ---- */

static inline const uint16_t *list_of(const HolderSet *set) { return set->count <= FEW ? set->at.few : set->at.list; }
static inline const uint64_t *bits_of(const HolderSet *set) {
    return set->tiers * set->width == 1 ? &set->at.word : set->at.bits;
}
static inline size_t payload_bytes(uint32_t count, uint32_t tiers, uint32_t width) {
    if (tiers) return tiers * width > 1 ? (size_t)tiers * width * 8 : 0;
    return count > FEW ? (size_t)count * 2 : 0;
}
/* A bitmap if it takes no more than the list, or no memory. */
static inline bool better_as_bits(uint32_t count, uint32_t tiers, uint32_t width) {
    return count > FEW && (tiers * width == 1 || tiers * width * 8 <= count * 2);
}

static bool holds(const Index *x, uint32_t id, uint32_t holder) {
    if (id < FIRST_SET) return id == holder;
    const HolderSet *set = &x->sets[id - FIRST_SET];
    if (set->tiers) {
        uint32_t tier = tier_of(holder), word = slot_of(holder) / 64;
        if (tier >= set->tiers || word >= set->width) return false;
        return bits_of(set)[tier * set->width + word] >> (slot_of(holder) & 63) & 1;
    }
    const uint16_t *list = list_of(set);
    for (uint32_t i = 0; i < set->count; i++)
        if (list[i] == holder) return true;
    return false;
}

/* Writes the holders in order to scratch_list; returns their number. */
static uint32_t unpack(const Index *x, uint32_t id) {
    if (id < FIRST_SET) {
        scratch_list[0] = (uint16_t)id;
        return 1;
    }
    const HolderSet *set = &x->sets[id - FIRST_SET];
    if (!set->tiers) {
        memcpy(scratch_list, list_of(set), set->count * sizeof(uint16_t));
        return set->count;
    }
    uint32_t count = 0;
    const uint64_t *bits = bits_of(set);
    for (uint32_t tier = 0; tier < set->tiers; tier++)
        for (uint32_t word = 0; word < set->width; word++)
            for (uint64_t left = bits[tier * set->width + word]; left; left &= left - 1)
                scratch_list[count++] = (uint16_t)make_holder(word * 64 + (uint32_t)__builtin_ctzll(left), tier);
    return count;
}

/* Id of the set with these holders, created if missing, without a reference; NONE without memory. */
static uint32_t intern(Index *x, uint64_t print, uint32_t count, uint32_t tiers, uint32_t width) {
    const void *payload = tiers ? (const void *)scratch_bits : (const void *)scratch_list;
    size_t size = tiers ? (size_t)tiers * width * 8 : (size_t)count * 2;
    uint32_t *bucket = &x->buckets[print & (x->num_buckets - 1)];
    for (uint32_t at = *bucket; at != NONE; at = x->sets[at].next) {
        const HolderSet *set = &x->sets[at];
        if (set->print != print || set->count != count || set->tiers != tiers || set->width != width) continue;
        const void *there = tiers ? (const void *)bits_of(set) : (const void *)list_of(set);
        if (!memcmp(there, payload, size)) return at + FIRST_SET;
    }
    size_t apart = payload_bytes(count, tiers, width);
    void *memory = NULL;
    if (apart) {
        memory = malloc(apart);
        if (!memory) return NONE;
        memcpy(memory, payload, size);
        x->bytes += charge(apart);
    }
    uint32_t at = x->free_set;
    if (at != NONE) x->free_set = x->sets[at].next;
    else at = x->sets_len++;
    HolderSet *set = &x->sets[at];
    *set = (HolderSet){print, 0, *bucket, (uint16_t)count, (uint16_t)width, (uint8_t)tiers, {{0}}};
    if (!apart) memcpy(&set->at, payload, size);
    else if (tiers) set->at.bits = memory;
    else set->at.list = memory;
    *bucket = at;
    x->num_sets++;
    return at + FIRST_SET;
}

static inline void keep_set(Index *x, uint32_t id) {
    if (id >= FIRST_SET && id != NONE) x->sets[id - FIRST_SET].refs++;
}

static void leave_set(Index *x, uint32_t id) {
    if (id < FIRST_SET || id == NONE) return;
    uint32_t at = id - FIRST_SET;
    HolderSet *set = &x->sets[at];
    if (--set->refs) return;
    uint32_t *link = &x->buckets[set->print & (x->num_buckets - 1)];
    while (*link != at) link = &x->sets[*link].next;
    *link = set->next;
    size_t apart = payload_bytes(set->count, set->tiers, set->width);
    if (apart) {
        free(set->tiers ? (void *)set->at.bits : (void *)set->at.list);
        x->bytes -= charge(apart);
    }
    set->count = 0;
    set->next = x->free_set;
    x->free_set = at;
    x->num_sets--;
}

static inline uint64_t print_of(const Index *x, uint32_t id) {
    return id < FIRST_SET ? mix(id) : x->sets[id - FIRST_SET].print;
}

/* The bitmap with one bit changed, if that fits and the result is a bitmap of the same shape. */
static bool flip_in_place(const HolderSet *set, uint32_t holder, bool adding) {
    if (!set->tiers) return false;
    uint32_t tier = tier_of(holder), word = slot_of(holder) / 64, tiers = set->tiers, width = set->width;
    if (tier >= tiers || word >= width) return false;
    memcpy(scratch_bits, bits_of(set), (size_t)tiers * width * 8);
    scratch_bits[tier * width + word] ^= (uint64_t)1 << (slot_of(holder) & 63);
    if (adding) return true;
    if (!better_as_bits(set->count - 1u, tiers, width)) return false;
    uint64_t last_row = 0, last_column = 0;
    for (uint32_t i = 0; i < width; i++) last_row |= scratch_bits[(tiers - 1) * width + i];
    for (uint32_t i = 0; i < tiers; i++) last_column |= scratch_bits[i * width + width - 1];
    return last_row && last_column;
}

/* The set with one holder added or removed; NONE without memory. Not for the last holder of a set. */
static uint32_t changed(Index *x, uint32_t id, uint32_t holder, bool adding) {
    uint64_t print = print_of(x, id) ^ mix(holder);
    if (id >= FIRST_SET) {
        const HolderSet *set = &x->sets[id - FIRST_SET];
        if (flip_in_place(set, holder, adding))
            return intern(x, print, adding ? set->count + 1u : set->count - 1u, set->tiers, set->width);
    }
    uint32_t count = unpack(x, id), at = 0;
    while (at < count && scratch_list[at] < holder) at++;
    if (adding) {
        memmove(&scratch_list[at + 1], &scratch_list[at], (count - at) * sizeof(uint16_t));
        scratch_list[at] = (uint16_t)holder;
        count++;
    } else {
        for (uint32_t i = at + 1; i < count; i++) scratch_list[i - 1] = scratch_list[i];
        count--;
    }
    if (count == 1) return scratch_list[0];
    uint32_t tiers = tier_of(scratch_list[count - 1]) + 1, highest = 0;
    for (uint32_t i = 0; i < count; i++)
        if (slot_of(scratch_list[i]) > highest) highest = slot_of(scratch_list[i]);
    uint32_t width = highest / 64 + 1;
    if (!better_as_bits(count, tiers, width)) return intern(x, print, count, 0, 0);
    memset(scratch_bits, 0, (size_t)tiers * width * 8);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = slot_of(scratch_list[i]);
        scratch_bits[tier_of(scratch_list[i]) * width + slot / 64] |= (uint64_t)1 << (slot & 63);
    }
    return intern(x, print, count, tiers, width);
}

/* ---- blocks ---- */

/* Use times of the blocks of one call: deeper blocks are older, so that they are evicted first. */
typedef struct {
    uint32_t first;
    uint64_t step; /* ticks per block, in 2^-32 */
} Uses;

static Uses tick(Index *x, size_t n) {
    uint64_t span = n < USED_SPAN ? n : USED_SPAN;
    x->clock += (uint32_t)span;
    return (Uses){x->clock, n ? (span << 32) / n : 0};
}
static inline uint32_t used_at(Uses uses, size_t depth) { return uses.first - (uint32_t)((depth * uses.step) >> 32); }

static uint32_t add_block(Index *x, uint64_t hash, uint32_t holder) {
    uint32_t id = x->free_block;
    if (id != NONE) x->free_block = x->blocks[id].used;
    else id = x->blocks_len++;
    x->blocks[id] = (Block){hash, holder, 0};
    table_insert(x, tag_of(x, hash), id);
    x->num_blocks++;
    return id;
}

static void free_block(Index *x, uint32_t id) {
    Block *block = &x->blocks[id];
    table_delete(x, block->hash);
    leave_set(x, block->set);
    block->set = FREE;
    block->used = x->free_block;
    x->free_block = id;
    x->num_blocks--;
}

static void evict_block(Index *x, uint32_t id) {
    uint32_t count = unpack(x, x->blocks[id].set);
    uint64_t mixed = mix(x->blocks[id].hash);
    for (uint32_t i = 0; i < count; i++) {
        Held *held = &x->workers[slot_of(scratch_list[i])].held[tier_of(scratch_list[i])];
        held->count--;
        held->digest ^= mixed;
        held->evicted++;
    }
    x->num_pairs -= count;
    x->moves++;
    free_block(x, id);
}

static int by_age(const void *left, const void *right) {
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a < b) - (a > b);
}

/* Samples ages: one block of sixteen counts as old. */
static void sample_ages(Index *x) {
    uint32_t ages[SAMPLE], n = 0;
    for (uint32_t tries = 0; tries < 4 * SAMPLE && n < SAMPLE; tries++) {
        x->random = mix(x->random);
        const Block *block = &x->blocks[((x->random >> 32) * x->blocks_len) >> 32];
        if (block->set != FREE) ages[n++] = x->clock - block->used;
    }
    if (n) qsort(ages, n, sizeof(uint32_t), by_age);
    x->old_limit = x->clock - (n ? ages[n / 16] : 0);
    x->until_sample = x->num_blocks / 32 + 1;
}

/* Requires at least one block. */
static void evict_one(Index *x) {
    if (!x->until_sample) sample_ages(x);
    x->until_sample--;
    for (uint64_t steps = 0;; steps++) { /* downwards: among equal ages later blocks are deeper */
        x->hand = (x->hand && x->hand <= x->blocks_len ? x->hand : x->blocks_len) - 1;
        if (steps == x->blocks_len) sample_ages(x); /* a full round without old blocks */
        const Block *block = &x->blocks[x->hand];
        if (block->set == FREE) continue;
        bool is_old = (int32_t)(block->used - x->old_limit) <= 0;
        if (is_old || steps > 2 * (uint64_t)x->blocks_len) break;
    }
    evict_block(x, x->hand);
}

/* ---- lists of workers ---- */

/* Removes stale and duplicate ids. */
static void sweep(Index *x, Held *held, uint32_t holder) {
    uint32_t len = 0;
    for (uint32_t i = 0; i < held->len; i++) {
        if (i + 16 < held->len) __builtin_prefetch(&x->blocks[held->ids[i + 16]], 1);
        Block *block = &x->blocks[held->ids[i]];
        if (block->set == FREE || block->set & MARK || !holds(x, block->set, holder)) continue;
        block->set |= MARK;
        held->ids[len++] = held->ids[i];
    }
    for (uint32_t i = 0; i < len; i++) x->blocks[held->ids[i]].set &= ~MARK;
    held->len = len;
}

static bool resize_ids(Index *x, Held *held, uint32_t cap) {
    uint32_t *ids = cap ? realloc(held->ids, (size_t)cap * sizeof(uint32_t)) : NULL;
    if (cap && !ids) return false;
    if (!cap) free(held->ids);
    x->bytes += charge((size_t)cap * sizeof(uint32_t));
    x->bytes -= charge((size_t)held->cap * sizeof(uint32_t));
    x->ids_cap += cap;
    x->ids_cap -= held->cap;
    held->ids = ids;
    held->cap = cap;
    return true;
}

/* Sweeps a list and shrinks it. */
static void trim(Index *x, Held *held, uint32_t holder) {
    sweep(x, held, holder);
    uint32_t cap = held->len + held->len / 8;
    if (cap < held->cap) resize_ids(x, held, cap);
}

static inline void trim_if_sparse(Index *x, Held *held, uint32_t holder) {
    if (held->len > 64 && held->count < held->len / 4) trim(x, held, holder);
}

/* ---- memory ---- */

/* Evicts blocks until they fit into `cap` entries, compacts them and frees the rest. */
static bool cut_blocks(Index *x, uint32_t cap) {
    x->moves++;
    while (x->num_blocks > cap) evict_one(x);
    uint32_t beyond = x->blocks_len > cap ? x->blocks_len - cap : 0;
    uint32_t *forward = beyond ? malloc(beyond * sizeof(uint32_t)) : NULL;
    if (beyond && !forward) return false;
    for (uint32_t i = 0, low = 0; i < beyond; i++) {
        Block *block = &x->blocks[cap + i];
        forward[i] = NONE;
        if (block->set == FREE) continue;
        while (x->blocks[low].set != FREE) low++;
        uint32_t tag = tag_of(x, block->hash);
        x->table[place_of(x, block->hash, tag)] = (uint64_t)tag << 32 | (low + 1);
        x->blocks[low] = *block;
        forward[i] = low;
    }
    for (uint32_t slot = 0; beyond && slot < x->num_slots; slot++)
        for (uint32_t tier = 0; tier < NUM_TIERS; tier++) {
            Held *held = &x->workers[slot].held[tier];
            uint32_t len = 0;
            for (uint32_t i = 0; i < held->len; i++) {
                uint32_t id = held->ids[i] < cap ? held->ids[i] : forward[held->ids[i] - cap];
                if (id != NONE) held->ids[len++] = id;
            }
            held->len = len;
        }
    free(forward);
    if (beyond) x->blocks_len = cap;
    x->free_block = NONE;
    for (uint32_t id = x->blocks_len; id-- > 0;)
        if (x->blocks[id].set == FREE) {
            x->blocks[id].used = x->free_block;
            x->free_block = id;
        }
    Block *blocks = realloc(x->blocks, (size_t)cap * sizeof(Block));
    if (!blocks) return false;
    x->bytes -= (size_t)(x->blocks_cap - cap) * sizeof(Block);
    x->blocks = blocks;
    x->blocks_cap = cap;
    return true;
}

/* Unused memory of the workers' lists. */
static size_t idle_bytes(const Index *x) {
    return x->ids_cap > x->num_pairs ? (x->ids_cap - x->num_pairs) * sizeof(uint32_t) : 0;
}

/* Frees some memory, evicting the oldest blocks if needed; false if almost nothing is left to free. */
static bool free_memory(Index *x) {
    size_t idle = idle_bytes(x);
    if (idle > x->max_bytes / 8) {
        for (uint32_t slot = 0; slot < x->num_slots; slot++)
            for (uint32_t tier = 0; tier < NUM_TIERS; tier++) {
                Held *held = &x->workers[slot].held[tier];
                if (held->cap > held->count + held->count / 8 + LEAST_IDS) trim(x, held, make_holder(slot, tier));
            }
        if (idle_bytes(x) < idle) return true;
    }
    if (x->blocks_cap <= LEAST_BLOCKS) {
        if (!x->num_blocks) return false;
        evict_one(x); /* its set may have been large */
        return true;
    }
    uint32_t cap = x->blocks_cap - x->blocks_cap / 8;
    return cut_blocks(x, cap < LEAST_BLOCKS ? LEAST_BLOCKS : cap);
}

static bool reserve(Index *x, size_t more) {
    while (x->bytes + more > x->max_bytes)
        if (!free_memory(x)) return false;
    return true;
}

/* Grows the block array if the limit allows that and leaves a sixteenth for lists and sets. */
static bool grow_blocks(Index *x) {
    size_t limit = x->max_bytes - x->max_bytes / 16;
    for (uint32_t part = 2; part <= 8; part *= 2) {
        uint64_t cap = (uint64_t)x->blocks_cap + x->blocks_cap / part;
        if (cap < LEAST_BLOCKS) cap = LEAST_BLOCKS;
        if (cap >= FREE - FIRST_SET) return false;
        uint64_t table_cap = cap + cap / 3 + 8;
        bool grows_table = table_cap > x->table_cap;
        size_t more = (size_t)(cap - x->blocks_cap) * sizeof(Block) + (grows_table ? table_cap * 8 : 0);
        if (x->bytes + more > limit) continue; /* the old table lives until the new one is filled */
        if (grows_table) {
            uint64_t *old = x->table, *table = calloc(table_cap, 8);
            uint32_t old_cap = x->table_cap;
            if (!table) return false;
            x->table = table;
            x->table_cap = (uint32_t)table_cap;
            for (uint32_t i = 0; i < old_cap; i++)
                if ((uint32_t)old[i]) table_insert(x, (uint32_t)(old[i] >> 32), (uint32_t)old[i] - 1);
            free(old);
            x->bytes += (table_cap - old_cap) * 8;
        }
        Block *blocks = realloc(x->blocks, cap * sizeof(Block));
        if (!blocks) return false;
        x->bytes += (cap - x->blocks_cap) * sizeof(Block);
        x->blocks = blocks;
        x->blocks_cap = (uint32_t)cap;
        return true;
    }
    return false;
}

static bool grow_sets(Index *x) {
    uint32_t cap = x->sets_cap + x->sets_cap / 2;
    if (cap < LEAST_SETS) cap = LEAST_SETS;
    if (cap >= FREE - FIRST_SET || !reserve(x, (size_t)(cap - x->sets_cap) * sizeof(HolderSet))) return false;
    if (x->free_set != NONE) return true; /* reserve() has freed sets */
    HolderSet *sets = realloc(x->sets, (size_t)cap * sizeof(HolderSet));
    if (!sets) {
        x->out_of_memory = true;
        return false;
    }
    x->bytes += (size_t)(cap - x->sets_cap) * sizeof(HolderSet);
    x->sets = sets;
    x->sets_cap = cap;
    return true;
}

/* Keeps chains short. May fail without harm. */
static void grow_buckets(Index *x) {
    uint32_t num = x->num_buckets * 2;
    if (x->bytes + (size_t)num * 4 > x->max_bytes) return;
    uint32_t *buckets = malloc((size_t)num * sizeof(uint32_t));
    if (!buckets) return;
    memset(buckets, 0xff, (size_t)num * sizeof(uint32_t));
    for (uint32_t at = 0; at < x->sets_len; at++)
        if (x->sets[at].count) {
            uint32_t *bucket = &buckets[x->sets[at].print & (num - 1)];
            x->sets[at].next = *bucket;
            *bucket = at;
        }
    free(x->buckets);
    x->bytes += (size_t)(num - x->num_buckets) * sizeof(uint32_t);
    x->buckets = buckets;
    x->num_buckets = num;
}

static bool grow_ids(Index *x, Held *held, uint32_t holder) {
    if (held->count < held->len - held->len / 4) {
        sweep(x, held, holder);
        return true;
    }
    uint32_t more = held->cap / 2;
    if (x->bytes + (size_t)more * sizeof(uint32_t) > x->max_bytes) more = held->cap / 8;
    if (more < LEAST_IDS) more = LEAST_IDS;
    if (!reserve(x, charge((size_t)more * sizeof(uint32_t)))) return false;
    if (held->len < held->cap) return true;
    if (resize_ids(x, held, held->cap + more)) return true;
    x->out_of_memory = true;
    return false;
}

static inline bool has_set_room(const Index *x) {
    return (x->free_set != NONE || x->sets_len < x->sets_cap) && x->bytes + x->payload_bound <= x->max_bytes;
}
static inline bool has_block_room(const Index *x) {
    return x->free_block != NONE || x->blocks_len < x->blocks_cap;
}

/* Makes room for one more set. */
static bool make_set_room(Index *x) {
    if (x->num_sets > x->num_buckets) grow_buckets(x);
    while (!has_set_room(x)) {
        if (x->free_set == NONE && x->sets_len == x->sets_cap && !grow_sets(x)) return false;
        if (!reserve(x, x->payload_bound)) return false;
    }
    return true;
}

/* Makes room for one more block, holder and set. May evict and renumber blocks. */
static bool make_room(Index *x, Held *held, uint32_t holder) {
    while (!(has_block_room(x) && held->len < held->cap && has_set_room(x))) {
        if (held->len == held->cap && !grow_ids(x, held, holder)) return false;
        if (!has_set_room(x) && !make_set_room(x)) return false;
        if (!has_block_room(x) && !grow_blocks(x)) {
            if (!x->num_blocks) return false;
            evict_one(x);
        }
    }
    return true;
}

/* ---- changes ---- */

/* The last set change: reused for the next block with the same set. */
typedef struct {
    uint32_t from, to;
} Memo;

static void memo_set(Index *x, Memo *memo, uint32_t from, uint32_t to) {
    keep_set(x, from);
    keep_set(x, to);
    leave_set(x, memo->from);
    leave_set(x, memo->to);
    *memo = (Memo){from, to};
}

static void move_block(Index *x, Block *block, uint32_t to) {
    uint32_t from = block->set;
    keep_set(x, to);
    block->set = to;
    leave_set(x, from);
}

static void gain(Index *x, Held *held, uint32_t id) {
    held->ids[held->len++] = id;
    held->count++;
    held->digest ^= mix(x->blocks[id].hash);
    x->num_pairs++;
}

/* Returns false without memory. */
static bool store_one(Index *x, uint64_t hash, uint32_t id, Held *held, uint32_t holder, Memo *memo, uint32_t used) {
    uint32_t set = id == NONE ? NONE : x->blocks[id].set;
    if (id == NONE || (set != memo->to && !holds(x, set, holder))) {
        uint64_t moves = x->moves;
        if (x->num_sets > x->num_buckets) grow_buckets(x);
        if (!(has_block_room(x) && held->len < held->cap && has_set_room(x)) && !make_room(x, held, holder)) {
            held->evicted++;
            return !x->out_of_memory;
        }
        if (x->moves != moves) id = look_up(x, hash);
        if (id == NONE) {
            id = add_block(x, hash, holder);
        } else {
            set = x->blocks[id].set;
            if (set != memo->from) {
                uint32_t to = changed(x, set, holder, true);
                if (to == NONE) return false;
                memo_set(x, memo, set, to);
            }
            move_block(x, &x->blocks[id], memo->to);
        }
        gain(x, held, id);
    }
    x->blocks[id].used = used;
    return true;
}

/* Removes a holder from a block. The id stays in the list. */
static void drop_one(Index *x, uint32_t id, Held *held, uint32_t holder, Memo *memo) {
    uint64_t hash = x->blocks[id].hash;
    uint32_t set = x->blocks[id].set;
    if (set >= FIRST_SET && set != memo->from) {
        uint64_t moves = x->moves;
        uint32_t to = NONE;
        bool has_room = make_set_room(x);
        if (x->moves != moves) {
            id = look_up(x, hash);
            if (id == NONE) return;
        }
        if (has_room) to = changed(x, set, holder, false);
        if (to == NONE) { /* without memory for the new set: forget all holders rather than keep a wrong one */
            evict_block(x, id);
            return;
        }
        memo_set(x, memo, set, to);
    }
    held->count--;
    held->digest ^= mix(hash);
    x->num_pairs--;
    if (set < FIRST_SET) free_block(x, id);
    else move_block(x, &x->blocks[id], memo->to);
}

static void clear_tier(Index *x, uint32_t slot, uint32_t tier) {
    Held *held = &x->workers[slot].held[tier];
    uint32_t holder = make_holder(slot, tier);
    Memo memo = {NONE, NONE};
    while (held->len) { /* from the end: freeing memory may sweep the list but keeps its order */
        uint32_t id = held->ids[--held->len];
        if (held->len >= 16) __builtin_prefetch(&x->blocks[held->ids[held->len - 16]], 1);
        uint32_t set = x->blocks[id].set;
        if (set != FREE && holds(x, set, holder)) drop_one(x, id, held, holder, &memo);
    }
    memo_set(x, &memo, NONE, NONE);
    resize_ids(x, held, 0);
    held->evicted = 0;
}

/* ---- find ---- */

typedef struct {
    uint64_t alive[MAX_WORDS];
} Row;

/* Ends the matches of holders outside this set, in tiers up to `level`; false if no holder is left. */
static bool narrow(const Index *x, Row *row, uint32_t words, uint32_t id, uint32_t level, int32_t depth,
                   int32_t *depths) {
    uint64_t mask[MAX_WORDS];
    const HolderSet *set = id < FIRST_SET ? NULL : &x->sets[id - FIRST_SET];
    if (set && set->tiers) {
        uint32_t rows = set->tiers <= level + 1 ? set->tiers : level + 1, width = set->width < words ? set->width : words;
        const uint64_t *bits = bits_of(set);
        memcpy(mask, bits, width * 8);
        for (uint32_t tier = 1; tier < rows; tier++)
            for (uint32_t i = 0; i < width; i++) mask[i] |= bits[tier * set->width + i];
        memset(mask + width, 0, (words - width) * 8);
    } else {
        uint16_t single = (uint16_t)id;
        const uint16_t *list = set ? list_of(set) : &single;
        memset(mask, 0, words * 8);
        for (uint32_t i = 0, n = set ? set->count : 1; i < n; i++)
            if (tier_of(list[i]) <= level) mask[slot_of(list[i]) / 64] |= (uint64_t)1 << (slot_of(list[i]) & 63);
    }
    uint64_t any = 0;
    for (uint32_t word = 0; word < words; word++) {
        uint64_t gone = row->alive[word] & ~mask[word];
        row->alive[word] &= mask[word];
        any |= row->alive[word];
        if (depth)
            for (; gone; gone &= gone - 1) depths[word * 64 + (uint32_t)__builtin_ctzll(gone)] = depth;
    }
    return any != 0;
}

/* Writes match lengths to `depths`, zeroed, levels x slots. */
static void walk(Index *x, const uint64_t *hashes, size_t n, uint32_t num_levels, int32_t *depths) {
    Row rows[NUM_TIERS];
    bool is_alive[NUM_TIERS];
    uint32_t words = (x->num_slots + 63) / 64, last_set = NONE, num_alive = num_levels, ids[CHUNK];
    size_t depth = 0;
    if (!x->num_blocks || !n) return;
    for (uint32_t level = 0; level < num_levels; level++) {
        memset(rows[level].alive, 0xff, words * 8);
        is_alive[level] = true;
    }
    Uses uses = tick(x, n);
    for (uint32_t chunk = 8; depth < n && num_alive; chunk = chunk < CHUNK ? chunk * 2 : CHUNK) {
        uint32_t want = n - depth < chunk ? (uint32_t)(n - depth) : chunk;
        uint32_t got = look_up_chunk(x, hashes + depth, want, ids, true), i = 0;
        for (; i < got; i++) {
            Block *block = &x->blocks[ids[i]];
            if (block->set != last_set) {
                last_set = block->set;
                for (uint32_t level = 0; level < num_levels; level++)
                    if (is_alive[level] &&
                        !narrow(x, &rows[level], words, last_set, level, (int32_t)(depth + i),
                                depths + level * x->num_slots)) {
                        is_alive[level] = false;
                        num_alive--;
                    }
                if (!num_alive) break;
            }
            block->used = used_at(uses, depth + i);
        }
        depth += i;
        if (i < want) break;
    }
    for (uint32_t level = 0; level < num_levels && depth; level++)
        if (is_alive[level])
            for (uint32_t word = 0; word < words; word++)
                for (uint64_t left = rows[level].alive[word]; left; left &= left - 1)
                    depths[level * x->num_slots + word * 64 + (uint32_t)__builtin_ctzll(left)] = (int32_t)depth;
}

/* ---- Python ---- */

typedef struct {
    uint64_t small[512];
    uint64_t *hashes;
    Py_ssize_t len;
} Names;

static void names_free(Names *names) {
    if (names->hashes != names->small) free(names->hashes);
}

static bool names_alloc(Names *names, Py_ssize_t len) {
    names->len = len;
    names->hashes = names->small;
    if (len > (Py_ssize_t)(sizeof names->small / sizeof names->small[0])) {
        names->hashes = malloc((size_t)len * sizeof(uint64_t));
        if (!names->hashes) {
            PyErr_NoMemory();
            return false;
        }
    }
    return true;
}

static bool names_from_bytes(Names *names, const void *bytes, Py_ssize_t len) {
    if (len % 8) {
        PyErr_SetString(PyExc_ValueError, "hashes have eight bytes each");
        return false;
    }
    if (!names_alloc(names, len / 8)) return false;
    memcpy(names->hashes, bytes, (size_t)len);
    return true;
}

/* Hashes from an array of unsigned 64-bit integers: 1 done, 0 another type, -1 error. */
static int names_from_array(Names *names, PyObject *object) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    const char *format = view.format ? view.format : "B";
    if (*format == '<' || *format == '=' || *format == '@') format++;
    int done = 0;
    if (view.itemsize == 8 && view.ndim == 1 && (!strcmp(format, "Q") || !strcmp(format, "L")))
        done = names_from_bytes(names, view.buf, view.len) ? 1 : -1;
    PyBuffer_Release(&view);
    return done;
}

/* An int as an unsigned 64-bit integer; -1 may be an error. The interpreter's function takes 20 to 30 ns for numbers of
   more than one digit, most of a find, so the digits are read directly where their layout is known. */
static inline uint64_t u64_from_int(PyObject *number) {
#if PyLong_SHIFT == 30 && PY_VERSION_HEX < 0x030F0000
#if PY_VERSION_HEX >= 0x030C0000
    const PyLongObject *is = (const PyLongObject *)number;
    const digit *digits = is->long_value.ob_digit;
    uintptr_t size = (is->long_value.lv_tag & 3) == 2 ? 0 : is->long_value.lv_tag >> 3;
#else
    const digit *digits = ((const PyLongObject *)number)->ob_digit;
    Py_ssize_t size = Py_SIZE(number);
#endif
    if (size == 3 && digits[2] < 16) return digits[0] | (uint64_t)digits[1] << 30 | (uint64_t)digits[2] << 60;
    if (size == 2) return digits[0] | (uint64_t)digits[1] << 30;
#endif
    return PyLong_AsUnsignedLongLong(number);
}

/* Hashes from a tuple or list of exact ints, without running Python code: 1 done, 0 another type, -1 error. */
static int names_from_ints(Names *names, PyObject *object) {
    PyObject **items = PySequence_Fast_ITEMS(object);
    if (!names_alloc(names, PySequence_Fast_GET_SIZE(object))) return -1;
    for (Py_ssize_t i = 0; i < names->len; i++) {
        bool is_int = PyLong_CheckExact(items[i]);
        if (is_int) names->hashes[i] = u64_from_int(items[i]);
        if (!is_int || (names->hashes[i] == (uint64_t)-1 && PyErr_Occurred())) {
            names_free(names);
            return is_int ? -1 : 0;
        }
    }
    return 1;
}

/* May run Python code for items that are not exact ints: hold no pointer into the index across this call. */
static bool names_from(Names *names, PyObject *object) {
    if (PyBytes_Check(object)) return names_from_bytes(names, PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object));
    if (PyByteArray_Check(object))
        return names_from_bytes(names, PyByteArray_AS_STRING(object), PyByteArray_GET_SIZE(object));
    if (PyUnicode_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "hashes are integers, not text");
        return false;
    }
    if (!PyTuple_Check(object) && !PyList_Check(object) && PyObject_CheckBuffer(object)) {
        int done = names_from_array(names, object);
        if (done) return done > 0;
    }
    if ((PyTuple_CheckExact(object) || PyList_CheckExact(object)) && PySequence_Fast_GET_SIZE(object)) {
        int done = names_from_ints(names, object);
        if (done) return done > 0;
    }
    PyObject *items = PySequence_Tuple(object); /* copies a list, which could change during conversion */
    if (!items) return false;
    if (!names_alloc(names, PyTuple_GET_SIZE(items))) {
        Py_DECREF(items);
        return false;
    }
    for (Py_ssize_t i = 0; i < names->len; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (PyLong_CheckExact(item)) {
            names->hashes[i] = u64_from_int(item);
        } else {
            PyObject *number = PyNumber_Index(item);
            names->hashes[i] = number ? PyLong_AsUnsignedLongLong(number) : (uint64_t)-1;
            Py_XDECREF(number);
        }
        if (names->hashes[i] == (uint64_t)-1 && PyErr_Occurred()) {
            Py_DECREF(items);
            names_free(names);
            return false;
        }
    }
    Py_DECREF(items);
    return true;
}

/* Returns -1 with an error set. */
static Py_ssize_t tier_from(PyObject *object) {
    if (!object) return 0;
    Py_ssize_t tier = PyNumber_AsSsize_t(object, PyExc_ValueError);
    if (tier == -1 && PyErr_Occurred()) return -1;
    if (tier < 0 || tier >= NUM_TIERS) {
        PyErr_Format(PyExc_ValueError, "there is no tier %zd: they are 0 to %d", tier, NUM_TIERS - 1);
        return -1;
    }
    return tier;
}

static Py_ssize_t number_from(PyObject *object) {
    Py_ssize_t slot = PyNumber_AsSsize_t(object, PyExc_IndexError);
    return slot == -1 && PyErr_Occurred() ? -1 : slot < 0 ? PY_SSIZE_T_MAX : slot;
}

static bool check_slot(const Index *x, Py_ssize_t slot) {
    if (slot < (Py_ssize_t)x->num_slots && x->workers[slot].is_there) return true;
    if (slot == PY_SSIZE_T_MAX) PyErr_SetString(PyExc_IndexError, "slots are counted from 0");
    else PyErr_Format(PyExc_IndexError, "no worker has slot %zd", slot);
    return false;
}

/* Parses slot and tier of a call without other arguments. */
static Held *held_from(Index *x, PyObject *args, PyObject *kwargs, const char *format) {
    static char *names[] = {"slot", "tier", NULL};
    PyObject *slot_object, *tier_object = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &slot_object, &tier_object)) return NULL;
    Py_ssize_t slot = number_from(slot_object), tier = slot < 0 ? -1 : tier_from(tier_object);
    if (tier < 0 || !check_slot(x, slot)) return NULL;
    return &x->workers[slot].held[tier];
}

/* Parses the arguments of store and remove. PyArg_Parse would cost as much as a few blocks. */
static bool change_from(PyObject *const *args, Py_ssize_t num_args, PyObject *kwnames, Py_ssize_t *slot, Names *names,
                        Py_ssize_t *tier) {
    static const char *const words[] = {"slot", "hashes", "tier"};
    PyObject *given[3] = {NULL, NULL, NULL};
    Py_ssize_t num_named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    if (num_args > 3) {
        PyErr_SetString(PyExc_TypeError, "arguments are slot, hashes and tier");
        return false;
    }
    for (Py_ssize_t i = 0; i < num_args; i++) given[i] = args[i];
    for (Py_ssize_t i = 0; i < num_named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        int at = 0;
        while (at < 3 && PyUnicode_CompareWithASCIIString(name, words[at])) at++;
        if (at == 3 || given[at]) {
            PyErr_Format(PyExc_TypeError, "argument %R is unknown or given twice", name);
            return false;
        }
        given[at] = args[num_args + i];
    }
    if (!given[0] || !given[1]) {
        PyErr_SetString(PyExc_TypeError, "slot and hashes are needed");
        return false;
    }
    *slot = number_from(given[0]);
    if (*slot < 0) return false;
    *tier = tier_from(given[2]);
    return *tier >= 0 && names_from(names, given[1]);
}

static PyObject *index_store(Index *x, PyObject *const *args, Py_ssize_t num_args, PyObject *kwnames) {
    Names names;
    Py_ssize_t slot, tier;
    if (!change_from(args, num_args, kwnames, &slot, &names, &tier)) return NULL;
    bool done = check_slot(x, slot);
    if (done) {
        Held *held = &x->workers[slot].held[tier];
        uint32_t holder = make_holder((uint32_t)slot, (uint32_t)tier), ids[CHUNK];
        Memo memo = {NONE, NONE};
        Uses uses = tick(x, (size_t)names.len);
        for (Py_ssize_t start = 0; done && start < names.len; start += CHUNK) {
            uint32_t n = names.len - start < CHUNK ? (uint32_t)(names.len - start) : CHUNK;
            uint64_t moves = x->moves;
            if (x->num_blocks) look_up_chunk(x, names.hashes + start, n, ids, false);
            else memset(ids, 0xff, sizeof ids);
            for (uint32_t i = 0; done && i < n; i++) {
                uint64_t hash = names.hashes[start + i];
                /* A missing block may have been stored earlier in this chunk. */
                uint32_t id = ids[i] != NONE && x->moves == moves ? ids[i] : look_up(x, hash);
                done = store_one(x, hash, id, held, holder, &memo, used_at(uses, (size_t)start + i));
            }
        }
        memo_set(x, &memo, NONE, NONE);
        if (!done) {
            x->out_of_memory = false;
            PyErr_NoMemory();
        }
    }
    names_free(&names);
    if (!done) return NULL;
    Py_RETURN_NONE;
}

static PyObject *index_remove(Index *x, PyObject *const *args, Py_ssize_t num_args, PyObject *kwnames) {
    Names names;
    Py_ssize_t slot, tier;
    if (!change_from(args, num_args, kwnames, &slot, &names, &tier)) return NULL;
    bool done = check_slot(x, slot);
    if (done && x->num_blocks) {
        Held *held = &x->workers[slot].held[tier];
        uint32_t holder = make_holder((uint32_t)slot, (uint32_t)tier), ids[CHUNK];
        Memo memo = {NONE, NONE};
        for (Py_ssize_t start = 0; start < names.len; start += CHUNK) {
            uint32_t n = names.len - start < CHUNK ? (uint32_t)(names.len - start) : CHUNK;
            look_up_chunk(x, names.hashes + start, n, ids, false);
            for (uint32_t i = 0; i < n; i++) {
                if (ids[i] == NONE) continue;
                uint32_t id = look_up(x, names.hashes[start + i]); /* it may have been evicted or renumbered */
                if (id != NONE && holds(x, x->blocks[id].set, holder)) drop_one(x, id, held, holder, &memo);
            }
            trim_if_sparse(x, held, holder);
        }
        memo_set(x, &memo, NONE, NONE);
        x->out_of_memory = false;
    }
    names_free(&names);
    if (!done) return NULL;
    Py_RETURN_NONE;
}

static PyObject *index_clear(Index *x, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"slot", "tier", NULL};
    PyObject *slot_object, *tier_object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:clear", names, &slot_object, &tier_object)) return NULL;
    Py_ssize_t slot = number_from(slot_object), tier = tier_object == Py_None ? 0 : tier_from(tier_object);
    if (PyErr_Occurred() || !check_slot(x, slot)) return NULL;
    if (tier_object != Py_None) clear_tier(x, (uint32_t)slot, (uint32_t)tier);
    else
        for (uint32_t each = 0; each < NUM_TIERS; each++) clear_tier(x, (uint32_t)slot, each);
    x->out_of_memory = false;
    Py_RETURN_NONE;
}

static PyObject *index_add_worker(Index *x, PyObject *Py_UNUSED(none)) {
    uint32_t slot = 0;
    while (slot < x->num_slots && x->workers[slot].is_there) slot++;
    if (slot == MAX_SLOTS) return PyErr_Format(PyExc_ValueError, "an index has room for %d workers", MAX_SLOTS);
    if (slot == x->slots_cap) {
        uint32_t cap = x->slots_cap ? x->slots_cap * 2 : 16;
        Worker *workers = realloc(x->workers, cap * sizeof(Worker));
        if (!workers) return PyErr_NoMemory();
        memset(workers + x->slots_cap, 0, (cap - x->slots_cap) * sizeof(Worker));
        x->bytes += (cap - x->slots_cap) * sizeof(Worker);
        x->workers = workers;
        x->slots_cap = cap;
    }
    if (slot == x->num_slots) {
        x->num_slots++;
        x->payload_bound = charge((size_t)NUM_TIERS * ((x->num_slots + 63) / 64) * 8);
    }
    x->workers[slot].is_there = true;
    reserve(x, 0);
    return PyLong_FromUnsignedLong(slot);
}

static PyObject *index_remove_worker(Index *x, PyObject *object) {
    Py_ssize_t slot = number_from(object);
    if (slot < 0 || !check_slot(x, slot)) return NULL;
    for (uint32_t tier = 0; tier < NUM_TIERS; tier++) clear_tier(x, (uint32_t)slot, tier);
    x->workers[slot].is_there = false;
    x->out_of_memory = false;
    Py_RETURN_NONE;
}

/* A numpy array, created through numpy's Python interface to avoid its headers. */
static PyObject *array_of(const int32_t *numbers, size_t slots, uint32_t num_levels) {
    PyObject *shape = num_levels == 1 ? PyLong_FromSize_t(slots)
                                      : Py_BuildValue("(nn)", (Py_ssize_t)num_levels, (Py_ssize_t)slots);
    if (!shape) return NULL;
    PyObject *args[] = {shape, int32_dtype};
    PyObject *array = PyObject_Vectorcall(numpy_empty, args, 2, NULL);
    Py_DECREF(shape);
    Py_buffer view;
    if (!array || PyObject_GetBuffer(array, &view, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(array);
        return NULL;
    }
    memcpy(view.buf, numbers, (size_t)view.len);
    PyBuffer_Release(&view);
    return array;
}

static PyObject *find_levels(Index *x, PyObject *hashes, uint32_t num_levels) {
    Names names;
    int32_t small[1024], *found = small;
    if (!names_from(&names, hashes)) return NULL;
    size_t slots = x->num_slots, len = slots * num_levels;
    if (len > sizeof small / sizeof small[0]) found = malloc(len * sizeof(int32_t));
    if (!found) {
        names_free(&names);
        return PyErr_NoMemory();
    }
    memset(found, 0, len * sizeof(int32_t));
    walk(x, names.hashes, (size_t)names.len, num_levels, found);
    names_free(&names);
    PyObject *array = array_of(found, slots, num_levels);
    if (found != small) free(found);
    return array;
}

static PyObject *index_find(Index *x, PyObject *hashes) { return find_levels(x, hashes, 1); }
static PyObject *index_find_tiers(Index *x, PyObject *hashes) { return find_levels(x, hashes, NUM_TIERS); }
static PyObject *index_find_local_tiers(Index *x, PyObject *hashes) { return find_levels(x, hashes, OWN_TIERS); }

static PyObject *index_digest(Index *x, PyObject *args, PyObject *kwargs) {
    Held *held = held_from(x, args, kwargs, "O|O:digest");
    return held ? Py_BuildValue("(kK)", (unsigned long)held->count, (unsigned long long)held->digest) : NULL;
}

static PyObject *index_num_evicted(Index *x, PyObject *args, PyObject *kwargs) {
    Held *held = held_from(x, args, kwargs, "O|O:num_evicted");
    return held ? PyLong_FromUnsignedLongLong(held->evicted) : NULL;
}

static PyObject *index_contents(Index *x, PyObject *args, PyObject *kwargs) {
    Held *held = held_from(x, args, kwargs, "O|O:contents");
    if (!held) return NULL;
    uint32_t place = (uint32_t)((char *)held - (char *)x->workers) / sizeof(Worker);
    sweep(x, held, make_holder(place, (uint32_t)(held - x->workers[place].held)));
    uint32_t count = held->len;
    uint64_t *hashes = malloc((size_t)count * sizeof(uint64_t) + 1); /* creating a list may run GC: copy first */
    if (!hashes) return PyErr_NoMemory();
    for (uint32_t i = 0; i < count; i++) hashes[i] = x->blocks[held->ids[i]].hash;
    PyObject *contents = PyList_New(count);
    for (uint32_t i = 0; contents && i < count; i++) {
        PyObject *hash = PyLong_FromUnsignedLongLong(hashes[i]);
        if (hash) PyList_SET_ITEM(contents, i, hash);
        else Py_CLEAR(contents);
    }
    free(hashes);
    return contents;
}

static PyObject *index_num_bytes(Index *x, void *Py_UNUSED(none)) { return PyLong_FromSize_t(x->bytes); }
static PyObject *index_num_pairs(Index *x, void *Py_UNUSED(none)) { return PyLong_FromUnsignedLongLong(x->num_pairs); }
static PyObject *index_num_blocks(Index *x, void *Py_UNUSED(none)) { return PyLong_FromUnsignedLong(x->num_blocks); }

/* First inconsistency, or NULL. For tests: visits the whole index. */
static const char *fault(Index *x, uint32_t *refs, uint64_t *counts, uint64_t *digests) {
    uint64_t pairs = 0, ids_cap = 0;
    uint32_t num_blocks = 0, num_sets = 0;
    size_t bytes = sizeof(Index) + (size_t)x->table_cap * 8 + (size_t)x->blocks_cap * sizeof(Block) +
                   (size_t)x->sets_cap * sizeof(HolderSet) + (size_t)x->num_buckets * 4 + x->slots_cap * sizeof(Worker);
    for (uint32_t id = 0; id < x->blocks_len; id++) {
        const Block *block = &x->blocks[id];
        if (block->set == FREE) continue;
        num_blocks++;
        if (look_up(x, block->hash) != id) return "a block is not where its hash leads";
        if (block->set >= FIRST_SET) refs[block->set - FIRST_SET]++;
        uint32_t count = unpack(x, block->set);
        pairs += count;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t at = slot_of(scratch_list[i]) * NUM_TIERS + tier_of(scratch_list[i]);
            counts[at]++;
            digests[at] ^= mix(block->hash);
        }
    }
    for (uint32_t at = 0; at < x->sets_len; at++) {
        const HolderSet *set = &x->sets[at];
        if (!set->count) continue;
        num_sets++;
        bytes += charge(payload_bytes(set->count, set->tiers, set->width));
        if (set->count < 2 || set->refs != refs[at]) return "a set is counted wrong";
        if (unpack(x, at + FIRST_SET) != set->count) return "a set has another size than it says";
    }
    for (uint32_t slot = 0; slot < x->num_slots; slot++)
        for (uint32_t tier = 0; tier < NUM_TIERS; tier++) {
            Held *held = &x->workers[slot].held[tier];
            uint32_t at = slot * NUM_TIERS + tier;
            if (held->count != counts[at] || held->digest != digests[at]) return "a worker's count or digest is wrong";
            if (!x->workers[slot].is_there && held->len) return "a slot without a worker holds blocks";
            ids_cap += held->cap;
            bytes += charge((size_t)held->cap * sizeof(uint32_t));
            sweep(x, held, make_holder(slot, tier));
            if (held->len != held->count) return "a worker's list lacks blocks that it holds";
        }
    if (pairs != x->num_pairs || num_blocks != x->num_blocks || num_sets != x->num_sets) return "totals are wrong";
    if (ids_cap != x->ids_cap || bytes != x->bytes) return "bytes are counted wrong";
    return NULL;
}

static PyObject *index_check_integrity(Index *x, PyObject *Py_UNUSED(none)) {
    uint32_t *refs = calloc((size_t)x->sets_len + 1, sizeof(uint32_t));
    uint64_t *counts = calloc((size_t)x->num_slots * NUM_TIERS + 1, sizeof(uint64_t));
    uint64_t *digests = calloc((size_t)x->num_slots * NUM_TIERS + 1, sizeof(uint64_t));
    bool has_memory = refs && counts && digests;
    const char *found = has_memory ? fault(x, refs, counts, digests) : NULL;
    free(refs);
    free(counts);
    free(digests);
    if (!has_memory) return PyErr_NoMemory();
    if (found) return PyErr_Format(PyExc_AssertionError, "the index is broken: %s", found);
    Py_RETURN_NONE;
}

static void index_dealloc(Index *x) {
    for (uint32_t slot = 0; slot < x->num_slots; slot++)
        for (uint32_t tier = 0; tier < NUM_TIERS; tier++) free(x->workers[slot].held[tier].ids);
    for (uint32_t at = 0; at < x->sets_len; at++) {
        HolderSet *set = &x->sets[at];
        if (set->count && payload_bytes(set->count, set->tiers, set->width))
            free(set->tiers ? (void *)set->at.bits : (void *)set->at.list);
    }
    free(x->workers);
    free(x->sets);
    free(x->buckets);
    free(x->blocks);
    free(x->table);
    Py_TYPE(x)->tp_free((PyObject *)x);
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"max_bytes", NULL};
    PyObject *object = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:BlockIndex", names, &object)) return NULL;
    Py_ssize_t max_bytes = DEFAULT_MAX_BYTES;
    if (object) max_bytes = PyNumber_AsSsize_t(object, NULL); /* clamped to the address space */
    if (max_bytes == -1 && PyErr_Occurred()) return NULL;
    if (max_bytes < (Py_ssize_t)MIN_MAX_BYTES)
        return PyErr_Format(PyExc_ValueError, "an index of %zd bytes holds nothing: max_bytes is %zu or more", max_bytes,
                            MIN_MAX_BYTES);
    PyObject *secret = PyBytes_FromString("kvolt.router.index.prefix_index"); /* keyed by the process's hash secret */
    Py_hash_t key = secret ? PyObject_Hash(secret) : -1;
    Py_XDECREF(secret);
    if (key == -1 && PyErr_Occurred()) return NULL;
    Index *x = (Index *)type->tp_alloc(type, 0);
    if (!x) return NULL;
    x->key = mix((uint64_t)key);
    x->free_block = x->free_set = NONE;
    x->max_bytes = (size_t)max_bytes;
    x->num_buckets = 16;
    x->buckets = malloc(x->num_buckets * sizeof(uint32_t));
    x->bytes = sizeof(Index) + x->num_buckets * sizeof(uint32_t);
    if (!x->buckets) {
        Py_DECREF(x);
        return PyErr_NoMemory();
    }
    memset(x->buckets, 0xff, x->num_buckets * sizeof(uint32_t));
    return (PyObject *)x;
}

#define KEYWORDS (METH_VARARGS | METH_KEYWORDS)
static PyMethodDef index_methods[] = {
    {"add_worker", (PyCFunction)index_add_worker, METH_NOARGS, "Allocate the lowest free slot."},
    {"remove_worker", (PyCFunction)index_remove_worker, METH_O, "Free a slot with all its blocks."},
    {"store", (PyCFunction)(void (*)(void))index_store, METH_FASTCALL | METH_KEYWORDS, "Add blocks."},
    {"remove", (PyCFunction)(void (*)(void))index_remove, METH_FASTCALL | METH_KEYWORDS, "Remove blocks."},
    {"clear", (PyCFunction)(void (*)(void))index_clear, KEYWORDS, "Remove all blocks of a worker, or of one tier."},
    {"find", (PyCFunction)index_find, METH_O, "Leading blocks of a prompt on the device, by slot."},
    {"find_tiers", (PyCFunction)index_find_tiers, METH_O, "The same by tier and slot, faster tiers included."},
    {"find_local_tiers", (PyCFunction)index_find_local_tiers, METH_O, "The same for the tiers of a worker itself."},
    {"digest", (PyCFunction)(void (*)(void))index_digest, KEYWORDS, "Number of blocks and their digest."},
    {"contents", (PyCFunction)(void (*)(void))index_contents, KEYWORDS, "All blocks of a slot and tier, unordered."},
    {"num_evicted", (PyCFunction)(void (*)(void))index_num_evicted, KEYWORDS, "Blocks evicted since the last clear."},
    {"check_integrity", (PyCFunction)index_check_integrity, METH_NOARGS, "Raise AssertionError if the parts disagree."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef index_properties[] = {
    {"num_bytes", (getter)index_num_bytes, NULL, "Memory of the index.", NULL},
    {"num_pairs", (getter)index_num_pairs, NULL, "A pair is a block in a tier of a worker.", NULL},
    {"num_blocks", (getter)index_num_blocks, NULL, "Distinct blocks.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject index_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvolt.router.index._index_native.BlockIndex",
    .tp_basicsize = sizeof(Index),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Blocks by SequenceHash, their holders by slot and tier: see kvolt.router.index.prefix_index_python.",
    .tp_new = index_new,
    .tp_dealloc = (destructor)index_dealloc,
    .tp_methods = index_methods,
    .tp_getset = index_properties,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_index_native", "The router's index in C.", -1,
                                    NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__index_native(void) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (!numpy) return NULL;
    numpy_empty = PyObject_GetAttrString(numpy, "empty");
    int32_dtype = PyObject_CallMethod(numpy, "dtype", "s", "int32");
    Py_DECREF(numpy);
    if (!numpy_empty || !int32_dtype || PyType_Ready(&index_type) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    if (PyModule_AddStringConstant(made, "SOURCE_DIGEST", KVOLT_SOURCE_DIGEST) < 0 ||
        PyModule_AddObjectRef(made, "BlockIndex", (PyObject *)&index_type) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
