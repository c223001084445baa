"""Contracts of models that are ours, which transformers' models meet too."""

from typing import Any

import pytest
import torch
from examples import EXAMPLES, VARIANTS, random_example, relative
from exhaustive import ALL, CONTRACTS, in_turns
from loud import loud
from transformers import AutoModel, AutoModelForCausalLM
from ssmscope.core.intercept import observe
from ssmscope.networks.generation import CACHE

LANGUAGE = [
    name
    for at, name in enumerate(EXAMPLES)
    if (ALL or (at % 2 if CONTRACTS else name not in VARIANTS))
    and (kind := type(random_example(name))).__module__.startswith("ssmscope.")
    and kind.__name__.endswith("ForCausalLM")
    and hasattr(random_example(name), "backbone")
]
PADDED = torch.tensor([[3, 9, 17, 4], [0, 0, 21, 8]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def pads(model) -> bool:
    """Return True if padding before a text changes nothing; transformers' mixers with biases convolve that of
    padding."""
    return not getattr(model.config, "use_bias", False)


language = pytest.fixture(params=LANGUAGE)(lambda request: loud(random_example(request.param)))

WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "drawn": {"do_sample": True}, "beams": {"num_beams": 3}}


@pytest.mark.parametrize(("language", "by"), in_turns(LANGUAGE, WAYS), indirect=["language"])
def test_transformers_generates_from_states(language, by):
    """Every token is read once, and the logits are those of the whole text."""
    language.generation_config.eos_token_id = None
    way, (ids, mask) = WAYS[by], PADDED
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True, **way}
    read: list[int] = []

    def note(_, args, kwargs) -> None:
        read.append((args[0] if args else kwargs["input_ids"]).shape[1])

    with observe(before=[(language.base_model, note)]):
        made = language.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options)
    assert read == [4, 1, 1, 1] and made.sequences.shape == (2, 8)
    for row, start in ((0, 0), (1, 2))[: 1 + pads(language)]:
        with torch.no_grad():
            logits = language(made.sequences[row : row + 1, start:]).logits[0, -5:-1]
        if "num_beams" in way:
            scores = logits.log_softmax(-1).gather(1, made.sequences[row, 4:, None]).mean()
            torch.testing.assert_close(made.sequences_scores[row], scores)
            continue
        assert relative(torch.stack(made.logits)[:, row], logits) < 1e-5
        assert way or logits.argmax(-1).tolist() == made.sequences[row, 4:].tolist()


def test_a_cache_goes_on_where_it_ended(language):
    ids, mask = PADDED
    with torch.no_grad():
        whole = language(ids, attention_mask=mask).logits
        first = language(ids[:, :3], attention_mask=mask[:, :3], use_cache=True)
        second = language(ids[:, 3:], **{CACHE: first[CACHE]})
    assert first[CACHE].length == 3 and second[CACHE].length == 4
    assert relative(torch.cat([first.logits, second.logits], dim=1)[0], whole[0]) < 1e-5
    assert not pads(language) or relative(second.logits[1], whole[1, 3:]) < 1e-5


def test_auto_classes_open_what_was_saved(language, tmp_path):
    language.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(language)
    for name, weight in language.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    backbone = AutoModel.from_pretrained(tmp_path)
    assert isinstance(backbone, type(language.backbone)) and backbone.config_class is language.config_class


def test_half_precision_stays_near(language):
    ids = torch.tensor([[3, 9, 17, 4]])
    with torch.no_grad():
        whole = language(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            mixed = language(ids).logits
        half = language.bfloat16()(ids).logits
    for other in (mixed, half):
        assert 0 < relative(other.float(), whole) < 0.1
