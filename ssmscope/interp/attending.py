"""Implicit attention of a model's layers: maps, rollout over layers, and attention × gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.errors import InputError, did_you_mean
from ssmscope.frozen import LEVELS, FrozenLayer
from ssmscope.interp.attention import AttendedText, AttentionMap, ImplicitAttention
from ssmscope.interp.methods.gradients import outputs_kept
from ssmscope.interp.readouts import read
from ssmscope.interp.views.tokens import written
from ssmscope.matrices.pooled import causal_pairs, edges
from ssmscope.results import record_provenance

if TYPE_CHECKING:
    from ssmscope.encoding import Batch
    from ssmscope.model import Model
    from ssmscope.trace import Trace

HEADS = ("mean", "abs", "all")
WHOLE = 1024
"""Up to how many tokens a map is whole unless it is asked for; longer texts are shown in `CELLS` cells."""
CELLS = 512
MOST = 8192
"""Of how many tokens a rollout can be, which needs whole maps."""
SINGLE = 64
"""Up to how many heads "all" gives each of them its map; more are put together in groups of neighbours."""
GROUPS = 16


def implicit_attention(
    trace: Trace,
    *,
    layers: str | int | Sequence[int] = "all",
    level: str = "block",
    heads: str = "mean",
    rows: str | Sequence[int] = "all",
    pool: int | None = None,
    skip: bool = True,
    parts: bool = False,
    rollout: bool = False,
    residual: float = 0.5,
    span: str | tuple[int, int] | None = None,
    top: int = 4,
) -> ImplicitAttention:
    """The implicit attention of a model's layers on every text of a trace.

    Every layer is a linear map of its input once gates, steps and norms are frozen, and its matrix is exact
    (Differential Mamba, Eq. 8; Ali et al. 2024; Zimerman et al. 2024). What is shown is a signed mean over channels
    unless `heads` says otherwise; see `ssmscope.frozen`.

    Args:
        layers: "all", a layer's number, or several.
        level: "ssm", the recurrence alone, or "block", with convolution, SiLU, gate and norm.
        heads: "mean", the signed mean over channels; "abs", the mean of absolute values, which takes many times longer;
            "all", the signed mean of each head, or of each group of neighbouring channels where there are more than 64.
        rows: "all", "last", or positions (negative ones count from the end).
        pool: into how many cells a map's axes are divided, 0 for none; by default 512 for texts of more than 1024
            tokens. A cell is the mean over its pairs.
        skip: whether D is on the diagonal.
        parts: also a map of each part that a layer is the sum of: what a differential layer keeps and subtracts, what
            a GroupMamba takes from each module, the state groups of a GFSSM.
        rollout: one map for all chosen layers instead: the product over layers of residual · I + (1 − residual) · A
            (attention rollout, Abnar & Zuidema 2020). A is the absolute value of the signed mean with heads "mean", the
            mean of absolute values with "abs", its rows divided by their sums. The two differ: in the first, channels
            of opposite sign have cancelled before the sign is dropped.
        residual: the share of the residual stream in a rollout, from 0 to 1.
        span: marked tokens, as (first, last + 1), "first:last + 1", or a piece of the text; the readout `outside` is
            the share of the mass that is not on them.
        top: how many tokens the readouts `recent` and `sink` count.

    Raises:
        InputError: for an option that is not one of these, a trace without layers, a span that is not in a text, or a
            text that is too long for what is asked.
    """
    count = len(trace.frozen)
    chosen = _layers(layers, count)
    _check(level, heads, pool, top, residual, rollout)
    if parts and rollout:
        raise InputError("parts and rollout cannot be combined: a rollout is of whole layers")
    texts = [_Text(trace, row, rows, pool, span, rollout) for row in range(len(trace))]
    if rollout:
        _roll_out(trace, chosen, texts, level, heads, skip, residual, top)
    else:
        for index in chosen:
            frozen = trace.frozen[index]
            for row, text in enumerate(texts):
                one = frozen.of_text(row, text.length)
                for part in (None, *(one.parts if parts else ())):
                    _add_maps(text, one, str(index), level, heads, skip, part, top)
    kept = layers if isinstance(layers, str) else list(chosen)
    options: dict[str, Any] = {
        **{"layers": kept, "level": level, "heads": heads, "rows": rows if isinstance(rows, str) else list(rows)},
        **{"pool": pool, "skip": skip, "parts": parts, "rollout": rollout, "span": span, "top": top},
    }
    if rollout:
        options["residual"] = residual
    provenance = record_provenance(trace.source, options=options)
    return ImplicitAttention(
        provenance=provenance, texts=tuple(text.finished() for text in texts), level=level, heads=heads, top=top
    )


def attention_gradient(
    model: Model,
    batch: Batch,
    *,
    target: int | str | None = None,
    layers: str | int | Sequence[int] = "all",
    heads: str = "mean",
    rows: str | Sequence[int] = "all",
    pool: int | None = None,
    span: str | tuple[int, int] | None = None,
    top: int = 4,
) -> ImplicitAttention:
    """Attention × gradient: what each position contributes to a class's logit through each position of each layer.

    With M the block-level matrix of a channel, x its input and g the gradient of the logit at the layer's output, taken
    back through the projection, the entry [t, s] is Σ_channels g[t] M[t, s] x[s] (after Chefer et al. 2021, with the
    values of the inputs, so that the entries add up to Σ g · output less constants).

    Args:
        batch: of `model.encode`.
        target: a class, by its number or name, or a token's id; by default the predicted one of each text. Of a
            language model it is the logit of the next token.
        heads: "mean" is the signed sum over all channels, "all" over those of each head or group.
        layers, rows, pool, span, top: as in `implicit_attention`.

    Raises:
        InputError: as `implicit_attention`, and for an unknown target.
    """
    if heads == "abs":
        raise InputError("heads 'abs' has no sum over channels; allowed are 'mean' and 'all'")
    trace = model.trace(batch)
    chosen = _layers(layers, len(trace.frozen))
    _check("block", heads, pool, top, 0.5, False)
    texts = [_Text(trace, row, rows, pool, span, False) for row in range(len(trace))]
    number = _target(model, target)
    gradients, names = _gradients(model, batch, number, chosen)
    for index in chosen:
        frozen = trace.frozen[index]
        weighed = frozen.contributions(gradients[index].to(frozen.u))
        for row, text in enumerate(texts):
            one = weighed.of_text(row, text.length)
            channels = one.channels[0] * one.channels[1]
            _add_maps(text, one, str(index), "block", heads, True, None, top, channels)
    kept = layers if isinstance(layers, str) else list(chosen)
    options: dict[str, Any] = {
        "layers": kept,
        "heads": heads,
        "rows": rows if isinstance(rows, str) else list(rows),
        "pool": pool,
    }
    options |= {"span": span, "top": top, "target": names}
    return ImplicitAttention(
        provenance=record_provenance(trace.source, options=options),
        texts=tuple(text.finished() for text in texts),
        level="gradient",
        heads=heads,
        top=top,
    )


# ---- what is asked for


def _check(level: str, heads: str, pool: int | None, top: int, residual: float, rollout: bool) -> None:
    if level not in LEVELS:
        hint = did_you_mean(str(level), LEVELS)
        raise InputError(f"unknown level {level!r}; allowed are 'ssm' and 'block'{hint}")
    if heads not in HEADS:
        hint = did_you_mean(str(heads), HEADS)
        raise InputError(f"unknown heads {heads!r}; allowed are 'mean', 'abs' and 'all'{hint}")
    if rollout and heads == "all":
        raise InputError("a rollout is of whole layers: give heads 'mean' or 'abs', not 'all'")
    if pool is not None and (isinstance(pool, bool) or not isinstance(pool, int) or pool < 0):
        raise InputError(f"pool is {pool!r}; allowed is a number of cells, or 0 for whole maps")
    if pool and heads == "abs" and not rollout:
        raise InputError("the mean of absolute values cannot be pooled; give heads 'mean', or pool 0 for a whole map")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise InputError(f"top is {top!r}; allowed is a whole number of tokens from 1 on")
    if not 0 <= residual <= 1:
        raise InputError(f"residual is {residual!r}; allowed is a share from 0 to 1")


def _layers(layers: str | int | Sequence[int], count: int) -> tuple[int, ...]:
    allowed = f"allowed are 'all' and the layers from 0 to {count - 1}"
    if not count:
        raise InputError("the trace has no layers: take it with keep_inputs=True")
    if isinstance(layers, str):
        if layers != "all":
            raise InputError(f"unknown layers {layers!r}; {allowed}")
        return tuple(range(count))
    numbers = [layers] if isinstance(layers, int) and not isinstance(layers, bool) else list(layers)  # type: ignore[arg-type]
    wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 <= n < count]
    if wrong:
        raise InputError(f"there is no layer {wrong[0]!r}; {allowed}")
    if not numbers or len(set(numbers)) < len(numbers):
        raise InputError(f"layers is {numbers}; name at least one, and each once; {allowed}")
    return tuple(int(n) for n in numbers)


def _target(model: Model, target: int | str | None) -> int | None:
    if target is None:
        return None
    if isinstance(target, str):
        labels = model.labels or []
        if target in labels:
            return labels.index(target)
        if not target.isdecimal():
            what = f"its classes are {', '.join(labels)}" if labels else "give a token's id"
            raise InputError(f"{model.name} has no class {target!r}; {what}{did_you_mean(target, labels)}")
        target = int(target)
    most = len(model.labels) if model.labels is not None else model.vocabulary
    if not 0 <= target < most:
        raise InputError(f"there is no target {target}; allowed are 0 to {most - 1}")
    return target


class _Text:
    """One text of a trace, which rows and cells it is shown in, and the maps that it has so far."""

    def __init__(
        self, trace: Trace, row: int, rows: Any, pool: int | None, span: str | tuple[int, int] | None, rollout: bool
    ) -> None:
        self.trace, self.row = trace, row
        self.length = len(trace.tokens[row])
        self.chosen = self._rows(rows)
        cells = self._cells(pool, rows)
        self.edges = None if cells is None else edges(self.length, cells)
        if rollout and self.length > MOST:
            raise InputError(
                f"text {row + 1} has {self.length:,} tokens: a rollout needs whole maps, of at most {MOST:,} tokens"
            )
        self.span = self._span(span)
        self.maps: list[AttentionMap] = []

    def _rows(self, rows: Any) -> list[int] | None:
        allowed = f"allowed are 'all', 'last' or positions below {self.length}"
        if isinstance(rows, str):
            if rows not in ("all", "last"):
                raise InputError(f"unknown rows {rows!r}; {allowed}{did_you_mean(rows, ('all', 'last'))}")
            return None if rows == "all" else [self.length - 1]
        numbers = list(rows)
        wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int | np.integer)]
        wrong += [n for n in numbers if not wrong and not -self.length <= n < self.length]
        if wrong or not numbers:
            raise InputError(f"text {self.row + 1} has no row {(wrong or [None])[0]!r}; {allowed}")
        return [int(n) % self.length for n in numbers]

    def _cells(self, pool: int | None, rows: Any) -> int | None:
        if self.chosen is not None:
            if pool:
                raise InputError("pool is of whole maps: give it without rows")
            return None
        if pool == 0 or (pool is None and self.length <= WHOLE):
            return None
        cells = CELLS if pool is None else pool
        return None if cells >= self.length else cells

    def _span(self, span: str | tuple[int, int] | None) -> tuple[int, int] | None:
        if span is None:
            return None
        tokens = self.trace.tokens[self.row]
        if isinstance(span, str):
            first, colon, last = span.partition(":")
            found = (int(first), int(last)) if colon and first.isdecimal() and last.isdecimal() else None
            if found is None:
                found = _find(span, tokens, self.trace.words[self.row])
            if found is None:
                raise InputError(f"text {self.row + 1} has no {span!r}; give a piece of it, or token positions as 3:7")
        else:
            found = (int(span[0]), int(span[1]))
        if not 0 <= found[0] < found[1] <= len(tokens):
            raise InputError(
                f"the span {found[0]}:{found[1]} is not within the {len(tokens)} tokens of text {self.row + 1}"
            )
        return found

    @property
    def queries(self) -> np.ndarray:
        if self.edges is not None:
            return self.edges[1:].numpy() - 1
        return np.array(self.chosen if self.chosen is not None else range(self.length), dtype=np.int64)

    def add(self, layer: str, part: str, head: str, values: Tensor, sink: Tensor | None, top: int) -> None:
        """A map of the rows or cells that are shown."""
        shown = values.detach().float().cpu().numpy()
        if not np.isfinite(shown).all():
            raise InputError(
                f"the attention of text {self.row + 1} is not finite at layer {layer}: the model is damaged"
            )
        column = None if sink is None else sink.detach().float().cpu().numpy()
        edge = None if self.edges is None else self.edges.numpy()
        readouts = read(shown, column, self.queries, edge, self.span, top)
        self.maps.append(AttentionMap(layer, part, head, shown, column, readouts))

    def shown(self, matrix: Tensor) -> Tensor:
        """The rows or cells of a whole map (length, length) that are shown."""
        if self.chosen is not None:
            return matrix[self.chosen]
        return matrix if self.edges is None else _pooled(matrix, self.edges)

    def shown_column(self, column: Tensor) -> Tensor:
        """The same of a column (length,)."""
        if self.chosen is not None:
            return column[self.chosen]
        if self.edges is None:
            return column
        return torch.stack([part.mean() for part in column.split(self.edges.diff().tolist())])

    def finished(self) -> AttendedText:
        answer, probability = self.trace.answers[self.row]
        pixels = self.trace.pixels
        return AttendedText(
            tokens=tuple(self.trace.tokens[self.row]),
            words=tuple(self.trace.words[self.row]),
            queries=self.queries,
            edges=None if self.edges is None else self.edges.numpy(),
            span=self.span,
            maps=tuple(self.maps),
            answer=answer,
            probability=float(probability),
            pixels=None if pixels is None else pixels[self.row].float().cpu().numpy(),
        )


def _find(piece: str, tokens: Sequence[str], words: Sequence[int | None]) -> tuple[int, int] | None:
    """The tokens that a piece of the text touches, wherever it stands first; None where it is not. Neither case nor
    spaces matter: what stands between tokens is not known of every tokenizer."""
    shown, places = "", []
    for position, (_, token) in enumerate(written(tokens, words)):
        token = "".join(token.removeprefix("##").casefold().split())
        places += [position] * len(token)
        shown += token
    wanted = "".join(piece.casefold().split())
    start = shown.find(wanted)
    if start < 0 or not wanted:
        return None
    return places[start], places[start + len(wanted) - 1] + 1


def _pooled(matrix: Tensor, edge: Tensor) -> Tensor:
    """The mean over the pairs of each cell in which the key does not come after the query."""
    place = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(matrix.device)
    cells = len(edge) - 1
    rows = matrix.new_zeros(cells, matrix.shape[1]).index_add_(0, place, matrix)
    return matrix.new_zeros(cells, cells).index_add_(1, place, rows) / causal_pairs(edge).clamp(min=1).to(matrix)


# ---- maps


def _groups(frozen: FrozenLayer, heads: str) -> list[str]:
    """The names of the maps that `heads` asks for."""
    if heads != "all":
        return [heads]
    number, width = frozen.channels
    if number <= SINGLE:
        return [str(head) for head in range(number)]
    groups = next(g for g in range(GROUPS, 0, -1) if number % g == 0)
    size = number // groups
    return [f"{g * size}–{(g + 1) * size - 1}" for g in range(groups)]


def _add_maps(
    text: _Text,
    frozen: FrozenLayer,
    layer: str,
    level: str,
    heads: str,
    skip: bool,
    part: str | None,
    top: int,
    channels: int | None = None,
) -> None:
    names = _groups(frozen, heads)
    scale = 1.0 if channels is None else channels / len(names)  # a sum over each group's channels
    how: Mapping[str, Any] = {"groups": len(names), "skip": skip, "part": part}
    absolute = heads == "abs"
    if text.edges is not None and not absolute:
        maps = frozen.pooled_attention(level, len(text.edges) - 1, **how)
    else:
        maps = frozen.attention(level, absolute=absolute, rows=text.chosen, **how)
    sink = frozen.sink(level, groups=len(names), absolute=absolute, part=part)
    for group, name in enumerate(names):
        values = maps[0, group]
        if text.edges is not None and absolute:
            values = _pooled(values, text.edges)
        column = None if sink is None else text.shown_column(sink[0, group] * scale)
        text.add(layer, part or "", name, values * scale, column, top)


def _roll_out(
    trace: Trace,
    chosen: Sequence[int],
    texts: Sequence[_Text],
    level: str,
    heads: str,
    skip: bool,
    residual: float,
    top: int,
) -> None:
    """R ← R (residual · I + (1 − residual) A) from the last layer to the first, A being |signed mean| or, with heads
    "abs", the mean of absolute values; what goes to a state before the first token stays there."""
    carried: list[tuple[Tensor, Tensor]] = []
    for text in texts:
        start = torch.eye(text.length) if text.chosen is None else torch.eye(text.length)[text.chosen]
        carried.append((start, torch.zeros(len(start))))
    sinks = False
    for index in sorted(chosen, reverse=True):
        frozen = trace.frozen[index]
        for row, text in enumerate(texts):
            one = frozen.of_text(row, text.length)
            absolute = heads == "abs"
            weights = one.attention(level, absolute=absolute, skip=skip)[0, 0].abs().float().cpu()
            sink = one.sink(level, absolute=absolute)
            sinks = sinks or sink is not None
            column = torch.zeros(text.length) if sink is None else sink[0, 0].abs().float().cpu()
            weights, column = row_normalised(weights, column)
            R, gone = carried[row]
            carried[row] = (residual * R + (1 - residual) * (R @ weights), gone + (1 - residual) * (R @ column))
    for text, (R, gone) in zip(texts, carried):
        if text.edges is not None:
            shown, gone = _pooled(R, text.edges), text.shown_column(gone)
        else:
            shown = R
        text.add("rollout", "", heads, shown, gone if sinks else None, top)


def row_normalised(weights: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (length, length) and the sink column (length,), none negative, divided by their sums; a row of zeros becomes
    the identity's."""
    total = weights.sum(-1) + sink
    empty = total == 0
    weights = weights / total.masked_fill(empty, 1).unsqueeze(-1)
    return weights + torch.diag(empty.to(weights)), sink / total.masked_fill(empty, 1)


# ---- gradients


def _gradients(
    model: Model, batch: Batch, target: int | None, chosen: Sequence[int]
) -> tuple[dict[int, Tensor], list[str]]:
    """The gradient of each text's target logit at the output of each layer, (batch, length, width), and the targets."""
    kept: dict[int, Tensor] = {}
    layers = [model.mixers[index] for index in chosen]
    with torch.no_grad():
        embeddings = model.embed(batch)
    # Gradients come from the embeddings: weights may be frozen, as those under an adapter are.
    embeddings = embeddings.detach().requires_grad_()
    with torch.enable_grad(), model.running(mask=batch.mask), outputs_kept(layers, kept):
        logits = model.forward_embeddings(embeddings, batch.mask)
    best = logits.argmax(-1) if target is None else torch.full((len(logits),), target, device=logits.device)
    wanted = logits.gather(-1, best.unsqueeze(-1)).sum()
    found = torch.autograd.grad(wanted, [kept[place] for place in range(len(layers))])
    labels = model.labels
    names = [labels[i] if labels is not None else str(i) for i in best.tolist()]
    return dict(zip(chosen, found)), names
