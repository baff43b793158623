
// Quantize and dequantize messages in a single pass over memory. Called through ctypes by quantized_blocks.py, which
// has the formula, its notes and the torch form.
//
// All operations on an element are IEEE operations in a fixed order, and the compiler must not contract them
// (-ffp-contract=off), so the bits are those of torch's form on every processor.

#include <pthread.h>
#include <stdint.h>
#include <string.h>

// On every processor: the compiler cuts a vector for which it has no register.
#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));
typedef uint8_t vc __attribute__((vector_size(LANES)));

enum Kind { FLOAT32 = 1, BFLOAT16 = 2 };
enum { BLOCK = 128, VECTORS = BLOCK / LANES, TASK = 256 };  // blocks that a thread takes at a time

// `_Blocks` in quantized_blocks.py has the same fields in the same order.
struct Blocks {
    void *values;          // (blocks * BLOCK,) of kind: read by quantize, written by dequantize
    const void *less;      // (blocks * BLOCK,) of less_kind, or null
    uint8_t *codes;        // (blocks * BLOCK * bits / 8,)
    float *scales;         // (blocks,)
    int64_t blocks;
    int64_t next_task;     // threads take tasks from here; starts at 0
    uint64_t first;        // number of the first element, if bits are drawn
    uint32_t key[2];       // of the step
    int32_t kind, less_kind, bits, is_drawn, adds, threads;
};

template <class V> INLINE V load(const void *from) {
    V x;
    memcpy(&x, from, sizeof x);
    return x;
}
template <class V> INLINE void store(void *to, V x) { memcpy(to, &x, sizeof x); }

template <int kind> INLINE vf load_values(const void *from, int64_t at) {
    if (kind == FLOAT32) return load<vf>((const float *)from + at);
    return (vf)(__builtin_convertvector(load<vh>((const uint16_t *)from + at), vu) << 16);
}

// bfloat16: to nearest, ties to even. Every NaN is stored as 0x7FC0, as the Triton form does.
template <int kind> INLINE void store_values(void *to, int64_t at, vf x) {
    if (kind == FLOAT32) return store((float *)to + at, x);
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const vu halves = x == x ? rounded : (vu)(vi){} + 0x7FC0;
    store((uint16_t *)to + at, __builtin_convertvector(halves, vh));
}

INLINE vu mixed(vu x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

INLINE vf random_parts(const struct Blocks *job, uint64_t number) {
    vu low, high;
    for (int i = 0; i < LANES; i++) {
        low[i] = (uint32_t)(number + i);
        high[i] = (uint32_t)((number + i) >> 32);
    }
    const vu noise = mixed(mixed(low + job->key[0]) ^ (high + job->key[1]));
    // 24 bits fit a signed integer, whose conversion is an instruction on every processor.
    return __builtin_convertvector((vi)(noise >> 8), vf) * 0x1p-24f;
}

// The largest integer <= x, |x| < 2^22.
INLINE vf floor_of(vf x) {
    // Truncation, corrected below zero: SSE2 has no instruction that rounds down.
    const vf whole = __builtin_convertvector(__builtin_convertvector(x, vi), vf);
    return whole > x ? whole - 1.0f : whole;
}

// The nearest integer, ties to even, |x| < 2^22.
INLINE vf nearest(vf x) {
    const float big = 0x1.8p23f;
    return (x + big) - big;
}

template <int kind, int less_kind, int bits> static void quantize_block(const struct Blocks *job, int64_t block) {
    const float most = bits == 8 ? 127.0f : 7.0f;
    vf x[VECTORS];
    vu largest = {};
    for (int v = 0; v < VECTORS; v++) {
        const int64_t at = block * BLOCK + v * LANES;
        x[v] = load_values<kind>(job->values, at);
        // FLOAT32 only gives the unused branch a valid type.
        if (less_kind) x[v] -= load_values<less_kind ? less_kind : FLOAT32>(job->less, at);
        const vu size = (vu)x[v] & 0x7FFFFFFF;  // ordered as |x|, with inf and NaN on top
        largest = size > largest ? size : largest;
    }
    uint32_t top = 0;
    for (int i = 0; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
    float most_of_block;
    memcpy(&most_of_block, &top, 4);
    const bool is_broken = top >= 0x7F800000u, is_zero = most_of_block < 0x1p-100f;
    const float inverse = is_zero ? 0.0f : most / most_of_block;
    job->scales[block] = is_broken ? __builtin_nanf("") : is_zero ? 0.0f : most_of_block / most;
    vi codes[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        if (is_broken) {
            const vi is_bad = ((vu)x[v] & 0x7FFFFFFF) >= 0x7F800000u;
            codes[v] = is_bad & 1;
            continue;
        }
        vf y = x[v] * inverse;
        if (job->is_drawn) {
            y = floor_of(y + random_parts(job, job->first + (uint64_t)(block * BLOCK + v * LANES)));
        } else {
            y = nearest(y);
        }
        const vf none = {};
        // x * inverse may round above `most`, and the random bits may add a step.
        y = y > most ? none + most : y;
        y = y < -most ? none - most : y;
        codes[v] = __builtin_convertvector(y, vi);
    }
    if (bits == 8) {
        for (int v = 0; v < VECTORS; v++)
            store(job->codes + block * BLOCK + v * LANES, __builtin_convertvector(codes[v], vb));
        return;
    }
    for (int v = 0; v < VECTORS / 2; v++) {
        const vi pair = (codes[v] + 8) | ((codes[v + VECTORS / 2] + 8) << 4);
        store(job->codes + block * (BLOCK / 2) + v * LANES, __builtin_convertvector((vu)pair, vc));
    }
}

template <int kind, int bits> static void dequantize_block(const struct Blocks *job, int64_t block) {
    const float scale = job->scales[block];
    for (int v = 0; v < VECTORS; v++) {
        vf code;
        if (bits == 8) {
            code = __builtin_convertvector(load<vb>(job->codes + block * BLOCK + v * LANES), vf);
        } else {
            const int half = v >= VECTORS / 2;
            const uint8_t *from = job->codes + block * (BLOCK / 2) + (v - half * (VECTORS / 2)) * LANES;
            const vi pair = __builtin_convertvector(load<vc>(from), vi);
            code = __builtin_convertvector(((half ? pair >> 4 : pair) & 15) - 8, vf);
        }
        const vf none = {};
        // A broken block has the scale NaN, and 0 * NaN would be NaN.
        vf y = code == none ? none : code * scale;
        const int64_t at = block * BLOCK + v * LANES;
        if (job->adds) y = load_values<kind>(job->values, at) + y;
        store_values<kind>(job->values, at, y);
    }
}

typedef void (*Work)(const Blocks *, int64_t);

static Work work_of(const struct Blocks *job, int back) {
    const bool wide = job->kind == FLOAT32, eight = job->bits == 8;
    if (back) {
        if (wide) return eight ? dequantize_block<FLOAT32, 8> : dequantize_block<FLOAT32, 4>;
        return eight ? dequantize_block<BFLOAT16, 8> : dequantize_block<BFLOAT16, 4>;
    }
    if (!job->less) {
        if (wide) return eight ? quantize_block<FLOAT32, 0, 8> : quantize_block<FLOAT32, 0, 4>;
        return eight ? quantize_block<BFLOAT16, 0, 8> : quantize_block<BFLOAT16, 0, 4>;
    }
    if (wide) return eight ? quantize_block<FLOAT32, FLOAT32, 8> : quantize_block<FLOAT32, FLOAT32, 4>;
    return eight ? quantize_block<BFLOAT16, BFLOAT16, 8> : quantize_block<BFLOAT16, BFLOAT16, 4>;
}

struct Team {
    Blocks *job;
    Work work;
};

static void *run(void *given) {
    const Team *team = (const Team *)given;
    Blocks *job = team->job;
    for (;;) {
        // Relaxed: tasks share no data, and pthread_join orders their stores.
        const int64_t start = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED) * TASK;
        if (start >= job->blocks) return 0;
        const int64_t end = start + TASK < job->blocks ? start + TASK : job->blocks;
        for (int64_t block = start; block < end; block++) team->work(job, block);
    }
}

extern "C" void lowtide_blocks(Blocks *job, int32_t back) {
    Team team = {job, work_of(job, back)};
    enum { MOST = 64 };
    pthread_t others[MOST];
    int64_t wanted = (job->blocks + TASK - 1) / TASK;
    if (wanted > job->threads) wanted = job->threads;
    int started = 0;
    while (started + 1 < wanted && started < MOST && !pthread_create(&others[started], 0, run, &team)) started++;
    run(&team);
    for (int i = 0; i < started; i++) pthread_join(others[i], 0);
}
