"""Scan of the delta rule, and its sweep from the end, by Triton kernels on a GPU (forward only).

One kernel solves the triangular systems of all chunks in parallel, another walks the chunks with the memory in
registers; the equations are in `delta_rule_kernels`. Products have about float32's precision, whatever
`torch.get_float32_matmul_precision()` says. Chunks begin at the same steps whatever else is in the batch, so batching
changes no result.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

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


def scan(
    log_a: Float[Tensor, "batch length heads #state"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length groups state"],
    c: Float[Tensor, "batch length groups state"],
    x: Float[Tensor, "batch length heads width"],
    initial: Float[Tensor, "batch heads width state"],
) -> tuple[Float[Tensor, "batch length heads width"], Float[Tensor, "batch heads width state"]]:
    """Return y_t = H_t c_t, of x's type, and the final H of H_t = a_t H_{t-1} (I − β_t b_t b_tᵀ) + β_t x_t b_tᵀ."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    memory = initial.float().clone(memory_format=torch.contiguous_format)
    _walk_chunks(log_a, beta, b, c, x, memory, y)
    return y, memory.to(initial.dtype)


def keys_left(
    log_a: Float[Tensor, "batch length heads #state"],
    beta: Float[Tensor, "batch length heads"],
    b: Float[Tensor, "batch length groups state"],
) -> Float[Tensor, "batch length heads state"]:
    """Return k_sᵀ = b_sᵀ ∏_{s<r≤T} a_r (I − β_r b_r b_rᵀ), the key written at s as it is at the end, in float32."""
    keys = b.new_empty(*beta.shape, b.shape[-1], dtype=torch.float32)
    product = torch.eye(b.shape[-1], dtype=torch.float32, device=b.device).repeat(b.shape[0], beta.shape[2], 1, 1)
    _walk_chunks(log_a, beta, b, None, None, product, keys)
    return keys


def _walk_chunks(
    log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor | None, x: Tensor | None, memory: Tensor, out: Tensor
) -> None:
    """Fill `out` (batch, length, heads, width) and carry `memory` (batch, heads, width, state), from the end if no c
    and x are given."""
    from ssmscope.backends.triton import delta_rule_kernels as kernels

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
            kernels.solve[(batch * chunks * heads,)](
                log_a, beta, b, c, x, *matrices, length, first, chunks, heads, groups, **sizes, **LAUNCH
            )
            kernels.walk[(batch * heads, padded_width // columns)](
                *matrices, memory, out, length, first, chunks, heads, **sizes, **LAUNCH
            )
