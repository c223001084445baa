"""Triton kernel of the norms of decayed keys; `survival.py` launches it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length"])
def key_norms_of_piece(
    delta, slowest, rates, b, later, norms, length, heads, groups,
    delta_row, delta_step, b_row, b_step, b_group, b_state,
    N: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the norms of BLOCK channels of a group at one piece of STEPS positions, the last one first.

    `slowest` (heads,) is max_n A / log 2 and `rates` (N, heads) are twice the distances of A / log 2 from it; `later`
    (batch, pieces, heads) are the sums of Δ after each piece. The grid is (blocks of channels, pieces, batch).
    """
    row, piece, pieces = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    share = heads // groups
    blocks = tl.cdiv(share, BLOCK)
    group = tl.program_id(0) // blocks
    own = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    d, known, later_steps = group * share + own, own < share, tl.arange(0, STEPS)
    t = length - 1 - (pieces - 1 - piece).to(tl.int64) * STEPS - later_steps
    real = (t >= 0)[:, None] & known[None, :]
    following = delta + row * delta_row + (t + 1)[:, None] * delta_step + d[None, :]
    sums = tl.cumsum(tl.load(following, mask=real & (later_steps > 0)[:, None], other=0.0), axis=0)
    sums += tl.load(later + (row * pieces + piece) * heads + d, mask=known, other=0.0)[None, :]
    b += row * b_row + t * b_step + group * b_group
    squares = tl.zeros((STEPS, BLOCK), tl.float32)
    for n in range(N):
        rate = tl.load(rates + n * heads + d, mask=known, other=0.0)
        key = tl.load(b + n * b_state, mask=t >= 0, other=0.0)
        squares += tl.exp2(rate[None, :] * sums) * (key * key)[:, None]
    kept = tl.exp2(tl.load(slowest + d, mask=known, other=0.0)[None, :] * sums)
    tl.store(norms + (row * length + t[:, None]) * heads + d[None, :], kept * tl.sqrt(squares), mask=real)
