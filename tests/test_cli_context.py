"""`analyze retrieval` and `analyze loss`: options that reach the analyses, printed and written output. `analyze` with
the verbs that look into a model: answers, files and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TEXT, Answer, refused

WORDS = "the old river runs past a mill and every autumn its water turns brown with leaves".split()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random Mambas that know the words of the stories, and those of a text."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM
    from ssmscope.data.babi import questions
    from ssmscope.zoo.documents import word_tokenizer

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


refusal = pytest.fixture(lambda analyze, tmp_path: refused(analyze, tmp_path))


class TestHeatmap:
    def test_json_is_all_of_stdout_and_the_same_as_the_file(self, analyze: Answer, mamba: Path, tmp_path: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", TEXT, "--json", "--out", tmp_path)
        assert json.loads(answer.out) == json.loads((tmp_path / "heatmap.json").read_text())
        assert "heatmap.json, .csv, .png, .html" in answer.err

    def test_of_ids_needs_no_tokenizer(self, analyze: Answer, untokenized: Path) -> None:
        found = json.loads(analyze("heatmap", untokenized, "--ids", "5,7, 3", "--ids", "2", "--json").out)
        assert [text["tokens"] for text in found["texts"]] == [["5", "7", "3"], ["2"]]

    @pytest.mark.parametrize(("arguments", "says"), [
        (["--text", ""], "empty"),
        (["--text", " \t\n"], "empty"),
        (["--text", "zebra quagga"], "does not know"),
        (["--text", "🎬🍿"], "does not know"),
        (["--text", "a \x1b[31mgood film"], "U+001B at position 2"),
        (["--text", "a film", "--text", "bad\x00film"], "text 1 has the control character U+0000 at position 3"),
        (["--text", "good film " * 10_000], "20,000 tokens, more than the limit of 16,384"),
        (["--text", TEXT, "--max-tokens", "5"], "11 tokens, more than the limit of 5"),
        (["--text", "a \udcff film"], "not valid UTF-8"),
        (["--ids", "1,16"], "16, outside the model's vocabulary 0…15"),
        (["--ids", "-1"], "-1, outside"),
        (["--text", TEXT, "--score", "retain"],
         "unknown score 'retain'; allowed are survival, readable, retention, write"),
        (["--text", TEXT, "--device", "cud"], "cud"),
        (["--text", TEXT, "--device", "cuda:99"], "cuda:99"),
        (["--text", TEXT, "--dtype", "int8"], "choose one of auto, float32, float64, bfloat16, float16"),
    ])  # fmt: skip
    def test_refuses(self, refusal: Callable[..., str], mamba: Path, arguments: list[str], says: str) -> None:
        assert says in refusal("heatmap", mamba, *arguments)

    def test_says_what_to_do_about_a_long_text(self, refusal: Callable[..., str], mamba: Path) -> None:
        said = refusal("heatmap", mamba, "--text", "a" * 50_000 + " " + "good " * 20_000)
        assert "--max-tokens" in said and len(said) < 300

    def test_refuses_a_text_without_a_tokenizer(self, refusal: Callable[..., str], untokenized: Path) -> None:
        assert "--ids" in refusal("heatmap", untokenized, "--text", TEXT)

    def test_refuses_an_out_that_is_a_file(self, refusal: Callable[..., str], mamba: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        assert "is a file" in refusal("heatmap", mamba, "--text", TEXT, "--out", tmp_path / "file")
        assert "is a file" in refusal("heatmap", mamba, "--text", TEXT, "--out", tmp_path / "file" / "below")
        assert (tmp_path / "file").read_text() == "mine"

    def test_refuses_an_out_that_cannot_be_written(self, refusal: Callable[..., str], mamba: Path) -> None:
        assert "annot" in refusal("heatmap", mamba, "--text", TEXT, "--out", "/proc/heatmap")
