/* Mamba-1's selective scan in float32, forward and backward (Mamba, Gu & Dao 2023, Eq. 2):
 *
 *     H_t[d, n] = a_t[d, n] H_{t-1}[d, n] + delta_t[d] x_t[d] b_t[n],      y_t[d] = sum_n c_t[n] H_t[d, n],
 *     a_t[d, n] = exp(delta_t[d] A[d, n]),   or 1 / (1 - delta_t[d] A[d, n]) for the expected decay,
 *
 * with channels d, states n and steps t. A vector holds neighbouring channels, so that sums over states need no
 * shuffles. Channels are cut into slabs and steps into chunks, and delta, x and y of one slab and chunk are copied into
 * tiles. In a tile the loop over steps is the innermost one: the state, A and the adjoint of a (vector, n) stay in
 * registers, whatever the number of states.
 *
 * Threads share (sequence, slab) pairs. Sums over channels are taken within a slab, then over slabs in order, so that
 * results depend neither on the number of threads nor on the other sequences of the batch. */

#include "tiles.h"

#if defined(_OPENMP)
#include <omp.h>
INLINE int thread_number(void) { return omp_get_thread_num(); }
#else
INLINE int thread_number(void) { return 0; }
#endif

enum { STATES_AT_ONCE = 2 }; /* of a vector: they share the loads of a step's terms, and hide each other's latency */

/* ---- forward ---- */

/* Walk `count` states of a vector through a tile: update H, add c_t H_t to y and a_t to the sum of decays. */
INLINE void forward_states(vec *H, const vec *A, const vec *eighths, const vec *delta, const vec *input, const float *b,
                           const float *c, vec *y, vec *decays, int64_t states, int steps, const int count,
                           const int form) {
    vec h[STATES_AT_ONCE];
    for (int i = 0; i < count; i++) h[i] = H[i * VECTORS];
    for (int s = 0; s < steps; s++) {
        vec read = y[s], sum = decays ? decays[s] : (vec){0};
        for (int i = 0; i < count; i++) {
            vec a = decay(delta[s], A[i * VECTORS], eighths[i * VECTORS], form);
            h[i] = a * h[i] + input[s] * b[s * states + i];
            read += h[i] * c[s * states + i];
            sum += a;
        }
        y[s] = read;
        if (decays) decays[s] = sum;
    }
    for (int i = 0; i < count; i++) H[i * VECTORS] = h[i];
}

INLINE void forward_tile(vec *H, const rates *A, tile delta, tile input, const float *b, const float *c, tile y,
                         tile *decays, int64_t states, int steps, const int form) {
    for (int v = 0; v < VECTORS; v++) {
        int64_t n = 0;
#define WALK(count)                                                                                              \
    forward_states(H + n * VECTORS + v, A->A + n * VECTORS + v, A->eighths + n * VECTORS + v, delta[v], input[v], \
                   b + n, c + n, y[v], decays ? (*decays)[v] : NULL, states, steps, count, form)
        for (; n + STATES_AT_ONCE <= states; n += STATES_AT_ONCE) WALK(STATES_AT_ONCE);
        for (; n < states; n++) WALK(1);
#undef WALK
    }
}

typedef struct {
    const problem *p;
    strided x, delta;
    const float *A, *b, *c, *initial; /* initial may be NULL: zeros */
    float *y, *final;
    float *starts; /* H at the chunks' beginnings, (sequence and slab, chunk, states, SLAB), or NULL */
    float *decays; /* sums of a_t over a slab's channels and states, (sequence and slab, length), or NULL */
} forward_call;

/* Sum a tile's decays over its channels, of which the last vector may have fewer than LANES. */
static void sum_channels(float *out, tile decays, int steps, int channels) {
    for (int s = 0; s < steps; s++) {
        float total = 0;
        for (int v = 0; v * LANES < channels; v++) {
            const int valid = smaller(channels - v * LANES, LANES);
            if (valid == LANES)
                total += sum_lanes(decays[v][s]);
            else
                for (int lane = 0; lane < valid; lane++) total += decays[v][s][lane];
        }
        out[s] = total;
    }
}

/* One slab of one sequence, over all steps; `work` holds three matrices. */
static void forward_slab(const forward_call *f, int64_t task, vec *work) {
    const problem *p = f->p;
    const int64_t L = p->length, N = p->states, D = p->channels, matrix = N * VECTORS;
    const int64_t i = task / slabs_of(p), d = task % slabs_of(p) * SLAB;
    const int channels = smaller(D - d, SLAB);
    vec *H = work;
    rates A = {work + matrix, work + 2 * matrix, 0, 0};
    tile delta, input, y, decays, *sums = f->decays ? &decays : NULL;
    load_rates(&A, f->A + d * N, N, channels);
    memset(H, 0, matrix * sizeof(vec));
    if (f->initial) load_matrix(H, f->initial + (i * D + d) * N, N, channels);
    for (int64_t t = 0; t < L; t += CHUNK) {
        const int steps = smaller(L - t, CHUNK);
        const float *b = f->b + (i * L + t) * N, *c = f->c + (i * L + t) * N;
        if (f->starts) memcpy(f->starts + (task * chunks_of(p) + t / CHUNK) * N * SLAB, H, matrix * sizeof(vec));
        load_tile(delta, f->delta, i, t, d, steps, channels);
        load_tile(input, f->x, i, t, d, steps, channels);
        for (int v = 0; v < VECTORS; v++)
            for (int s = 0; s < steps; s++) input[v][s] *= delta[v][s];
        memset(y, 0, sizeof(tile));
        if (sums) memset(decays, 0, sizeof(tile));
        int form = decay_form(p, delta, &A, steps);
        if (A.shared && form != EXPECTED) {
            for (int v = 0; v < VECTORS; v++)
                for (int s = 0; s < steps; s++) delta[v][s] = exp_any_product(A.eighths[v], delta[v][s]);
            form = GIVEN;
        }
        switch (form) {
            case GIVEN: forward_tile(H, &A, delta, input, b, c, y, sums, N, steps, GIVEN); break;
            case EXPECTED: forward_tile(H, &A, delta, input, b, c, y, sums, N, steps, EXPECTED); break;
            case ANY: forward_tile(H, &A, delta, input, b, c, y, sums, N, steps, ANY); break;
            default:
                if (sums)
                    forward_tile(H, &A, delta, input, b, c, y, sums, N, steps, BOUNDED);
                else
                    forward_tile(H, &A, delta, input, b, c, y, NULL, N, steps, BOUNDED);
        }
        store_tile(f->y + (i * L + t) * D + d, y, D, steps, channels);
        if (sums) sum_channels(f->decays + task * L + t, decays, steps, channels);
    }
    store_matrix(f->final + (i * D + d) * N, H, N, channels);
}

/* y (batch, length, channels), the final state (batch, channels, states) and, where they are not NULL, the states kept
 * for the backward pass (selective_scan_starts) and `mean_decay` (batch, length), the mean of a_t over channels and
 * states. A (channels, states), b and c (batch, length, states) and initial (as final, or NULL for zeros) are
 * contiguous. Returns 1 where there is no memory for the work, else 0. */
int selective_scan_forward(const problem *p, const strided *x, const strided *delta, const float *A, const float *b,
                           const float *c, const float *initial, float *y, float *final, float *starts,
                           float *mean_decay) {
    const int64_t slabs = slabs_of(p), tasks = p->batch * slabs, L = p->length, part = 3 * p->states * VECTORS;
    float *decays = mean_decay ? allocate(tasks * L * sizeof(float)) : NULL;
    vec *work = allocate(p->threads * part * sizeof(vec));
    const int failed = !work || (mean_decay && !decays);
    const forward_call f = {p, *x, *delta, A, b, c, initial, y, final, starts, decays};
    if (!failed) {
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
        {
            const unsigned mode = flush_denormals();
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; task++) forward_slab(&f, task, work + thread_number() * part);
            restore_denormals(mode);
        }
        for (int64_t row = 0; mean_decay && row < p->batch * L; row++) {
            double total = 0;
            for (int64_t slab = 0; slab < slabs; slab++) total += decays[(row / L * slabs + slab) * L + row % L];
            mean_decay[row] = (float)(total / ((double)p->channels * p->states));
        }
    }
    free(decays);
    free(work);
    return failed;
}

/* ---- backward ---- */

/* Numbers in the states that the forward pass keeps for the backward pass. */
int64_t selective_scan_starts(const problem *p) {
    return p->batch * slabs_of(p) * chunks_of(p) * p->states * SLAB;
}

typedef vec steps_of_states[STATES_AT_ONCE][ROW]; /* for the cache sets, as in a tile */

/* Walk `count` states of a vector through a tile, forward for the decays and states and then backward. With grad_y the
 * gradient of y, the adjoint of the state is
 *     lambda_t = c_t grad_y_t + a_{t+1} lambda_{t+1},
 * and grad_b_t = sum_d lambda_t delta_t x_t, grad_c_t = sum_d grad_y_t H_t. The input delta_t x_t has the gradient
 * sum_n lambda_t b_t, and v = delta_t A has g_t = lambda_t H_{t-1} da_t/dv, where da/dv is a, or a^2 for the expected
 * decay: grad_A = sum_t g_t delta_t, and sum_n g_t A is v's part of grad_delta_t.
 * `carried` is a_{t+1} lambda_{t+1} after the tile, and becomes that before it. */
INLINE void backward_states(const float *starts, const vec *A, const vec *eighths, vec *carried, const vec *delta,
                            const vec *input, const vec *grad_y, const float *b, const float *c, vec *grad_input,
                            vec *grad_delta, steps_of_states grad_b, steps_of_states grad_c, vec *grad_A,
                            int64_t states, int steps, const int count, const int form) {
    vec H[STATES_AT_ONCE], sum[STATES_AT_ONCE], later[STATES_AT_ONCE];
    steps_of_states a, before;
    for (int i = 0; i < count; i++) {
        memcpy(&H[i], starts + i * SLAB, sizeof(vec));
        sum[i] = grad_A[i * VECTORS], later[i] = carried[i * VECTORS];
    }
    for (int s = 0; s < steps; s++)
        for (int i = 0; i < count; i++) {
            before[i][s] = H[i];
            a[i][s] = decay(delta[s], A[i * VECTORS], eighths[i * VECTORS], form);
            H[i] = a[i][s] * H[i] + input[s] * b[s * states + i];
            grad_c[i][s] += grad_y[s] * H[i];
        }
    for (int s = steps - 1; s >= 0; s--) {
        vec to_input = grad_input[s], to_delta = grad_delta[s];
        for (int i = 0; i < count; i++) {
            vec lambda = grad_y[s] * c[s * states + i] + later[i];
            grad_b[i][s] += lambda * input[s];
            to_input += lambda * b[s * states + i];
            later[i] = lambda * a[i][s];
            vec g = later[i] * before[i][s];
            if (form == EXPECTED) g *= a[i][s];
            to_delta += g * A[i * VECTORS];
            sum[i] += g * delta[s];
        }
        grad_input[s] = to_input, grad_delta[s] = to_delta;
    }
    for (int i = 0; i < count; i++) grad_A[i * VECTORS] = sum[i], carried[i * VECTORS] = later[i];
}

/* The same for the gradient of the input alone, which depends on no state. */
INLINE void backward_input(const vec *A, const vec *eighths, vec *carried, const vec *delta, const vec *grad_y,
                           const float *b, const float *c, vec *grad_input, int64_t states, int steps,
                           const int count, const int form) {
    vec later[STATES_AT_ONCE];
    for (int i = 0; i < count; i++) later[i] = carried[i * VECTORS];
    for (int s = steps - 1; s >= 0; s--)
        for (int i = 0; i < count; i++) {
            vec lambda = grad_y[s] * c[s * states + i] + later[i];
            grad_input[s] += lambda * b[s * states + i];
            later[i] = lambda * decay(delta[s], A[i * VECTORS], eighths[i * VECTORS], form);
        }
    for (int i = 0; i < count; i++) carried[i * VECTORS] = later[i];
}

typedef struct {
    const problem *p;
    strided x, delta, grad_y;
    const float *A, *b, *c, *starts, *grad_final;
    float *grad_x, *grad_delta, *grad_initial; /* grad_initial may be NULL, and grad_delta with all that follow it */
    float *grad_A;  /* of each sequence, (batch, channels, states) */
    float *grad_bc; /* of b and c, from each slab: (sequence and slab, 2, length, states) */
} backward_call;

/* The terms of one tile, from its first step and channel on. */
typedef struct {
    tile delta, input, grad_y, grad_input, grad_delta;
    const float *b, *c, *starts;
    float *grad_b, *grad_c;
    int steps;
} backward_terms;

/* Walk `count` states from n on through all vectors of a tile, and sum the gradients of b and c over channels. */
INLINE void backward_vectors(backward_terms *g, const rates *A, vec *carried, vec *grad_A, int64_t n, int64_t states,
                             const int count, const int form) {
    steps_of_states grad_b, grad_c;
    if (!g->grad_b) {
        for (int v = 0; v < VECTORS; v++) {
            const int64_t k = n * VECTORS + v;
            backward_input(A->A + k, A->eighths + k, carried + k, g->delta[v], g->grad_y[v], g->b + n, g->c + n,
                           g->grad_input[v], states, g->steps, count, form);
        }
        return;
    }
    memset(grad_b, 0, count * sizeof(grad_b[0]));
    memset(grad_c, 0, count * sizeof(grad_c[0]));
    for (int v = 0; v < VECTORS; v++) {
        const int64_t k = n * VECTORS + v;
        backward_states(g->starts + k * LANES, A->A + k, A->eighths + k, carried + k, g->delta[v], g->input[v],
                        g->grad_y[v], g->b + n, g->c + n, g->grad_input[v], g->grad_delta[v], grad_b, grad_c,
                        grad_A + k, states, g->steps, count, form);
    }
    for (int i = 0; i < count; i++)
        for (int s = 0; s < g->steps; s++) {
            g->grad_b[s * states + n + i] = sum_lanes(grad_b[i][s]);
            g->grad_c[s * states + n + i] = sum_lanes(grad_c[i][s]);
        }
}

INLINE void backward_tile(backward_terms *g, const rates *A, vec *carried, vec *grad_A, int64_t states,
                          const int form) {
    int64_t n = 0;
    for (; n + STATES_AT_ONCE <= states; n += STATES_AT_ONCE)
        backward_vectors(g, A, carried, grad_A, n, states, STATES_AT_ONCE, form);
    for (; n < states; n++) backward_vectors(g, A, carried, grad_A, n, states, 1, form);
}

/* One slab of one sequence, from the last step to the first; `work` holds four matrices. */
static void backward_slab(const backward_call *f, int64_t task, vec *work) {
    const problem *p = f->p;
    const int64_t L = p->length, N = p->states, D = p->channels, matrix = N * VECTORS;
    const int64_t i = task / slabs_of(p), d = task % slabs_of(p) * SLAB;
    const int channels = smaller(D - d, SLAB);
    vec *carried = work, *grad_A = work + matrix;
    rates A = {work + 2 * matrix, work + 3 * matrix, 0, 0};
    backward_terms g;
    tile x;
    load_rates(&A, f->A + d * N, N, channels);
    load_matrix(carried, f->grad_final + (i * D + d) * N, N, channels);
    memset(grad_A, 0, matrix * sizeof(vec));
    for (int64_t chunk = chunks_of(p) - 1; chunk >= 0; chunk--) {
        const int64_t t = chunk * CHUNK, at = (i * L + t) * N;
        g.steps = smaller(L - t, CHUNK);
        g.b = f->b + at, g.c = f->c + at;
        g.grad_b = NULL;
        if (f->grad_bc) {
            g.starts = f->starts + (task * chunks_of(p) + chunk) * N * SLAB;
            g.grad_b = f->grad_bc + (2 * task * L + t) * N, g.grad_c = g.grad_b + L * N;
        }
        load_tile(g.delta, f->delta, i, t, d, g.steps, channels);
        load_tile(x, f->x, i, t, d, g.steps, channels);
        load_tile(g.grad_y, f->grad_y, i, t, d, g.steps, channels);
        for (int v = 0; v < VECTORS; v++)
            for (int s = 0; s < g.steps; s++) g.input[v][s] = x[v][s] * g.delta[v][s];
        memset(g.grad_input, 0, sizeof(tile));
        memset(g.grad_delta, 0, sizeof(tile));
        switch (decay_form(p, g.delta, &A, g.steps)) {
            case EXPECTED: backward_tile(&g, &A, carried, grad_A, N, EXPECTED); break;
            case ANY: backward_tile(&g, &A, carried, grad_A, N, ANY); break;
            default: backward_tile(&g, &A, carried, grad_A, N, BOUNDED);
        }
        for (int v = 0; v < VECTORS; v++)
            for (int s = 0; s < g.steps; s++) {
                g.grad_delta[v][s] += g.grad_input[v][s] * x[v][s];
                g.grad_input[v][s] *= g.delta[v][s];
            }
        store_tile(f->grad_x + (i * L + t) * D + d, g.grad_input, D, g.steps, channels);
        if (f->grad_delta) store_tile(f->grad_delta + (i * L + t) * D + d, g.grad_delta, D, g.steps, channels);
    }
    if (f->grad_initial) store_matrix(f->grad_initial + (i * D + d) * N, carried, N, channels);
    if (f->grad_A) store_matrix(f->grad_A + (i * D + d) * N, grad_A, N, channels);
}

/* Add the slabs' gradients of b and c at one step of one sequence, in the order of the slabs. */
static void sum_slabs(const backward_call *f, int64_t row, float *grad_b, float *grad_c) {
    const int64_t slabs = slabs_of(f->p), L = f->p->length, N = f->p->states;
    memset(grad_b + row * N, 0, N * sizeof(float));
    memset(grad_c + row * N, 0, N * sizeof(float));
    for (int64_t slab = 0; slab < slabs; slab++) {
        const float *from = f->grad_bc + (2 * (row / L * slabs + slab) * L + row % L) * N;
        for (int64_t n = 0; n < N; n++) {
            grad_b[row * N + n] += from[n];
            grad_c[row * N + n] += from[L * N + n];
        }
    }
}

/* The gradients of all terms, contiguous, from those of y and of the final state (contiguous); `grad_initial` may be
 * NULL, and `starts` with the gradients of delta, A, b and c. Returns 1 where there is no memory for the work, else 0. */
int selective_scan_backward(const problem *p, const strided *x, const strided *delta, const float *A, const float *b,
                            const float *c, const float *starts, const strided *grad_y, const float *grad_final,
                            float *grad_x, float *grad_delta, float *grad_A, float *grad_b, float *grad_c,
                            float *grad_initial) {
    const int64_t tasks = p->batch * slabs_of(p), L = p->length, N = p->states, DN = p->channels * N;
    const int64_t part = 4 * N * VECTORS;
    const int all = grad_delta != NULL;
    float *grad_bc = all ? allocate(2 * tasks * L * N * sizeof(float)) : NULL;
    float *sequences = all ? allocate(p->batch * DN * sizeof(float)) : NULL;
    vec *work = allocate(p->threads * part * sizeof(vec));
    const int failed = (all && (!grad_bc || !sequences)) || !work;
    const backward_call f = {p,          *x,     *delta,     *grad_y,      A,         b,      c, starts,
                             grad_final, grad_x, grad_delta, grad_initial, sequences, grad_bc};
    if (!failed) {
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
        {
            const unsigned mode = flush_denormals();
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; task++) backward_slab(&f, task, work + thread_number() * part);
#pragma omp for
            for (int64_t row = 0; row < all * p->batch * L; row++) sum_slabs(&f, row, grad_b, grad_c);
#pragma omp for
            for (int64_t k = 0; k < all * DN; k++) {
                float total = 0;
                for (int64_t i = 0; i < p->batch; i++) total += sequences[i * DN + k];
                grad_A[k] = total;
            }
            restore_denormals(mode);
        }
    }
    free(grad_bc);
    free(sequences);
    free(work);
    return failed;
}
