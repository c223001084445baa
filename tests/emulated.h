// CUDA's threads on a CPU, for kernels without a GPU: those of a block take turns, each until its next barrier or
// exchange between lanes. What they share begins as NaN.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ucontext.h>
#include <vector>
#define EMULATED
#define __device__
#define __forceinline__ inline
using std::min;
struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;
static std::vector<float> shared_memory;
static float *memory;
static ucontext_t scheduler;
static std::vector<ucontext_t> contexts;
static float exchanged[2][1024];
static int turns[1024];
static void __syncthreads() { swapcontext(&contexts[threadIdx.x], &scheduler); }
static float swap_lanes(float v, int mask) {
    const unsigned own = threadIdx.x;
    float *slots = exchanged[turns[own] ^= 1];
    slots[own] = v;
    __syncthreads();
    return slots[own ^ mask];
}
static float power_of_two(float v) {
    const float r = exp2f(v);
    return r < 1.17549435e-38f ? 0.0f : r;
}
static void __threadfence() {}
static int atomicAdd(int *at, int more) { return (*at += more) - more; }
static void wait_for(const int *mark) {
    if (!*mark) abort();  // blocks run one after the other
}
static float inverse(float v) { return 1.0f / v; }
static void copy_async(float *to, const float *from, bool valid) { *to = valid ? *from : 0.0f; }
static void copy_four(float *to, const float *from, bool valid) {
    if ((size_t)to % 16 && (size_t)memory % 16 == 0) abort();  // as a GPU does
    for (int i = 0; i < 4; i++) copy_async(to + i, from + i, valid);
}
static void copies_issued() {}
static void copies_done_but_last() {}

static void (*body)();
static unsigned finished;
static void thread() {
    body();
    finished++;
    for (;;) __syncthreads();
}
static void run_blocks(void (*f)(), unsigned blocks, unsigned threads, unsigned shared) {
    constexpr size_t STACK = 1 << 17;
    std::vector<char> stacks(STACK * threads);
    contexts.resize(threads);
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        shared_memory.assign(shared / sizeof(float), NAN);
        memory = shared_memory.data();
        body = f, finished = 0;
        for (unsigned i = 0; i < threads; i++) {
            getcontext(&contexts[i]);
            contexts[i].uc_stack.ss_sp = &stacks[i * STACK], contexts[i].uc_stack.ss_size = STACK;
            contexts[i].uc_link = &scheduler, turns[i] = 0;
            makecontext(&contexts[i], thread, 0);
        }
        while (finished < threads)
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) swapcontext(&scheduler, &contexts[threadIdx.x]);
    }
}
