"""`analyze lens` and `analyze snr` as their users meet them."""

import json
from pathlib import Path

import pytest
import torch
from loud import loud
from refusals import refuses
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

pytest.importorskip("tuned_lens")

import ssmscope  # noqa: E402
from ssmscope.api import analyses as registry  # noqa: E402
from ssmscope.api.analysis import Call  # noqa: E402
from ssmscope.data.babi import questions  # noqa: E402
from ssmscope.data.language import language_data, load_lines  # noqa: E402
from ssmscope.errors import InputError  # noqa: E402
from ssmscope.probes.lens import fit_lens  # noqa: E402
from ssmscope.probes.lens.result import LensFit  # noqa: E402
from ssmscope.zoo.documents import word_tokenizer  # noqa: E402

LINES = [text for task in ("qa1", "qa2", "qa5") for text in questions(task, length=60, examples=40).texts]
QUICK = ("--steps", 12, "--set", "batch_tokens=300", "--set", "look_every=4", "--length", 24, "--set", "held_out=0.3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models, one of them without its tokenizer once more, a text and a file of questions."""
    folder, tokenizer = tmp_path_factory.mktemp("lens"), word_tokenizer(LINES)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False)
    torch.manual_seed(0)
    mamba2 = Mamba2Config(**sizes, num_heads=2, head_dim=16, expand=2, n_groups=1, chunk_size=8)
    for name, module in (("mamba2", Mamba2ForCausalLM(mamba2)), ("mamba", MambaForCausalLM(MambaConfig(**sizes)))):
        loud(module).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    loud(module).save_pretrained(folder / "bare")
    (folder / "text.txt").write_text("\n".join(LINES))
    rows = [
        {"context": "Alma went to the attic . Bruno went to the cellar .", "question": "Where is Alma ?"},
        {"context": "Bruno went to the pantry . Alma went to the cellar .", "question": "Where is Bruno ?"},
    ]
    answers = [{"answer": "attic", "distractors": ["cellar"]}, {"answer": "pantry", "distractors": ["cellar"]}]
    (folder / "mine.jsonl").write_text("\n".join(json.dumps({**a, **b}) for a, b in zip(rows, answers)))
    return folder


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Path:
    """The lens of mamba2, fitted from Python."""
    model = ssmscope.load(folder / "mamba2")
    data = language_data(load_lines(folder / "text.txt"), model.tokenizer, length=24, name="text")
    given = dict(steps=12, batch_tokens=300, look_every=4, held_out=0.3, progress=False)
    fit_lens(model, data, folder / "fitted", **given)
    return folder / "fitted"


class TestFit:
    def test_is_what_python_gives(self, analyze, folder, fitted, tmp_path):
        out = tmp_path / "lens"
        given = ("lens", "fit", folder / "mamba2", "--data", folder / "text.txt", *QUICK, "--out", out)
        answer = analyze(*given)
        assert answer.code == 0 and "step 12/12" in answer.err
        names = {"config.json", "params.pt", "lens.json", "lens.csv", "lens.png", "lens.html"}
        assert {path.name for path in out.iterdir()} == names
        mine, theirs = LensFit.load(out / "lens.json"), LensFit.load(fitted / "lens.json")
        assert mine.layers == theirs.layers and mine.provenance["options"] == theirs.provenance["options"]
        assert (out / "params.pt").read_bytes() == (fitted / "params.pt").read_bytes()
        assert str(mine.tuned) in answer.out and f"analyze lens show {folder / 'mamba2'} --lens {out}" in answer.out
        record = (out / "lens.json").read_bytes()
        again = analyze(*given, "--json")
        assert again.code == 0 and json.loads(again.out) == json.loads(record) and "nothing to do" in again.err
        assert (out / "lens.json").read_bytes() == record

    def test_known_data_is_what_the_model_did_not_learn_from(self, analyze, folder, tmp_path, real_data, monkeypatch):
        real_data("wikitext2", "validation")
        asked: list[tuple] = []
        load = ssmscope.data.language.load_lines
        monkeypatch.setattr(
            "ssmscope.data.language.load_lines", lambda *given: asked.append(given) or load(*given)[:60]
        )
        given = ("lens", "fit", folder / "mamba2", "--data", "wikitext2", "--steps", 1, "--length", 32)
        answer = analyze(*given, "--out", tmp_path / "a", "--json")
        assert asked == [("wikitext2", "validation")]
        assert json.loads(answer.out)["provenance"]["data"]["train"]["split"] == "validation"
        analyze(*given, "--out", tmp_path / "b", "--split", "test", "--validation", folder / "text.txt")
        assert asked[1:] == [("wikitext2", "test"), (str(folder / "text.txt"), None)]
        record = LensFit.load(tmp_path / "b" / "lens.json").provenance["data"]
        assert record["train"]["split"] == "test" and record["measured"]["name"] == "text"

    @pytest.mark.parametrize(("arguments", "says"), [
        (["mamba2"], "no data; give --data, one of wikitext2, books, or a file"),
        (["mamba2", "--data", "wikitext"], "unknown text 'wikitext'; give wikitext2"),
        (["bare", "--data", "text.txt"], "bare has no tokenizer to read"),
        (["mamba2", "--data", "text.txt", "--set", "optimizer=sdg"], "unknown optimizer 'sdg'; allowed are sgd, adam"),
        (["mamba2", "--data", "text.txt", "--steps", "0"], "steps is 0; allowed is a whole number from 1"),
        (["mamba2", "--data", "text.txt", "--set", "clip=x"], "clip is 'x'; allowed is a number above 0"),
        (["mamba2", "--data", "text.txt", "--length", "0"], "length is 0; allowed is a whole number from 1 to"),
        (["demo/sst2-mamba2", "--data", "text.txt"], "text.txt"),
        (["mamba2", "--data", "text.txt", "--device", "gpu"], "gpu"),
    ])  # fmt: skip
    def test_refuses(self, analyze, folder, tmp_path, arguments, says):
        given = [folder / part if (folder / str(part)).exists() else part for part in arguments]
        answer = analyze("lens", "fit", *given, "--out", tmp_path / "lens")
        assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1 and says in answer.err
        assert not (tmp_path / "lens").exists()

    def test_another_fit_in_its_place_is_refused(self, analyze, folder, fitted):
        given = ("lens", "fit", folder / "mamba2", "--data", folder / "text.txt", *QUICK)
        answer = analyze(*given, "--seed", 1, "--out", fitted)
        assert answer.code == 2 and "holds another fit" in answer.err and answer.err.count("\n") == 1
        assert "give a directory" in analyze(*given, "--out", folder / "text.txt").err
        assert "missing option '--out'" in analyze(*given).err

    def test_of_a_call_without_a_directory(self, folder):
        call = Call.of("lens fit", [str(folder / "mamba2")], {"data": str(folder / "text.txt")})
        refuses("lens fit writes its own files; give out=…, the directory for them", call.run)

    def test_figures_that_could_not_be_written_are_added(self, folder, tmp_path, monkeypatch):
        given = {"steps": 12, "batch_tokens": 300, "look_every": 4, "length": 24, "held_out": 0.3}
        call = Call.of("lens fit", [str(folder / "mamba2")], {"data": str(folder / "text.txt"), **given})

        def full(*given, **options):
            raise InputError("cannot write to it: No space left on device")

        with monkeypatch.context() as disk:
            disk.setattr("ssmscope.api.results.publish", full)
            refuses("the lens is whole and stays, and the same command adds its figures", call.run, tmp_path / "lens")
        assert {path.name for path in (tmp_path / "lens").iterdir()} == {"config.json", "params.pt", "lens.json"}
        record = (tmp_path / "lens" / "lens.json").read_bytes()
        (found,) = call.run(tmp_path / "lens")
        assert found == LensFit.load(tmp_path / "lens" / "lens.json")
        assert (tmp_path / "lens" / "lens.png").exists() and (tmp_path / "lens" / "lens.json").read_bytes() == record


class TestSNR:
    def test_things_in_hand_are_no_part_of_a_call(self, folder):
        for name, option, says in (
            ("snr", {"filler": ["The old wind rests ."]}, "filler is .*; allowed is a text"),
            ("snr", {"lens": [None]}, "lens is None; allowed are logit or a directory, or several"),
            ("lens show", {"text": "a", "lens": 3}, "lens is 3; allowed is a directory"),
        ):
            refuses(says, Call.of, name, [str(folder / "mamba")], option)

    def test_words_are_those_of_the_views_and_tasks(self):
        from ssmscope.probes.lens.result import STATISTICS
        from ssmscope.probes.snr.reading import TASKS

        assert registry.analysis_of("lens show").options["statistic"].words == tuple(STATISTICS)
        assert registry.analysis_of("snr").options["tasks"].elements == TASKS
