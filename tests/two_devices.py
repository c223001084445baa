"""Models with one half on another device, on a machine with a CPU alone: as over two GPUs, but for the speed.

    python tests/two_devices.py mamba bamba    # a line of JSON for each order of the devices and each question

`card` is a device that is none: its tensors lie on the CPU, say that they are on `card:0`, and refuse to meet those on
the CPU wherever tensors on two devices may not meet. It is registered with torch for the whole process, so a test runs
this file in one of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from examples import TEXTS, random_example
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
import ssmscope
from ssmscope.core.edits import Edit
from ssmscope.core.model import Model
from ssmscope.core.trace import mapped
from ssmscope.errors import InputError
from ssmscope.interp.methods.gradients import gradxinput
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import objective
from ssmscope.probes.lens.lenses import chosen_states, logit_lens

os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the modes below are this thread's, which transformers 5 then reads in
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

    def data_ptr(self) -> int:
        return self.inner.data_ptr()  # by which accelerate knows what is tied

    def __deepcopy__(self, memo: Any) -> Any:
        found = Card(self.inner.detach().clone())
        return nn.Parameter(found, self.requires_grad) if isinstance(self, nn.Parameter) else found

    def tolist(self) -> Any:
        return self.inner.tolist()


def dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU, its results where its inputs are, or where it was asked to make them.

    Raises:
        RuntimeError: tensors on the card and on the CPU meet.
    """
    tensors = list(_tensors((*args, *kwargs.values())))
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
        kwargs = {**kwargs, "device": torch.device("cpu")} if there else kwargs
    known = {id(each.inner): each for each in on_card}
    if on_card:
        args, kwargs = _inside(args), {name: _inside(each) for name, each in kwargs.items()}
    found = func(*args, **kwargs)
    if not there:
        return found
    return _mapped(lambda x: known[id(x)] if id(x) in known else Card(x) if isinstance(x, Tensor) else x, found)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, and in their lists: torch's own trees took longer than all else."""
    for each in values:
        yield from [each] if isinstance(each, Tensor) else _tensors(each) if isinstance(each, list | tuple) else ()


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(_mapped(change, each) for each in value) if type(value) in (list, tuple) else change(value)


def _inside(value: Any) -> Any:
    return _mapped(lambda each: each.inner if isinstance(each, Card) else each, value)


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


class Lists(TorchFunctionMode):
    """List inputs of which torch makes tensors without a call of the former: lists as values, and as indices."""

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


def halves(module: Any, first: str, second: str) -> dict[str, str]:
    """The embeddings and the first half of its layers on one device, the rest on the other."""
    base, found = module.base_model, {}
    for part, inside in base.named_children():
        name = f"{module.base_model_prefix}.{part}"
        if isinstance(inside, nn.ModuleList):
            found |= {f"{name}.{i}": first if i < len(inside) // 2 else second for i in range(len(inside))}
        else:
            found[name] = first if isinstance(inside, nn.Embedding) else second
    head = next(name for name, part in module.named_modules() if part is module.get_output_embeddings())
    return found | {head: first if module.config.tie_word_embeddings else second}


def questions(model: Model) -> dict[str, Callable[[], Tensor]]:
    def batch() -> Any:
        return model.encode(ids=TEXTS)

    def survival() -> Tensor:
        found = ssmscope.heatmap(model, batch())
        return torch.cat([torch.from_numpy(text.scores).flatten() for text in found])

    def attention() -> Tensor:
        found = ssmscope.attention(model, model.encode(ids=TEXTS[:1])).to_frame()["weight"]
        return torch.tensor(found.tolist())

    def continued() -> Tensor:
        first, second = (model.encode(ids=part) for part in (TEXTS[0][:6], TEXTS[0][6:]))
        return model.run(second, model.run(first).states).logits

    def elsewhere() -> Tensor:
        here = torch.device("cpu")
        first, second = (model.encode(ids=part).to(here) for part in (TEXTS[0][:6], TEXTS[0][6:]))
        return model.run(second, mapped(model.run(first).states, lambda t: t.to(here))).logits

    def edited() -> Tensor:
        halved = Edit("halved", "output", lambda y, site: y / 2, layers=model.layer_numbers[1:2])
        return model.run(batch(), edits=[halved]).logits

    def lens() -> Tensor:
        return logit_lens(model).log_probs(chosen_states(model, batch(), "every"))

    return {
        "logits": lambda: model.logits(batch()), "continued": continued, "from elsewhere": elsewhere, "edited": edited,
        "lens": lens, "survival": survival, "attention": attention,
        "lrp": lambda: lrp(objective(model, batch(), target=3)).scores,
        "gradxinput": lambda: gradxinput(objective(model, batch(), target=3)).scores,
    }  # fmt: skip


def main(names: list[str], into: str) -> None:
    register()
    for name in names:
        module = random_example(name)
        whole = {question: ask().detach() for question, ask in questions(Model(module)).items()}
        directory = Path(into, name)
        module.save_pretrained(directory)
        for first, second in (("card:0", "cpu"), ("cpu", "card:0")):
            with Operations(), Lists():
                try:
                    model = ssmscope.load(directory, device_map=halves(module, first, second))
                except InputError as error:
                    print(json.dumps({"model": name, "error": str(error)}), flush=True)
                    continue
                for question, ask in questions(model).items():
                    said: dict[str, Any] = {"model": name, "first": first, "question": question}
                    try:
                        found = _inside(ask()).detach()
                        scale = whole[question].nan_to_num().abs().max()
                        said["apart"] = float((found - whole[question]).nan_to_num().abs().max() / scale)
                    except Exception as error:  # which is told
                        said["error"] = f"{type(error).__name__}: {error}"
                    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1:], folder)
