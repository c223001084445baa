/* What the C kernels share: vectors of float32 over neighbouring channels, their exponential, memory. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <immintrin.h>
#endif

/* SSM_LANES tries another number of lanes than the processor's own, without its instructions for them. */
#if defined(SSM_LANES)
enum { LANES = SSM_LANES };
#elif defined(__AVX512F__)
#define BY_16
enum { LANES = 16 };
#elif defined(__AVX__)
#define BY_8
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE lanes all(float value) {
    return value - (lanes){0};
}

/* max and min that give NaN for v = NaN. */
INLINE lanes at_least(lanes v, float low) {
#if defined(BY_16)
    return (lanes)_mm512_max_ps((__m512)all(low), (__m512)v);
#elif defined(BY_8)
    return (lanes)_mm256_max_ps((__m256)all(low), (__m256)v);
#else
    ints below = v < all(low);
    return (lanes)((below & (ints)all(low)) | (~below & (ints)v));
#endif
}

INLINE lanes at_most(lanes v, float high) {
#if defined(BY_16)
    return (lanes)_mm512_min_ps((__m512)all(high), (__m512)v);
#elif defined(BY_8)
    return (lanes)_mm256_min_ps((__m256)all(high), (__m256)v);
#else
    ints above = v > all(high);
    return (lanes)((above & (ints)all(high)) | (~above & (ints)v));
#endif
}

/* exp(v), v clamped to [-80, 88.73]: exp(0) = 1 exactly, relative error below 2e-7, +inf from 88.4 on, NaN for NaN.
 * v = k ln 2 + r with |r| <= ln 2 / 2; e^r is the polynomial 1 + r q(r) of degree 5 with the smallest largest error,
 * 9.2e-8; 2^k is written into the exponent's bits. */
INLINE lanes exponential(lanes v) {
    const float shift = 0x1.8p23f; /* adding it rounds to a whole number, found in the low bits of the sum */
    v = at_most(at_least(v, -80.0f), 88.73f);
    lanes shifted = v * all(1.44269504f) + shift;
    lanes k = shifted - shift;
    lanes r = v - k * all(0.693359375f);
    r = r + k * all(2.12194440e-4f);
    lanes p = r * all(0x1.0fa73ap-7f) + 0x1.573acap-5f;
    p = p * r + 0x1.555a6ep-3f;
    p = p * r + 0x1.fffdc4p-2f;
    p = p * r + 0x1.fffff6p-1f;
    p = p * r + 1.0f;
    return p * (lanes)(((ints)shifted + 127) << 23);
}

INLINE lanes sigmoid(lanes v) {
    return 1.0f / (1.0f + exponential(-v));
}

INLINE lanes silu(lanes v) {
    return v / (1.0f + exponential(-v));
}

/* SiLU' = s (1 + v (1 - s)) = s + SiLU (1 - s), and SiLU itself. */
INLINE lanes silu_slope(lanes v, lanes *value) {
    lanes s = sigmoid(v);
    *value = v * s;
    return s + *value * (1.0f - s);
}

/* log(1 + e^v) = max(v, 0) + log(1 + e), e = e^-|v|; log(1 + e) = 2 artanh(q), q = e / (2 + e) <= 1/3, an even
 * polynomial of q times q with a relative error below 4e-9. */
INLINE lanes softplus(lanes v) {
    ints sign = (ints)v & (ints)all(-0.0f);
    lanes e = exponential((lanes)((ints)v | (ints)all(-0.0f))), q = e / (2.0f + e), u = q * q;
    lanes p = u * all(0x1.208bdp-2f) + 0x1.1e510ap-2f;
    p = p * u + 0x1.99dae6p-2f;
    p = p * u + 0x1.5554ep-1f;
    p = p * u + 2.0f;
    return (lanes)(~(sign >> 31) & (ints)v) + p * q;
}

INLINE lanes decay(lanes delta, lanes A, int expected) {
    return expected ? 1.0f / (1.0f - delta * A) : exponential(delta * A);
}

/* The bits of 2^(i / 8) less i << 20, so that those of k << 20 make them 2^(k / 8). */
#define ROOTS 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7

/* 2^(k / 8) for numbers with k in their low bits. */
INLINE lanes eighths(ints k) {
#if defined(BY_16)
    ints roots = (ints)_mm512_permutexvar_epi32((__m512i)k, (__m512i)(ints){ROOTS, ROOTS});
#elif defined(BY_8) && defined(__AVX2__)
    ints roots = (ints)_mm256_permutevar8x32_epi32((__m256i)(ints){ROOTS}, (__m256i)k);
#else
    static const int32_t table[8] = {ROOTS};
    ints roots;
    for (int j = 0; j < LANES; j++) roots[j] = table[k[j] & 7];
#endif
    return (lanes)((k << 20) + roots);
}

/* 8 / ln 2 in two parts, of which the first times any number is exact in a fused multiplication. */
#define EIGHTHS 0x1.715476p+3f
#define EIGHTHS_REST 0x1.4ae0bf8p-23f

/* exp(delta A) where that is from e^-80 to e^80, from A in eighths of a power of two, `whole` and `rest` (NULL: 0): with
 * delta A 8 / ln 2 = k + r, |r| <= 1/2, it is 2^(k / 8), of which eight are tabled, times 1 + r q(r) of degree 3, whose
 * largest error is 2.5e-8. exp(0) = 1 exactly, relative error below 2e-7 as of `exponential`, in fewer steps. */
INLINE lanes decay_within(lanes delta, lanes whole, const lanes *rest) {
    const float shift = 0x1.8p23f;
    lanes shifted = delta * whole + shift;
    lanes k = shifted - shift;
    lanes r = delta * whole - k;
    if (rest) r = r + delta * *rest;
    lanes p = r * all(0x1.c6a004p-14f) + 0x1.ec0c32p-9f;
    p = p * r + 0x1.62e432p-4f;
    p = p * r + 1.0f;
    return p * eighths((ints)shifted);
}

INLINE int smaller(int64_t a, int64_t b) {
    return (int)(a < b ? a : b);
}

INLINE float sum_of_lanes(lanes v) {
#if defined(BY_16)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(BY_8)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float sum = 0;
    for (int i = 0; i < LANES; i += 4) sum += (v[i] + v[i + 1]) + (v[i + 2] + v[i + 3]);
    return sum;
#endif
}

/* Row i of LANES vectors becomes column i. */
INLINE void transpose(lanes *v) {
#if defined(BY_16)
    __m512 a[16], *m = (__m512 *)v;
    for (int i = 0; i < 16; i += 2) { /* of each four lanes: two rows' numbers in turn, then four rows' side by side */
        a[i] = _mm512_unpacklo_ps(m[i], m[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(m[i], m[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            m[i + 2 * j] = _mm512_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            m[i + 2 * j + 1] = _mm512_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) { /* fours of rows 8 j to 8 j + 7 */
            a[4 * j + i] = _mm512_shuffle_f32x4(m[8 * j + i], m[8 * j + i + 4], 0x88);
            a[4 * j + i + 8] = _mm512_shuffle_f32x4(m[8 * j + i], m[8 * j + i + 4], 0xdd);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            m[4 * j + i] = _mm512_shuffle_f32x4(a[8 * j + i], a[8 * j + i + 4], 0x88);
            m[4 * j + i + 8] = _mm512_shuffle_f32x4(a[8 * j + i], a[8 * j + i + 4], 0xdd);
        }
#elif defined(BY_8)
    __m256 a[8], *m = (__m256 *)v;
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(m[i], m[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(m[i], m[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            m[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            m[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        __m256 first = m[i], second = m[i + 4];
        m[i] = _mm256_permute2f128_ps(first, second, 0x20);
        m[i + 4] = _mm256_permute2f128_ps(first, second, 0x31);
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            float number = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = number;
        }
#endif
}

/* Numbers below 1e-38 become 0 while a task runs: a state that only decays would crawl through them. */
#if defined(__SSE__)
INLINE unsigned flush_denormals(void) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
}
INLINE void restore_denormals(unsigned before) { _mm_setcsr(before); }
#else
INLINE unsigned flush_denormals(void) { return 0; }
INLINE void restore_denormals(unsigned before) { (void)before; }
#endif

static void *allocate(int64_t bytes) {
    void *p = NULL;
    return posix_memalign(&p, 64, bytes > 0 ? (size_t)bytes : 64) ? NULL : p;
}

#if defined(_OPENMP)
#include <omp.h>
INLINE int thread_number(void) { return omp_get_thread_num(); }
#else
INLINE int thread_number(void) { return 0; }
#endif
