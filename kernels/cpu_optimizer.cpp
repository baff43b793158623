// An optimizer step on a flat shard in a single pass over memory. Called through ctypes by optimizer_step.py. It needs
// only headers of the compiler.
//
// [Note: Same bits everywhere]
// All operations on an element are IEEE operations (add, multiply, fused multiply-add, divide, square root) in a fixed
// order, and the compiler must not contract them (-ffp-contract=off). So an element's result does not depend on the
// vector width, its position, the thread, or the division into shards: AVX-512, AVX2 and the portable build give the
// same bits. The operations are those of torch's fused kernels in whole vectors, with the same multiply-adds, so both
// tiers agree too.
// Every thread sets the rounding mode and flushes denormal numbers to zero: without this, moments that decay without a
// gradient stay denormal, and each operation on them costs some processors over a hundred cycles.
//
// optimizer_states.py has the notes on narrow states, their rounding and their random bits, and the torch form.

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

enum Kind { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3, INT8 = 4 };
// BLOCK: STATE_BLOCK_NUMEL of optimizer_states.py. MAX_COEFFICIENTS: that of optimizers/optimizer.py.
// A task is a whole number of blocks, so no two threads write the same scale.
enum { BLOCK = 256, MAX_COEFFICIENTS = 8, TASK = 128 * BLOCK };

// `_Job` in optimizer_step.py has the same fields in the same order.
struct Job {
    void *master;                // (n,) of master_kind
    const void *gradient;        // (n,) of gradient_kind
    void *out;                   // (n,) of out_kind, or null
    void *states[2];             // (n,) of state_kind each
    float *scales[2];            // (ceil(n / BLOCK),) each, for int8
    void *remainder;             // (n,) low bits of bfloat16 master weights, or null: bfloat16, or bytes if is_drawn
    const int64_t *run_ends;     // (runs,) ascending, the last is n
    const float *coefficients;   // (runs, MAX_COEFFICIENTS)
    int64_t n;
    int64_t next_task;           // threads take tasks from here; starts at 0
    uint64_t first;              // number of the first element, if is_drawn
    int32_t rule;                // from lowtide_rule
    int32_t master_kind, gradient_kind, out_kind, state_kind;
    int32_t threads;
    int32_t is_drawn;            // 1 if master weights are rounded with bits that are drawn by number
    uint32_t seed;               // of the step, for the rounding of states
    uint32_t key[2];             // of the step, for bits that are drawn by number
    float gradient_scale;
};

// By memcpy, since a shard may begin at any element: a cast of the pointer would promise an aligned vector.
template <class V> INLINE V load(const void *from) {
    V x;
    memcpy(&x, from, sizeof x);
    return x;
}
template <class V> INLINE void store(void *to, V x) { memcpy(to, &x, sizeof x); }

// Unsigned integers of 16 or 8 bits in memory, 32 bits in registers. Compilers translate a generic conversion
// (__builtin_convertvector) element by element, which halves the speed of the update.
#if LANES == 16
INLINE vu load_halves(const void *from) { return (vu)_mm512_cvtepu16_epi32(load<__m256i>(from)); }
INLINE vu load_bytes(const void *from) { return (vu)_mm512_cvtepu8_epi32(load<__m128i>(from)); }
INLINE void store_bytes(void *to, vu x) { store(to, _mm512_cvtepi32_epi8((__m512i)x)); }
INLINE void store_halves(void *to, vu x, bool stream) {
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)x);
    if (stream) return _mm256_stream_si256((__m256i *)to, halves);
    store(to, halves);
}
#elif LANES == 8
INLINE vu load_halves(const void *from) { return (vu)_mm256_cvtepu16_epi32(load<__m128i>(from)); }
INLINE vu load_bytes(const void *from) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)); }
// packus saturates. All values fit into 16 or 8 bits here, so it changes none.
INLINE __m128i packed(vu x) {
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
}
INLINE void store_bytes(void *to, vu x) { _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(packed(x), packed(x))); }
INLINE void store_halves(void *to, vu x, bool stream) {
    if (stream) return _mm_stream_si128((__m128i *)to, packed(x));
    store(to, packed(x));
}
#else
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));
INLINE vu load_halves(const void *from) { return __builtin_convertvector(load<vh>(from), vu); }
INLINE vu load_bytes(const void *from) { return __builtin_convertvector(load<vb>(from), vu); }
INLINE void store_bytes(void *to, vu x) { store(to, __builtin_convertvector(x, vb)); }
INLINE void store_halves(void *to, vu x, bool) { store(to, __builtin_convertvector(x, vh)); }
#endif

INLINE vf square_root(vf x) {
#if LANES == 16
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif LANES == 8
    return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (vf)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

// a * b + c, rounded once.
INLINE vf multiply_add(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    // In float64 the product is exact. The sum is rounded to odd with the help of its exact error, so that the second
    // rounding to float32 gives the correctly rounded result (Boldo and Melquiond, IEEE TC 57(4), 2008).
    typedef double vd __attribute__((vector_size(8 * LANES)));
    typedef int64_t vl __attribute__((vector_size(8 * LANES)));
    const vd product = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd);
    const vd addend = __builtin_convertvector(c, vd), sum = product + addend, part = sum - product, zero = {};
    const vd error = (product - (sum - part)) + (addend - part);
    const vl bits = (vl)sum, exponent = vl{} + 0x7FF0000000000000;
    const vl is_rounded = (error != zero) & ((bits & exponent) != exponent);
    const vl outward = (error > zero) == (sum > zero), is_even = (bits & 1) == 0;
    const vl odd = bits + (outward ? vl{} + 1 : vl{} - 1);
    return __builtin_convertvector((vd)((is_rounded & is_even) ? odd : bits), vf);
#endif
}
INLINE vf multiply_add(vf a, float b, vf c) { return multiply_add(a, vf{} + b, c); }

// c: from lerp_coefficients in optimizers/optimizer.py.
INLINE vf lerp(vf a, vf b, const float *c) { return multiply_add(b - a, c[0], c[1] != 0 ? b : a); }

INLINE vf widened_bfloat16(vu x) { return (vf)(x << 16); }

// To nearest even.
INLINE vu to_bfloat16(vf x) {
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return x == x ? rounded : vu{} + 0x7FC0;
}

#if LANES == 16
INLINE vf widened_float16(vu x) { return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x)); }
INLINE vu to_float16(vf x) {
    return (vu)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif LANES == 8 && defined(__F16C__)
INLINE vf widened_float16(vu x) { return (vf)_mm256_cvtph_ps(packed(x)); }
INLINE vu to_float16(vf x) {
    return (vu)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
// Both follow Marat Dukhan's FP16 library: a multiplication changes exponents, an addition handles subnormal numbers.
INLINE vf widened_float16(vu x) {
    const vu bits = x << 16, shifted = bits + bits;
    const vf normal = (vf)((shifted >> 4) + (0xE0u << 23)) * 0x1p-112f;
    const vf subnormal = (vf)((shifted >> 17) | (126u << 23)) - 0.5f;
    return (vf)((bits & 0x80000000u) | (shifted < (1u << 27) ? (vu)subnormal : (vu)normal));
}
// To nearest even: the addition of 2^(exponent + 13) rounds.
INLINE vu to_float16(vf x) {
    const vu bits = (vu)x, magnitude = bits & 0x7FFFFFFF, shifted = bits + bits;
    const vf base = (vf)magnitude * 0x1p+112f * 0x1p-110f;
    const vu exponent = shifted & 0xFF000000u;
    const vu bias = exponent < 0x71000000u ? vu{} + 0x71000000u : exponent;
    const vu rounded = (vu)((vf)((bias >> 1) + 0x07800000u) + base);
    const vu value = ((rounded >> 13) & 0x7C00) + (rounded & 0x0FFF);
    return ((bits >> 16) & 0x8000) | (magnitude > 0x7F800000u ? vu{} + 0x7E00 : value);
}
#endif

INLINE vf load_values(const void *values, int32_t kind, int64_t at) {
    switch (kind) {
        case BFLOAT16: return widened_bfloat16(load_halves((const uint16_t *)values + at));
        case FLOAT16: return widened_float16(load_halves((const uint16_t *)values + at));
        default: return load<vf>((const float *)values + at);
    }
}

// The last steps of MurmurHash3.
INLINE vu mixed(vu x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}
// Random bits of one element: see optimizer_states.py.
INLINE vu noise_of(vf gradient, vf weight, uint32_t seed) {
    return mixed(((vu)gradient * 0x9E3779B1u) ^ ((vu)weight + seed));
}
// See [Note: Numbered draws] in weight_rounding.py.
INLINE vu numbered_noise(const Job &job, int64_t at) {
    const uint64_t first = job.first + (uint64_t)at;
    const uint32_t low_of_first = (uint32_t)first;
    vu lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const vu low = lane + low_of_first;
    const vu high = (low < low_of_first ? vu{} + 1 : vu{}) + (uint32_t)(first >> 32);
    return mixed(mixed(low + job.key[0]) ^ (high + job.key[1]));
}
INLINE vu other_noise(vu x) {
    x *= 0x9E3779B1u;
    return x ^ (x >> 15);
}

// ---- Rules: c has the coefficients of the optimizer's file in optimizers/, with the same names. ----

// c: decay, lerp of m (2), beta2, 1 - beta2, sqrt(correction2), eps, -step size
template <bool DECOUPLED> struct Adam {
    enum { STATES = 2 };
    // The order is that of torch's fused kernel: the decay comes before the moments.
    INLINE void apply(const float *c, vf g, vf &w, vf &m, vf &v) {
        if (DECOUPLED) w = w * c[0];
        else g = multiply_add(w, c[0], g);
        m = lerp(m, g, c + 1);
        v = multiply_add(g * c[4], g, v * c[3]);
        w = w + m * c[7] / (square_root(v) / c[5] + c[6]);
    }
};
struct Lion {  // c: decay, lerp of the direction (2), lerp of m (2), -lr
    enum { STATES = 1 };
    INLINE void apply(const float *c, vf g, vf &w, vf &m, vf &) {
        const vf direction = lerp(g, m, c + 1), zero = {}, one = zero + 1.0f;
        w = multiply_add(direction > zero ? one : direction < zero ? -one : zero, c[5], w * c[0]);
        m = lerp(m, g, c + 3);
    }
};
struct Adagrad {  // c: decay, step size, eps
    enum { STATES = 1 };
    INLINE void apply(const float *c, vf g, vf &w, vf &sum, vf &) {
        g = multiply_add(w, c[0], g);
        sum = multiply_add(g, g, sum);
        w = w - g * c[1] / (square_root(sum) + c[2]);
    }
};
struct Sgd {  // c: decay, -lr
    enum { STATES = 0 };
    INLINE void apply(const float *c, vf g, vf &w, vf &, vf &) {
        w = multiply_add(multiply_add(w, c[0], g), c[1], w);
    }
};
struct Momentum {  // c: decay, -lr, momentum, 1 - dampening, share of the gradient, share of the buffer
    enum { STATES = 1 };
    INLINE void apply(const float *c, vf g, vf &w, vf &buffer, vf &) {
        g = multiply_add(w, c[0], g);
        buffer = multiply_add(g, c[3], buffer * c[2]);
        w = multiply_add(multiply_add(buffer, c[5], g * c[4]), c[1], w);
    }
};

INLINE vu rounded_at_random(vf x, vu noise) {
    const vu rounded = ((vu)x + (noise & 0xFFFF)) >> 16;
    return x == x ? rounded : vu{} + 0x7FC0;
}

INLINE int64_t remainder_bytes(const Job &job) { return job.is_drawn ? 1 : 2; }
INLINE char *remainder_at(const Job &job, int64_t at) { return (char *)job.remainder + at * remainder_bytes(job); }

// Join a bfloat16 weight and its remainder.
INLINE vf with_remainder(const Job &job, int64_t at, vf w) {
    if (!job.is_drawn) return w + widened_bfloat16(load_halves(remainder_at(job, at)));
    const vi rest = (vi)(load_bytes(remainder_at(job, at)) << 24) >> 16;  // 256 times a signed byte
    return (vf)((vu)w + (vu)rest);
}

// w: after the update; before: the weight as it was read, remainder included; noise: of numbers, or unused.
INLINE void store_weight(const Job &job, int64_t at, vf w, vf before, vu noise) {
    if (job.master_kind == FLOAT32) return store((float *)job.master + at, w);
    uint16_t *place = (uint16_t *)job.master + at;
    if (job.remainder && job.is_drawn) {  // see [Note: Split weights] in weight_rounding.py
        const vu drawn = ((vu)w + (noise >> 24)) & ~0xFFu, near = (drawn + 0x8000) >> 16;
        store_halves(place, w == w ? near : vu{} + 0x7FC0, false);
        return store_bytes(remainder_at(job, at), w == w ? (drawn >> 8) & 0xFF : vu{});
    }
    if (job.remainder) {  // an unchanged weight must keep its bits: a sum has two forms at a tie
        const vu old = load_halves(place), old_rest = load_halves(remainder_at(job, at));
        const vu near = w == before ? old : to_bfloat16(w);
        const vu rest = w == before ? old_rest : to_bfloat16(w - widened_bfloat16(near));
        store_halves(place, near, false);
        return store_halves(remainder_at(job, at), rest, false);
    }
    store_halves(place, rounded_at_random(w, noise >> 16), false);
}

// Update a vector of elements. s0, s1: their states as float32; noise: memory for random bits, or null.
template <class Rule>
INLINE void update_vector(const Job &job, const float *c, int64_t at, float *s0, float *s1, uint32_t *noise,
                          bool stream) {
    const vf g = load_values(job.gradient, job.gradient_kind, at) * job.gradient_scale;
    vf w = load_values(job.master, job.master_kind, at), first = {}, second = {};
    if (job.remainder) w = with_remainder(job, at, w);
    if (Rule::STATES > 0) first = load<vf>(s0);
    if (Rule::STATES > 1) second = load<vf>(s1);
    vu random = {};
    if (job.is_drawn) random = numbered_noise(job, at);
    else if (noise) random = noise_of(g, w, job.seed);
    if (noise) store(noise, random);
    const vf before = w;
    Rule::apply(c, g, w, first, second);
    store_weight(job, at, w, before, random);
    if (Rule::STATES > 0) store(s0, first);
    if (Rule::STATES > 1) store(s1, second);
    if (job.out_kind == BFLOAT16) store_halves((uint16_t *)job.out + at, to_bfloat16(w), stream);
    else if (job.out_kind == FLOAT16) store_halves((uint16_t *)job.out + at, to_float16(w), stream);
}

INLINE int64_t bytes_of(int32_t kind) { return kind == FLOAT32 ? 4 : 2; }

// Update fewer elements than a vector has, by the same operations on a padded copy.
template <class Rule>
static void update_rest(const Job &job, const float *c, int64_t at, int64_t count, float *s0, float *s1,
                        uint32_t *noise) {
    float w[LANES] = {}, g[LANES] = {}, first[LANES] = {}, second[LANES] = {};
    uint16_t out[LANES], remainder[LANES] = {};
    uint32_t bits[LANES];
    char *const master = (char *)job.master + at * bytes_of(job.master_kind);
    Job part = job;
    // The copy begins at element 0, so the number of its first element moves on by `at`.
    part.master = w, part.gradient = g, part.out = out, part.first += at;
    if (job.remainder) part.remainder = memcpy(remainder, remainder_at(job, at), count * remainder_bytes(job));
    memcpy(w, master, count * bytes_of(job.master_kind));
    memcpy(g, (const char *)job.gradient + at * bytes_of(job.gradient_kind), count * bytes_of(job.gradient_kind));
    if (Rule::STATES > 0) memcpy(first, s0, count * 4);
    if (Rule::STATES > 1) memcpy(second, s1, count * 4);
    update_vector<Rule>(part, c, 0, first, second, noise ? bits : nullptr, false);
    memcpy(master, w, count * bytes_of(job.master_kind));
    if (job.remainder) memcpy(remainder_at(job, at), remainder, count * remainder_bytes(job));
    if (Rule::STATES > 0) memcpy(s0, first, count * 4);
    if (Rule::STATES > 1) memcpy(s1, second, count * 4);
    if (noise) memcpy(noise, bits, count * 4);
    if (job.out_kind != NONE) memcpy((uint16_t *)job.out + at, out, count * 2);
}

template <class Rule>
INLINE void update_span(const Job &job, const float *c, int64_t at, int64_t count, float *s0, float *s1,
                        uint32_t *noise) {
    // Only `out`, which is not read, is stored around the cache: this saves reading its lines. With the same stores for
    // tensors that were just read, the update took 53 instead of 35 ms (100M elements, Zen 4, 2 threads).
    // Streamed stores need aligned addresses. Without `out` the value is not used.
    const bool stream = (uintptr_t)((uint16_t *)job.out + at) % (2 * LANES) == 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        update_vector<Rule>(job, c, at + i, s0 + i, s1 + i, noise ? noise + i : nullptr, stream);
    if (i < count) update_rest<Rule>(job, c, at + i, count - i, s0 + i, s1 + i, noise ? noise + i : nullptr);
}

// ---- Narrow states: a block is decoded into the first-level cache, updated there, and encoded again. ----

INLINE void widen_bfloat16(const uint16_t *from, float *to) {
    for (int i = 0; i < BLOCK; i += LANES) store(to + i, widened_bfloat16(load_halves(from + i)));
}

INLINE void narrow_bfloat16(const float *from, const vu *noise, uint16_t *to) {
    for (int i = 0; i < BLOCK; i += LANES) {
        store_halves(to + i, rounded_at_random(load<vf>(from + i), noise[i / LANES]), false);
    }
}

template <bool SIGNED> struct Minifloat {
    static constexpr uint32_t TOP = SIGNED ? 15 : 31;  // the largest exponent, which stands for the scale
    static constexpr uint32_t BASE = (127 - TOP) << 3;
    static constexpr float SMALLEST_NORMAL = SIGNED ? 0x1p-14f : 0x1p-30f;
    static constexpr float SUBNORMAL_STEP = SMALLEST_NORMAL / 8;

    INLINE void widen(const uint8_t *from, float scale, float *to) {
        for (int i = 0; i < BLOCK; i += LANES) {
            const vu code = load_bytes(from + i);
            const vu magnitude = SIGNED ? code & 0x7F : code;
            const vf subnormal = __builtin_convertvector((vi)magnitude, vf) * SUBNORMAL_STEP;
            const vf value = (magnitude < 8 ? subnormal : (vf)((magnitude + BASE) << 20)) * scale;
            store(to + i, SIGNED ? (vf)((vu)value | ((code & 0x80) << 24)) : value);
        }
    }

    INLINE void narrow(const float *from, const vu *noise, uint8_t *to, float *scale) {
        vu most = {};
        for (int i = 0; i < BLOCK; i += LANES) {
            const vu magnitude = load<vu>(from + i) & 0x7FFFFFFF;
            most = magnitude > most ? magnitude : most;
        }
        uint32_t largest = 0;
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        const uint32_t exponent = largest >> 23;
        if (exponent >= 253) {  // the inverse of the scale would be denormal
            const uint32_t nan = 0x7FC00000;
            memcpy(scale, &nan, 4);
            memset(to, 0, BLOCK);
            return;
        }
        const uint32_t scale_bits = (exponent + 1) << 23, inverse_bits = (253 - exponent) << 23;
        memcpy(scale, &scale_bits, 4);
        float inverse;
        memcpy(&inverse, &inverse_bits, 4);
        for (int i = 0; i < BLOCK; i += LANES) {
            const vu bits = load<vu>(from + i), random = noise[i / LANES] & 0xFFFFF;
            const vf y = (vf)(bits & 0x7FFFFFFF) * inverse;
            const vu normal = (((vu)y + random) >> 20) - BASE;
            const vf steps = y * (1 / SUBNORMAL_STEP) + __builtin_convertvector((vi)random, vf) * 0x1p-20f;
            vu code = y < vf{} + SMALLEST_NORMAL ? (vu)__builtin_convertvector(steps, vi) : normal;
            if (SIGNED) code |= (bits >> 24) & 0x80;
            else code = (code == 0) & (y > vf{}) ? vu{} + 1 : code;
            store_bytes(to + i, code);
        }
    }
};

// Means of squares have no sign: the second state, and Adagrad's only state.
template <class Rule> INLINE constexpr bool is_signed(int index) { return index == 0; }
template <> constexpr bool is_signed<Adagrad>(int) { return false; }

template <bool SIGNED> INLINE void widen(const Job &job, int index, int64_t at, int64_t count, float *to) {
    const int64_t size = job.state_kind == INT8 ? 1 : 2;
    const char *from = (const char *)job.states[index] + at * size;
    // The last block of a shard may be short. Its rest reads as zeros, which do not raise the scale.
    char padded[BLOCK * 2];
    if (count < BLOCK) {
        memset(padded, 0, sizeof padded);
        from = (const char *)memcpy(padded, from, count * size);
    }
    if (job.state_kind == INT8) Minifloat<SIGNED>::widen((const uint8_t *)from, job.scales[index][at / BLOCK], to);
    else widen_bfloat16((const uint16_t *)from, to);
}

template <bool SIGNED>
INLINE void narrow(const Job &job, int index, int64_t at, int64_t count, const float *from, const vu *noise) {
    const int64_t size = job.state_kind == INT8 ? 1 : 2;
    char *place = (char *)job.states[index] + at * size;
    char padded[BLOCK * 2];
    // `from` has BLOCK numbers: behind `count` they are still the zeros of `widen`.
    char *to = count < BLOCK ? padded : place;
    if (job.state_kind == INT8) Minifloat<SIGNED>::narrow(from, noise, (uint8_t *)to, job.scales[index] + at / BLOCK);
    else narrow_bfloat16(from, noise, (uint16_t *)to);
    if (count < BLOCK) memcpy(place, padded, count * size);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Update elements start to end of the shard. start is a multiple of BLOCK.
template <class Rule> static void update_task(const Job &job, int64_t start, int64_t end) {
    int run = 0;
    // A task may begin within any run, and runs may be empty.
    while (job.run_ends[run] <= start) run++;
    const bool is_direct = job.state_kind == FLOAT32 || Rule::STATES == 0;
    float *s0 = (float *)job.states[0], *s1 = (float *)job.states[1];
    alignas(64) float first[BLOCK], second[BLOCK];
    vu noise[BLOCK / LANES] = {};
    for (int64_t at = start; at < end;) {
        if (is_direct) {
            const int64_t stop = least(job.run_ends[run], end);
            update_span<Rule>(job, job.coefficients + run * MAX_COEFFICIENTS, at, stop - at, s0 + at, s1 + at, nullptr);
            at = stop;
            run++;
            continue;
        }
        const int64_t count = least(BLOCK, end - at);
        widen<is_signed<Rule>(0)>(job, 0, at, count, first);
        if (Rule::STATES > 1) widen<is_signed<Rule>(1)>(job, 1, at, count, second);
        for (int64_t inside = 0; inside < count;) {
            const int64_t stop = least(job.run_ends[run] - at, count);
            update_span<Rule>(job, job.coefficients + run * MAX_COEFFICIENTS, at + inside, stop - inside,
                              first + inside, second + inside, (uint32_t *)noise + inside);
            inside = stop;
            if (job.run_ends[run] <= at + stop) run++;
        }
        narrow<is_signed<Rule>(0)>(job, 0, at, count, first, noise);
        if (Rule::STATES > 1) {
            // The states of an element must not be rounded by the same bits: their errors would be correlated.
            for (vu &bits : noise) bits = other_noise(bits);
            narrow<is_signed<Rule>(1)>(job, 1, at, count, second, noise);
        }
        at += count;
    }
}

// The rules by optimizer name and number of states.
struct Rule {
    const char *name;
    int32_t states;
    void (*update)(const Job &, int64_t, int64_t);
};
template <class R> constexpr Rule rule(const char *name) { return {name, R::STATES, update_task<R>}; }
static const Rule RULES[] = {
    rule<Adam<true>>("adamw"), rule<Adam<false>>("adam"), rule<Lion>("lion"),
    rule<Adagrad>("adagrad"),  rule<Sgd>("sgd"),          rule<Momentum>("sgd"),
};

// Return the index of a rule, or -1 for an unknown rule.
extern "C" int32_t lowtide_rule(const char *name, int32_t states) {
    int32_t number = 0;
    for (const Rule &one : RULES) {
        if (strcmp(one.name, name) == 0 && one.states == states) return number;
        number++;
    }
    return -1;
}

static void work(void *data) {
    Job &job = *(Job *)data;
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9FC0);  // nearest even, no traps, denormal inputs and results are zero
#endif
    for (;;) {
        // Relaxed: tasks share no data, and the end of the threads orders their stores.
        const int64_t start = __atomic_fetch_add(&job.next_task, TASK, __ATOMIC_RELAXED);
        if (start >= job.n) break;
        RULES[job.rule].update(job, start, least(start + TASK, job.n));
    }
#if defined(__SSE2__)
    _mm_sfence();  // streamed stores are seen before the update counts as done
    _mm_setcsr(before);
#endif
}

static void *work_in_thread(void *data) {
    work(data);
    return nullptr;
}

// Torch's thread pool, if it is in the process: a second pool would wait for work beside it.
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);

extern "C" void lowtide_optimizer_step(Job *job) {
    const int64_t tasks = (job->n + TASK - 1) / TASK;
    int threads = (int)least(job->threads, tasks);
    if (threads <= 1) return work(job);
    if (GOMP_parallel) return GOMP_parallel(work, job, threads, 0);
    enum { MAX_HELPERS = 255 };
    pthread_t helpers[MAX_HELPERS];
    int started = 0;  // if the system gives fewer threads, these do all tasks
    while (started < least(threads - 1, MAX_HELPERS)) {
        if (pthread_create(&helpers[started], nullptr, work_in_thread, job)) break;
        started++;
    }
    work(job);
    for (int i = 0; i < started; i++) pthread_join(helpers[i], nullptr);
}
