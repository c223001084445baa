"""One face for every loaded model: text or pixels in; logits, traces and states out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ssmscope import ssm
from ssmscope.encoding import Batch, encode_ids, encode_texts, encode_values
from ssmscope.errors import InputError
from ssmscope.frozen import FrozenLayer
from ssmscope.trace import Layers, LayerState, LayerTrace, Trace, detached

TOKENS_AT_ONCE = 4096  # texts of a trace run together up to this many tokens: larger batches are slower on a CPU


class Architecture(Protocol):
    """How to read one family of layers: the names that a file in `ssmscope.models` defines.

    Two more where a family needs them: `returned(output)`, what the mixer's own forward returns where that is not its
    output alone, and `reading(module)`, a context manager for the whole model while `fast_scan` reads its mixers.
    """

    MIXERS: tuple[type[nn.Module], ...]
    MODEL_TYPES: tuple[str, ...]

    def quantities(
        self, mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
    ) -> LayerTrace:
        """The layer's terms from its input and weights."""
        ...

    def output(self, mixer: nn.Module, layer: LayerTrace, scans: tuple[ssm.Scan, ...] | None = None) -> Tensor:
        """The mixer's output from its terms."""
        ...

    def frozen(self, mixer: nn.Module, layer: LayerTrace) -> FrozenLayer:
        """The layer as a linear map of its input, with everything else frozen at its value."""
        ...

    def state_after(self, mixer: nn.Module, layer: LayerTrace, scans: tuple[ssm.Scan, ...]) -> LayerState:
        """Where a run continues from."""
        ...

    def examples(self) -> dict[str, nn.Module]:
        """Small random models of the family, for tests."""
        ...


_READERS: dict[type[nn.Module], Architecture] = {}


def register(architecture: Architecture) -> None:
    """Make the mixers of an architecture readable."""
    for mixer in architecture.MIXERS:
        _READERS[mixer] = architecture


def reader_of(mixer: nn.Module) -> Architecture:
    """The architecture that reads this mixer.

    Raises:
        InputError: when none does.
    """
    if type(mixer) not in _READERS:
        known = ", ".join(sorted(cls.__name__ for cls in _READERS))
        raise InputError(f"{type(mixer).__name__} is no layer that can be read; these are: {known}")
    return _READERS[type(mixer)]


def mixers(module: nn.Module) -> list[nn.Module]:
    """The state-space mixers of a model, first layer first; a mixer's own parts are not mixers."""
    if type(module) in _READERS:
        return [module]
    return [found for child in module.children() for found in mixers(child)]


Visit = Callable[[int, LayerTrace, "tuple[ssm.Scan, ...]"], None]


@contextmanager
def fast_scan(
    module: nn.Module,
    *,
    mask: Tensor | None = None,
    states: Sequence[LayerState] | None = None,
    retention: bool = False,
    visit: Visit | None = None,
) -> Iterator[None]:
    """Within the context the model's mixers run through `ssm.scan`, in training too; on leaving they are as before.

    Caches are off within the context unless a call asks for one; such a call (as in generation) takes the model's own
    path.

    Args:
        module: any model with readable mixers.
        mask: (batch, length) bool, True at real positions; else the mask that the model hands to its mixers.
        states: one per mixer, from which the run continues; refused where layers between the mixers remember too.
        retention: sum the retention map inside the scans.
        visit: called with each mixer's index, terms and scans as it runs.
    """
    found = mixers(module)
    if states is not None and not all(getattr(reader_of(mixer), "CONTINUES", True) for mixer in found):
        raise InputError(
            f"a run of {type(module).__name__} cannot be continued: what its attention layers have read is in no "
            "state; give the whole text at once"
        )
    around = ExitStack()
    caching = {
        id(part.config): part.config
        for part in module.modules()
        if getattr(getattr(part, "config", None), "use_cache", False)
    }
    try:
        for config in caching.values():
            config.use_cache = False
        for reader in dict.fromkeys(map(reader_of, found)):
            if hasattr(reader, "reading"):
                around.enter_context(reader.reading(module))
        for index, mixer in enumerate(found):
            state = states[index] if states is not None else None
            mixer.forward = partial(  # an instance attribute hides the method until it is deleted
                _forward, type(mixer).forward, mixer, index, mask, state, retention, visit
            )
        yield
    finally:
        for mixer in found:
            mixer.__dict__.pop("forward", None)
        around.close()
        for config in caching.values():
            config.use_cache = True


def _forward(own_forward, mixer, index, mask, state, retention, visit, /, u=None, cache_params=None, *args, **kwargs):
    u = kwargs.pop("hidden_states") if u is None else u  # Bamba's layers name it
    if cache_params is not None:
        return own_forward(mixer, u, cache_params, *args, **kwargs)
    if kwargs.get("state") is not None:  # the cache of RWKV
        return own_forward(mixer, u, *args, **kwargs)
    reader = reader_of(mixer)
    layer = reader.quantities(mixer, u, mask if mask is not None else kwargs.get("attention_mask"), state)
    scans = layer.scan(state, retention=retention)
    if visit is not None:
        visit(index, layer, scans)
    result = reader.output(mixer, layer, scans)
    return reader.returned(result) if hasattr(reader, "returned") else result


class Run(NamedTuple):
    """Logits at every position, (batch, length, vocabulary) (a classifier's, or those at each text's last position:
    (batch, classes)), and the state from which `Model.run` continues."""

    logits: Tensor
    states: tuple[LayerState, ...]


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model and its tokenizer.

    Attributes:
        module: the transformers model, in evaluation mode.
        tokenizer: its tokenizer, or None.
        name: how the user called it.
    """

    module: Any
    tokenizer: Any = None
    name: str = "model"

    def __post_init__(self) -> None:
        if not mixers(self.module):
            known = ", ".join(sorted(cls.__name__ for cls in _READERS))
            raise InputError(
                f"{self.name}: {type(self.module).__name__} has no state-space layer that can be read ({known})"
            )
        self.module.eval()

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def architecture(self) -> str:
        """The model type, e.g. `mamba2`; for a classifier its backbone's."""
        backbone = getattr(self.config, "backbone", None)
        return getattr(backbone, "model_type", None) or self.config.model_type

    @property
    def is_classifier(self) -> bool:
        return type(self.module).__name__.endswith("ForSequenceClassification")

    @property
    def channels(self) -> int | None:
        """How many numbers a pixel has, for a pixel classifier; None for a model of tokens."""
        return getattr(self.config, "channels", None) if self.is_classifier else None

    @property
    def _image(self) -> str:
        size = self.config.image_size
        channels = f"{self.channels} channel{'s' if self.channels != 1 else ''}"
        return f"{size[1]} × {size[0]} of {channels}" if size else channels

    @property
    def labels(self) -> list[str] | None:
        """A classifier's classes, in the order of its logits; None for a language model."""
        return [self.config.id2label[i] for i in range(self.config.num_labels)] if self.is_classifier else None

    @property
    def mixers(self) -> list[nn.Module]:
        return mixers(self.module)

    @property
    def num_layers(self) -> int:
        """The number of state-space layers."""
        return len(self.mixers)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over the configuration and every weight."""
        weights = self.module.state_dict()
        version = tuple((t.data_ptr(), t._version) for t in weights.values())
        if self.__dict__.get("_hashed", (None,))[0] != version:
            self.__dict__["_hashed"] = (version, _fingerprint(self.config, weights))
        return self.__dict__["_hashed"][1]

    @property
    def source(self) -> dict[str, str]:
        """Where a result comes from: model, architecture, fingerprint, dtype, device."""
        return {
            "model": self.name,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint,
            "dtype": str(next(self.module.parameters()).dtype).removeprefix("torch."),
            "device": self.device.type,
        }

    def encode(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        values: Tensor | np.ndarray | None = None,
        max_tokens: int | None = None,
    ) -> Batch:
        """Texts, or token ids for a model without a tokenizer, as one batch padded on the right.

        A pixel classifier reads `values` (n, length, channels) or (length, channels) instead: uint8, which is divided
        by 255, or floats in [0, 1]. The lengths of its batch count the class token.

        Raises:
            InputError: for an empty text, control characters, a text of unknown tokens only, an id outside the
                vocabulary, more than `max_tokens` tokens, texts for a model without a tokenizer, pixels of another
                shape or dtype, texts or ids for a pixel model, or pixels for a model of tokens.
        """
        if self.channels is not None:
            if values is None or texts is not None or ids is not None:
                raise InputError(
                    f"{self.name} reads pixels ({self._image}), not texts: give it images, e.g. --image FILE"
                )
            shape = self.config.image_size
            dtype = next(self.module.parameters()).dtype
            return encode_values(values, self.channels, dtype=dtype, shape=shape, max_tokens=max_tokens).to(self.device)
        if values is not None:
            raise InputError(f"{self.name} reads tokens, not pixels: give texts or token ids")
        if (texts is None) == (ids is None):
            raise InputError("give either texts or token ids")
        if ids is not None:
            one_row = len(ids) == 0 or isinstance(ids[0], int)
            rows: list[list[int]] = [list(ids)] if one_row else [list(row) for row in ids]  # type: ignore[arg-type]
            return encode_ids(rows, self.vocabulary, self.tokenizer, max_tokens).to(self.device)
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer: give token ids instead, e.g. --ids 5,17,3")
        texts = [texts] if isinstance(texts, str) else list(texts or [])
        return encode_texts(texts, self.tokenizer, self.vocabulary, max_tokens).to(self.device)

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model has embeddings for."""
        return self.module.get_input_embeddings().weight.shape[0]

    def logits(self, batch: Batch) -> Tensor:
        """A classifier's logits (batch, classes), or a language model's at every position, without gradients."""
        with torch.no_grad(), fast_scan(self.module, mask=batch.mask):
            return self.forward(batch)

    def run(self, batch: Batch, states: Sequence[LayerState] | None = None, *, last_only: bool = False) -> Run:
        """Logits and the state after the batch; from `states`, a continuation of the run that gave them.

        A text cut in two, the second part run from the first's states, gives the logits of the whole text. In a
        padded batch every row continues from its own last real position. With `last_only` a language model's logits
        are those at each text's last position.
        """
        after: list[LayerState] = []

        def keep(index: int, layer: LayerTrace, scans: tuple[ssm.Scan, ...]) -> None:
            mixer = self.mixers[index]
            after.append(reader_of(mixer).state_after(mixer, layer, scans))

        with torch.no_grad(), fast_scan(self.module, mask=batch.mask, states=states, visit=keep):
            logits = self.forward(batch, last_only=last_only)
        return Run(logits, tuple(after))

    def trace(
        self,
        texts: str | Sequence[str] | Batch | None = None,
        *,
        ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        values: Tensor | np.ndarray | None = None,
        keep_inputs: bool | Sequence[int] = True,
    ) -> Trace:
        """Run the model and record what its layers did.

        The retention map is summed inside the scans. Every mixer's input is kept (`keep_inputs`), or that of the layers
        with these numbers, and a layer's other terms are recomputed from it when `trace.layers[i]` is asked for;
        without, the trace has no layers, and a long text costs the memory of one layer.

        Raises:
            InputError: as `encode`, and for a layer that the model does not have.
        """
        batch = texts if isinstance(texts, Batch) else self.encode(texts, ids=ids, values=values)
        rows, length = batch.input_ids.shape
        found = self.mixers
        wanted = range(len(found) if keep_inputs else 0) if isinstance(keep_inputs, bool) else set(keep_inputs)
        absent = sorted(set(wanted) - set(range(len(found))))
        if absent:
            raise InputError(f"there is no layer {absent[0]}; {self.name} has the layers 0 to {len(found) - 1}")
        retained = torch.full((len(found), rows, length), torch.nan, device=self.device)
        inputs: list[Tensor | None] = [None] * len(found)
        logits: Tensor | None = None
        for chosen in _by_length(batch.lengths):
            part = batch.rows(chosen)
            width = part.input_ids.shape[1]

            def record(index: int, layer: LayerTrace, scans: tuple[ssm.Scan, ...]) -> None:
                kept = layer.joined([s.retention for s in scans if s.retention is not None])
                retained[index, chosen, :width] = kept.masked_fill(~part.mask, torch.nan).to(retained.dtype)  # noqa: B023
                if index in wanted:
                    u = inputs[index]
                    if len(chosen) == rows:  # noqa: B023
                        inputs[index] = layer.u
                        return
                    if u is None:
                        u = inputs[index] = layer.u.new_zeros(rows, length, layer.u.shape[-1])
                    u[chosen, :width] = layer.u  # noqa: B023

            with torch.no_grad(), fast_scan(self.module, mask=part.mask, retention=True, visit=record):
                last = self.forward(part, last_only=True).float()
            logits = last.new_empty(rows, last.shape[-1]) if logits is None else logits
            logits[chosen] = last
        assert logits is not None

        def recompute(index: int) -> LayerTrace:
            u = inputs[index]
            if u is None:
                raise ValueError(f"this trace was taken without the input of layer {index}: see keep_inputs")
            with torch.no_grad():
                return detached(reader_of(found[index]).quantities(found[index], u, batch.mask))

        def freeze(index: int) -> FrozenLayer:
            layer = recompute(index)
            with torch.no_grad():
                return detached(reader_of(found[index]).frozen(found[index], layer))

        return Trace(
            input_ids=batch.input_ids,
            mask=batch.mask,
            retention=retained,
            logits=logits,
            tokens=batch.tokens,
            words=batch.words,
            answers=self._answers(logits),
            source=self.source,
            layers=Layers(len(found), recompute),
            frozen=Layers(len(found), freeze),
            pixels=self._as_images(batch),
        )

    def _as_images(self, batch: Batch) -> Tensor | None:
        size = self.config.image_size if batch.values is not None else None
        if batch.values is None or size is None or size[0] * size[1] != batch.values.shape[1]:
            return None
        return batch.values.unflatten(1, tuple(size))

    def forward(self, batch: Batch, last_only: bool = False) -> Tensor:
        """The module's own logits in the caller's context: with gradients unless they are off, and through `ssm.scan`
        within `fast_scan`. With `last_only` a language model's are those at each text's last position."""
        if (batch.values is None) != (self.channels is None):
            wanted = "tokens" if self.channels is None else "pixels"
            raise InputError(f"{self.name} reads {wanted}: give it a batch of its own encode()")
        if batch.values is not None:
            return self.module(input_values=batch.values, attention_mask=batch.mask.long()).logits
        arguments = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
        if self.is_classifier:
            return self.module(**arguments).logits
        return self._language_logits(arguments, batch.last if last_only else None)

    def embed(self, batch: Batch) -> Tensor:
        """The embeddings of a batch's tokens, (batch, length, width); of a pixel classifier with the class token's."""
        if batch.values is not None:
            return self.module.embed_values(batch.values)
        return self.module.get_input_embeddings()(batch.input_ids)

    def forward_embeddings(self, embeddings: Tensor, mask: Tensor, last_only: bool = True) -> Tensor:
        """As `forward`, from embeddings (batch, length, width) padded on the right, whose real positions `mask` has."""
        arguments = {"inputs_embeds": embeddings, "attention_mask": mask.long()}
        if self.is_classifier:
            return self.module(**arguments).logits
        return self._language_logits(arguments, mask.sum(1) - 1 if last_only else None)

    def _language_logits(self, arguments: dict[str, Tensor], at: Tensor | None) -> Tensor:
        """At every position, or at one of each row."""
        hidden = self.module.base_model(**arguments, use_cache=False).last_hidden_state
        if at is not None:
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), at]
        head = self.module.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))

    def _answers(self, logits: Tensor) -> tuple[tuple[str, float], ...]:
        best = logits.softmax(-1).max(-1)
        labels = self.labels
        if labels is not None:
            names = [labels[i] for i in best.indices.tolist()]
        elif self.tokenizer is not None:
            names = [self.tokenizer.decode([i]) for i in best.indices.tolist()]
        else:
            names = [str(i) for i in best.indices.tolist()]
        return tuple(zip(names, best.values.tolist()))


def _by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows in batches of alike length, each of at most `TOKENS_AT_ONCE` tokens, padding included."""
    chosen: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: lengths[r]):
        if chosen and lengths[row] * (len(chosen) + 1) > TOKENS_AT_ONCE:
            yield sorted(chosen)
            chosen = []
        chosen.append(row)
    yield sorted(chosen)


def _essence(config: Any) -> dict[str, Any]:
    """The fields of a configuration that decide what a model computes, alike under every version of transformers.

    What transformers keeps for all models alike (dtypes, labels, generation, token ids) is left out.
    """
    from transformers import PretrainedConfig

    elsewhere = {
        *PretrainedConfig().to_dict(),
        *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "rms_norm", "layer_types"),
        *("use_cache", "use_mambapy", "use_falcon_mambapy", "use_associative_scan", "image_size"),
    }
    fields = {k: v for k, v in vars(config).items() if k not in elsewhere and not k.startswith("_")}
    backbone = fields.pop("backbone", None)
    if backbone is not None:
        fields["backbone"] = _essence(backbone)
    return {"model_type": config.model_type, **fields}


def _fingerprint(config: Any, weights: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(json.dumps(_essence(config), sort_keys=True, default=str).encode(), digest_size=8)
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
