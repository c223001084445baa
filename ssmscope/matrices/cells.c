/* Attention matrices in cells of a head with one decay, a gate and a convolution around it, in float32: what `pooled`
 * makes of the pairs that need its channels.
 *
 * Of a cell of steps, with begun_t and ending_s the products of its decays up to t and after s: R = sum_t begun_t c_t
 * left_t', W = sum_s ending_s b_s mine_s', and, of what inputs of the cell before write here, `before_s` in place of
 * mine_s; and the sums over its own pairs of D[t, s] (c_t b_s) (left_t mine_s). A task is a cell and
 * some heads, whose numbers stand side by side in memory. */

#include "panels.h"

enum { AHEAD = 8 }; /* steps before it is read that a row is asked for */

typedef struct {
    int64_t cells, heads, states, width, reach, longest;
    int threads;
} shape;

/* (length, width) of one head, or (length, reach, width), the last contiguous; strides in numbers, `head` to the next. */
typedef struct {
    const float *at;
    int64_t step, tap, head;
} view;

typedef struct {
    const shape *s;
    const int64_t *edge;
    const float *a, *step, *scores, *D; /* of each step; (cells, longest, longest); of each channel, or NULL */
    view b, c, left, taps;
    pair *R, *W, *arrived; /* (cells, panels, states) */
    float *across, *own, *beside; /* of each cell */
} terms;

static int64_t late_of(const shape *s, int q) { return smaller(s->reach - 1, q); }

/* What inputs write at step o of a cell: those of the cell itself, or those of the cell before. Gives what D lets past
 * the recurrence of them. */
static float write_row(float *to, const terms *f, int64_t first, int64_t o, int inside) {
    const shape *s = f->s;
    const float step = f->step ? f->step[first + o] : 1;
    for (int64_t p = 0; p < s->width; p++) to[p] = 0;
    for (int64_t i = inside ? 0 : o + 1; i < s->reach && (!inside || i <= o) && i <= first + o; i++) {
        const float *in = f->taps.at + (first + o - i) * f->taps.step + i * f->taps.tap;
        for (int64_t p = 0; p < s->width; p++) to[p] += in[p];
    }
    const float *left = f->left.at + (first + o) * f->left.step;
    float past = 0;
    lanes sums = {0};
    for (int64_t p = 0; f->D && p < s->width; p += LANES) {
        if (p + LANES <= s->width)
            sums += vector(left + p) * vector(f->D + p) * vector(to + p);
        else
            for (int64_t i = p; i < s->width; i++) past += left[i] * f->D[i] * to[i];
    }
    past += sum_of_lanes(sums);
    for (int64_t p = 0; p < s->width; p++) to[p] *= step;
    return past;
}

/* Ask for what step t will read: rows of one head stand pages apart, where no processor looks ahead. */
static void fetch(const terms *f, int64_t t) {
    for (int64_t p = 0; p < f->s->width; p += 16) {
        __builtin_prefetch(f->left.at + t * f->left.step + p);
        for (int64_t i = 0; i < f->s->reach; i++) __builtin_prefetch(f->taps.at + (t - i) * f->taps.step + i * f->taps.tap + p);
    }
}

/* Numbers from a row of b or c to the next where it is copied: no power of two, as columns are walked. */
static int64_t padded(const shape *s) { return s->states + 16; }

/* The sum of `count` rows of b or c, each times its row of `packed`: (panels, states). */
static void gather(pair *to, view rows, int64_t first, int64_t count, const pair *packed, const shape *s, float *bc) {
    for (int64_t r = 0; r < count; r++)
        memcpy(bc + r * padded(s), rows.at + (first + r) * rows.step, s->states * sizeof(float));
    for (int64_t j = 0; j * WIDE < s->width; j++)
        product(to + j * s->states, FRESH, matrix(bc, 1, padded(s), count), packed + j * count, 0, s->states, 0);
}

/* The sum over t >= s, s < count, of D[t, s] (c_t b_s) (left_t written_s). */
static float pairs(const terms *f, int64_t e, int64_t first, int q, const float *D, const float *written, int64_t count,
                   pair *transposed, pair *rows) {
    const shape *s = f->s;
    const int64_t longest = s->longest;
    const float *scores = f->scores + e * longest * longest;
    float sum = 0;
    pack_transposed(transposed, written, s->width, NULL, count, s->width);
    for (int64_t j = 0; j * WIDE < count; j++) {
        const int valid = smaller(count - j * WIDE, WIDE);
        product(rows, FRESH, matrix(f->left.at + first * f->left.step, f->left.step, 1, s->width),
                transposed + j * s->width, j * WIDE, q, 0);
        for (int64_t t = j * WIDE; t < q; t++) {
            const float *d = D + t * longest + j * WIDE, *of = scores + t * longest + j * WIDE, *lm = (float *)&rows[t];
            float part = 0;
            if (valid == WIDE) {
                lanes both = {0};
                for (int w = 0; w < 2; w++) both += vector(d + w * LANES) * vector(of + w * LANES) * rows[t].of[w];
                part = sum_of_lanes(both);
            } else {
                for (int i = 0; i < valid; i++) part += d[i] * of[i] * lm[i];
            }
            sum += part;
        }
    }
    return sum;
}

static int64_t work_size(const shape *s) { /* in numbers: D, rows of b or c, written, begun, ending; then panels */
    return s->longest * (s->longest + padded(s) + 2 * s->width + 2) + WIDE +
           WIDE * (panels_of(s->width) * s->longest + panels_of(s->longest) * s->width + s->longest);
}

static void cell(const terms *f, int64_t e, float *work) {
    const shape *s = f->s;
    const int64_t N = s->states, P = s->width, longest = s->longest, first = f->edge[e], size = panels_of(P) * N;
    const int q = (int)(f->edge[e + 1] - first), late = late_of(s, q);
    const float *a = f->a + first;
    pair *rows = (pair *)work, *packed = rows + longest, *transposed = packed + panels_of(P) * longest;
    float *D = (float *)(transposed + panels_of(longest) * P), *bc = D + longest * longest, *mine = bc + longest * padded(s);
    float *before = mine + longest * P, *begun = before + longest * P, *ending = begun + longest;
    float own = 0, beside = 0;
    for (int64_t t = 0; t < q; t++) {
        float *row = D + t * longest;
        for (int64_t r = 0; r < t; r++) row[r] = row[r - longest] * a[t];
        for (int64_t r = t + 1; r < longest; r++) row[r] = 0;
        row[t] = 1;
        begun[t] = t ? begun[t - 1] * a[t] : a[0];
        fetch(f, first + t + AHEAD);
        own += write_row(mine + t * P, f, first, t, 1);
        if (t < late) beside += write_row(before + t * P, f, first, t, 0);
    }
    f->across[e] = begun[q - 1];
    memcpy(ending, D + (q - 1) * longest, q * sizeof(float));
    pack(packed, f->left.at + first * f->left.step, f->left.step, begun, q, P);
    gather(f->R + e * size, f->c, first, q, packed, s, bc);
    pack(packed, mine, P, ending, q, P);
    gather(f->W + e * size, f->b, first, q, packed, s, bc);
    pack(packed, before, P, ending, late, P);
    gather(f->arrived + e * size, f->b, first, late, packed, s, bc);
    f->own[e] = own + pairs(f, e, first, q, D, mine, q, transposed, rows);
    f->beside[e] = beside + pairs(f, e, first, q, D, before, late, transposed, rows);
}

static terms of_head(const terms *f, int64_t h) {
    const shape *s = f->s;
    const int64_t length = f->edge[s->cells], size = s->cells * panels_of(s->width) * s->states;
    terms one = *f;
    one.a += h * length;
    if (one.step) one.step += h * length;
    if (one.D) one.D += h * s->width;
    one.left.at += h * one.left.head, one.taps.at += h * one.taps.head;
    one.R += h * size, one.W += h * size, one.arrived += h * size;
    one.across += h * s->cells, one.own += h * s->cells, one.beside += h * s->cells;
    return one;
}

/* Of each head, R, W and `arrived` (cells, panels * states * 2 * LANES numbers): what of the cell before and of its inputs
 * that spill stands at a cell's end; `own` the sums over a cell's pairs, `beside` those over its pairs with the cell
 * before, both with what D (heads, width; or NULL) lets past the recurrence; `across` the product of each cell's decays.
 * a and step (or NULL) are (heads, length). Gives 0, or 1 when there is no memory for the work. */
int ssm_cells(const shape *s, const int64_t *edge, const float *a, const float *step, view b, view c, view left, view taps,
              const float *scores, const float *D, float *across, float *R, float *W, float *arrived, float *own, float *beside) {
    const terms all_heads = {s,    edge, a, step, scores, D, b, c, left, taps, (pair *)R, (pair *)W, (pair *)arrived,
                             across, own, beside};
    const int64_t size = panels_of(s->width) * s->states, each = (work_size(s) + 15) / 16 * 16;
    float *work = allocate(each * s->threads * (int64_t)sizeof(float));
    if (!work) return 1;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        unsigned mode = flush_denormals();
#pragma omp for schedule(static)
        for (int64_t e = 0; e < s->cells; e++)
            for (int64_t h = 0; h < s->heads; h++) {
                const terms f = of_head(&all_heads, h);
                cell(&f, e, work + thread_number() * each);
            }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s->cells * s->heads; task++) {
            const terms f = of_head(&all_heads, task / s->cells);
            const int64_t e = task % s->cells;
            if (!e) continue;
            const pair *before = f.W + (e - 1) * size, *read = f.R + e * size;
            pair *to = f.arrived + e * size;
            lanes sum = {0}, kept = all(f.across[e]);
            for (int64_t i = 0; i < size; i++)
                for (int w = 0; w < 2; w++) {
                    sum += read[i].of[w] * before[i].of[w];
                    to[i].of[w] += kept * before[i].of[w];
                }
            f.beside[e] += sum_of_lanes(sum);
        }
        restore_denormals(mode);
    }
    free(work);
    return 0;
}

/* Numbers of R, W and `arrived` of one cell. */
int64_t ssm_cell_size(const shape *s) { return panels_of(s->width) * s->states * WIDE; }
