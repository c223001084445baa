"""Engines: the same results wherever jobs run, and none lost with a worker or a node."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from exhaustive import ALL
from planned import TEXT, jobs_of, numbers, run, tiny_model, unpainted
from refusals import refuses
import ssmscope.loading.load
from ssmscope.api.sharding import parts
from ssmscope.api.sharding.workers import Setting, connected, lacking
from ssmscope.errors import InputError
from ssmscope.reports import running
from ssmscope.reports.running import batches_on_ray, ray_engine

NODE_RESOURCES = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""When a dead node is given up, else after half a minute."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(tiny_model(folder / name, seed)) for seed, name in enumerate(("one", "two"))]


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_write", lambda report, root: None)


def plan(models: list[str], *more: Any) -> dict[str, Any]:
    items = [{"heatmap": {"text": TEXT}}, {"stability": {"length": 9, "sequences": 1}}, {"influence": {"text": TEXT}}]
    return {"models": models, "analyses": [*items, *more]}


class TestAWorker:
    """Work of a worker, in this process."""

    @pytest.fixture(autouse=True)
    def own_models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(running, "_kept", None)
        unpainted(monkeypatch)

    def test_sends_what_it_wrote_and_loads_a_model_once(self, models, monkeypatch) -> None:
        read: list[str] = []
        original = ssmscope.loading.load._read
        monkeypatch.setattr(
            ssmscope.loading.load, "_read", lambda where, name, *more: read.append(name) or original(where, name, *more)
        )
        jobs = jobs_of(plan(models)).to_run()
        setting = Setting(running.max_models_loaded(jobs))
        for job in jobs:
            outcome, files = running._work(job, setting)
            written = {f"{job.key}/{name}" for name in ("job.log", f"{job.verb}.json", f"{job.verb}.csv")}
            assert outcome.error is None and written <= set(files)
        assert read == models

    def test_sends_how_a_job_failed(self, models) -> None:
        (job,) = jobs_of({"models": models[:1], "analyses": [{"heatmap": {"ids": "99"}}]}).every
        outcome, files = running._work(job, Setting(1))
        assert "99" in str(outcome.error) and "Traceback" in str(outcome.traceback) and set(files) == {f"{job.key}.log"}

    def test_works_as_the_process_that_sends_it(self, tmp_path, monkeypatch) -> None:
        import torch

        monkeypatch.setenv("SSMSCOPE_DATA", "there")
        before = torch.get_num_threads()
        setting = Setting(1)
        setting.directory, setting.threads = str(tmp_path), before + 1
        monkeypatch.delenv("SSMSCOPE_DATA")
        monkeypatch.chdir(os.getcwd())
        try:
            setting.apply()
            assert os.environ["SSMSCOPE_DATA"] == "there" and Path.cwd() == tmp_path
            assert torch.get_num_threads() == before + 1
        finally:
            torch.set_num_threads(before)

    def test_keeps_as_many_models_as_a_job_reads_and_one(self, models) -> None:
        together = {"loss": {}, "together": True}
        assert running.max_models_loaded(jobs_of(plan(models)).to_run()) == 2
        assert running.max_models_loaded(jobs_of(plan(models, together)).to_run()) == 3


class TestResources:
    def test_a_job_asks_for_what_its_plan_says(self, models) -> None:
        gpu = {"models": [{"model": models[0], "device": "cuda"}], "analyses": ["stability"]}
        own = {"models": models[:1], "analyses": [{"stability": {}, "resources": {"cpus": 2, "gpus": 0.5}}]}
        found = [jobs_of(document).every[0] for document in (plan(models), gpu, own)]
        assert [(job.cpus, job.gpus, job.threads) for job in found] == [(1, 0, None), (1, 1, None), (2, 0.5, 2)]

    def test_a_job_that_no_node_can_run_is_found(self, models) -> None:
        (job,) = jobs_of({"models": models[:1], "analyses": [{"stability": {}, "resources": {"gpus": 1}}]}).every
        nodes = [{"Alive": True, "Resources": {"CPU": 4}}, {"Alive": False, "Resources": {"CPU": 4, "GPU": 1}}]
        needs = job.cpus, job.gpus
        assert lacking(nodes, *needs) == "no node of the cluster has the 1 CPUs and 1 GPUs"
        assert lacking([*nodes, {"Alive": True, "Resources": {"CPU": 1, "GPU": 1}}], *needs) is None
        assert lacking([{"Alive": True, "Resources": {"GPU": 1}}], *needs) is not None


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head that does no jobs, to which nodes are added."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {**NODE_RESOURCES, "num_cpus": 0, "include_dashboard": False, "_system_config": SOON}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.skipif(not ALL, reason="three nodes need both cores for half a minute: set SSMSCOPE_EXHAUSTIVE=all")
def test_a_node_that_dies_takes_no_job_with_it_and_the_numbers_are_those_of_one_process(
    models, tmp_path, cluster, monkeypatch
) -> None:
    import ray

    first, _ = cluster.add_node(**NODE_RESOURCES), cluster.add_node(**NODE_RESOURCES)
    document = plan(
        models, {"heatmap": {"ids": "99"}, "models": models[:1]}, {"stability": {}, "resources": {"gpus": 1}}
    )
    ended: list[str] = []

    def engine(jobs: Any, store: Any) -> Iterator[Any]:
        for job, outcome in ray_engine(cluster.address)(jobs, store):
            ended.append(job.key)
            if len(ended) == 3:  # the two that no node can run, and the first that ran: both nodes are at work again
                cluster.remove_node(first, allow_graceful=False)
            yield job, outcome

    report = run(document, tmp_path / "ray", engine=engine)
    assert not ray.is_initialized()
    assert [entry.state for entry in report.entries] == ["done"] * 6 + ["failed"] * 3
    assert "99" in str(report.entries[6].error) and "1 GPUs" in str(report.entries[7].error)
    assert len(ended) == 9 and len(set(ended)) == 9
    unpainted(monkeypatch)
    run(plan(models), tmp_path / "local")
    assert numbers(tmp_path / "ray") == numbers(tmp_path / "local")
    for path in (tmp_path / "local").glob("results/*/*.csv"):
        assert (tmp_path / "ray" / path.relative_to(tmp_path / "local")).read_bytes() == path.read_bytes()


def test_by_batch_jobs_run_here_and_their_batches_elsewhere(models, tmp_path, monkeypatch) -> None:
    pytest.importorskip("ray")
    given: list[Any] = []

    def elsewhere(model: Any, measure: Any, batches: Any) -> Iterator[Any]:
        given.append(len(batches))
        return parts.here(model, measure, batches)

    @contextmanager
    def on_engine(**options: Any) -> Iterator[None]:
        given.append(options)
        token = parts.engine.set(elsewhere)
        yield
        parts.engine.reset(token)

    monkeypatch.setattr(running, "on_engine", on_engine)
    unpainted(monkeypatch)
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{TEXT}\n" * 9)
    document = {"models": models[:1], "analyses": [{"loss": {"data": str(lines), "length": 5}}]}
    report = run(document, tmp_path / "out", engine=batches_on_ray(workers=2))
    assert given == [{"engine": "ray", "workers": 2, "address": None}, 1]
    assert [entry.state for entry in report.entries] == ["done"]


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "ray://localhost:1", "[::1]:1", "127.0.0.1:99999"])
def test_an_address_where_no_cluster_answers(models, tmp_path, address) -> None:
    pytest.importorskip("ray")
    refuses("no Ray cluster answers there", run, plan(models), tmp_path, engine=ray_engine(address))


def test_a_cluster_that_checks_tokens(monkeypatch) -> None:
    """Ray itself says only that it failed to connect."""
    ray = pytest.importorskip("ray")

    def init(**how: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match="needs RAY_AUTH_MODE=token$"), connected(address, None):
            pass
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(InputError, match=r"\(Failed to connect to Ray cluster\)$"), connected(address, None):
            pass
