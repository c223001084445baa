"""States, logits and layers of a run as one safetensors file, in the layout that `guide.md` beside this file has.

Other runtimes may leave the metadata out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from ssmscope.api.writing import write_whole
from ssmscope.core.attention_layers import AttentionState, attention_numbers
from ssmscope.core.edits import Edit, edited, recorded
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.take_trace import few_tokens, states_of_rows
from ssmscope.core.trace import KeptStates, States, mapped, tensors
from ssmscope.errors import InputError, check_model, check_path, did_you_mean

FORMAT = "ssmscope states 1"
GROWING = ("keys", "values", "places", "index")
"""Tensors of attention whose second dimension is the number of keys."""


def tensor_names(model: Model, states: States) -> list[str]:
    """Return the names of all tensors of a run's states, in their order."""
    numbers, attended = model.layer_numbers, iter(attention_numbers(model.module))
    found: list[str] = []
    for at, state in enumerate(states):
        if at < len(numbers):
            prefix = f"layers.{numbers[at]}"
        else:
            prefix = f"attention.{next(attended)}" if isinstance(state, AttentionState) else f"ngrams.{at}"
        names = [*_names(prefix, state)]
        while names and names[0] in found:  # Several layers of attention in one block.
            prefix += "b"
            names = [*_names(prefix, state)]
        found += names
    return found


def _names(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield prefix
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _names(f"{prefix}.{number}", each)
    elif is_dataclass(value):
        for field in fields(value):
            name = "state" if field.name == "ssm" else field.name
            yield from _names(f"{prefix}.{name}", getattr(value, field.name))


def named_tensors(model: Model, kept: KeptStates) -> dict[str, Tensor]:
    """Return the tensors of kept states by name, with their tokens and rows."""
    about = {"tokens": kept.input_ids.masked_fill(~kept.mask, -1), "rows": torch.tensor(kept.rows)}
    return about | dict(zip(tensor_names(model, kept.states), tensors(kept.states)))


def recorded_run(
    model: Model, batch: Batch, rows: Sequence[tuple[int, int]], parts: Sequence[str], edits: Sequence[Edit] = ()
) -> dict[str, Tensor]:
    """Return the parts of a run, under edits, by the names of a file. Raises InputError as `Trace.states`."""
    found: dict[str, Tensor] = {"tokens": batch.input_ids.masked_fill(~batch.mask, -1)}
    values: dict[str, dict[int, Tensor]] = {"residual": {}, "output": {}}
    seen = [recorded(place, into) for place, into in values.items()] if "layers" in parts else []  # type: ignore[arg-type]
    if {"layers", "logits"} & {*parts}:
        with edited(model, [*edits, *seen]) if edits or seen else nullcontext():
            logits = model.logits(batch)
        found |= {"logits": logits} if "logits" in parts else {}
        for place, into in values.items():
            found |= {f"layers.{number}.{place}": value for number, value in into.items()}
    if "states" in parts:
        with edited(model, edits) if edits else nullcontext():
            found |= named_tensors(model, states_of_rows(model, batch, rows))
    return {name: value.detach().cpu().contiguous() for name, value in found.items()}


def write_file(path: str | os.PathLike[str], values: Mapping[str, Tensor], source: Mapping[str, Any]) -> None:
    """Write tensors by name, with the provenance of a model."""
    from safetensors.torch import save

    about = {name: str(source[name]) for name in ("model", "architecture", "fingerprint", "dtype") if name in source}
    alone = {name: value.detach().cpu().contiguous().clone() for name, value in values.items()}
    write_whole(Path(check_path(path, "a file of states")), save(alone, metadata={"format": FORMAT, **about}))


def save_states(kept: KeptStates, model: Model, path: str | os.PathLike[str]) -> None:
    """Write the states of a model, `trace.states(…)`, in the layout of `ssmscope.probes.states.files`.

    Args:
        kept: states after chosen tokens, as they are or changed.
        model: the model that they are of.
        path: safetensors file.
    """
    check_model(model, "save_states")
    if not isinstance(kept, KeptStates):
        raise InputError(f"{type(kept).__name__} was given as states; give those of trace.states(…) or load_states(…)")
    like, own = _layout(model)
    if [*map(type, kept.states)] != [*map(type, like)]:
        said = f"the states are of {kept.source.get('model')}, and {model.name} keeps others"
        raise InputError(f"{said}; give the model that they are of")
    found = named_tensors(model, kept)
    for name, value in own.items():
        check_shape(f"the run of {kept.source.get('model')}", name, found, value, len(kept.rows))
    write_file(path, found, kept.source)


def _layout(model: Model) -> tuple[States, dict[str, Tensor]]:
    """Return states of a model, and their tensors by name."""
    states = states_of_rows(model, few_tokens(model, 1), [(0, 0)]).states
    return states, dict(zip(tensor_names(model, states), tensors(states)))


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors by name and its metadata. Raises InputError if it cannot be read, or its tokens or rows
    are missing or contradict each other."""
    from safetensors import SafetensorError, safe_open

    where = check_path(path, "a file of states")
    try:
        with safe_open(where, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {where}: {error}") from error
    tokens, rows = found.get("tokens"), found.get("rows", torch.zeros(0, 2, dtype=torch.int64))
    if tokens is None or tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
        raise InputError(f"{where} has no tokens (texts, length), whole numbers; write the ids of the texts with them")
    real, lengths = tokens >= 0, (tokens >= 0).sum(1)
    if not bool(lengths.all()) or bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise InputError(f"{where} has tokens with -1 before others, or a text without any; padding comes last")
    pairs = rows.ndim == 2 and rows.shape[1] == 2 and rows.numel() and not rows.is_floating_point()
    if "rows" in found and not (pairs and bool((rows >= 0).all()) and bool((rows[:, 0] < len(tokens)).all())):
        raise InputError(f"{where} has rows that are no (text, position) of its {len(tokens)} texts")
    if bool((rows[:, 1] >= lengths[rows[:, 0]]).any()):
        raise InputError(f"{where} has rows after the end of their text; positions count from 0")
    return found, about


def load_states(path: str | os.PathLike[str], model: Model, *, any_model: bool = False) -> KeptStates:
    """Read states, from which the model's runs continue: `model.run(batch, load_states(path, model).states)`.

    Args:
        path: safetensors file in the layout of `ssmscope.probes.states.files`.
        model: the model that continues.
        any_model: also read states of a model with other weights.

    Raises:
        InputError: a file that cannot be read or lacks a tensor, shapes that do not fit the model, or states of a model
            with other weights.
    """
    check_model(model, "load_states")
    found, about = read_file(path)
    where, made = os.fspath(path), about.get("fingerprint")
    if made is not None and made != model.fingerprint and not any_model:
        said = f"{where} has states of {about.get('model')}, whose weights differ from those of {model.name}"
        raise InputError(f"{said}; load that model, or give any_model=True")
    if "rows" not in found:
        raise InputError(f"{where} has no rows, and so no states; write them with analyze states --save")
    like, own = _layout(model)
    for name, value in own.items():
        check_shape(where, name, found, value, len(found["rows"]))
    values = iter([found[name].to(value) for name, value in own.items()])
    tokens = found["tokens"].to(model.device)
    rows = tuple((int(text), int(at)) for text, at in found["rows"].tolist())
    return KeptStates(mapped(like, lambda _: next(values)), rows, tokens.clamp(min=0), tokens >= 0, about)


def check_shape(where: str, name: str, found: Mapping[str, Tensor], like: Tensor, count: int | None = None) -> None:
    """Raise InputError if a file lacks a tensor, or has one of another kind or shape than the model's, with `count`
    rows and any number of keys, or without it those of the model's."""
    if name not in found:
        raise InputError(f"{where} has no {name}{did_you_mean(name, found)}; it has {', '.join(sorted(found))}")
    given, wanted = tuple(found[name].shape), (like.shape[0] if count is None else count, *like.shape[1:])
    if count is not None and name.startswith("attention.") and name.endswith(GROWING):  # Any number of keys.
        wanted = (*wanted[:1], *given[1:2], *wanted[2:])
    if given != wanted or found[name].is_floating_point() != like.is_floating_point():
        kinds = [str(each.dtype).removeprefix("torch.") for each in (found[name], like)]
        raise InputError(
            f"{where} has {name} as {kinds[0]} {given}; it needs {kinds[1]} {wanted}, see the guide of states"
        )
