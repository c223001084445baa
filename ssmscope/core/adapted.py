"""Layers of one's own class: their terms from a function of layer and input, their output checked against their own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from ssmscope.core.complex_terms import as_real, complex_output, is_complex
from ssmscope.core.forms import Form, at_least_float32, mask_padding
from ssmscope.core.known_models import LAYERS
from ssmscope.core.linearized import LinearizedLayer, undeclared
from ssmscope.core.mixers import full_name, read_as, reads_both_ways
from ssmscope.core.paths import InputMap, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace, last_inputs, mapped
from ssmscope.errors import InputError, check_whole
from ssmscope.ops import DeltaRecurrence, Recurrence, Scan
from ssmscope.ops.recurrence import OVER_TIME

HELD = ("x", "delta", "log_a", "beta", "e")
"""Terms that are 0 where a recurrence writes nothing and holds its state."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest difference from a layer's own output, in units of its largest number; 3e-2 in half precision. Some modules
compute in float32 in between whatever their dtype is."""


@dataclass(frozen=True, eq=False)
class Terms:
    """Terms of a layer at its input u (batch, length, width), for `adapt`.

    Attributes:
        recurrences: one or several `Recurrence` or `DeltaRecurrence`, whose outputs are handed to `output`. A
            `Recurrence` may be complex: of real x its output is the real part, of complex x, with one state a head, it
            is complex.
        conv_input, z: of a layer with a form, the inputs of its convolution and of its gate's activation, (batch,
            length, channels).
    """

    recurrences: Recurrence | DeltaRecurrence | Sequence[Recurrence | DeltaRecurrence]
    conv_input: Tensor | None = None
    z: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AdaptedState(LayerState):
    """State of an adapted layer: `conv` are the last inputs u, of the `read` (batch,) positions so far; `angles` those
    by which complex states are turned, (batch, heads, states) of each recurrence that has some."""

    read: Tensor | None = None
    angles: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Adapted:
    """Adapter of a class of layers, see `adapt` for its fields."""

    terms: Callable[..., Any]
    own_output: Callable[..., Tensor] | None
    form: Form | None
    reach: int
    BIDIRECTIONAL: bool | Callable[[Any], bool]
    counts: bool
    """True if `terms` is told how many positions came before."""
    channels_first: bool | Callable[[Any], bool] = False
    grids: WeakKeyDictionary[Any, tuple[int, ...]] = field(default_factory=WeakKeyDictionary)
    """Numbers of positions along the axes of a layer's latest input, e.g. (height, width)."""
    checked: dict[str, int] = field(default_factory=dict)
    """`after`, how much a forward pass gives after its output, such as a state, once a layer that does was checked."""

    def flat(self, mixer: Any, given: Tensor) -> Tensor:
        """Return a layer's input or output as (batch, length, width), the positions of a grid row by row."""
        given = given.movedim(1, -1) if self.has_channels_first(mixer) else given
        return given.flatten(1, -2)

    def entered(self, mixer: Any, given: Tensor) -> Tensor:
        """Return a layer's input as u (batch, length, width), and note the grid of its positions."""
        self.grids[mixer] = tuple(given.shape[2:] if self.has_channels_first(mixer) else given.shape[1:-1])
        return self.flat(mixer, given)

    def shaped(self, mixer: Any, u: Tensor) -> Tensor:
        """Return u, or an output (batch, length, width), as the layer takes and gives it. Raises InputError for other
        positions than those of its grid."""
        grid = self.grids.get(mixer, ())
        if len(grid) > 1:
            if u.shape[1] != prod(grid):
                said = (
                    f"a {type(mixer).__name__} reads a grid of {' × '.join(map(str, grid))} positions as a whole, and"
                )
                raise InputError(f"{said} cannot be read for {u.shape[1]} positions, padded or from a state")
            u = u.unflatten(1, grid)
        return u.movedim(-1, 1) if self.has_channels_first(mixer) else u

    def has_channels_first(self, mixer: Any) -> bool:
        """Return True if a layer's input has its channels before its positions."""
        return self.channels_first(mixer) if callable(self.channels_first) else self.channels_first

    def returned(self, output: Tensor) -> Any:
        """Return what the layer's own forward pass gives: its output, alone or before None in place of states."""
        after = self.checked.get("after")
        return output if after is None else (output, *(None,) * after)

    def compute_terms(
        self, mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
    ) -> LayerTrace:
        """Return the layer's terms; at padding the states are held."""
        mask = None if mask is None or bool(mask.all()) else mask.bool()
        u = mask_padding(u, mask)
        extras: dict[str, Tensor] = {}
        if state is not None and (self.reach > 1 or self.counts):
            assert isinstance(state, AdaptedState) and state.read is not None
            before = u[:, :0] if state.conv is None else state.conv.to(u)
            extras = {"before": before, "read": state.read}
        terms = partial(self._terms, mixer)
        found = self._by_rows(u, extras, terms) if self._one_way(mixer, mask) else _by_lengths(mask, terms, u)
        recurrences = tuple(found.recurrences)
        if not self._one_way(mixer, mask):  # An order is that of all positions.
            orders = [each.order for each in terms(u, 0, 0).recurrences]
            recurrences = tuple(replace(each, order=order) for each, order in zip(recurrences, orders))
        if mask is not None:
            recurrences = tuple(_held(each, mask) for each in recurrences)
        tail = getattr(found, "tail", None)
        real: list[Recurrence | DeltaRecurrence] = []
        angles = iter(state.angles if isinstance(state, AdaptedState) else ())
        for at, each in enumerate(recurrences):
            if isinstance(each, Recurrence) and is_complex(each):
                each, extras[f"angles {at}"], read = as_real(each, next(angles, None))
                extras |= {} if read is None else {f"read {at}": read}
            real.append(each)
        start = None if state is None else state.ssm
        return LayerTrace(
            u, tuple(real), mask, found.conv_input, tail, z=found.z, initial=start, reach=self.reach, extras=extras
        )

    def _terms(self, mixer: Any, u: Tensor, cut: int, start: int) -> Any:
        own = self.shaped(mixer, u)
        given = self.terms(mixer, own, start) if self.counts else self.terms(mixer, own)
        found = given if isinstance(given, Terms) else Terms(given)
        several: Any = found.recurrences
        several = (several,) if isinstance(several, Recurrence | DeltaRecurrence) else tuple(several)
        for each in several:
            if not isinstance(each, Recurrence | DeltaRecurrence) or each.x.shape[:2] != u.shape[:2]:
                of = f" of {tuple(each.x.shape[:2])}" if isinstance(each, Recurrence) else ""
                said = f"the terms of {type(mixer).__name__} hold a {type(each).__name__}{of}, where a Recurrence"
                raise InputError(f"{said} of {u.shape[0]} sequences of {u.shape[1]} positions was expected")
        several = tuple(mapped(each, at_least_float32) for each in several)  # as all recurrences are run
        return _cut(Terms(several, found.conv_input, found.z), cut, self.reach - 1)

    def output(self, mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
        """Return the layer's output from its recurrences'."""
        if self.form is not None:
            return self.form.output(mixer, layer, scans)
        assert self.own_output is not None
        scans = layer.scan() if scans is None else scans
        ys = [scan.y.to(layer.u.dtype) for scan in scans]
        factors = [layer.extras.get(f"read {at}") for at in range(len(ys))]
        ys = [(y if read is None else complex_output(y, read)).flatten(2) for y, read in zip(ys, factors)]
        give, told = self.own_output, len(inspect.signature(self.own_output).parameters) > 3

        def whole(u: Tensor, cut: int, start: int, *ys: Tensor) -> Tensor:
            given = (self.shaped(mixer, u), [pad(y, (0, 0, cut, 0)) for y in ys], *[start] * told)
            found: Any = give(mixer, *given)
            if not isinstance(found, Tensor):
                said = f"the output function of {type(mixer).__name__} returns a {type(found).__name__}"
                raise InputError(f"{said}; it should return the layer's output, one tensor")
            return self.flat(mixer, found)[:, cut:]

        if self._one_way(mixer, layer.mask):
            return self._by_rows(layer.u, layer.extras, whole, *ys)
        return _by_lengths(layer.mask, whole, layer.u, *ys)

    def _one_way(self, mixer: Any, mask: Tensor | None) -> bool:
        """Return True if padding on the right is read by nothing before it."""
        return mask is None or not reads_both_ways(mixer)

    def state_after(self, mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> LayerState:
        """Return the last inputs, and the states of the recurrences."""
        before, read = layer.extras.get("before"), layer.extras.get("read")
        real = layer.u.new_full(layer.u.shape[:1], layer.u.shape[1], dtype=torch.long)
        real = real if layer.mask is None else layer.mask.sum(1)
        read = real if read is None else real + read
        conv = last_inputs(layer.u, self.reach, before, layer.mask) if self.reach > 1 else None
        angles = tuple(t[:, -1] for name, t in layer.extras.items() if name.startswith("angles"))
        return AdaptedState(conv, tuple(scan.state for scan in scans), read, angles)

    def _by_rows(self, u: Tensor, extras: Any, compute: Callable[..., Any], *others: Tensor) -> Any:
        """Return compute(u, cut, start, …) for u after the `cut` inputs before it that are needed, whose first is at
        position `start`: together for rows of which these are the same."""
        if "read" not in extras:
            return compute(u, 0, 0, *others)
        before, read = extras["before"], extras["read"]
        kinds = read if self.counts else read.clamp(max=self.reach - 1)
        found, places = [], []
        for number in kinds.unique().tolist():
            rows, cut = (kinds == number).nonzero()[:, 0].to(u.device), min(number, self.reach - 1)
            whole = torch.cat([before[rows, before.shape[1] - cut :], u[rows]], 1)
            found.append(compute(whole, cut, number - cut, *(t[rows] for t in others)))
            places.append(rows)
        return found[0] if len(found) == 1 else _joined(found, torch.cat(places).argsort())

    def linearized(self, mixer: Any, layer: LayerTrace) -> LinearizedLayer:
        """Return the layer as a linear map: of a layer without a form, its recurrences alone."""
        if self.form is not None:
            several = layer.recurrences
            if len(several) == 1:
                return self.form.linearized(mixer, layer)
            entry = self.form.input_map(mixer, layer)
            named = [(each, f"recurrence {at}") for at, each in enumerate(several)]
            return self.form.linearized(mixer, layer, lambda out: [Path(r, entry, out, name) for r, name in named])
        name = type(mixer).__name__

        def refuse(*_: Any) -> Tensor:
            raise undeclared(name)

        around = OutputMap(refuse)
        paths = [
            Path(each, InputMap(each.x.flatten(2), refuse), around, f"recurrence {at}")
            for at, each in enumerate(layer.recurrences)
        ]
        paths = paths if len(paths) > 1 else [replace(paths[0], name="")]
        return LinearizedLayer(layer.u, tuple(paths), joined=False, undeclared=name)


@dataclass(frozen=True, eq=False)
class _CutTerms(Terms):
    tail: Tensor | None = None


def _cut(found: Terms, cut: int, kept: int) -> _CutTerms:
    """Return the terms from position `cut` on, with the convolution's `kept` inputs before it."""
    if not cut:
        return _CutTerms(found.recurrences, found.conv_input, found.z)
    before = None if found.conv_input is None else found.conv_input[:, :cut]
    tail = None if before is None else pad(before, (0, 0, kept - cut, 0))
    conv, z = (None if t is None else t[:, cut:] for t in (found.conv_input, found.z))
    return _CutTerms(tuple(each.between(cut) for each in found.recurrences), conv, z, tail)  # type: ignore[union-attr]


def _by_lengths(mask: Any, compute: Callable[..., Any], u: Tensor, *others: Tensor) -> Any:
    """Return compute(u, 0, 0, …) of each row without its padding, filled up with zeros."""
    lengths = mask.sum(1)
    found, places = [], []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0].to(u.device)
        one = compute(u[rows, :length], 0, 0, *(t[rows, :length] for t in others))
        found.append(_filled(one, mask.shape[1] - length))
        places.append(rows)
    return _joined(found, torch.cat(places).argsort())


def _filled(found: Any, number: int) -> Any:
    if isinstance(found, Tensor):
        return pad(found, (0, 0) * (found.ndim - 2) + (0, number))
    if isinstance(found, tuple):
        return tuple(_filled(each, number) for each in found)
    if isinstance(found, Recurrence | DeltaRecurrence):
        present = {name: t for name in OVER_TIME if (t := getattr(found, name, None)) is not None}
        return replace(found, order=None, **{name: _filled(t, number) for name, t in present.items()})
    if found is None:
        return None
    return replace(found, **{each.name: _filled(getattr(found, each.name), number) for each in fields(found)})


def _joined(found: Sequence[Any], order: Tensor) -> Any:
    if isinstance(found[0], Tensor):
        return torch.cat(list(found))[order]
    if isinstance(found[0], tuple):
        return tuple(_joined(each, order) for each in zip(*found))
    if found[0] is None:
        return None
    over = OVER_TIME if isinstance(found[0], Recurrence | DeltaRecurrence) else [one.name for one in fields(found[0])]
    present = {one.name for one in fields(found[0])}.intersection(over)
    return replace(found[0], **{name: _joined([getattr(each, name) for each in found], order) for name in present})


def _held(recurrence: Any, mask: Tensor) -> Any:
    """Return a recurrence that writes nothing and holds its state where `mask` (batch, length) is False."""
    given = {name: getattr(recurrence, name, None) for name in HELD}
    return replace(recurrence, **{name: mask_padding(t, mask) for name, t in given.items() if t is not None})


def adapt(
    kind: type[nn.Module],
    *,
    terms: Callable[..., Any],
    output: Callable[..., Tensor] | None = None,
    form: Form | None = None,
    reach: int = 1,
    both_ways: bool = False,
    channels_first: bool = False,
) -> None:
    """Have layers of a class, and of those derived from it, read as recurrences. `load` checks a model's adapted layers
    against their own forward pass. A package declares an adapter as an entry point of `ssmscope.layers` instead.

    Args:
        kind: class of the layers, whose forward pass takes u (batch, length, width), or (batch, height, width,
            channels), and gives one tensor like it, alone or first of a tuple whose rest the network does not use.
        terms: function (layer, u) that returns the layer's recurrences, or `Terms`, whose positions are those of u row
            by row; one of (layer, u, start) is also told how many positions came before the first of u, in runs that go
            on from a state.
        output: function (layer, u, ys) that returns the layer's output from u and its recurrences' outputs, a list of
            (batch, length, channels); one of (layer, u, ys, start) is told the position too.
        form: in place of `output`, the declaration of what stands around the recurrence, from which the output follows
            and, unlike from a function, the map from tokens to outputs: relevance (lrp) and block attention need it.
        reach: number of positions whose u a term or an output depends on: that of the convolution's taps, 1 without.
        both_ways: whether the layer reads later positions too; all that read grids do.
        channels_first: whether u is (batch, channels, length), or (batch, channels, height, width).

    Raises InputError unless either `output` or `form` is given, and TypeError if the class is read otherwise.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or kind.__module__.startswith("torch."):
        what = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else f"a {type(kind).__name__}"
        said = f"{what} was given, which is no class of layers of one's own; give the class"
        raise InputError(f"{said} of the layers that hold the recurrence, adapt(MyLayer, …)")
    if (output is None) == (form is None):
        said = f"nothing says what a {kind.__name__} makes of its recurrence" if form is None else "output and form do"
        raise InputError(f"{said}: give output=…, a function, or form=…, a Form that names the layer's parts")
    check_whole(1, reach=reach)
    name = full_name(kind)
    known = LAYERS[name] if name in LAYERS else None
    counts = len(inspect.signature(terms).parameters) > 2
    LAYERS.add(
        name, Adapted(terms, output, form, reach, both_ways, counts, channels_first), instead=isinstance(known, Adapted)
    )
    read_as(kind, None)


# ---- is it what the layer computes?


def check_adapted(mixer: nn.Module, adapter: Adapted, given: Tensor, name: str) -> None:
    """Check terms and output of a layer against its own forward pass on an input of two positions or more: whole and
    cut off, continued from a state, in a padded batch, and in float64. Raises InputError with what differs."""
    with torch.no_grad():
        try:
            _check(mixer, adapter, given, name)
        except InputError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError) as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InputError(f"{name} cannot be checked, as it or its adapter fails on the example ({what})") from error
        try:
            wide = copy.deepcopy(mixer).double()
            found = wide(given.double())
        except Exception:  # Whatever a module raises that has no float64.
            return
        if (found[0] if isinstance(found, tuple) else found).dtype == torch.float64:
            _check(wide, adapter, given.double(), name)


def _check(mixer: nn.Module, adapter: Adapted, given: Tensor, name: str) -> None:
    def run(given: Tensor) -> Tensor:
        found = mixer(given.clone())  # Some write into their input.
        if isinstance(found, tuple) and found:  # Behind the output are states, which `load` tries to leave out.
            adapter.checked["after"] = len(found) - 1
            found = found[0]
        if not isinstance(found, Tensor) or found.ndim != given.ndim:
            said = f"{name} gives a {type(found).__name__}; adapt a layer whose forward pass gives one tensor"
            raise InputError(f"{said} with as many positions as its input, alone or first of a tuple")
        found, u = adapter.flat(mixer, found), adapter.entered(mixer, given)
        if found.shape[:2] != u.shape[:2]:
            said = f"{name} gives {found.shape[1]} positions for {u.shape[1]}; adapt a layer whose forward pass gives"
            raise InputError(f"{said} one tensor with as many positions as its input, alone or first of a tuple")
        return found

    own = run(given)
    if not bool(own.isfinite().all()):
        raise InputError(f"{name} gives numbers that are not finite on the example")
    if _apart(run(given), own) > 0:
        raise InputError(f"{name} gives another output each time: it draws random numbers in evaluation")
    axis = 2 if adapter.has_channels_first(mixer) else 1
    some = given.narrow(axis, 0, max(1, 2 * given.shape[axis] // 3))
    short, both, grid = run(some), reads_both_ways(mixer), given.ndim > 3
    half = short.shape[1]
    if not both and (grid or _apart(short, own[:, :half]) > _tolerance(own)):
        raise InputError(f"{name} reads {'a grid' if grid else 'later positions'}: adapt it with both_ways=True")
    u = adapter.entered(mixer, given)
    layer = adapter.compute_terms(mixer, u)
    _refuse(name, "its terms and output do not give its own output", adapter.output(mixer, layer), own)
    if adapter.form is not None:
        _check_map(mixer, adapter, layer, name, own)
    cut = adapter.compute_terms(mixer, adapter.entered(mixer, some))
    _refuse(name, f"they do not give its output for {half} positions", adapter.output(mixer, cut), short)
    adapter.entered(mixer, given)
    if not grid:
        padded = torch.arange(u.shape[1], device=u.device).expand(u.shape[:2]) < half
        found = adapter.output(mixer, adapter.compute_terms(mixer, u, padded))[:, :half]
        _refuse(name, "in a padded batch they give another output", found, short)
    if both:
        return
    state = adapter.state_after(mixer, cut, cut.scan())
    rest = adapter.output(mixer, adapter.compute_terms(mixer, u[:, half:], None, state))
    what = f"continued after {half} positions they do not: it reads further back than reach={adapter.reach}"
    what += "" if adapter.counts else ", or its terms depend on the position, which terms(layer, u, start) is told"
    _refuse(name, what, rest, own[:, half:])


def _check_map(mixer: nn.Module, adapter: Adapted, layer: LayerTrace, name: str, own: Tensor) -> None:
    """Check that the parts that a form names give the layer's output from its input, where they make a linear map."""
    try:
        found = adapter.linearized(mixer, layer)
    except InputError:
        return  # Where the map is asked for, this says why there is none.
    what = "the parts that its form names do not lead from its input to its output: a convolution, an activation or"
    what = f"{what} another part is missing, or is not what the terms read"
    _refuse(name, what, found.matvec(layer.u) + found.bias, own)


def _refuse(name: str, what: str, found: Tensor, own: Tensor) -> None:
    if found.shape != own.shape:
        raise InputError(f"{name}: {what}; theirs is {tuple(found.shape)}, its own {tuple(own.shape)}")
    if (gap := _apart(found, own)) > _tolerance(own):
        raise InputError(f"{name}: {what}; the difference is {gap:.1e} of its largest number")


def _apart(found: Tensor, own: Tensor) -> float:
    return float((found - own).abs().max() / own.abs().max().clamp(min=torch.finfo(own.dtype).tiny))


def _tolerance(u: Tensor) -> float:
    return TOLERANCES.get(u.dtype, 3e-2)
