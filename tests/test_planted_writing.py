"""Facts exchanged while a model writes, on a hand-made Mamba-2 whose state is known: the sum of v kᵀ over its pairs."""

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from ssmscope.core.model import Model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CONSTANT = 15
"""The dimension of the stream that is 1 for every token; the others are those of the tokens."""


@pytest.fixture(scope="module")
def writing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted_writing", BENCHMARKS / "planted_writing.py")
    assert spec and spec.loader
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        spec.loader.exec_module(found := importlib.util.module_from_spec(spec))
    return found


@pytest.fixture(scope="module")
def recalling(writing: ModuleType) -> Model:
    """A value is written into head 0 with the key before it, and read at the key; head 1 passes on which key comes
    next by its skip, and writes nothing."""
    keys, sign = writing.KEYS, writing.SIGN
    sizes = dict(hidden_size=16, expand=2, head_dim=16, num_heads=2, n_groups=1, state_size=8, chunk_size=16)
    config = Mamba2Config(**sizes, vocab_size=sign + 1, num_hidden_layers=1, tie_word_embeddings=False)
    module = Mamba2ForCausalLM(config).eval()
    module.generation_config.eos_token_id = None
    mixer = module.backbone.layers[0].mixer
    with torch.no_grad():
        for parameter in (module.backbone.embeddings.weight, module.lm_head.weight, *mixer.parameters()):
            parameter.zero_()
        module.backbone.embeddings.weight[:, : sign + 1] = torch.eye(sign + 1)
        module.backbone.embeddings.weight[:, CONSTANT] = 1
        module.lm_head.weight[:, : sign + 1] = torch.eye(sign + 1)
        project, taps = mixer.in_proj.weight, mixer.conv1d.weight[:, 0]
        project[:32, CONSTANT] = 1  # the gate

        def channel(number: int, token: int, back: int) -> None:
            project[32 + number, token], taps[number, -1 - back] = 1, 2

        for value in range(keys, sign):
            channel(value, value, 0)
        channel(16, sign, 0)
        for key in range(keys):
            channel(16 + key + 1, key, 1)
            channel(32 + key, key, 1)  # B
            channel(40 + key, key, 0)  # C
        mixer.dt_bias.copy_(torch.tensor([1.0, -20]))
        mixer.A_log.fill_(-20)
        mixer.D.copy_(torch.tensor([0.0, 1]))
        mixer.norm.weight.fill_(1)
        mixer.out_proj.weight[:, :16] = mixer.out_proj.weight[:, 16:] = 10 * torch.eye(16)
    return Model(module)


def test_a_fact_changes_its_answer_alone(writing: ModuleType, recalling: Model) -> None:
    found = writing.measured(recalling, np.random.default_rng(0), 40)
    assert found["solved"] == 1
    for name in ("fact", "layer 0", "early", "early, with tails"):
        assert found[name] == {"becomes the other value": 1, "changes": 1, "others change": 0}
    assert found["random"] == {"becomes the other value": 0, "changes": 0, "others change": 0}


def test_a_fact_is_the_same_in_every_prompt(writing: ModuleType, recalling: Model) -> None:
    """λ (v′ − v) kᵀ in head 0, whatever the other pairs are and wherever the fact stands, and nothing in head 1."""
    texts, _ = writing.prompts(np.random.default_rng(1), 12)
    key, old, new = (np.full(12, each) for each in (4, 7, 9))
    (fact,) = writing.exchanged(recalling, texts, key, old, new, 2)
    expected = torch.zeros_like(fact.ssm[0])
    expected[:, 0, 9, 4], expected[:, 0, 7, 4] = 1, -1
    written = fact.ssm[0][0, 0, 9, 4]
    assert written > 10
    torch.testing.assert_close(fact.ssm[0] / written, expected, atol=1e-6, rtol=0)
    drawn = writing.like(fact, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.ssm[0].flatten(1).norm(dim=1), (2**0.5 * written).expand(12))


@pytest.mark.parametrize(("key", "share"), [(0, 0), (1, 0), (2, 1), (5, 1)])
def test_a_fact_is_written_after_the_second_pair(writing: ModuleType, recalling: Model, key: int, share: int) -> None:
    texts, values = writing.prompts(np.random.default_rng(2), 12)
    asked, old = np.full(12, key), values[:, key]
    new = np.where(old == 13, 6, old + 1)
    edit = writing.added(writing.exchanged(recalling, texts, asked, old, new, 2), 2)
    made, plain = writing.said(recalling, texts, edit), writing.answers(values)
    found = writing.changed(made, plain, asked, new, 2)
    assert found["becomes the other value"] == found["changes"] == share


def test_shares_are_of_the_answer_asked_for_and_of_those_to_come(writing: ModuleType) -> None:
    plain = writing.answers(np.array([[6, 7, 8, 9, 10, 11]] * 2))
    made = plain.copy()
    made[0, 7], made[1, 7] = 12, 13  # the answers asked for
    made[0, 1], made[1, 9] = 8, 8  # written before the fact, and another still to come
    found = writing.changed(made, plain, np.array([3, 3]), np.array([12, 12]), 2)
    assert found == {"becomes the other value": 0.5, "changes": 1, "others change": 1 / 6}


def test_a_model_that_solves_nothing_says_so(writing, recalling, tmp_path, monkeypatch, capsys):
    """With all weights 0 every answer is the first token, and no prompt is solved."""
    module = copy.deepcopy(recalling.module)
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    idle = Model(module)
    assert writing.measured(idle, np.random.default_rng(0), 5) == {"prompts": 5, "solved": 0.0}
    monkeypatch.setattr(writing, "trained", lambda name, seed, steps: idle if seed else recalling)
    monkeypatch.setattr(writing, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(writing, "PROMPTS", 5)
    monkeypatch.setattr("sys.argv", ["planted_writing.py", "--steps", "40", "--models", "mamba2", "--seeds", "1", "0"])
    writing.main()
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "mamba2 1: no prompt of 5 is solved after 40 steps" and told[1].startswith("mamba2 0 {")
    assert not (tmp_path / "results.jsonl").exists()
