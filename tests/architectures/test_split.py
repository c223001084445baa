"""Models split over devices: the place of each part, and refused device maps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusal, refused
from torch import nn
from transformers import MambaConfig, MambaForCausalLM
from ssmscope.loading import device_map as split
from ssmscope.loading.device_map import check_split, device_of_parts, start_at_embeddings

CPU = torch.device("cpu")


def empty(**options: Any) -> MambaForCausalLM:
    sizes = dict(vocab_size=40, hidden_size=8, num_hidden_layers=4, state_size=3, time_step_rank=2)
    with torch.device("meta"):
        return MambaForCausalLM(MambaConfig(**sizes, **options))


def test_what_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    for device_map in (*split.SPLITS, {"": 0}, {}):
        assert refusal(check_split, device_map, None, "a") is None is refusal(check_split, device_map, None, Path("a"))
        assert refusal(check_split, device_map, "cpu", "a") == (
            "device and device_map both say where the weights go: give one"
        )
        assert refusal(check_split, device_map, None, nn.Linear(1, 1)) == (
            "device_map splits a directory as it is read; a model in memory stays where it is"
        )
    assert refusal(check_split, None, "cpu", nn.Linear(1, 1)) is None
    assert refusal(check_split, "balance", None, "a") == (
        "device_map 'balance' is unknown: choose one of auto, balanced, balanced_low_0, sequential, or give a device "
        "for each part; did you mean 'balanced' or 'balanced_low_0'?"
    )
    monkeypatch.setattr(split, "find_spec", lambda name: None)
    assert refusal(check_split, "auto", None, "a") == (
        "device_map needs accelerate, which is not installed: pip install accelerate"
    )
    assert refusal(check_split, None, None, "a") is None


def test_a_given_map_names_every_weight() -> None:
    module = empty()
    module.tie_weights()
    parts = {"backbone.embeddings": 1, "backbone.layers": "cpu", "backbone.norm_f.weight": "cuda:1", "lm_head": 1}
    assert device_of_parts(module, parts, None) == {**parts, "backbone.layers": CPU}
    assert device_of_parts(module, {"": CPU}, None) == {"": CPU}
    # Parts of a layer may be named where all are on one device; "backbone.layers.1" is not the layer 10, nor its part.
    within = {"": 0, "backbone.layers.1.mixer.in_proj": 1, "backbone.layers.1.mixer.D": 1, "backbone.layers.2": 0}
    assert device_of_parts(module, within, None) == within
    for lacking, said in (
        ({"backbone": 0}, "device_map gives lm_head.weight no device: it names 'backbone'"),
        (
            {"lm_head": 0, "back": 0},
            "device_map gives backbone.embeddings.weight no device: it names 'lm_head', 'back'",
        ),
        ({"backbone.embeddings.weight.": 0}, "device_map gives backbone.embeddings.weight no device: it names"),
    ):
        assert refused(device_of_parts, module, lacking, None).startswith(said)


def test_parts_that_are_not_in_memory_or_on_several_devices() -> None:
    module = empty()
    for away in ("disk", "meta", torch.device("meta")):
        assert refusal(device_of_parts, module, {"": 0, "lm_head": away, "backbone": "disk"}, None) == (
            "device_map leaves the weights of lm_head out of memory (disk, meta): give each part the CPU or a GPU"
        )
        assert refusal(device_of_parts, module, {"": away}, None) == (
            "device_map leaves the weights of the model out of memory (disk, meta): give each part the CPU or a GPU"
        )
    apart = {"": 0, "backbone.layers.2.mixer.in_proj": 0, "backbone.layers.2.mixer.D": "cpu"}
    assert refusal(device_of_parts, module, apart, None) == (
        "device_map has parts of backbone.layers.2.mixer on several devices: give a layer one"
    )


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[Any, int]:
    """Free memory of each device in bytes, for the test to set."""
    modeling, free = pytest.importorskip("accelerate.utils.modeling"), dict[Any, int]()
    monkeypatch.setattr(modeling, "get_max_memory", lambda given=None: dict(given or free))
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda given=None: dict(given or free))
    return free


def test_strategies_are_accelerates(room: dict[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The embeddings and two of the four blocks fit the first device, and a balance may ask for another share."""
    module = empty()
    block = sum(weight.nbytes for weight in module.backbone.layers[0].parameters())
    fits, asked = module.get_input_embeddings().weight.nbytes + 3 * block, list[Any]()
    room |= {0: fits, "cpu": 2**30}

    def balanced(model: Any, no_split_module_classes: list[str], low_zero: bool) -> dict[Any, int]:
        asked.append((model, no_split_module_classes, low_zero))
        return {0: 0, 1: fits, "cpu": 2**30}

    assert set(device_of_parts(module, "auto", None).values()) == {0, CPU}  # by accelerate's own balance
    monkeypatch.setattr("accelerate.utils.get_balanced_memory", balanced)
    for strategy, first, low_zero in (
        ("sequential", 0, None), ("auto", 1, False), ("balanced", 1, False), ("balanced_low_0", 1, True),
    ):  # fmt: skip
        found = device_of_parts(module, strategy, None)
        assert set(found.values()) == {first, CPU} and found["backbone.embeddings"] == first
        assert [part for part in found if ".layers." in part] == [f"backbone.layers.{at}" for at in range(4)]
        assert asked == ([] if low_zero is None else [(module, ["MambaBlock"], low_zero)])
        asked.clear()
    room["cpu"] = 0
    assert "out of memory" in refused(device_of_parts, module, "sequential", None)


def test_weights_are_counted_in_their_dtype_and_once_where_tied(room: dict[Any, int]) -> None:
    size = sum(weight.nbytes for weight in empty(tie_word_embeddings=True).parameters())
    for dtype, share in ((None, 1.0), (torch.bfloat16, 0.5)):
        for part, devices in ((1.7, {0}), (0.7, {0, CPU})):
            room.clear()
            room |= {0: int(part * share * size), "cpu": 2**30}
            found = device_of_parts(empty(tie_word_embeddings=True), "sequential", dtype)
            assert set(found.values()) == devices


def test_inputs_go_to_the_embeddings() -> None:
    module = empty()
    start_at_embeddings(module)
    assert not hasattr(module, "_hf_hook")
    module._hf_hook = SimpleNamespace(execution_device=0)
    start_at_embeddings(module)
    assert module._hf_hook.execution_device == torch.device("meta")
