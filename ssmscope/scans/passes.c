/* Passes over a layer's terms in float32, without gradients: each reads its inputs once and writes its result once.
 *
 *     convolve   y_t = SiLU(bias + sum_j weight_j x_{t-j}), channel by channel
 *     norm       weight v / sqrt(mean of v^2 + eps) over each `size` neighbours, v = y SiLU(z)
 *
 * A task is one position of one sequence: no result depends on the number of threads. */

#include "vectors.h"

typedef struct {
    int64_t batch, length, channels, taps, size;
    int threads;
} shape;

/* A tensor (batch, length, channels), the last one contiguous, and its strides in numbers. */
typedef struct {
    const float *at;
    int64_t batch, step;
} view;

INLINE const float *row(view v, int64_t n, int64_t t) {
    return v.at + n * v.batch + t * v.step;
}

INLINE lanes load(const float *at, int count) {
    lanes v = {0};
    memcpy(&v, at, count * sizeof(float));
    return v;
}

INLINE lanes silu(lanes v) {
    return v / (1.0f + exponential(-v));
}

/* One vector of channels of one position; `before` has the taps - 1 inputs before the first position, or is NULL. */
INLINE void convolved(const shape *s, view x, const float *weight, const float *bias, const float *before, float *y,
                      int64_t n, int64_t t, int64_t c, int count) {
    int64_t back = s->taps - 1;
    lanes v = bias == NULL ? (lanes){0} : load(bias + c, count);
    for (int64_t j = back; j >= 0; j--) {
        const float *at = t >= j ? row(x, n, t - j) : NULL;
        if (at == NULL && before != NULL) at = before + (n * back + back + t - j) * s->channels;
        if (at != NULL) v += load(weight + j * s->channels + c, count) * load(at + c, count);
    }
    v = silu(v);
    memcpy(y + (n * s->length + t) * s->channels + c, &v, count * sizeof(float));
}

/* weight (taps, channels), the current position's first; y (batch, length, channels), contiguous, as is `before`. */
void ssm_convolve(const shape *s, view x, const float *weight, const float *bias, const float *before, float *y) {
    int64_t whole = s->channels - s->channels % LANES;
#pragma omp parallel for num_threads(s->threads) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        int64_t n = task / s->length, t = task % s->length;
        for (int64_t c = 0; c < whole; c += LANES) convolved(s, x, weight, bias, before, y, n, t, c, LANES);
        if (whole < s->channels) convolved(s, x, weight, bias, before, y, n, t, whole, (int)(s->channels - whole));
    }
}

/* One vector of v, which is written out, and its squares. */
INLINE lanes opened(const float *y, const float *z, float *out, int count) {
    lanes v = load(y, count) * silu(load(z, count));
    memcpy(out, &v, count * sizeof(float));
    return v * v;
}

INLINE void weighed(const float *weight, lanes factor, float *out, int count) {
    lanes v = load(weight, count) * (load(out, count) * factor);
    memcpy(out, &v, count * sizeof(float));
}

/* `size` divides the channels; out (batch, length, channels), contiguous. */
void ssm_norm(const shape *s, view y, view z, const float *weight, float eps, float *out) {
    int64_t whole = s->size - s->size % LANES;
    int rest = (int)(s->size - whole);
#pragma omp parallel for num_threads(s->threads) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        int64_t n = task / s->length, t = task % s->length;
        for (int64_t start = 0; start < s->channels; start += s->size) {
            const float *of_y = row(y, n, t) + start, *of_z = row(z, n, t) + start, *w = weight + start;
            float *to = out + task * s->channels + start;
            lanes squares = {0};
            for (int64_t c = 0; c < whole; c += LANES) squares += opened(of_y + c, of_z + c, to + c, LANES);
            if (rest) squares += opened(of_y + whole, of_z + whole, to + whole, rest);
            lanes factor = all(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / (float)s->size + eps));
            for (int64_t c = 0; c < whole; c += LANES) weighed(w + c, factor, to + c, LANES);
            if (rest) weighed(w + whole, factor, to + whole, rest);
        }
    }
}
