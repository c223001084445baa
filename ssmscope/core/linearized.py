"""Layers as linear maps of their input: recurrences with gates, activations, norms and steps frozen.

A state-space layer is linear in its input u, through the recurrence's input, once everything else is frozen (Ali et
al., The hidden attention of Mamba models, 2024; Zimerman et al., Explaining modern gated-linear RNNs via a unified
implicit attention formulation, 2024):

    source = enter(u),  values = activation ⊙ (kernel ∗ source + bias),  y = weight ⊙ (α + D)(filter ∗ values),
    output = project(gate ⊙ y) + rest,

summed over the paths of a layer that has several recurrences. SiLU is a diagonal, silu(c) / c = σ(c), a norm the factor
that it has at its values. This is exact, the convolution's bias, D and states before the first position included:
`LinearizedLayer.matvec(u) + LinearizedLayer.bias` is the layer's own output. The matrices of a path act on `values`
(level "ssm") or on `source` (level "block"), channel by channel; projections mix channels and are in no matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu
from ssmscope import ops
from ssmscope.core.affine import is_plain
from ssmscope.core.intercept import evaluating
from ssmscope.core.paths import InputMap, OutputMap, Path
from ssmscope.errors import InputError, Unanswerable, did_you_mean
from ssmscope.ops import Recurrence
from ssmscope.ops.terms import GateAndTaps, gate_and_taps, mean_over_heads
from ssmscope.outline import Outlined

__all__ = ["LEVELS", "InputMap", "LinearizedLayer", "OutputMap", "Path", "as_diagonal", "is_elementwise", "vanishes"]

LEVELS = ("ssm", "block")
MAX_MATRIX_NUMBERS = 2**24


def check_level(level: str) -> None:
    """Raise InputError if there is no such level."""
    if level not in LEVELS:
        raise InputError(f"unknown level {level!r}; allowed are 'ssm' and 'block'{did_you_mean(str(level), LEVELS)}")


def undeclared(layer: str) -> Unanswerable:
    """Return the refusal of a question about what stands around the recurrence of a layer that was adapted."""
    said = f"nothing says what stands around the recurrence of {layer}: adapt it with form=…, or ask about the"
    return Unanswerable(f"{said} recurrence alone, level='ssm'")


@dataclass(frozen=True, eq=False)
class LinearizedLayer(Outlined):
    """Layer's output as a linear map of its input u (batch, length, width), everything else frozen as it is at `u`.

    Attributes:
        paths: they are summed.
        rest: (batch, length, width), the part of the output that comes through no recurrence; None for none.
        joined: True if the paths share their channels, added before the gate; else each path has its own.
        rest_map: (u, Σ of the paths' outputs) → `rest`, where that is not a constant, as a linear map of both, without
            constants or, when its third argument is true, with them.
        undeclared: name of the layer's class where nothing is known of what stands around its recurrences: it has maps
            of these alone.
    """

    u: Float[Tensor, "batch length width"]
    paths: tuple[Path, ...]
    rest: Tensor | None = None
    joined: bool = True
    rest_map: Callable[[Tensor, Tensor, bool], Tensor] | None = None
    undeclared: str | None = None

    @property
    def channels(self) -> tuple[int, int]:
        """Number of heads, and the width of each."""
        return self.paths[0].recurrence.shape[2], self.paths[0].recurrence.shape[3]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the layer is the sum of; empty if it is one."""
        names = tuple(dict.fromkeys(path.name for path in self.paths))
        return names if len(names) > 1 else ()

    def matvec(self, v: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """Return the frozen map of any input in the time of a scan, without materializing the matrix."""
        return torch.stack([path.forward(v, biased=False) for path in self.paths]).sum(0)

    def vecmat(self, w: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """Return wᵀ M, the effect of every input on Σ w ⊙ output, in the time of a backward pass."""
        with torch.enable_grad():
            v = torch.zeros_like(self.u, requires_grad=True)
            (found,) = torch.autograd.grad(self.matvec(v), v, w)
        return found

    @property
    def bias(self) -> Float[Tensor, "batch length width"]:
        """Constant of the map: the layer's output is `matvec(u) + bias`."""
        found = torch.stack([path.forward(torch.zeros_like(self.u), biased=True) for path in self.paths]).sum(0)
        return found if self.rest is None else found + self.rest

    def attention(
        self,
        level: str = "block",
        *,
        groups: int = 1,
        absolute: bool = False,
        skip: bool = True,
        rows: Sequence[int] | None = None,
        part: str | None = None,
    ) -> Float[Tensor, "batch groups rows length"]:
        """Return the layer's implicit attention, the signed mean over channels or the mean of absolute values; see
        `ops.attention`.

        It is that of the recurrence's input at the level "ssm", of the convolution's, with gate and norm, at "block";
        or of one of `parts` alone. Raises InputError for another level or part, ValueError as `ops.attention`.
        """
        paths = self.chosen(level, part)
        if absolute and len(paths) > 1 and self.joined:
            return self._joint_absolute(paths, level, groups, skip, rows)
        each = [path.attention(level, groups=groups, absolute=absolute, skip=skip, rows=rows) for path in paths]
        return torch.stack(each).sum(0)

    def pooled_attention(
        self, level: str, cells: int, *, groups: int = 1, skip: bool = True, part: str | None = None
    ) -> Float[Tensor, "batch groups cells cells"]:
        """Return `attention` pooled into `cells` × `cells` cells, see `ops.pooled_attention`."""
        paths = self.chosen(level, part)
        return torch.stack([path.pooled_attention(level, cells, groups=groups, skip=skip) for path in paths]).sum(0)

    def sink(
        self, level: str = "block", *, groups: int = 1, absolute: bool = False, part: str | None = None
    ) -> Float[Tensor, "batch groups length"] | None:
        """Return each position's reading of the initial states, as a column of `attention`; None if these are 0."""
        found = [sink for path in self.chosen(level, part) if (sink := path.sink(level)) is not None]
        if not found:
            return None
        found = [sink.abs() for sink in found] if absolute and not self.joined else found
        total = torch.stack(found).sum(0)
        total = total.abs() if absolute else total
        return rearrange(total, "b t (g h) p -> b g t (h p)", g=groups).mean(-1)

    def contributions(self, gradient: Float[Tensor, "batch length width"]) -> LinearizedLayer:
        """Return the layer as a map whose entries [t, s], summed over channels, are the contributions of position s to
        Σ gradient_t · output_t through position t: attention × gradient. Over all t and s, and over `sink`, it is
        Σ gradient ⊙ (output − rest) less the contribution of the convolution's bias."""
        paths = []
        for path in self.paths:
            with torch.enable_grad():
                y = torch.zeros_like(path.input_map.source, requires_grad=True)
                (pulled,) = torch.autograd.grad(path.finish(y), y, gradient)
            scaled = replace(path.output_map, gate=pulled, scale=None)
            paths.append(_Weighed(**{**vars(path), "output_map": scaled}))
        return replace(self, paths=tuple(paths))

    def of_text(self, row: int, length: int) -> LinearizedLayer:
        """Return the layer on one sequence of the batch, up to a length, for maps and not for `matvec`."""
        return replace(self, u=self.u[row : row + 1, :length], paths=tuple(p.of_text(row, length) for p in self.paths))

    def chosen(self, level: str, part: str | None) -> tuple[Path, ...]:
        """Return the paths of a part, or all for None. Raises InputError for an unknown part or level."""
        check_level(level)
        if level == "block" and self.undeclared is not None:
            raise undeclared(self.undeclared)
        if part is None:
            return self.paths
        found = tuple(path for path in self.paths if path.name == part)
        if not found:
            known = ", ".join(map(repr, self.parts)) or "none: the layer is one"
            raise InputError(f"no part {part!r}; the parts of this layer are {known}{did_you_mean(part, self.parts)}")
        return found

    def _joint_absolute(
        self, paths: tuple[Path, ...], level: str, groups: int, skip: bool, rows: Sequence[int] | None
    ) -> Tensor:
        """Return the mean of |Σ over paths| over channels, channel by channel."""
        width, length, around = self.channels[1], self.u.shape[1], [path.gate_and_taps(level) for path in paths]
        nothing = gate_and_taps(paths[0].recurrence.x, groups, None, None)  # It checks the groups.

        def sums(_: Recurrence, __: GateAndTaps, heads: slice) -> Tensor:
            total = torch.zeros((), dtype=self.u.dtype, device=self.u.device)
            for p in range(width):
                each = [
                    ops.attention(
                        path.recurrence.of_heads(heads.start, heads.stop).of_width(p),
                        groups=heads.stop - heads.start,
                        skip=skip,
                        rows=rows,
                        left=None if left is None else left[:, :, heads, p : p + 1],
                        taps=None if taps is None else taps[..., heads, p : p + 1],
                    )
                    for path, (left, taps) in zip(paths, around)
                ]
                total = total + torch.stack(each).sum(0).abs().sum(1)
            return total / width

        at_once = max(1, MAX_MATRIX_NUMBERS // max(1, len(self.u) * length * (length if rows is None else len(rows))))
        return mean_over_heads(paths[0].recurrence, nothing, groups, sums, at_once=at_once)


@dataclass(frozen=True, eq=False)
class _Weighed(Path):
    """Path whose block-level maps are multiplied by its source: contributions instead of coefficients."""

    def _taps(self) -> Tensor | None:
        by_head = self.output_map.centred == self.recurrence.shape[3]
        taps, source = super()._taps(), self.input_map.source
        source = (self._centred(source) if by_head else source).unsqueeze(2)
        return source if taps is None else taps * source


def as_diagonal(act: Callable[[Tensor], Tensor], c: Tensor) -> Tensor:
    """Return act(c) / c, σ(c) for SiLU. Raises InputError for an activation that is not 0 at 0, and so no diagonal."""
    plain = is_plain(act, type(act)) if isinstance(act, nn.Module) else act is silu
    if plain and (act is silu or isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"):
        return torch.sigmoid(c)
    if not vanishes(act, c):
        raise InputError(f"the activation {act} is not 0 at 0: it is no factor, and the layer not a linear map")
    slope = (act(torch.full_like(c[:1], 1e-6, dtype=torch.float64)) / 1e-6).to(c)
    return torch.where(c == 0, slope, act(c) / torch.where(c == 0, 1, c))


def vanishes(act: Callable[[Tensor], Tensor], c: Tensor) -> bool:
    """Return True if an activation of tensors like `c` is 0 at 0."""
    return act is silu or not act(torch.zeros_like(c[:1], dtype=torch.float64)).any()  # A hook may look at its shape.


def is_elementwise(module: nn.Module) -> bool:
    """Return True if a module without parts maps each number by itself, as activations do."""
    if next(module.children(), None) is not None:
        return False
    row = torch.tensor([[-3.0, -0.7, 0.2, 0.9, 2.5]])
    row = row.to(next(module.parameters(), row))
    try:
        with torch.no_grad(), evaluating(module):
            apart = torch.cat([module(value.view(1, 1)) for value in row[0]], dim=-1)
            return bool(torch.allclose(module(row), apart, rtol=0, atol=1e-2 if row.element_size() < 4 else 1e-5))
    except Exception:  # A module from outside may want anything but one tensor.
        return False
