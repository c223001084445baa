"""`analyze retrieval` and `analyze loss`: options that reach the analyses, printed and written output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

WORDS = "the old river runs past a mill and every autumn its water turns brown with leaves".split()
Answer = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random Mambas that know the words of the stories, and those of a text."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    from ssmscope.data.babi import questions
    from ssmscope.data.language import word_tokenizer

    texts = [text for task in ("qa1", "qa2") for text in questions(task, length=40, examples=30).texts]
    tokenizer = word_tokenizer([*texts, " ".join(WORDS)])
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sizes = dict(vocab_size=len(tokenizer), hidden_size=16, state_size=4, num_hidden_layers=2)
        directory = tmp_path_factory.mktemp("models") / f"mamba-{seed}"
        config = MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1)
        MambaForCausalLM(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        found.append(directory)
    return found


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text(" ".join(WORDS * 30) + "\n")
    return path


class TestRetrieval:
    def test_options_reach_the_analysis(self, analyze, models, tmp_path, prose):
        options = ("--tasks", "qa2,qa1", "--lengths", "30,0", "--examples", 4, "--seed", 5, "--piece", 16)
        more = ("--filler", prose, "--split", "validation", "--template", "{question} {context}", "--no-spaced")
        answer = analyze("retrieval", *models, *options, "--out", tmp_path / "out")
        assert answer.code == 0 and "qa2, 0 tokens: 4 questions in" in answer.err
        assert "accuracy of" in answer.out and "[0.00, 0.49]" in answer.out and "retrieval.json, .csv" in answer.out
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["retrieval.csv", "retrieval.html", "retrieval.json", "retrieval.png"]
        found = json.loads((tmp_path / "out" / "retrieval.json").read_text())
        given = found["provenance"]["options"]
        assert given["tasks"] == ["qa2", "qa1"] and given["lengths"] == [0, 30] and given["examples"] == 4
        assert given["piece"] == 16 and given["filler"] == "generated" and given["split"] == "test"
        assert found["provenance"]["seed"] == 5 and [one["model"] for one in found["provenance"]["models"]] == [
            str(model) for model in models
        ]
        answer = analyze("retrieval", models[0], *options, *more, "--no-progress", "--json")
        # a tokenizer of whitespace words does not know "kitchen." as a word
        assert answer.code == 2 and "tokenizer does not know" in answer.err
        answer = analyze("retrieval", models[0], *options, *more[:-1], "--no-progress", "--json")
        given = json.loads(answer.out)["provenance"]["options"]
        assert answer.err == "" and given["filler"] == str(prose) and given["split"] == "validation"
        assert given["template"] == "{question} {context}" and given["spaced"] is True

    def test_refusals(self, refusal, models):
        assert "lengths is '1k'; allowed are a whole number" in refusal("retrieval", models[0], "--lengths", "1k")
        assert "did you mean 'qa1'" in refusal("retrieval", models[0], "--tasks", "qa11")
        assert "examples is 0" in refusal("retrieval", models[0], "--examples", "0")
        assert "unknown split 'tset'" in refusal("retrieval", models[0], "--split", "tset")
        assert "classifier" in refusal("retrieval", "demo/sst2-mamba2")
        assert "missing argument" in refusal("retrieval")


class TestLoss:
    def test_options_reach_the_analysis(self, analyze, models, prose, tmp_path):
        options = ("--length", 40, "--limit", 5, "--smooth", 7, "--unit", "bits", "--piece", 16, "--seed", 3)
        answer = analyze("loss", *models, "--data", prose, *options, "--out", tmp_path / "out")
        assert answer.code == 0 and "5 windows of 40 tokens" in answer.err and "1–40" in answer.out
        assert "bits a token" in answer.out and "minus" in answer.out
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["loss.csv", "loss.html", "loss.json", "loss.png"]
        found = json.loads((tmp_path / "out" / "loss.json").read_text())
        assert found["provenance"]["options"] == {
            **{"data": str(prose), "split": None, "length": 40, "limit": 5},
            **{"smooth": 7, "unit": "bits", "piece": 16, "remembers": None},
        }
        assert found["provenance"]["seed"] == 3 and found["provenance"]["data"]["of"] == 12
        answer = analyze("loss", models[0], "--data", prose, *options, "--no-progress", "--json")
        assert answer.err == "" and json.loads(answer.out)["summaries"][0] == found["summaries"][0]

    def test_wikitext_is_the_default(self, analyze, models, real_data):
        real_data("wikitext2", "validation")
        answer = analyze(
            "loss", models[0], "--split", "validation", "--length", 16, "--limit", 3, "--json", "--no-progress"
        )
        given = json.loads(answer.out)["provenance"]
        assert given["options"]["data"] == "wikitext2" and given["options"]["split"] == "validation"
        assert given["data"]["windows"] == 3 and given["data"]["of"] > 10_000

    def test_refusals(self, refusal, models, prose):
        model = models[0]
        assert "could not be read" in refusal("loss", model, "--data", "absent.txt")
        assert "did you mean 'wikitext2'" in refusal("loss", model, "--data", "wikitext")
        assert "smooth is 4" in refusal("loss", model, "--data", prose, "--smooth", "4")
        assert "no document is long enough" in refusal("loss", model, "--data", prose, "--length", "5000")
        assert "classifier" in refusal("loss", "demo/sst2-mamba2", "--data", prose)
