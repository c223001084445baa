/* The scan with one decay per head in float32 and its gradients: what `scalar.scan` computes, several times faster.
 *
 *     H_t = a_t H_{t-1} + delta_t b_t x_t',      y_t = c_t H_t,      a_t = exp(log a_t)
 *
 * for heads of `width` channels and `states` states (Mamba-2, Dao & Gu 2024, section 6). Groups of heads share b and c.
 * Steps are cut into chunks. With D[t, s] = a_{s+1} ... a_t, G = c b', M = G * D (t >= s), X = delta x, and of a chunk
 *
 *     Y = M X + f c H,      H <- f_last H + b' e X,      f_t = a_1 ... a_t,      e_s = D[last, s].
 *
 * With D what is read is y_t + D x_t, a number for each channel. Matrices stand in panels. A task is a band of heads,
 * backwards of slabs of heads of one group each, whose sums are added in their order: no result depends on the number of
 * threads. */

#include "panels.h"

enum {
    CHUNK = 64, /* steps; the states at their starts are what the backward pass needs */
    PANELS = CHUNK / WIDE,
    SLAB = 4, /* heads, at most */
    BAND = 3, /* slabs, at most */
    PARTS = 3 /* for each thread */
};

typedef float square[CHUNK][CHUNK];

typedef struct {
    int64_t batch, length, heads, groups, width, states;
    int threads;
} shape;

/* A tensor (batch, length, heads or groups, channels or states), the last one contiguous, and its strides in numbers;
 * NULL for none. */
typedef struct {
    const float *at;
    int64_t batch, step, head;
} view;

static const float *from(view v, int64_t n, int64_t t, int64_t h) {
    return v.at + n * v.batch + t * v.step + h * v.head;
}

/* One of `parts` parts of a head's chunk from step t on is asked for ahead: its rows stand on as many pages. */
INLINE void ask(view v, const shape *s, int64_t n, int64_t t, int64_t h, int64_t part, int64_t parts) {
    enum { LINE = 16 };
    const int64_t first = t + part * CHUNK / parts, last = t + (part + 1) * CHUNK / parts;
    for (int64_t r = first; r >= 0 && r < last && r < s->length; r++)
        for (int64_t i = 0; i < s->width; i += LINE) __builtin_prefetch(from(v, n, r, h) + i);
}

/* A head's (width, states) matrix, contiguous, as panels [channels][states], and back. */
static void load_state(pair *H, const float *at, int64_t width, int64_t states) {
    memset(H, 0, panels_of(width) * states * sizeof(pair));
    for (int64_t p = 0; p < width; p++)
        for (int64_t n = 0; n < states; n++) columns(H, states, n, p)[p % WIDE] = at[p * states + n];
}

static void store_state(float *at, pair *H, int64_t width, int64_t states) {
    for (int64_t p = 0; p < width; p++)
        for (int64_t n = 0; n < states; n++) at[p * states + n] = columns(H, states, n, p)[p % WIDE];
}

/* ---- what the heads of a group share, and decays ---- */

static int64_t chunks_of(const shape *s) { return (s->length + CHUNK - 1) / CHUNK; }
/* Numbers from a row of b or c to the next where they are copied: no power of two, as columns are walked too. */
static int64_t padded(const shape *s) { return s->states + 16; }
static int64_t state_size(const shape *s) { return panels_of(s->width) * s->states; }

/* Numbers of float32 in the states at the chunks' starts, kept from the forward for the backward pass. */
int64_t ssm_heads_starts(const shape *s) {
    return s->batch * s->heads * chunks_of(s) * state_size(s) * WIDE;
}

/* Of one chunk of one group: b and c transposed, [steps][states], and in rows, (steps, padded states), as G is. */
typedef struct {
    pair *b, *c;
    float (*G)[CHUNK], *b_rows, *c_rows;
} shared;

static int64_t shared_size(const shape *s) {
    return 2 * PANELS * s->states + (sizeof(square) + 2 * CHUNK * padded(s) * sizeof(float)) / sizeof(pair);
}

static shared shared_of(const shape *s, pair *space, int64_t n, int64_t group, int64_t chunk) {
    pair *b = space + ((n * s->groups + group) * chunks_of(s) + chunk) * shared_size(s), *c = b + PANELS * s->states;
    float (*G)[CHUNK] = (float (*)[CHUNK])(c + PANELS * s->states), *rows = G[CHUNK];
    return (shared){b, c, G, rows, rows + CHUNK * padded(s)};
}

static void share(const shape *s, view b, view c, pair *space) {
    const int64_t chunks = chunks_of(s);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < s->batch * s->groups * chunks; task++) {
        int64_t n = task / chunks / s->groups, group = task / chunks % s->groups, t = task % chunks * CHUNK;
        int q = smaller(s->length - t, CHUNK);
        shared to = shared_of(s, space, n, group, task % chunks);
        pack_transposed(to.b, from(b, n, t, group), b.step, NULL, q, s->states);
        pack_transposed(to.c, from(c, n, t, group), c.step, NULL, q, s->states);
        for (int r = 0; r < q; r++) {
            memcpy(to.b_rows + r * padded(s), from(b, n, t + r, group), s->states * sizeof(float));
            memcpy(to.c_rows + r * padded(s), from(c, n, t + r, group), s->states * sizeof(float));
        }
        for (int64_t j = 0; j * WIDE < q; j++) {
            pair rows[CHUNK];
            product(rows, FRESH, matrix(from(c, n, t, group), c.step, 1, s->states), to.b + j * s->states, j * WIDE, q, 0);
            for (int r = (int)(j * WIDE); r < q; r++) memcpy(&to.G[r][j * WIDE], &rows[r], sizeof(pair));
        }
    }
}

/* A head's work on a chunk of q steps from t on. */
typedef struct {
    int64_t n, h, t;
    int q;
    float a[CHUNK + LANES], f[CHUNK], e[CHUNK], delta[CHUNK], late[CHUNK]; /* late = e delta */
    square D, M; /* zero above the diagonal */
} chunk_work;

static void decays(chunk_work *k, view log_a, view delta, int64_t n, int64_t h, int64_t t, int q, shared of) {
    k->n = n, k->h = h, k->t = t, k->q = q;
    for (int s = 0; s < q; s++) {
        k->a[s] = *from(log_a, n, t + s, h);
        k->delta[s] = delta.at ? *from(delta, n, t + s, h) : 1;
    }
    for (int s = 0; s < q; s += LANES) {
        lanes v = exponential(vector(k->a + s));
        memcpy(k->a + s, &v, sizeof(v));
    }
    ints count;
    for (int i = 0; i < LANES; i++) count[i] = i;
    for (int r = 0; r < q; r++) {
        const int whole = r / LANES * LANES; /* what stands before the vector of the diagonal */
        const lanes held = all(k->a[r]);
        const ints before = count < r - whole, at = count == r - whole;
        for (int s = 0; s <= whole; s += LANES) {
            lanes D = r ? vector(k->D[r - 1] + s) * held : held;
            if (s == whole) D = (lanes)((before & (ints)D) | (at & (ints)all(1)));
            lanes M = D * vector(of.G[r] + s);
            if (s == whole) M = (lanes)((before | at) & (ints)M);
            memcpy(k->D[r] + s, &D, sizeof(D));
            memcpy(k->M[r] + s, &M, sizeof(M));
        }
        memset(k->D[r] + whole + LANES, 0, (CHUNK - LANES - whole) * sizeof(float));
        memset(k->M[r] + whole + LANES, 0, (CHUNK - LANES - whole) * sizeof(float));
        k->f[r] = r ? k->f[r - 1] * k->a[r] : k->a[0];
    }
    memcpy(k->e, k->D[q - 1], sizeof(k->e));
    for (int s = 0; s < q; s++) k->late[s] = k->e[s] * k->delta[s];
}

/* ---- forward ---- */

typedef struct {
    const shape *s;
    view log_a, delta, b, c, x;
    const float *D, *initial;  /* D (heads, width) may be NULL, as may the initial state: 0 */
    float *y, *final, *starts; /* the last two may be NULL */
    pair *shared;
} forward_terms;

/* A panel's rows of y, of `count` columns, and with D what is skipped to them, D x. */
static void leave(float *to, int64_t row, const pair *Y, const float *x, int64_t step, const float *D, int64_t rows,
                  int count) {
    if (count == WIDE) {
        const lanes zero = {0}, first = D ? vector(D) : zero, second = D ? vector(D + LANES) : zero;
        for (int64_t r = 0; r < rows; r++, to += row, x += step) {
            lanes v = Y[r].of[0], w = Y[r].of[1];
            if (D) v += first * vector(x), w += second * vector(x + LANES);
            memcpy(to, &v, sizeof(v));
            memcpy(to + LANES, &w, sizeof(w));
        }
        return;
    }
    for (int64_t r = 0; r < rows; r++, to += row, x += step)
        for (int i = 0; i < count; i++) to[i] = ((const float *)&Y[r])[i] + (D ? D[i] * x[i] : 0);
}

/* One chunk of a head; that of the head `next`, from step `later` on, comes after it. */
static void forward_chunk(const forward_terms *f, chunk_work *k, pair *H, pair *X, int64_t task, int64_t chunk, int64_t next,
                          int64_t later) {
    const shape *s = f->s;
    const int64_t N = s->states, P = s->width, n = task / s->heads, h = task % s->heads;
    const view y = {f->y, s->length * s->heads * P, s->heads * P, P};
    const int64_t t = chunk * CHUNK, bytes = state_size(s) * sizeof(pair);
    const int q = smaller(s->length - t, CHUNK), empty = !f->initial && !chunk;
    const int over = !f->final && chunk == chunks_of(s) - 1; /* nobody reads the state behind the chunk */
    const shared of = shared_of(s, f->shared, n, h / (s->heads / s->groups), chunk);
    pair *late = X + panels_of(P) * CHUNK, Y[CHUNK];
    if (f->starts && !empty) memcpy((char *)f->starts + (task * chunks_of(s) + chunk) * bytes, H, bytes);
    decays(k, f->log_a, f->delta, n, h, t, q, of);
    pack(X, from(f->x, n, t, h), f->x.step, f->delta.at ? k->delta : NULL, q, P);
    if (!over) pack(late, from(f->x, n, t, h), f->x.step, k->late, q, P);
    for (int64_t j = 0; j * WIDE < P; j++) {
        ask(f->x, s, next / s->heads, later, next % s->heads, j, panels_of(P));
        ask(y, s, next / s->heads, later, next % s->heads, j, panels_of(P));
        if (empty)
            product(Y, FRESH, matrix(k->M[0], CHUNK, 1, q), X + j * q, 0, q, 1);
        else {
            product(Y, FRESH, matrix(of.c_rows, padded(s), 1, N), H + j * N, 0, q, 0);
            add_product(Y, k->f, matrix(k->M[0], CHUNK, 1, q), X + j * q, q, 1);
        }
        leave((float *)from(y, n, t, h) + j * WIDE, y.step, Y, from(f->x, n, t, h) + j * WIDE, f->x.step,
              f->D ? f->D + h * P + j * WIDE : NULL, q, smaller(P - j * WIDE, WIDE));
        if (!over) product(H + j * N, k->f[q - 1], matrix(of.b_rows, 1, padded(s), q), late + j * q, 0, N, 0);
    }
}

/* How many heads one thread takes through a chunk before the next: b and c stay in the cache, the rows of x and y stand
 * on the same pages. */
static int64_t band_of(const shape *s) {
    const int64_t share = s->batch * s->heads / (PARTS * s->threads);
    return share < 1 ? 1 : smaller(share, BAND * SLAB);
}

static void forward_band(const forward_terms *f, chunk_work *k, pair *work, int64_t first, int64_t last) {
    const shape *s = f->s;
    const int64_t matrix = s->width * s->states, size = state_size(s);
    pair *X = work + (last - first) * size;
    if (!f->initial) memset(work, 0, (last - first) * size * sizeof(pair));
    for (int64_t task = first; f->initial && task < last; task++)
        load_state(work + (task - first) * size, f->initial + task * matrix, s->width, s->states);
    for (int64_t chunk = 0; chunk < chunks_of(s); chunk++)
        for (int64_t task = first; task < last; task++) {
            const int ends = task + 1 == last;
            forward_chunk(f, k, work + (task - first) * size, X, task, chunk, ends ? first : task + 1,
                          (chunk + ends) * CHUNK);
        }
    for (int64_t task = first; f->final && task < last; task++)
        store_state(f->final + task * matrix, work + (task - first) * size, s->width, s->states);
}

/* Work of one thread: a chunk's, and as many pairs. */
static void *work_of(int64_t pairs) { return allocate(sizeof(chunk_work) + 64 + pairs * (int64_t)sizeof(pair)); }

static pair *pairs_of(chunk_work *k) { return (pair *)(((uintptr_t)(k + 1) + 63) & ~(uintptr_t)63); }

/* y (batch, length, heads, width) and final (batch, heads, width, states), contiguous; 1 when there is no memory.
 * Without `initial`, which is then 0, nothing is kept of the state before the first chunk. */
int ssm_heads(const shape *s, view log_a, view delta, view b, view c, view x, const float *D, const float *initial,
              float *y, float *final, float *starts) {
    const int64_t heads = s->batch * s->heads, wide = band_of(s);
    pair *space = allocate(s->batch * s->groups * chunks_of(s) * shared_size(s) * sizeof(pair));
    const forward_terms f = {s, log_a, delta, b, c, x, D, initial, y, final, starts, space};
    const int ready = space != NULL;
    int failed = !ready;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1 && ready)
    {
        chunk_work *k = ready ? work_of(wide * state_size(s) + 2 * panels_of(s->width) * CHUNK) : NULL;
        unsigned before = flush_denormals();
        if (ready) share(s, b, c, space);
        if (!k) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
            pair *work = pairs_of(k);
#pragma omp for schedule(dynamic)
            for (int64_t first = 0; first < heads; first += wide)
                forward_band(&f, k, work, first, first + smaller(heads - first, wide));
        }
        restore_denormals(before);
        free(k);
    }
    free(space);
    return failed;
}

/* ---- backward ---- */

typedef struct {
    const shape *s;
    view log_a, delta, b, c, x, ybar;
    const float *D, *starts, *finalbar;
    float *xbar, *deltabar, *log_abar, *initialbar, *Dbar; /* Dbar (batch, heads, width) */
    float *bcbars; /* bbar and cbar of each slab, (slab, 2, length, states) */
    pair *shared;
    int64_t xbar_row;
} backward_terms;

static int64_t slabs_of(const shape *s) { return (s->heads / s->groups + SLAB - 1) / SLAB; }

/* What a slab's heads add up for a chunk, and what one of them is worked in. */
typedef struct {
    pair *b, *c;                       /* bbar and cbar, transposed, [steps][states] */
    pair *G;                           /* Gbar [steps][steps] */
    pair *X, *Xt, *Yt, *Xbar, *Y, *Z;  /* of one head */
    pair *Mbar;
} slab_work;

/* Of each step r the sum over t >= r > s of W[t, s], over t >= r of u_t and over s < r of w_s, and all of `whole`. */
static void log_decay_gradient(float *out, square W, const float *u, const float *w, float whole, int q) {
    lanes rows[CHUNK / LANES] = {{0}};
    float later = 0, before[CHUNK + 1] = {0};
    ints count = {0};
    for (int i = 0; i < LANES; i++) count[i] = i;
    for (int r = 0; r < q; r++) before[r + 1] = before[r] + w[r];
    for (int r = q - 1; r >= 0; r--) {
        lanes sum = {0};
        for (int i = 0; i * LANES <= r; i++) {
            rows[i] += vector(W[r] + i * LANES);
            sum += (lanes)((ints)rows[i] & (count + i * LANES < r));
        }
        later += u[r];
        out[r] = sum_of_lanes(sum) + later + before[r] + whole;
    }
}

/* out[n, t] of panels [steps][states]: the state times rows of X transposed, both [.][channels]. */
static void against_state(pair *out, const pair *H, const pair *Xt, const shape *s, int q) {
    const scalars a = {(const float *)H, WIDE, 1, WIDE, s->width / WIDE, s->states * WIDE};
    const int64_t whole = s->width / WIDE, rest = s->width % WIDE;
    for (int64_t j = 0; j * WIDE < q; j++) {
        const pair *x = Xt + j * s->width;
        product(out + j * s->states, FRESH, a, x, 0, s->states, 0);
        if (rest)
            product(out + j * s->states, 1, matrix((const float *)(H + whole * s->states), WIDE, 1, rest),
                    x + whole * WIDE, 0, s->states, 0);
    }
}

enum { AT_ONCE = 4 }; /* pairs, whose sums do not wait for each other */

/* to += Z factor, and sums[t] = factor_t sum over n of Z[n, t] of[n, t]. */
static void add_scaled(pair *to, const pair *Z, const pair *of, const float *factor, float *sums, int64_t states, int q) {
    for (int64_t j = 0; j * WIDE < q; j++) {
        lanes scale[2], sum[AT_ONCE][2] = {{{0}}};
        for (int w = 0; w < 2; w++) scale[w] = vector(factor + j * WIDE + w * LANES);
        for (int64_t i = j * states; i < (j + 1) * states; i += AT_ONCE)
            for (int k = 0; k < AT_ONCE && i + k < (j + 1) * states; k++)
                for (int w = 0; w < 2; w++) {
                    to[i + k].of[w] += Z[i + k].of[w] * scale[w];
                    sum[k][w] += Z[i + k].of[w] * of[i + k].of[w];
                }
        for (int w = 0; w < 2; w++) {
            for (int k = 1; k < AT_ONCE; k++) sum[0][w] += sum[k][w];
            sum[0][w] *= scale[w];
            memcpy(sums + j * WIDE + w * LANES, &sum[0][w], sizeof(lanes));
        }
    }
}

/* The sum of both matrices' products, number by number. */
static float along(const pair *one, const pair *other, int64_t pairs) {
    lanes sum[AT_ONCE][2] = {{{0}}};
    for (int64_t i = 0; i < pairs; i += AT_ONCE)
        for (int k = 0; k < AT_ONCE && i + k < pairs; k++)
            for (int w = 0; w < 2; w++) sum[k][w] += one[i + k].of[w] * other[i + k].of[w];
    for (int k = 1; k < AT_ONCE; k++)
        for (int w = 0; w < 2; w++) sum[0][w] += sum[k][w];
    return sum_of_lanes(sum[0][0] + sum[0][1]);
}

/* H is NULL where the state at the chunk's start is 0 and nobody asks for its gradient; `fresh` says that the adjoint
 * of the state at its end is 0. The head `next`, from step `later` on, comes after it. */
static void backward_chunk(const backward_terms *f, chunk_work *k, slab_work *w, shared of, const pair *H, pair *adjoint,
                           int fresh, int64_t next, int64_t later) {
    const shape *s = f->s;
    const int64_t N = s->states, P = s->width, row = f->xbar_row, n = k->n, t = k->t, h = k->h;
    const int q = k->q;
    const float *x = from(f->x, n, t, h), *ybar = from(f->ybar, n, t, h), *factor = f->delta.at ? k->delta : NULL;
    const view xbar = {f->xbar, s->length * row, row, P};
    float u[CHUNK] = {0}, v[CHUNK] = {0}, whole = 0;
    square W;
    pack(w->Y, ybar, f->ybar.step, NULL, q, P);
    pack_transposed(w->Yt, ybar, f->ybar.step, NULL, q, P);
    pack_transposed(w->Xt, x, f->x.step, factor, q, P);
    for (int64_t j = 0; j * WIDE < q; j++) { /* Mbar = Ybar X', and with it those of G and of the decays */
        ask(xbar, s, n, t, h, j, PANELS);
        ask(f->x, s, next / s->heads, later, next % s->heads, j, PANELS);
        ask(f->ybar, s, next / s->heads, later, next % s->heads, j, PANELS);
        product(w->Mbar, FRESH, matrix(ybar, f->ybar.step, 1, P), w->Xt + j * P, j * WIDE, q, 0);
        for (int r = (int)(j * WIDE); r < q; r++) {
            for (int i = 0; i < 2; i++) {
                const int64_t at = j * WIDE + i * LANES;
                lanes back = w->Mbar[r].of[i], both = back * vector(&k->M[r][at]);
                w->G[j * CHUNK + r].of[i] += back * vector(&k->D[r][at]);
                memcpy(&W[r][at], &both, sizeof(lanes));
            }
        }
        for (int r = 0; r < j * WIDE; r++) memset(&W[r][j * WIDE], 0, sizeof(pair));
    }
    if (H) {
        against_state(w->Z, H, w->Yt, s, q);
        add_scaled(w->c, w->Z, of.c, k->f, u, N, q);
    }
    if (!fresh) {
        against_state(w->Z, adjoint, w->Xt, s, q);
        add_scaled(w->b, w->Z, of.b, k->e, v, N, q);
    }
    if (H && !fresh) whole = along(H, adjoint, state_size(s)) * k->f[q - 1];
    float log_abar[CHUNK], *deltabar = f->deltabar + (n * s->length + t) * s->heads + h;
    log_decay_gradient(log_abar, W, u, v, whole, q);
    lanes dots[CHUNK] = {{0}};
    for (int64_t j = 0; j * WIDE < P; j++) {
        if (fresh)
            product(w->Xbar, FRESH, matrix(k->M[0], 1, CHUNK, q), w->Y + j * q, 0, q, -1);
        else {
            product(w->Xbar, FRESH, matrix(of.b_rows, padded(s), 1, N), adjoint + j * N, 0, q, 0);
            add_product(w->Xbar, k->e, matrix(k->M[0], 1, CHUNK, q), w->Y + j * q, q, -1);
        }
        const int valid = smaller(P - j * WIDE, WIDE);
        pair skip = {{{0}}}, out;
        lanes skipped[2] = {{0}};
        if (f->D) copy(&skip, f->D + h * P + j * WIDE, valid);
        for (int r = 0; r < q; r++) {
            const float *of_x = x + r * f->x.step + j * WIDE;
            pair in = {{{0}}};
            if (valid < WIDE) copy(&in, of_x, valid), of_x = (const float *)&in;
            for (int i = 0; i < 2; i++) {
                out.of[i] = w->Xbar[r].of[i] * k->delta[r] + skip.of[i] * w->Y[j * q + r].of[i];
                dots[r] += w->Xbar[r].of[i] * vector(of_x + i * LANES);
                skipped[i] += w->Y[j * q + r].of[i] * vector(of_x + i * LANES);
            }
            copy((float *)from(xbar, n, t + r, h) + j * WIDE, &out, valid);
        }
        if (f->D) {
            float *to = f->Dbar + (n * s->heads + h) * P + j * WIDE;
            for (int i = 0; i < valid; i++) to[i] += skipped[i / LANES][i % LANES];
        }
    }
    for (int64_t j = 0; H && j * WIDE < P; j++) {
        for (int r = 0; r < q; r++)
            for (int i = 0; i < 2; i++) w->Y[j * q + r].of[i] *= k->f[r];
        product(adjoint + j * N, k->f[q - 1], matrix(of.c_rows, 1, padded(s), q), w->Y + j * q, 0, N, 0);
    }
    for (int r = 0; r < q; r++) {
        f->log_abar[(n * s->length + t + r) * s->heads + h] = log_abar[r];
        if (f->delta.at) deltabar[r * s->heads] = sum_of_lanes(dots[r]);
    }
}

/* The first `count` of a panel's rows as columns: of panels of `rows` rows, q columns in all, into as many rows. */
static void turn(pair *to, const pair *from, int64_t rows, int q, int count) {
    for (int t = 0; t < q; t += LANES)
        for (int w = 0; w < 2; w++) {
            lanes v[LANES];
            for (int i = 0; i < LANES; i++)
                v[i] = w * LANES + i < count ? from[t / WIDE * rows + w * LANES + i].of[t % WIDE / LANES] : (lanes){0};
            transpose(v);
            for (int i = 0; i < LANES; i++) to[t + i].of[w] = v[i];
        }
}

/* The slab's bbar and cbar of a chunk: what its heads added, and Gbar' c and Gbar b. */
static void store_slab(const backward_terms *f, slab_work *w, int64_t task, int64_t n, int64_t group, int64_t t, int q) {
    const int64_t N = f->s->states, L = f->s->length;
    float *bbar = f->bcbars + (2 * task * L + t) * N, *cbar = bbar + L * N;
    square G;
    for (int64_t j = 0; j * WIDE < q; j++)
        for (int r = 0; r < q; r++) memcpy(&G[r][j * WIDE], &w->G[j * CHUNK + r], sizeof(pair));
    for (int64_t j = 0; j * WIDE < N; j++) {
        pair rows[CHUNK], out[CHUNK], sums[CHUNK];
        const int valid = smaller(N - j * WIDE, WIDE);
        for (int which = 0; which < 2; which++) {
            view other = which ? f->b : f->c;
            pack(rows, from(other, n, t, group) + j * WIDE, other.step, NULL, q, valid);
            product(out, FRESH, which ? matrix(G[0], CHUNK, 1, q) : matrix(G[0], 1, CHUNK, q), rows, 0, q, which ? 1 : -1);
            turn(sums, (which ? w->c : w->b) + j * WIDE, N, q, valid);
            for (int r = 0; r < q; r++) {
                for (int i = 0; i < 2; i++) out[r].of[i] += sums[r].of[i];
                copy((which ? cbar : bbar) + r * N + j * WIDE, &out[r], valid);
            }
        }
    }
}

/* A slab's heads, of sequence n, from `first` on, and their adjoints. */
typedef struct {
    int64_t n, group, first, heads;
    pair *adjoint;
} slab;

static slab slab_of(const shape *s, int64_t task, pair *adjoint) {
    const int64_t per_group = s->heads / s->groups, slabs = slabs_of(s);
    const int64_t group = task / slabs % s->groups, before = task % slabs * SLAB;
    return (slab){task / slabs / s->groups, group, group * per_group + before, smaller(per_group - before, SLAB), adjoint};
}

/* A chunk of a slab; the slab `next` comes after it, in the chunk `later`. */
static void backward_slab(const backward_terms *f, chunk_work *k, slab_work *w, int64_t task, const slab *of, int64_t chunk,
                          const slab *next, int64_t later) {
    const shape *s = f->s;
    const int64_t size = state_size(s), own = PANELS * s->states;
    const int q = smaller(s->length - chunk * CHUNK, CHUNK);
    const shared common = shared_of(s, f->shared, of->n, of->group, chunk);
    memset(w->b, 0, own * sizeof(pair));
    memset(w->c, 0, own * sizeof(pair));
    memset(w->G, 0, PANELS * CHUNK * sizeof(pair));
    for (int64_t i = 0; i < of->heads; i++) {
        const int64_t h = of->first + i, head = of->n * s->heads + h, ends = i + 1 == of->heads;
        const pair *H = (const pair *)f->starts + (head * chunks_of(s) + chunk) * size;
        decays(k, f->log_a, f->delta, of->n, h, chunk * CHUNK, q, common);
        memset(k->f + q, 0, (CHUNK - q) * sizeof(float));
        backward_chunk(f, k, w, common, chunk || f->initialbar ? H : NULL, of->adjoint + i * size,
                       !f->finalbar && chunk == chunks_of(s) - 1, ends ? next->n * s->heads + next->first : head + 1,
                       (ends ? later : chunk) * CHUNK);
    }
    store_slab(f, w, task, of->n, of->group, chunk * CHUNK, q);
}

/* How many slabs one thread takes through a chunk before the one before it: their rows stand on the same pages. */
static int64_t slabs_at_once(const shape *s) {
    const int64_t share = s->batch * s->groups * slabs_of(s) / s->threads;
    return share < 1 ? 1 : smaller(share, BAND);
}

static void backward_band(const backward_terms *f, chunk_work *k, pair *work, int64_t first, int64_t last) {
    const shape *s = f->s;
    const int64_t size = state_size(s), P = s->width, matrix = P * s->states, own = PANELS * s->states, count = last - first;
    pair *at = work + count * SLAB * size;
    slab band[BAND];
    slab_work w;
    w.b = at, w.c = at += own, w.Z = at += own, w.G = at += own, w.Mbar = at += PANELS * CHUNK;
    w.Xbar = at += CHUNK, w.Y = at += CHUNK, w.Xt = at += panels_of(P) * CHUNK, w.Yt = at += PANELS * P;
    for (int64_t j = 0; j < count; j++) {
        band[j] = slab_of(s, first + j, work + j * SLAB * size);
        for (int64_t i = 0; i < band[j].heads; i++) {
            const int64_t head = band[j].n * s->heads + band[j].first + i;
            if (f->finalbar)
                load_state(band[j].adjoint + i * size, f->finalbar + head * matrix, P, s->states);
            else
                memset(band[j].adjoint + i * size, 0, size * sizeof(pair));
        }
    }
    for (int64_t chunk = chunks_of(s) - 1; chunk >= 0; chunk--)
        for (int64_t j = 0; j < count; j++) {
            const int ends = j + 1 == count;
            backward_slab(f, k, &w, first + j, &band[j], chunk, &band[ends ? 0 : j + 1], chunk - ends);
        }
    for (int64_t j = 0; f->initialbar && j < count; j++)
        for (int64_t i = 0; i < band[j].heads; i++) {
            const int64_t head = band[j].n * s->heads + band[j].first + i;
            store_state(f->initialbar + head * matrix, band[j].adjoint + i * size, P, s->states);
        }
}

/* The gradients of log a, delta (batch, length, heads), b, c (batch, length, groups, states), x (batch, length, heads,
 * width), initial (batch, heads, width, states) and of each sequence D (batch, heads, width; zeros before), all
 * contiguous but for the steps of x's and of b's and c's, `xbar_row` and `bcbar_row` numbers apart, from those of y and
 * of the final state (contiguous). Without `finalbar` the final state's is 0, without `initialbar` the initial state was.
 * `starts` is aligned as `ssm_heads` filled it. Gives 0, or 1 when there is no memory for the work. */
int ssm_heads_backward(const shape *s, view log_a, view delta, view b, view c, view x, const float *D,
                       const float *starts, view ybar, const float *finalbar, float *log_abar, float *deltabar, float *bbar,
                       float *cbar, float *xbar, float *initialbar, float *Dbar, int64_t xbar_row, int64_t bcbar_row) {
    const int64_t slabs = slabs_of(s), tasks = s->batch * s->groups * slabs, L = s->length, N = s->states;
    const int64_t wide = slabs_at_once(s);
    const int64_t own = wide * SLAB * state_size(s) + PANELS * (3 * N + CHUNK + s->width) + PANELS * s->width +
                        2 * CHUNK + panels_of(s->width) * CHUNK;
    pair *space = allocate(s->batch * s->groups * chunks_of(s) * shared_size(s) * sizeof(pair));
    float *bcbars = allocate(2 * tasks * L * N * sizeof(float));
    const backward_terms f = {s,        log_a, delta,    b,        c,          x,    ybar,   D,    starts,
                              finalbar, xbar,  deltabar, log_abar, initialbar, Dbar, bcbars, space, xbar_row};
    const int ready = space && bcbars;
    int failed = !ready;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1 && ready)
    {
        chunk_work *k = ready ? work_of(own) : NULL;
        unsigned before = flush_denormals();
        if (ready) share(s, b, c, space);
        if (!k) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
            pair *work = pairs_of(k);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; task += wide)
                backward_band(&f, k, work, task, task + smaller(tasks - task, wide));
#pragma omp for
            for (int64_t row = 0; row < s->batch * L * s->groups; row++) { /* the slabs' sums, added in their order */
                int64_t n = row / s->groups / L, t = row / s->groups % L, group = row % s->groups;
                float *to_b = bbar + row / s->groups * bcbar_row + group * N;
                float *to_c = cbar + row / s->groups * bcbar_row + group * N;
                for (int64_t i = 0; i < N; i++) to_b[i] = to_c[i] = 0;
                for (int64_t slab = 0; slab < slabs; slab++) {
                    const float *at = bcbars + (2 * ((n * s->groups + group) * slabs + slab) * L + t) * N;
                    for (int64_t i = 0; i < N; i++) to_b[i] += at[i], to_c[i] += at[i + L * N];
                }
            }
        }
        restore_denormals(before);
        free(k);
    }
    free(space);
    free(bcbars);
    return failed;
}
