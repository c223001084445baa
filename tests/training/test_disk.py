"""A run of training or of a lens that the disk stops, that is refused, or that another process is already doing."""

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from refusals import refused, refuses
from ssmscope.api.checkpoint import continued, read_json, save_state
from ssmscope.api.writing import locked
from ssmscope.errors import InputError
from ssmscope.zoo.training import train_model

QUICK = dict(length=5, examples=20, epochs=2, width=8, layers=1, state=4, progress=False, device="cpu")


def train(out: Path, **options: object) -> Path:
    return train_model("mamba2", "majority", out, **{**QUICK, **options})


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch):
    """`full(n)`: the disk takes n more files, and none after them."""

    def fill(files: int) -> None:
        left, replace = [files], os.replace

        def move(source: object, target: object) -> None:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= 1
            replace(source, target)

        monkeypatch.setattr(os, "replace", move)

    return fill


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_without_memory_nothing_is_left(tmp_path, monkeypatch, error) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("ssmscope.zoo.training.fitting.Fit._train_step", fail)
    refuses("needs more memory than there is; give a smaller model", train, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(
        "ssmscope.zoo.training.fitting.Fit._train_step", lambda *_: (_ for _ in ()).throw(RuntimeError("x"))
    )
    with pytest.raises(RuntimeError, match="x"):
        train(tmp_path / "new")


def test_a_full_disk_leaves_nothing_or_the_last_checkpoint(tmp_path, full, monkeypatch) -> None:
    whole = train(tmp_path / "whole")
    expected = (whole / "model.safetensors").read_bytes()
    assert {file.name for file in whole.iterdir()} >= {"config.json", "training.json", "README.md"}
    assert not (whole / "checkpoint").exists()
    outcomes = set()
    for files in range(4):
        out = tmp_path / "new" / str(files)
        with monkeypatch.context():
            full(files)
            with pytest.raises(InputError, match="cannot write to .*No space left on device") as caught:
                train(out)
            monkeypatch.undo()
        goes_on = "the same command continues from the last checkpoint" in str(caught.value)
        outcomes.add(goes_on)
        if not goes_on:
            assert not (tmp_path / "new").exists()
            continue
        assert [path.name for path in out.iterdir()] == ["checkpoint"]
        assert {path.name for path in (out / "checkpoint").iterdir()} == {"plan.json", "state.pt"}
        assert (train(out) / "model.safetensors").read_bytes() == expected and not (out / "checkpoint").exists()
    assert outcomes == {False, True}


def limited(out: Path, most: int) -> None:
    import resource
    import signal

    torch.set_num_threads(1)  # OpenMP's threads do not come with a fork.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        train(out)
    except InputError as error:
        os._exit(2 if str(error).startswith("cannot write to") and "\n" not in str(error) else 3)
    os._exit(0)


@pytest.mark.parametrize("most", [100, 3000, 8000])
def test_what_torch_and_safetensors_say_of_a_full_disk_is_one_line(tmp_path, most) -> None:
    pytest.importorskip("resource")
    process = multiprocessing.get_context("fork").Process(target=limited, args=(tmp_path / "new" / "out", most))
    process.start()
    process.join()
    assert process.exitcode == 2
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert set(left) <= {"plan.json", "state.pt"} and (not left or "state.pt" in left)


def test_what_is_refused_while_it_runs_leaves_nothing(tmp_path) -> None:
    refuses("the loss is", train, tmp_path / "new", learning_rate=1e30, clip=1e30, epochs=30)
    assert not list(tmp_path.iterdir())


def test_two_runs_do_not_share_a_directory(tmp_path) -> None:
    out = tmp_path / "out"
    with locked(out / "checkpoint"):
        refuses(f"is in use by process {os.getpid()}; wait until it has ended", train, out)
    train(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "checkpoint").mkdir()
    train(out)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_a_directory_of_somebody_else_stays_as_it_is(tmp_path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine").write_text("mine")
    refuses("holds no training run", train, tmp_path)
    assert (tmp_path / "checkpoint" / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"null", b"\xff", b'{"recipe": 5, "data": 5}', b'{"a": 1, "a": 2}']
)
def test_a_damaged_record_is_one_line(tmp_path, content) -> None:
    (tmp_path / "training.json").write_bytes(content)
    refused(train, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_that_goes_on_loses_nothing_by_a_refusal(tmp_path) -> None:
    plan = tmp_path / "out" / "checkpoint" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text(json.dumps({"a": 1}))
    save_state(plan.with_name("state.pt"), {"step": 1})
    with pytest.raises(InputError, match="refused"), continued(plan):
        raise InputError("refused")
    assert read_json(plan) == {"a": 1} and plan.with_name("state.pt").exists()
