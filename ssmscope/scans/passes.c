/* Passes over a layer's terms in float32 and their gradients: each reads its inputs once and writes its result once.
 *
 *     convolve   y_t = SiLU(bias + sum_j weight_j x_{t-j}), channel by channel
 *     norm       weight v / sqrt(mean of v^2 + eps) over each `size` neighbours, v = y SiLU(z), or y without a z
 *     gate       y SiLU(z)
 *     softplus   log(1 + e^v)
 *
 * A task is one position of one sequence, or a block of them whose sums are added in their order: no result depends on
 * the number of threads. */

#include "vectors.h"

enum { TAPS = 8 }; /* of a convolution whose gradients are taken, at most */

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
    if (count == LANES)
        memcpy(&v, at, sizeof(v));
    else
        for (int i = 0; i < count; i++) v[i] = at[i];
    return v;
}

INLINE void put(float *to, lanes v, int count) {
    if (count == LANES)
        memcpy(to, &v, sizeof(v));
    else
        for (int i = 0; i < count; i++) to[i] = v[i];
}

/* Channels of one position from the rows of its inputs, the nearest first, NULL where there are none. */
INLINE void convolved(const float *const *in, const float *weight, const float *bias, float *y, int64_t D, int64_t c,
                      int count, const int taps) {
    lanes v = bias == NULL ? (lanes){0} : load(bias + c, count);
    for (int j = taps - 1; j >= 0; j--)
        if (in[j] != NULL) v += load(weight + j * D + c, count) * load(in[j] + c, count);
    v = silu(v);
    put(y + c, v, count);
}

/* weight (taps, channels), the current position's first; y (batch, length, channels), contiguous, as is `before`, the
 * taps - 1 inputs before the first position, which may be NULL. `inputs` (length, taps), which may be NULL, says at which
 * positions of one sequence those of each stand, the nearest first, -1 where there are none. At most TAPS taps. */
void ssm_convolve(const shape *s, view x, const float *weight, const float *bias, const float *before,
                  const int64_t *inputs, float *y) {
    const int64_t D = s->channels, whole = D - D % LANES, back = s->taps - 1;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        const int64_t n = task / s->length, t = task % s->length;
        const float *in[TAPS];
        float *to = y + task * D;
        for (int64_t j = 0; j <= back; j++)
            if (inputs)
                in[j] = inputs[t * s->taps + j] < 0 ? NULL : row(x, n, inputs[t * s->taps + j]);
            else
                in[j] = t >= j ? row(x, n, t - j) : before ? before + (n * back + back + t - j) * D : NULL;
        if (back == 3 && in[3] != NULL && bias != NULL) {
            const float *a[] = {in[0], in[1], in[2], in[3]};
            for (int64_t c = 0; c < whole; c += LANES) {
                __builtin_prefetch(a[0] + x.step + c);
                lanes v = load(bias + c, LANES);
                for (int j = 3; j >= 0; j--) v += load(weight + j * D + c, LANES) * load(a[j] + c, LANES);
                v = silu(v);
                put(to + c, v, LANES);
            }
        } else
            for (int64_t c = 0; c < whole; c += LANES) convolved(in, weight, bias, to, D, c, LANES, (int)s->taps);
        if (whole < D) convolved(in, weight, bias, to, D, whole, (int)(D - whole), (int)s->taps);
    }
}

/* One vector of v, which is written out, and its squares. */
INLINE lanes opened(const float *y, const float *z, float *out, int count) {
    lanes v = z ? load(y, count) * silu(load(z, count)) : load(y, count);
    put(out, v, count);
    return v * v;
}

INLINE void weighed(const float *weight, lanes factor, float *out, int count) {
    lanes v = load(weight, count) * (load(out, count) * factor);
    put(out, v, count);
}

/* The norm of one row. One copy of its code for all who call it: compilers fuse a product and a sum in some places and
 * not in others, and the last bit of a norm would hang on who asks for it. */
static __attribute__((noinline, noclone)) void norm_row(const float *y, const float *z, const float *weight, int64_t size,
                                                        float eps, float *to) {
    int64_t whole = size - size % LANES;
    int rest = (int)(size - whole);
    lanes squares = {0};
    for (int64_t c = 0; c < whole; c += LANES) squares += opened(y + c, z ? z + c : NULL, to + c, LANES);
    if (rest) squares += opened(y + whole, z ? z + whole : NULL, to + whole, rest);
    lanes factor = all(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / (float)size + eps));
    for (int64_t c = 0; c < whole; c += LANES) weighed(weight + c, factor, to + c, LANES);
    if (rest) weighed(weight + whole, factor, to + whole, rest);
}

/* `size` divides the channels; out (batch, length, channels), contiguous; z may be NULL. */
void ssm_norm(const shape *s, view y, view z, const float *weight, float eps, float *out) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        int64_t n = task / s->length, t = task % s->length;
        for (int64_t start = 0; start < s->channels; start += s->size)
            norm_row(row(y, n, t) + start, z.at ? row(z, n, t) + start : NULL, weight + start, s->size, eps,
                     out + task * s->channels + start);
    }
}

/* total = x + added, rows of channels, and out its norm over all of them; both contiguous. */
void ssm_add_norm(const shape *s, view x, view added, const float *weight, float eps, float *total, float *out) {
    const int64_t D = s->channels;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        const float *of_x = row(x, task / s->length, task % s->length), *more = row(added, task / s->length, task % s->length);
        float *sum = total + task * D;
        for (int64_t c = 0; c < D; c += LANES) {
            int count = smaller(D - c, LANES);
            put(sum + c, load(of_x + c, count) + load(more + c, count), count);
        }
        norm_row(sum, NULL, weight, D, eps, out + task * D);
    }
}

/* ---- gates and steps ---- */

/* to = y SiLU(z), rows of channels; `to` is contiguous. */
void ssm_gate(const shape *s, view y, view z, float *to) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        const float *of_y = row(y, task / s->length, task % s->length), *of_z = row(z, task / s->length, task % s->length);
        for (int64_t c = 0; c < s->channels; c += LANES) {
            int count = smaller(s->channels - c, LANES);
            lanes v = load(of_y + c, count) * silu(load(of_z + c, count));
            put(to + task * s->channels + c, v, count);
        }
    }
}

void ssm_gate_backward(const shape *s, view y, view z, view grad, float *ybar, float *zbar) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        const int64_t n = task / s->length, t = task % s->length, at = task * s->channels;
        const float *of_y = row(y, n, t), *of_z = row(z, n, t), *back = row(grad, n, t);
        for (int64_t c = 0; c < s->channels; c += LANES) {
            int count = smaller(s->channels - c, LANES);
            lanes value, g = load(back + c, count), slope = silu_slope(load(of_z + c, count), &value);
            put(ybar + at + c, g * value, count);
            put(zbar + at + c, g * load(of_y + c, count) * slope, count);
        }
    }
}

/* to = log(1 + e^v), and vbar = grad / (1 + e^-v). */
void ssm_softplus(const shape *s, view v, float *to) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        const float *of = row(v, task / s->length, task % s->length);
        for (int64_t c = 0; c < s->channels; c += LANES) {
            int count = smaller(s->channels - c, LANES);
            put(to + task * s->channels + c, softplus(load(of + c, count)), count);
        }
    }
}

void ssm_softplus_backward(const shape *s, view v, view grad, float *vbar) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * s->length; task++) {
        const float *of = row(v, task / s->length, task % s->length);
        const float *back = row(grad, task / s->length, task % s->length);
        for (int64_t c = 0; c < s->channels; c += LANES) {
            int count = smaller(s->channels - c, LANES);
            put(vbar + task * s->channels + c, load(back + c, count) * sigmoid(load(of + c, count)), count);
        }
    }
}

/* ---- gradients of the convolution and of the norm ---- */

enum { STEPS = 64 }; /* positions of a block */

typedef struct {
    const shape *s;
    view x, grad;
    const float *weight, *bias, *before;
    float *xbar, *beforebar;
    int64_t xbar_row;
} convolution;

/* One vector of channels over a block, from its end on; `sums` are the gradients of weight and bias. Of the steps right
 * behind the block only their slopes are found, which those within it need. */
INLINE void convolved_back(const convolution *f, float *sums, int64_t n, int64_t start, int64_t end, int64_t c, int count,
                           const int taps) {
    const int64_t D = f->s->channels, back = taps - 1;
    const lanes added = f->bias == NULL ? (lanes){0} : load(f->bias + c, count);
    lanes w[TAPS], g[TAPS] = {{0}}, sum[TAPS + 1] = {{0}};
    for (int j = 0; j < taps; j++) w[j] = load(f->weight + j * D + c, count);
    for (int64_t t = smaller(end + back, f->s->length) - 1; t >= start; t--) {
        lanes in[TAPS], v = added, value, out = {0};
        for (int j = taps - 1; j > 0; j--) g[j] = g[j - 1];
        g[0] = (lanes){0};
        if (t >= 0) {
            for (int j = taps - 1; j >= 0; j--) {
                const float *at = t >= j ? row(f->x, n, t - j) : NULL;
                if (at == NULL && f->before != NULL) at = f->before + (n * back + back + t - j) * D;
                in[j] = at == NULL ? (lanes){0} : load(at + c, count);
                v += w[j] * in[j];
            }
            g[0] = load(row(f->grad, n, t) + c, count) * silu_slope(v, &value);
            if (t >= end) continue;
            for (int j = 0; j < taps; j++) sum[j] += g[0] * in[j];
            sum[taps] += g[0];
        }
        for (int j = 0; j < taps; j++) out += w[j] * g[j];
        if (t >= 0)
            put(f->xbar + (n * f->s->length + t) * f->xbar_row + c, out, count);
        else if (f->beforebar != NULL)
            put(f->beforebar + (n * back + back + t) * D + c, out, count);
    }
    for (int j = 0; j <= taps; j++) put(sums + j * D + c, sum[j], count);
}

/* The gradients of x (batch, length, channels), of `before`, and of weight and bias, (taps + 1, channels) for each STEPS
 * positions of a sequence: the bias is the last. All contiguous, but for the rows of x's, `xbar_row` numbers apart. A task
 * is one such block: channels of all positions would stand on more pages than a processor remembers. */
void ssm_convolve_backward(const shape *s, view x, const float *weight, const float *bias, const float *before,
                           view grad, float *xbar, float *beforebar, float *weightbar, int64_t xbar_row) {
    const int64_t blocks = (s->length + STEPS - 1) / STEPS, D = s->channels;
    const int back = (int)s->taps - 1;
    const convolution f = {s, x, grad, weight, bias, before, xbar, beforebar, xbar_row};
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t task = 0; task < s->batch * blocks; task++) {
        const int64_t n = task / blocks, first = task % blocks * STEPS, end = smaller(first + STEPS, s->length);
        const int64_t start = first ? first : -back;
        float *sums = weightbar + task * (back + 2) * D;
        for (int64_t c = 0; c < D; c += LANES) {
            const int count = smaller(D - c, LANES);
            if (back == 3 && count == LANES)
                convolved_back(&f, sums, n, start, end, c, LANES, 4);
            else
                convolved_back(&f, sums, n, start, end, c, count, back + 1);
        }
    }
}

/* The gradients of y and z (batch, length, channels), of z where there is one, and, for each STEPS positions of all
 * sequences, of weight (blocks, channels); all contiguous, but for the rows of z's, `zbar_row` numbers apart. */
void ssm_norm_backward(const shape *s, view y, view z, const float *weight, float eps, view grad, float *ybar,
                       float *zbar, float *weightbar, int64_t zbar_row) {
    const int64_t rows = s->batch * s->length, blocks = (rows + STEPS - 1) / STEPS;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        float *sums = weightbar + block * s->channels;
        memset(sums, 0, s->channels * sizeof(float));
        for (int64_t task = block * STEPS; task < rows && task < (block + 1) * STEPS; task++) {
            const int64_t n = task / s->length, t = task % s->length;
            for (int64_t start = 0; start < s->channels; start += s->size) {
                const float *of_y = row(y, n, t) + start, *of_z = z.at ? row(z, n, t) + start : NULL, *w = weight + start;
                const float *back = row(grad, n, t) + start;
                float *to_y = ybar + task * s->channels + start, *to_z = zbar + task * zbar_row + start;
                lanes squares = {0}, along = {0};
                for (int64_t c = 0; c < s->size; c += LANES) { /* SiLU(z) and SiLU'(z) wait where the gradients will be */
                    int count = smaller(s->size - c, LANES);
                    lanes v = load(of_y + c, count);
                    if (of_z) {
                        lanes value, slope = silu_slope(load(of_z + c, count), &value);
                        put(to_y + c, value, count);
                        put(to_z + c, slope, count);
                        v *= value;
                    }
                    squares += v * v;
                    along += v * load(back + c, count) * load(w + c, count);
                }
                const float factor = 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / (float)s->size + eps);
                const float less = factor * factor * sum_of_lanes(along) / (float)s->size;
                for (int64_t c = 0; c < s->size; c += LANES) {
                    int count = smaller(s->size - c, LANES);
                    lanes of = load(of_y + c, count), opened = of_z ? load(to_y + c, count) : all(1), v = of * opened;
                    lanes g = load(back + c, count), vbar = (g * load(w + c, count) - v * less) * factor;
                    put(sums + start + c, load(sums + start + c, count) + g * v * factor, count);
                    put(to_y + c, vbar * opened, count);
                    if (of_z) put(to_z + c, vbar * of * load(to_z + c, count), count);
                }
            }
        }
    }
}
