"""Models of which one half is elsewhere, on a machine with a CPU alone: as over two GPUs, but for the speed.

    python tests/two_devices.py mamba bamba    # a line of JSON for each order of the devices and each question

`card` is a device that is none: its tensors lie on the CPU, say that they are on `card:0`, and refuse to meet those on
the CPU wherever tensors on two devices may not meet. It is registered with torch for the whole process, so a test runs
this file in one of its own.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from examples import TEXTS, random_example
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ssmscope
from ssmscope.interp.methods.gradients import gradxinput
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import objective
from ssmscope.model import Model

CARD = torch.device("cpu")  # until it is registered
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class Card(Tensor):
    """A tensor on the CPU that says that it is on the card."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Card:
        shape = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype)
        return Tensor._make_wrapper_subclass(cls, inner.shape, device=CARD, **shape)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()


def dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU, its results where its inputs are, or where it was asked to make them.

    Raises:
        RuntimeError: tensors on the card and on the CPU meet.
    """
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    on_card = [each for each in tensors if isinstance(each, Card)]
    # numbers may meet all, and what is on the card may be indexed from the CPU
    apart = on_card and any(not isinstance(each, Card) and each.dim() > 0 for each in tensors)
    if func in INDEXING:
        apart = bool(on_card) and not isinstance(args[0], Card)
    if apart and func not in (aten._to_copy.default, aten.copy_.default):
        raise RuntimeError(f"{func}: tensors on the card and on the CPU meet")
    there = bool(on_card)
    if func is aten.copy_.default:
        there = isinstance(args[0], Card)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == CARD.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known = {id(each.inner): each for each in on_card}
    found = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
    if not there:
        return found
    return tree_map(lambda x: known[id(x)] if id(x) in known else Card(x) if isinstance(x, Tensor) else x, found)


def _inside(value: Any) -> Any:
    return value.inner if isinstance(value, Card) else value


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


class Lists(TorchFunctionMode):
    """What torch makes tensors of behind the back of the former: lists as values, and as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            where = kwargs.pop("device")
            return func(*args, **kwargs).to(where)
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            at = tuple(torch.tensor(each) if isinstance(each, (list, range)) else each for each in at)
            args = (args[0], at, *args[2:])
        return func(*args, **kwargs)


def register() -> None:
    """Tell torch of the device `card`."""
    global CARD

    class Module(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend("card", backend_module=Module())
    CARD = torch.device("card:0")


def split(module: nn.Module, first: torch.device, second: torch.device) -> nn.Module:
    """Its embeddings and the first half of its layers on one device, the rest on the other, by accelerate's hooks."""
    base = module.base_model
    layers = next(part for part in base.children() if isinstance(part, nn.ModuleList))
    for part in base.children():
        if part is layers:
            for i, layer in enumerate(layers):
                _place(layer, first if i < len(layers) // 2 else second)
        else:
            _place(part, first if isinstance(part, nn.Embedding) else second)
    head = module.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # where it is the embeddings
    _place(head, second)
    return add_hook_to_module(module, AlignDevicesHook(execution_device=first, io_same_device=True))


def _place(part: nn.Module, device: torch.device) -> None:
    add_hook_to_module(part.to(device), AlignDevicesHook(execution_device=device))


def questions(model: Model) -> dict[str, Callable[[], Tensor]]:
    def batch() -> Any:
        return model.encode(ids=TEXTS)

    def heatmap(score: str) -> Tensor:
        found = ssmscope.selection_heatmap(model, batch(), score=score)
        return torch.cat([torch.from_numpy(text.scores).flatten() for text in found])

    def attention() -> Tensor:
        found = ssmscope.implicit_attention(model, model.encode(ids=TEXTS[:1])).to_frame()["weight"]
        return torch.tensor(found.tolist())

    return {
        "logits": lambda: model.logits(batch()),
        "survival": lambda: heatmap("survival"),
        "retention": lambda: heatmap("retention"),
        "attention": attention,
        "lrp": lambda: lrp(objective(model, batch(), target=3)).scores,
        "gradxinput": lambda: gradxinput(objective(model, batch(), target=3)).scores,
    }


def main(names: list[str]) -> None:
    register()
    for name in names:
        module = random_example(name)
        whole = {question: ask().detach() for question, ask in questions(Model(module)).items()}
        for first, second in ((CARD, torch.device("cpu")), (torch.device("cpu"), CARD)):
            with Operations(), Lists():
                model = Model(split(copy.deepcopy(module), first, second))
                for question, ask in questions(model).items():
                    said: dict[str, Any] = {"model": name, "first": first.type, "question": question}
                    try:
                        found = _inside(ask()).detach()
                        scale = whole[question].nan_to_num().abs().max()
                        said["apart"] = float((found - whole[question]).nan_to_num().abs().max() / scale)
                    except Exception as error:  # which is told
                        said["error"] = f"{type(error).__name__}: {error}"
                    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
