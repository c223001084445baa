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

PRECISIONS = {"highest": 2, "high": 1}  # the parts of 11 bits of which the operands of the products are
TILE = 128  # rows of the tiles; their sums fill half the registers of a GPU's processor
NEAR = 8  # rows of the triangles on the diagonal
CHANNELS = 32  # in one step of the tiles' products, times one state
WIDE = 32  # in one step of what is on the diagonal
ROWS = 64  # of pairs in a program for the triangles
LAUNCH: dict[str, dict[str, Any]] = {
    "near": {"num_warps": 4},
    "levels": {"num_warps": 4, "num_stages": 1},
}
HOPPER = {1: {"STAGES": 4, "REGISTERS": 80}, 2: {"STAGES": 3, "REGISTERS": 72}}  # by the parts of an operand
UNROLLED = {"near": 8, "levels": 2}  # states of a step of the loop over them
FILL = 132  # programs of the tiles that run at once
SHARES = 4  # the most matrices' worth of memory that sums of shares of the channels may take
TOGETHER = 64  # tiles whose sums of steps are summed at a time
FLOOR = -126.0  # float32 knows no 2^-127 but for subnormal numbers
HIDDEN = 1e4  # as `fused_diagonal_kernels.HIDDEN`
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
    precision: str = "highest",
) -> Float[Tensor, "batch groups length length"]:
    """The mean over each group's channels d of left_td right_sd Σ_n c_tn exp(A_dn Σ_{s<r≤t} Δ_rd) Δ_sd b_sn for s ≤ t,
    0 above the diagonal (Differential Mamba, Eq. 8), where `applicable`.

    Head d reads group d // (heads / bc_groups) of b and c, and belongs to group d // (heads / groups) of the result.
    Besides the result it takes 4 tables of (batch, length, heads), and at most twice `SHARES` times the result's
    memory. The same numbers in every run on the same kind of GPU. Δ must be finite and ≥ 0, and a factor c · left below
    2^31.

    `precision`, as of torch's products, says of how many parts the tensor cores read the factors, which are made in
    float32: "highest" of two (22 bits), "high" of one (11 bits, as TF32). Sums, and pairs of steps less than `NEAR`
    apart, are of float32 always.

    Raises:
        InputError: for an unknown precision.
        ValueError: when the groups do not divide the heads.
    """
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise InputError(f"unknown precision {precision!r}; known are {known}{did_you_mean(precision, PRECISIONS)}")
    batch, length, heads = delta.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups do not divide {heads} heads")
    plan = _plan(batch, length, heads, b.shape[3], groups, b.shape[2], TILE)
    out = delta.new_empty(plan.batch, groups, plan.length, plan.length)
    if out.numel():
        hopper = None
        if delta.device.type == "cuda" and plan.tile == 128 and plan.below:
            hopper = _hopper(delta.device.index, PRECISIONS[precision])
        with torch.no_grad(), on(delta):
            _make(out, plan, b, c, delta, A, left, right, PRECISIONS[precision], hopper)
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
    The default precision is that of torch's own products, `torch.get_float32_matmul_precision()`; "medium" is "high".
    """
    precision = precision or ("highest" if torch.get_float32_matmul_precision() == "highest" else "high")
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
    """How a matrix is cut into tiles of `tile` rows, and its channels into chunks; below the diagonal the chunks are
    shared among `splits` programs, on it among `strip_splits`."""

    batch: int
    length: int
    heads: int
    state: int
    groups: int
    bc_groups: int
    tile: int
    splits: int = 1
    strip_splits: int = 1

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

    @property
    def segment(self) -> int:
        """Neighbouring channels that have both groups in common."""
        return math.gcd(self.heads // self.groups, self.heads // self.bc_groups) if self.heads else 1

    def cut(self, most: int) -> tuple[int, int]:
        """Channels of a chunk, a power of two of at least 16 and at most `most`, and the chunks of a group: each lies
        within a segment."""
        channels = min(most, max(16, 1 << max(self.segment - 1, 0).bit_length()))
        return channels, self.heads // self.groups // self.segment * -(-self.segment // channels)


def _plan(batch: int, length: int, heads: int, state: int, groups: int, bc_groups: int, tile: int) -> _Plan:
    plan = _Plan(batch, length, heads, state, groups, bc_groups, tile)
    return plan._replace(splits=_splits(plan), strip_splits=_strip_splits(plan))


def _splits(plan: _Plan) -> int:
    """As many shares as let each processor take three or four programs after the other, so that few are idle at the
    end, even where only the tiles next to the diagonal have much to do."""
    allowed = max(1, int(SHARES * plan.length**2 / max(plan.below * plan.tile**2, 1)))
    wanted = -(-7 * FILL // max(2 * plan.below * plan.matrices, 1))
    return max(1, min(wanted, allowed, plan.cut(CHANNELS)[1]))


def _strip_splits(plan: _Plan) -> int:
    allowed = max(1, SHARES * plan.length // plan.tile)
    wanted = FILL // (plan.tiles * plan.matrices)
    return max(1, min(wanted, allowed, plan.cut(WIDE)[1]))


def _make(out, plan: _Plan, b, c, delta, A, left, right, terms: int, hopper: ModuleType | None) -> None:
    """`mean` into `out`, the tiles below the diagonal by the kernel of `hopper` where that is given."""
    kernel = kernels.loaded()
    batch, length, heads, state, groups, bc_groups, tile, splits, strip_splits = plan
    matrices, tiles = plan.matrices, plan.tiles
    since, rest, until, written = (delta.new_empty(batch, length, heads) for _ in range(4))
    totals = delta.new_empty(batch, tiles, heads, dtype=torch.float64)
    factor = delta if right is None else right
    kernel.sums[(tiles, -(-heads // 32), batch)](
        *(delta, factor, since, rest, until, written, totals, length, heads, *delta.stride(), *factor.stride()),
        BLOCK=tile,
        CHANNELS=32,
        RIGHT=right is not None,
    )
    decays = torch.mul(A.T, math.log2(math.e), out=A.new_empty(state, heads))
    # what is read along the length lies side by side
    b, c = (_turned(t, tiles * tile) for t in (b, c))
    gate = delta if left is None else left
    cut = (length, heads, groups, heads // groups, heads // bc_groups)
    scale = groups / heads
    strides = (*b.stride(), *c.stride(), *gate.stride())
    common: dict[str, Any] = {"N": state, "TILE": tile, "LEFT": left is not None}

    # the small kernels first: the GPU is busy with them while the large one is prepared
    strip = out.new_empty(strip_splits, matrices, length, tile)
    channels, chunks = plan.cut(WIDE)
    diagonal = (since, rest, written, decays, b, c, gate, strip, *strip.stride()[:2], *cut, plan.segment, chunks)
    kernel.near[(-(-length // ROWS) * strip_splits, NEAR // 2 + 1, matrices)](
        *(*diagonal, strip_splits, scale, *strides),
        **common,
        ROWS=ROWS,
        BD=channels,
        NEAR=NEAR,
        UNROLLED=math.gcd(state, UNROLLED["near"]),
        **LAUNCH["near"],
    )
    levels = (min(tile, length) - 1).bit_length() - NEAR.bit_length() + 1
    if levels > 0:
        kernel.levels[(tiles * strip_splits, levels, matrices)](
            *(*diagonal, strip_splits, scale, *strides),
            **common,
            BD=channels,
            NEAR=NEAR,
            UNROLLED=math.gcd(state, UNROLLED["levels"]),
            TERMS=terms,
            **LAUNCH["levels"],
        )
    packed = out.view(1, matrices, length, length)
    if splits > 1:
        packed = out.new_empty(splits, matrices, plan.below, tile, tile)
    if plan.below:
        before = delta.new_empty(batch, tiles + 1, heads, dtype=torch.float64)
        kernel.starts[(-(-heads // 32), batch)](totals, before, tiles, heads, STEP=TOGETHER, CHANNELS=32)
        units, gaps = delta.new_empty(matrices, 2, length), delta.new_empty(matrices, plan.below)
        kernel.bounds[(-(-length // 8) + plan.below, matrices)](
            *(since, until, written, before, decays.amax(0), b, c, gate, units, gaps, *cut, tiles, *strides),
            **common,
            ROWS=8,
            BD=128,
        )
        channels, chunks = plan.cut(CHANNELS)
        given = (since, until, written, before, decays, b, c, gate, units, gaps, packed, *packed.stride()[:2])
        common |= {"BD": channels, "TERMS": terms, "FLOOR": FLOOR, "PACKED": splits > 1}
        common["STATES"] = min(16, 1 << (state - 1).bit_length())
        run, how = kernel.tiles, {"num_warps": 8 if tile == 128 else 4}
        if hopper is not None:
            run, how = hopper.tiles, {"num_warps": 4, **HOPPER[terms]}
            common["HIDDEN"] = HIDDEN
        rest_given = (*cut, plan.segment, chunks, splits, scale, *strides)
        run[(plan.below * splits, matrices)](*given, *rest_given, **common, **how)
    kernel.gather[(tiles**2 * (tile // 8), matrices)](
        *(packed, strip, out, *packed.stride()[:2], *strip.stride()[:2]),
        *(length, splits if splits > 1 else 0, strip_splits),
        TILE=tile,
        ROWS=8,
    )


def _turned(t: Tensor, length: int) -> Tensor:
    """`t` (batch, length, bc_groups, state) with its steps side by side in memory, zeros after its end."""
    turned = t.new_empty(t.shape[0], *t.shape[2:], length)
    turned[..., : t.shape[1]] = t.permute(0, 2, 3, 1)
    if length > t.shape[1]:
        turned[..., t.shape[1] :] = 0
    return turned.permute(0, 3, 1, 2)


@functools.cache
def _hopper(index: int, terms: int) -> ModuleType | None:
    """The module of the kernel for Hopper GPUs, where this GPU is one and the installed triton makes of it what gives
    the right numbers: Gluon, in which it is written, may change from version to version."""
    if torch.cuda.get_device_capability(index) != (9, 0):
        return None
    device, length, heads, state = torch.device("cuda", index), 2 * TILE, 40, 3
    b = torch.arange(length * state, device=device, dtype=torch.float32).sin().view(1, length, 1, state)
    c = torch.arange(length * state, device=device, dtype=torch.float32).cos().view(1, length, 1, state)
    delta, A = c.new_ones(1, length, heads), c.new_zeros(heads, state)
    try:
        from ssmscope.matrices import fused_hopper

        plan, out = _plan(1, length, heads, state, 1, 1, TILE), c.new_empty(1, 1, length, length)
        with on(c):
            _make(out, plan, b, c, delta, A, None, None, terms, fused_hopper)
    except kernels.faults(ImportError, AttributeError, TypeError, ValueError, AssertionError):
        return None
    expected = (c[0, :, 0].double() @ b[0, :, 0].double().mT).tril()
    near = (out[0, 0] - expected).abs().max() <= (1e-5 if terms == 2 else 1e-2)
    return fused_hopper if near else None


def _attempt(one: Tensor) -> Tensor:
    one = one.new_ones(1, 2 * TILE, 1, 1)
    return mean(one, one, one[..., 0], one[0, :1, 0])


kernels = Kernels("ssmscope.matrices.fused_kernels", "the fused attention", _attempt)
available, why_not = kernels.available, kernels.why_not
