"""Models that answer prompts with label words: their loss, their scores, and the whole way from data to answers."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from mixture import SIZES, write_mixture
from refusals import refuses
from safetensors.torch import load_file
import ssmscope
from ssmscope import cli
from ssmscope.core.mixers import fast_scan
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.errors import InputError
from ssmscope.zoo.baleen import convert, information_loss
from ssmscope.zoo.documents import word_tokenizer
from ssmscope.zoo.instructions import label_tokens, load_mixture, spoken
from ssmscope.zoo.tokenizers import train_byte_pairs
from ssmscope.zoo.training import train_model
from ssmscope.zoo.training.answering import Answers
from ssmscope.zoo.training.card import commands_before

OPTIONS: dict[str, Any] = {"width": 16, "layers": 1, "state": 4, "head_width": 8, "vocabulary": 600, "progress": False}
PLAIN = {
    **{"seed": 0, "batch_size": 8, "precision": "fp32"},
    **dict.fromkeys(
        ("dropout", "embedding_dropout", "token_dropout", "subword_dropout", "label_smoothing", "prompt_weight"), 0.0
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {**SIZES, "sst2": {"train": 200, "validation": 12, "test": 16}}
    return write_mixture(tmp_path_factory.mktemp("data"), sizes)


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.setenv("SSMSCOPE_DATA", str(folder))


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A Mamba-2 that has learnt the words which give a class away, and a Baleen-E made of it."""
    out = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSMSCOPE_DATA", str(folder))
        patch.chdir(out)
        options = {"width": 32, "epochs": 10, "batch_size": 8, "learning_rate": 1e-2}
        undropped = dict.fromkeys(("dropout", "embedding_dropout", "token_dropout", "subword_dropout"), 0.0)
        train_model("mamba2", "instruct", "base", **{**OPTIONS, **options, **undropped})
        line = "train baleen-e --data instruct --init-from base --epochs 1 --set beta=0.1 --no-progress --out baleen"
        assert cli.run(line.split()) == 0
    return out


@pytest.fixture(scope="module")
def parts(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSMSCOPE_DATA", str(folder))
        return load_mixture()


small = pytest.fixture(lambda trained: ssmscope.load(trained / "base"))


def answers(parts, tokenizer, **options) -> Answers:
    return Answers(parts, {**PLAIN, **options}, torch.device("cpu"), tokenizer)


def rows_of(objective: Answers) -> list[int]:
    """Eight prompts of different lengths in the first epoch."""
    rows = sorted(row for batch in objective.batches(0) for row in batch)
    return rows[:: len(rows) // 8][:8]


@pytest.mark.parametrize(("smoothing", "weight"), [(0.0, 0.0), (0.3, 0.0), (0.1, 0.7)])
def test_the_loss_is_that_of_every_row_alone(small, parts, smoothing, weight) -> None:
    objective = answers(parts, small.tokenizer, label_smoothing=smoothing, prompt_weight=weight)
    rows = rows_of(objective)
    with fast_scan(small.module), torch.no_grad():
        found = objective.loss(small.module.eval(), rows).item()
    data, words = parts["train"], label_tokens(small.tokenizer, parts["train"].sources)
    known = [words[key] for key in zip(data.tasks, data.templates)]
    lengths = set()
    expected, inner = [], []
    for row in rows:
        prompt = small.tokenizer(data.texts[row])["input_ids"]
        words = list(known[row])
        right = words[data.labels[row]]
        with torch.no_grad():
            logits = small.logits(small.encode(ids=[*prompt, right]))[0].log_softmax(-1)
        target = (1 - smoothing) * logits[len(prompt) - 1, right] + smoothing * logits[len(prompt) - 1, words].mean()
        expected.append(-(target + logits[len(prompt), small.tokenizer.eos_token_id]).item())
        inner += [-logits[at, token].item() for at, token in enumerate(prompt[1:])]
        lengths.add(len(prompt))
    assert len(lengths) > 1
    assert found == pytest.approx(np.mean(expected) + weight * np.mean(inner), rel=1e-5)


def test_only_the_answer_is_asked(small, parts) -> None:
    """The loss reaches the logits after the prompt and after the word, no others."""
    objective = answers(parts, small.tokenizer)
    rows = rows_of(objective)
    seen = []
    handle = small.module.base_model.register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state))
    try:
        with fast_scan(small.module):
            loss = objective.loss(small.module.eval(), rows)
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(loss, seen[0])
    lengths = [len(small.tokenizer(parts["train"].texts[row])["input_ids"]) for row in rows]
    for asked, length in zip(gradient.abs().sum(-1) > 0, lengths):
        assert asked.nonzero().flatten().tolist() == [length - 1, length]


def read_ids(objective, module, rows) -> torch.Tensor:
    """Record the ids that the model reads in a training step."""
    seen = []
    handle = module.get_input_embeddings().register_forward_hook(lambda *given: seen.append(given[1][0]))
    try:
        with fast_scan(module), torch.no_grad():
            objective.loss(module, rows)
    finally:
        handle.remove()
    return seen[0]


@pytest.mark.parametrize("embedding_dropout", [0.0, 0.2])
def test_hidden_tokens_are_of_the_prompt(small, parts, embedding_dropout) -> None:
    torch.manual_seed(0)
    plain = answers(parts, small.tokenizer)
    objective = answers(parts, small.tokenizer, token_dropout=0.3, embedding_dropout=embedding_dropout)
    rows = rows_of(objective)
    assert rows == rows_of(plain)
    whole, given = (read_ids(o, small.module, rows) for o in (plain, objective))
    hidden = given == small.tokenizer.unk_token_id
    assert torch.equal(given[~hidden], whole[~hidden])
    of_prompt = torch.arange(whole.shape[1]) < (whole != small.tokenizer.pad_token_id).sum(1, keepdim=True) - 1
    assert not hidden[~of_prompt].any() and hidden[of_prompt].float().mean().item() == pytest.approx(0.3, abs=0.08)
    words = [parts["train"].answers[row] for row in rows]
    last = (whole != small.tokenizer.pad_token_id).sum(1) - 1
    assert [small.tokenizer.decode([i]) for i in given[torch.arange(len(rows)), last]] == [f" {word}" for word in words]


def test_a_tokenizer_that_cannot_hide_tokens_or_end_is_refused(parts) -> None:
    tokenizer = train_byte_pairs(spoken(parts["train"]), vocabulary=600)
    tokenizer.unk_token = None
    assert answers(parts, tokenizer).unknown_id is None
    with pytest.raises(InputError, match="token_dropout is 0.1, but the tokenizer has no unknown token"):
        answers(parts, tokenizer, token_dropout=0.1)
    tokenizer.eos_token = None
    refuses("the tokenizer has no end token", answers, parts, tokenizer)


def test_words_are_cut_anew_in_every_epoch_but_the_answer(small, parts) -> None:
    objective = answers(parts, small.tokenizer, subword_dropout=0.5)
    data = parts["train"]
    cuts = []
    for epoch in (0, 1, 0):
        batches = objective.batches(epoch)
        rows = sorted(row for batch in batches for row in batch)
        assert rows == data.drawn(0, epoch)
        for row in rows:
            assert small.tokenizer.decode(objective.current[row]) == data.texts[row].lower()
        cuts.append(objective.current)
        given = read_ids(objective, small.module, batches[0])
        for ids, row in zip(given, batches[0]):
            real = ids[ids != small.tokenizer.pad_token_id].tolist()
            assert real[:-1] == objective.current[row]
            assert small.tokenizer.decode(real[-1:]) == f" {data.answers[row]}"
    whole = small.tokenizer(list(data.texts))["input_ids"]
    assert cuts[0] == cuts[2]
    assert sum(len(ids) for ids in cuts[0].values()) > 1.2 * sum(len(whole[row]) for row in cuts[0])
    both = cuts[0].keys() & cuts[1].keys()
    assert any(cuts[0][row] != cuts[1][row] for row in both)


def test_a_baleens_divergence_is_part_of_the_loss(small, parts) -> None:
    objective = answers(parts, small.tokenizer)
    rows = rows_of(objective)
    for gate in ("bernoulli", "exponential"):
        losses = []
        for beta in (0.0, 2.0):
            module = convert(small.module, gate, beta=beta).train()
            torch.manual_seed(0)
            with fast_scan(module), torch.no_grad():
                losses.append(objective.loss(module, rows).item())
        module = convert(small.module, gate).train()
        batch = read_ids(objective, small.module.eval(), rows)
        with fast_scan(module), torch.no_grad():
            module(input_ids=batch, attention_mask=(batch != small.tokenizer.pad_token_id).long())
        divergence = information_loss(module)
        assert divergence is not None and divergence > 1e-4
        assert losses[1] - losses[0] == pytest.approx(2 * divergence.item(), rel=1e-3, abs=1e-5)


def test_the_score_is_that_of_every_prompt_alone(small, parts) -> None:
    data = parts["unseen"]
    objective = answers(parts, small.tokenizer)
    with fast_scan(small.module):
        score = objective.score(small.module, "unseen")
    words = label_tokens(small.tokenizer, data.sources)
    known = [words[key] for key in zip(data.tasks, data.templates)]
    found: dict[tuple[str, int, int], tuple[bool, float]] = {}
    for row, text in enumerate(data.texts):
        logits = small.logits(small.encode(text))[0, -1, list(known[row])].double().log_softmax(-1)
        key = data.tasks[row], data.templates[row], data.examples[row]
        found[key] = int(logits.argmax()) == data.labels[row], -logits[data.labels[row]].item()

    def expected(task=None, template=None):
        chosen = {k: v for k, v in found.items() if task in (None, k[0]) and template in (None, k[1])}
        numbers = sorted({k[2] for k in chosen})
        each = [[v for k, v in chosen.items() if k[2] == number] for number in numbers]
        return [[sum(v[0] for v in e) for e in each], [len(e) for e in each], [sum(v[1] for v in e) for e in each]]

    def compare(score, columns) -> None:
        assert score.right.tolist() == columns[0] and score.asked.tolist() == columns[1]
        assert np.allclose(score.loss, columns[2], atol=1e-4)

    compare(score, expected())
    assert list(score.groups) == ["sst2", "wnli", "snli"]
    for task, group in score.groups.items():
        compare(group, expected(task))
        assert list(group.groups) == ["5", "6"]
        for number, each in group.groups.items():
            compare(each, expected(task, int(number) - 1))
            assert not each.groups


def test_a_trained_model_answers_with_the_right_label_words(trained, parts) -> None:
    record = json.loads((trained / "base" / "training.json").read_text())
    model = ssmscope.load(trained / "base")
    data, right, said = parts["test"], 0, 0
    for text, answer, task in zip(data.texts, data.answers, data.tasks):
        ids = model.tokenizer(text)["input_ids"]
        with torch.no_grad():
            first = model.module(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()
            second = model.module(input_ids=torch.tensor([[*ids, first]])).logits[0, -1].argmax().item()
        word = model.tokenizer.decode([first]).strip()
        right += word == answer
        said += word in TASK_PROMPTS[task].words and second == model.tokenizer.eos_token_id
    assert said == len(data)
    assert abs(right - record["test"]["correct"]) <= 1  # in batches a tie may fall otherwise
    assert right > 0.9 * len(data)
    assert record["test"]["asked"] == len(data) and record["test"]["examples"] == len(data.first)


def test_the_head_is_the_embeddings_unless_that_is_not_wanted(trained, tmp_path) -> None:
    for name in ("base", "baleen"):
        record = json.loads((trained / name / "training.json").read_text())
        weights = load_file(trained / name / "model.safetensors")
        module = ssmscope.load(trained / name).module
        assert module.get_output_embeddings().weight is module.get_input_embeddings().weight
        assert sum(600 in tensor.shape for tensor in weights.values()) == 1
        assert record["parameters"] == sum(tensor.numel() for tensor in weights.values())
    options = {**OPTIONS, "mixture": "wnli", "epochs": 1, "tied": False}
    out = train_model("mamba2", "instruct", tmp_path / "o", **options)
    size = json.loads((out / "config.json").read_text())["vocab_size"]
    assert sum(size in tensor.shape for tensor in load_file(out / "model.safetensors").values()) == 2


def test_all_commands_that_led_to_a_model_are_told(tmp_path) -> None:
    (tmp_path / "training.json").write_text(json.dumps({"command": "second", "commands_before": ["first"]}))
    assert commands_before(tmp_path) == ["first", "second"]
    assert commands_before(None) == commands_before(tmp_path / "elsewhere") == []
    assert commands_before("demo/instruct-mamba2")[0].startswith("analyze train mamba2 --data instruct --out")


@pytest.mark.parametrize(("line", "says"), [
    ("mamba2 --data instruct --set mixture=sst3", "'sst3' is not a task of the mixture; .* did you mean 'sst2'"),
    ("mamba2 --data instruct --split train", "split does not apply to instruct, a mixture of data sets"),
    ("mamba2 --data instruct --test sst2", "test does not apply to instruct"),
    ("mamba2 --data instruct --length 9", "length does not apply to instruct"),
    ("mamba2 --data instruct --set max_length=9", "max_length does not apply to instruct"),
    ("mamba2 --data instruct --set vocabulary=258", "vocabulary is 258; it must be at least 259"),
    ("mamba2 --data instruct --set vocabulary=270", "'negative' of sst2 is not one token after prompt 1"),
    ("mamba2 --data instruct --set prompt_weight=-1", "prompt_weight is -1.0; it must be 0 or more"),
    ("mamba2 --data sst2 --set mixture=sst2", "mixture does not apply to sst2"),
    ("mamba2 --data sst2 --set prompt_weight=1", "prompt_weight does not apply to sst2"),
    ("mamba2 --data sst2 --set tied=true", "tied does not apply to sst2"),
    ("selective --data instruct --set tied=true", "tied does not apply to selective"),
    ("mamba2 --data instruct --init-from demo/sst2-mamba2", "is not one token after prompt 1|is a classifier"),
    ("mamba2 --data instruct --init-from base --set tied=true", "tied cannot be chosen for mamba2 trained from base"),
    ("mamba2 --data intruct", "unknown data 'intruct'; .* did you mean 'instruct'"),
])  # fmt: skip
def test_what_is_refused(line, says, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", *line.split(), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert re.search(says, error), error


def test_a_model_of_other_words_is_refused(parts) -> None:
    with pytest.raises(InputError, match="two label words of sst2 are the same token"):
        answers(parts, word_tokenizer(["some words", *(text for text in SIZES)]))
