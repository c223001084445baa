/* Vectors of float32, their exponential and their sum. Everything is written for any number of lanes; the intrinsics
 * below serve only what compilers do not find themselves. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t vec_int __attribute__((vector_size(4 * LANES)));

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vec splat(float value) { return value - (vec){0}; }

INLINE vec where(vec_int mask, vec yes, vec no) { return (vec)((mask & (vec_int)yes) | (~mask & (vec_int)no)); }

INLINE float sum_lanes(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/* The bits of 2^(i / 8) less i << 20, for i = 0 ... 7: adding k << 20 to entry k mod 8 gives the bits of 2^(k / 8). */
#define EIGHTH_ROOTS 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7

/* 2^(k / 8) for k in [-1008, 1024] in the low 23 bits; infinity for k = 1024. */
INLINE vec exp2_eighths(vec_int k) {
#if defined(__AVX512F__)
    vec_int roots = (vec_int)_mm512_permutexvar_epi32((__m512i)k, (__m512i)(vec_int){EIGHTH_ROOTS, EIGHTH_ROOTS});
#elif defined(__AVX2__)
    vec_int roots = (vec_int)_mm256_permutevar8x32_epi32((__m256i)(vec_int){EIGHTH_ROOTS}, (__m256i)k);
#else
    static const int32_t table[8] = {EIGHTH_ROOTS};
    vec_int roots;
    for (int i = 0; i < LANES; i++) roots[i] = table[k[i] & 7];
#endif
    return (vec)((k << 20) + roots);
}

#define EIGHTHS_PER_E 0x1.715476p+3f /* 8 / ln 2 */

/* exp(u v) from scaled = 8 u / ln 2 and v, for results in [2^-126, 2^127.9]. With scaled v = k + r, |r| <= 1/2, it is
 * 2^(k / 8) 2^(r / 8); the second factor is a polynomial of degree 3, with relative error 2.5e-8. exp(0) is 1. */
INLINE vec exp_product(vec scaled, vec v) {
    const float shift = 0x1.8p23f; /* adding it rounds to an integer, which is then in the low bits of the sum */
    vec shifted = scaled * v + shift;
    vec r = scaled * v - (shifted - shift);
    vec p = r * splat(0x1.c6a004p-14f) + 0x1.ec0c32p-9f;
    p = p * r + 0x1.62e432p-4f;
    p = p * r + 1.0f;
    return p * exp2_eighths((vec_int)shifted);
}

/* exp(u v) for any numbers: 0 below 2^-126, infinity above 2^127.9, NaN for NaN. */
INLINE vec exp_any_product(vec scaled, vec v) {
    vec eighths = scaled * v, power = exp_product(scaled, v);
    power = where(eighths < splat(-1008.0f), (vec){0}, power);
    return where(eighths > splat(1023.0f), splat(__builtin_inff()), power);
}

/* Flush numbers below 2^-126 to zero until restored: a state that only decays would linger there, a hundred times
 * slower. Returns the thread's mode before. */
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

/* Memory for vectors, or NULL. */
static void *allocate(int64_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes > 0 ? (size_t)bytes : 64) ? NULL : memory;
}
