"""Scan with one decay per head (Mamba-2) by Triton kernels on a GPU, and its gradients.

The equations are in `ssd_kernels`. One kernel walks through the chunks and keeps the state before each; then all chunks
are computed in parallel. The backward pass recomputes the states and does the same with the adjoint, back in time.
Matrix products follow `torch.get_float32_matmul_precision()`: "highest" (the default) has float32's precision (sums of
several products of 16-bit or TF32 numbers), "high" has TF32's, "medium" bfloat16's; sums are float32. Chunks, and the
order of every sum, are the same whatever else is in the batch, so batching changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from ssmscope.backends.shapes import Inputs, Keys, Memory, PerHead
from ssmscope.backends.triton import tile_size, with_contiguous_rows

MAX_STATE = 256
MAX_KEPT_BYTES = 1 << 29
"""Memory for the states of all chunks; rows of the batch that need more are processed in turn."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = {"highest": "float32", "high": "tf32", "medium": "bfloat16"}
CHUNK = 64
"""Steps of a chunk."""
HEADS_PER_PROGRAM = 8
"""Heads whose gradients of b and c one program adds up."""
LAUNCH = {
    "prepare": {"N_BLOCK": 128, "num_warps": 4, "num_stages": 1},
    "states": {"P_BLOCK": 64, "N_BLOCK": 64, "num_warps": 4, "num_stages": 1},
    "outputs": {"P_BLOCK": 64, "N_BLOCK": 32, "Q_BLOCK": 32, "num_warps": 4, "num_stages": 1},
    "within": {"P_BLOCK": 32, "num_warps": 4, "num_stages": 1},
    "across": {"P_BLOCK": 32, "N_BLOCK": 64, "num_warps": 4, "num_stages": 1},
}
"""Largest tiles and launch options of each kernel. Not eight warps for `across`: with tiles of 16 columns, a warp group
then multiplies by 8, and Triton 3.6 makes an illegal memory access of that on Hopper."""


def fits(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor | None, delta: Tensor | None) -> bool:
    """Return True if the kernels serve these terms: 32 or 16 bits, not empty, state ≤ 256."""
    terms = (t for t in (log_a, b, c, x, initial, delta) if t is not None)
    return b.shape[-1] <= MAX_STATE and all(t.numel() > 0 and t.dtype in DTYPES for t in terms)


def scan(
    log_a: PerHead, b: Keys, c: Keys, x: Inputs, initial: Memory | None, delta: PerHead | None
) -> tuple[Inputs, Memory]:
    """Return y_t = H_t c_t and the final H of H_t = a_t H_{t-1} + Δ_t x_t b_tᵀ; Δ is 1 and H_0 is 0 if absent. Head h
    reads b and c of group h // (heads / groups). y has x's type, the final H that of `initial`, else x's.
    Differentiable once, in every term."""
    b, c, x = (with_contiguous_rows(t) for t in (b, c, x))
    return _Scan.apply(log_a, b, c, x, initial, delta, PRECISIONS[torch.get_float32_matmul_precision()])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, b, c, x, initial, delta, precision):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_a, b, c, x, initial, delta)
        ctx.precision = precision
        y, last = x.new_empty(x.shape), (x if initial is None else initial).new_empty(*x[:, 0].shape, b.shape[-1])
        with torch.cuda.device_of(x):
            for *terms, y_out, last_out in _slabs(log_a, b, c, x, initial, delta, y, last, states_per_chunk=1):
                chunks = _Chunks(terms, precision)
                chunks.outputs(chunks.x, chunks.c, chunks.states_before(last_out), y_out)
        return y, last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, y_bar, last_bar):
        saved = ctx.saved_tensors
        x, initial = saved[3:5]
        y_bar = torch.zeros_like(x) if y_bar is None else with_contiguous_rows(y_bar)
        x_bar, initial_bar = (None if t is None else t.new_empty(t.shape) for t in (x, initial))
        tensors, others = (*saved, y_bar, last_bar, x_bar, initial_bar), []
        with torch.cuda.device_of(x):
            for *terms, y_bar, last_bar, x_out, initial_out in _slabs(*tensors, states_per_chunk=2):
                chunks = _Chunks(terms, ctx.precision)
                after = chunks.states(y_bar, chunks.c, last_bar, initial_out, reverse=True)
                chunks.outputs(y_bar, chunks.b, after, x_out, reverse=True)
                if any(ctx.needs_input_grad[i] for i in (0, 1, 2, 5)):  # x and the initial state need no more.
                    others.append(chunks.other_gradients(y_bar, chunks.states_before(), after))
        found = (None if parts[0] is None else torch.cat(parts) for parts in zip(*others))
        log_a_bar, b_bar, c_bar, delta_bar = found if others else (None,) * 4
        return log_a_bar, b_bar, c_bar, x_bar, initial_bar, delta_bar, None


def _slabs(*tensors: Any, states_per_chunk: int) -> Iterator[list[Any]]:
    """Yield rows of the tensors, which begin with the scan's terms, as many as MAX_KEPT_BYTES allow."""
    b, x = tensors[1], tensors[3]
    bytes_per_row = 4 * states_per_chunk * -(-x.shape[1] // CHUNK) * x[0, 0].numel() * b.shape[-1]
    rows = max(1, MAX_KEPT_BYTES // bytes_per_row)
    for start in range(0, x.shape[0], rows):
        yield [None if t is None else t[start : start + rows] for t in tensors]


class _Chunks:
    """Terms of a scan in chunks, with their sums of log-decays and their products c_t · b_s."""

    def __init__(self, terms: list[Any], precision: str) -> None:
        from ssmscope.backends.triton import ssd_kernels

        self.kernels, self.precision = ssd_kernels, precision
        self.log_a, self.b, self.c, self.x, self.initial, self.delta = log_a, b, c, x, _, delta = terms
        (batch, length, self.heads, self.width), (self.groups, self.state) = x.shape, b.shape[2:]
        self.shape = batch, -(-length // CHUNK)
        self.sizes = length, self.heads, self.groups
        self.sums = x.new_empty(*self.shape, self.heads, 3, CHUNK, dtype=torch.float32)
        self.products = x.new_empty(*self.shape, self.groups, CHUNK, CHUNK, dtype=torch.float32)
        self.kernels.prepare[(*self.shape, self.groups)](
            *(log_a, b, c, delta, self.sums, self.products, *self.sizes, *log_a.stride(), *b.stride()[:3]),
            *(*c.stride()[:3], *(log_a if delta is None else delta).stride()),
            **{"N": self.state, **self._options("prepare")},
        )

    def states_before(self, last: Tensor | None = None) -> Tensor:
        """Return the states before the chunks."""
        return self.states(self.x, self.b, self.initial, last)

    def states(
        self, x: Tensor, writing: Tensor, first: Tensor | None, last: Tensor | None, reverse: bool = False
    ) -> Tensor:
        """Return the states before (reverse: the adjoints after) the chunks and fill `last` if given."""
        kept = self.sums.new_empty(*self.shape, self.heads, self.state, self.width)
        options = {"P": self.width, "N": self.state, **self._options("states")}
        tiles = -(-self.width // options["P_BLOCK"]) * -(-self.state // options["N_BLOCK"])
        self.kernels.states[self.shape[0], self.heads, tiles](
            *(self.sums, x, writing, None if first is None else first.contiguous(), kept, last),
            *(*self.sizes, self.shape[1], *x.stride()[:3], *writing.stride()[:3]),
            **{"REVERSE": reverse, **options},
        )
        return kept

    def outputs(self, x: Tensor, reading: Tensor, kept: Tensor, y: Tensor, reverse: bool = False) -> None:
        """Fill y (reverse: the gradient of x) from the states that `states` kept."""
        options = {"P": self.width, "N": self.state, **self._options("outputs")}
        self.kernels.outputs[(*self.shape, self.heads * -(-self.width // options["P_BLOCK"]))](
            *(self.sums, self.products, x, reading, kept, y, *self.sizes, *x.stride()[:3], *reading.stride()[:3]),
            **{"REVERSE": reverse, **options},
        )

    def other_gradients(self, y_bar: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of log_a, b, c and delta."""
        log_a, b, c, delta, x, sums = self.log_a, self.b, self.c, self.delta, self.x, self.sums
        options = {"P": self.width, "HEADS": HEADS_PER_PROGRAM, **self._options("within")}
        splits = -(-self.heads // self.groups // HEADS_PER_PROGRAM)
        strides = *x.stride()[:3], *y_bar.stride()[:3]
        K = sums.new_empty(splits, *self.products.shape)
        parts = -(-self.state // self._options("across")["N_BLOCK"])
        log_a_bar = sums.new_empty(1 + parts, *log_a.shape)
        delta_bar = torch.empty_like(log_a_bar)
        delta_within, delta_across = (None, None) if delta is None else (delta_bar[0], delta_bar[1:])
        self.kernels.within[(*self.shape, self.groups * splits)](
            *(sums, self.products, x, y_bar, K, log_a_bar[0], delta_within, *self.sizes, splits, *strides), **options
        )
        b_bar, c_bar = (sums.new_empty(splits, *b.shape) for _ in range(2))
        self.kernels.across[(*self.shape, self.groups * splits * parts)](
            *(sums, K, x, y_bar, b, c, before, after, b_bar, c_bar, log_a_bar[1:], delta_across),
            *(*self.sizes, splits, *strides, *b.stride()[:3], *c.stride()[:3]),
            **{"N": self.state, **options, **self._options("across")},
        )
        pairs = (log_a_bar, log_a), (b_bar, b), (c_bar, c), (delta_bar, delta)
        return tuple(None if term is None else partial.sum(0).to(term.dtype) for partial, term in pairs)

    def _options(self, kernel: str) -> dict[str, Any]:
        sizes = {"P_BLOCK": self.width, "N_BLOCK": self.state}
        tiles = {name: min(most, tile_size(sizes.get(name, most))) for name, most in LAUNCH[kernel].items()}
        return {**tiles, "PRECISION": self.precision}
