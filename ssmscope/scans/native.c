/* The scan with a decay per state, width 1, in float32: what `diagonal.scan` computes, several times faster.
 *
 *     H_t[d, n] = a_t[d, n] H_{t-1}[d, n] + delta_t[d] x_t[d] b_t[n],      y_t[d] = sum_n c_t[n] H_t[d, n],
 *     a_t[d, n] = exp(delta_t[d] A[d, n]),   or   1 / (1 - delta_t[d] A[d, n])   (the expected decay)
 *
 * for channels d (the "heads"), states n and steps t (Mamba, Gu & Dao 2023, Eq. 2).
 *
 * A vector holds neighbouring channels, so every sum over states is vertical. The channels are cut into slabs, the
 * steps into chunks; of one slab and chunk, delta, x and y are copied into tiles that stay in the first-level cache.
 * Within a tile the loop over steps is the innermost one: A, the state and the adjoint of one (vector, n) stay in
 * registers, and any number of states runs alike.
 *
 * A task is one (sequence, slab). Sums over channels are taken within a slab first, then over slabs in their order, so
 * that no result depends on the number of threads. */

#include "vectors.h"

enum {
    CHUNK = 32,       /* steps; the states at their starts are what the backward pass needs */
    ROW = CHUNK + 1,  /* not a power of two: rows of several tiles must not share the cache's sets */
    SLAB = 64,        /* channels */
    VECTORS = SLAB / LANES
};

typedef lanes tile[VECTORS][ROW]; /* one slab over one chunk: channel v * LANES + lane, step t at [v][t][lane] */

/* A float32 tensor (batch, length, channels) and its strides in numbers. */
typedef struct {
    const float *at;
    int64_t batch, step, channel;
} view;

/* ---- tiles ---- */

/* Steps and channels from (t, d) on into a tile, 0 where the slab has no channel. */
static void load(tile out, view from, int64_t n, int64_t t, int64_t d, int steps, int channels) {
    const float *at = from.at + n * from.batch + t * from.step + d * from.channel;
    if (from.channel == 1 && channels == SLAB) {
        for (int s = 0; s < steps; s++)
            for (int v = 0; v < VECTORS; v++) memcpy(&out[v][s], at + s * from.step + v * LANES, sizeof(lanes));
        return;
    }
    if (channels < SLAB) memset(out, 0, sizeof(tile));
    for (int i = 0; i < channels; i++)
        for (int s = 0; s < steps; s++) out[i / LANES][s][i % LANES] = at[s * from.step + i * from.channel];
}

/* The reverse, into a contiguous tensor; `to` is its number at (t, d). */
static void store(float *to, tile from, int64_t row, int steps, int channels) {
    for (int s = 0; s < steps; s++)
        for (int v = 0; v < VECTORS; v++) {
            int valid = smaller(channels - v * LANES, LANES);
            if (valid == LANES)
                memcpy(to + s * row + v * LANES, &from[v][s], sizeof(lanes));
            else if (valid > 0)
                memcpy(to + s * row + v * LANES, &from[v][s], valid * sizeof(float));
        }
}

/* A slab's (channels, states) matrix, contiguous, as vectors [n][v], and back. */
static void load_matrix(lanes *out, const float *from, int states, int channels) {
    memset(out, 0, sizeof(lanes) * states * VECTORS);
    for (int i = 0; i < channels; i++)
        for (int n = 0; n < states; n++) out[n * VECTORS + i / LANES][i % LANES] = from[(int64_t)i * states + n];
}

static void store_matrix(float *to, const lanes *from, int states, int channels) {
    for (int i = 0; i < channels; i++)
        for (int n = 0; n < states; n++) to[(int64_t)i * states + n] = from[n * VECTORS + i / LANES][i % LANES];
}

/* x times delta, as it is written. */
static void scale(tile x, tile delta, int steps) {
    for (int v = 0; v < VECTORS; v++)
        for (int s = 0; s < steps; s++) x[v][s] *= delta[v][s];
}

/* ---- decays ---- */

/* A of one (vector, n), also in eighths of a power of two, and the largest |A| of the slab. */
typedef struct {
    lanes A, whole, rest;
} rate;

enum { EXPECTED, BOUNDED, ANY }; /* how a decay is found: BOUNDED where delta A cannot leave what `decay_within` takes */

static void load_rates(rate *to, float *most, const float *from, int states, int channels) {
    memset(to, 0, sizeof(rate) * states * VECTORS);
    *most = 0;
    for (int i = 0; i < channels; i++)
        for (int n = 0; n < states; n++) {
            float A = from[(int64_t)i * states + n], whole = A * EIGHTHS;
            rate *r = &to[n * VECTORS + i / LANES];
            r->A[i % LANES] = A, r->whole[i % LANES] = whole;
            r->rest[i % LANES] = __builtin_fmaf(A, EIGHTHS, -whole) + A * EIGHTHS_REST;
            if (!(__builtin_fabsf(A) <= *most)) *most = __builtin_fabsf(A); /* NaN stays */
        }
}

/* How decays of a tile of steps are found; what steps are not finite leave the bound. */
static int way_of(const lanes *delta, float most, int steps, int expected) {
    lanes largest = {0};
    float bound = 0;
    for (int s = 0; s < steps; s++) {
        lanes size = (lanes)((ints)delta[s] & 0x7fffffff);
        ints more = ~(ints)(size <= largest);
        largest = (lanes)((more & (ints)size) | (~more & (ints)largest));
    }
    for (int i = 0; i < LANES; i++)
        if (!(largest[i] <= bound)) bound = largest[i];
    return expected ? EXPECTED : bound * most < 79.0f ? BOUNDED : ANY;
}

INLINE lanes decay_of(lanes delta, rate r, const int way) {
    if (way == EXPECTED) return decay(delta, r.A, 1);
#if defined(__SSE__) && !defined(__FMA__)
    return exponential(delta * r.A); /* products would be rounded */
#endif
    lanes near = decay_within(delta, r.whole, r.rest);
    if (way == BOUNDED) return near;
    lanes v = delta * r.A;
    ints within = (ints)(v > -79.0f) & (ints)(v < 79.0f);
    return (lanes)((within & (ints)near) | (~within & (ints)exponential(v)));
}

/* ---- shapes and memory ---- */

typedef struct {
    int64_t batch, length, channels, states;
    int threads, expected;
} shape;

static int64_t slabs_of(const shape *s) { return (s->channels + SLAB - 1) / SLAB; }
static int64_t chunks_of(const shape *s) { return (s->length + CHUNK - 1) / CHUNK; }
static int channels_of(const shape *s, int64_t slab) { return smaller(s->channels - slab * SLAB, SLAB); }

/* Numbers of float32 in the states at the chunks' starts, kept from the forward for the backward pass. */
int64_t ssm_starts_size(const shape *s) {
    return s->batch * slabs_of(s) * chunks_of(s) * s->states * SLAB;
}

/* ---- forward ---- */

/* One (vector, n) over a chunk: from H before it to H after it, adding c_t H_t to y and a_t to kept. */
INLINE lanes forward_steps(lanes H, rate A, const lanes *delta, const lanes *x, const float *b, const float *c,
                           lanes *y, lanes *kept, int64_t states, int steps, const int way) {
    for (int s = 0; s < steps; s++) {
        lanes a = decay_of(delta[s], A, way);
        H = a * H + x[s] * b[s * states];
        y[s] += H * c[s * states];
        if (kept) kept[s] += a;
    }
    return H;
}

static void forward_chunk(const shape *s, lanes *H, const rate *A, float most, tile delta, tile x, const float *b,
                          const float *c, tile y, lanes (*kept)[ROW], int steps) {
    int64_t N = s->states;
    for (int v = 0; v < VECTORS; v++) {
        const int way = way_of(delta[v], most, steps, s->expected);
        for (int64_t n = 0; n < N; n++) {
            lanes *h = &H[n * VECTORS + v];
            const rate a = A[n * VECTORS + v];
            if (way == EXPECTED)
                *h = forward_steps(*h, a, delta[v], x[v], b + n, c + n, y[v], kept ? kept[v] : NULL, N, steps, EXPECTED);
            else if (way == ANY)
                *h = forward_steps(*h, a, delta[v], x[v], b + n, c + n, y[v], kept ? kept[v] : NULL, N, steps, ANY);
            else if (kept)
                *h = forward_steps(*h, a, delta[v], x[v], b + n, c + n, y[v], kept[v], N, steps, BOUNDED);
            else
                *h = forward_steps(*h, a, delta[v], x[v], b + n, c + n, y[v], NULL, N, steps, BOUNDED);
        }
    }
}

/* The sum over a slab's channels and states of a_t, per step. */
static void sum_kept(float *out, tile kept, int steps, int channels) {
    for (int t = 0; t < steps; t++) {
        float total = 0;
        for (int v = 0; v * LANES < channels; v++) {
            lanes part = kept[v][t];
            if (channels - v * LANES >= LANES)
                total += sum_of_lanes(part);
            else
                for (int i = 0; i < channels - v * LANES; i++) total += part[i];
        }
        out[t] = total;
    }
}

typedef struct {
    const shape *s;
    view x, delta;
    const float *A, *b, *c, *initial;
    float *y, *final, *starts, *sums; /* sums of a_t, (task, length); starts and sums may be NULL */
    lanes *work;                      /* a state and rates, thus four matrices, per task */
} forward_terms;

static void forward_task(const forward_terms *f, int64_t task) {
    const shape *s = f->s;
    const int64_t slabs = slabs_of(s), i = task / slabs, d = task % slabs * SLAB;
    const int64_t L = s->length, N = s->states, D = s->channels, matrix = N * VECTORS;
    const int channels = channels_of(s, task % slabs);
    tile delta, x, y, kept;
    lanes *H = f->work + 4 * task * matrix;
    rate *A = (rate *)(H + matrix);
    float most;
    load_rates(A, &most, f->A + d * N, N, channels);
    load_matrix(H, f->initial + (i * D + d) * N, N, channels);
    for (int64_t t = 0; t < L; t += CHUNK) {
        const int steps = smaller(L - t, CHUNK);
        const int64_t at = i * L + t;
        if (f->starts) memcpy(f->starts + (task * chunks_of(s) + t / CHUNK) * N * SLAB, H, matrix * sizeof(lanes));
        load(delta, f->delta, i, t, d, steps, channels);
        load(x, f->x, i, t, d, steps, channels);
        scale(x, delta, steps);
        memset(y, 0, sizeof(tile));
        if (f->sums) memset(kept, 0, sizeof(tile));
        forward_chunk(s, H, A, most, delta, x, f->b + at * N, f->c + at * N, y, f->sums ? kept : NULL, steps);
        store(f->y + at * D + d, y, D, steps, channels);
        if (f->sums) sum_kept(f->sums + task * L + t, kept, steps, channels);
    }
    store_matrix(f->final + (i * D + d) * N, H, N, channels);
}

/* b and c are contiguous (batch, length, states), A (channels, states), initial and final (batch, channels, states), y
 * (batch, length, channels), kept (batch, length): the mean of a_t. `starts` and `kept` may be NULL.
 * Gives 0, or 1 when there is no memory for the work. */
int ssm_forward(const shape *s, const view *x, const view *delta, const float *A, const float *b, const float *c,
                const float *initial, float *y, float *final, float *starts, float *kept) {
    const int64_t slabs = slabs_of(s), tasks = s->batch * slabs, L = s->length, N = s->states;
    float *sums = kept ? allocate(tasks * L * sizeof(float)) : NULL;
    lanes *work = allocate(4 * tasks * N * VECTORS * sizeof(lanes));
    const int failed = !work || (kept && !sums);
    const forward_terms f = {s, *x, *delta, A, b, c, initial, y, final, starts, sums, work};
    if (!failed) {
#pragma omp parallel for schedule(dynamic) num_threads(s->threads) if (s->threads > 1)
        for (int64_t task = 0; task < tasks; task++) {
            unsigned mode = flush_denormals();
            forward_task(&f, task);
            restore_denormals(mode);
        }
        for (int64_t row = 0; kept && row < s->batch * L; row++) {
            double total = 0;
            for (int64_t slab = 0; slab < slabs; slab++) total += sums[(row / L * slabs + slab) * L + row % L];
            kept[row] = (float)(total / ((double)s->channels * N));
        }
    }
    free(sums);
    free(work);
    return failed;
}

/* ---- lengths of decayed keys ---- */

typedef struct {
    const shape *s;
    view elapsed;
    const float *A, *b;
    float *squares;
    int to_end;  /* whether `elapsed` holds steps, to be summed from the one after t to the last */
    lanes *work; /* a matrix per task */
} key_terms;

/* A chunk's steps as the sums of those after them; `sum` is that of the later chunks, with what it has lost to rounding
 * (Kahan). */
static void sum_from_end(tile steps, lanes (*sum)[2], int count) {
    for (int v = 0; v < VECTORS; v++)
        for (int i = count - 1; i >= 0; i--) {
            lanes add = steps[v][i] - sum[v][1], total = sum[v][0] + add;
            steps[v][i] = sum[v][0];
            sum[v][1] = (total - sum[v][0]) - add;
            sum[v][0] = total;
        }
}

static void keys_task(const key_terms *f, int64_t task) {
    const shape *s = f->s;
    const int64_t slabs = slabs_of(s), i = task / slabs, d = task % slabs * SLAB;
    const int64_t L = s->length, N = s->states, D = s->channels;
    const int channels = channels_of(s, task % slabs);
    tile elapsed, squares;
    lanes *A = f->work + task * N * VECTORS, sum[VECTORS][2];
    memset(sum, 0, sizeof(sum));
    load_matrix(A, f->A + d * N, N, channels);
    for (int64_t chunk = chunks_of(s) - 1; chunk >= 0; chunk--) {
        const int64_t t = chunk * CHUNK;
        const int steps = smaller(L - t, CHUNK);
        const float *b = f->b + (i * L + t) * N;
        load(elapsed, f->elapsed, i, t, d, steps, channels);
        if (f->to_end) sum_from_end(elapsed, sum, steps);
        memset(squares, 0, sizeof(tile));
        for (int v = 0; v < VECTORS; v++)
            for (int64_t n = 0; n < N; n++)
                for (int step = 0; step < steps; step++) {
                    lanes key = exponential(elapsed[v][step] * A[n * VECTORS + v]) * b[step * N + n];
                    squares[v][step] += key * key;
                }
        store(f->squares + (i * L + t) * D + d, squares, D, steps, channels);
    }
}

/* squares[t, d] = sum_n (exp(elapsed_t[d] A[d, n]) b_t[n])^2, (batch, length, channels), contiguous as b and A.
 * Gives 0, or 1 when there is no memory for the work. */
int ssm_keys(const shape *s, const view *elapsed, const float *A, const float *b, float *squares, int to_end) {
    const int64_t tasks = s->batch * slabs_of(s);
    lanes *work = allocate(tasks * s->states * VECTORS * sizeof(lanes));
    const key_terms f = {s, *elapsed, A, b, squares, to_end, work};
    if (work) {
#pragma omp parallel for schedule(dynamic) num_threads(s->threads) if (s->threads > 1)
        for (int64_t task = 0; task < tasks; task++) {
            unsigned mode = flush_denormals();
            keys_task(&f, task);
            restore_denormals(mode);
        }
    }
    free(work);
    return !work;
}

/* ---- backward ---- */

/* One (vector, n) over a chunk, backwards. With ybar the gradient of y, the adjoint of the state is
 *     lambda_t = c_t ybar_t + a_{t+1} lambda_{t+1},
 * and bbar_t = sum_d lambda_t x_t, cbar_t = sum_d ybar_t H_t, xbar_t = sum_n lambda_t b_t,
 * deltabar_t = sum_n g_t A, Abar = sum_t g_t delta_t, where g_t is the gradient of delta_t A: lambda_t a_t H_{t-1}, and
 * for the expected decay, log a_t = -log(1 - delta_t A), a_t times that.
 * `carried` is a_{t+1} lambda_{t+1} after the chunk; that before the chunk is returned. */
INLINE lanes backward_steps(lanes H, rate A, lanes carried, const lanes *delta, const lanes *x, const lanes *ybar,
                            const float *b, const float *c, lanes *xbar, lanes *deltabar, lanes *bbar, lanes *cbar,
                            lanes *Abar, int64_t states, int steps, const int way) {
    lanes a[CHUNK], before[CHUNK], sum = *Abar;
    for (int s = 0; s < steps; s++) {
        before[s] = H;
        a[s] = decay_of(delta[s], A, way);
        H = a[s] * H + x[s] * b[s * states];
        cbar[s] += ybar[s] * H;
    }
    for (int s = steps - 1; s >= 0; s--) {
        lanes lambda = ybar[s] * c[s * states] + carried;
        bbar[s] += lambda * x[s];
        xbar[s] += lambda * b[s * states];
        carried = lambda * a[s];
        lanes g = carried * before[s];
        if (way == EXPECTED) g *= a[s];
        deltabar[s] += g * A.A;
        sum += g * delta[s];
    }
    *Abar = sum;
    return carried;
}

typedef struct {
    const shape *s;
    view x, delta, ybar;
    const float *A, *b, *c, *starts, *finalbar;
    float *xbar, *deltabar, *initialbar;
    float *Abars;  /* Abar of each sequence */
    float *bcbars; /* bbar and cbar of each task, (task, 2, length, states) */
    lanes *work;   /* two matrices and rates, thus five, per task */
} backward_terms;

static void backward_task(const backward_terms *f, int64_t task) {
    const shape *s = f->s;
    const int64_t slabs = slabs_of(s), i = task / slabs, d = task % slabs * SLAB;
    const int64_t L = s->length, N = s->states, D = s->channels, matrix = N * VECTORS;
    const int channels = channels_of(s, task % slabs);
    tile delta, read, x, ybar, xbar, deltabar;
    lanes bbar[CHUNK], cbar[CHUNK];
    lanes *carried = f->work + 5 * task * matrix, *Abar = carried + matrix;
    rate *A = (rate *)(Abar + matrix);
    float most;
    int way[VECTORS];
    load_rates(A, &most, f->A + d * N, N, channels);
    load_matrix(carried, f->finalbar + (i * D + d) * N, N, channels);
    memset(Abar, 0, matrix * sizeof(lanes));
    for (int64_t k = chunks_of(s) - 1; k >= 0; k--) {
        const int64_t t = k * CHUNK, at = i * L + t;
        const int steps = smaller(L - t, CHUNK);
        const float *starts = f->starts + (task * chunks_of(s) + k) * N * SLAB;
        const float *b = f->b + at * N, *c = f->c + at * N;
        float *bs = f->bcbars + (2 * task * L + t) * N, *cs = bs + L * N;
        load(delta, f->delta, i, t, d, steps, channels);
        load(x, f->x, i, t, d, steps, channels);
        load(ybar, f->ybar, i, t, d, steps, channels);
        for (int v = 0; v < VECTORS; v++) {
            way[v] = way_of(delta[v], most, steps, s->expected);
            for (int r = 0; r < steps; r++) read[v][r] = x[v][r];
        }
        scale(x, delta, steps);
        memset(xbar, 0, sizeof(tile));
        memset(deltabar, 0, sizeof(tile));
        for (int64_t n = 0; n < N; n++) {
            memset(bbar, 0, sizeof(bbar));
            memset(cbar, 0, sizeof(cbar));
            for (int v = 0; v < VECTORS; v++) {
                const int64_t j = n * VECTORS + v;
                lanes H;
                memcpy(&H, starts + j * LANES, sizeof(lanes));
                if (way[v] == EXPECTED)
                    carried[j] = backward_steps(H, A[j], carried[j], delta[v], x[v], ybar[v], b + n, c + n, xbar[v],
                                                deltabar[v], bbar, cbar, &Abar[j], N, steps, EXPECTED);
                else if (way[v] == ANY)
                    carried[j] = backward_steps(H, A[j], carried[j], delta[v], x[v], ybar[v], b + n, c + n, xbar[v],
                                                deltabar[v], bbar, cbar, &Abar[j], N, steps, ANY);
                else
                    carried[j] = backward_steps(H, A[j], carried[j], delta[v], x[v], ybar[v], b + n, c + n, xbar[v],
                                                deltabar[v], bbar, cbar, &Abar[j], N, steps, BOUNDED);
            }
            for (int r = 0; r < steps; r++) {
                bs[r * N + n] = sum_of_lanes(bbar[r]);
                cs[r * N + n] = sum_of_lanes(cbar[r]);
            }
        }
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < steps; r++) {
                deltabar[v][r] += xbar[v][r] * read[v][r];
                xbar[v][r] *= delta[v][r];
            }
        store(f->xbar + at * D + d, xbar, D, steps, channels);
        store(f->deltabar + at * D + d, deltabar, D, steps, channels);
    }
    store_matrix(f->initialbar + (i * D + d) * N, carried, N, channels);
    store_matrix(f->Abars + (i * D + d) * N, Abar, N, channels);
}

/* bbar and cbar of one (sequence, step): the slabs' sums, added in their order. */
static void sum_slabs(const backward_terms *f, int64_t row, float *bbar, float *cbar) {
    const int64_t slabs = slabs_of(f->s), L = f->s->length, N = f->s->states;
    for (int64_t n = 0; n < N; n++) bbar[row * N + n] = cbar[row * N + n] = 0;
    for (int64_t slab = 0; slab < slabs; slab++) {
        const float *b = f->bcbars + (2 * (row / L * slabs + slab) * L + row % L) * N, *c = b + L * N;
        for (int64_t n = 0; n < N; n++) {
            bbar[row * N + n] += b[n];
            cbar[row * N + n] += c[n];
        }
    }
}

/* The gradients of x, delta (batch, length, channels), b, c (batch, length, states), initial (batch, channels, states)
 * and A (channels, states), all contiguous, from those of y and of the final state (contiguous).
 * Gives 0, or 1 when there is no memory for the work. */
int ssm_backward(const shape *s, const view *x, const view *delta, const float *A, const float *b, const float *c,
                 const float *starts, const view *ybar, const float *finalbar, float *xbar, float *deltabar,
                 float *Abar, float *bbar, float *cbar, float *initialbar) {
    const int64_t tasks = s->batch * slabs_of(s), L = s->length, N = s->states, DN = s->channels * N;
    float *bcbars = allocate(2 * tasks * L * N * sizeof(float));
    float *Abars = allocate(s->batch * DN * sizeof(float));
    lanes *work = allocate(5 * tasks * N * VECTORS * sizeof(lanes));
    const int failed = !bcbars || !Abars || !work;
    const backward_terms f = {s,        *x,   *delta,   *ybar,      A,     b,      c,   starts,
                              finalbar, xbar, deltabar, initialbar, Abars, bcbars, work};
    if (!failed) {
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
        {
            unsigned mode = flush_denormals();
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; task++) backward_task(&f, task);
#pragma omp for nowait
            for (int64_t row = 0; row < s->batch * L; row++) sum_slabs(&f, row, bbar, cbar);
#pragma omp for
            for (int64_t j = 0; j < DN; j++) {
                float total = 0;
                for (int64_t i = 0; i < s->batch; i++) total += Abars[i * DN + j];
                Abar[j] = total;
            }
            restore_denormals(mode);
        }
    }
    free(bcbars);
    free(Abars);
    free(work);
    return failed;
}
