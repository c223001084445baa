// What the passes of fused.cu share: their terms, where a thread works, what lies in registers and in shared memory, and
// how blocks of one launch tell each other how far they are.

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
    float *y, *final, *kept, *starts;
    View ybar;  // from here on for the gradient
    const float *finalbar;
    float *xbar, *deltabar, *initialbar, *A_sum, *b_sum, *c_sum;
    float *ends;  // from here on for both again: scratch
    int *marks;
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
__device__ __forceinline__ int count_on(int *mark) {
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

// Whether as many have counted on this mark as shall; after a barrier.
__device__ __forceinline__ bool last(int *mark, int of) { return told(threadIdx.x ? 0 : count_on(mark) == of - 1); }

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
