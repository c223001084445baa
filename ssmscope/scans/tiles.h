/* Slabs of channels over chunks of steps, in tiles that stay in the first-level cache, and the decays of their states. */

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

/* ---- decays ---- */

/* A of one (vector, n), also in eighths of a power of two; of the slab the largest |A|, and whether some A is positive. */
typedef struct {
    lanes A, whole, rest;
} rate;

/* How a decay is found: BOUNDED where delta A cannot leave what `decay_within` takes, FADING where that is nowhere positive
 * either: A in eighths may then be rounded, as what that changes of e^v is below |v| e^v 2^-24. */
enum { EXPECTED, FADING, BOUNDED, ANY };

static void load_rates(rate *to, float *most, int *grows, const float *from, int states, int channels) {
    memset(to, 0, sizeof(rate) * states * VECTORS);
    *most = 0, *grows = 0;
    for (int i = 0; i < channels; i++)
        for (int n = 0; n < states; n++) {
            float A = from[(int64_t)i * states + n], whole = A * EIGHTHS;
            rate *r = &to[n * VECTORS + i / LANES];
            r->A[i % LANES] = A, r->whole[i % LANES] = whole;
            r->rest[i % LANES] = __builtin_fmaf(A, EIGHTHS, -whole) + A * EIGHTHS_REST;
            if (!(__builtin_fabsf(A) <= *most)) *most = __builtin_fabsf(A); /* NaN stays */
            *grows |= A > 0;
        }
}

/* How decays of a tile of steps are found; what steps are not finite leave the bound. */
static int way_of(const lanes *delta, float most, int grows, int steps, int expected) {
    lanes largest = {0};
    ints signs = {0};
    float bound = 0;
    for (int s = 0; s < steps; s++) {
        lanes size = (lanes)((ints)delta[s] & 0x7fffffff);
        ints more = ~(ints)(size <= largest);
        largest = (lanes)((more & (ints)size) | (~more & (ints)largest));
        signs |= (ints)delta[s];
    }
    for (int i = 0; i < LANES; i++) {
        if (!(largest[i] <= bound)) bound = largest[i];
        grows |= signs[i] < 0;
    }
    return expected ? EXPECTED : !(bound * most < 79.0f) ? ANY : grows ? BOUNDED : FADING;
}

INLINE lanes decay_of(lanes delta, rate r, const int way) {
    if (way == EXPECTED) return decay(delta, r.A, 1);
#if defined(__SSE__) && !defined(__FMA__)
    return exponential(delta * r.A); /* products would be rounded */
#endif
    if (way == FADING) return decay_within(delta, r.whole, NULL);
    lanes near = decay_within(delta, r.whole, &r.rest);
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
