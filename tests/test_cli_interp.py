"""`analyze` with the verbs that look into a model: answers, files and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TEXT, Answer, refused


@pytest.fixture
def refusal(analyze: Answer, tmp_path: Path) -> Callable[..., str]:
    return refused(analyze, tmp_path)


class TestHeatmap:
    def test_json_is_all_of_stdout_and_the_same_as_the_file(self, analyze: Answer, mamba: Path, tmp_path: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", TEXT, "--json", "--out", tmp_path)
        assert json.loads(answer.out) == json.loads((tmp_path / "heatmap.json").read_text())
        assert "heatmap.json, .csv, .png, .html" in answer.err

    def test_of_ids_needs_no_tokenizer(self, analyze: Answer, untokenized: Path) -> None:
        found = json.loads(analyze("heatmap", untokenized, "--ids", "5,7, 3", "--ids", "2", "--json").out)
        assert [text["tokens"] for text in found["texts"]] == [["5", "7", "3"], ["2"]]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
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
            (["--text", TEXT, "--score", "retain"], "unknown score 'retain'; allowed are survival, retention, write"),
            (["--text", TEXT, "--layers", "men"], "did you mean 'mean'?"),
            (["--text", TEXT, "--layers", "0,3"], "no layer 3"),
            (["--text", TEXT, "--layers", "-1"], "layers is -1; allowed"),
            (["--text", TEXT, "--top", "0"], "top is 0"),
            (["--text", TEXT, "--device", "cud"], "cud"),
            (["--text", TEXT, "--device", "cuda:99"], "cuda:99"),
            (["--text", TEXT, "--dtype", "int8"], "choose one of auto, float32, float64, bfloat16, float16"),
        ],
    )
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
