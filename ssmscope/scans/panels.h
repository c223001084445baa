/* Matrices of float32 in panels of 2 * LANES columns, the rows of a panel one after the other, and their products, which
 * hold some rows of a panel in registers. */

#include "vectors.h"

enum {
    WIDE = 2 * LANES,
    ROWS = 6 /* of a product, held in registers with two vectors each */
};

#define FRESH -1.0f /* nothing of what stood there is kept */

typedef struct {
    lanes of[2];
} pair;

INLINE lanes vector(const float *at) {
    lanes v;
    memcpy(&v, at, sizeof(v));
    return v;
}

/* A matrix of scalars, a[r, k] at `at + r * row + k * step`, row or step being 1, in `blocks` of K columns that stand
 * `jump` apart. */
typedef struct {
    const float *at;
    int64_t row, step, K, blocks, jump;
} scalars;

static scalars matrix(const float *at, int64_t row, int64_t step, int64_t K) {
    return (scalars){at, row, step, K, 1, 0};
}

INLINE void add_row(lanes (*sum)[2], const float *a, int64_t row, const pair *x, const int first, const int last) {
    lanes x0 = x->of[0], x1 = x->of[1];
#pragma GCC unroll 6
    for (int r = first; r < last; r++) {
        lanes factor = all(a[r * row]);
        sum[r][0] += factor * x0;
        sum[r][1] += factor * x1;
    }
}

INLINE void product_rows(pair *restrict out, float kept, const float *each, scalars a, const pair *restrict X,
                         int64_t start, const int count, const int triangle) {
    lanes sum[ROWS][2];
    int64_t first = triangle < 0 ? start + count : 0, last = triangle > 0 ? start : a.K;
    for (int r = 0; r < count; r++)
        for (int w = 0; w < 2; w++) sum[r][w] = each ? out[r].of[w] * each[r] : kept < 0 ? (lanes){0} : out[r].of[w] * kept;
#pragma GCC unroll 6
    for (int i = 0; triangle && i < count; i++)
        add_row(sum, a.at + (start + i) * a.step, a.row, X + start + i, triangle > 0 ? i : 0, triangle > 0 ? count : i + 1);
    for (int64_t block = 0; block < a.blocks; block++, a.at += a.jump, X += a.K)
        for (int64_t k = first; k < last; k++)
            if (a.row == 1)
                add_row(sum, a.at + k * a.step, 1, X + k, 0, count);
            else
                add_row(sum, a.at + k, a.row, X + k, 0, count);
    for (int r = 0; r < count; r++)
        for (int w = 0; w < 2; w++) out[r].of[w] = sum[r][w];
}

INLINE void product_of(pair *out, float kept, const float *each, scalars a, const pair *X, int64_t first, int64_t last,
                       const int triangle) {
    int count;
    for (int64_t r = first; r < last; r += count) {
        scalars part = a;
        const float *own = each ? each + r : NULL;
        part.at += r * a.row;
        count = smaller(last - r, last - r == ROWS + 2 ? ROWS - 2 : ROWS); /* two rows would wait for their own sums */
        switch (count) {
            case 6: product_rows(out + r, kept, own, part, X, r, 6, triangle); break;
            case 5: product_rows(out + r, kept, own, part, X, r, 5, triangle); break;
            case 4: product_rows(out + r, kept, own, part, X, r, 4, triangle); break;
            case 3: product_rows(out + r, kept, own, part, X, r, 3, triangle); break;
            case 2: product_rows(out + r, kept, own, part, X, r, 2, triangle); break;
            default: product_rows(out + r, kept, own, part, X, r, 1, triangle);
        }
    }
}

/* One panel of out = kept * out + a X (FRESH: a X alone), rows first to last. Of a square a only what stands on and
 * below the diagonal where `triangle` is 1, on and above it where it is -1: what a 0 would meet may not be finite. */
static void product(pair *out, float kept, scalars a, const pair *X, int64_t first, int64_t last, int triangle) {
    if (triangle > 0)
        product_of(out, kept, NULL, a, X, first, last, 1);
    else if (triangle < 0)
        product_of(out, kept, NULL, a, X, first, last, -1);
    else
        product_of(out, kept, NULL, a, X, first, last, 0);
}

/* One panel of out = each row of out times its own factor + a X, of a triangle as in `product`. */
static __attribute__((unused)) void add_product(pair *out, const float *each, scalars a, const pair *X, int64_t rows, int triangle) {
    if (triangle > 0)
        product_of(out, 0, each, a, X, 0, rows, 1);
    else
        product_of(out, 0, each, a, X, 0, rows, -1);
}

static int64_t panels_of(int64_t columns) { return (columns + WIDE - 1) / WIDE; }

/* Row r of a matrix in panels of `rows` rows: its columns from `column` on. */
INLINE float *columns(pair *m, int64_t rows, int64_t r, int64_t column) {
    return (float *)&m[column / WIDE * rows + r];
}

/* The first numbers of a row of a panel; a size known beforehand needs no loop. */
INLINE void copy(void *to, const void *at, int count) {
    if (count == WIDE)
        for (int w = 0; w < 2; w++) memcpy((float *)to + w * LANES, (const float *)at + w * LANES, sizeof(lanes));
    else
        for (int i = 0; i < count; i++) ((float *)to)[i] = ((const float *)at)[i];
}

/* Rows of numbers, `row` apart and each times its factor (NULL: 1), into panels of `rows` rows. */
static void pack(pair *to, const float *at, int64_t row, const float *factor, int64_t rows, int64_t count) {
    for (int64_t j = 0; j * WIDE < count; j++, to += rows) {
        int valid = smaller(count - j * WIDE, WIDE);
        for (int64_t r = 0; r < rows; r++) {
            const lanes scale = all(factor ? factor[r] : 1);
            const float *in = at + r * row + j * WIDE;
            if (valid == WIDE) {
                for (int w = 0; w < 2; w++) to[r].of[w] = vector(in + w * LANES) * scale;
                continue;
            }
            memset(&to[r], 0, sizeof(pair));
            copy(&to[r], in, valid);
            for (int w = 0; w < 2; w++) to[r].of[w] *= scale;
        }
    }
}

/* The transpose of such rows: `count` rows of the panels, `steps` columns, and zeros up to a panel's end. */
static void pack_transposed(pair *to, const float *at, int64_t row, const float *factor, int64_t steps, int64_t count) {
    const int64_t whole = count - count % LANES;
    for (int64_t s = 0; s < panels_of(steps) * WIDE; s += LANES) {
        const int64_t w = s % WIDE / LANES;
        const int valid = s < steps ? smaller(steps - s, LANES) : 0;
        pair *panel = to + s / WIDE * count;
        lanes v[LANES] = {{0}};
        for (int64_t r = 0; r < whole; r += LANES) {
            for (int i = 0; i < valid; i++) v[i] = vector(at + (s + i) * row + r) * (factor ? factor[s + i] : 1);
            for (int i = valid; i < LANES; i++) v[i] = (lanes){0};
            transpose(v);
            for (int i = 0; i < LANES; i++) panel[r + i].of[w] = v[i];
        }
        for (int64_t r = whole; r < count; r++) {
            panel[r].of[w] = (lanes){0};
            for (int i = 0; i < valid; i++) panel[r].of[w][i] = at[(s + i) * row + r] * (factor ? factor[s + i] : 1);
        }
    }
}
