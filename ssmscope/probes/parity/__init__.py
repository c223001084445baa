"""Another runtime's numbers against the model's: first token, layer and tensor that differ, and the likely fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.options import Metavar, Reads, Seed
from ssmscope.errors import InputError, refuse_unused

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.parity.result import Parity


def check_files(*, states: object, logits: object, layers: object, self_: bool, **options: object) -> None:
    """Raise InputError if no file is given, or one in addition to the model's own library."""
    given = [each for each in (states, logits, layers) if each is not None]
    if not given and not self_:
        raise InputError("no file; give what the other runtime dumped, states=…, logits=… or layers=…, or self_=…")
    if given and self_:
        raise InputError("self_=… compares the model's own library; leave the files out")
    refuse_unused("with self_=…", ran_in=self_ and options["ran_in"] != "auto")


@analysis("parity", question="Does another runtime compute the same model?", check=check_files)
def parity(
    model: Model,
    *,
    states: Annotated[
        str | Path | None, "File with the other runtime's states, as safetensors.", Reads("file"), Metavar("FILE")
    ] = None,
    logits: Annotated[str | Path | None, "File with its logits.", Reads("file"), Metavar("FILE")] = None,
    layers: Annotated[
        str | Path | None, "File with its layers' inputs or outputs.", Reads("file"), Metavar("FILE")
    ] = None,
    self_: Annotated[bool, "Compare the model's own library instead, in the modes in which it serves."] = False,
    ran_in: Annotated[
        Literal["auto", "float64", "float32", "bfloat16", "float16"],
        "Dtype that the other runtime computes in; auto is that of the file's metadata, or bfloat16, float16 or else "
        "float32 by what its tensors have.",
    ] = "auto",
    seed: Seed = 0,
) -> Parity:
    """Compare what another runtime dumped with this model: the first token, layer and tensor that differ, by how much
    against what rounding allows, and the likely fault. The exit code is 1 if any differs.

    The file has the layout of `analyze states --save`: tokens, and any of states, logits and layers. The model runs the
    same tokens, in float32 or more. The error of a row (a text's token) is the rms of its difference / rms of the
    model's tensor; allowed are the rounding of the file's numbers and 8 times the largest error of a run in the other
    runtime's dtype (with weights changed by up to one unit in the last place where that is the model's own).

    Faults are tried in the layer that differs first: A or D forgotten, the decay after the write, groups or heads
    swapped, the state one token late or in a narrower dtype, the convolution's tail lost where a run continued, and
    something read before the text (a mask ignored). One is named if it gives the file's numbers to rounding. Finding
    the last two needs states after several tokens of a text.

    With `self_` the other runtime is the model's own library, the installed transformers, or mamba_ssm or fla for a
    directory in their layout: one pass, also in bfloat16; padding on either side, alone and in a batch; cached steps,
    alone and in a batch; prefill in chunks; a prefix reused. Each is compared with this package's run in float64, on
    random tokens by the seed.

    Args:
        states: may hold logits and layers too, and so may the other files: all that they hold is compared.

    Raises:
        InputError: no file, one that cannot be read or lacks what it is given for, files of other tokens, or tensors
            that do not fit the tokens or the model.
    """
    import torch
    from ssmscope.api.provenance import call_options, record_provenance, versions
    from ssmscope.probes.parity.faults import compared
    from ssmscope.probes.parity.measure import read_parts
    from ssmscope.probes.parity.modes import own_modes
    from ssmscope.probes.parity.result import Parity

    if self_:
        library, tensors = own_modes(model, seed)
        release = f"{library} {versions().get(library, '')}".strip()
        return Parity(record_provenance(model.source, seed=seed), release, model.source["dtype"], tensors, fault="")
    if model.channels is not None:
        raise InputError(f"{model.name} reads {model.reads}; parity compares models of tokens")
    given, about, names = read_parts({"states": states, "logits": logits, "layers": layers})
    ids = [[each for each in row if each >= 0] for row in given["tokens"].tolist()]
    held = {str(t.dtype).removeprefix("torch.") for t in given.values()}
    ran = str(about.get("dtype") if ran_in == "auto" else ran_in)
    if ran not in ("bfloat16", "float16", "float32", "float64"):
        ran = next((each for each in ("bfloat16", "float16") if each in held), "float32")
    rows = [(text, at) for text, at in given["rows"].tolist()] if "rows" in given else []
    tensors, fault = compared(model, model.encode(ids=ids), rows, given, getattr(torch, ran))
    provenance = {**record_provenance(model.source, options=call_options(ran_in=ran)), "file": about}
    return Parity(provenance, " and ".join(names), ran, tensors, fault)
