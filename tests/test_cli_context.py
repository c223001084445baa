"""`analyze retrieval` and `analyze loss`: options that reach the analyses, printed and written output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

WORDS = "the old river runs past a mill and every autumn its water turns brown with leaves".split()


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
    def test_refusals(self, refusal, models):
        assert "lengths is '1k'; allowed are a whole number" in refusal("retrieval", models[0], "--lengths", "1k")
        assert "did you mean 'qa1'" in refusal("retrieval", models[0], "--tasks", "qa11")
        assert "examples is 0" in refusal("retrieval", models[0], "--examples", "0")
        assert "unknown split 'tset'" in refusal("retrieval", models[0], "--split", "tset")
        assert "classifier" in refusal("retrieval", "demo/sst2-mamba2")
        assert "missing argument" in refusal("retrieval")


class TestLoss:
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
