"""Ray's part in measuring batches, with a Ray that only records what it is asked."""

import functools
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refuses
from ssmscope.api.sharding import parts, workers
from ssmscope.api.sharding.workers import Setting, check_engine, connected, finished, lacking, on_engine
from ssmscope.errors import InputError
from ssmscope.loading.load import load


class Died(Exception):
    """A worker's end."""


class Recorder:
    """A Ray whose tasks run when they are waited for, the last first; `calls` are what it was asked."""

    exceptions = SimpleNamespace(
        WorkerCrashedError=Died, NodeDiedError=ZeroDivisionError, OutOfMemoryError=MemoryError, RayError=Died
    )
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.5")

    def __init__(self, cpus: float = 3, gpus: float | None = None, running: bool = False) -> None:
        self.calls: list[Any] = []
        self.running = running
        self.resources = {"CPU": cpus, **({} if gpus is None else {"GPU": gpus})}
        self.waiting = 0

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **how: Any) -> None:
        self.calls.append(("init", how))

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": self.resources}]

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def put(self, value: Any) -> Any:
        return ("put", value)

    def get(self, task: Any) -> Any:
        return task[1] if task[0] == "put" else task[0](*task[1:])

    def wait(self, tasks: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        self.calls.append(("wait", len(tasks)))
        return tasks[-1:], tasks[:-1]

    def cancel(self, task: Any, force: bool) -> None:
        self.calls.append(("cancel", task, force))

    def remote(self, function: Any) -> Any:
        def options(**needs: Any) -> Any:
            self.calls.append(("options", needs))
            return SimpleNamespace(
                remote=lambda key, what, setting, batch: (function, key, tuple(what), setting, batch)
            )

        return SimpleNamespace(options=options)


def used(monkeypatch: pytest.MonkeyPatch, ray: Recorder) -> Recorder:
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.mark.parametrize(
    ("cpus", "gpus", "enough"),
    [(2, 0, True), (2.5, 0, False), (1, 0.5, True), (1, 0.6, False), (0, 1, True), (0.5, 1, False), (2, 0.1, False)],
)
def test_a_task_needs_a_living_node_with_all_that_it_needs(cpus: float, gpus: float, enough: bool) -> None:
    nodes = [
        {"Alive": False, "Resources": {"CPU": 8, "GPU": 8}},
        {"Alive": True, "Resources": {"CPU": 2}},
        {"Alive": True, "Resources": {"GPU": 1}},
        {"Alive": True, "Resources": {"CPU": 1, "GPU": 0.5}},
    ]
    said = None if enough else f"no node of the cluster has the {cpus:g} CPUs and {gpus:g} GPUs"
    assert lacking(nodes, cpus, gpus) == said


def test_options_of_ray_alone_or_against_each_other() -> None:
    check_engine("local", workers=None, address=None)
    for own in ({"workers": 2}, {"address": "a:1"}, {"gpus_per_worker": 0}):
        check_engine("ray", **own)
        with pytest.raises(InputError, match=f"^--{next(iter(own)).replace('_', '-')} needs --engine ray"):
            check_engine("local", **{"other": None, **own})
    with pytest.raises(InputError, match="--workers is for a Ray that is started here, and --address for one"):
        check_engine("ray", workers=2, address="a:1")


def test_a_worker_computes_as_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("SSMSCOPE_X", "1"), ("HF_X", "2"), ("MY_HF_X", "3")):
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    found = Setting(4)
    assert (found.models, found.directory, found.threads) == (4, str(tmp_path), before)
    assert found.environment["SSMSCOPE_X"] == "1" and found.environment["HF_X"] == "2"
    assert "MY_HF_X" not in found.environment
    monkeypatch.setenv("SSMSCOPE_X", "other")
    monkeypatch.chdir("/")
    try:
        own = Setting(1, threads=before + 1)
        own.environment, own.directory = found.environment, found.directory
        own.apply()
        assert (os.environ["SSMSCOPE_X"], os.getcwd()) == ("1", str(tmp_path))
        assert torch.get_num_threads() == before + 1 == own.threads
        own.directory = str(tmp_path / "gone")
        own.apply()
        assert os.getcwd() == str(tmp_path)
    finally:
        torch.set_num_threads(before)


class TestConnected:
    QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}

    def test_one_that_is_started_here_is_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = used(monkeypatch, Recorder())
        with pytest.raises(Died), connected(None, 3) as found:
            assert found is ray
            raise Died
        size = {"object_store_memory": 256 * 2**20}
        assert ray.calls == [("init", {"num_cpus": 3, "include_dashboard": False, **size, **self.QUIET}), ("shutdown",)]

    def test_one_that_is_connected_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = used(monkeypatch, Recorder(running=True))
        with connected(None, 3) as found:
            assert found is ray
        assert ray.calls == []

    def test_one_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = used(monkeypatch, Recorder())
        with connected("auto", None):
            pass
        assert ray.calls == [("init", {"address": "auto", **self.QUIET}), ("shutdown",)]

    @pytest.mark.parametrize(("address", "mode", "error", "advised"), [
        ("h:1", None, ConnectionError, True),
        ("h:1", "token", ConnectionError, False),
        ("auto", None, ConnectionError, False),
        ("h:1", None, ValueError, False),
    ])  # fmt: skip
    def test_one_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch, address, mode, error, advised) -> None:
        def fail(**how: Any) -> None:
            raise error("not  now\n" + "x" * 300)

        ray = used(monkeypatch, Recorder())
        monkeypatch.setattr(ray, "init", fail)
        monkeypatch.setattr(workers, "_check_listens", lambda address: None)
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        if mode is not None:
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
        with pytest.raises(InputError) as caught, connected(address, None):
            pass
        advice = "; one that checks tokens needs RAY_AUTH_MODE=token" * advised
        reason = ("not now " + "x" * 300)[:200]
        assert str(caught.value) == f"--address {address}: no Ray cluster answers there ({reason}){advice}"
        assert ray.calls == []

    @pytest.mark.parametrize(("address", "tried"), [
        ("auto", []), (":7", []), ("host:x", []), ("host:7", [("host", 7)]), ("ray://host:7", [("host", 7)]),
        ("[fe80::1]:7", [("fe80::1", 7)]), ("localhost:7", [("localhost", 7), ("10.0.0.5", 7)]),
        ("127.0.0.1:7", [("127.0.0.1", 7), ("10.0.0.5", 7)]), ("[::1]:7", [("::1", 7), ("10.0.0.5", 7)]),
    ])  # fmt: skip
    def test_an_address_is_tried_first(self, monkeypatch: pytest.MonkeyPatch, address, tried) -> None:
        used(monkeypatch, Recorder())
        asked: list[tuple[str, int]] = []

        def refuse(place: tuple[str, int], timeout: float) -> None:
            asked.append(place)
            assert timeout == workers.CONNECT_TIMEOUT_SECONDS
            raise OSError(f"refused by {place[0]}")

        monkeypatch.setattr(workers.socket, "create_connection", refuse)
        if tried:
            refuses(rf"no Ray cluster answers there \(refused by {tried[-1][0]}\)$", workers._check_listens, address)
        else:
            workers._check_listens(address)
        assert asked == tried
        closed: list[bool] = []
        monkeypatch.setattr(
            workers.socket, "create_connection", lambda *_: SimpleNamespace(close=lambda: closed.append(True))
        )
        workers._check_listens(address)
        assert closed == [True] * bool(tried)


class TestFinished:
    @pytest.mark.parametrize(
        ("most", "order", "waits"),
        [(None, "edcba", [5, 4, 3, 2, 1]), (2, "bcdea", [2, 2, 2, 2, 1]), (1, "abcde", [1] * 5)],
    )
    def test_at_most_so_many_run_at_once(self, most: int | None, order: str, waits: list[int]) -> None:
        ray = Recorder()
        found = list(finished(ray, str.upper, "abcde", most))
        assert found == [(each, each.upper()) for each in order]
        assert ray.calls == [("wait", number) for number in waits]

    def test_what_runs_is_cancelled_when_the_caller_stops(self) -> None:
        ray = Recorder()
        for item, _ in finished(ray, str.upper, "abcde", 3):
            assert item == "c"
            break
        assert ray.calls == [("wait", 3), ("cancel", "A", True), ("cancel", "B", True)]


class TestBatches:
    """Batches sent as the measure alone, without a model."""

    BATCHES = [(number,) * (number + 1) for number in range(20)]

    @pytest.fixture
    def plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "check_installed", lambda: None)
        monkeypatch.setattr(workers, "packed", lambda model, measure: measure)
        monkeypatch.setattr(workers, "unpacked", lambda payload, models, gpu: lambda batch: payload(batch, models, gpu))
        monkeypatch.setattr(workers, "_prepared", ("", None, None))
        monkeypatch.setattr(workers, "gpu_given", lambda: 2)
        monkeypatch.setattr(Setting, "apply", lambda self: applied.append(self.threads))
        applied.clear()

    @pytest.mark.parametrize(("cluster", "device", "options", "needs", "at_once"), [
        ({"cpus": 3}, "cpu", {}, {"num_gpus": 0.0}, 6),
        ({"cpus": 0.5, "running": True}, "cpu", {"gpus_per_worker": 0}, None, None),
        ({"cpus": 9, "gpus": 2}, "cpu", {}, {"num_gpus": 0.0}, 18),
        ({"cpus": 9, "gpus": 2}, "cuda", {}, {"num_gpus": 1.0}, 4),
        ({"cpus": 9, "gpus": 2}, "cuda", {"gpus_per_worker": 0.5}, {"num_gpus": 0.5}, 8),
        ({"cpus": 3, "gpus": 4}, "cuda", {"gpus_per_worker": 0.5}, {"num_gpus": 0.5}, 6),
        ({"cpus": 9, "gpus": 1, "running": True}, "cuda", {},
         {"num_gpus": 1.0, "runtime_env": {"env_vars": {workers.OWN_GPU: "1"}}}, 2),
        ({"cpus": 9, "gpus": 1, "running": True}, "cpu", {}, {"num_gpus": 0.0}, 18),
    ])  # fmt: skip
    def test_are_tasks_of_a_cluster(self, monkeypatch, plain, cluster, device, options, needs, at_once) -> None:
        ray = used(monkeypatch, Recorder(**cluster))
        model: Any = SimpleNamespace(device=torch.device(device))

        def measure(batch: tuple[int, ...], models: int, gpu: int) -> dict[str, int]:
            return {"sum": sum(batch), "models": models, "gpu": gpu}

        with on_engine(engine="ray", **options):
            if needs is None:
                with pytest.raises(
                    InputError, match="1 CPUs and 0 GPUs that a worker needs; start such a node, or lower"
                ):
                    list(parts.over(model, self.BATCHES, measure, what=None))
                return
            found = list(parts.over(model, self.BATCHES, measure, what=None))
            again = list(parts.over(model, self.BATCHES[:1], measure, what=None))
        assert found == [(each, {"sum": sum(each), "models": 1, "gpu": 2}) for each in self.BATCHES] and len(again) == 1
        asked = [call[1] for call in ray.calls if call[0] == "options"]
        assert asked == [{"num_cpus": 1, "max_retries": 3, **needs}] * 2
        assert max(call[1] for call in ray.calls if call[0] == "wait") == at_once
        assert [call[0] for call in ray.calls if call[0] in ("init", "shutdown")] == (
            [] if cluster.get("running") else ["init", "shutdown"]
        )
        assert applied == [1, 1]  # once for each of the two measurements, with one thread
        assert parts.engine.get() is None

    def test_an_address_has_its_own_variables(self, monkeypatch, plain) -> None:
        """A cluster that is not started here does not have `RAY_VARIABLES`."""
        ray = used(monkeypatch, Recorder(gpus=1))
        model: Any = SimpleNamespace(device=torch.device("cuda"))
        with on_engine(engine="ray", address="auto"):
            list(parts.over(model, self.BATCHES[:1], lambda batch, *_: {}, what=None))
        (needs,) = [call[1] for call in ray.calls if call[0] == "options"]
        assert needs["runtime_env"] == {"env_vars": {workers.OWN_GPU: "1"}}

    @pytest.mark.parametrize(("error", "said"), [
        (InputError("row 3 is damaged"), "^row 3 is damaged$"),
        (Died("gone"), "the workers that measured a batch died, 4 times"),
        (MemoryError("gone"), "the workers that measured a batch died, 4 times"),
    ])  # fmt: skip
    def test_a_refusal_is_raised_here(self, monkeypatch, plain, error, said) -> None:
        used(monkeypatch, Recorder())
        model: Any = SimpleNamespace(device=torch.device("cpu"))

        def measure(*_: Any) -> None:
            raise error

        with on_engine(engine="ray"), pytest.raises(InputError, match=said):
            list(parts.over(model, self.BATCHES, measure, what=None))

    def test_in_this_process(self) -> None:
        with on_engine():
            assert parts.engine.get() is None


applied: list[int] = []


def measure_of(model: Any, part: Any, weight: Any, numbers: Any, batch: Any) -> Any:
    return model, part, weight, numbers, batch


def test_a_measure_is_packed_without_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(workers, "_models", None)
    model = load("demo/sst2-mamba2", dtype="float32")
    weight = next(model.module.parameters())
    part, numbers = model.mixers[1], torch.arange(3)
    payload = workers.packed(model, functools.partial(measure_of, model, part, weight, numbers))
    assert len(payload) < weight.numel() * 4
    own, mixer, same, copied, batch = workers.unpacked(payload, 3)([7])
    assert own.module is not model.module and own.name == model.name and batch == [7]
    assert mixer is own.mixers[1] and same is next(own.module.parameters()) and torch.equal(copied, numbers)
    kept = workers._models
    assert kept.capacity == 3 and len(kept.models) == 1
    again, *_ = workers.unpacked(payload, 5)([7])
    assert again.module is own.module and workers._models is kept
    with pytest.raises(TypeError, match="a measure is of one model"):
        workers.packed(model, functools.partial(measure_of, own))
