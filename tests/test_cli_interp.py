"""`analyze` with the verbs that look into a model: answers, files and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TEXT, Answer, refused

import ssmscope
from ssmscope.api.results import Result


@pytest.fixture
def refusal(analyze: Answer, tmp_path: Path) -> Callable[..., str]:
    return refused(analyze, tmp_path)


class TestAttention:
    def test_writes_its_files_and_says_what_the_last_token_attends_to(self, analyze, mamba, tmp_path) -> None:
        answer = analyze(
            "attention", mamba, "--text", TEXT, "--layers", "0,2", "--span", "great music", "--out", tmp_path
        )
        assert answer.code == 0 and answer.err == ""
        assert "layer 0" in answer.out and "layer 2" in answer.out and "layer 1" not in answer.out
        assert "marked: tokens 8–9" in answer.out
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["attention.csv", "attention.html", "attention.json", "attention.png"]
        options = json.loads((tmp_path / "attention.json").read_text())["provenance"]["options"]
        assert options["layers"] == [0, 2] and options["level"] == "block" and options["span"] == "great music"

    def test_json_alone(self, analyze, untokenized) -> None:
        ids = "1,2,3,4"
        answer = analyze("attention", untokenized, "--ids", ids, "--rows", "-1,0", "--level", "ssm", "--json")
        (text,) = json.loads(answer.out)["texts"]
        assert answer.code == 0 and text["queries"]["values"] == [3, 0] and len(text["maps"]) == 3

    @pytest.mark.parametrize(
        "options", [["--rollout"], ["--gradient"], ["--parts"], ["--heads", "all"], ["--pool", "3"]]
    )
    def test_every_kind_of_map(self, analyze, mamba, options: list[str]) -> None:
        answer = analyze("attention", mamba, "--text", TEXT, *options)
        assert answer.code == 0 and "Implicit attention" in answer.out

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        given = ("attention", mamba, "--text", TEXT)
        assert "did you mean 'block'" in refusal(*given, "--level", "blck")
        assert "there is no layer 3" in refusal(*given, "--layers", "3")
        assert "layers is 'x'; allowed are all or a whole number" in refusal(*given, "--layers", "1,x")
        assert "--target is the class or token of --gradient; give that too" in refusal(*given, "--target", "3")
        assert "--gradient cannot be combined with --rollout" in refusal(*given, "--gradient", "--rollout")
        assert "--gradient cannot be combined with --no-skip" in refusal(*given, "--gradient", "--no-skip")
        assert "has no 'zebra'" in refusal(*given, "--span", "zebra")
        assert "no text" in refusal("attention", mamba)
        assert "not pixels" in refusal("attention", mamba, "--image", "x.png")


class TestExplain:
    def test_methods_stand_side_by_side(self, analyze, tmp_path) -> None:
        given = ("explain", "demo/sst2-mamba2", "--text", "A gripping film.", "--methods", "ig,lrp,self-retention")
        answer = analyze(*given, "--target", "negative", "--option", "ig.baseline=zero", "--out", tmp_path)
        assert answer.code == 0 and answer.err == ""
        assert all(name in answer.out for name in ("ig", "lrp", "self-retention", "explained: negative"))
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["explain.csv", "explain.html", "explain.json", "explain.png"]
        options = json.loads((tmp_path / "explain.json").read_text())["provenance"]["options"]
        assert options["option"]["ig"]["baseline"] == "zero"

    def test_a_language_models_next_token_against_another(self, analyze, mamba) -> None:
        given = ("explain", mamba, "--text", "a good film with", "--methods", "gradxinput,ig,lrp,occlusion,gradcam")
        answer = analyze(*given, "--target", "music", "--contrast", "acting", "--json")
        (text,) = json.loads(answer.out)["texts"]
        assert answer.code == 0 and text["target"] == "music − acting" and len(text["attributions"]) == 5
        assert analyze(*given, "--target", "bad acting").code == 0  # a continuation

    @pytest.mark.parametrize("demo", ["imdb-baleen-b", "sst2-groupmamba"])
    def test_every_method_on_demos(self, analyze, demo: str) -> None:
        """Each by its name has the scores that it has alone in Python, and two that are known by hand."""
        methods = (
            *("ig", "gradxinput", "smoothgrad", "gradcam", "occlusion", "lrp", "attention-rollout"),
            *("attention-gradient", "self-write", "random"),
        )
        given = ("explain", f"demo/{demo}", "--text", "A gripping film.", "--methods", ",".join(methods), "--json")
        answer = analyze(*given, "--target", "0")
        result = Result.from_dict(json.loads(answer.out))
        model = ssmscope.load(f"demo/{demo}")
        assert answer.code == 0 and result.methods == methods
        found = {each.method: each.scores for each in result[0].attributions}
        for name in methods:
            alone = ssmscope.explain(model, "A gripping film.", methods=(name,), target=0)
            np.testing.assert_allclose(found[name], alone[0].attributions[0].scores, rtol=1e-4, atol=1e-6)
        assert len({tuple(scores.tolist()) for scores in found.values()}) == len(methods)
        ids = model.encode("A gripping film.").input_ids
        embed = model.module.get_input_embeddings()
        inputs = embed(ids).detach().requires_grad_()
        logit = model.module(inputs_embeds=inputs).logits[0, 0]
        (gradient,) = torch.autograd.grad(logit, inputs)
        np.testing.assert_allclose(found["gradxinput"], (gradient * inputs).sum(-1)[0].detach(), rtol=1e-3, atol=1e-6)
        with torch.no_grad():
            mean = embed.weight.mean(0)
            for place in range(ids.shape[1]):
                hidden = torch.where(torch.arange(ids.shape[1]).unsqueeze(1) == place, mean, inputs)
                cost = logit - model.module(inputs_embeds=hidden).logits[0, 0]
                assert found["occlusion"][place] == pytest.approx(float(cost), rel=1e-3, abs=1e-5)

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        given = ("explain", "demo/sst2-mamba2", "--text", "A film.")
        assert "'gradcam'" in refusal(*given, "--methods", "gradcm")
        assert "did you mean 'negative'" in refusal(*given, "--target", "negativ")
        assert "write METHOD.NAME=VALUE" in refusal(*given, "--option", "ig=3")
        assert "baseline" in refusal(*given, "--methods", "ig", "--option", "ig.basline=zero")
        assert "not among the methods" in refusal(*given, "--methods", "ig", "--option", "lrp.half=false")


class TestFidelity:
    def test_says_which_method_is_the_most_faithful(self, analyze, tmp_path) -> None:
        table = tmp_path / "reviews.csv"
        rows = ["a gripping and funny film,positive", "a dull and lifeless mess,negative", "moving and fine,positive"]
        table.write_text("text,label\n" + "\n".join(rows) + "\n")
        methods = ("--methods", "lrp,self-retention,random", "--steps", "5")
        given = ("fidelity", "demo/sst2-mamba2", "--data", table, *methods)
        answer = analyze(*given, "--out", tmp_path / "out")
        assert answer.code == 0 and "ΔA" in answer.out and "random" in answer.out
        assert len(list((tmp_path / "out").iterdir())) == 4
        short = json.loads(analyze(*given, "--max-tokens", "5", "--json").out)
        assert any("longer than max_tokens" in note for note in short["notes"])

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        assert "no data" in refusal("fidelity", mamba)
        given = ("fidelity", "demo/sst2-mamba2", "--data", "sts2")
        assert "did you mean 'sst2'" in refusal(*given)


class TestPlausibility:
    def test_says_which_method_people_agree_with(self, analyze, tmp_path) -> None:
        table = tmp_path / "reviews.csv"
        table.write_text("text,label,rationale\na gripping film,positive,gripping\na dull mess,negative,\n")
        given = ("plausibility", "demo/sst2-mamba2", "--data", table, "--methods", "gradxinput,random")
        answer = analyze(*given, "--top", "1", "--out", tmp_path / "out")
        assert answer.code == 0 and "AUPRC" in answer.out and len(list((tmp_path / "out").iterdir())) == 4
        found = json.loads(analyze(*given, "--json").out)
        assert found["texts"] == [0] and found["left_out"] == 1 and found["top"] == found["share"]

    def test_what_cannot_be_is_refused(self, refusal, tmp_path) -> None:
        table = tmp_path / "reviews.csv"
        table.write_text("text,label\na gripping film,positive\na dull mess,negative\n")
        given = ("plausibility", "demo/sst2-mamba2", "--data", table, "--limit", "2")
        assert "has a rationale: give a file with a column 'rationale'" in refusal(*given)
        assert "top is 0.0; allowed" in refusal(*given, "--top", "0")


class TestSanity:
    def test_says_which_methods_need_the_weights(self, analyze, mamba, tmp_path) -> None:
        given = ("sanity", mamba, "--text", TEXT, "--methods", "gradxinput,self-retention", "--layers", "2")
        answer = analyze(*given, "--out", tmp_path)
        assert answer.code == 0 and "randomised down to" in answer.out and len(list(tmp_path.iterdir())) == 4
        found = json.loads(analyze(*given, "--json").out)
        assert found["parts"][-1] == "layer 2" and found["methods"] == ["gradxinput", "self-retention"]

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        given = ("sanity", mamba, "--text", TEXT, "--methods", "gradxinput")
        assert "there is no layer 7" in refusal(*given, "--layers", "7")
        assert "did you mean 'gradxinput'" in refusal("sanity", mamba, "--text", TEXT, "--methods", "gradxinptu")


class TestHeatmap:
    def test_prints_the_tokens_and_the_answer(self, analyze: Answer, mamba: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", "a good film with bad acting")
        assert answer.code == 0 and answer.err == ""
        assert all(word in answer.out for word in ("answer", "More: --full", "stands out"))

    def test_writes_four_files_and_says_where(self, analyze: Answer, mamba: Path, tmp_path: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", TEXT, "--out", tmp_path / "new" / "folder")
        names = {"heatmap.json", "heatmap.csv", "heatmap.png", "heatmap.html"}
        assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == names
        assert "folder/heatmap.json, .csv, .png, .html\n" in answer.out

    def test_json_is_all_of_stdout_and_the_same_as_the_file(self, analyze: Answer, mamba: Path, tmp_path: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", TEXT, "--json", "--out", tmp_path)
        assert json.loads(answer.out) == json.loads((tmp_path / "heatmap.json").read_text())
        assert "heatmap.json, .csv, .png, .html" in answer.err

    def test_is_what_python_gives(self, analyze: Answer, mamba: Path) -> None:
        import ssmscope

        trace = ssmscope.load(mamba).trace([TEXT, "bad film"])
        expected = ssmscope.heatmap(trace, score="write", layers=[0, 2], top=2, merge=True)
        options = ("--score", "write", "--layers", "0,2", "--top", "2", "--merge", "--json")
        found = json.loads(analyze("heatmap", mamba, "--text", TEXT, "--text", "bad film", *options).out)
        wanted = json.loads(expected.to_json())
        assert found["texts"] == wanted["texts"]
        assert found["provenance"]["options"] == wanted["provenance"]["options"]

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

    @pytest.mark.parametrize("demo", ["sst2-mamba", "sst2-mamba2", "sst2-baleen-b", "sst2-baleen-e"])
    def test_of_a_shipped_model(self, analyze: Answer, refusal: Callable[..., str], demo: str) -> None:
        answer = analyze("heatmap", f"demo/{demo}", "--text", "A gripping, beautifully acted film.", "--json")
        (text,) = json.loads(answer.out)["texts"]
        assert text["answer"] == "positive" and {"gripping", ","} <= {token.strip() for token in text["tokens"]}
        assert "does not know" in refusal("heatmap", f"demo/{demo}", "--text", "🎬🍿")
