/* Tiles of (batch, length, channels) tensors, small enough for the first-level cache, and decays of their states. */

#include "vectors.h"

enum {
    CHUNK = 32,      /* steps of a tile; the backward pass starts from the states kept at their beginnings */
    ROW = CHUNK + 1, /* not a power of two: the rows of several tiles must not compete for the same cache sets */
    SLAB = 64,       /* neighbouring channels of a tile */
    VECTORS = SLAB / LANES
};

typedef struct {
    int64_t batch, length, channels, states;
    int threads, expected;
} problem;

/* A float32 tensor (batch, length, channels) with any strides, in elements. */
typedef struct {
    const float *data;
    int64_t batch, step, channel;
} strided;

typedef vec tile[VECTORS][ROW]; /* channel v * LANES + lane at step s is [v][s][lane] */

static int64_t slabs_of(const problem *p) { return (p->channels + SLAB - 1) / SLAB; }
static int64_t chunks_of(const problem *p) { return (p->length + CHUNK - 1) / CHUNK; }

/* Read a tile from step t and channel d of sequence i, with zeros where the slab has no channel. */
static void load_tile(tile out, strided from, int64_t i, int64_t t, int64_t d, int steps, int channels) {
    const float *data = from.data + i * from.batch + t * from.step + d * from.channel;
    if (from.channel == 1 && channels == SLAB) {
        for (int s = 0; s < steps; s++)
            for (int v = 0; v < VECTORS; v++) memcpy(&out[v][s], data + s * from.step + v * LANES, sizeof(vec));
        return;
    }
    if (channels < SLAB) memset(out, 0, sizeof(tile));
    for (int j = 0; j < channels; j++)
        for (int s = 0; s < steps; s++) out[j / LANES][s][j % LANES] = data[s * from.step + j * from.channel];
}

/* Write a tile into a contiguous tensor, `to` being the place of its first element and `row` the tensor's channels. */
static void store_tile(float *to, tile from, int64_t row, int steps, int channels) {
    for (int s = 0; s < steps; s++)
        for (int v = 0; v < VECTORS; v++) {
            const int valid = smaller(channels - v * LANES, LANES);
            if (valid == LANES)
                memcpy(to + s * row + v * LANES, &from[v][s], sizeof(vec));
            else if (valid > 0)
                memcpy(to + s * row + v * LANES, &from[v][s], valid * sizeof(float));
        }
}

/* A slab's contiguous (channels, states) matrix as vectors of channels, state n of vector v at [n * VECTORS + v]. */
static void load_matrix(vec *out, const float *from, int64_t states, int channels) {
    memset(out, 0, sizeof(vec) * states * VECTORS);
    for (int j = 0; j < channels; j++)
        for (int64_t n = 0; n < states; n++) out[n * VECTORS + j / LANES][j % LANES] = from[j * states + n];
}

static void store_matrix(float *to, const vec *from, int64_t states, int channels) {
    for (int j = 0; j < channels; j++)
        for (int64_t n = 0; n < states; n++) to[j * states + n] = from[n * VECTORS + j / LANES][j % LANES];
}

/* ---- decays ---- */

/* A slab's A, also in eighths of a power of two, as matrices of vectors, its largest magnitude (NaN stays), and whether
 * all states of a channel have the same. */
typedef struct {
    vec *A, *eighths;
    float largest;
    int shared;
} rates;

static void load_rates(rates *to, const float *A, int64_t states, int channels) {
    load_matrix(to->A, A, states, channels);
    for (int64_t k = 0; k < states * VECTORS; k++) to->eighths[k] = to->A[k] * splat(EIGHTHS_PER_E);
    to->largest = 0;
    for (int64_t k = 0; k < states * channels; k++)
        if (!(__builtin_fabsf(A[k]) <= to->largest)) to->largest = __builtin_fabsf(A[k]);
    to->shared = 1;
    for (int64_t k = 0; k < states * channels; k++) to->shared &= A[k] == A[k - k % states];
}

/* How the decays of a tile are computed: as 1 / (1 - delta A); as exp(delta A), with every |delta A| below 87; as
 * exp(delta A) with nothing known about delta A; or not at all, as they stand in the place of delta. */
enum { EXPECTED, BOUNDED, ANY, GIVEN };

static int decay_form(const problem *p, tile delta, const rates *A, int steps) {
    vec_int largest = {0}; /* magnitudes are ordered as their bits are, and NaN comes last */
    for (int v = 0; v < VECTORS; v++)
        for (int s = 0; s < steps; s++) {
            vec_int bits = (vec_int)delta[v][s] & 0x7fffffff;
            largest = (vec_int)where(bits > largest, (vec)bits, (vec)largest);
        }
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = largest[lane] > bits ? largest[lane] : bits;
    float bound;
    memcpy(&bound, &bits, sizeof(bound));
    return p->expected ? EXPECTED : bound * A->largest < 87.0f ? BOUNDED : ANY;
}

INLINE vec decay(vec delta, vec A, vec eighths, const int form) {
    if (form == GIVEN) return delta;
    if (form == EXPECTED) return 1.0f / (1.0f - delta * A);
    return form == BOUNDED ? exp_product(eighths, delta) : exp_any_product(eighths, delta);
}
