"""Implicit attention of a model's layers: what each position of a text takes from every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import Texts
from ssmscope.api.options import Limit, Metavar, Range, Seed
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.data.text import TextData
    from ssmscope.interp.attention.result import DataAttention, ImplicitAttention


def check_attention(
    *, level: str, heads: str, rows: Any, pool: int | None, skip: bool, parts: bool, rollout: bool, **options: Any
) -> None:
    """Raise InputError if options contradict each other."""
    gradient, target = options["gradient"], options["target"]
    if target is not None and not gradient:
        raise InputError("target=… is the class or token of gradient=…; give that too")
    others = {"rollout=True": rollout, "parts=True": parts, "level='ssm'": level == "ssm", "skip=False": not skip}
    unused = next((name for name, given in others.items() if given), None)
    if gradient and unused is not None:
        raise InputError(f"gradient=True cannot be combined with {unused}")
    if gradient and heads == "abs":
        raise InputError("heads='abs' has no sum over channels; allowed with gradient=True are 'mean' and 'all'")
    if parts and rollout:
        raise InputError("parts=True and rollout=True cannot be combined: a rollout uses whole layers")
    if rollout and heads == "all":
        raise InputError("a rollout uses whole layers: give heads='mean' or heads='abs'")
    if pool and heads == "abs" and not rollout:
        raise InputError("the mean of absolute values cannot be pooled; give heads='mean', or pool=0 for a whole map")
    if pool and rows != "all":
        raise InputError("pool=… averages whole maps: give it without rows=…")


def check_reads(of_data: bool, *, span: str | None, limit: int | None, **options: Any) -> None:
    """Raise InputError for options of single texts with a data set, or of data sets with texts."""
    if of_data and span is not None:
        raise InputError("span=… marks tokens of single texts; those of a data set are marked in a column, relevant=…")
    if not of_data and limit is not None:
        raise InputError("limit=… is the number of texts read from a data set; give data=… too, or leave it out")


@analysis(
    "attention",
    reads=Texts(data=check_reads, marks=True),
    asks_at=True,
    question="What does each output attend to?",
    pair="interp.paired:pair",
    kinds=("attention", "attention-data"),
    check=check_attention,
    sharded=True,
)
def implicit_attention(
    model: Model | None,
    texts: TextsLike | TextData,
    *,
    layers: Annotated[Literal["all"] | Sequence[int], "Layers to show.", Range(0)] = "all",
    level: Annotated[
        Literal["ssm", "block"],
        "The recurrence alone (ssm), or the whole layer with convolution, gate and norm (block).",
    ] = "block",
    heads: Annotated[
        Literal["mean", "abs", "all"], "Signed mean over channels, mean of absolute values (slow), or each."
    ] = "mean",
    rows: Annotated[
        Literal["last", "all"] | Sequence[int], "Positions of the queries; negative ones count from the end."
    ] = "all",
    pool: Annotated[int | None, "Average into N × N cells; 0: none; default 512 above 1024 tokens.", Range(0)] = None,
    skip: Annotated[bool, "Include the skip D on the diagonal."] = True,
    parts: Annotated[bool, "Also show each summand of a layer."] = False,
    rollout: Annotated[bool, "Attention rollout: the product over layers, of |signed mean| or abs."] = False,
    residual: Annotated[float, "Share of the residual stream in a rollout.", Range(0, 1)] = 0.5,
    gradient: Annotated[bool, "Show attention × gradient of a class or next token."] = False,
    target: Annotated[
        int | str | None, "Class, or token id, of the gradient; default the predicted one.", Metavar("NAME")
    ] = None,
    span: Annotated[str | None, "Mark tokens, by position or as a piece of the text.", Metavar("A:B|TEXT")] = None,
    top: Annotated[int, "Number of tokens that count as recent, or as first.", Range(1)] = 4,
    limit: Limit = None,
    seed: Seed = 0,
) -> ImplicitAttention | DataAttention:
    """Compute the implicit attention of the layers, exact and signed: what each position takes from every other.

    Every layer is a linear map of its input once gates, steps and norms are frozen, and its matrix is exact
    (Differential Mamba, Eq. 8; Ali et al. 2024; Zimerman et al. 2024). Each map is (queries, keys); what is shown is a
    signed mean over channels unless `heads` says otherwise; see `ssmscope.core.linearized`. A hybrid's layers of
    softmax attention are shown too, named as "12 attention", with their weights softmax(q kᵀ); for a trace this needs
    its model as well.

    With `gradient` the entry [t, s] is Σ_channels g[t] M[t, s] x[s]: M the block-level matrix of a channel, x its input
    and g the gradient of the target's logit at the layer's output, taken back through the projection (after Chefer et
    al. 2021, with the values of the inputs, so that the entries add up to Σ g · output less constants). Of softmax
    attention A it is A ⊙ ∂f/∂A of every head. `heads` "mean" is then the signed sum over all channels, "all" over those
    of each head or group; of a language model the target is the next token, by default the predicted one.

    Over labelled texts (`TextData`) the result is a `DataAttention`: the share of each map's |weight| that falls on the
    tokens that a column of the data marks, over the queries (`rows`) after the last of them, as a mean over queries and
    texts with a 95 % bootstrap interval over texts.

    Args:
        heads: "all" is the signed mean of each head, or of each group of neighbouring channels where there are more
            than 64; "abs" takes many times longer.
        pool: number of cells along a map's axes. A cell is the mean over its pairs.
        parts: summands are the two terms of a differential layer, the modules of a GroupMamba, the state groups of a
            GFSSM.
        rollout: one map for all chosen layers: the product over layers of residual · I + (1 − residual) · A
            (attention rollout, Abnar & Zuidema 2020). A is the absolute value of the signed mean with heads "mean", the
            mean of absolute values with "abs", its rows divided by their sums. The two differ: in the first, channels
            of opposite sign have cancelled before the sign is dropped. For softmax attention A is the mean over heads;
            for a layer that has both, the mean of the two A.
        span: marked tokens, as "first:last + 1" or a piece of the text; the readout `outside` is the mass off them.

    Raises:
        InputError: a trace without layers, a layer that the model does not have, a row or span that is not in a text,
            an unknown target, a text that is too long for a rollout, or data for a model that reads both ways.
    """
    from ssmscope.api.provenance import record_provenance
    from ssmscope.data.text import TextData
    from ssmscope.interp.attention.measure import Asked
    from ssmscope.interp.attention.result import ImplicitAttention
    from ssmscope.interp.attention.running import attention_over, shown_texts

    some, at = (each if isinstance(each, str) else list(each) for each in (layers, rows))
    options: dict[str, Any] = {"layers": some, "heads": heads, "rows": at, "pool": pool, "span": span, "top": top}
    asked = Asked(level, heads, rows, pool, skip, residual, span, top)
    how: dict[str, Any] = {"layers": layers, "parts": parts, "rollout": rollout, "gradient": gradient, "target": target}
    if not gradient:
        options |= {"residual": residual} if rollout else {}
        options |= {"level": level, "skip": skip, "parts": parts, "rollout": rollout}
    if isinstance(texts, TextData):
        if model is None:
            raise InputError("labelled texts need a model; give it before them")
        options |= {"limit": limit, "target": target} if gradient else {"limit": limit}
        data = texts if limit is None else texts.sample(limit, seed=seed)
        return attention_over(model, data, asked, options, seed=seed, **how)
    trace, shown, names = shown_texts(model, texts, asked, **how)
    options |= {"target": names} if gradient else {}
    return ImplicitAttention(
        provenance=record_provenance(trace.source, options=options),
        texts=tuple(text.finished() for text in shown),
        level="gradient" if gradient else level,
        heads=heads,
        top=top,
    )
