"""Cut edges between tokens in a layer's recurrences, its convolution or its attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad
from ssmscope import ops
from ssmscope.core.edits import Edit, Place, Site, digest
from ssmscope.core.linearized import check_level
from ssmscope.core.mixers import adapter_for, linearize
from ssmscope.ops import Recurrence, Scan

Positions = Sequence[int] | Tensor
Numbers = Sequence[int] | None
Rows = Mapping[int, Tensor] | None


def cut_edges(
    sources: Positions,
    targets: Positions,
    *,
    layers: Numbers = None,
    heads: Numbers = None,
    recurrences: Numbers = None,
    level: str = "ssm",
    rows: Rows = None,
) -> Edit:
    """Cut the edges from source tokens to target tokens: targets do not read what sources wrote into the state.

    In y_t = Σ_s α[t, s] x_s + D x_t the terms with s among the sources are removed at every t among the targets
    (attention knockout, Geva et al. 2023, on the implicit attention of Differential Mamba, Eq. 8), exactly, by one scan
    of the sources' writes alone. The skip D x_t stays; at the level "block" it holds a part of the few tokens before t,
    which the convolution mixed into x_t. Everything else, gate and norm included, is computed from the rest.

    Args:
        sources, targets: positions, or (batch, length) bool.
        layers, heads, recurrences: those whose edges are cut; all by default. A layer's recurrences go by their numbers
            in its trace, borrowed ones of a GroupMamba's module after its own.
        level: "ssm" cuts what is written into the state at a source; "block" a source's share of the convolution's
            input, which is written at the tokens after it too (its activation frozen).
        rows: by layer, the rows whose edges are cut, (batch,) or (batch, heads) bool; all by default.
    """
    check_level(level)

    def change(scans: tuple[Scan, ...], site: Site) -> tuple[Scan, ...]:
        layer, adapter = site.trace, adapter_for(site.mixer)
        assert layer is not None
        like = layer.recurrences[0].x
        own = _heads_cut(like.shape[2], site, heads, rows, like.device)
        batch, length = like.shape[:2]
        cut, read = _at(sources, batch, length, like.device), _at(targets, batch, length, like.device)
        cut = cut.unsqueeze(-1) & own.unsqueeze(1)
        paths = linearize(site.mixer, layer).chosen("block", None) if level == "block" else ()

        def part(number: int, recurrence: Recurrence, late: int = 0) -> Tensor:
            if recurrences is not None and number not in recurrences:
                return torch.zeros_like(recurrence.x)
            x = torch.where(cut.unsqueeze(-1), recurrence.x, 0)
            if paths and not late:  # RWKV reads late and has no convolution before its recurrence.
                input_map, width = paths[number].input_map, recurrence.shape[3]
                source = torch.where(cut.repeat_interleave(width, dim=2), input_map.source, 0)
                x = paths[number].written(input_map.values(source, False), False)
            at = torch.zeros_like(read)
            at[:, : at.shape[1] - late] = read[:, late:]
            return contribution(recurrence, x, at)

        if hasattr(adapter, "without"):
            return adapter.without(site.mixer, layer, scans, part)
        each = enumerate(zip(scans, layer.recurrences))
        return tuple(scan._replace(y=scan.y - part(number, recurrence)) for number, (scan, recurrence) in each)

    ends, of = {"sources": sources, "targets": targets}, recurrences and list(recurrences)
    return _edit("scans", change, ends, layers, heads, rows, recurrences=of, level=level)


def cut_convolution(sources: Positions, targets: Positions, *, layers: Numbers = None, rows: Rows = None) -> Edit:
    """Cut the convolution's edges from source tokens to target tokens: their taps there are zero.

    The convolution's outputs at the targets, and everything made of them (x, B, C and, where it is convolved or comes
    from x, Δ), are those of inputs that are zero at the sources. A token still reads itself. This is exact. Together
    with `cut_edges`, whose arguments these are, only a token's decay remains: how much it makes the state forget.
    Raises InputError as the run meets a layer without a convolution.
    """

    def change(reads: Tensor, site: Site) -> Tensor:
        batch, length, taps = reads.shape
        stop = site.start + length
        cut, read = (_at(each, batch, stop, reads.device)[:, :stop] for each in (sources, targets))
        before = pad(cut, (taps - 1, 0)).unfold(1, taps, 1).flip(-1)
        before = before & (torch.arange(taps, device=reads.device) > 0)
        own = _heads_cut(1, site, None, rows, reads.device).unsqueeze(-1)
        return reads & ~(before & read.unsqueeze(-1) & own)[:, site.start :]

    return _edit("taps", change, {"sources": sources, "targets": targets}, layers, None, rows)


def cut_attention(
    sources: Positions, targets: Positions, *, layers: Numbers = None, heads: Numbers = None, rows: Rows = None
) -> Edit:
    """Cut the edges from source tokens to target tokens in layers of softmax attention, by a mask on the scores.

    The softmax is over the other edges (attention knockout, Geva et al. 2023). A token still reads itself. Arguments
    are those of `cut_edges`; heads are those of queries.
    """

    def change(reads: Tensor, site: Site) -> Tensor:
        batch, _, length, keys = reads.shape
        own = _heads_cut(site.mixer.config.num_attention_heads, site, heads, rows, reads.device)
        cut, read = (_at(each, batch, length, reads.device) for each in (sources, targets))
        edges = read.unsqueeze(2) & cut.unsqueeze(1)
        edges = edges & ~torch.eye(length, dtype=torch.bool, device=reads.device)
        edges = torch.cat([edges.new_zeros(batch, length, keys - length), edges], dim=2)
        return reads & ~(edges.unsqueeze(1) & own[:, :, None, None])

    return _edit("attention", change, {"sources": sources, "targets": targets}, layers, heads, rows)


def _at(chosen: Positions, batch: int, length: int, device: torch.device) -> Tensor:
    if isinstance(chosen, Tensor):
        return chosen.to(device)
    found = torch.zeros(batch, length, dtype=torch.bool, device=device)
    found[:, list(chosen)] = True
    return found


def _heads_cut(count: int, site: Site, heads: Numbers, rows: Rows, device: torch.device) -> Tensor:
    """Return a mask of the heads and rows whose edges a layer cuts, (batch or 1, heads) bool."""
    own = torch.ones(1, count, dtype=torch.bool, device=device)
    if heads is not None:
        own = torch.zeros_like(own)
        own[:, list(heads)] = True
    if rows is None:
        return own
    chosen = rows.get(site.layer, torch.zeros(1, dtype=torch.bool)).to(device)
    return own & (chosen.unsqueeze(-1) if chosen.ndim == 1 else chosen)


def _edit(
    place: Place, change: Any, ends: Mapping[str, Positions], layers: Numbers, heads: Numbers, rows: Rows, **more: Any
) -> Edit:
    options: dict[str, Any] = {n: "by row" if isinstance(each, Tensor) else list(each) for n, each in ends.items()}
    options |= {"heads": heads and list(heads), **more}
    where = tuple(rows) if layers is None and rows is not None else layers
    where = None if where is None else tuple(where)
    tensors = [each if isinstance(each, Tensor) else None for each in ends.values()]
    key = digest([place, where, options], [*tensors, *(rows or {}).values()])
    return Edit("edges cut", place, change, where, options=options, key=key)


def contribution(
    recurrence: Recurrence, x: Float[Tensor, "batch length heads width"], targets: Bool[Tensor, "batch length"]
) -> Float[Tensor, "batch length heads width"]:
    """Return Σ_s α[t, s] x_s, without D, at every t among the targets and 0 elsewhere, by one scan of these inputs."""
    result = torch.zeros_like(recurrence.x)
    places = x.flatten(2).any(-1)
    if recurrence.order is not None:
        return ops.scan(replace(recurrence, x=x, D=None)).y * targets[..., None, None].to(result)
    rows, reads = places.any(1).nonzero().flatten(), targets.any(0).nonzero().flatten()
    if not len(rows) or not len(reads):
        return result
    row, time = slice(int(rows[0]), int(rows[-1]) + 1), slice(int(places.any(0).nonzero()[0]), int(reads[-1]) + 1)
    written = replace(recurrence, x=x, D=None).of_rows(row.start, row.stop).between(time.start, time.stop)
    result[row, time] = ops.scan(written).y * targets[row, time, None, None].to(result)
    return result
