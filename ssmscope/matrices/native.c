/* Attention matrices of layers with a decay per state and heads of width 1, in float32: sums over channels d of
 *
 *     M[t, s] = left_t sum_i taps_{s,i} sum_n c_t[n] (prod_{s+i<r<=t} a_r[n]) b_{s+i}[n] delta_{s+i}   (+ D, see below)
 *
 * of each channel's terms, with a_t = exp(delta_t A) or 1 / (1 - delta_t A), or of their absolute values
 * (Differential Mamba, Ali et al. 2024, Eq. 8), whole, in cells, or single rows; what `whole`, `pooled` and `rows`
 * compute, many times faster.
 *
 * The sum over (channel, state) k is a matrix product of factors R[u, k] and W[s, k] with the decays between u and s,
 * where row u of the triangle is step t = u + reach - 1, at which the inputs at s <= u have all arrived. The steps are
 * cut into blocks. Within one, R and W are multiplied with the decays to its beginning and to its end; what joins two
 * blocks is then R, the decays across the blocks between, and W. A task takes the columns of one block through all
 * blocks of rows below, and multiplies its W with the decays across each that it leaves behind, so that no factor is
 * above 1 where states decay, nothing is divided and no exponential is taken of a sum. Within a block halves of halves
 * are such pairs of blocks, down to TILE steps, whose products of decays run through registers.
 *
 * Rows of factors are vectors of k, so a matrix product is one of dot products: TILE x TILE of them at a time are
 * vectors of partial sums in registers, which is as fast as a processor multiplies. Of the channels as many at once as
 * keep two blocks in the second-level cache.
 *
 * Every number of the result is written by one task at a time, in an order that does not depend on the number of
 * threads. */

#include "vectors.h"

#if defined(__AVX512F__)
enum { TILE = 5, HEIGHT = 4, VECTORS = 4 };
#elif defined(__AVX__)
enum { TILE = 3, HEIGHT = 4, VECTORS = 2 };
#else
enum { TILE = 3, HEIGHT = 2, VECTORS = 4 };
#endif
enum {
    BLOCK = 16 * TILE, /* steps */
    COLUMNS = 512,     /* about so many k at once */
    SINGLE = 64,       /* steps of a block where channels stay apart; a multiple of VECTORS * LANES */
    REACH = 16,        /* the most that an input may spread */
    MOST = BLOCK > SINGLE ? BLOCK : SINGLE,
    STEPS = MOST + 2 * REACH,
    CHUNK = 32 /* steps of a pass through cells or backwards */
};

/* float32 (steps, channels) and its strides in numbers; `at` is NULL where there is none. */
typedef struct {
    const float *at;
    int64_t step, channel;
} view;

/* One sequence's channels, which read one group of b and c. */
typedef struct {
    int64_t length, channels, states, reach;
    int threads, expected;
    view delta, left, taps; /* taps (steps, reach, channels) */
    int64_t tap;            /* the stride of its second dimension */
    const float *A, *b, *c; /* (channels, states), (length, states) twice, contiguous */
    const float *D;         /* (channels), or NULL */
} terms;

/* A chunk of channels: `channels` from `first` on, in rows of `width` = states * lanes of them, `row` numbers apart. */
typedef struct {
    int64_t first, row;
    int channels, vectors, width;
} chunk;

static int64_t columns_of(const terms *m, int64_t columns) {
    int64_t most = columns / (m->states * LANES) > 1 ? columns / (m->states * LANES) : 1; /* vectors */
    int64_t vectors = (m->channels + LANES - 1) / LANES;
    int64_t chunks = (vectors + most - 1) / most;
    return (vectors + chunks - 1) / chunks * LANES;
}

static chunk chunk_at(const terms *m, int64_t first, int64_t columns) {
    chunk k = {.first = first, .channels = smaller(m->channels - first, columns)};
    k.vectors = (int)(columns / LANES);
    k.width = (int)(columns * m->states);
    k.row = k.width + 16; /* not a power of two, which would crowd the cache's sets */
    return k;
}

/* `count` steps from t on of LANES channels from d on, of which `valid` exist; `fill` elsewhere. */
INLINE void load(lanes *out, view from, int64_t t, int64_t d, int64_t length, int count, int valid, float fill) {
    for (int s = 0; s < count; s++) {
        const float *at = from.at + (t + s) * from.step + d * from.channel;
        if (!from.at || t + s >= length || t + s < 0 || valid <= 0) {
            out[s] = all(fill);
        } else if (from.channel == 1 && valid >= LANES) {
            memcpy(&out[s], at, sizeof(lanes));
        } else {
            out[s] = all(fill);
            for (int i = 0; i < valid && i < LANES; i++) out[s][i] = at[i * from.channel];
        }
    }
}

INLINE lanes load_A(const terms *m, int64_t d, int64_t n, int valid) {
    lanes A = all(0);
    for (int i = 0; i < valid && i < LANES; i++) A[i] = m->A[(d + i) * m->states + n];
    return A;
}

INLINE lanes load_D(const terms *m, int64_t d, int valid) {
    lanes D = all(0);
    for (int i = 0; m->D && i < valid && i < LANES; i++) D[i] = m->D[d + i];
    return D;
}

INLINE lanes magnitude(lanes v) {
    return (lanes)((ints)v & 0x7fffffff);
}

/* ---- factors ---- */

/* The rows u0 ... u0 + block - 1 of a, R and W; those beyond `rows`, and channels that do not exist, change nothing.
 * Adds the entries at distances 0 ... reach - 1 from the diagonal of columns u0 ... u0 + near - 1 to `out`. */
INLINE void fill_with(const terms *m, chunk k, int64_t u0, int block, int rows, int near, float *a, float *R, float *W,
                      float *out, int64_t stride, int absolute, int expected, int spread) {
    const int late = spread ? (int)m->reach - 1 : 0, count = near + late;
    lanes delta[STEPS], left[STEPS], decays[STEPS], reads[STEPS], writes[STEPS], taps[REACH][STEPS];
    lanes sums[REACH][STEPS];
    float totals[REACH][STEPS];
    memset(totals, 0, sizeof(totals[0]) * (late + 1));
    for (int v = 0; v < k.vectors; v++) {
        const int valid = k.channels - v * LANES;
        const int64_t d = k.first + v * LANES, L = m->length, N = m->states;
        load(delta, m->delta, u0, d, L, count, valid, 0);
        load(left, m->left, u0, d, L, count, valid, 1);
        for (int i = 0; i <= late; i++) {
            view tap = {m->taps.at ? m->taps.at + i * m->tap : NULL, m->taps.step, m->taps.channel};
            load(taps[i], tap, u0, d, L, near, valid, m->taps.at ? 0 : 1);
            for (int s = 0; s < near; s++) sums[i][s] = all(0);
            if (!m->D) continue;
            const lanes D = load_D(m, d, valid);
            for (int s = 0; s < near; s++) sums[i][s] = D * left[s + i] * taps[i][s];
        }
        for (int64_t n = 0; n < N; n++) {
            const lanes A = load_A(m, d, n, valid);
            const int64_t at = n * k.vectors * LANES + v * LANES;
            const int inside = smaller(count, L - u0);
            for (int s = 0; s < inside; s++) {
                decays[s] = decay(delta[s], A, expected);
                reads[s] = left[s] * m->c[(u0 + s) * N + n];
                writes[s] = delta[s] * m->b[(u0 + s) * N + n];
            }
            for (int s = inside; s < count; s++) decays[s] = all(1), reads[s] = writes[s] = all(0);
            for (int s = 0; s < near; s++) {
                lanes gathered = writes[s] * taps[0][s];
                sums[0][s] += reads[s] * gathered;
                if (spread)
                    for (int i = 1; i <= late; i++) {
                        gathered = decays[s + i] * gathered + writes[s + i] * taps[i][s];
                        sums[i][s] += reads[s + i] * gathered;
                    }
                if (s >= rows) continue;
                *(lanes *)(a + s * k.row + at) = decays[s + late];
                *(lanes *)(R + s * k.row + at) = reads[s + late] * decays[s + late];
                *(lanes *)(W + s * k.row + at) = gathered;
            }
        }
        for (int i = 0; i <= late; i++)
            for (int s = 0; s < near; s++) totals[i][s] += sum_of_lanes(absolute ? magnitude(sums[i][s]) : sums[i][s]);
    }
    for (int i = 0; i <= late; i++)
        for (int s = 0; s < near && u0 + s + i < m->length; s++) out[(u0 + s + i) * stride + u0 + s] += totals[i][s];
    for (int s = rows; s < block; s++) {
        for (int j = 0; j < k.width; j++) a[s * k.row + j] = 1;
        memset(R + s * k.row, 0, k.width * sizeof(float));
        memset(W + s * k.row, 0, k.width * sizeof(float));
    }
}

static void fill(const terms *m, chunk k, int64_t u0, int block, float *a, float *R, float *W, float *out,
                 int64_t stride, int absolute) {
    const int64_t left = m->length - m->reach + 1 - u0;
    const int rows = smaller(left, block), near = left <= block ? rows + (int)m->reach - 1 : rows;
    if (m->expected)
        fill_with(m, k, u0, block, rows, near, a, R, W, out, stride, absolute, 1, 1);
    else if (m->reach > 1)
        fill_with(m, k, u0, block, rows, near, a, R, W, out, stride, absolute, 0, 1);
    else
        fill_with(m, k, u0, block, rows, near, a, R, W, out, stride, absolute, 0, 0);
}

/* ---- products of factors ---- */

/* out[i][j] += sum_k R[i][k] W[j][k] for TILE rows and columns, of which `rows` and `columns` exist. */
INLINE void dots(float *out, int64_t stride, const float *R, const float *W, int64_t row, int width, int rows,
                 int columns) {
    lanes sums[TILE][TILE];
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) sums[i][j] = (lanes){0};
    for (int k = 0; k < width; k += LANES) {
        lanes w[TILE];
        for (int j = 0; j < TILE; j++) w[j] = *(const lanes *)(W + j * row + k);
        for (int i = 0; i < TILE; i++) {
            lanes r = *(const lanes *)(R + i * row + k);
            for (int j = 0; j < TILE; j++) sums[i][j] += r * w[j];
        }
    }
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) {
            float sum = sum_of_lanes(sums[i][j]);
            if (i < rows && j < columns) out[i * stride + j] += sum;
        }
}

/* The same for any number of rows and columns; the columns of a tile stay in the first-level cache. */
static void product(float *out, int64_t stride, const float *R, const float *W, int64_t row, int width, int rows,
                    int columns) {
    for (int s = 0; s < columns; s += TILE)
        for (int t = 0; t < rows; t += TILE)
            dots(out + t * stride + s, stride, R + t * row, W + s * row, row, width, rows - t, columns - s);
}

INLINE void multiply(float *rows, const float *by, int count, int64_t row, int width) {
    for (int t = 0; t < count; t++)
        for (int k = 0; k < width; k += LANES) *(lanes *)(rows + t * row + k) *= *(const lanes *)(by + k);
}

/* TILE steps: adds their triangle, and multiplies R and W with the decays to the beginning and the end; the decays
 * across them are left in the first row of a. */
static void smallest(float *out, int64_t stride, float *a, float *R, float *W, int64_t row, int width, int rows) {
    lanes sums[TILE][TILE];
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) sums[i][j] = (lanes){0};
    for (int k = 0; k < width; k += LANES) {
        lanes w[TILE], across = all(1);
        for (int t = 0; t < TILE; t++) {
            lanes by = *(const lanes *)(a + t * row + k), r = *(const lanes *)(R + t * row + k);
            for (int s = 0; s < t; s++) {
                sums[t][s] += r * w[s];
                w[s] *= by;
            }
            w[t] = *(const lanes *)(W + t * row + k);
            *(lanes *)(R + t * row + k) = r * across;
            across *= by;
        }
        for (int t = 0; t < TILE; t++) *(lanes *)(W + t * row + k) = w[t];
        *(lanes *)(a + k) = across;
    }
    for (int t = 1; t < TILE; t++)
        for (int s = 0; s < t; s++) {
            float sum = sum_of_lanes(sums[t][s]);
            if (t < rows) out[t * stride + s] += sum;
        }
}

/* The same for a block, whose row 0 is at `out`'s corner. */
static void triangle(float *out, int64_t stride, float *a, float *R, float *W, int64_t row, int width, int rows) {
    for (int t = 0; t < rows; t += TILE)
        smallest(out + t * (stride + 1), stride, a + t * row, R + t * row, W + t * row, row, width, rows - t);
    for (int half = TILE; half < BLOCK; half *= 2)
        for (int begin = 0; begin < rows; begin += 2 * half) {
            const int middle = begin + half, below = smaller(rows - middle, half);
            float *first = a + begin * row, *second = a + middle * row;
            if (below <= 0) continue; /* what is not there does not decay */
            product(out + middle * stride + begin, stride, R + middle * row, W + begin * row, row, width, below, half);
            multiply(R + middle * row, first, below, row, width);
            multiply(W + begin * row, second, half, row, width);
            multiply(first, second, 1, row, width);
        }
}

/* The columns of block J against all rows below: `across` (block, row) are the decays across each block. */
static void below(float *out, int64_t stride, const float *across, const float *R, float *W, int64_t row, int width,
                  int64_t J, int64_t rows) {
    W += J * BLOCK * row;
    for (int64_t I = J + 1; I * BLOCK < rows; I++) {
        if (I > J + 1) multiply(W, across + (I - 1) * row, BLOCK, row, width);
        product(out + I * BLOCK * stride + J * BLOCK, stride, R + I * BLOCK * row, W, row, width,
                smaller(rows - I * BLOCK, BLOCK), BLOCK);
    }
}

/* Adds the sum over channels to `out` (length, length), rows `stride` numbers apart. Gives 1 when there is no memory. */
int ssm_whole(const terms *m, float *out, int64_t stride) {
    const int64_t late = m->reach - 1, rows = m->length - late, blocks = (rows + BLOCK - 1) / BLOCK;
    const int64_t columns = columns_of(m, COLUMNS), row = chunk_at(m, 0, columns).row;
    float *corner = out + late * stride;
    float *R = allocate(blocks * BLOCK * row * sizeof(float)), *W = allocate(blocks * BLOCK * row * sizeof(float));
    float *across = allocate(blocks * row * sizeof(float)), *work = allocate(m->threads * BLOCK * row * sizeof(float));
    const int failed = !R || !W || !across || !work;
    if (!failed) {
#pragma omp parallel num_threads(m->threads) if (m->threads > 1)
        {
            unsigned mode = flush_denormals();
            float *a = work + thread_number() * BLOCK * row;
            for (int64_t d = 0; d < m->channels; d += columns) {
                const chunk k = chunk_at(m, d, columns);
#pragma omp for schedule(dynamic)
                for (int64_t I = 0; I < blocks; I++) {
                    float *r = R + I * BLOCK * row, *w = W + I * BLOCK * row;
                    fill(m, k, I * BLOCK, BLOCK, a, r, w, out, stride, 0);
                    triangle(corner + I * BLOCK * (stride + 1), stride, a, r, w, row, k.width,
                             smaller(rows - I * BLOCK, BLOCK));
                    memcpy(across + I * row, a, k.width * sizeof(float));
                }
#pragma omp for schedule(dynamic)
                for (int64_t J = 0; J < blocks - 1; J++) below(corner, stride, across, R, W, row, k.width, J, rows);
            }
            restore_denormals(mode);
        }
    }
    free(R);
    free(W);
    free(across);
    free(work);
    return failed;
}

/* ---- channel by channel ---- */

/* tile[t][s] += |sum_n R[t][n] W[n][s]|, or that sum itself, for SINGLE columns and `rows` rows. */
INLINE void add_product(float *tile, const float *R, const float *W, int64_t states, int rows, int absolute) {
    for (int t = 0; t < rows; t += HEIGHT)
        for (int s = 0; s < SINGLE; s += VECTORS * LANES) {
            lanes sums[HEIGHT][VECTORS];
            for (int i = 0; i < HEIGHT; i++)
                for (int j = 0; j < VECTORS; j++) sums[i][j] = (lanes){0};
            for (int64_t n = 0; n < states; n++) {
                lanes w[VECTORS];
                for (int j = 0; j < VECTORS; j++) w[j] = *(const lanes *)(W + n * SINGLE + s + j * LANES);
                for (int i = 0; i < HEIGHT; i++)
                    for (int j = 0; j < VECTORS; j++) sums[i][j] += w[j] * R[(t + i) * states + n];
            }
            for (int i = 0; i < HEIGHT; i++)
                for (int j = 0; j < VECTORS; j++)
                    *(lanes *)(tile + (t + i) * SINGLE + s + j * LANES) +=
                        absolute ? magnitude(sums[i][j]) : sums[i][j];
        }
}

/* One channel's triangle of a block, from columns of rows of factors; leaves R[t][n] times the decays to the block's
 * beginning, W[n][s] times those to its end, and the decays across it. */
static void one_triangle(float *tile, const float *a, const float *r, const float *w, int64_t row, int64_t between,
                         int64_t states, int rows, int absolute, float *R, float *W, float *across) {
    memset(W, 0, states * SINGLE * sizeof(float));
    for (int64_t n = 0; n < states; n++) across[n] = 1;
    for (int t = 0; t < SINGLE; t++) {
        lanes sums[SINGLE / LANES];
        for (int j = 0; j * LANES < t; j++) sums[j] = (lanes){0};
        for (int64_t n = 0; n < states; n++) {
            const float by = a[t * row + n * between], read = r[t * row + n * between];
            for (int j = 0; j * LANES < t; j++) {
                lanes *at = (lanes *)(W + n * SINGLE + j * LANES);
                sums[j] += *at * read;
                *at *= by;
            }
            W[n * SINGLE + t] = w[t * row + n * between];
            R[t * states + n] = read * across[n];
            across[n] *= by;
        }
        if (t < rows)
            for (int j = 0; j * LANES < t; j++)
                *(lanes *)(tile + t * SINGLE + j * LANES) += absolute ? magnitude(sums[j]) : sums[j];
    }
}

static void add_tile(float *out, int64_t stride, const float *tile, int rows, int strict) {
    for (int t = 0; t < rows; t++)
        for (int s = 0; s < (strict ? t : SINGLE); s++) out[t * stride + s] += tile[t * SINGLE + s];
}

/* As `ssm_whole`, of each channel's matrix by itself: of absolute values, or of few channels. */
int ssm_singles(const terms *m, int absolute, float *out, int64_t stride) {
    const int64_t late = m->reach - 1, rows = m->length - late, blocks = (rows + SINGLE - 1) / SINGLE, N = m->states;
    const int64_t columns = columns_of(m, COLUMNS), row = chunk_at(m, 0, columns).row;
    const int64_t each = SINGLE * N, part = 3 * SINGLE * row + columns * each + SINGLE * SINGLE;
    float *corner = out + late * stride;
    float *R = allocate(blocks * columns * each * sizeof(float)), *W = allocate(blocks * columns * each * sizeof(float));
    float *across = allocate(blocks * columns * N * sizeof(float)), *work = allocate(m->threads * part * sizeof(float));
    const int failed = !R || !W || !across || !work;
    if (!failed) {
#pragma omp parallel num_threads(m->threads) if (m->threads > 1)
        {
            unsigned mode = flush_denormals();
            float *a = work + thread_number() * part, *r = a + SINGLE * row, *w = r + SINGLE * row;
            float *held = w + SINGLE * row, *tile = held + columns * each;
            for (int64_t d = 0; d < m->channels; d += columns) {
                const chunk k = chunk_at(m, d, columns);
#pragma omp for schedule(dynamic)
                for (int64_t I = 0; I < blocks; I++) {
                    const int inside = smaller(rows - I * SINGLE, SINGLE);
                    fill(m, k, I * SINGLE, SINGLE, a, r, w, out, stride, absolute);
                    memset(tile, 0, SINGLE * SINGLE * sizeof(float));
                    for (int j = 0; j < k.channels; j++)
                        one_triangle(tile, a + j, r + j, w + j, row, k.vectors * LANES, N, inside, absolute,
                                     R + (I * columns + j) * each, W + (I * columns + j) * each,
                                     across + (I * columns + j) * N);
                    add_tile(corner + I * SINGLE * (stride + 1), stride, tile, inside, 1);
                }
#pragma omp for schedule(dynamic)
                for (int64_t J = 0; J < blocks - 1; J++) {
                    memcpy(held, W + J * columns * each, columns * each * sizeof(float));
                    for (int64_t I = J + 1; I < blocks; I++) {
                        const int inside = smaller(rows - I * SINGLE, SINGLE);
                        memset(tile, 0, SINGLE * SINGLE * sizeof(float));
                        for (int j = 0; j < k.channels; j++) {
                            float *mine = held + j * each;
                            const float *by = across + ((I - 1) * columns + j) * N;
                            for (int64_t n = 0; I > J + 1 && n < N; n++)
                                for (int s = 0; s < SINGLE; s += LANES) *(lanes *)(mine + n * SINGLE + s) *= by[n];
                            add_product(tile, R + (I * columns + j) * each, mine, N, inside, absolute);
                        }
                        add_tile(corner + I * SINGLE * stride + J * SINGLE, stride, tile, inside, 0);
                    }
                }
            }
            restore_denormals(mode);
        }
    }
    free(R);
    free(W);
    free(across);
    free(work);
    return failed;
}

/* ---- one row ---- */

INLINE void row_of(const terms *m, int64_t t, int64_t d, float *out, int expected) {
    const int64_t D = m->channels, N = m->states;
    const int valid = smaller(D - d, LANES);
    lanes delta[CHUNK], sums[CHUNK], v[N]; /* v: c_t times the decays since */
    for (int64_t n = 0; n < N; n++) v[n] = all(m->c[t * N + n]);
    for (int64_t end = t + 1; end > 0; end -= CHUNK) {
        const int64_t begin = end > CHUNK ? end - CHUNK : 0;
        const int count = (int)(end - begin);
        load(delta, m->delta, begin, d, m->length, count, valid, 0);
        for (int s = 0; s < count; s++) sums[s] = all(0);
        for (int64_t n = 0; n < N; n++) {
            const lanes A = load_A(m, d, n, valid);
            lanes now = v[n];
            for (int s = count - 1; s >= 0; s--) {
                sums[s] += now * m->b[(begin + s) * N + n];
                now *= decay(delta[s], A, expected);
            }
            v[n] = now;
        }
        for (int s = 0; s < count; s++) {
            lanes weight = sums[s] * delta[s];
            memcpy(out + (begin + s) * D + d, &weight, valid * sizeof(float));
        }
    }
}

/* Row t of every channel's matrix without left, taps and D, into `out` (length, channels) up to t. */
void ssm_row(const terms *m, int64_t t, float *out) {
#pragma omp parallel for schedule(dynamic) num_threads(m->threads) if (m->threads > 1)
    for (int64_t d = 0; d < m->channels; d += LANES) {
        unsigned mode = flush_denormals();
        if (m->expected)
            row_of(m, t, d, out, 1);
        else
            row_of(m, t, d, out, 0);
        restore_denormals(mode);
    }
}

/* ---- in cells ---- */

/* Of the steps e ... end - 1 of a cell: the decays across it, R and W as `pooled.Cells`, and, when inputs spread,
 * `spilt`, what those of the cell before write here. Adds the sums over the cell's pairs and over those with the cell
 * before that spill to own[0] and own[1]. */
INLINE void cell_with(const terms *m, chunk k, int64_t e, int64_t end, float *a, float *R, float *W, float *spilt,
                      double *own, int expected, int spread) {
    const int64_t N = m->states, L = m->length;
    lanes delta[CHUNK], left[CHUNK], mine[CHUNK], before[CHUNK], tap[CHUNK];
    for (int v = 0; v < k.vectors; v++) {
        const int valid = k.channels - v * LANES;
        const int64_t d = k.first + v * LANES;
        const lanes D = load_D(m, d, valid);
        for (int64_t t = e; t < end; t += CHUNK) {
            const int count = smaller(end - t, CHUNK);
            lanes total = all(0), beside = all(0);
            load(delta, m->delta, t, d, L, count, valid, 0);
            load(left, m->left, t, d, L, count, valid, 1);
            for (int s = 0; s < count; s++) mine[s] = all(m->taps.at ? 0 : 1), before[s] = all(0);
            for (int64_t i = 0; m->taps.at && i < m->reach; i++) {
                load(tap, (view){m->taps.at + i * m->tap, m->taps.step, m->taps.channel}, t - i, d, L, count, valid, 0);
                for (int s = 0; s < count; s++)
                    if (t + s - i >= e)
                        mine[s] += tap[s];
                    else
                        before[s] += tap[s];
            }
            for (int s = 0; m->D && s < count; s++) {
                total += D * left[s] * mine[s];
                beside += D * left[s] * before[s];
            }
            for (int64_t n = 0; n < N; n++) {
                const int64_t at = n * k.vectors * LANES + v * LANES;
                const lanes A = load_A(m, d, n, valid);
                lanes across = all(1), r = all(0), w = all(0), p = all(0);
                if (t > e) {
                    across = *(lanes *)(a + at), r = *(lanes *)(R + at), w = *(lanes *)(W + at);
                    if (spread) p = *(lanes *)(spilt + at);
                }
                for (int s = 0; s < count; s++) {
                    const lanes by = decay(delta[s], A, expected), read = left[s] * m->c[(t + s) * N + n];
                    const lanes write = delta[s] * m->b[(t + s) * N + n];
                    across *= by;
                    r += read * across;
                    w = w * by + write * mine[s];
                    total += read * w;
                    if (spread) {
                        p = p * by + write * before[s];
                        beside += read * p;
                    }
                }
                *(lanes *)(a + at) = across, *(lanes *)(R + at) = r, *(lanes *)(W + at) = w;
                if (spread) *(lanes *)(spilt + at) = p;
            }
            own[0] += sum_of_lanes(total);
            own[1] += sum_of_lanes(beside);
        }
    }
}

static void cell(const terms *m, chunk k, int64_t e, int64_t end, float *a, float *R, float *W, float *spilt,
                 double *own) {
    if (m->expected)
        cell_with(m, k, e, end, a, R, W, spilt, own, 1, 1);
    else if (m->reach > 1)
        cell_with(m, k, e, end, a, R, W, spilt, own, 0, 1);
    else
        cell_with(m, k, e, end, a, R, W, spilt, own, 0, 0);
}

/* What inputs of cell u have written when cell u + 1 ends, in place of W, for the cells of a block; what they write
 * until then is added to `out`. */
static void arrive(float *out, const float *across, const float *R, float *W, const float *spilt, int64_t row,
                   int width, int64_t first, int64_t last, int64_t stride) {
    for (int64_t u = first; u < last; u++) {
        lanes sum = all(0);
        for (int k = 0; k < width; k += LANES) {
            lanes *w = (lanes *)(W + u * row + k);
            sum += *w * *(const lanes *)(R + (u + 1) * row + k);
            *w = *w * *(const lanes *)(across + (u + 1) * row + k) + *(const lanes *)(spilt + (u + 1) * row + k);
        }
        out[(u + 1) * stride + u] += sum_of_lanes(sum);
    }
}

/* Adds the sums over the pairs of cells and over channels to `out` (cells, cells); cell i is
 * edges[i] ... edges[i + 1] - 1, and no shorter than the reach. Gives 1 when there is no memory. */
int ssm_pooled(const terms *m, const int64_t *edges, int64_t cells, float *out) {
    /* With inputs that spread, the first row of the triangle is the second cell. */
    const int64_t late = m->reach > 1, rows = cells - late, blocks = (rows + BLOCK - 1) / BLOCK;
    const int64_t columns = columns_of(m, COLUMNS), row = chunk_at(m, 0, columns).row;
    const int64_t all_rows = blocks * BLOCK + 1 + late;
    float *corner = out + late * cells, *factors[4] = {NULL, NULL, NULL, NULL};
    double *sums = allocate(2 * cells * sizeof(double));
    float *across = allocate((blocks + 1) * row * sizeof(float));
    int failed = !sums || !across;
    for (int i = 0; i < 4; i++) failed |= !(factors[i] = allocate(all_rows * row * sizeof(float)));
    if (!failed) {
        float *a = factors[0], *R = factors[1], *W = factors[2], *spilt = factors[3];
        memset(sums, 0, 2 * cells * sizeof(double));
#pragma omp parallel num_threads(m->threads) if (m->threads > 1)
        {
            unsigned mode = flush_denormals();
            for (int64_t d = 0; d < m->channels; d += columns) {
                const chunk k = chunk_at(m, d, columns);
#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < all_rows; i++) {
                    const int64_t at = i * row;
                    if (i < cells) {
                        cell(m, k, edges[i], edges[i + 1], a + at, R + at, W + at, spilt + at, sums + 2 * i);
                        continue;
                    }
                    for (int j = 0; j < k.width; j++) a[at + j] = 1, R[at + j] = W[at + j] = spilt[at + j] = 0;
                }
#pragma omp for schedule(dynamic)
                for (int64_t I = 0; I < blocks; I++) {
                    const int64_t last = smaller(rows - I * BLOCK, BLOCK) + I * BLOCK;
                    if (late) arrive(out, a, R, W, spilt, row, k.width, I * BLOCK, last, cells);
                }
#pragma omp for schedule(dynamic)
                for (int64_t I = 0; I < blocks; I++) {
                    const int64_t at = (I * BLOCK + late) * row;
                    const int inside = smaller(rows - I * BLOCK, BLOCK);
                    triangle(corner + I * BLOCK * (cells + 1), cells, a + at, R + at, W + I * BLOCK * row, row, k.width,
                             inside);
                    memcpy(across + I * row, a + at, k.width * sizeof(float));
                }
#pragma omp for schedule(dynamic)
                for (int64_t J = 0; J < blocks - 1; J++)
                    below(corner, cells, across, R + late * row, W, row, k.width, J, rows);
            }
            restore_denormals(mode);
        }
        for (int64_t i = 0; i < cells; i++) {
            out[i * (cells + 1)] += (float)sums[2 * i];
            if (i) out[i * (cells + 1) - 1] += (float)sums[2 * i + 1];
        }
    }
    for (int i = 0; i < 4; i++) free(factors[i]);
    free(sums);
    free(across);
    return failed;
}
