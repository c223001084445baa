"""Analyses over data sets in batches: the same digits through workers, in any order, and after a run was killed."""

import functools
import importlib.util
import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exhaustive import ALL
from planned import tiny_model
from refusals import refuses
import ssmscope
from ssmscope.api import analyses as registry
from ssmscope.api.analysis import Call
from ssmscope.api.sharding import parts, workers
from ssmscope.api.sharding.workers import on_engine, packed, unpacked
from ssmscope.core import batching
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator, evaluator
from ssmscope.interp import objective
from ssmscope.loading.load import load
from ssmscope.probes.loss import measure as losses

MODEL = "demo/sst2-mamba2"
TEXTS = ("a good film", "bad", "a bad film with good music", "great acting", "a film , but with music", "no good film")
DATA = text_data("made-up", "test", TEXTS, (1, 0, 0, 1, 1, 0), ("negative", "positive"), [((0, 1),)] * len(TEXTS))
ANALYSES: dict[str, Callable[[Model], Any]] = {
    "fidelity": lambda model: ssmscope.fidelity(model, DATA, methods="gradxinput", steps=2),
    "plausibility": lambda model: ssmscope.plausibility(model, DATA, methods=("gradxinput", "survival")),
    "heatmap": lambda model: ssmscope.heatmap(model, DATA),
    "attention": lambda model: ssmscope.attention(model, DATA),
    "ablate": lambda model: ssmscope.ablate(model, DATA, by="resample", what="layer"),
    "position": lambda model: ssmscope.position(model, DATA, regions="0%:50%,50%:100%"),
    "position-other": lambda model: ssmscope.position(model, DATA, replacement="other"),
    "noise": lambda model: ssmscope.noise(model, DATA),
    "overflow": lambda model: ssmscope.overflow(model, DATA, lengths=[5, 9]),
    "loss": lambda _: ssmscope.loss(load("demo/instruct-mamba2"), data=list(TEXTS), length=3, progress=False),
    "insertion": lambda model: ssmscope.insertion(model, DATA),
}
model = pytest.fixture(scope="module")(lambda: load(MODEL, dtype="float32"))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(batching, "TOKENS_AT_ONCE", 8)
    monkeypatch.setattr(evaluator, "BATCHES_PER_CHUNK", 1)
    monkeypatch.setattr(evaluator, "max_batch_tokens", lambda *_: 8)
    monkeypatch.setattr(losses, "max_batch_tokens", lambda *_: 8)
    monkeypatch.setattr(objective, "tokens_at_once", lambda *_: 8)


@contextmanager
def given(engine: Any) -> Iterator[None]:
    token = parts.engine.set(engine)
    try:
        yield
    finally:
        parts.engine.reset(token)


class Workers:
    """Workers in this process: the measure is sent as bytes, and the last batch is measured first."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, model: Model, measure: Any, batches: Any) -> Iterator[Any]:
        again = unpacked(packed(model, measure), 1)
        for number, batch in reversed(batches):
            self.batches += 1
            yield number, again(batch)


class Killed(BaseException):
    """A process that ends here."""


def dying(after: int) -> Callable[..., Iterator[Any]]:
    """Return an engine that measures so many batches, the last ones."""

    def engine(model: Model, measure: Any, batches: Any) -> Iterator[Any]:
        yield from parts.here(model, measure, batches[-after:])
        raise Killed

    return engine


def stored(out: Path) -> int:
    """Number of parts in the store of a directory."""
    connection = sqlite3.connect(out / parts.PARTS)
    (number,) = connection.execute("SELECT count(*) FROM kept").fetchone()
    connection.close()
    return number


def digits(result: Any) -> dict[str, Any]:
    found = json.loads(result.to_json())
    found["provenance"].pop("date")
    return found


class TestDigits:
    @pytest.mark.parametrize("name", ANALYSES)
    def test_are_the_same_on_workers(self, model, name) -> None:
        pytest.importorskip("ray")
        ours, theirs = ANALYSES[name](model), Workers()
        with given(theirs):
            assert digits(ANALYSES[name](model)) == digits(ours)
        assert theirs.batches > 2

    @pytest.mark.parametrize("scoring", ["likelihood", "generated"])
    def test_of_answers(self, tmp_path, scoring) -> None:
        pytest.importorskip("ray")
        language = load(tiny_model(tmp_path))
        texts = [text.replace("no", "a") for text in TEXTS]
        ask = functools.partial(Evaluator, language, words=("good", "bad"), scoring=scoring, new_tokens=2)
        theirs = Workers()
        with given(theirs):
            found = ask().scores(texts)
        assert np.array_equal(found, ask().scores(texts)) and theirs.batches > 2

    def test_every_verb_that_offers_workers_is_tried(self) -> None:
        offered = {name for name, each in registry.analyses().items() if each.sharded}
        assert offered == {name.partition("-")[0] for name in ANALYSES} | {"prompts"}  # which asks an Evaluator alone


class TestAKilledRun:
    def call(self, tmp_path: Path) -> Call:
        file = tmp_path / "data.csv"
        file.write_text("text,label\n" + "".join(f'"{t}",{DATA.labels[n]}\n' for n, t in enumerate(TEXTS)))
        options = {"data": str(file), "methods": "gradxinput", "steps": 2}
        return Call.of("fidelity", [MODEL], options)

    def test_goes_on_with_what_is_missing(self, tmp_path) -> None:
        out, again = tmp_path / "out", Workers()
        with pytest.raises(Killed), given(dying(after=2)):
            self.call(tmp_path).run(out, ["csv"])
        assert stored(out) == 2
        with given(again):
            (found,) = self.call(tmp_path).run(out, ["csv"])
        whole = Workers()
        with given(whole):
            (expected,) = self.call(tmp_path).run()
        assert digits(found) == digits(expected) and again.batches == whole.batches - 2
        assert {file.name for file in out.iterdir()} == {"fidelity.json", "fidelity.csv"}

    def test_of_other_options_keeps_its_own(self, tmp_path) -> None:
        call, again, out = self.call(tmp_path), Workers(), tmp_path / "out"
        with pytest.raises(Killed), given(dying(after=2)):
            call.run(out)
        other = Call.of("fidelity", [MODEL], {**call.inputs, **call.options, "seed": 1})
        with given(again):
            other.run(out, ["csv"])
        assert again.batches > 2 and stored(out) == 2

    def test_leaves_nothing_where_the_input_is_refused(self, tmp_path) -> None:
        def refusing(model: Model, measure: Any, batches: Any) -> Iterator[Any]:
            yield from parts.here(model, measure, batches[:1])
            raise InputError("no")

        with pytest.raises(InputError, match="^no$"), given(refusing):
            self.call(tmp_path).run(tmp_path / "new" / "out")
        assert not (tmp_path / "new").exists()


class TestRefusals:
    def test_of_models_that_workers_cannot_load(self, model) -> None:
        pytest.importorskip("ray")
        with (
            ssmscope.edited(model, ssmscope.Edit("halved", "output", lambda value, site: value / 2)),
            pytest.raises(InputError, match="is edited"),
        ):
            packed(model, len)
        own = load(MODEL, dtype="float32")
        with torch.no_grad():
            next(own.module.parameters()).mul_(2)
        refuses("is not what demo/sst2-mamba2 holds", unpacked, packed(own, len), 1)
        with pytest.raises(TypeError, match="Linear is not part"):
            packed(model, torch.nn.Linear(1, 1).forward)

    @pytest.mark.parametrize(("arguments", "message"), [
        (["fidelity", MODEL, "--workers", "2"], "--workers needs --engine ray"),
        (["fidelity", MODEL, "--engine", "ray", "--workers", "2", "--address", "a:1"], "give one"),
        (["heatmap", MODEL, "--text", "a film", "--engine", "ray"], "--engine ray needs --data"),
        (["explain", MODEL, "--text", "a film", "--engine", "ray"], "no option --engine"),
        (["report", "quick", "--out", "x", "--by-batch"], "--by-batch needs --engine ray"),
    ])  # fmt: skip
    def test_of_options(self, arguments, message, refusal) -> None:
        assert message in refusal(*arguments)

    def test_without_ray(self, monkeypatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(InputError, match="needs the package ray"), on_engine(engine="ray"):
            pass


@pytest.mark.skipif(not ALL, reason="its cluster needs most of a minute: set SSMSCOPE_EXHAUSTIVE=all")
def test_ray_loses_nothing_with_a_worker(model, tmp_path, monkeypatch) -> None:
    """One is killed in a batch, another refuses one; each has a GPU, of two that this machine says it has."""
    ray = pytest.importorskip("ray")
    init, died = ray.init, tmp_path / "died"
    monkeypatch.setattr(ray, "init", lambda **how: init(**how, num_gpus=2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def measure(batch: list[int]) -> Any:
        if batch == [2] and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if batch == [99]:
            raise InputError("row 99 is damaged")
        logits = model.logits(model.encode([TEXTS[row] for row in batch])).numpy()
        seen = "CUDA_VISIBLE_DEVICES" not in os.environ
        process, gpu = os.getpid(), workers.gpu_given()
        return {"logits": logits, "process": np.array(process), "gpu": np.array(gpu), "sees_all": np.array(seen)}

    batches = [[row] for row in range(len(TEXTS))]
    with on_engine(engine="ray", workers=2, gpus_per_worker=1):
        found = list(parts.over(model, batches, measure))
        refuses("^row 99 is damaged$", list, parts.over(model, [[99], [0]], measure))
    assert died.exists() and not ray.is_initialized()
    assert [batch for batch, _ in found] == batches
    assert os.getpid() not in {int(part["process"]) for _, part in found}
    assert {int(part["gpu"]) for _, part in found} <= {0, 1} and all(part["sees_all"] for _, part in found)
    monkeypatch.setattr(workers, "gpu_given", lambda: -1)
    for (batch, part), expected in zip(found, parts.over(model, batches, measure)):
        assert np.array_equal(part["logits"], expected[1]["logits"]), batch
    assert workers._prepared[0] == ""


def test_workers_import_while_ray_starts(monkeypatch) -> None:
    ray = pytest.importorskip("ray")
    seen: list[list[str | None]] = []
    monkeypatch.setattr(
        ray, "init", lambda **how: seen.append([os.environ.get(name) for name in workers.RAY_VARIABLES])
    )
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for prepared in (True, False):
        with workers.connected(None, 1, prepared=prepared):
            assert not set(workers.RAY_VARIABLES) & set(os.environ)
    monkeypatch.setenv("RAY_preload_python_modules", "mine")
    with workers.connected(None, 1, prepared=True):
        assert os.environ["RAY_preload_python_modules"] == "mine" and workers.OWN_GPU not in os.environ
    assert seen == [[",".join(workers.PRELOADED_MODULES), "1"], [None, None], ["mine", "1"]]
    assert all(importlib.util.find_spec(name) is not None for name in workers.PRELOADED_MODULES)


def test_a_gpu_is_found_among_those_that_are_seen(monkeypatch) -> None:
    ray = pytest.importorskip("ray")
    given = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["3"]})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: given)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert workers.gpu_given() == 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert workers.gpu_given() == 3
    given.get_accelerator_ids = lambda: {"GPU": []}
    assert workers.gpu_given() is None
