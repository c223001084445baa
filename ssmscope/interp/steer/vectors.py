"""Control vectors: directions that steer a model, in files with their provenance, or in a copy of its weights.

In a GGUF file, which llama.cpp and vLLM read, the tensor direction.i is what is added to the output of block i: to the
stream that block i + 1 reads. Block 0's output and the embeddings have no place there.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from ssmscope.api.options import note
from ssmscope.api.writing import created, write_errors_explained, write_whole
from ssmscope.core.edits import Edit, blocks_of, in_words
from ssmscope.core.model import Model
from ssmscope.data.tokenizer import save_tokenizer
from ssmscope.errors import InputError, check_number, extra
from ssmscope.interp.partial_runs import block_list
from ssmscope.interp.steer.measure import Direction, layers_of, mean_difference, norm, steering_edit
from ssmscope.loading import in_memory
from ssmscope.loading.load import load
from ssmscope.render.numbers import number_runs

MAX_LOGIT_ERROR = 1e-5
"""Largest difference of an exported model's logits from the steered model's, relative to the largest logit."""
MAX_ROUNDING = 0.02
"""Largest part of an exported direction, by norm, that may be lost as it is rounded to the dtype of a bias."""
PREFIX = "direction."
"""Prefix of the tensors' names in a file, before their number."""


@dataclass(frozen=True, eq=False)
class ControlVector:
    """Direction at a layer, or at several.

    Attributes:
        site: "residual", the stream that the layer's block reads, or "state", of one layer.
        layer: number of a state-space layer in the model's list of layers, or several.
        direction: (width,) for each layer, or for states (heads, width, state) for each recurrence; float64.
        source: where it comes from: model, fingerprint, texts.
    """

    site: Literal["residual", "state"]
    layer: int | tuple[int, ...]
    direction: Direction
    source: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, part in enumerate(self.direction):
            if not part.is_floating_point() or not bool(part.double().isfinite().all()):
                held = "numbers that are not finite" if part.is_floating_point() else f"{part.dtype}"
                said = f"{PREFIX}{number} of a control vector holds {held.removeprefix('torch.')}"
                raise InputError(f"{said}; a direction is of finite floating-point numbers")

    @classmethod
    def between(
        cls,
        model: Model,
        toward: Sequence[Any],
        away: Sequence[Any],
        site: Literal["residual", "state"],
        layer: int | tuple[int, ...],
        *,
        pca: bool = False,
    ) -> ControlVector:
        """Return the difference of means of contrasting texts, or of their first principal component (see `steer`),
        strength 1."""
        texts = {"toward": json.dumps([*toward]), "away": json.dumps([*away])}
        about = {"model": model.name, "architecture": model.architecture, "fingerprint": model.fingerprint}
        return cls(site, layer, mean_difference(model, toward, away, site, layer, pca=pca), {**about, **texts})

    @property
    def layers(self) -> tuple[int, ...]:
        return layers_of(self.layer)

    def edit(self, strength: float = 1.0) -> Edit:
        """Return the edit that adds strength · d."""
        return steering_edit(self.site, self.layer, self.direction, strength)

    def save(self, path: str | os.PathLike[str], model: Model | None = None) -> None:
        """Write a safetensors file, with site, layer, norm and source as its metadata; or, for a path that ends in
        .gguf, a GGUF file in float32, which needs the model that counts the blocks."""
        from safetensors.torch import save

        if Path(path).suffix == ".gguf":
            return write_gguf(self, path, model)
        layer = ",".join(map(str, self.layers))
        about = {"site": self.site, "layer": layer, "norm": repr(norm(self.direction)), **self.source}
        tensors = {f"{PREFIX}{number}": part.cpu().contiguous() for number, part in enumerate(self.direction)}
        return write_whole(Path(path), save(tensors, metadata=about))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> ControlVector:
        """Read a file for a model, which need not be the one that it was made with. Raises InputError if it cannot be
        read or is no control vector, or the model has no such layer or another width."""
        from safetensors import SafetensorError, safe_open

        where = os.fspath(path)
        if Path(where).suffix == ".gguf":
            found = read_gguf(path, model)
            found._check_fits(model, where)
            return found
        try:
            with safe_open(where, "pt") as file:
                about = dict(file.metadata() or {})
                names = sorted(file.keys(), key=lambda name: int(name.removeprefix(PREFIX)))
                direction = tuple(file.get_tensor(name).to(model.device) for name in names)
            site, layers = cast(Any, about.pop("site")), tuple(map(int, about.pop("layer").split(",")))
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {where}: {error}") from error
        except (KeyError, ValueError) as error:
            raise InputError(f"{where} is no control vector: it lacks site, layer or direction.0, …") from error
        about.pop("norm", None)
        try:
            found = cls(site, layers[0] if len(layers) == 1 else layers, direction, about)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        found = replace(found, direction=tuple(part.double() for part in direction))
        found._check_fits(model, where)
        return found

    def _check_fits(self, model: Model, where: str) -> None:
        wrong = not {*self.layers} <= {*model.layer_numbers}
        if self.site not in ("residual", "state") or wrong or len(self.layers) > 1 and self.site == "state":
            known = in_words(model.layer_numbers)
            raise InputError(f"{where} is of {self.site} {self.layer}; {model.name} has the layers {known}")
        if self.site == "residual":
            shapes: list[tuple[int, ...]] = [(model.width,)] * len(self.layers)
        else:
            model.check_recurrent_state("a state")
            at = model.layer_numbers.index(self.layers[0])
            states = model.run(model.encode(ids=[0]), last_only=True).states[at].ssm
            shapes = [tuple(state.shape[1:]) for state in states]
        given = [tuple(part.shape) for part in self.direction]
        if given != shapes:
            raise InputError(f"{where} has a direction of the shape {given}; layer {self.layer} has {shapes}")


def write_gguf(vector: ControlVector, path: str | os.PathLike[str], model: Model | None) -> None:
    """Write a control vector of the residual stream as GGUF, in float32. Raises InputError for states, a layer whose
    stream is no output of a block after block 0, or without the package gguf."""
    gguf = _gguf()
    _check_blocks(model)
    if vector.site != "residual":
        raise InputError("GGUF holds directions of the residual stream; save a state's as safetensors")
    if early := [layer for layer in vector.layers if layer < 2]:
        later = [layer for layer in model.layer_numbers if layer > 1] if model is not None else []
        give = f"layers {number_runs(later)}, or a file ending in .safetensors" if later else "a .safetensors file"
        raise InputError(f"GGUF has no place for a direction at layer {early[0]}, before block 1's output; give {give}")
    where = Path(path)
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "vector", "controlvector")
        writer.add_string("controlvector.model_hint", str(getattr(model and model.config, "model_type", "")))
        writer.add_uint32("controlvector.layer_count", len(vector.layers))
        for layer, part in sorted(zip(vector.layers, vector.direction), key=lambda each: each[0]):
            writer.add_tensor(f"{PREFIX}{layer - 1}", part.float().cpu().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(where, (Path(folder) / "vector").read_bytes())


def read_gguf(path: str | os.PathLike[str], model: Model) -> ControlVector:
    """Read a control vector that llama.cpp's tools or repeng wrote. Raises InputError if it is none, or has directions
    after blocks that no state-space layer follows."""
    gguf, where = _gguf(), os.fspath(path)
    try:
        reader = gguf.GGUFReader(where)
        tensors = {tensor.name: torch.tensor(tensor.data).double() for tensor in reader.tensors}
        numbers = {int(name.removeprefix(PREFIX)) + 1: part for name, part in tensors.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        said = f"cannot read {where} as a control vector: {error}"
        raise InputError(f"{said}; give a .gguf file with directions, such as steer saves, or safetensors") from error
    hint, own = reader.get_field("controlvector.model_hint"), str(getattr(model.config, "model_type", ""))
    if hint is not None and (made_for := str(hint.contents())) and own and made_for != own:
        note(f"{where} was made for the architecture {made_for!r}, and {model.name} is {own!r}")
    _check_blocks(model)
    if not numbers or (lost := sorted(numbers.keys() - {*model.layer_numbers})):
        said = f"of block {lost[0] - 1}, after which {model.name} has no state-space layer" if numbers else "nowhere"
        raise InputError(f"{where} has a direction {said}")
    layers = tuple(sorted(numbers))
    parts = tuple(numbers[layer].to(model.device) for layer in layers)
    return ControlVector("residual", layers[0] if len(layers) == 1 else layers, parts)


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise InputError(f"a GGUF file needs the package gguf: install it {extra('gguf')}") from error
    return gguf


def _check_blocks(model: Model | None) -> None:
    """Raise InputError unless a model's blocks are in one list, by which GGUF counts them."""
    if model is None or not block_list(model)[1]:
        raise InputError("GGUF counts a model's blocks, and there is no single list of them; save it as safetensors")


def bake(model: Model, vector: ControlVector, strength: float, directory: str | os.PathLike[str]) -> Path:
    """Write a copy of a model that is steered by its weights alone.

    Adding strength · d to the stream that block i reads is a bias of the last linear layer of block i − 1. A layer
    without biases gets one where the configuration has a switch for it; the other biases that this brings are zero. All
    else is the model's: dtype, generation settings, tokenizer. The weights of a quantised model are written as they
    were dequantised. The copy stays only if its logits, computed in float32 as it is and as it is loaded again, are to
    1e-5 those of the model that is steered by the direction as the bias holds it, rounded to the model's dtype.

    Raises:
        InputError: a strength that is not finite, a direction of states or of layer 0, no bias that has this effect, a
            bias that rounds the direction away, a model with PEFT adapters, with layers in few bits, or of no library's
            model with a head, a copy that would be loaded as another model, or a directory that exists.
    """
    where = Path(directory)
    check_number(-math.inf, strength=strength)
    if vector.site != "residual":
        raise InputError("a state has no bias; export a direction of the residual stream")
    if not isinstance(vector.layer, int):
        raise InputError("a copy has the direction of one layer in its weights; give one layer, or save the vector")
    _check_exports(model)
    if os.path.lexists(where):
        raise InputError(f"{where} exists; give a new directory to export to")
    with write_errors_explained(where), created(where.parent):
        where.mkdir()
        try:
            _bake(model, vector, strength, where)
        except BaseException:
            shutil.rmtree(where)
            raise
    return where


def _check_exports(model: Model) -> None:
    """Raise InputError if a model has no directory of its own kind."""
    module, advice = model.module, "steer it as it runs instead"
    if any(type(part).__module__.partition(".")[0] == "peft" for part in module.modules()):
        raise InputError(f"{model.name} has PEFT adapters: merge it (merge_and_unload()), and export that")
    if not isinstance(module, PreTrainedModel):
        kind = "has no head" if model.gives == "nothing" else "is a module of one's own"
        raise InputError(f"{model.name} {kind}, which cannot be exported as a directory; {advice}")
    if any(not t.is_floating_point() for t in module.parameters()):
        raise InputError(f"{model.name} has quantised layers: dequantise it (model.dequantize()), or {advice}")


def _bake(model: Model, vector: ControlVector, strength: float, where: Path) -> None:
    """Write the copy into an empty directory."""
    dtype = torch.promote_types(next(model.module.parameters()).dtype, torch.float32)
    device = torch.device("cpu")
    batch = model.encode(ids=torch.arange(24).remainder(model.vocabulary).view(2, 12)).to(device)
    wanted = (strength * vector.direction[0]).cpu()
    reason = f"no bias of the block before layer {vector.layer} of {model.name} adds to the residual stream, and its "
    reason += "configuration has no switch for one"
    for name in _last_linear_layers(model, vector.layers[0]):
        for module in _with_bias(model.module, name):
            plain = Model(in_memory.cast(copy.deepcopy(module), dtype, device), name=model.name)
            bias = module.get_submodule(name).bias
            before = bias.detach().double().cpu().clone()
            with torch.no_grad():
                bias.copy_(before + wanted)
            added = bias.detach().double().cpu() - before
            kind = str(bias.dtype).removeprefix("torch.")
            if not bool(added.isfinite().all()):
                reason = f"{kind} holds no number as large as in this direction: lower the strength"
                continue
            steered = plain.run(batch, edits=steering_edit("residual", vector.layer, (added,), 1.0)).logits
            with torch.no_grad():
                plain.module.get_submodule(name).bias.copy_(bias)
            if not _same(plain.run(batch).logits, steered):
                continue
            lost = float((added - wanted).norm() / wanted.norm().clamp_min(torch.finfo(wanted.dtype).tiny))
            if lost > MAX_ROUNDING:
                reason = f"the bias before layer {vector.layer} of {model.name} is so large that {lost:.0%} of the "
                reason += f"direction are lost in {kind}: load the model in float32"
                continue
            _write(module, where)
            if model.tokenizer is not None:
                save_tokenizer(model.tokenizer, where)
            about = {"layer": vector.layer, "strength": strength, "norm": norm(vector.direction), **vector.source}
            (where / "control_vector.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
            try:
                again = load(where, dtype=dtype).run(batch).logits
            except InputError as error:
                raise InputError(f"the copy of {model.name} is not read as it is written: {error}") from error
            if _same(again, steered):
                return
            reason = f"the directory that {type(module).__name__} writes is loaded as another model"
            shutil.rmtree(where)
            where.mkdir()
    raise InputError(f"{reason}; steer it as it runs instead")


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= MAX_LOGIT_ERROR * expected.abs().max())


def _write(module: Any, where: Path) -> None:
    """Write a model, a tied head once: transformers does not know of every one that it is tied."""
    head, weights = module.get_output_embeddings(), module.state_dict()
    if head is not None and head.weight is module.get_input_embeddings().weight:
        own = {f"{name}.weight" for name, part in module.named_modules() if part is head}
        weights = {name: weight for name, weight in weights.items() if name not in own}
    module.save_pretrained(where, state_dict=weights)


def _last_linear_layers(model: Model, layer: int) -> Iterator[str]:
    """Yield the names of the linear layers onto the stream in the block before a layer's, the last one first."""
    block = blocks_of(model.module)[model.layer_numbers.index(layer)]
    for home, stack in model.module.named_modules():
        if isinstance(stack, nn.ModuleList) and any(part is block for part in stack):
            at = next(number for number, part in enumerate(stack) if part is block)
            parts = list(stack[at - 1].named_modules()) if at else []
            for name, part in reversed(parts):
                if isinstance(part, nn.Linear) and part.out_features == model.width:
                    yield f"{home}.{at - 1}.{name}"
    if layer == 0:
        raise InputError("layer 0 reads the embeddings, which have no bias; export a later layer's direction")


def _with_bias(module: Any, name: str) -> Iterator[Any]:
    """Yield copies of a model in which a linear layer has a bias: as it is, or by each switch of the configuration."""
    if module.get_submodule(name).bias is not None:
        yield copy.deepcopy(module)
        return
    for switch in [key for key, value in module.config.to_dict().items() if "bias" in key and value is False]:
        found = copy.deepcopy(module)
        setattr(found.config, switch, True)
        with torch.device("meta"):
            like = type(module)(found.config).state_dict()
        own = found.state_dict()
        new = like.keys() - own.keys()
        if f"{name}.bias" not in new or own.keys() - like.keys() or not all(key.endswith("bias") for key in new):
            continue
        for key in new:
            part = found.get_submodule(key.rpartition(".")[0])
            part.bias = nn.Parameter(part.weight.new_zeros(like[key].shape))
        yield found
