/* Attention matrices in cells of a head with one decay, a gate and a convolution around it, in float32: what `pooled`
 * makes of the pairs that need its channels.
 *
 * Of a cell of steps, with begun_t and ending_s the products of its decays up to t and after s: R = sum_t begun_t c_t
 * left_t', W = sum_s ending_s b_s mine_s', and, of what inputs of the cell before write here, `before_s` in place of
 * mine_s; and the sums over its own pairs of D[t, s] (c_t b_s) (left_t mine_s). A task is a run of cells with
 * some heads, whose numbers stand side by side in memory and are read together. */

#include "panels.h"

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
    pair *R, *arrived;            /* (heads, cells, panels, states) */
    float *across, *own, *beside; /* of each cell */
} terms;

/* What a thread works in: of a cell b and c in rows of `padded` states, and of each head what is `left`, written by inputs
 * of the cell (`mine`) and of the cell before, (steps, width), and W of this cell and of the last one. Then of one head. */
typedef struct {
    float *b, *c, *left, *mine, *before, *past, *spilt, *D, *begun, *ending, *reads;
    pair *W, *packed, *transposed, *rows;
} cell_work;

static int64_t late_of(const shape *s, int q) { return smaller(s->reach - 1, q); }
/* Numbers from a row of b or c to the next where it is copied: no power of two, as columns are walked. */
static int64_t padded(const shape *s) { return s->states + 16; }
static int64_t size_of(const shape *s) { return panels_of(s->width) * s->states; }

/* The places of a thread's work from `at` on, where that is not NULL; gives how many numbers they are. */
static int64_t lay_out(cell_work *w, const shape *s, float *at) {
    const int64_t rows = s->longest * s->width, copied = s->longest * padded(s), panels = panels_of(s->width) * s->longest;
    const struct {
        void *place;
        int64_t size;
    } parts[] = {{&w->W, 2 * s->heads * size_of(s) * WIDE},
                 {&w->packed, panels * WIDE},
                 {&w->transposed, panels_of(s->longest) * s->width * WIDE},
                 {&w->rows, s->longest * WIDE},
                 {&w->b, copied},
                 {&w->c, copied},
                 {&w->left, s->heads * rows},
                 {&w->mine, s->heads * rows},
                 {&w->before, s->heads * (s->reach - 1) * s->width},
                 {&w->past, s->heads},
                 {&w->spilt, s->heads},
                 {&w->D, s->longest * s->longest + WIDE},
                 {&w->begun, s->longest},
                 {&w->ending, s->longest},
                 {&w->reads, s->width}};
    int64_t size = 0;
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        float *here = at ? at + size : NULL;
        memcpy(parts[i].place, &here, sizeof(here));
        size += (parts[i].size + 15) / 16 * 16;
    }
    return size;
}

/* What inputs write at step o of a cell: those of the cell itself, or those of the cell before. Gives what D lets past
 * the recurrence of them. */
static float write_row(float *to, const terms *f, const float *left, int64_t h, int64_t first, int64_t o, int inside) {
    const shape *s = f->s;
    const float step = f->step ? f->step[h * f->edge[s->cells] + first + o] : 1, *D = f->D ? f->D + h * s->width : NULL;
    for (int64_t p = 0; p < s->width; p++) to[p] = 0;
    for (int64_t i = inside ? 0 : o + 1; i < s->reach && (!inside || i <= o) && i <= first + o; i++) {
        const float *in = f->taps.at + h * f->taps.head + (first + o - i) * f->taps.step + i * f->taps.tap;
        for (int64_t p = 0; p < s->width; p++) to[p] += in[p];
    }
    float past = 0;
    lanes sums = {0};
    for (int64_t p = 0; D && p < s->width; p += LANES) {
        if (p + LANES <= s->width)
            sums += vector(left + p) * vector(D + p) * vector(to + p);
        else
            for (int64_t i = p; i < s->width; i++) past += left[i] * D[i] * to[i];
    }
    past += sum_of_lanes(sums);
    for (int64_t p = 0; p < s->width; p++) to[p] *= step;
    return past;
}

/* Reads a cell's rows of all heads, each once. */
static void read_cell(const terms *f, int64_t e, cell_work *w) {
    const shape *s = f->s;
    const int64_t P = s->width, first = f->edge[e], rows = s->longest * P;
    const int q = (int)(f->edge[e + 1] - first), late = (int)late_of(s, q);
    for (int64_t h = 0; h < s->heads; h++) w->past[h] = w->spilt[h] = 0;
    for (int64_t t = 0; t < q; t++) {
        memcpy(w->b + t * padded(s), f->b.at + (first + t) * f->b.step, s->states * sizeof(float));
        memcpy(w->c + t * padded(s), f->c.at + (first + t) * f->c.step, s->states * sizeof(float));
        for (int64_t h = 0; h < s->heads; h++) {
            const int64_t at = h * rows + t * P;
            memcpy(w->left + at, f->left.at + h * f->left.head + (first + t) * f->left.step, P * sizeof(float));
            w->past[h] += write_row(w->mine + at, f, w->left + at, h, first, t, 1);
            if (t < late)
                w->spilt[h] += write_row(w->before + (h * (s->reach - 1) + t) * P, f, w->left + at, h, first, t, 0);
        }
    }
}

/* The sum of `count` rows of b or c, each times its row of `columns` and its factor: (panels, states). */
static void gather(pair *to, const float *bc, int64_t count, const float *columns, const float *factor, const shape *s,
                   pair *packed) {
    pack(packed, columns, s->width, factor, count, s->width);
    for (int64_t j = 0; j * WIDE < s->width; j++)
        product(to + j * s->states, FRESH, matrix(bc, 1, padded(s), count), packed + j * count, 0, s->states, 0);
}

/* The sum over t >= s of D[t, s] (c_t b_s) (left_t mine_s). */
static float pairs(const shape *s, const float *scores, const float *left, const float *mine, int q, cell_work *w) {
    const int64_t longest = s->longest;
    float sum = 0;
    pack_transposed(w->transposed, mine, s->width, NULL, q, s->width);
    for (int64_t j = 0; j * WIDE < q; j++) {
        const int valid = smaller(q - j * WIDE, WIDE);
        product(w->rows, FRESH, matrix(left, s->width, 1, s->width), w->transposed + j * s->width, j * WIDE, q, 0);
        for (int64_t t = j * WIDE; t < q; t++) {
            const float *d = w->D + t * longest + j * WIDE, *of = scores + t * longest + j * WIDE, *lm = (float *)&w->rows[t];
            float part = 0;
            if (valid == WIDE) {
                lanes both = {0};
                for (int i = 0; i < 2; i++) both += vector(d + i * LANES) * vector(of + i * LANES) * w->rows[t].of[i];
                part = sum_of_lanes(both);
            } else {
                for (int i = 0; i < valid; i++) part += d[i] * of[i] * lm[i];
            }
            sum += part;
        }
    }
    return sum;
}

/* The same of the few steps that inputs of the cell before write at, `before` in place of mine. */
static float spilt_pairs(const shape *s, const float *scores, const float *left, const float *before, int q, cell_work *w) {
    const int64_t P = s->width, late = late_of(s, q);
    float sum = 0;
    for (int64_t o = 0; o < late; o++) {
        for (int64_t p = 0; p < P; p++) w->reads[p] = 0;
        for (int64_t t = o; t < q; t++) {
            const float weight = w->D[t * s->longest + o] * scores[t * s->longest + o];
            for (int64_t p = 0; p < P; p++) w->reads[p] += weight * left[t * P + p];
        }
        for (int64_t p = 0; p < P; p++) sum += w->reads[p] * before[o * P + p];
    }
    return sum;
}

/* Decays between a cell's steps, up to them and from them to its end. */
static void decay_within_cell(const float *a, int q, int64_t longest, cell_work *w) {
    for (int64_t t = 0; t < q; t++) {
        float *restrict row = w->D + t * longest;
        const float *restrict last = row - longest;
        for (int64_t r = 0; r < t; r++) row[r] = last[r] * a[t];
        memset(row + t, 0, (longest - t) * sizeof(float));
        row[t] = 1;
        w->begun[t] = t ? w->begun[t - 1] * a[t] : a[0];
    }
    memcpy(w->ending, w->D + (q - 1) * longest, q * sizeof(float));
}

/* One head of a cell that was read. `known`: W of the cell before is; else W of this one is all that is asked for. */
static void cell(const terms *f, int64_t e, int64_t h, cell_work *w, int known) {
    const shape *s = f->s;
    const int64_t length = f->edge[s->cells], first = f->edge[e], size = size_of(s), at = h * s->cells + e;
    const int q = (int)(f->edge[e + 1] - first);
    const float *left = w->left + h * s->longest * s->width, *mine = w->mine + h * s->longest * s->width;
    const float *before = w->before + h * (s->reach - 1) * s->width, *scores = f->scores + e * s->longest * s->longest;
    pair *W = w->W + (e % 2 * s->heads + h) * size, *R = f->R + at * size, *arrived = f->arrived + at * size;
    const pair *last = w->W + ((e + 1) % 2 * s->heads + h) * size;
    decay_within_cell(f->a + h * length + first, q, s->longest, w);
    gather(W, w->b, q, mine, w->ending, s, w->packed);
    if (!known) return;
    gather(R, w->c, q, left, w->begun, s, w->packed);
    gather(arrived, w->b, late_of(s, q), before, w->ending, s, w->packed);
    f->across[at] = w->begun[q - 1];
    f->own[at] = w->past[h] + pairs(s, scores, left, mine, q, w);
    f->beside[at] = w->spilt[h] + spilt_pairs(s, scores, left, before, q, w);
    if (!e) return;
    const lanes kept = all(f->across[at]);
    lanes sum = {0};
    for (int64_t i = 0; i < size; i++)
        for (int j = 0; j < 2; j++) {
            sum += R[i].of[j] * last[i].of[j];
            arrived[i].of[j] += kept * last[i].of[j];
        }
    f->beside[at] += sum_of_lanes(sum);
}

/* Of each head, R and `arrived` (heads, cells, panels * states * 2 * LANES numbers): what stands at a cell's end of the cell
 * before and of its inputs that spill; `own` the sums over a cell's pairs, `beside` those over its pairs with the cell
 * before, both with what D (heads, width; or NULL) lets past the recurrence; `across` the product of each cell's decays.
 * a and step (or NULL) are (heads, length). A thread begins with the cell before its first one, for that one's W.
 * Gives 0, or 1 when there is no memory for the work. */
int ssm_cells(const shape *s, const int64_t *edge, const float *a, const float *step, view b, view c, view left, view taps,
              const float *scores, const float *D, float *across, float *R, float *arrived, float *own, float *beside) {
    const terms f = {s, edge, a, step, scores, D, b, c, left, taps, (pair *)R, (pair *)arrived, across, own, beside};
    cell_work none;
    const int64_t each = lay_out(&none, s, NULL), threads = s->threads;
    float *work = allocate(each * threads * (int64_t)sizeof(float));
    if (!work) return 1;
#pragma omp parallel for num_threads(s->threads) if (threads > 1) schedule(static)
    for (int64_t part = 0; part < threads; part++) {
        cell_work w;
        const int64_t first = s->cells * part / threads, last = s->cells * (part + 1) / threads;
        const unsigned mode = flush_denormals();
        lay_out(&w, s, work + each * part);
        for (int64_t e = first && first < last ? first - 1 : first; e < last; e++) {
            read_cell(&f, e, &w);
            for (int64_t h = 0; h < s->heads; h++) cell(&f, e, h, &w, e >= first);
        }
        restore_denormals(mode);
    }
    free(work);
    return 0;
}

/* Numbers of R and `arrived` of one cell. */
int64_t ssm_cell_size(const shape *s) { return size_of(s) * WIDE; }
