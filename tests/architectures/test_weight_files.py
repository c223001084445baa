"""Files of weights: those that are read, their contents, and the refusals of the rest."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusal, refused
from safetensors.torch import save_file
from torch import nn
from ssmscope.loading import stored
from ssmscope.loading.stored import Contents, Plan, Stored

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
ONE, TWO = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([4, 5])


@pytest.mark.parametrize(("name", "plain"), [
    ("a.b", "a.b"), ("module.a", "a"), ("module.module.a", "a"), ("_orig_mod.a", "a"), ("a._orig_mod.b", "a.b"),
    ("module._orig_mod.a", "a"), ("_orig_mod.module.a", "a"), ("a._fsdp_wrapped_module._orig_mod.b", "a.b"),
    ("a.module.b", "a.module.b"), ("a_orig_mod.b", "a_orig_mod.b"), ("modules.a", "modules.a"),
])  # fmt: skip
def test_names_without_wrappers(name: str, plain: str) -> None:
    assert stored.plain_name(name) == plain


def test_a_reason_is_a_line_of_at_most_two_hundred_characters() -> None:
    assert stored.reason(ValueError("a\n  b")) == "a b" and stored.reason(ValueError()) == "ValueError"
    assert stored.reason(ValueError("a" * 200)) == "a" * 200 and stored.reason(ValueError("a" * 201)) == "a" * 200


@pytest.mark.parametrize("wrap", [
    lambda held: held,
    lambda held: {"state_dict": held, "epoch": 3},
    lambda held: {"model": held, "args": None},
    lambda held: {"state_dict": {"model": held}},
])  # fmt: skip
def test_tensors_of_a_pickle_and_their_headers(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    torch.save(wrap({"module.one": ONE, "two": TWO}), tmp_path / "a.pth")
    found = stored.read_tensors(tmp_path / "a.pth")
    assert list(found) == ["one", "two"] and torch.equal(found["one"], ONE) and torch.equal(found["two"], TWO)
    assert stored.read_headers(tmp_path / "a.pth") == {"one": ((1, 3), True), "two": ((2,), False)}


def test_headers_of_safetensors(tmp_path: Path) -> None:
    kinds = {kind: getattr(torch, kind) for kind in ("float64", "float16", "bfloat16", "int8", "bool", "uint8")}
    save_file({name: torch.ones(2, 1, dtype=kind) for name, kind in kinds.items()}, tmp_path / "a.safetensors")
    found = stored.read_headers(tmp_path / "a.safetensors")
    assert found == {name: Stored((2, 1), kind.is_floating_point) for name, kind in kinds.items()}


@pytest.mark.parametrize(("given", "said"), [
    ({"model": {"state_dict": {"one": ONE}}}, "holds no state dict: names with tensors were expected"),
    ({"one": ONE, "epoch": 3}, "holds no state dict: names with tensors were expected"),
    ({5: ONE}, "holds no state dict: names with tensors were expected"),
    ([ONE], "holds no state dict: names with tensors were expected"),
    ({}, "holds no state dict: names with tensors were expected"),
    ({"one": ONE, "thin": ONE.to_sparse(), "two": TWO.to_sparse()},
     "holds the sparse tensor thin; dense ones can be read"),
    ({"module.one": ONE, "one": ONE}, "holds one twice, the second time as one: save the model anew"),
    ({"one": ONE, "_orig_mod.one": ONE}, "holds one twice, the second time as _orig_mod.one: save the model anew"),
])  # fmt: skip
def test_pickles_that_hold_no_weights(tmp_path: Path, given: Any, said: str) -> None:
    torch.save(given, tmp_path / "a.pth")
    for read in (stored.read_tensors, stored.read_headers):
        assert refusal(read, tmp_path / "a.pth") == f"{tmp_path / 'a.pth'} {said}"


def test_files_of_one_model_are_read_together(tmp_path: Path) -> None:
    torch.save({"one": ONE}, tmp_path / "a.pth")
    save_file({"two": TWO, "_orig_mod.three": TWO.clone()}, tmp_path / "b.safetensors")
    files = [tmp_path / "a.pth", tmp_path / "b.safetensors"]
    assert sorted(stored.read_all(files)) == ["one", "three", "two"]
    found = stored.contents(files)
    assert found.tensors == {"one": ((1, 3), True), "two": ((2,), False), "three": ((2,), False)}
    assert found.size == sum(file.stat().st_size for file in files)
    assert not stored.is_wrapped(files[:1]) and stored.is_wrapped(files[1:]) and stored.is_wrapped(files)
    assert not stored.is_wrapped([])


def index(where: Path, name: str, shards: Any) -> None:
    (where / f"{name}.index.json").write_text(json.dumps({"weight_map": shards}))


def test_which_files_hold_the_weights(tmp_path: Path) -> None:
    assert refusal(stored.weight_files, tmp_path) == f"{tmp_path} has no weights: neither {SAFE} nor {PICKLED}"
    index(tmp_path, PICKLED, {"a": "z.bin", "b": "y.bin", "c": "z.bin"})
    for name in ("y.bin", "z.bin"):
        (tmp_path / name).touch()
    assert stored.weight_files(tmp_path) == [tmp_path / "z.bin", tmp_path / "y.bin"]
    (tmp_path / PICKLED).touch()
    assert stored.weight_files(tmp_path) == [tmp_path / PICKLED]
    index(tmp_path, SAFE, {"a": "y.bin"})
    assert stored.weight_files(tmp_path) == [tmp_path / "y.bin"]
    (tmp_path / SAFE).touch()
    assert stored.weight_files(tmp_path) == [tmp_path / SAFE]


@pytest.mark.parametrize("name", [SAFE, PICKLED])
@pytest.mark.parametrize(("shards", "said"), [
    *((each, "is not an index of weights: it must say which file holds which tensor")
      for each in (None, [], {}, ["y"], "y", 5, {"a": 5}, {"a": "y", "b": None})),
    *(({"a": "y", "b": each, "c": "/"}, f"names {each!r}; allowed are names of files in its directory")
      for each in ("", ".", "..", "a/y", "a\\y", "c:y", "y\0")),
    ({"a": "y", "b": "gone", "c": "lost"}, "names gone, which is not there"),
    ({"a": "folder"}, "names folder, which is not there"),
])  # fmt: skip
def test_an_index_that_is_none(tmp_path: Path, name: str, shards: Any, said: str) -> None:
    (tmp_path / "y").touch()
    (tmp_path / "folder").mkdir()
    index(tmp_path, name, shards)
    assert refusal(stored.weight_files, tmp_path) == f"{tmp_path / name}.index.json {said}"


def test_a_name_in_an_index_is_shown_in_part(tmp_path: Path) -> None:
    index(tmp_path, SAFE, {"a": "/" + "x" * 200})
    assert f"names '/{'x' * 98}; allowed" in refused(stored.weight_files, tmp_path)


@pytest.mark.parametrize(("files", "finished"), [
    ([], True), (["config.json"], True), (["checkpoint/"], False), (["checkpoint/", "config.json"], True),
    (["checkpoint/plan.json"], False), (["checkpoint/plan.json", "config.json"], False),
    (["checkpoint/plan.json", "config.json", "training.json"], True), (["checkpoint/plan.json", "lens.json"], True),
    (["checkpoint"], True),
])  # fmt: skip
def test_whether_a_training_is_finished(tmp_path: Path, files: list[str], finished: bool) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    said = None if finished else "m is unfinished: its training or fit was stopped, and the same command continues it"
    assert refusal(stored.check_finished, tmp_path, "m") == said


@pytest.mark.parametrize(("files", "said"), [
    ([], None),
    (["a.gguf"], "m holds weights in GGUF"),
    (["a.GGUF", "b.txt"], "m holds weights in GGUF"),
    (["a.gguf", SAFE], None),
    (["a.gguf", PICKLED], None),
    (["a.gguf", f"{SAFE}.index.json"], None),
    (["a.gguf", f"{PICKLED}.index.json"], None),
    (["checkpoint-5/config.json"], "m is a folder with a checkpoint and no model of its own: give {}checkpoint-5"),
    (
        ["checkpoint-9/config.json", "checkpoint-10/config.json", "checkpoint-11/x", "checkpoint-x/config.json",
         "checkpoint-/config.json", "my-checkpoint-12/config.json"],
        "m is a folder with 2 checkpoints and no model of its own: give {}checkpoint-10",
    ),
    (["checkpoint-11/x", "checkpoint-x/config.json", "my-checkpoint-12/config.json"], None),
])  # fmt: skip
def test_folders_of_other_layouts(tmp_path: Path, files: list[str], said: str | None) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = refusal(stored.check_other_layouts, tmp_path, "m")
    assert found == said or (said is not None and (found or "").startswith(said.format(f"{tmp_path}/")))


HELD = Contents({name: Stored((2,), True) for name in "abc"}, 50)
"""Allows 106 tensors, 160 modules and 200 numbers."""


def build(tensors: int = 0, modules: int = 0, numbers: int = 0) -> Callable[[], list[nn.Module]]:
    def made() -> list[nn.Module]:
        parts: list[nn.Module] = [nn.Sequential(*[nn.Identity() for _ in range(modules)])]
        parts.append(nn.ParameterList([torch.ones(()) for _ in range(tensors)]))
        parts.append(nn.Linear(numbers - tensors, 1, bias=False) if numbers else nn.Identity())
        return parts

    return made


@pytest.mark.parametrize(("allowed", "more", "said"), [
    (dict(tensors=106), dict(tensors=107), "106 tensors"),
    (dict(modules=160), dict(modules=161), "160 modules"),
    (dict(numbers=200), dict(numbers=201), "200 numbers"),
    (dict(tensors=5, numbers=200), dict(tensors=5, numbers=201), "200 numbers"),
])  # fmt: skip
def test_no_larger_model_than_its_files_fill(allowed: dict[str, int], more: dict[str, int], said: str) -> None:
    assert stored.outline(build(**allowed), HELD, "m", "its fields")
    held = "and the weights hold 3 tensors in 50 bytes"
    assert refusal(stored.outline, build(**more), HELD, "m", "its fields") == (
        f"m cannot be built from its fields (it describes a model of more than {said}, {held})"
    )
    assert stored.outline(lambda: nn.Linear(3, 2), HELD, "m", "its fields").weight.is_meta


def test_absent_parts_are_not_counted() -> None:
    """A linear map without a bias makes one tensor."""

    def made(count: int) -> list[nn.Module]:
        return [nn.Linear(1, 1, bias=False) for _ in range(count)]

    assert len(stored.outline(lambda: made(106), HELD, "m", "its fields")) == 106
    assert "more than 106 tensors" in refused(stored.outline, lambda: made(107), HELD, "m", "it")


def test_a_model_that_cannot_be_built() -> None:
    assert refusal(stored.outline, lambda: {}["size"], HELD, "m", "its fields") == (
        "m cannot be built from its fields ('size')"
    )


class Configured(nn.Module):
    base_model_prefix = "inner"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.BatchNorm1d(2)})
        self.config = SimpleNamespace(num_hidden_layers=2, use_bias=True, use_conv_bias=False, tie_word_embeddings=True)


NAMED = {name: Stored(tuple(t.shape), t.is_floating_point()) for name, t in Configured().state_dict().items()}


@pytest.mark.parametrize(("names", "said"), [
    (["layers.3.x"], "layers.3.x (in its config.json num_hidden_layers is 2)"),
    (["b", "layers.13.x", "a"], "3 tensors, the first b (in its config.json num_hidden_layers is 2)"),
    (["layers.x.3"], "layers.x.3"),
    (["in_proj.bias"], "in_proj.bias (in its config.json use_bias is True)"),
    (["in_proj.bias.x"], "in_proj.bias.x"),
    (["a.bias"], "a.bias"),
    (["conv1d.bias"], "conv1d.bias (in its config.json use_conv_bias is False)"),
    (["conv1d.bias.x"], "conv1d.bias.x"),
    (["lm_head.weight"], "lm_head.weight (in its config.json tie_word_embeddings is True)"),
    (
        ["a", "head.bias", "layers.0.conv.bias", "layers.1.x_proj.bias"],
        "4 tensors, the first a (in its config.json num_hidden_layers is 2, use_conv_bias is False, "
        "use_bias is True, tie_word_embeddings is True)",
    ),
])  # fmt: skip
def test_names_that_do_not_fit_are_told_with_the_fields_that_they_contradict(names: list[str], said: str) -> None:
    config = Configured().config
    fit = "the weights of m do not fit its configuration:"
    assert refusal(stored.check_names, names, [], config, "m") == f"{fit} they lack {said}"
    told = f"{fit} the model that it describes has no place for {said}"
    assert refusal(stored.check_names, [], names, config, "m") == told
    backbone = SimpleNamespace(backbone=config, num_hidden_layers=7)
    assert refusal(stored.check_names, names, ["z"], backbone, "m") == f"{fit} they lack {said}"
    bare = said.partition(" (")[0]
    assert refusal(stored.check_names, names, [], None, "m") == f"{fit} they lack {bare}"
    assert refusal(stored.check_names, [], [], config, "m") is None


MISFIT = "the weights of m do not fit its configuration:"


@pytest.mark.parametrize(("change", "said"), [
    ({}, None),
    ({"inner.b.num_batches_tracked": Stored((), True)}, None),
    ({"inner.a.weight": None, "inner.a.bias": None}, f"{MISFIT} they lack 2 tensors, the first inner.a.bias"),
    ({"z": Stored((), True), "y": Stored((), True), "x": Stored((), True)},
     f"{MISFIT} the model that it describes has no place for 3 tensors, the first x"),
    ({"inner.a.weight": Stored((3, 2), True), "inner.a.bias": Stored((5,), True)},
     f"{MISFIT} inner.a.weight is 3 × 2, and the model's is 2 × 3"),
    ({"inner.a.bias": Stored((), True)}, f"{MISFIT} inner.a.bias is a single number, and the model's is 2"),
    ({"inner.b.num_batches_tracked": Stored((1,), False)},
     f"{MISFIT} inner.b.num_batches_tracked is 1, and the model's is a single number"),
    ({"inner.a.bias": Stored((2,), False)},
     "the weights of m are damaged: inner.a.bias holds no floating-point numbers"),
])  # fmt: skip
def test_weights_that_do_not_fit(change: dict[str, Stored | None], said: str | None) -> None:
    held = {name: each for name, each in {**NAMED, **change}.items() if each is not None}
    assert refusal(stored.check_fit, Configured(), held, "m") == said


def test_kinds_are_compared_where_names_lack_the_prefix_too() -> None:
    short = {name.removeprefix("inner."): each for name, each in NAMED.items()}
    assert refusal(stored.check_kinds, Configured(), short, "m") is None
    assert refusal(stored.check_kinds, Configured(), {}, "m") is None
    said = "the weights of m are damaged: inner.a.weight holds no floating-point numbers"
    assert refusal(stored.check_kinds, Configured(), {**short, "a.weight": Stored((2, 3), False)}, "m") == said
    assert refusal(stored.check_kinds, Configured(), {**NAMED, "a.weight": Stored((2, 3), False)}, "m") is None


def test_tied_weights_are_equal() -> None:
    one = torch.arange(6.0).view(2, 3)
    said = "they hold a head other than the embeddings, and config.json says that the two are one"
    assert refusal(stored.check_tied, one, one.clone(), "m") is None
    for other in (one.T.contiguous(), one[:1], one + torch.eye(2, 3)):
        assert f"{MISFIT} {said}" in refused(stored.check_tied, one, other, "m")


def test_a_plan_is_built_in_the_widest_dtype() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.ModuleDict({"embeddings": nn.Embedding(2, 3)})
            self.lm_head = nn.Linear(3, 2, bias=False)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def plan(tied: bool = False, **change: torch.Tensor) -> Plan:
        def translate(tensors: Any) -> dict[str, torch.Tensor]:
            names = {"e": "backbone.embeddings.weight", "h": "lm_head.weight", "c": "count"}
            return {names[name]: change.get(name, t) for name, t in tensors.items()}

        return Plan(Small, translate, tied)

    def run(chosen: Plan) -> Any:
        return stored.built(chosen, tensors, Contents(stored.headers_of(tensors), 100), "m", by="its shapes")

    half, whole = torch.arange(6).view(2, 3).half() / 7, torch.arange(6).view(2, 3).bfloat16() / 3
    tensors = {"e": half, "h": whole, "c": torch.tensor(5)}
    found = run(plan())
    assert {t.dtype for t in found.parameters()} == {torch.float32} and found.count == 5
    assert torch.equal(found.lm_head.weight, whole.float())
    assert torch.equal(found.backbone["embeddings"].weight, half.float())
    assert {t.dtype for t in run(plan(h=half.clone())).parameters()} == {torch.float16}
    assert run(plan(tied=True, h=half.clone())).count == 5
    assert "hold a head other than" in refused(run, plan(tied=True))
    assert "lm_head.weight is 1 × 3" in refused(run, plan(h=whole[:1]))
    small = Contents({}, 2)
    said = "m cannot be built from its shapes (it describes a model of more than 8 numbers, and the weights hold 0"
    assert said in refused(stored.built, plan(), tensors, small, "m", "its shapes")
