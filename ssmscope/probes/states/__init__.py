"""States of a model after chosen tokens, shown and written to a file from which runs continue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import Texts
from ssmscope.api.options import NO_EFFECT, Metavar, Range
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.probes.states.result import StateNorms


def check_states(*, save: str | Path | None, parts: Sequence[str], **options: object) -> None:
    """Raise InputError if parts of a file are chosen and none is written."""
    if save is None and [*parts] != ["states"]:
        raise InputError("parts says what a file holds; give the file too, save=…")


@analysis("states", reads=Texts(), question="What are its states, as a file?", check=check_states)
def states(
    model: Model,
    texts: TextsLike,
    *,
    at: Annotated[
        Sequence[Literal["last"] | int], "Positions after which to take the states, from 0; or last.", Range(0)
    ] = ("last",),
    save: Annotated[
        str | Path | None, "File to write the states to, as safetensors.", NO_EFFECT, Metavar("FILE")
    ] = None,
    parts: Annotated[
        Sequence[Literal["states", "logits", "layers"]],
        "Parts of the run that the file holds: states, logits, and every layer's input and output.",
        NO_EFFECT,
    ] = ("states",),
) -> StateNorms:
    """Show how large the states are after chosen tokens, and write them to a file.

    A state is all that a model keeps of the tokens before: the recurrent states, the last inputs of convolutions, and
    in hybrids keys and values. Their norm is that of all of a layer's numbers, Frobenius.

    The file continues the model's runs (`load_states`), compares it with another runtime (`parity`), and can be changed
    and written again (`save_states`).

    Args:
        at: positions that every text has; "last" is each text's own last.
        save: safetensors file; written whole or not at all.

    Raises:
        InputError: a position that not every text has, or a model of which some layer does not keep what it reads of
            earlier tokens.
    """
    import numpy as np
    from ssmscope.api.provenance import record_provenance
    from ssmscope.core.take_trace import as_batch, states_at
    from ssmscope.core.trace import tensors
    from ssmscope.probes.states.files import recorded_run, tensor_names, write_file
    from ssmscope.probes.states.result import StateNorms

    batch = as_batch(model, texts)
    kept = states_at(model, batch, at)
    names = tensor_names(model, kept.states)
    found = [each.detach().double().flatten(1) for each in tensors(kept.states)]
    if save is not None:
        write_file(save, recorded_run(model, batch, kept.rows, parts), kept.source)
    return StateNorms(
        provenance=record_provenance(model.source),
        rows=tuple((text, position, batch.tokens[text][position]) for text, position in kept.rows),
        names=tuple(names),
        shapes=tuple(tuple(each.shape[1:]) for each in tensors(kept.states)),
        norms=np.stack([each.norm(dim=1).cpu().numpy() for each in found], axis=1),
        largest=np.stack([each.abs().amax(1).cpu().numpy() for each in found], axis=1),
    )
