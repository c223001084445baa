"""What a change of a text does to the mechanism: what is kept, what is attended to, and how far the states move.

A broken answer says that an attack worked, not how. The parts of a state-space layer are known, so that both texts can
be compared where it happened: the selection gates (Baleen, Eq. 10), the implicit attention of the last position (Ali et
al. 2024), the final states, and how a difference made at one token dies out or lives on along the text (as the
influence of early tokens does, Wang et al. 2024).
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


def check_texts(*, before: str | None = None, after: str | None = None, **others: Any) -> None:
    """Refuse texts that are missing or empty.

    Raises:
        InputError: as said.
    """
    for name, text in (("before", before), ("after", after)):
        if text is None or not text.strip():
            raise InputError(f"{name} is {'missing' if text is None else 'empty'}; give a text")


@analysis("effect", question="Why does an attack work?", models=TEXT_MODELS, check=check_texts)
def attack_effect(
    model: Model,
    *,
    before: Annotated[str, "The text as it was."],
    after: Annotated[str, "The text as the attack left it."],
    layers: Layers = "mean",
    top: Top = 5,
) -> AttackEffect:
    """Why an attack works: memory, implicit attention and states of a text before it and after.

    Tokens are aligned by their ids (`difflib`): those with no counterpart are the changed ones. Retention is Baleen's
    Eq. 10, write 1 − retention. What the last position takes from a token is the implicit attention at the level of the
    block, the mean over channels of absolute values |α|, as a share of its sum over all tokens and the state before the
    first one. The last position is where a classifier reads its class, or a language model its next token.

    The distance at a token that both texts have is ‖u′ − u‖ / ‖u‖, with u and u′ a layer's input before and after the
    change; the row "head" has the vectors that the model's head reads. It is 0 up to the first changed token, since
    nothing looks ahead, and says behind it how the change is carried on. What rounding leaves (1e-5) counts as 0.

    Args:
        layers: "mean" averages all layers over tokens; "all", or a list of layer numbers, averages the chosen ones and
            also shows each of them in the table.

    Raises:
        InputError: an empty text, a model without a tokenizer, what `Model.encode` refuses, and an unknown layer.
    """
    from ssmscope.attacks.effect.measure import effect_of

    model.check_tokenizer()
    recorded = {"before": before, "after": after}
    return effect_of(model, model.encode([before, after]), layers=layers, top=top, recorded=recorded)
