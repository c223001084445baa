"""Scan of the delta rule, and its sweep from the end, by Triton kernels on a GPU (forward only).

Products have about float32's precision, whatever `torch.get_float32_matmul_precision()` says. Chunks begin at the same
steps in every batch, so batching changes no result.

In a chunk of Q steps with keys k_t (the rows of b), Γ[t, s] = ∏_{s<r≤t} a_r is the decay between two steps, Γ_start[t]
the one from the chunk's start through t, Γ_end[t] the one from t, exclusive, to its end, and

    L[t, s] = β_t k_tᵀ Γ[t, s] k_s  for s < t,   T = (I + L)⁻¹.

With the memory H (state, width) before the chunk, u what each step writes (Yang et al. 2024, section 3):

    u = T β x − T β Γ_start k H,   y = Γ_start c H + (c Γ kᵀ) u,   H ← Γ_chunk H + (Γ_end k)ᵀ u.

With the product P of the transitions after the chunk, what is left of its keys has the transposed system:

    left = Tᵀ Γ_end k P,   P ← Γ_chunk P − (β Γ_start k)ᵀ left.

Both have the form u = written + erase H, H ← Γ_chunk H + write u. `solve` makes these matrices for all chunks in
parallel, padded with zeros to whole chunks and tiles; `walk` takes the chunks in order, the memory in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from ssmscope.backends.shapes import Decays, HeadKeys, Inputs, Keys, Memory, PerHead
from ssmscope.backends.triton import tile_size

MAX_STATE = 256
MAX_SCRATCH_BYTES = 1 << 30
"""Memory for the matrices of the chunks that are solved at once."""
MIN_LOG_DECAY = -1e4
"""Smaller log-decays are raised to this, whose exponential is 0 too: differences of sums then stay finite."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH_PER_PROGRAM = 32
"""Columns of the memory that one program carries."""
LAUNCH = {"num_warps": 4, "num_stages": 1}
"""Launch options. One stage, as loads further ahead gain a tenth and need the shared memory of the largest GPUs."""


def fits(log_a: Tensor, beta: Tensor, b: Tensor, *others: Tensor) -> bool:
    """Return True if the kernels serve these terms: 32 or 16 bits, not empty, state ≤ 256, no gradient wanted."""
    terms = (log_a, beta, b, *others)
    if torch.is_grad_enabled() and any(t.requires_grad for t in terms):
        return False
    return b.shape[-1] <= MAX_STATE and all(t.numel() and t.dtype in DTYPES for t in terms)


def scan(log_a: Decays, beta: PerHead, b: Keys, c: Keys, x: Inputs, initial: Memory) -> tuple[Inputs, Memory]:
    """Return y_t = H_t c_t, of x's type, and the final H of H_t = a_t H_{t-1} (I − β_t b_t b_tᵀ) + β_t x_t b_tᵀ."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    memory = initial.float().clone(memory_format=torch.contiguous_format)
    _walk_chunks(log_a, beta, b, c, x, memory, y)
    return y, memory.to(initial.dtype)


def keys_left(log_a: Decays, beta: PerHead, b: Keys) -> HeadKeys:
    """Return k_sᵀ = b_sᵀ ∏_{s<r≤T} a_r (I − β_r b_r b_rᵀ), the key written at s as it is at the end, in float32."""
    keys = b.new_empty(*beta.shape, b.shape[-1], dtype=torch.float32)
    product = torch.eye(b.shape[-1], dtype=torch.float32, device=b.device).repeat(b.shape[0], beta.shape[2], 1, 1)
    _walk_chunks(log_a, beta, b, None, None, product, keys)
    return keys


def _walk_chunks(
    log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor | None, x: Tensor | None, memory: Tensor, out: Tensor
) -> None:
    """Fill `out` and carry `memory` (batch, heads, width, state), from the end if no c and x are given."""
    (batch, length, heads, width), (groups, state) = out.shape, b.shape[2:]
    by_state, from_end = log_a.shape[-1] > 1, x is None
    states = tile_size(state)
    columns = min(WIDTH_PER_PROGRAM, tile_size(width))
    padded_width = -(-width // columns) * columns
    steps = 32 if by_state or states > 128 else 64  # More would not fit the registers.
    sizes = {
        "N": state, "STATES": states, "P": width, "COLUMNS": padded_width, "WIDTH": columns, "Q": steps,
        "BY_STATE": by_state, "FROM_END": from_end,
    }  # fmt: skip
    log_a, beta, b = (t.contiguous() for t in (log_a.float().clamp(min=MIN_LOG_DECAY), beta.float(), b))
    c, x = (t if t is None else t.contiguous() for t in (c, x))

    # The rows of `solve`'s results: erase, write and decay; for the scan also read, inner and written.
    rows = [steps * states, steps * states, states if by_state else 1]
    rows += [] if from_end else [steps * states, steps * steps, steps * padded_width]
    all_chunks = -(-length // steps)
    at_once = min(all_chunks, max(1, MAX_SCRATCH_BYTES // (4 * batch * heads * sum(rows))))
    matrices: list[Tensor | None] = [b.new_empty(batch * at_once * heads, n, dtype=torch.float32) for n in rows]
    matrices += [None] * (6 - len(rows))
    starts = range(0, all_chunks, at_once)
    with torch.cuda.device_of(b):
        for first in reversed(starts) if from_end else starts:
            chunks = min(at_once, all_chunks - first)
            solve[(batch * chunks * heads,)](
                log_a, beta, b, c, x, *matrices, length, first, chunks, heads, groups, **sizes, **LAUNCH
            )
            walk[(batch * heads, padded_width // columns)](
                *matrices, memory, out, length, first, chunks, heads, **sizes, **LAUNCH
            )


# ---- kernels

PRECISION = tl.constexpr("tf32x3")
"""Three products of TF32 for one, with errors near float32's: the erased and the written value must cancel."""


@triton.jit(do_not_specialize=["length", "first_chunk", "chunks"])
def solve(
    log_a, beta, b, c, x, erase, write, decay, read, inner, written, length, first_chunk, chunks, heads, groups,
    N: tl.constexpr, STATES: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, FROM_END: tl.constexpr
):  # fmt: skip
    """Compute the matrices of one chunk and head; program_id(0) runs over (batch, chunks, heads). The terms are
    contiguous, log_a (batch, length, heads, N or 1), x (batch, length, heads, P). Results, for each program: erase (Q,
    STATES), write (STATES, Q), decay (STATES or 1), and for the scan alone read = Γ_start c (Q, STATES), inner = c Γ kᵀ
    (Q, Q) and written (Q, COLUMNS)."""
    q, n = tl.arange(0, Q), tl.arange(0, STATES)
    own = tl.program_id(0).to(tl.int64)
    head, row = own % heads, own // (heads * chunks)
    step = (first_chunk + own // heads % chunks) * Q + q
    real = step < length
    at = (row * length + step) * heads + head
    b_at = (row * length + step) * groups + head // (heads // groups)

    in_state = n < N
    mask = real[:, None] & in_state[None, :]
    k = tl.load(b + b_at[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    reader = k
    if not FROM_END:
        reader = tl.load(c + b_at[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    strength = tl.load(beta + at, mask=real, other=0.0)[:, None]
    if BY_STATE:
        left = tl.sum(real.to(tl.int32), axis=0)
        among, within, from_start, to_end, total = decay_by_state(
            log_a + tl.min(at, axis=0) * N + n, heads * N, b + tl.min(b_at, axis=0) * N + n, groups * N,
            k, reader, q, in_state, left,
        )  # fmt: skip
        tl.store(decay + own * STATES + n, total)
    else:
        a = tl.load(log_a + at, mask=real, other=0.0)
        among, within, from_start, to_end, total = decay_by_head(a, k, reader, q)
        tl.store(decay + own, total)
    if FROM_END:
        erasing, writing = to_end * k, -strength * from_start * k
    else:
        erasing, writing = -strength * from_start * k, to_end * k
        tl.store(tile(read + own * Q * STATES, q, n, STATES), from_start * reader)
        tl.store(tile(inner + own * Q * Q, q, q, Q), within)
    tl.store(tile(write + own * Q * STATES, n, q, Q), tl.trans(writing))

    T = inverse(tl.where(q[:, None] > q[None, :], strength * among, 0.0), q)
    if FROM_END:
        T = tl.trans(T)
    tl.store(tile(erase + own * Q * STATES, q, n, STATES), tl.dot(T, erasing, input_precision=PRECISION))
    if not FROM_END:
        for p0 in range(0, COLUMNS, WIDTH):
            p = p0 + tl.arange(0, WIDTH)
            x_t = tl.load(x + at[:, None] * P + p[None, :], mask=real[:, None] & (p < P)[None, :], other=0.0)
            u = tl.dot(T, strength * x_t.to(tl.float32), input_precision=PRECISION)
            tl.store(tile(written + own * Q * COLUMNS, q, p, COLUMNS), u)


@triton.jit(do_not_specialize=["length", "first_chunk", "chunks"])
def walk(
    erase, write, decay, read, inner, written, memory, out, length, first_chunk, chunks, heads,
    N: tl.constexpr, STATES: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, FROM_END: tl.constexpr
):  # fmt: skip
    """Carry a block of the memory's columns through the chunks, from the last to the first if FROM_END. program_id(0)
    runs over (batch, heads), program_id(1) over blocks. `memory` (batch, heads, P, N) is replaced by its final value;
    `out` (batch, length, heads, P) becomes y, or u if FROM_END."""
    q, n, p = tl.arange(0, Q), tl.arange(0, STATES), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    own_head = tl.program_id(0).to(tl.int64)
    row, head = own_head // heads, own_head % heads
    memory_at = memory + own_head * P * N + p[None, :] * N + n[:, None]
    in_memory = (n < N)[:, None] & (p < P)[None, :]
    H = tl.load(memory_at, mask=in_memory, other=0.0)
    for i in range(0, chunks):
        chunk = i
        if FROM_END:
            chunk = chunks - 1 - i
        own = (row * chunks + chunk) * heads + head
        erasing = tl.load(tile(erase + own * Q * STATES, q, n, STATES))
        if FROM_END:
            u = tl.dot(erasing, H, input_precision=PRECISION)
            y = u
        else:
            u = tl.load(tile(written + own * Q * COLUMNS, q, p, COLUMNS))
            u = tl.dot(erasing, H, u, input_precision=PRECISION)
            y = tl.dot(tl.load(tile(read + own * Q * STATES, q, n, STATES)), H, input_precision=PRECISION)
            y = tl.dot(tl.load(tile(inner + own * Q * Q, q, q, Q)), u, y, input_precision=PRECISION)
        if BY_STATE:
            H *= tl.load(decay + own * STATES + n)[:, None]
        else:
            H *= tl.load(decay + own)
        H = tl.dot(tl.load(tile(write + own * Q * STATES, n, q, Q)), u, H, input_precision=PRECISION)
        step = (first_chunk + chunk) * Q + q
        out_at = out + ((row * length + step) * heads + head)[:, None] * P + p[None, :]
        tl.store(out_at, y, mask=(step < length)[:, None] & (p < P)[None, :])
    tl.store(memory_at, H, mask=in_memory)


@triton.jit
def tile(at, rows, columns, row_stride):
    """Return addresses of a matrix's rows and columns."""
    return at + rows[:, None] * row_stride + columns[None, :]


@triton.jit
def decay_by_head(a, k, c, q):
    """Return k Γ kᵀ and c Γ kᵀ (Q, Q), zero for s > t; Γ_start and Γ_end (Q, 1); and the decay through the chunk.
    Log-decays `a` (Q) are summed in float64, so that differences of large sums keep the digits of small ones."""
    sums = tl.cumsum(a.to(tl.float64), axis=0)
    total = tl.sum(a.to(tl.float64), axis=0)
    causal = q[:, None] >= q[None, :]
    between = tl.where(causal, sums[:, None] - sums[None, :], 0.0).to(tl.float32)
    gamma = tl.where(causal, tl.exp(between), 0.0)
    among = gamma * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    within = gamma * tl.dot(c, tl.trans(k), input_precision=PRECISION)
    from_start, to_end = tl.exp(sums.to(tl.float32)), tl.exp((total - sums).to(tl.float32))
    return among, within, from_start[:, None], to_end[:, None], tl.exp(total.to(tl.float32))


@triton.jit
def decay_by_state(a_at, a_stride, k_at, k_stride, k, c, q, in_state, length):
    """Return `decay_by_head` with a decay per state: Γ_start and Γ_end are (Q, STATES), the chunk's decay (STATES). The
    columns of k Γ kᵀ are summed from the last to the first, so that the log-decays between s and every t grow by one
    step's. No cumulative product is divided by another: where states decay, nothing overflows."""
    Q: tl.constexpr = q.shape[0]
    among, within = tl.zeros([Q, Q], tl.float32), tl.zeros([Q, Q], tl.float32)
    between, to_end = tl.zeros_like(k), tl.zeros_like(k)
    after = tl.sum(between, axis=0)
    for i in range(0, Q):
        s = Q - 1 - i
        real = in_state & (s < length)
        a_s = tl.load(a_at + s.to(tl.int64) * a_stride, mask=real, other=0.0)
        k_s = tl.load(k_at + s.to(tl.int64) * k_stride, mask=real, other=0.0).to(tl.float32)
        decayed = tl.exp(between) * k_s[None, :]
        here = q == s
        among = tl.where(here[None, :], tl.sum(k * decayed, axis=1)[:, None], among)
        within = tl.where(here[None, :], tl.sum(c * decayed, axis=1)[:, None], within)
        to_end = tl.where(here[:, None], after[None, :], to_end)
        after += a_s
        between += tl.where((q >= s)[:, None], a_s[None, :], 0.0)
    causal = q[:, None] >= q[None, :]
    return among, tl.where(causal, within, 0.0), tl.exp(between), tl.exp(to_end), tl.exp(after)


@triton.jit
def inverse(L, q):
    """Return (I + L)⁻¹ of L (Q, Q) below the diagonal, from inverses of diagonal blocks of twice the size each time.
    With the inverses A and D of two neighbouring blocks, the corner between them is −D L A. Unlike products of powers
    of L, which are far larger than their sum where keys are alike, every block is bounded as the inverse itself."""
    Q: tl.constexpr = q.shape[0]
    t, s = q[:, None], q[None, :]
    T = tl.where(t == s, 1.0, 0.0)
    size = 1
    while size < Q:
        corner = tl.where((t // (2 * size) == s // (2 * size)) & (t // size > s // size), L, 0.0)
        T -= tl.dot(tl.dot(T, corner, input_precision=PRECISION), T, input_precision=PRECISION)
        size *= 2
    return T
