"""Generation: how tokens are chosen, what ends a text, and edits that act while it is."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import random_example, relative
from loud import loud
from prompted import language_model
from refusals import refuses
from small_models import SMALL_MODELS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
import ssmscope
from ssmscope.core.edits import Edit, edited, new_state
from ssmscope.core.lasting_edits import clamped_state, frozen_decays, held_state, while_writing
from ssmscope.core.model import Model
from ssmscope.core.sampling import Sampling
from ssmscope.errors import InputError
from ssmscope.zoo.documents import byte_tokenizer

TEXTS = ["the film is good", "a film", "it is a dull and long story of nothing"]
IDS = [[5, 17, 3, 9], [7, 8], [90, 1, 2, 3, 4, 5, 11]]
model = pytest.fixture(scope="module")(lambda: language_model())


@pytest.fixture
def bare(request) -> Model:
    """A model of a name without a tokenizer, that nothing ends."""
    module = loud(random_example(getattr(request, "param", "mamba2")))
    module.generation_config.eos_token_id = None
    return Model(module)


def test_likelihoods_and_entropies_are_those_of_the_whole_text(model):
    made = model.generate(TEXTS, max_new_tokens=6, temperature=1.5, seed=3)
    logits = model.logits(made.batch(model)).double()
    for row, prompt in enumerate(made.prompts.lengths):
        log_p = logits[row, prompt - 1 : prompt + 5].log_softmax(-1)
        said = torch.tensor(made.ids[row])
        np.testing.assert_allclose(made.log_probabilities[row], log_p.gather(1, said[:, None])[:, 0], rtol=1e-4)
        np.testing.assert_allclose(made.entropies[row], -(log_p.exp() * log_p).sum(-1), rtol=1e-4)
        assert made.texts[row].lstrip() == model.tokenizer.decode(made.ids[row])
        assert made.ended_by[row] == "length" and [token.number for token in made.written[row]] == list(range(6))


def test_what_is_drawn_depends_on_seed_and_prompt_alone(model):
    options = {"max_new_tokens": 8, "temperature": 1.2, "top_k": 40, "top_p": 0.9}
    together = model.generate(TEXTS, **options, seed=1)
    for row, text in enumerate(TEXTS):
        assert model.generate(text, **options, seed=1).ids[0] == together.ids[row]
        assert model.generate(text, **options, seed=2).ids[0] != together.ids[row]
    copies = model.generate([TEXTS[0], TEXTS[1], TEXTS[0]], **options, seed=1, batch_size=1)
    assert copies.ids[:2] == together.ids[:2] and copies.ids[2] != copies.ids[0]
    longer = model.generate(TEXTS, **{**options, "max_new_tokens": 12}, seed=1)
    assert [row[:8] for row in longer.ids] == list(together.ids)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0), -math.inf]]).expand(20_000, 4)
    draws = np.random.default_rng(0).random(20_000)
    found = torch.bincount(Sampling(1.0).choose(logits, draws), minlength=4) / 20_000
    torch.testing.assert_close(found, torch.tensor([1 / 8, 2 / 8, 5 / 8, 0]), atol=0.02, rtol=0)
    assert set(Sampling(1.0, top_k=2).choose(logits, draws).tolist()) == {1, 2}
    assert set(Sampling(1.0, top_p=0.6).choose(logits, draws).tolist()) == {2}
    hot = torch.bincount(Sampling(2.0).choose(logits, draws), minlength=4) / 20_000
    expected = torch.tensor([1, 2**0.5, 5**0.5, 0])
    torch.testing.assert_close(hot, expected / expected.sum(), atol=0.02, rtol=0)
    assert Sampling().choose(torch.tensor([[1.0, 3.0, 3.0]]), None).tolist() == [1]


def test_what_is_drawn_needs_no_memory_for_the_longest_text(bare):
    """The draws are those that a text's generator gives in one piece."""
    prompts, steps = [[5, 17], [5, 17], [3]], 40
    together = [np.random.default_rng([7, *seed]).random(steps) for seed in ([0, 5, 17], [1, 5, 17], [0, 3])]
    one_by_one = [[draw.random() for _ in range(steps)] for draw in Sampling(1.0, seed=7).draws(prompts)]
    assert (np.array(one_by_one) == together).all()
    step = next(bare.generate_stream(ids=IDS, temperature=1.0, max_new_tokens=10**15))
    assert step.written[0].id == bare.generate(ids=IDS, temperature=1.0, max_new_tokens=1).ids[0][0]


def test_a_stream_may_be_open_as_the_interpreter_ends():
    code = """
import sys, ssmscope
stream = ssmscope.load("demo/books-mamba2").generate_stream("Mary", max_new_tokens=9)
next(stream), next(stream)
sys.modules["torch"].kept = stream
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stderr) == (0, "")


def test_texts_end_at_stop_strings_and_end_tokens(model):
    plain = model.generate(TEXTS, max_new_tokens=12)
    stop = plain.tokens[0][4]
    made = model.generate(TEXTS, max_new_tokens=12, stop=[stop, "never said"])
    for row, text in enumerate(made.texts):
        whole, at = plain.texts[row], plain.texts[row].find(stop)
        assert text == (whole if at < 0 else whole[:at]) and (made.ended_by[row] == "stop") == (at >= 0)
        assert made.ids[row] == plain.ids[row][: len(made.ids[row])]
    counted = model.generate(TEXTS, max_new_tokens=12, stop=lambda ids: len(ids) == 3)
    assert {len(row) for row in counted.ids} == {3} and set(counted.ended_by) == {"stop"}


def test_texts_end_with_an_end_token(bare):
    plain = bare.generate(ids=IDS, max_new_tokens=9)
    bare.module.generation_config.eos_token_id = [plain.ids[1][2], 96]
    made = bare.generate(ids=IDS, max_new_tokens=9)
    assert made.ended_by[1] == "end" and made.ids[1] == plain.ids[1][: plain.ids[1].index(plain.ids[1][2]) + 1]


def theirs(module, ids: list[int], **options) -> list[int]:
    """What transformers' own generate writes after a prompt."""
    options |= {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 10}
    return module.generate(input_ids=torch.tensor([ids]), **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("ends", ["int", "list", "tokenizer's", None])
@pytest.mark.parametrize("own", [True, False])
def test_end_tokens_are_those_of_the_generation_settings(ends, own, tmp_path):
    """Whatever end token the tokenizer has; in memory and from a directory."""
    tokenizer = byte_tokenizer()
    module = loud(random_example("mamba2"))
    module.generation_config.eos_token_id = None
    said = theirs(module, IDS[0])
    first, second, third = (said[at] for at in (2, 4, 6))
    if own:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    chosen = {"int": second, "list": [third, second], "tokenizer's": [first, third], None: None}[ends]
    module.generation_config.eos_token_id = chosen
    expected = theirs(module, IDS[0])
    assert len(expected) == {"int": 5, "list": 5, "tokenizer's": 3, None: 10}[ends]
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for model in (Model(module, tokenizer, "m"), ssmscope.load(tmp_path)):
        found = model.generate(ids=[IDS[0]], max_new_tokens=10)
        assert list(found.ids[0]) == expected and found.ended_by == ("length" if ends is None else "end",)


@pytest.mark.parametrize("stop", ["<|end|>", " A", "two", "x\ny"])
def test_stop_strings_are_transformers(stop):
    """With special tokens, a space at the text's beginning that the decoder drops, and a beginning in the prompt."""
    words = {"<unk>": 0, "<s>": 1, "▁A": 2, "▁B": 3, "C": 4, "▁t": 5, "wo": 6, "x": 7, "\n": 8, "y": 9, "<|end|>": 10}
    words |= {f"▁w{number}": number for number in range(11, 96)} | {"▁abcdef": 96}  # What transformers tries.
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    last, written, number = {"<|end|>": (3, 10, 3), " A": (4, 2, 0), "two": (5, 6, 0), "x\ny": (8, 9, 0)}[stop]
    prompt = [1, 7, last]
    module = loud(random_example("mamba2"))
    module.generation_config.eos_token_id = None
    with torch.no_grad():
        module.lm_head.weight[[2, 6, 9, 10]] = 0
    said = theirs(module, prompt)
    with torch.no_grad():
        module.lm_head.weight[written] = module.lm_head.weight[said[number]] * 1.5
    expected = theirs(module, prompt, stop_strings=[stop], tokenizer=tokenizer)
    model = Model(module, tokenizer, "m")
    found = model.generate(ids=[prompt], max_new_tokens=10, stop=stop)
    assert written in expected and len(expected) == number + 1
    assert list(found.ids[0]) == expected and found.ended_by == ("stop",)
    assert found.texts[0] == model.generate(ids=[prompt], max_new_tokens=10).texts[0][: len(found.texts[0])]
    assert (found.texts[0] == "") == (number == 0)


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e-35, 1e-9])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_temperature_near_0_takes_the_likeliest_token(temperature, options, scale):
    random = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(50, 300, generator=random)
    for given in (logits, logits.clamp(max=60_000).half().float(), logits.double(), logits.sub(1e6)):
        found = Sampling(temperature, **options).choose(given, np.random.default_rng(0).random(50))
        assert found.tolist() == Sampling().choose(given, None).tolist()


def test_a_model_at_a_temperature_near_0_writes_what_it_writes_at_0(bare):
    for module in (bare.module, bare.module.half().float()):
        plain = Model(module).generate(ids=IDS, max_new_tokens=5)
        assert Model(module).generate(ids=IDS, max_new_tokens=5, temperature=1e-38, seed=3).ids == plain.ids


def test_other_texts_go_on_as_if_alone_where_one_has_ended(bare):
    alone = [bare.generate(ids=[ids], max_new_tokens=9).ids[0] for ids in IDS]
    made = bare.generate(ids=IDS, max_new_tokens=9, stop=lambda ids: tuple(ids) == alone[1][:2])
    assert [*map(len, made.ids)] == [9, 2, 9] and made.ids[0] == alone[0] and made.ids[2] == alone[2]
    idle = Edit("nothing", "output", lambda value, site: value)
    under = bare.generate(ids=IDS, max_new_tokens=9, stop=lambda ids: tuple(ids) == alone[1][:2], edits=idle)
    assert under.ids == made.ids


@pytest.mark.parametrize("bare", ["mamba2", "jamba"], indirect=True)
def test_kept_states_go_on(bare):
    made = bare.generate(ids=IDS, max_new_tokens=5, keep_states=True, stop=lambda ids: len(ids) == 3, batch_size=2)
    again = bare.generate(ids=IDS, max_new_tokens=4)
    after = bare.run(bare.encode(ids=[[row[-1]] for row in made.ids]), made.states).logits[:, 0]
    assert after.argmax(-1).tolist() == [row[3] for row in again.ids]


def test_steps_go_on_in_the_context_of_the_call(bare):
    """Whoever asks for a step may run and edit the model meanwhile, and edits of the call's context stay."""
    turned = Edit("turned", "output", lambda value, site: value.flip(-1))
    plain = bare.generate(ids=IDS, max_new_tokens=4).ids
    with edited(bare, turned):
        expected = bare.generate(ids=IDS, max_new_tokens=4).ids
        steps = bare.generate_stream(ids=IDS, max_new_tokens=4)
    assert expected != plain
    batch = bare.encode(ids=IDS)
    logits, rows = bare.logits(batch), []
    for step in steps:
        rows.append([token.id for token in step.written])
        assert torch.equal(bare.logits(batch), logits)
    assert [tuple(row) for row in zip(*rows)] == list(expected)
    stopped = bare.generate_stream(ids=IDS, max_new_tokens=4)
    next(stopped), next(stopped)
    stopped.close()
    assert not any("forward" in vars(part) or part._forward_pre_hooks for part in bare.module.modules())


def test_an_edit_acts_from_one_token_to_another_and_where_a_condition_holds(bare):
    seen: list[int] = []

    def louder(value, site):
        seen.append(value.shape[1])
        return 3 * value

    edit = Edit("louder", "output", louder, layers=(0,))
    plain = bare.generate(ids=IDS, max_new_tokens=8)
    bare.generate(ids=IDS, max_new_tokens=8, edits=edit)
    assert seen == [7]  # the prompt's run alone
    seen.clear()
    later = bare.generate(ids=IDS, max_new_tokens=8, edits=while_writing(edit, start=2, stop=5))
    assert seen == [1, 1, 1] and [row[:3] for row in later.ids] == [row[:3] for row in plain.ids]
    assert later.ids != plain.ids
    for row in range(3):
        here = bare.generate(ids=IDS, max_new_tokens=8, edits=while_writing(edit, when=lambda token: token.row == row))  # noqa: B023
        every = bare.generate(ids=IDS, max_new_tokens=8, edits=while_writing(edit))
        assert here.ids[row] == every.ids[row]
        assert [here.ids[other] for other in range(3) if other != row] == [
            plain.ids[other] for other in range(3) if other != row
        ]


@pytest.mark.parametrize("bare", ["mamba", "mamba2", "gated-deltanet", "gla", "baleen-b-mamba"], indirect=True)
def test_a_held_state_stays_and_a_clamped_one_has_its_component(bare):
    heads = bare.run(bare.encode(ids=IDS)).states[0].ssm[0].shape[1]
    kept = [head for head in range(heads) if head % 2]
    held = while_writing(held_state(layers=[0], heads=kept), start=1)
    steps = list(bare.generate_stream(ids=IDS, max_new_tokens=5, edits=held, keep_states=True))
    first, last = steps[2].states[0].ssm[0], steps[-1].states[0].ssm[0]
    others = [head for head in range(heads) if head not in kept]
    assert torch.equal(first[:, kept], last[:, kept]) and relative(last[:, others], first[:, others]) > 1e-3
    shape = first.shape[1:]
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    clamp = clamped_state(direction, 2.5, layers=[0], heads=kept)
    steps = list(bare.generate_stream(ids=IDS, max_new_tokens=3, edits=[clamp], keep_states=True))
    unit = direction / direction.flatten(1).norm(dim=1)[:, None, None]
    along = [(step.states[0].ssm[0] * unit).sum((-2, -1)) for step in steps]
    torch.testing.assert_close(along[0][:, kept], torch.full((3, len(kept)), 2.5), atol=1e-4, rtol=0)
    assert not torch.allclose(along[1][:, kept], along[0][:, kept])  # Only at the prompt's end.
    clamp = while_writing(clamp, prompt=True)
    steps = list(bare.generate_stream(ids=IDS, max_new_tokens=3, edits=[clamp], keep_states=True))
    for step in steps:
        along = (step.states[0].ssm[0] * unit).sum((-2, -1))
        torch.testing.assert_close(along[:, kept], torch.full((3, len(kept)), 2.5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bare", ["mamba", "mamba2", "gla"], indirect=True)
def test_frozen_decays_are_what_the_state_is_multiplied_by(bare):
    found = []

    def silent(layer, site):
        found.append(layer.recurrences[0].log_decay().exp())
        return replace(layer, recurrences=tuple(replace(r, x=0 * r.x) for r in layer.recurrences))

    edits = [while_writing(each) for each in (frozen_decays(0.5, layers=[0]), Edit("silent", "terms", silent, (0,)))]
    steps = list(bare.generate_stream(ids=IDS, max_new_tokens=4, edits=edits, keep_states=True))
    states = [step.states[0].ssm[0] for step in steps]
    torch.testing.assert_close(states[3], states[1] / 4)
    recorded = {0: [found[0][0, 0]]}
    again = [while_writing(each) for each in (frozen_decays(recorded), Edit("silent", "terms", silent, (0,)))]
    found.clear()
    list(bare.generate_stream(ids=IDS, max_new_tokens=4, edits=again))
    assert all(torch.allclose(decay, recorded[0][0]) for decay in found)


@pytest.mark.parametrize("name", ["jamba", "zamba", "zamba2", "granitemoehybrid"])
def test_without_position_embeddings_no_length_is_too_long(name):
    """transformers' own generate writes on, and its logits do not change with the number of positions."""
    module = loud(random_example(name))
    if name == "granitemoehybrid":
        fields = {**module.config.to_dict(), "position_embedding_type": None}
        module = loud(type(module)(type(module.config)(**fields)))
    module.generation_config.eos_token_id = None
    module.config.max_position_embeddings = 10
    written = Model(module).generate(ids=IDS[2], max_new_tokens=12).ids[0]
    own = module.generate(input_ids=torch.tensor(IDS[2:]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert list(written) == own[0, len(IDS[2]) :].tolist()


def test_what_a_tokenizer_gives_for_blank_texts_is_read_as_ids(model):
    tokenizer = model.tokenizer
    ids = [tokenizer.encode("the film")[0], tokenizer.eos_token_id or 0]
    for row in ([[ids[1]]], [[ids[1]], ids]):
        batch = model.encode({"input_ids": row, "attention_mask": [[1] * len(each) for each in row]})
        assert batch.lengths == [len(each) for each in row]
        as_ids = model.encode(ids=row)
        assert torch.equal(batch.input_ids, as_ids.input_ids) and batch.tokens == as_ids.tokens
        assert torch.equal(model.logits(batch), model.logits(as_ids))
        assert model.generate(row, max_new_tokens=3).ids == model.generate(ids=row, max_new_tokens=3).ids
    breaks = tokenizer("\n\n")
    if breaks["input_ids"]:
        assert model.encode(breaks).input_ids.tolist() == [breaks["input_ids"]]
    assert len(ssmscope.explain(model, [[ids[1]]], methods=["gradxinput"]).to_frame()) == 1
    refuses("the text is empty", model.encode, "\n\n")


def test_what_does_not_fit_is_refused(model, bare):
    twice = {"max_new_tokens": 2}
    for options, said in (
        ({"max_new_tokens": 0}, "max_new_tokens is 0; allowed is a whole number from 1 on"),
        ({"top_k": 3}, "top_k and top_p are for drawing tokens; give temperature=…"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k is 1.5; allowed is a whole number from 1 on"),
        ({"seed": -1}, "seed is -1; allowed is a whole number from 0 on"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"stop": ["."]}, "has no tokenizer to read stop strings with"),
    ):
        refuses(said, bare.generate, ids=IDS, **{**twice, **options})
        refuses(said, bare.generate_stream, ids=IDS, **{**twice, **options})
    for size in (0, -3, 1.5):
        refuses(f"batch_size is {size}; allowed is a whole number from 1 on", bare.generate, ids=IDS, batch_size=size)
    refuses("start is -1; allowed is a whole number from 0 on", while_writing, held_state(), start=-1)
    refuses("a stop string is empty", model.generate, TEXTS, stop=["", "."])
    refuses("reads one token in each run, .* give after=-1", while_writing, new_state(3, lambda state, site: state))
    with pytest.raises(InputError, match="a state at the end of a run is edited, which this run does not keep"):
        with edited(bare, new_state(-1, lambda state, site: state)):
            bare.logits(bare.encode(ids=IDS))
    refuses("zero in some head", clamped_state, torch.zeros(2, 3), 1.0)
    with pytest.raises(InputError, match="there is no head 99; the layer has the heads 0 to"):
        bare.generate(ids=IDS, edits=while_writing(held_state(heads=[99])))
    refuses("outside 0 to 1", frozen_decays, 1.5)
    for name, said in (("selective-ssm", "is a classifier"), ("vim", "is a classifier")):
        other = Model(SMALL_MODELS[name]()[name]) if name in SMALL_MODELS else Model(random_example(name))
        with pytest.raises(InputError, match=said):
            given = {"values": torch.rand(1, 16, other.channels)} if other.channels else {"ids": IDS}
            other.generate(other.encode(**given))
    hybrid = Model(random_example("bamba"))
    hybrid.config.max_position_embeddings = 10
    refuses("positions for 10 tokens.* has 7: ask for at most 3 new tokens", hybrid.generate, ids=IDS, max_new_tokens=4)
    assert hybrid.generate(ids=IDS, max_new_tokens=3).ids
