"""Hashes of weights, settings and configurations: by their definition, and told apart where anything differs."""

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from refusals import refuses
from torch import Tensor, nn
from transformers import MambaConfig
from ssmscope.core import fingerprint
from ssmscope.core.fingerprint import adapters, check_finite, essence, hashes, versions
from ssmscope.networks.classifier import SSMClassifierConfig

ROWS, COLUMNS = 2**17, 2**16
DRAWN = torch.randint(-(2**63), 2**63 - 1, (ROWS + COLUMNS,), generator=torch.Generator().manual_seed(0)).numpy() | 1


def raw(value: Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def expected(value: Tensor) -> int:
    """Σ word · row's factor · column's factor modulo 2⁶⁴, over words of four bytes, the last padded with zeros."""
    content = raw(value)
    words = np.frombuffer(content + bytes(-len(content) % 4), "<i4").astype(np.int64)
    at = np.arange(len(words))
    with np.errstate(over="ignore"):
        return int((words * DRAWN[ROWS + at % COLUMNS] * DRAWN[at // COLUMNS % ROWS]).sum())


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(1))
    return drawn.to(dtype)


@pytest.mark.parametrize("value", [
    *(random(length, dtype=torch.uint8) for length in (1, 2, 3, 4, 5, 7)), random(11, dtype=torch.uint8)[1:],
    random(12, dtype=torch.uint8)[1:9], random(3, 5).T, random(7, dtype=torch.bfloat16),
    random(9, dtype=torch.float64), torch.tensor(-1.5), torch.tensor(-1, dtype=torch.int32), random(COLUMNS),
    random(COLUMNS + 1), random(2 * COLUMNS + 5), random(4 * COLUMNS), random(4 * COLUMNS + 3, dtype=torch.int64),
    torch.zeros(3, 0),
], ids=lambda value: f"{value.dtype}{tuple(value.shape)}")  # fmt: skip
def test_a_hash_is_a_sum_over_words(value: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hashes({"a": value}) == {"a": expected(value)}
    monkeypatch.setattr(fingerprint, "MAX_WORDS_PER_STEP", 2**16)
    assert hashes({"b": value, "a": value * 2}) == {"b": expected(value), "a": expected(value * 2)}


def test_hashes_of_nothing() -> None:
    assert hashes({}) == {}
    refuses("^the weights of b are not in memory", hashes, {"b": torch.ones(2, device="meta")})


def test_versions_are_of_bytes_and_settings() -> None:
    one, two = random(5), random(3, 2).T
    found = versions({"one": one, "two": two, "more": (one, [two], 0.5)}, {"part": {"b": 1, "a": {2}}})
    assert found == {
        "one": xxhash.xxh3_64_intdigest(raw(one)),
        "two": xxhash.xxh3_64_intdigest(raw(two)),
        "more": xxhash.xxh3_64_intdigest(raw(one) + raw(two) + b"0.5"),
        "adapter part": xxhash.xxh3_64_intdigest(b'{"a": "{2}", "b": 1}'),
    }
    assert versions({"one": one}) == {"one": found["one"]}
    refuses("^the weights of b are not in memory", versions, {"a": one, "b": torch.ones(2, device="meta")})


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_are_of_their_numbers_and_kind() -> None:
    value = torch.quantize_per_tensor(torch.tensor([0.5, 1.5]), 0.5, 3, torch.qint8)
    said = f"({value.dtype}, {value.qscheme()})".encode() + raw(torch.tensor([0.5, 1.5]))
    assert versions({"a": value})["a"] == xxhash.xxh3_64_intdigest(said)
    assert hashes({"a": value}) == {"a": expected(torch.tensor([0.5, 1.5]))}


CONFIG = MambaConfig(vocab_size=7, hidden_size=4, num_hidden_layers=1)


def test_a_fingerprint_is_of_configuration_weights_and_settings() -> None:
    one, two = random(5), random(3, 2)
    weights = {"b": one, "a": two, "c": (one, 0.5)}
    digest = hashlib.blake2b(json.dumps(essence(CONFIG), sort_keys=True, default=str).encode(), digest_size=8)
    for name in "ab":
        value = weights[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {expected(value)}".encode())
    digest.update(raw(one))
    digest.update(b"0.5")
    plain = digest.hexdigest()
    assert (
        fingerprint.fingerprint(CONFIG, weights)
        == plain
        == fingerprint.fingerprint(CONFIG, dict(reversed(weights.items())), {})
    )
    digest.update(b'{"a": 2, "b": 1}')
    assert fingerprint.fingerprint(CONFIG, weights, {"b": 1, "a": 2}) == digest.hexdigest() != plain
    others = [{**weights, "b": one.double()}, {**weights, "b": one[None]}, {**weights, "a": two + torch.eye(3, 2)}]
    found = {fingerprint.fingerprint(CONFIG, each) for each in others}
    assert len(found | {plain}) == 4


def test_the_essence_of_a_configuration() -> None:
    """Fields of every model, of labels, tokens, generation and execution are left out, and those of a backbone kept."""
    found = essence(CONFIG)
    assert found["model_type"] == "mamba" and found["hidden_size"] == 4 and found["layer_norm_epsilon"] == 1e-5
    left = {"id2label", "dtype", "torch_dtype", "architectures", "pad_token_id", "bos_token_id", "eos_token_id"}
    left |= {"tie_word_embeddings", "use_cache", "use_mambapy", "use_associative_scan", "image_size", "layer_types"}
    assert not left & set(found) and not any(name.startswith("_") for name in found)
    config = SSMClassifierConfig(MambaConfig(vocab_size=1, hidden_size=4), channels=3, image_size=(2, 2), num_labels=3)
    assert essence(config) == {
        "model_type": "ssm-classifier", "dropout": 0.0, "channels": 3, "hidden_size": 4, "vocab_size": 1,
        "backbone": essence(config.backbone),
    }  # fmt: skip
    made = SimpleNamespace(model_type="mine", size=3, names={"a"}, kept=frozenset(), list=[1], backbone=None, _own=1)
    assert essence(made) == {"model_type": "mine", "size": 3, "list": [1]}


class Adapted(nn.Module):
    def __init__(self, scaling: float | None = None):
        super().__init__()
        self.merged_adapters, self.active_adapters = ["m"], ["a", "b"]
        if scaling is not None:
            self.scaling = {"a": scaling}


def test_the_settings_of_adapters() -> None:
    module = nn.ModuleDict({"one": Adapted(2.0), "two": nn.ModuleDict({"inner": Adapted()}), "three": nn.Linear(1, 1)})
    expected_one = {"active_adapters": ["a", "b"], "disable_adapters": None, "merged_adapters": ["m"]}
    assert adapters(module) == {
        "one": {**expected_one, "scaling": {"a": 2.0}},
        "two.inner": {**expected_one, "scaling": None},
    }


@pytest.mark.parametrize(("values", "wrong"), [
    ([1.0, 2.0], None), ([3e38, 3e38], None), ([1.0, torch.nan], "1 of the 2"),
    ([torch.inf, -torch.inf, 0.0], "2 of the 3"), ([torch.inf] + [0.0] * 1999, "1 of the 2,000"),
    ([torch.inf] * 1500, "1,500 of the 1,500"),
])  # fmt: skip
def test_numbers_that_are_not_finite(values: list[float], wrong: str | None) -> None:
    module = nn.ParameterDict({"fine": nn.Parameter(torch.ones(3)), "odd": nn.Parameter(torch.tensor(values))})
    module["whole"] = nn.Parameter(torch.tensor([5]), requires_grad=False)
    if wrong is None:
        return check_finite(module, "m")
    refuses(f"^m is damaged: {wrong} numbers of odd are not finite, and no answer would", check_finite, module, "m")


def test_weights_that_are_elsewhere() -> None:
    module: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    refuses("^m: the weights of 1.weight are not in memory", check_finite, module, "m")
