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
 * With a `bias` what is given as delta is v, and delta = softplus(v + bias); with a `z` what is written is y SiLU(z).
 *
 * A task is a band of slabs, which go through the steps side by side. Sums over channels are taken within a slab first, then over slabs in their order, so
 * that no result depends on the number of threads. */

#include "tiles.h"

enum {
    PARTS = 4, /* for each thread */
    BAND = 8   /* slabs, at most */
};

enum { TOGETHER = 2 }; /* states of a vector walked side by side: they share what is read of a step */

/* ---- forward ---- */

/* Some states of one vector over a chunk: from H before it to H after it, adding c_t H_t to y and a_t to kept. */
INLINE void forward_steps(lanes *H, const rate *A, const lanes *delta, const lanes *x, const float *b, const float *c,
                          lanes *y, lanes *kept, int64_t states, int steps, const int count, const int way) {
    lanes h[TOGETHER];
    for (int i = 0; i < count; i++) h[i] = H[i * VECTORS];
    for (int s = 0; s < steps; s++) {
        lanes read = y[s], held = kept ? kept[s] : (lanes){0};
        for (int i = 0; i < count; i++) {
            lanes a = decay_of(delta[s], A[i * VECTORS], way);
            h[i] = a * h[i] + x[s] * b[s * states + i];
            read += h[i] * c[s * states + i];
            held += a;
        }
        y[s] = read;
        if (kept) kept[s] = held;
    }
    for (int i = 0; i < count; i++) H[i * VECTORS] = h[i];
}

INLINE void forward_vector(lanes *H, const rate *A, const lanes *delta, const lanes *x, const float *b, const float *c,
                           lanes *y, lanes *kept, int64_t states, int steps, const int way) {
    int64_t n = 0;
    for (; n + TOGETHER <= states; n += TOGETHER)
        forward_steps(H + n * VECTORS, A + n * VECTORS, delta, x, b + n, c + n, y, kept, states, steps, TOGETHER, way);
    for (; n < states; n++)
        forward_steps(H + n * VECTORS, A + n * VECTORS, delta, x, b + n, c + n, y, kept, states, steps, 1, way);
}

static void forward_chunk(const shape *s, lanes *H, const rate *A, const int *way, tile delta, tile x, const float *b,
                          const float *c, tile y, lanes (*kept)[ROW], int v, int steps) {
    lanes *of = kept ? kept[v] : NULL;
    const int64_t N = s->states;
    switch (way[v]) {
        case EXPECTED: forward_vector(H + v, A + v, delta[v], x[v], b, c, y[v], of, N, steps, EXPECTED); break;
        case ANY: forward_vector(H + v, A + v, delta[v], x[v], b, c, y[v], of, N, steps, ANY); break;
        case BOUNDED: forward_vector(H + v, A + v, delta[v], x[v], b, c, y[v], of, N, steps, BOUNDED); break;
        default:
            if (of)
                forward_vector(H + v, A + v, delta[v], x[v], b, c, y[v], of, N, steps, FADING);
            else
                forward_vector(H + v, A + v, delta[v], x[v], b, c, y[v], NULL, N, steps, FADING);
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

/* The steps of a tile that holds them before their softplus. */
static void open_steps(tile delta, const lanes *bias, int steps) {
    for (int v = 0; v < VECTORS; v++)
        for (int r = 0; r < steps; r++) delta[v][r] = softplus(delta[v][r] + bias[v]);
}

/* How many neighbouring slabs one thread takes through a chunk before the next: their rows stand on the same pages. */
static int band_of(const shape *s) {
    const int64_t share = s->batch * slabs_of(s) / (PARTS * s->threads);
    return share < 1 ? 1 : smaller(smaller(share, BAND), slabs_of(s));
}

typedef struct {
    const shape *s;
    view x, delta, z;                            /* z.at may be NULL */
    const float *bias, *A, *b, *c, *D, *initial; /* bias and D may be NULL */
    float *y, *final, *starts, *sums;            /* sums of a_t, (sequence and slab, length); starts and sums may be NULL */
} forward_terms;

/* A part, one of VECTORS, of a slab's chunk is asked for ahead. */
INLINE void ask(view of, int64_t i, int64_t t, int64_t d, const shape *s, int part) {
    enum { ROWS = CHUNK / VECTORS, LINE = 16 };
    for (int64_t r = t + part * ROWS; r < t + (part + 1) * ROWS && r < s->length; r++)
        for (int64_t c = d; c < d + SLAB && c < s->channels; c += LINE)
            __builtin_prefetch(of.at + i * of.batch + r * of.step + c * of.channel);
}

/* A slab on its way through the steps. It keeps the rates from one sequence to the next. */
typedef struct {
    lanes *H;
    rate *A;
    float most;
    int grows, channels;
    int64_t slab;
    lanes skip[VECTORS], bias[VECTORS];
} walker;

/* Walkers of a band, at work in the memory of one thread. */
static void set_out(walker *band, lanes *work, int64_t wide, int64_t matrix) {
    for (int k = 0; k < wide; k++) {
        lanes *H = work + 4 * (thread_number() * wide + k) * matrix;
        band[k] = (walker){.H = H, .A = (rate *)(H + matrix), .slab = -1};
    }
}

static void take(walker *w, const forward_terms *f, int64_t slab) {
    const int64_t d = slab * SLAB, N = f->s->states;
    if (w->slab == slab) return;
    w->slab = slab, w->channels = channels_of(f->s, slab);
    load_rates(w->A, &w->most, &w->grows, f->A + d * N, N, w->channels);
    if (f->D) load_matrix(w->skip, f->D + d, 1, w->channels);
    if (f->bias) load_matrix(w->bias, f->bias + d, 1, w->channels);
}

static void stand_at(walker *w, const forward_terms *f, int64_t i, int64_t slab) {
    take(w, f, slab);
    load_matrix(w->H, f->initial + (i * f->s->channels + slab * SLAB) * f->s->states, f->s->states, w->channels);
}

/* One chunk of a slab; that of the slab `next`, from `later` on, comes after it. */
static void forward_slab(const forward_terms *f, walker *w, int64_t i, int64_t t, int64_t next, int64_t later) {
    const shape *s = f->s;
    const int64_t d = w->slab * SLAB, L = s->length, N = s->states, D = s->channels, at = i * L + t;
    const int64_t task = i * slabs_of(s) + w->slab;
    const int steps = smaller(L - t, CHUNK), channels = w->channels;
    tile delta, x, y, kept;
    int way[VECTORS];
    if (f->starts) memcpy(f->starts + (task * chunks_of(s) + t / CHUNK) * N * SLAB, w->H, N * VECTORS * sizeof(lanes));
    load(delta, f->delta, i, t, d, steps, channels);
    load(x, f->x, i, t, d, steps, channels);
    if (f->bias) open_steps(delta, w->bias, steps);
    if (f->sums) memset(kept, 0, sizeof(tile));
    for (int v = 0; v < VECTORS; v++) {
        ask(f->delta, i, later, next * SLAB, s, v);
        ask(f->x, i, later, next * SLAB, s, v);
        if (f->z.at) ask(f->z, i, later, next * SLAB, s, v);
        way[v] = way_of(delta[v], w->most, w->grows, steps, s->expected);
        for (int r = 0; r < steps; r++) {
            y[v][r] = f->D ? x[v][r] * w->skip[v] : (lanes){0};
            x[v][r] *= delta[v][r];
        }
        forward_chunk(s, w->H, w->A, way, delta, x, f->b + at * N, f->c + at * N, y, f->sums ? kept : NULL, v, steps);
    }
    if (f->z.at) {
        load(x, f->z, i, t, d, steps, channels);
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < steps; r++) y[v][r] *= silu(x[v][r]);
    }
    store(f->y + at * D + d, y, D, steps, channels);
    if (f->sums) sum_kept(f->sums + task * L + t, kept, steps, channels);
}

/* The slabs from `first` to `last` of a sequence, side by side. */
static void forward_band(const forward_terms *f, walker *band, int64_t i, int64_t first, int64_t last) {
    const int64_t L = f->s->length, N = f->s->states, D = f->s->channels, wide = last - first;
    for (int64_t k = 0; k < wide; k++) stand_at(&band[k], f, i, first + k);
    for (int64_t t = 0; t < L; t += CHUNK)
        for (int64_t k = 0; k < wide; k++) {
            const int ends = k + 1 == wide;
            forward_slab(f, &band[k], i, t, ends ? first : first + k + 1, ends ? t + CHUNK : t);
        }
    for (int64_t k = 0; k < wide; k++)
        store_matrix(f->final + (i * D + (first + k) * SLAB) * N, band[k].H, N, band[k].channels);
}

/* b and c are contiguous (batch, length, states), A (channels, states), bias (channels), D (channels), what y has of x
 * beside, initial and final (batch, channels, states), y (batch, length, channels), kept (batch, length): the mean of
 * a_t. `bias`, `D`, `starts` and `kept` may be NULL, and z a view of NULL. A thread takes the sequences of a band one
 * after the other, with its rates at hand.
 * Gives 0, or 1 when there is no memory for the work. */
int ssm_forward(const shape *s, const view *x, const view *delta, const view *z, const float *bias, const float *A, const float *b, const float *c,
                const float *D, const float *initial, float *y, float *final, float *starts, float *kept) {
    const int64_t slabs = slabs_of(s), tasks = s->batch * slabs, L = s->length, matrix = s->states * VECTORS;
    const int64_t wide = band_of(s), bands = (slabs + wide - 1) / wide;
    const int threads = s->threads > 1 ? s->threads : 1;
    float *sums = kept ? allocate(tasks * L * sizeof(float)) : NULL;
    lanes *work = allocate(4 * threads * wide * matrix * sizeof(lanes)); /* a state, and rates as wide as three */
    const int failed = !work || (kept && !sums);
    const forward_terms f = {s, *x, *delta, *z, bias, A, b, c, D, initial, y, final, starts, sums};
    if (!failed) {
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            unsigned mode = flush_denormals();
            walker band[BAND];
            set_out(band, work, wide, matrix);
#pragma omp for schedule(dynamic)
            for (int64_t part = 0; part < bands * s->batch; part++) {
                const int64_t first = part / s->batch * wide;
                forward_band(&f, band, part % s->batch, first, first + smaller(slabs - first, wide));
            }
            restore_denormals(mode);
        }
        for (int64_t row = 0; kept && row < s->batch * L; row++) {
            double total = 0;
            for (int64_t slab = 0; slab < slabs; slab++) total += sums[(row / L * slabs + slab) * L + row % L];
            kept[row] = (float)(total / ((double)s->channels * s->states));
        }
    }
    free(sums);
    free(work);
    return failed;
}

/* ---- pieces of rows that begin alike ---- */

typedef struct {
    const int64_t *bounds, *above, *place; /* see ssm_forward_tree */
    int64_t count;
    lanes *states; /* (places, slabs, states * VECTORS) */
} tree;

/* The slabs from `first` to `last` over all pieces, side by side. */
static void tree_band(const forward_terms *f, const tree *pieces, walker *band, int64_t first, int64_t last) {
    const int64_t wide = last - first, matrix = f->s->states * VECTORS, slabs = slabs_of(f->s);
    for (int64_t k = 0; k < wide; k++) take(&band[k], f, first + k);
    for (int64_t p = 0; p < pieces->count; p++) {
        shape own = *f->s;
        forward_terms of = *f;
        const int64_t from = pieces->above[p] < 0 ? -1 : pieces->place[pieces->above[p]];
        own.length = pieces->bounds[p + 1], of.s = &own;
        for (int64_t k = 0; k < wide; k++) {
            if (from < 0)
                memset(band[k].H, 0, matrix * sizeof(lanes));
            else
                memcpy(band[k].H, pieces->states + (from * slabs + first + k) * matrix, matrix * sizeof(lanes));
        }
        for (int64_t t = pieces->bounds[p]; t < own.length; t += CHUNK)
            for (int64_t k = 0; k < wide; k++) {
                const int ends = k + 1 == wide;
                forward_slab(&of, &band[k], 0, t, ends ? first : first + k + 1, ends ? t + CHUNK : t);
            }
        if (pieces->place[p] < 0) continue;
        for (int64_t k = 0; k < wide; k++)
            memcpy(pieces->states + (pieces->place[p] * slabs + first + k) * matrix, band[k].H, matrix * sizeof(lanes));
    }
}

/* As ssm_forward of one sequence, which holds pieces of rows: piece p has the steps from bounds[p] up to bounds[p + 1],
 * and continues from the end of above[p] < p, where that is not -1, whose place among the states that are kept,
 * place[above[p]] < places, is then not -1 either. A thread takes its slabs through all pieces.
 * Gives 0, or 1 when there is no memory for the work. */
int ssm_forward_tree(const shape *s, const view *x, const view *delta, const view *z, const float *bias, const float *A,
                     const float *b, const float *c, const float *D, float *y,
                     const int64_t *bounds, const int64_t *above, const int64_t *place, int64_t count, int64_t places) {
    const int64_t slabs = slabs_of(s), matrix = s->states * VECTORS, wide = band_of(s);
    const int64_t bands = (slabs + wide - 1) / wide;
    const int threads = s->threads > 1 ? s->threads : 1;
    lanes *work = allocate((4 * threads * wide + places * slabs) * matrix * sizeof(lanes));
    const forward_terms f = {s, *x, *delta, *z, bias, A, b, c, D, NULL, y, NULL, NULL, NULL};
    if (!work) return 1;
    const tree pieces = {bounds, above, place, count, work + 4 * threads * wide * matrix};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        unsigned mode = flush_denormals();
        walker band[BAND];
        set_out(band, work, wide, matrix);
#pragma omp for schedule(dynamic)
        for (int64_t part = 0; part < bands; part++)
            tree_band(&f, &pieces, band, part * wide, part * wide + smaller(slabs - part * wide, wide));
        restore_denormals(mode);
    }
    free(work);
    return 0;
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

/* Some states of one vector over a chunk, backwards. With ybar the gradient of y, the adjoint of the state is
 *     lambda_t = c_t ybar_t + a_{t+1} lambda_{t+1},
 * and bbar_t = sum_d lambda_t x_t, cbar_t = sum_d ybar_t H_t, xbar_t = sum_n lambda_t b_t,
 * deltabar_t = sum_n g_t A, Abar = sum_t g_t delta_t, where g_t is the gradient of delta_t A: lambda_t a_t H_{t-1}, and
 * for the expected decay, log a_t = -log(1 - delta_t A), a_t times that.
 * `carried` is a_{t+1} lambda_{t+1} after the chunk, and becomes that before the chunk. c_t H_t is added to y, unless
 * that is NULL. */
INLINE void backward_steps(const float *starts, const rate *A, lanes *carried, const lanes *delta, const lanes *x,
                           const lanes *ybar, const float *b, const float *c, lanes *xbar, lanes *deltabar,
                           lanes (*bbar)[CHUNK], lanes (*cbar)[CHUNK], lanes *Abar, lanes *y, int64_t states, int steps,
                           const int count, const int way) {
    lanes a[TOGETHER][CHUNK], before[TOGETHER][CHUNK], H[TOGETHER], sum[TOGETHER], later[TOGETHER];
    for (int i = 0; i < count; i++) {
        memcpy(&H[i], starts + i * SLAB, sizeof(lanes));
        sum[i] = Abar[i * VECTORS], later[i] = carried[i * VECTORS];
    }
    for (int s = 0; s < steps; s++)
        for (int i = 0; i < count; i++) {
            before[i][s] = H[i];
            a[i][s] = decay_of(delta[s], A[i * VECTORS], way);
            H[i] = a[i][s] * H[i] + x[s] * b[s * states + i];
            cbar[i][s] += ybar[s] * H[i];
            if (y) y[s] += H[i] * c[s * states + i];
        }
    for (int s = steps - 1; s >= 0; s--) {
        lanes to_x = xbar[s], to_delta = deltabar[s];
        for (int i = 0; i < count; i++) {
            lanes lambda = ybar[s] * c[s * states + i] + later[i];
            bbar[i][s] += lambda * x[s];
            to_x += lambda * b[s * states + i];
            later[i] = lambda * a[i][s];
            lanes g = later[i] * before[i][s];
            if (way == EXPECTED) g *= a[i][s];
            to_delta += g * A[i * VECTORS].A;
            sum[i] += g * delta[s];
        }
        xbar[s] = to_x, deltabar[s] = to_delta;
    }
    for (int i = 0; i < count; i++) Abar[i * VECTORS] = sum[i], carried[i * VECTORS] = later[i];
}

typedef struct {
    const shape *s;
    view x, delta, z, ybar; /* z.at may be NULL */
    const float *bias, *A, *b, *c, *D, *starts, *finalbar; /* bias, D and finalbar may be NULL */
    float *xbar, *deltabar, *initialbar, *zbar; /* initialbar and zbar may be NULL */
    int64_t zbar_row;
    float *Abars;  /* Abar of each sequence */
    float *Dbars;  /* and Dbar */
    float *bcbars; /* bbar and cbar of each task, (task, 2, length, states) */
    lanes *work;   /* two matrices and rates, thus five, per task */
} backward_terms;

/* `count` states of all vectors over a chunk, and the sums over channels of bbar and cbar. */
INLINE void backward_states(const int *way, const float *starts, const rate *A, lanes *carried, tile delta, tile x, tile ybar,
                            const float *b, const float *c, tile xbar, tile deltabar, float *bs, float *cs, lanes *Abar,
                            lanes (*y)[ROW], int64_t N, int steps, const int count) {
    lanes bbar[TOGETHER][CHUNK], cbar[TOGETHER][CHUNK];
    memset(bbar, 0, count * sizeof(bbar[0]));
    memset(cbar, 0, count * sizeof(cbar[0]));
#define WALK(way)                                                                                                       \
    backward_steps(starts + v * LANES, A + v, carried + v, delta[v], x[v], ybar[v], b, c, xbar[v], deltabar[v], bbar, cbar, \
                   Abar + v, y ? y[v] : NULL, N, steps, count, way)
    for (int v = 0; v < VECTORS; v++) switch (way[v]) {
            case EXPECTED: WALK(EXPECTED); break;
            case ANY: WALK(ANY); break;
            case BOUNDED: WALK(BOUNDED); break;
            default: WALK(FADING);
        }
#undef WALK
    for (int i = 0; i < count; i++)
        for (int r = 0; r < steps; r++) {
            bs[r * N + i] = sum_of_lanes(bbar[i][r]);
            cs[r * N + i] = sum_of_lanes(cbar[i][r]);
        }
}

static void backward_task(const backward_terms *f, int64_t task) {
    const shape *s = f->s;
    const int64_t slabs = slabs_of(s), i = task / slabs, d = task % slabs * SLAB;
    const int64_t L = s->length, N = s->states, D = s->channels, matrix = N * VECTORS;
    const int channels = channels_of(s, task % slabs);
    tile delta, read, x, ybar, xbar, deltabar, slope, opening, y;
    lanes bias[VECTORS], *carried = f->work + 5 * task * matrix, *Abar = carried + matrix, skip[VECTORS] = {0}, skipped[VECTORS] = {0};
    rate *A = (rate *)(Abar + matrix);
    float most;
    int grows, way[VECTORS];
    load_rates(A, &most, &grows, f->A + d * N, N, channels);
    memset(carried, 0, matrix * sizeof(lanes));
    if (f->finalbar) load_matrix(carried, f->finalbar + (i * D + d) * N, N, channels);
    if (f->D) load_matrix(skip, f->D + d, 1, channels);
    if (f->bias) load_matrix(bias, f->bias + d, 1, channels);
    memset(Abar, 0, matrix * sizeof(lanes));
    for (int64_t k = chunks_of(s) - 1; k >= 0; k--) {
        const int64_t t = k * CHUNK, at = i * L + t;
        const int steps = smaller(L - t, CHUNK);
        const float *starts = f->starts + (task * chunks_of(s) + k) * N * SLAB;
        const float *b = f->b + at * N, *c = f->c + at * N;
        lanes (*of_y)[ROW] = f->z.at ? y : NULL;
        float *bs = f->bcbars + (2 * task * L + t) * N, *cs = bs + L * N;
        load(delta, f->delta, i, t, d, steps, channels);
        load(x, f->x, i, t, d, steps, channels);
        load(ybar, f->ybar, i, t, d, steps, channels);
        if (f->bias)
            for (int v = 0; v < VECTORS; v++)
                for (int r = 0; r < steps; r++) slope[v][r] = sigmoid(delta[v][r] + bias[v]);
        if (f->bias) open_steps(delta, bias, steps);
        if (f->z.at) {
            load(opening, f->z, i, t, d, steps, channels);
            for (int v = 0; v < VECTORS; v++)
                for (int r = 0; r < steps; r++) {
                    lanes value, change = silu_slope(opening[v][r], &value);
                    opening[v][r] = ybar[v][r] * change;
                    ybar[v][r] *= value;
                    y[v][r] = x[v][r] * skip[v];
                }
        }
        for (int v = 0; v < VECTORS; v++) {
            way[v] = way_of(delta[v], most, grows, steps, s->expected);
            for (int r = 0; r < steps; r++) {
                read[v][r] = x[v][r];
                x[v][r] *= delta[v][r];
                skipped[v] += ybar[v][r] * read[v][r];
            }
        }
        memset(xbar, 0, sizeof(tile));
        memset(deltabar, 0, sizeof(tile));
        for (int64_t n = 0; n < N;) {
            const int64_t j = n * VECTORS, left = N - n;
            if (left >= TOGETHER)
                backward_states(way, starts + n * SLAB, A + j, carried + j, delta, x, ybar, b + n, c + n, xbar, deltabar,
                                bs + n, cs + n, Abar + j, of_y, N, steps, TOGETHER);
            else
                backward_states(way, starts + n * SLAB, A + j, carried + j, delta, x, ybar, b + n, c + n, xbar, deltabar,
                                bs + n, cs + n, Abar + j, of_y, N, steps, 1);
            n += left >= TOGETHER ? TOGETHER : 1;
        }
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < steps; r++) {
                deltabar[v][r] += xbar[v][r] * read[v][r];
                if (f->bias) deltabar[v][r] *= slope[v][r];
                if (f->z.at) opening[v][r] *= y[v][r];
                xbar[v][r] = xbar[v][r] * delta[v][r] + skip[v] * ybar[v][r];
            }
        store(f->xbar + at * D + d, xbar, D, steps, channels);
        store(f->deltabar + at * D + d, deltabar, D, steps, channels);
        if (f->z.at) store(f->zbar + at * f->zbar_row + d, opening, f->zbar_row, steps, channels);
    }
    if (f->initialbar) store_matrix(f->initialbar + (i * D + d) * N, carried, N, channels);
    store_matrix(f->Abars + (i * D + d) * N, Abar, N, channels);
    if (f->D) store_matrix(f->Dbars + i * D + d, skipped, 1, channels);
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

/* The gradients of x, delta (batch, length, channels), b, c (batch, length, states), initial (batch, channels, states),
 * A (channels, states) and, of each sequence, D (batch, channels), all contiguous, from those of y and of the final state
 * (contiguous), and of z, its rows `zbar_row` numbers apart; delta's is that of v where there is a bias.
 * Gives 0, or 1 when there is no memory for the work. */
int ssm_backward(const shape *s, const view *x, const view *delta, const view *z, const float *bias, const float *A,
                 const float *b, const float *c, const float *D, const float *starts, const view *ybar,
                 const float *finalbar, float *xbar, float *deltabar, float *Abar, float *bbar, float *cbar,
                 float *initialbar, float *Dbars, float *zbar, int64_t zbar_row) {
    const int64_t tasks = s->batch * slabs_of(s), L = s->length, N = s->states, DN = s->channels * N;
    float *bcbars = allocate(2 * tasks * L * N * sizeof(float));
    float *Abars = allocate(s->batch * DN * sizeof(float));
    lanes *work = allocate(5 * tasks * N * VECTORS * sizeof(lanes));
    const int failed = !bcbars || !Abars || !work;
    const backward_terms f = {s,    *x,       *delta,     *z,   *ybar,    bias,  A,     b,      c,   D, starts, finalbar,
                              xbar, deltabar, initialbar, zbar, zbar_row, Abars, Dbars, bcbars, work};
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
