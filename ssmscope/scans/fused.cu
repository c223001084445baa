// The scan with a decay per state and its gradient, float32: H_t = a_t H_{t-1} + Δ_t x_t b_t, y_t = Σ_n c_t H_t, to
// which the forward pass adds D x_t where there is a D.
//
// A warp owns CW neighbouring channels of one sequence, a lane CD of them by SN of their states: CD · SN recurrences
// side by side in registers. Lanes that share channels (LN of them) add up what is summed over states, lanes that share
// states what is summed over channels. A block walks one chunk of the length, tile by tile; the next tile is copied to
// shared memory meanwhile. With several chunks `run_ends` first runs each from zero, and every block takes its start
// from those before it (behind it, for the adjoint). The order of every sum is fixed.
//
// Short scans wait for the host, so theirs is one launch (JOINED): blocks take their places one after the other, each
// tells when its chunk's end is known and waits for those of blocks that took theirs before, which run already; who is
// last adds up. `marks` count all this; they are 0 before a launch and after it.
//
// Compiled for one kernel at a time (ENTRY), with CD, SN, LN (powers of two), WARPS, EXPECTED and BLOCKS
// (that a processor must have room for), behind fused_terms.cu.

template <bool REVERSE> __device__ __forceinline__ void find_ends(const Terms &T, const Place &p) {
    if (p.chunk == (REVERSE ? 0 : T.chunks - 1)) return;  // behind it there is nothing
    Slots A, H, P;
    float elapsed[CD];
#pragma unroll
    for (int r = 0; r < CD; r++) {
        elapsed[r] = 0.0f;
#pragma unroll
        for (int q = 0; q < SN; q++) H[r][q] = 0.0f, P[r][q] = 1.0f;
    }
    const int count = p.end - p.begin;
    auto issue = [&](int k) {
        if (k < count) {
            int tile = REVERSE ? p.end - 1 - k : p.begin + k;
            float *to = memory + (k % 2) * STAGE_ENDS;
            copy_view(to, REVERSE ? T.ybar : T.x, T, p, tile);
            copy_view(to + TILE * ROW, T.delta, T, p, tile);
            copy_common(to + 2 * TILE * ROW, REVERSE ? T.c : T.b, T, p, tile);
        }
        copies_issued();
    };
    issue(0);
    load_A(A, T, p);
    for (int k = 0; k < count; k++) {
        issue(k + 1);
        copies_done_but_last();
        __syncthreads();
        const float *xs = memory + (k % 2) * STAGE_ENDS, *ds = xs + TILE * ROW, *bs = ds + TILE * ROW;
#pragma unroll 4
        for (int i = 0; i < TILE; i++) {
            const int t = REVERSE ? TILE - 1 - i : i;
            float b[SN];
#pragma unroll
            for (int q = 0; q < SN; q++) b[q] = bs[t * NP + state(p, q)];
#pragma unroll
            for (int r = 0; r < CD; r++) {
                float delta = ds[t * ROW + channel(p, r)], x = xs[t * ROW + channel(p, r)];
                if (!REVERSE) x *= delta;
                elapsed[r] += delta;
#pragma unroll
                for (int q = 0; q < SN; q++) {
                    float a = decay(delta, A[r][q]);
                    if (REVERSE)
                        H[r][q] = a * (x * b[q] + H[r][q]);
                    else
                        H[r][q] = a * H[r][q] + x * b[q];
                    if (EXPECTED) P[r][q] *= a;
                }
            }
        }
        __syncthreads();
    }
    if (!EXPECTED)
        FOR_SLOTS P[r][q] = decay(elapsed[r], A[r][q]);
    store_slots(H, T.ends + padded(T, p, p.chunk), NP, p);
    store_slots(P, T.ends + T.decays + padded(T, p, p.chunk), NP, p);
}
template <bool REVERSE> __device__ __forceinline__ void run_ends(const Terms &T) {
    find_ends<REVERSE>(T, place<false>(T, blockIdx.x));
}

// The next place, whose chunk can start: the ends of those before it (behind it) are known.
template <bool REVERSE> __device__ __forceinline__ Place start_joined(const Terms &T) {
    const Place p = place<REVERSE>(T, told(threadIdx.x ? 0 : atomicAdd(T.marks, 1)));
    if (T.chunks == 1) return p;
    const Marks m = marks_of(T, p);
    find_ends<REVERSE>(T, p);
    __syncthreads();
    if (threadIdx.x == 0) count_on(m.known);
    const int others = REVERSE ? T.chunks - 1 - p.chunk : p.chunk;
    for (int k = threadIdx.x; k < others; k += THREADS) wait_for(m.known + (REVERSE ? k + 1 : -k - 1) * m.step);
    __threadfence();
    __syncthreads();
    return p;
}

// WHAT: 1 to keep the states before each tile, plus 2 to sum the decays, plus 4 in one launch.
template <int WHAT> __device__ __forceinline__ void run_forward(const Terms &T) {
    constexpr bool KEPT = WHAT & 1, RETAINED = WHAT & 2, JOINED = WHAT & 4;
    const Place p = JOINED ? start_joined<false>(T) : place<false>(T, blockIdx.x);
    Slots A, H;
    float counted[CD], D[CD], counted_states[SN];  // 0 for what is not there
#pragma unroll
    for (int r = 0; r < CD; r++) counted[r] = channel(p, r) < p.left ? 1.0f : 0.0f;
#pragma unroll
    for (int r = 0; r < CD; r++) D[r] = T.D && counted[r] != 0.0f ? T.D[p.first + channel(p, r)] : 0.0f;
#pragma unroll
    for (int q = 0; q < SN; q++) counted_states[q] = state(p, q) < T.states ? 1.0f : 0.0f;
    float *decays = memory + 2 * STAGE_FORWARD + p.warp * TILE * SPREAD;
    auto issue = [&](int tile) {
        if (tile < p.end) {
            float *to = memory + (tile % 2) * STAGE_FORWARD;
            copy_view(to, T.x, T, p, tile);
            copy_view(to + TILE * ROW, T.delta, T, p, tile);
            copy_common(to + 2 * TILE * ROW, T.b, T, p, tile);
            copy_common(to + 2 * TILE * ROW + TILE * NP, T.c, T, p, tile);
        }
        copies_issued();
    };
    const float share = 1.0f / ((float)T.heads * T.states);  // of a decay in their mean
    float *y = T.y + ((long long)p.row * T.length + p.begin * TILE) * T.heads + p.first;
    float *kept = T.kept + (((long long)(p.block * WARPS + p.warp) * T.groups + p.group) * T.batch + p.row) * T.length;
    issue(p.begin);
    load_A(A, T, p);
    load_slots(H, given(T.initial, T, p), T.states, p, 0.0f);
#pragma unroll 2
    for (int k = 0; k < p.chunk; k++) carry_in(H, T, p, k);
    for (int tile = p.begin; tile < p.end; tile++) {
        issue(tile + 1);
        copies_done_but_last();
        __syncthreads();
        const float *xs = memory + (tile % 2) * STAGE_FORWARD, *ds = xs + TILE * ROW, *bs = ds + TILE * ROW;
        const float *cs = bs + TILE * NP;
        if (KEPT) store_slots(H, T.starts + padded(T, p, tile), NP, p);
        const int steps = T.length - tile * TILE;
#pragma unroll 4
        for (int t = 0; t < TILE; t++) {
            float b[SN], c[SN], read[CD], sum = 0.0f;
#pragma unroll
            for (int q = 0; q < SN; q++) b[q] = bs[t * NP + state(p, q)], c[q] = cs[t * NP + state(p, q)];
#pragma unroll
            for (int r = 0; r < CD; r++) {
                float delta = ds[t * ROW + channel(p, r)], x = delta * xs[t * ROW + channel(p, r)];
                float kept_here = 0.0f;
                read[r] = 0.0f;
#pragma unroll
                for (int q = 0; q < SN; q++) {
                    float a = decay(delta, A[r][q]);
                    H[r][q] = a * H[r][q] + x * b[q];
                    read[r] += H[r][q] * c[q];
                    if (RETAINED) kept_here += a * counted_states[q];
                }
                if (RETAINED) sum += kept_here * counted[r];
            }
            gather<CD, LN, 1>(read);
#pragma unroll
            for (int r = 0; r < CD; r += (CD < LN ? CD : LN)) {
                int d = channel(p, r);
                if (d < p.left && t < steps && p.sl < CD) y[d] = read[r] + D[r] * xs[t * ROW + d];
            }
            y += T.heads;
            if (RETAINED) decays[t * SPREAD + p.lane] = sum;
        }
        __syncthreads();
        if (RETAINED) {  // two lanes a step
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; i++) total += decays[p.lane / 2 * SPREAD + p.lane % 2 * 16 + i];
            total += swap_lanes(total, 1);
            if (p.lane % 2 == 0 && p.lane / 2 < steps) kept[tile * TILE + p.lane / 2] = total * share;
        }
    }
    if (p.chunk == T.chunks - 1) store_slots(H, T.final + matrix(T, p) * T.states, T.states, p);
    if (JOINED) end_joined(T, p);
}

// λ_t = c_t ȳ_t + a_{t+1} λ_{t+1}; g_t, the gradient of Δ_t A, is λ_t a_t H_{t-1}, and for the expected decay a_t times
// that. x̄_t = Σ_n λ_t b_t, Δ̄_t = Σ_n g_t A, Ā = Σ_t g_t Δ_t, b̄_t = Σ_d λ_t x_t, c̄_t = Σ_d ȳ_t H_t.
template <bool JOINED> __device__ __forceinline__ void run_backward(const Terms &T) {
    const Place p = JOINED ? start_joined<true>(T) : place<false>(T, blockIdx.x);
    constexpr int SUBS = TILE / SUB;
    float *laid = memory + 2 * STAGE_BACKWARD + threadIdx.x;  // SUBS × CD × SN × THREADS
    float *parts = memory + 2 * STAGE_BACKWARD + SUBS * CD * SN * THREADS;  // 2 × TILE × WARPS × NP
    Slots A, Abar, carried;
    FOR_SLOTS Abar[r][q] = 0.0f;
    auto issue = [&](int tile) {
        if (tile >= p.begin) {
            float *to = memory + (tile % 2) * STAGE_BACKWARD;
            copy_view(to, T.x, T, p, tile);
            copy_view(to + TILE * ROW, T.delta, T, p, tile);
            copy_view(to + 2 * TILE * ROW, T.ybar, T, p, tile);
            copy_common(to + 3 * TILE * ROW, T.b, T, p, tile);
            copy_common(to + 3 * TILE * ROW + TILE * NP, T.c, T, p, tile);
        }
        copies_issued();
    };
    issue(p.end - 1);
    load_A(A, T, p);
    load_slots(carried, given(T.finalbar, T, p), T.states, p, 0.0f);
#pragma unroll 2
    for (int k = T.chunks - 1; k > p.chunk; k--) carry_in(carried, T, p, k);
    for (int tile = p.end - 1; tile >= p.begin; tile--) {
        issue(tile - 1);
        const float *xs = memory + (tile % 2) * STAGE_BACKWARD, *ds = xs + TILE * ROW, *gs = ds + TILE * ROW;
        const float *bs = gs + TILE * ROW, *cs = bs + TILE * NP;
        Slots H;
        load_slots(H, T.starts + padded(T, p, tile), NP, p, 0.0f);
        copies_done_but_last();
        __syncthreads();
        // the states before each group of SUB steps
#pragma unroll 1
        for (int s = 0; s < SUBS; s++) {
            FOR_SLOTS laid[((s * CD + r) * SN + q) * THREADS] = H[r][q];
            if (s == SUBS - 1) break;
#pragma unroll
            for (int i = 0; i < SUB; i++) {
                const int t = s * SUB + i;
                float b[SN];
#pragma unroll
                for (int q = 0; q < SN; q++) b[q] = bs[t * NP + state(p, q)];
#pragma unroll
                for (int r = 0; r < CD; r++) {
                    float delta = ds[t * ROW + channel(p, r)], x = delta * xs[t * ROW + channel(p, r)];
#pragma unroll
                    for (int q = 0; q < SN; q++) H[r][q] = decay(delta, A[r][q]) * H[r][q] + x * b[q];
                }
            }
        }
        const int steps = T.length - tile * TILE;
        const long long out = ((long long)p.row * T.length + tile * TILE) * T.heads + p.first;
#pragma unroll 1
        for (int s = SUBS - 1; s >= 0; s--) {
            float a[SUB][CD][SN], before[SUB][CD][SN];
            FOR_SLOTS H[r][q] = laid[((s * CD + r) * SN + q) * THREADS];
#pragma unroll
            for (int i = 0; i < SUB; i++) {
                const int t = s * SUB + i;
                float b[SN], cbar[SN];
#pragma unroll
                for (int q = 0; q < SN; q++) b[q] = bs[t * NP + state(p, q)], cbar[q] = 0.0f;
#pragma unroll
                for (int r = 0; r < CD; r++) {
                    float delta = ds[t * ROW + channel(p, r)], x = delta * xs[t * ROW + channel(p, r)];
                    float ybar = gs[t * ROW + channel(p, r)];
#pragma unroll
                    for (int q = 0; q < SN; q++) {
                        before[i][r][q] = H[r][q];
                        a[i][r][q] = decay(delta, A[r][q]);
                        H[r][q] = a[i][r][q] * H[r][q] + x * b[q];
                        cbar[q] += ybar * H[r][q];
                    }
                }
                gather<SN, CL, LN>(cbar);
#pragma unroll
                for (int q = 0; q < SN; q += (SN < CL ? SN : CL))
                    if (p.cl < SN) parts[((TILE + t) * WARPS + p.warp) * NP + state(p, q)] = cbar[q];
            }
#pragma unroll
            for (int i = SUB - 1; i >= 0; i--) {
                const int t = s * SUB + i;
                float b[SN], c[SN], bbar[SN], xbar[CD], deltabar[CD];
#pragma unroll
                for (int q = 0; q < SN; q++)
                    b[q] = bs[t * NP + state(p, q)], c[q] = cs[t * NP + state(p, q)], bbar[q] = 0.0f;
#pragma unroll
                for (int r = 0; r < CD; r++) {
                    float delta = ds[t * ROW + channel(p, r)], x = delta * xs[t * ROW + channel(p, r)];
                    float ybar = gs[t * ROW + channel(p, r)];
                    xbar[r] = deltabar[r] = 0.0f;
#pragma unroll
                    for (int q = 0; q < SN; q++) {
                        float adjoint = ybar * c[q] + carried[r][q];
                        carried[r][q] = adjoint * a[i][r][q];
                        float g = carried[r][q] * before[i][r][q];
                        if (EXPECTED) g *= a[i][r][q];
                        Abar[r][q] += g * delta;
                        xbar[r] += adjoint * b[q];
                        deltabar[r] += g * A[r][q];
                        bbar[q] += adjoint * x;
                    }
                }
                gather<CD, LN, 1>(xbar);
                gather<CD, LN, 1>(deltabar);
                gather<SN, CL, LN>(bbar);
#pragma unroll
                for (int r = 0; r < CD; r += (CD < LN ? CD : LN)) {
                    int d = channel(p, r);
                    if (d < p.left && t < steps && p.sl < CD) {
                        long long at = out + (long long)t * T.heads + d;
                        T.xbar[at] = xbar[r] * ds[t * ROW + d];
                        T.deltabar[at] = (EXPECTED ? deltabar[r] : deltabar[r] * LN_2) + xbar[r] * xs[t * ROW + d];
                    }
                }
#pragma unroll
                for (int q = 0; q < SN; q += (SN < CL ? SN : CL))
                    if (p.cl < SN) parts[(t * WARPS + p.warp) * NP + state(p, q)] = bbar[q];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 2 * TILE * NP; i += THREADS) {
            int n = i % NP, t = i / NP % TILE, which = i / (NP * TILE);
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += parts[((i / NP) * WARPS + w) * NP + n];
            if (n < T.states && t < steps) {
                long long at = ((long long)p.block * T.batch + p.row) * T.length + tile * TILE + t;
                (T.ends + (which ? T.cbar : T.bbar))[(at * T.groups + p.group) * T.states + n] = total;
            }
        }
        // the next tile's barrier stands before its first write to `parts`
    }
    if (p.chunk == 0 && T.initialbar) store_slots(carried, T.initialbar + matrix(T, p) * T.states, T.states, p);
    store_slots(Abar, T.ends + T.Abar + ((long long)p.chunk * T.batch * T.heads + matrix(T, p)) * T.states, T.states, p);
    if (!JOINED) return;
    const Marks m = marks_of(T, p);
    __syncthreads();
    if (last(m.chunk, T.blocks)) {
        const long long width = T.groups * T.states, own = p.group * T.states, size = T.batch * T.length * width;
        const long long begin = ((long long)p.row * T.length + p.begin * TILE) * width + own;
        const int count = (min(p.end * TILE, T.length) - p.begin * TILE) * T.states;
        auto at = [&](int i) { return begin + i / T.states * width + i % T.states; };
        add_up(T.b_sum, T.ends + T.bbar, T.blocks, size, count, at);
        add_up(T.c_sum, T.ends + T.cbar, T.blocks, size, count, at);
    }
    if (last(m.channels, T.chunks * T.batch)) {
        auto at = [&](int i) { return (long long)p.first * T.states + i; };
        add_up(T.A_sum, T.ends + T.Abar, T.chunks * T.batch, (long long)T.heads * T.states, min(p.left, CC) * T.states, at);
    }
    end_joined(T, p);
}

// What the blocks of `run_backward` gave of Ā, b̄ and c̄, added up.
__device__ __forceinline__ void run_sums(const Terms &T) {
    const long long of_A = (long long)T.heads * T.states;
    const long long of_b = (long long)T.batch * T.length * T.groups * T.states;
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    const float *from = T.ends + T.Abar;
    float *to = T.A_sum, total = 0.0f;
    long long size = of_A;
    int rows = T.chunks * T.batch;
    if (i >= of_A) {
        i -= of_A, size = of_b, rows = T.blocks;
        from = T.ends + (i < of_b ? T.bbar : T.cbar), to = i < of_b ? T.b_sum : T.c_sum;
        if (i >= of_b) i -= of_b;
    }
    if (i >= size) return;
#pragma unroll 8
    for (int k = 0; k < rows; k++) total += from[k * size + i];
    to[i] = total;
}

#ifndef EMULATED
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kernel(const Terms T) { ENTRY(T); }
#endif
