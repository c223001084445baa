/* The scan with one decay per head in float32, without gradients: what `scalar.scan` computes, several times faster.
 *
 *     H_t = a_t H_{t-1} + x_t b_t',      y_t = H_t c_t,      a_t = exp(log a_t)
 *
 * for heads of `width` channels and `states` states (Mamba-2, Dao & Gu 2024, section 2). Groups of heads share b and c.
 *
 * A vector holds neighbouring channels of a head, so the sums over states are vertical, and a head's state stays in the
 * cache while its steps go by. A task is one head of one sequence: no result depends on the number of threads. */

#include "vectors.h"

typedef struct {
    int64_t batch, length, heads, groups, width, states;
    int threads;
} shape;

/* A tensor (batch, length, heads or groups, channels or states), the last one contiguous, and its strides in numbers. */
typedef struct {
    const float *at;
    int64_t batch, step, head;
} view;

/* One step of `vectors` vectors of channels: the state moves on, y comes out. */
INLINE void step(lanes *restrict H, lanes *restrict y, const lanes *restrict x, float a, const float *restrict b,
                 const float *restrict c, int states, int vectors) {
    for (int v = 0; v < vectors; v++) {
        lanes s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, in = x[v], kept = all(a);
        lanes *restrict h = H + v;
        int n = 0;
        for (; n + 4 <= states; n += 4, h += 4 * vectors) {
            lanes h0 = h[0] * kept + in * b[n], h1 = h[vectors] * kept + in * b[n + 1];
            lanes h2 = h[2 * vectors] * kept + in * b[n + 2], h3 = h[3 * vectors] * kept + in * b[n + 3];
            h[0] = h0, h[vectors] = h1, h[2 * vectors] = h2, h[3 * vectors] = h3;
            s0 += h0 * c[n], s1 += h1 * c[n + 1], s2 += h2 * c[n + 2], s3 += h3 * c[n + 3];
        }
        for (; n < states; n++, h += vectors) {
            h[0] = h[0] * kept + in * b[n];
            s0 += h[0] * c[n];
        }
        y[v] = (s0 + s1) + (s2 + s3); /* four sums: an addition need not wait for the one before */
    }
}

static void decays(float *out, view log_a, int64_t n, int64_t h, int64_t length) {
    for (int64_t t = 0; t < length; t += LANES) {
        lanes v = {0};
        int steps = smaller(length - t, LANES);
        for (int i = 0; i < steps; i++) v[i] = log_a.at[n * log_a.batch + (t + i) * log_a.step + h * log_a.head];
        v = exponential(v);
        memcpy(out + t, &v, steps * sizeof(float));
    }
}

/* The whole of one head: `initial` and `final` are (width, states). */
static void head(const shape *s, view log_a, view b, view c, view x, const float *initial, float *y, float *final,
                 int64_t n, int64_t h, lanes *H, lanes *row, float *decay) {
    int states = (int)s->states, width = (int)s->width, vectors = (width + LANES - 1) / LANES;
    int64_t group = h / (s->heads / s->groups);
    const float *b_at = b.at + n * b.batch + group * b.head, *c_at = c.at + n * c.batch + group * c.head;
    const float *x_at = x.at + n * x.batch + h * x.head;
    lanes *out = row + vectors;
    memset(H, 0, sizeof(lanes) * states * vectors);
    for (int p = 0; p < width; p++)
        for (int m = 0; m < states; m++) H[m * vectors + p / LANES][p % LANES] = initial[(int64_t)p * states + m];
    memset(row, 0, sizeof(lanes) * vectors);
    decays(decay, log_a, n, h, s->length);
    for (int64_t t = 0; t < s->length; t++) {
        memcpy(row, x_at + t * x.step, width * sizeof(float));
        const float *bt = b_at + t * b.step, *ct = c_at + t * c.step;
        if (vectors == 1)
            step(H, out, row, decay[t], bt, ct, states, 1);
        else if (vectors == 2)
            step(H, out, row, decay[t], bt, ct, states, 2);
        else if (vectors == 4)
            step(H, out, row, decay[t], bt, ct, states, 4);
        else
            step(H, out, row, decay[t], bt, ct, states, vectors);
        memcpy(y + t * s->heads * width, out, width * sizeof(float));
    }
    for (int p = 0; p < width; p++)
        for (int m = 0; m < states; m++) final[(int64_t)p * states + m] = H[m * vectors + p / LANES][p % LANES];
}

/* y (batch, length, heads, width) and final (batch, heads, width, states), contiguous; 1 when there is no memory. */
int ssm_heads(const shape *s, view log_a, view b, view c, view x, const float *initial, float *y, float *final) {
    int64_t vectors = (s->width + LANES - 1) / LANES, tasks = s->batch * s->heads, matrix = s->width * s->states;
    int64_t own = vectors * s->states + 2 * vectors + (s->length + LANES - 1) / LANES + 1;
    int threads = s->threads < 1 ? 1 : s->threads;
    lanes *space = allocate(threads * own * (int64_t)sizeof(lanes));
    if (space == NULL) return 1;
#pragma omp parallel num_threads(threads)
    {
        lanes *H = space + thread_number() * own;
        unsigned before = flush_denormals();
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t n = task / s->heads, h = task % s->heads;
            head(s, log_a, b, c, x, initial + task * matrix, y + n * s->length * s->heads * s->width + h * s->width,
                 final + task * matrix, n, h, H, H + vectors * s->states,
                 (float *)(H + vectors * s->states + 2 * vectors));
        }
        restore_denormals(before);
    }
    free(space);
    return 0;
}
