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
// (that a processor must have room for).

#ifndef EMULATED
extern __shared__ __align__(16) float memory[];
__device__ __forceinline__ float swap_lanes(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
__device__ __forceinline__ float power_of_two(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ float inverse(float v) { return __fdividef(1.0f, v); }
__device__ __forceinline__ void wait_for(const int *mark) {
    while (!*(const volatile int *)mark) {}
}
#if __CUDA_ARCH__ >= 800
#define COPY(KIND, BYTES)                                                                 \
    asm volatile("cp.async." KIND ".shared.global [%0], [%1], " #BYTES ", %2;"             \
                 ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? BYTES : 0))
__device__ __forceinline__ void copy_async(float *to, const float *from, bool valid) { COPY("ca", 4); }
__device__ __forceinline__ void copy_four(float *to, const float *from, bool valid) { COPY("cg", 16); }
__device__ __forceinline__ void copies_issued() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void copies_done_but_last() { asm volatile("cp.async.wait_group 1;"); }
#else
__device__ __forceinline__ void copy_async(float *to, const float *from, bool valid) { *to = valid ? *from : 0.0f; }
__device__ __forceinline__ void copy_four(float *to, const float *from, bool valid) {
    for (int i = 0; i < 4; i++) copy_async(to + i, from + i, valid);
}
__device__ __forceinline__ void copies_issued() {}
__device__ __forceinline__ void copies_done_but_last() {}
#endif
#endif
constexpr int TILE = 16;  // steps
constexpr int SUB = 4;    // steps that the gradient keeps in registers
constexpr int CL = 32 / LN, CW = CD * CL, CC = CW * WARPS;
constexpr int NP = LN * SN, THREADS = WARPS * 32;
constexpr int ROW = CC + 4;  // of a tile in shared memory: few lanes meet in a bank, whichever way it is copied
constexpr int SPREAD = 33;  // of 32 lanes' numbers in shared memory
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct View {
    const float *at;
    long long row, step, head, width;
};
struct Common {
    const float *at;
    long long row, step, group, state;
};
struct Terms {
    View x, delta;
    Common b, c;
    const float *A, *D, *initial;
    float *y, *final, *kept, *starts, *ends;
    int *marks;
    View ybar;  // from here on for the gradient
    const float *finalbar;
    float *xbar, *deltabar, *initialbar, *A_sum, *b_sum, *c_sum;
    long long decays, Abar, bbar, cbar;  // how far they stand behind `ends`
    int batch, length, heads, groups, states, blocks, chunks, tiles;  // tiles: of a chunk
};

// Where a thread works.
struct Place {
    int row, chunk, group, block, lane, warp, sl, cl;
    int first;  // channel of the block
    int left;   // channels of the group from there on
    int begin, end;  // tiles
};

// The place with this number, of which those of a chunk come before those of the next one (BACK: of the one before it).
template <bool BACK> __device__ __forceinline__ Place place(const Terms &T, unsigned i) {
    Place p;
    int share = T.heads / T.groups;
    p.block = i % T.blocks, i /= T.blocks;
    p.group = i % T.groups, i /= T.groups;
    p.chunk = BACK ? T.chunks - 1 - i % T.chunks : i % T.chunks;
    p.row = i / T.chunks;
    p.lane = threadIdx.x % 32, p.warp = threadIdx.x / 32;
    p.sl = p.lane % LN, p.cl = p.lane / LN;
    p.first = p.group * share + p.block * CC;
    p.left = share - p.block * CC;
    int all = (T.length + TILE - 1) / TILE;
    p.begin = p.chunk * T.tiles;
    p.end = min(p.begin + T.tiles, all);
    return p;
}

// Channel of slot r within the block, and state of slot q. Slots are permuted lane by lane, so that `gather` exchanges
// the same registers in all lanes.
__device__ __forceinline__ int channel(const Place &p, int r) {
    return p.warp * CW + p.cl * CD + (r ^ (p.sl & (CD - 1)));
}
__device__ __forceinline__ int state(const Place &p, int q) { return p.sl * SN + (q ^ (p.cl & (SN - 1))); }

// Sums over P lanes, STRIDE apart, of V values whose slots are permuted by the lane. Sums end in slots that are
// multiples of min(V, P).
template <int V, int P, int STRIDE> __device__ __forceinline__ void gather(float (&v)[V]) {
    constexpr int S = V < P ? V : P;
#pragma unroll
    for (int m = S / 2; m >= 1; m /= 2)
#pragma unroll
        for (int r = 0; r < V; r++)
            if ((r & (S - m)) == 0) v[r] += swap_lanes(v[r | m], m * STRIDE);
#pragma unroll
    for (int m = S; m < P; m *= 2)
#pragma unroll
        for (int r = 0; r < V; r += S) v[r] += swap_lanes(v[r], m * STRIDE);
}

__device__ __forceinline__ float decay(float delta, float A) {
    return EXPECTED ? inverse(1.0f - delta * A) : power_of_two(delta * A);
}

typedef float Slots[CD][SN];
#define FOR_SLOTS                                      \
    _Pragma("unroll") for (int r = 0; r < CD; r++)      \
        _Pragma("unroll") for (int q = 0; q < SN; q++)

__device__ __forceinline__ long long matrix(const Terms &T, const Place &p) {
    return (long long)p.row * T.heads + p.first;
}

// Where the channels of a block start in (batch, channels, states), which may be absent.
__device__ __forceinline__ const float *given(const float *from, const Terms &T, const Place &p) {
    return from ? from + matrix(T, p) * T.states : nullptr;
}

// From (channels, states), padded with `other`; all of it where there is nothing to read from.
__device__ __forceinline__ void load_slots(Slots &v, const float *from, int states, const Place &p, float other) {
    FOR_SLOTS {
        int d = channel(p, r), n = state(p, q);
        v[r][q] = from && d < p.left && n < states ? from[(long long)d * states + n] : other;
    }
}

__device__ __forceinline__ void store_slots(const Slots &v, float *to, int states, const Place &p) {
    FOR_SLOTS {
        int d = channel(p, r), n = state(p, q);
        if (d < p.left && n < states) to[(long long)d * states + n] = v[r][q];
    }
}

// A, times log2 e where the decay is an exponential.
__device__ __forceinline__ void load_A(Slots &A, const Terms &T, const Place &p) {
    load_slots(A, T.A + (long long)p.first * T.states, T.states, p, -1.0f);
    FOR_SLOTS A[r][q] *= EXPECTED ? 1.0f : LOG2_E;
}

__device__ __forceinline__ void copy_view(float *to, const View &v, const Terms &T, const Place &p, int tile) {
    const int steps = T.length - tile * TILE;
    const float *from = v.at + p.row * v.row + (long long)tile * TILE * v.step + p.first * v.head;
    constexpr int QUADS = CC % 4 ? 1 : CC / 4, MOVE = THREADS / QUADS;
    if (CC % 4 == 0 && v.head == 1 && v.step % 4 == 0 && p.left % 4 == 0 && (size_t)from % 16 == 0) {
        const int d = threadIdx.x % QUADS * 4, first = threadIdx.x / QUADS;
        from += first * v.step + d;
#pragma unroll
        for (int t = 0; t < TILE; t += MOVE, from += MOVE * v.step)
            if (MOVE <= TILE || first < TILE)
                copy_four(to + (first + t) * ROW + d, from, first + t < steps && d < p.left);
    } else if (v.step < v.head) {  // neighbouring threads read what lies side by side
        const int t = threadIdx.x % TILE;
        from += t * v.step + threadIdx.x / TILE * v.head;
#pragma unroll 4
        for (int d = threadIdx.x / TILE; d < CC; d += THREADS / TILE, from += THREADS / TILE * v.head)
            copy_async(to + t * ROW + d, from, t < steps && d < p.left);
    } else {
        constexpr int WIDE = CC < THREADS ? CC : THREADS;
#pragma unroll
        for (int part = 0; part < CC; part += WIDE) {
            const int d = part + threadIdx.x % WIDE, move = THREADS / WIDE;
            const float *at = from + threadIdx.x / WIDE * v.step + d * v.head;
#pragma unroll 4
            for (int t = threadIdx.x / WIDE; t < TILE; t += move, at += move * v.step)
                copy_async(to + t * ROW + d, at, t < steps && d < p.left);
        }
    }
}

__device__ __forceinline__ void copy_common(float *to, const Common &v, const Terms &T, const Place &p, int tile) {
    const int steps = T.length - tile * TILE;
    const float *base = v.at + p.row * v.row + (long long)tile * TILE * v.step + p.group * v.group;
    for (int i = threadIdx.x; i < TILE * NP; i += THREADS) {
        int t = i / NP, n = i % NP;
        bool valid = t < steps && n < T.states;
        copy_async(to + i, valid ? base + t * v.step + n * v.state : v.at, valid);
    }
}

// Slots (chunks, batch, heads, NP) of `ends`, `decays` and `starts`.
__device__ __forceinline__ long long padded(const Terms &T, const Place &p, int chunk) {
    return (((long long)chunk * T.batch + p.row) * T.heads + p.first) * NP;
}

__device__ __forceinline__ void carry_in(Slots &H, const Terms &T, const Place &p, int k) {
    Slots E, P;
    load_slots(E, T.ends + padded(T, p, k), NP, p, 0.0f);
    load_slots(P, T.ends + T.decays + padded(T, p, k), NP, p, 0.0f);
    FOR_SLOTS H[r][q] = P[r][q] * H[r][q] + E[r][q];
}

constexpr int STAGE_ENDS = 2 * TILE * ROW + TILE * NP, STAGE_FORWARD = STAGE_ENDS + TILE * NP;
constexpr int STAGE_BACKWARD = 3 * TILE * ROW + 2 * TILE * NP;

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

// Of the marks: how many blocks have begun and ended, how many of a chunk's have ended (batch, chunks, groups), how many
// of some channels (groups, blocks), and which ends are known (batch, chunks, groups, blocks).
struct Marks {
    int *begun, *ended, *chunk, *channels, *known;
    int count, programs, step;  // step: from a chunk's `known` to the next one's
};
__device__ __forceinline__ Marks marks_of(const Terms &T, const Place &p) {
    const int own = p.row * T.chunks + p.chunk, wide = T.groups * T.blocks, rows = T.batch * T.chunks;
    Marks m;
    m.begun = T.marks, m.ended = T.marks + 1;
    m.chunk = T.marks + 2 + own * T.groups + p.group;
    m.channels = T.marks + 2 + rows * T.groups + p.group * T.blocks + p.block;
    m.known = T.marks + 2 + rows * T.groups + wide + own * wide + p.group * T.blocks + p.block;
    m.programs = rows * wide, m.count = 2 + rows * T.groups + wide + m.programs, m.step = wide;
    return m;
}

// One more on a mark, by one thread after a barrier: after all that its block wrote, before all that it reads then.
__device__ __forceinline__ int counted(int *mark) {
    __threadfence();
    const int before = atomicAdd(mark, 1);
    __threadfence();
    return before;
}

// What one thread finds, told to its block; nothing may be under way in shared memory.
__device__ __forceinline__ int told(int found) {
    int *slot = (int *)memory;
    if (threadIdx.x == 0) *slot = found;
    __syncthreads();
    found = *slot;
    __syncthreads();
    return found;
}

// The next place, whose chunk can start: the ends of those before it (behind it) are known.
template <bool REVERSE> __device__ __forceinline__ Place start_joined(const Terms &T) {
    const Place p = place<REVERSE>(T, told(threadIdx.x ? 0 : atomicAdd(T.marks, 1)));
    if (T.chunks == 1) return p;
    const Marks m = marks_of(T, p);
    find_ends<REVERSE>(T, p);
    __syncthreads();
    if (threadIdx.x == 0) counted(m.known);
    const int others = REVERSE ? T.chunks - 1 - p.chunk : p.chunk;
    for (int k = threadIdx.x; k < others; k += THREADS) wait_for(m.known + (REVERSE ? k + 1 : -k - 1) * m.step);
    __threadfence();
    __syncthreads();
    return p;
}

// Whether as many have counted on this mark as shall; after a barrier.
__device__ __forceinline__ bool last(int *mark, int of) { return told(threadIdx.x ? 0 : counted(mark) == of - 1); }

// The last block clears the marks.
__device__ __forceinline__ void end_joined(const Terms &T, const Place &p) {
    const Marks m = marks_of(T, p);
    __syncthreads();
    if (last(m.ended, m.programs))
        for (int i = threadIdx.x; i < m.count; i += THREADS) T.marks[i] = 0;
}

// The sums over `rows` of `size` numbers, of `count` of which those with number i are at `at(i)`.
template <typename At>
__device__ __forceinline__ void add_up(float *to, const float *from, int rows, long long size, int count, At at) {
    constexpr int EACH = 4;
    for (int i = threadIdx.x; i < count; i += EACH * THREADS) {
        float total[EACH];
        long long places[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) total[e] = 0.0f, places[e] = at(min(i + e * THREADS, count - 1));
#pragma unroll 8
        for (int k = 0; k < rows; k++)
#pragma unroll
            for (int e = 0; e < EACH; e++) total[e] += from[k * size + places[e]];
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (i + e * THREADS < count) to[places[e]] = total[e];
    }
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
