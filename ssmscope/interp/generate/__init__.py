"""Text that a model writes, and where each written token comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TOKEN_MODEL, Texts
from ssmscope.api.options import REPEATED, Metavar, OneOf, Range, Seed, Top
from ssmscope.errors import InputError
from ssmscope.interp.methods import CAPTUM_METHODS, METHODS, MethodOptions, bind_methods, check_methods

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.interp.generate.result import Writing

NewTokens = Annotated[int, "Maximum number of tokens written after each text.", Range(1, 2**17)]


def check_generate(*, explain: Any, option: Any, contrast: Any, temperature: float, **given: Any) -> None:
    """Raise InputError if options contradict each other."""
    for name in ("top_k", "top_p"):
        if temperature == 0 and given[name] is not None:
            raise InputError(f"{name}=… is for drawing tokens; give temperature=… above 0 too")
    for name, value in (("contrast", contrast), ("option", option)):
        if value and not explain:
            raise InputError(f"{name}=… is for methods of explanation; name some, explain=…, too")
    if explain:
        check_methods(methods=explain, option=option)


@analysis(
    "generate",
    reads=Texts(),
    question="What does it write, and from what?",
    first=6,
    models=(LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
    check=check_generate,
)
def generate(
    model: Model,
    texts: TextsLike,
    *,
    max_new_tokens: NewTokens = 64,
    temperature: Annotated[float, "0 takes the likeliest token, above it tokens are drawn.", Range(0, 100)] = 0.0,
    top_k: Annotated[int | None, "Draw from so many of the likeliest tokens.", Range(1)] = None,
    top_p: Annotated[float | None, "Draw from the likeliest tokens that have this probability.", Range(0, 1)] = None,
    stop: Annotated[Sequence[str] | None, "String that ends a text; may be repeated.", REPEATED] = None,
    explain: Annotated[
        Sequence[str] | Mapping[str, Callable[..., Any]] | None,
        f"Also attribute every written token, by methods of explanation: {', '.join(METHODS)}, and captum's as "
        "captum:KernelShap.",
        OneOf("interp.methods:METHODS", CAPTUM_METHODS),
        Metavar("A,B,…"),
    ] = None,
    contrast: Annotated[
        int | str | None, "Token whose logit is subtracted from that of each written token.", Metavar("NAME")
    ] = None,
    by_layer: Annotated[bool, "Also show survival in each layer."] = False,
    compile: Annotated[bool, "Compile layers for writing, as is done by itself from 4,096 tokens on."] = False,
    top: Top = 3,
    option: MethodOptions = None,
    seed: Seed = 0,
) -> Writing:
    """Continue texts, and show from what every token was written.

    The model reads a text once and then writes from its states (`Model.generate`). For every written token, survival
    says what these states hold at that moment: the share of each earlier token, of the prompt or written, averaged over
    layers (`ssmscope.ops.survival.shares`). It is memory, not use. Methods of explanation attribute the logit of the
    token to the same earlier tokens: the scores are those of `explain` for the text up to there and this target. For
    gradxinput, lrp and occlusion one run of the whole text serves all written tokens.

    Log-probabilities and entropies are in nats, of the model's own distribution: before temperature, top_k and top_p.

    Args:
        explain: names, or functions by name, as `methods` of `explain`; `option` has their options. A model without
            recurrent states, such as LFM2, has no survival: without names it is explained by gradxinput.

    Raises:
        InputError: a model that does not write, survival of one without recurrent states, options that contradict each
            other, a contrast of several tokens, or scores that are not finite.
    """
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.mixers import memory_of
    from ssmscope.core.take_trace import as_batch
    from ssmscope.interp.generate.measure import written_text
    from ssmscope.interp.generate.result import Writing

    remembers = memory_of(model.module)["has_recurrent_state"]
    if by_layer:
        model.check_recurrent_state("survival in each layer")
    explain = explain or (() if remembers else ("gradxinput",))
    drawn: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    found = model.generate(
        as_batch(model, texts), max_new_tokens=max_new_tokens, stop=stop or (), compile=compile or None, **drawn
    )
    methods = bind_methods(explain, option, model=model, seed=seed) if explain else {}
    every = [written_text(model, found, row, methods, contrast, by_layer) for row in range(len(found.texts))]
    options = call_options(explain=list(methods), option=option or {})
    provenance = record_provenance(model.source, options=options, seed=seed)
    return Writing(provenance=provenance, texts=tuple(every), top=top)
