"""Control vectors: directions that steer a model, in files with their provenance, or in a copy of its weights."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from ssmscope.api.writing import created, write_errors_explained, write_whole
from ssmscope.architectures.loading.load import load
from ssmscope.core.edits import Edit, blocks_of
from ssmscope.core.model import Model
from ssmscope.data.tokenizer import save_tokenizer
from ssmscope.errors import InputError
from ssmscope.interp.steer.measure import Direction, mean_difference, norm, steering_edit

MAX_LOGIT_ERROR = 1e-5
"""Largest difference of an exported model's logits from the steered model's, relative to the largest logit."""
PREFIX = "direction."
"""Prefix of the tensors' names in a file, before their number."""


@dataclass(frozen=True, eq=False)
class ControlVector:
    """Direction at a layer.

    Attributes:
        site: "residual", the stream that the layer's block reads, or "state".
        direction: (width,), or for states (heads, width, state) for each recurrence; float64.
        source: where it comes from: model, fingerprint, texts.
    """

    site: Literal["residual", "state"]
    layer: int
    direction: Direction
    source: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def between(
        cls, model: Model, toward: Sequence[Any], away: Sequence[Any], site: Literal["residual", "state"], layer: int
    ) -> ControlVector:
        """Return the difference of means of contrasting texts (see `steer`), strength 1."""
        texts = {"toward": json.dumps([*toward]), "away": json.dumps([*away])}
        about = {"model": model.name, "architecture": model.architecture, "fingerprint": model.fingerprint}
        return cls(site, layer, mean_difference(model, toward, away, site, layer), {**about, **texts})

    def edit(self, strength: float = 1.0) -> Edit:
        """Return the edit that adds strength · d."""
        return steering_edit(self.site, self.layer, self.direction, strength)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, with site, layer, norm and source as its metadata."""
        from safetensors.torch import save

        about = {"site": self.site, "layer": str(self.layer), "norm": repr(norm(self.direction)), **self.source}
        tensors = {f"{PREFIX}{number}": part.cpu().contiguous() for number, part in enumerate(self.direction)}
        write_whole(Path(path), save(tensors, metadata=about))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> ControlVector:
        """Read a file for a model, which need not be the one that it was made with. Raises InputError if it cannot be
        read or is no control vector, or the model has no such layer or another width."""
        from safetensors import SafetensorError, safe_open

        where = os.fspath(path)
        try:
            with safe_open(where, "pt") as file:
                about = dict(file.metadata() or {})
                names = sorted(file.keys(), key=lambda name: int(name.removeprefix(PREFIX)))
                direction = tuple(file.get_tensor(name).double().to(model.device) for name in names)
            site, layer = cast(Any, about.pop("site")), int(about.pop("layer"))
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {where}: {error}") from error
        except (KeyError, ValueError) as error:
            raise InputError(f"{where} is no control vector: it lacks site, layer or direction.0, …") from error
        about.pop("norm", None)
        found = cls(site, layer, direction, about)
        found._check_fits(model, where)
        return found

    def _check_fits(self, model: Model, where: str) -> None:
        if self.site not in ("residual", "state") or not 0 <= self.layer < model.num_layers:
            last = model.num_layers - 1
            raise InputError(f"{where} is of {self.site} {self.layer}; {model.name} has the layers 0 to {last}")
        if self.site == "residual":
            shapes: list[tuple[int, ...]] = [(model.width,)]
        else:
            model.check_recurrent_state("a state")
            states = model.run(model.encode(ids=[0]), last_only=True).states[self.layer].ssm
            shapes = [tuple(state.shape[1:]) for state in states]
        given = [tuple(part.shape) for part in self.direction]
        if given != shapes:
            raise InputError(f"{where} has a direction of the shape {given}; layer {self.layer} has {shapes}")


def bake(model: Model, vector: ControlVector, strength: float, directory: str | os.PathLike[str]) -> Path:
    """Write a copy of a model that is steered by its weights alone.

    Adding strength · d to the stream that block i reads is a bias of the last linear layer of block i − 1. A layer
    without biases gets one where the configuration has a switch for it; the other biases that this brings are zero. The
    copy is written only if its logits, as it is and as it is loaded again, are those of the steered model to 1e-5.

    Raises:
        InputError: a direction of states or of layer 0, no bias that has this effect, or a directory that exists.
    """
    where = Path(directory)
    if vector.site != "residual":
        raise InputError("a state has no bias; export a direction of the residual stream")
    if os.path.lexists(where):
        raise InputError(f"{where} exists; give a new directory to export to")
    with write_errors_explained(where), created(where.parent):
        where.mkdir()
        try:
            if not _bake(model, vector, strength, where):
                said = f"no bias of the block before layer {vector.layer} of {model.name} adds to the residual stream"
                raise InputError(f"{said}, and its configuration has no switch for one; steer it as it runs instead")
        except BaseException:
            shutil.rmtree(where)
            raise
    return where


def _bake(model: Model, vector: ControlVector, strength: float, where: Path) -> bool:
    """Write the copy into an empty directory. Returns False if no bias has the effect."""
    batch = model.encode(ids=torch.arange(24).remainder(model.vocabulary).view(2, 12))
    steered = model.run(batch, edits=vector.edit(strength)).logits

    def same(other: Model) -> bool:
        return bool((other.run(batch).logits - steered).abs().max() <= MAX_LOGIT_ERROR * steered.abs().max())

    for name in _last_linear_layers(model, vector.layer):
        for module in _with_bias(model.module, name):
            with torch.no_grad():
                bias = module.get_submodule(name).bias
                bias += (strength * vector.direction[0]).to(bias)
            if not same(Model(module, model.tokenizer, model.name)):
                continue
            _write(module, where)
            if model.tokenizer is not None:
                save_tokenizer(model.tokenizer, where)
            about = {"layer": vector.layer, "strength": strength, "norm": norm(vector.direction), **vector.source}
            (where / "control_vector.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
            if same(load(where)):
                return True
    return False


def _write(module: Any, where: Path) -> None:
    """Write a model, a tied head once: transformers does not know of every one that it is tied."""
    head, weights = module.get_output_embeddings(), module.state_dict()
    if head is not None and head.weight is module.get_input_embeddings().weight:
        own = {f"{name}.weight" for name, part in module.named_modules() if part is head}
        weights = {name: weight for name, weight in weights.items() if name not in own}
    module.save_pretrained(where, state_dict=weights)


def _last_linear_layers(model: Model, layer: int) -> Iterator[str]:
    """Yield the names of the linear layers onto the stream in the block before a layer's, the last one first."""
    block = blocks_of(model.module)[layer]
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
        config = copy.deepcopy(module.config)
        setattr(config, switch, True)
        found = type(module)(config).to(next(module.parameters())).eval()
        if getattr(found.get_submodule(name), "bias", None) is None:
            continue
        missing, unexpected = found.load_state_dict(module.state_dict(), strict=False)
        if not unexpected and all(key.endswith("bias") for key in missing):
            with torch.no_grad():
                for key in missing:
                    found.get_parameter(key).zero_()
            yield found
