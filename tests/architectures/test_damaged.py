"""Damaged models are refused in one line; files whose damage has no consequence are loaded as they are."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damaged import LAYOUTS, VALUES, WAYS, damage_file, fields, rewritten, save, with_field
from exhaustive import ALL, half
from refusals import refuses
from torch import Tensor
from transformers import PretrainedConfig
import ssmscope
from ssmscope.errors import InputError
from ssmscope.loading import stored

COMMON = {*PretrainedConfig().to_dict(), "transformers_version"} - {"tie_word_embeddings", "architectures", "id2label"}
"""Fields that every configuration has, and that say nothing of what a state-space model computes."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], tuple[Path, Tensor]]:
    """The directory of a small model and its answer, made once; a test puts its files back."""
    made: dict[str, tuple[Path, Tensor]] = {}

    def find(layout: str) -> tuple[Path, Tensor]:
        if layout not in made:
            path = save(layout, tmp_path_factory.mktemp(layout) / "model")
            made[layout] = path, answer(path)
        return made[layout]

    return find


@pytest.fixture
def copied(saved, tmp_path) -> Callable[[str], tuple[Path, Tensor]]:
    """Return a copy of `saved` that may be damaged."""

    def find(layout: str) -> tuple[Path, Tensor]:
        path, own = saved(layout)
        return Path(shutil.copytree(path, tmp_path / "model")), own

    return find


def answer(path: Path) -> Tensor:
    """Return a model's answer from a directory, after asking everything that analyses ask of it."""
    model = ssmscope.load(path)
    assert model.fingerprint and (model.labels is None) == (not model.is_classifier)
    if model.tokenizer is not None:
        return model.logits(model.encode("a good film"))
    if model.channels is not None:
        return model.logits(model.encode(values=torch.linspace(0, 1, 12).view(1, 4, 3)))
    return model.logits(model.encode(ids=[5, 1, 17, 3, 9]))


def check(path: Path, own: Tensor, what: object) -> bool:
    """Check that the model is refused in one line or answers as before; return True if it is refused."""
    try:
        found = answer(path)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 700, what
        return True
    assert found.shape == own.shape and torch.allclose(found, own, rtol=1e-4, atol=1e-4), what
    return False


VALUES_PER_FIELD = 12
"""Every field meets one in so many of the values, in turn, unless all are tried."""


@pytest.mark.parametrize("layout", [name for name in sorted(LAYOUTS) if ALL or name != "pixels"])
def test_every_field_of_a_configuration(saved, layout):
    """A field of another kind, negative, huge or nested is refused, unless nothing depends on it."""
    path, own = saved(layout)
    file, refusals = path / "config.json", 0
    whole = file.read_text()
    try:
        for turn, field in enumerate(f for f in fields(json.loads(whole)) if f[-1] not in COMMON):
            for at, (name, value) in enumerate(VALUES.items()):
                if not ALL and (at + turn) % VALUES_PER_FIELD or (field[-1], name) == ("layer_norm_epsilon", "zero"):
                    continue  # some models do norm without an epsilon
                with_field(path, field, value)
                refusals += check(path, own, (field, name))
                file.write_text(whole)
    finally:
        file.write_text(whole)
    assert refusals > 15


FILES = {
    "mamba": ("config.json", "model.safetensors"),
    "classifier": ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    "mamba_ssm": ("config.json", "model.safetensors"),
    "mamba_ssm-2": ("config.json", "pytorch_model.bin"),
    "diff-mamba": ("config.json", "model.safetensors"),
}


@pytest.mark.parametrize("layout, name", [(layout, name) for layout, names in FILES.items() for name in names])
def test_every_file(copied, layout, name):
    """Files are cut, empty, absent or something else: refused, except by readers of other files."""
    path, own = copied(layout)
    file = path / name
    content = file.read_bytes()
    passed = []
    for how in WAYS:
        damage_file(file, how)
        if not check(path, own, how):
            passed.append(how)
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.write_bytes(content)
    # A tokenizer.json says all that its settings do.
    assert passed == [] or name == "tokenizer_config.json"


@pytest.mark.parametrize(
    "name", ["generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"]
)
def test_files_that_a_model_need_not_have(copied, name):
    path, own = copied("classifier")
    for how in half(WAYS, name):
        (path / name).write_text("{}")
        damage_file(path / name, how)
        check(path, own, how)
        if (path / name).is_dir() and not (path / name).is_symlink():
            (path / name).rmdir()
        (path / name).unlink(missing_ok=True)


def with_tensors(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    rewritten(path / "model.safetensors", change)
    return path


@pytest.mark.parametrize("layout, field, value, words", [
    ("mamba", ("num_hidden_layers",), 1, r"no place for 1\d tensors, the first .*layers\.1\..*num_hidden_layers is 1"),
    ("mamba2", ("tie_word_embeddings",), True, "hold a head other than the embeddings"),
    ("classifier", ("backbone", "num_hidden_layers"), 1, r"no place for .*num_hidden_layers is 1"),
    ("classifier", ("backbone", "time_step_limit"), [1, 0], r"time_step_limit is \[1, 0\]"),
    ("classifier", ("backbone", "model_type"), "wide", "model type 'wide' is unknown"),
    ("classifier", ("id2label",), {"0": "a"}, "do not fit|cannot be built"),
    ("mamba_ssm", ("n_layer",), 1, r"no place for .*num_hidden_layers is 1"),
    ("mamba_ssm-2", ("ssm_cfg", "dt_limit"), [1, 0], r"dt_limit is \[1, 0\]"),
    ("mamba_ssm-2", ("tie_embeddings",), True, "hold a head other than the embeddings"),
    ("diff-mamba", ("num_hidden_layers",), 1, "no place for|cannot be built"),
    ("mamba", ("attn_implementation",), "someone/kernel", "allowed are eager, sdpa, .* never fetched or run"),
])  # fmt: skip
def test_a_configuration_of_another_model(copied, layout, field, value, words):
    path, _ = copied(layout)
    with_field(path, field, value)
    refuses(words, ssmscope.load, path)


@pytest.mark.parametrize("more", [
    lambda t: {"backbone.rotary_emb.inv_freq": torch.ones(2)},
    lambda t: {"backbone.position_ids": torch.arange(4)},
    lambda t: {"lm_head.weight": t["backbone.embeddings.weight"].clone()},
])  # fmt: skip
def test_tensors_that_older_versions_stored_are_passed_over(copied, more):
    path, own = copied("mamba")
    assert not check(with_tensors(path, lambda t: t | more(t)), own, more)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refuses("neither a directory nor a file", ssmscope.load, tmp_path / "pipe")


def test_a_model_that_cannot_run_is_refused(copied, monkeypatch):
    """No shape shows a norm without an epsilon, so a trial run does."""
    path, _ = copied("mamba")
    with_field(path, ("layer_norm_epsilon",), None)
    refuses("cannot be run as its config.json describes it.*TypeError|cannot be built", ssmscope.load, path)


def test_a_guarded_build_leaves_no_hook_and_minds_its_own_thread():
    """Models that other threads build at the same time are not counted, and no hook is left after an error."""
    held = stored.Contents({"a": stored.Stored((1,), True)}, 400)

    def build():
        other = threading.Thread(target=lambda: [torch.nn.Linear(50, 50) for _ in range(300)])
        other.start()
        other.join()
        return torch.nn.Linear(1, 1)

    assert isinstance(stored.outline(build, held, "x", "y"), torch.nn.Linear)
    with pytest.raises(InputError, match="more than 102 tensors"):
        stored.outline(lambda: [torch.nn.Linear(1, 1) for _ in range(300)], held, "x", "y")
    assert [torch.nn.Linear(50, 50) for _ in range(300)]
