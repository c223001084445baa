"""Generalisation bound of a selective SSM, computed from its weights (Generalization Error Analysis for Selective
State-Space Models, Honarpisheh et al., Theorem 3.3, Proposition 3.4 and Theorem 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import Texts
from ssmscope.api.options import Range, Seed
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.probes.bound.result import GeneralizationBound

Delta = Annotated[float, "δ, the probability with which the bound may fail.", Range(0, 1, strict=True)]
LossBound = Annotated[float, "c_l, the largest loss.", Range(0, strict=True)]
Lipschitz = Annotated[float, "l, the loss's Lipschitz constant.", Range(0, strict=True)]
Lengths = Annotated[
    Sequence[int] | None, "Lengths T at which the curves show ln C (default: 41, up to 10,000 or 10 T).", Range(1)
]


@analysis("bound", reads=Texts(needed=False), question="What does theory guarantee of it?")
def generalization_bound(
    model: Model,
    texts: TextsLike | None = None,
    *,
    length: Annotated[
        int | None, "T, the tokens of a text (default: those of the longest text, or 512).", Range(1)
    ] = None,
    examples: Annotated[
        int | None, "m, the number of examples MODEL was trained on (default: from its training.json).", Range(1)
    ] = None,
    delta: Delta = 0.05,
    loss_bound: LossBound = 1.0,
    lipschitz: Lipschitz = 1.0,
    lengths: Lengths = None,
    seed: Seed = 0,
) -> GeneralizationBound:
    """Bound the difference between the training and the expected loss of a selective SSM.

    For any other model, which the theorem does not cover, report the corresponding terms layer by layer.

    With probability 1 − δ the expected and the training loss of a selective SSM differ by at most (Theorem 3.3, Eq. 13,
    with the first constant that its proof gives)

        24 l C / √m · (1 + ln(c_l √m / (3 l C))) + 3 c_l √(ln(2/δ) / 2m),

    where the capacity C is a function of the norms of the weights and embeddings, the length T and the growth rate ρ.
    It holds only while 3 l C / √m ≤ c_l; beyond that the bound is vacuous, and only c_l is known. C is given with all
    constants of the proof, which the bound uses, and by Eq. 14, whose Õ hides them. The norms that the theorem assumes
    are the trained model's own. With several classes, w is the row of W with the largest C. The curves show ln C at 41
    lengths up to 10,000 or 10 T.

    For comparison: the capacity of linear attention with the same W_B, W_C and w, C = T B_w B_B B_C B_u³ (Proposition
    3.4), to which the model reduces if A = 0, q = 0 and softplus(p) = 1; and the lower bounds on the Rademacher
    complexity for s_A ≥ 0, as printed (Eqs. 19 and 20).

    For a model outside the theorem, the corresponding quantities are measured layer by layer on texts, by default 4
    random sequences of T tokens, at most 512, with C in the form of Eq. 14. They compare layers and lengths; no bound
    follows from them.

    Raises:
        InputError: a selective SSM whose number of training examples is unknown, texts for one (its bound covers all
            texts), or numbers that are not finite.
    """
    from ssmscope.api.provenance import record_provenance
    from ssmscope.core.mixers import check_causal
    from ssmscope.loading.load import trained_examples
    from ssmscope.probes.bound.measure import measured_terms, theorem_bound
    from ssmscope.probes.bound.terms import theorem_model
    from ssmscope.probes.stability.measure import DEFAULT_LENGTH

    parts = theorem_model(model)
    check_causal(model.module, "the bound")
    model.check_recurrent_state("the bound")
    if examples is None:
        examples = trained_examples(model.name)
    setting: dict[str, Any] = {"length": length, "examples": examples}
    setting |= {"delta": delta, "loss_bound": loss_bound, "lipschitz": lipschitz}
    if parts is None:
        return measured_terms(model, texts, lengths, setting, seed)
    if texts is not None:
        raise InputError(f"the bound of {model.name} holds for all texts: leave them out")
    if examples is None:
        raise InputError(f"the number of examples {model.name} was trained on is not recorded; give it, examples=…")
    setting["length"] = DEFAULT_LENGTH if length is None else length
    return theorem_bound(parts, lengths, record_provenance(model.source, options=setting), setting)
