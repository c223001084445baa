"""Effect of a change of a text on a model: retention, implicit attention, and the distance of the states.

A changed answer says that an attack worked, not how. Both texts are compared where it happens: in the selection gates
(Baleen, Eq. 10), the implicit attention of the last position (Ali et al. 2024), the final states, and in how a
difference at one token decays or persists along the text (as the influence of early tokens does, Wang et al. 2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import TEXT_MODELS
from ssmscope.api.options import Layers, Top
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.attacks.effect.result import AttackEffect
    from ssmscope.core.model import Model


def check_texts(*, clean: str | None = None, corrupted: str | None = None, **others: Any) -> None:
    """Raise InputError if a text is missing or empty."""
    for name, text in (("clean", clean), ("corrupted", corrupted)):
        if text is None or not text.strip():
            raise InputError(f"{name} is {'missing' if text is None else 'empty'}; give a text")


@analysis("effect", question="Why does an attack work?", models=TEXT_MODELS, check=check_texts)
def attack_effect(
    model: Model,
    *,
    clean: Annotated[str, "Original text."],
    corrupted: Annotated[str, "Attacked text."],
    layers: Layers = "mean",
    top: Top = 5,
) -> AttackEffect:
    """Compare memory, implicit attention and states on a clean and a corrupted text.

    Tokens are aligned by their ids (`difflib`); those without a counterpart are the changed ones. Retention is Baleen's
    Eq. 10, write 1 − retention. Attention to a token is the implicit attention of the last position at the level of the
    block, the mean over channels of |α|, as a share of its sum over all tokens and the state before the first one. A
    classifier reads its class at the last position, a language model its next token.

    The distance at a token that both texts have is ‖u′ − u‖ / ‖u‖, with u and u′ a layer's input before and after the
    change; the row "head" has the vectors that the model's head reads. It is 0 up to the first changed token, because
    the models are causal, and shows after it how the change propagates. Distances within rounding (1e-5) count as 0.

    Args:
        layers: "mean" averages all layers; "all", or a list of layer numbers, averages the chosen ones and also shows
            each of them.

    Raises:
        InputError: an empty text, a model without a tokenizer, what `Model.encode` refuses, and an unknown layer.
    """
    from ssmscope.attacks.effect.measure import effect_of

    model.check_tokenizer()
    return effect_of(model, model.encode([clean, corrupted]), layers=layers, top=top)
