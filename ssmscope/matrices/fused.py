"""The mean implicit attention of a layer with a decay per state by Triton kernels (`fused_kernels`), for float32 on a
GPU; silent when absent.

The sum over channels and states is a matrix product whose operands are never stored: they are made, tile by tile, in
registers.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.errors import InputError, did_you_mean
from ssmscope.matrices.terms import Around, diagonals
from ssmscope.scans import native
from ssmscope.scans.launching import Kernels, on

PRECISIONS = ("tf32", "bf16", "tf32x3")
BLOCK = 32  # rows of the triangles on the diagonal
TILE = 128  # rows of the largest tiles; their sums fill half the registers of a GPU's processor
WARPS = {128: 8, 64: 4, 32: 1}  # of a program for a tile of so many rows
CHANNELS = 32  # in one step of the matrix product, times one state
FILL = 264  # programs of the largest tiles that keep a GPU busy
SHARES = 4  # the most matrices' worth of memory that sums of shares of the channels may take
TOGETHER = 64  # tiles whose sums of steps are summed at a time
FLOOR = -126.0  # float32 knows no 2^-127 but for subnormal numbers
SPAN = 96.0  # factors of a triangle reach 2^96; 2^31 are left for c and `left`
MOST = 256  # states of a channel


def applicable(
    x: Tensor, b: Tensor, c: Tensor, delta: Tensor | None, A: Tensor | None, left: Tensor | None, right: Tensor | None
) -> bool:
    """Whether `mean` takes these terms: width 1, a decay per state given by Δ and A, float32, on one GPU, no gradients.

    A may be positive (a state then grows); the matrix must be finite. The decay must be exp(Δ A), not the expected one.
    """
    if x.device.type != "cuda" or x.shape[3] != 1 or delta is None or A is None:
        return False
    state = b.shape[3]
    if A.shape[-1] != state or not 1 <= state <= MOST or not x.numel():
        return False
    terms = [t for t in (b, c, delta, A, left, right) if t is not None]
    if not all(t.device == x.device and native.is_plain(t, "cuda") for t in terms):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in terms):
        return False
    return not torch.compiler.is_compiling() and available(x.device)


def mean(
    b: Float[Tensor, "batch length bc_groups state"],
    c: Float[Tensor, "batch length bc_groups state"],
    delta: Float[Tensor, "batch length heads"],
    A: Float[Tensor, "heads state"],
    left: Float[Tensor, "batch length heads"] | None = None,
    right: Float[Tensor, "batch length heads"] | None = None,
    *,
    groups: int = 1,
    precision: str = "tf32",
) -> Float[Tensor, "batch groups length length"]:
    """The mean over each group's channels d of left_td right_sd Σ_n c_tn exp(A_dn Σ_{s<r≤t} Δ_rd) Δ_sd b_sn for s ≤ t,
    0 above the diagonal (Differential Mamba, Eq. 8), where `applicable`.

    Head d reads group d // (heads / bc_groups) of b and c, and belongs to group d // (heads / groups) of the result.
    Besides the result it takes 4 tables of (batch, length, heads), and at most twice `SHARES` times the result's
    memory. The same numbers in every run on the same kind of GPU. Δ must be finite and ≥ 0, and a factor c · left below
    2^31.

    `precision` says how the tensor cores read the factors, which are made in float32; sums are of float32 always.
    Measured on an H200 with 1536 channels of 16 states and 1024 steps, the largest error against float64 relative to
    the largest entry, and that of the norm, were at most 1.5e-4 and 4e-5 with "tf32", 1.4e-3 and 7e-4 with "bf16", and
    2.6e-7 and 1.5e-7 with "tf32x3", which multiplies three times. With 96 channels both were 3e-4, 3e-3 and 4e-7.

    Raises:
        InputError: for an unknown precision.
        ValueError: when the groups do not divide the heads.
    """
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise InputError(f"unknown precision {precision!r}; known are {known}{did_you_mean(precision, PRECISIONS)}")
    heads = delta.shape[2]
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups do not divide {heads} heads")
    plan = _plan(b, delta, groups)
    out = delta.new_empty(plan.batch, groups, plan.length, plan.length)
    if out.numel():
        hopper = None
        if delta.device.type == "cuda" and plan.tile == 128 and plan.below and precision != "tf32x3":
            hopper = _hopper(delta.device.index)
        with torch.no_grad(), on(delta):
            _make(out, plan, b, c, delta, A, left, right, precision, hopper)
    return out


def takes(r: Any, around: Around) -> bool:
    """Whether `whole` makes the mean matrix of a recurrence with what stands around it."""
    if getattr(r, "beta", None) is not None or r.expected or r.shape[3] != 1:
        return False
    left = None if around.left is None else around.left.squeeze(-1)
    right = None if around.taps is None else around.taps[:, :, 0].squeeze(-1)
    if (r.D is not None and r.D.requires_grad) and torch.is_grad_enabled():
        return False
    return applicable(r.x, r.b, r.c, r.delta, r.A, left, right)


def whole(
    r: Any, groups: int, skip: bool, around: Around, precision: str | None = None
) -> Float[Tensor, "batch groups length length"]:
    """`mean` of a recurrence, with D on the diagonal for `skip` and with what stands around it, where `takes` says so.

    Every tap is a matrix of its own: what the input at s spreads to step s + i is the column s + i of the recurrence's.
    By default the tensor cores read float32 as torch's own products do: `torch.get_float32_matmul_precision()`
    "highest" is tf32x3, "high" tf32, "medium" bf16.
    """
    precision = precision or {"highest": "tf32x3", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")
    length, heads = r.shape[1:3]
    left = None if around.left is None else around.left.squeeze(-1)
    terms = (r.b, r.c, r.delta, r.A, left)
    if around.taps is None:
        out = mean(*terms, groups=groups, precision=precision)
    else:
        out = r.b.new_zeros(len(r.b), groups, length, length)
        for i in range(around.reach):
            arriving = torch.nn.functional.pad(around.taps[:, : length - i, i].squeeze(-1), (0, 0, i, 0))
            each = mean(*terms, arriving.contiguous(), groups=groups, precision=precision)
            out[..., : length - i] += each[..., i:]
    if skip and r.D is not None:
        for i, added in enumerate(diagonals(r, around)):
            by_group = added.unflatten(-1, (groups, heads // groups)).mean(-1)
            out.diagonal(-i, 2, 3).add_(by_group.transpose(1, 2))
    return out


class _Plan(NamedTuple):
    """How a matrix is cut into tiles of `tile` rows, and its channels into `chunks` a group, of at most `channels`;
    below the diagonal the chunks are shared among `splits` programs, on it among `strip_splits`."""

    batch: int
    length: int
    heads: int
    state: int
    groups: int
    bc_groups: int
    segment: int
    tile: int
    channels: int
    chunks: int
    splits: int
    strip_splits: int

    @property
    def tiles(self) -> int:
        """Tiles on the diagonal."""
        return -(-self.length // self.tile)

    @property
    def below(self) -> int:
        """Tiles below the diagonal."""
        return self.tiles * (self.tiles - 1) // 2

    @property
    def matrices(self) -> int:
        return self.batch * self.groups


def _plan(b: Tensor, delta: Tensor, groups: int) -> _Plan:
    (batch, length, heads), (bc_groups, state) = delta.shape, b.shape[2:]
    segment = math.gcd(heads // groups, heads // bc_groups) if heads else 1
    channels = min(CHANNELS, max(16, 1 << max(segment - 1, 0).bit_length()))
    chunks = heads // groups // segment * -(-segment // channels)
    tile = TILE
    while tile > BLOCK and 2 * length <= tile:
        tile //= 2
    plan = _Plan(batch, length, heads, state, groups, bc_groups, segment, tile, channels, chunks, 1, 1)
    return plan._replace(splits=_splits(plan), strip_splits=_strip_splits(plan))


def _splits(plan: _Plan) -> int:
    """Of the numbers of shares that the memory allows, the one whose programs leave the fewest processors idle."""
    programs = plan.below * plan.matrices
    if not programs:
        return 1
    best, least = 1, math.inf
    allowed = max(1, int(SHARES * plan.length**2 / (plan.below * plan.tile**2)))
    for splits in range(1, min(allowed, plan.chunks) + 1):
        time = -(-programs * splits // FILL) * -(-plan.chunks // splits) * (1 + 0.01 * splits)
        if time < least:
            best, least = splits, time
    return best


def _strip_splits(plan: _Plan) -> int:
    blocks = plan.matrices * -(-plan.length // BLOCK)
    allowed = max(1, SHARES * plan.length // plan.tile)
    return max(1, min(plan.chunks, allowed, 4 * FILL // max(blocks, 1)))


def _make(out, plan: _Plan, b, c, delta, A, left, right, precision: str, hopper: ModuleType | None) -> None:
    """`mean` into `out`, the tiles below the diagonal by the kernel of `hopper` where that is given."""
    kernel = kernels.loaded()
    batch, length, heads, state, groups, bc_groups, segment = plan[:7]
    tile, matrices = plan.tile, plan.matrices
    decays = torch.mul(A.T, math.log2(math.e), out=A.new_empty(state, heads))
    since, until, near, written = (delta.new_empty(batch, length, heads) for _ in range(4))
    totals = delta.new_empty(batch, plan.tiles, heads, dtype=torch.float64)
    before = delta.new_empty(batch, plan.tiles + 1, heads, dtype=torch.float64)
    factor = delta if right is None else right

    def sums(size: int, since: Tensor, halves: bool) -> None:
        kernel.sums[(-(-length // size), -(-heads // 32), batch)](
            *(delta, factor, since, until, written, totals, length, heads, *delta.stride(), *factor.stride()),
            BLOCK=size,
            CHANNELS=32,
            RIGHT=right is not None,
            HALVES=halves,
        )

    sums(tile, since, False)

    gate = delta if left is None else left
    cut = (length, heads, groups, heads // groups, heads // bc_groups, segment, plan.chunks)
    scale = groups / heads
    common = {"N": state, "STRIP": tile, "BD": plan.channels, "LEFT": left is not None, "PRECISION": precision}
    states = {"STATES": min(16, 1 << (state - 1).bit_length()), "FLOOR": FLOOR}

    def tiles(size: int, pairs: int, where: str, target: Tensor, splits: int, since: Tensor, until: Tensor) -> None:
        terms = (since, until, written, before, decays)
        rest = (gate, target, *target.stride()[:2], *cut, splits, scale)
        if where != "strip" and hopper is not None:
            bt, ct = (_turned(t, plan.tiles * size) for t in (b, c))
            hopper.tiles[(pairs * splits, matrices)](
                *(*terms, bt, ct, *rest, *bt.stride()[:3], *ct.stride()[:3], *gate.stride()),
                **common,
                **states,
                TILE=size,
                WHERE=where,
                STAGES=4,
                REGISTERS=80,
                num_warps=4,
            )
        else:
            kernel.tiles[(pairs * splits, matrices)](
                *(*terms, b, c, *rest, *b.stride(), *c.stride(), *gate.stride()),
                **common,
                **states,
                TILE=size,
                WHERE=where,
                num_warps=WARPS.get(size, 4),
            )

    # the small kernels first: the GPU is busy with them while the large one is prepared
    strip = out.new_empty(plan.strip_splits, matrices, length, tile)
    blocks = -(-length // BLOCK)
    kernel.triangles[(blocks * plan.strip_splits, matrices)](
        *(delta, written, decays, b, c, gate, strip, *strip.stride()[:2], *cut, plan.strip_splits, scale),
        *(*delta.stride(), *b.stride(), *c.stride(), *gate.stride()),
        **common,
        BLOCK=BLOCK,
        SPAN=SPAN,
        num_warps=2,
    )
    size = tile // 2
    while size >= BLOCK:
        if pairs := -(-length // size) // 2:
            sums(size, near, True)
            tiles(size, pairs, "strip", strip, plan.strip_splits, near, near)
        size //= 2
    packed = out.view(1, matrices, length, length)
    if plan.splits > 1:
        packed = out.new_empty(plan.splits, matrices, plan.below, tile, tile)
    if plan.below:
        kernel.starts[(-(-heads // 32), batch)](totals, before, plan.tiles, heads, STEP=TOGETHER, CHANNELS=32)
        tiles(tile, plan.below, "out" if plan.splits == 1 else "packed", packed, plan.splits, since, until)
    kernel.gather[(plan.tiles**2 * (tile // 32), matrices)](
        *(packed, strip, out, *packed.stride()[:2], *strip.stride()[:2]),
        *(length, plan.splits if plan.splits > 1 else 0, plan.strip_splits),
        TILE=tile,
        ROWS=32,
    )


def _turned(t: Tensor, length: int) -> Tensor:
    """`t` (batch, length, bc_groups, state) as (batch, bc_groups, state, length), zeros after its end."""
    turned = t.permute(0, 2, 3, 1)
    if length > t.shape[1]:
        turned = torch.nn.functional.pad(turned, (0, length - t.shape[1]))
    return turned.contiguous()


@functools.cache
def _hopper(index: int) -> ModuleType | None:
    """The module of the kernel for Hopper GPUs, where this GPU is one and the installed triton compiles it: Gluon, in
    which it is written, may change from version to version."""
    if torch.cuda.get_device_capability(index) != (9, 0):
        return None
    device = torch.device("cuda", index)
    one = torch.ones(1, 2 * TILE, 1, 1, device=device)
    try:
        from ssmscope.matrices import fused_hopper

        plan, out = _plan(one, one[..., 0], 1), one.new_empty(1, 1, 2 * TILE, 2 * TILE)
        with on(one):
            _make(out, plan, one, one, one[..., 0], one[0, :1, 0], None, None, "tf32", fused_hopper)
    except kernels.faults(ImportError, AttributeError, TypeError, ValueError, AssertionError):
        return None
    return fused_hopper


def _attempt(one: Tensor) -> Tensor:
    one = one.new_ones(1, 2 * TILE, 1, 1)
    return mean(one, one, one[..., 0], one[0, :1, 0])


kernels = Kernels("ssmscope.matrices.fused_kernels", "the fused attention", _attempt)
available, why_not = kernels.available, kernels.why_not
