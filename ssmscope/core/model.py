"""One face for every loaded model: text or pixels in; logits, traces and states out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ssmscope import ops
from ssmscope.core.attention_layers import IMPLEMENTATIONS, attending, keeps_caches
from ssmscope.core.batching import by_length
from ssmscope.core.edits import Edit, edited, edits_of, recompute_terms
from ssmscope.core.encoding import (
    Batch,
    as_images,
    encode_ids,
    encode_texts,
    encode_values,
    last_positions,
    spelled_out,
    texts_or_ids,
)
from ssmscope.core.fingerprint import adapters, check_finite, fingerprint, versions, versions_to_come
from ssmscope.core.heads import Gives, gives, own_logits
from ssmscope.core.intercept import evaluating, out_of_inference
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.mixers import Visit, fast_scan, keeping, known_mixers, linearize, memory_of, mixers, stored_weights
from ssmscope.core.progress import count_tokens
from ssmscope.core.trace import Layers, LayerState, LayerTrace, Recording, Trace, check_recurrent_state, detached
from ssmscope.errors import InputError, Unanswerable

TextsLike = str | Iterable[str] | Mapping[str, Any] | Batch | Trace
"""Input of analyses: a text, several, a tokenizer's output, a batch (of ids or images too), or a trace that there is
already."""


class Run(NamedTuple):
    """Logits at every position, (batch, length, vocabulary) (a classifier's, or those at each text's last position:
    (batch, classes)), and the states from which `Model.run` continues: of the mixers, then of softmax attention."""

    logits: Tensor
    states: tuple[LayerState, ...]


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model and its tokenizer.

    Attributes:
        module: the transformers model. It is run in evaluation, and is in the mode that it was in afterwards.
        tokenizer: its tokenizer, or None.
        name: how the user called it.

    Raises:
        InputError: for a model without a layer that can be read, and for weights that are not in memory, NaN or
            infinite.
    """

    module: Any
    tokenizer: Any = None
    name: str = "model"

    def __post_init__(self) -> None:
        if not mixers(self.module):
            raise InputError(
                f"{self.name}: {type(self.module).__name__} has no state-space layer that can be read "
                f"({known_mixers()})"
            )
        check_finite(self.module, self.name)

    def __repr__(self) -> str:
        labels = self.labels
        names = ", ".join(map(str, labels[:4])) + ", …" * (len(labels) > 4) if labels is not None else ""
        what = f"classifier ({names})" if labels is not None else "language model"
        weights = list(self.module.parameters())
        return (
            f"Model {self.name}: {self.architecture} {what}, {self.num_layers} state-space layers, "
            f"{sum(each.numel() for each in weights):,} parameters, {str(weights[0].dtype).removeprefix('torch.')} on "
            f"{self.device}" + ("" if self.tokenizer is not None or self.channels is not None else ", no tokenizer")
        )

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
        """True if a text has one vector of logits, of `labels`, instead of one at every position."""
        return self.gives not in ("next tokens", "nothing")

    @property
    def gives(self) -> Gives:
        """The kind of its logits."""
        return gives(self.module)

    def check_classes(self, what: str) -> None:
        """Refuse, as an InputError, what needs one class for each text of a classifier that gives something else, and
        of a model without a head."""
        self._check_head()
        if self.gives in ("labels", "numbers"):
            each = "labels of which several may be right" if self.gives == "labels" else "numbers, as a regression does"
            raise Unanswerable(
                f"{self.name} gives {each}, and {what} needs one class for each text; ask what they rest on instead, "
                "with explain"
            )

    def _check_head(self) -> None:
        if self.gives == "nothing":
            raise Unanswerable(
                f"{self.name} has no head, and so no answer: its layers can be read (trace, heatmap, attention, "
                "stability); for what is about an answer, give a model with a head"
            )

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities of next tokens, classes or labels, from logits whose last dimension is these.

        Raises:
            InputError: for a model that gives numbers.
        """
        if self.gives == "numbers":
            raise Unanswerable(
                f"{self.name} gives numbers, as a regression does, and no probabilities; ask what they rest "
                "on instead, with explain"
            )
        return logits.sigmoid() if self.gives == "labels" else logits.softmax(-1)

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
        """A classifier's classes, or what else it `gives`, in the order of its logits; None for a language model."""
        return [self.config.id2label[i] for i in range(self.config.num_labels)] if self.is_classifier else None

    @property
    def mixers(self) -> list[nn.Module]:
        return mixers(self.module)

    @property
    def num_layers(self) -> int:
        """The number of state-space layers."""
        return len(self.mixers)

    def check_recurrent_state(self, what: str) -> None:
        """Refuse, as an InputError, a question about the memory of a model whose layers keep none."""
        check_recurrent_state(memory_of(self.module)["has_recurrent_state"], self.name, what)

    def check_tokenizer(self, what: str = "texts") -> None:
        """Refuse, as an InputError, to read what needs a tokenizer without one."""
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer to read {what} with; give one, load(tokenizer=…)")

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """What the state-space layers are called: their numbers in the model's list of layers, in which a hybrid has
        others too; 0, 1, … where several stand in one of these, or in several lists."""
        names = {id(part): name for name, part in self.module.named_modules()}
        within = [[int(part) for part in names[id(mixer)].split(".") if part.isdigit()] for mixer in self.mixers]
        numbers = tuple(each[0] for each in within if each)
        return numbers if len(set(numbers)) == len(within) else tuple(range(len(within)))

    @property
    def width(self) -> int:
        """Of the embeddings of its tokens."""
        return self.module.get_input_embeddings().weight.shape[1]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over the configuration, every weight and the settings of adapters.

        Raises:
            InputError: for weights that are not in memory, NaN or infinite.
        """
        return self._fingerprint(self._versions())

    def _fingerprint(self, found: dict[str, int]) -> str:
        """That of weights whose versions are `found`."""
        hashed = self.__dict__.get("_hashed")
        if hashed is None or hashed[0] != found:
            check_finite(self.module, self.name)
            weights = stored_weights(self.module)
            hashed = self.__dict__["_hashed"] = found, fingerprint(self.config, weights, adapters(self.module))
        return hashed[1]

    def _versions(self) -> dict[str, int]:
        return versions(stored_weights(self.module), adapters(self.module))

    @property
    def source(self) -> dict[str, Any]:
        """Where a result comes from: model, architecture, fingerprint, dtype, device; and the edits of its runs, within
        `edited`."""
        return self._source(self.fingerprint)

    def _source(self, fingerprint: str) -> dict[str, Any]:
        edits = [edit.describe() for edit in edits_of(self.module)]
        return {
            "model": self.name,
            "architecture": self.architecture,
            "fingerprint": fingerprint,
            "dtype": str(next(self.module.parameters()).dtype).removeprefix("torch."),
            "device": self.device.type,
            **({"edits": edits} if edits else {}),
        }

    @out_of_inference()
    def encode(
        self,
        texts: str | Iterable[str] | Mapping[str, Any] | None = None,
        *,
        ids: Sequence[int] | Sequence[Sequence[int]] | Tensor | np.ndarray | None = None,
        values: Tensor | np.ndarray | None = None,
        max_tokens: int | None = None,
    ) -> Batch:
        """Texts, or token ids for a model without a tokenizer, as one batch padded on the right.

        A tokenizer's output, and token ids in place of texts, are taken for what they are. A pixel classifier reads
        `values` (n, length, channels) or (length, channels) instead: uint8, which is divided by 255, or floats in
        [0, 1]. The lengths of its batch count the class token.

        Raises:
            InputError: for an empty text, control characters, a text of unknown tokens only, an id outside the
                vocabulary, more than `max_tokens` tokens, texts for a model without a tokenizer, pixels of another
                shape or dtype, texts or ids for a pixel model, pixels for a model of tokens, or anything else.
        """
        if self.channels is not None:
            if values is None and ids is None and isinstance(texts, Tensor | np.ndarray):
                texts, values = None, texts
            if values is None or texts is not None or ids is not None:
                what = f"{self.name} reads pixels ({self._image}), not texts"
                raise InputError(f"{what}: give it images, model.encode(values=…)")
            form = {"dtype": next(self.module.parameters()).dtype, "shape": self.config.image_size}
            form["patch"] = self.config.patch
            return encode_values(values, self.channels, **form, max_tokens=max_tokens).to(self.device)
        if values is not None:
            raise InputError(f"{self.name} reads tokens, not pixels: give texts or token ids")
        if (texts is None) == (ids is None):
            raise InputError("give either texts or token ids")
        given = texts if ids is None else ids
        words, rows = (None, []) if isinstance(ids, list) and not ids else texts_or_ids(given)
        if ids is not None and rows is None:
            raise InputError("texts were given as ids; ids are whole numbers, e.g. [5, 17, 3]")
        if words is None and ids is None and self.tokenizer is not None:
            words = spelled_out(rows or [], self.tokenizer, self.vocabulary)
        if words is None:
            return encode_ids(rows or [], self.vocabulary, self.tokenizer, max_tokens).to(self.device)
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer: give token ids, model.encode(ids=…), or a tokenizer")
        return encode_texts(words, self.tokenizer, self.vocabulary, max_tokens).to(self.device)

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model has embeddings for."""
        return self.module.get_input_embeddings().weight.shape[0]

    def logits(self, batch: Batch) -> Tensor:
        """A classifier's logits (batch, classes), or a language model's at every position, without gradients."""
        with torch.no_grad(), self.running(mask=batch.mask):
            return self.forward(batch)

    @contextmanager
    def running(
        self,
        *,
        mask: Tensor | None = None,
        states: Sequence[LayerState] | None = None,
        retention: bool = False,
        visit: Visit | None = None,
        keep: list[LayerState] | None = None,
    ) -> Iterator[None]:
        """`fast_scan` of the module in evaluation; on leaving its parts are in the modes that they were in before, and
        `keep` has the states after the run: of every state-space layer, then of every layer of softmax attention.

        Raises:
            InputError: as `fast_scan`, and for states of a model in which something looks back that keeps none.
        """
        if states is not None and not self.continues:
            raise InputError(
                f"{self.name} cannot continue from its states: something looks back that keeps none, or attention is "
                f"neither {' nor '.join(IMPLEMENTATIONS)}; run the whole text"
            )
        attended: list[LayerState] | None = None if keep is None else []
        visit = visit if keep is None else keeping(self.module, keep, visit)
        with (
            evaluating(self.module),
            fast_scan(self.module, mask=mask, states=states, retention=retention, visit=visit),
            attending(self.module, mask=mask, states=states and states[self.num_layers :], keep=attended),
        ):
            yield
        if keep is not None and attended:
            keep += attended

    def run(
        self,
        batch: Batch,
        states: Sequence[LayerState] | None = None,
        *,
        last_only: bool = False,
        edits: Edit | Sequence[Edit] = (),
    ) -> Run:
        """Logits and the state after the batch; from `states`, a continuation of the run that gave them.

        A text cut in two, the second part run from the first's states, gives the logits of the whole text. In a padded
        batch every row continues from its own last real position. With `last_only` a language model's logits are
        those at each text's last position. `edits` change what its layers compute, see `ssmscope.core.edits`.

        Raises:
            InputError: as `running` and `edited`.
        """
        after: list[LayerState] = []
        with ExitStack() as around:
            if edits:
                around.enter_context(edited(self, edits))
            around.enter_context(self.running(mask=batch.mask, states=states, keep=after))
            around.enter_context(torch.no_grad())
            logits = self.forward(batch, last_only=last_only)
        return Run(logits, tuple(after))

    @property
    def continues(self) -> bool:
        """Whether a run can go on from states: whether nothing looks back that keeps none. Found by the names of the
        model's parts and, once, by a short text run in two pieces, unedited."""
        if "_continues" not in self.__dict__:
            kept, pixels = keeps_caches(self.module), self.channels is not None
            self.__dict__["_continues"] = kept and (pixels or Context().run(self._runs_in_two))
        return self.__dict__["_continues"]

    def _runs_in_two(self) -> bool:
        ids = [(5 * place + place // 7) % self.vocabulary for place in range(24)]
        whole, first, second = (self.encode(ids=part) for part in (ids, ids[:14], ids[14:]))
        self.__dict__["_continues"] = True  # for the run that finds it out
        try:
            expected = self.run(whole, last_only=True).logits.double()
            found = self.run(second, self.run(first).states, last_only=True).logits.double()
        finally:
            del self.__dict__["_continues"]
        allowed = max(1e-3, 16 * torch.finfo(next(self.module.parameters()).dtype).eps)
        spread = (expected - expected.mean()).abs().max() if expected.numel() > 1 else expected.abs().max()
        return bool((found - expected).abs().max() <= allowed * spread)

    @out_of_inference()
    def trace(
        self,
        texts: str | Iterable[str] | Mapping[str, Any] | Batch | None = None,
        *,
        ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        values: Tensor | np.ndarray | None = None,
        keep_inputs: bool | Sequence[int] = True,
        retention: bool = True,
        visit: Callable[[int, Sequence[int], LayerTrace], None] | None = None,
        on_idle: Callable[[], object] = lambda: None,
    ) -> Trace:
        """Run the model and record what its layers did.

        The retention map is summed inside the scans; with `retention` off it is NaN. Every mixer's input is kept
        (`keep_inputs`), or that of the layers with these numbers, and a layer's other terms are recomputed from it when
        `trace.layers[i]` is asked for; without, the trace has no layers, and a long text costs the memory of one layer.
        `visit` is called as the model runs, with a layer's number, the rows that run together, and the layer's terms on
        them: what it takes from these need not be recomputed. `on_idle` is called while a GPU still runs.

        Within `edited` it is that of the edited run; edits of scans are in its retention and logits, not in its layers.

        Raises:
            InputError: as `encode`, for a layer that the model does not have, and for a run whose states are edited.
        """
        batch = texts if isinstance(texts, Batch) else self.encode(texts, ids=ids, values=values)
        rows, length = batch.input_ids.shape
        found = self.mixers
        wanted = range(len(found) if keep_inputs else 0) if isinstance(keep_inputs, bool) else set(keep_inputs)
        absent = sorted(set(wanted) - set(range(len(found))))
        if absent:
            raise InputError(f"there is no layer {absent[0]}; {self.name} has the layers 0 to {len(found) - 1}")
        edits = edits_of(self.module)
        if any(edit.place == "state" for edit in edits):
            raise InputError(
                "a run whose states are edited is in pieces and has no trace; edit other places, or run it"
            )
        seen = Recording(len(found), rows, length, wanted, self.device)
        answered: list[Tensor] = []
        logits: Tensor | None = None
        for chosen in map(sorted, by_length(batch.lengths)):
            part = batch.rows(chosen)
            places = torch.tensor(chosen, device=self.device)  # here: in each layer a GPU would be waited for

            def record(index: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
                seen.add(index, places, layer, scans)  # noqa: B023
                if visit is not None:
                    visit(index, chosen, layer)  # noqa: B023

            with torch.no_grad(), self.running(mask=part.mask, retention=retention, visit=record):
                answered.append(self.forward(part, last_only=True, checked=False))
            seen.close(places, part.mask)
            last = answered[-1].float()
            logits = last.new_empty(rows, last.shape[-1]) if logits is None else logits
            logits[places] = last
        assert logits is not None
        numbers, keeps = self.layer_numbers, memory_of(self.module)  # here: a GPU still runs
        coming = versions_to_come(stored_weights(self.module), adapters(self.module))
        on_idle()
        weights = coming()
        for each in answered if self.gives != "nothing" else ():
            self._checked(each)

        def recompute(index: int) -> LayerTrace:
            u = seen.inputs[index]
            if u is None:
                raise ValueError(f"this trace was taken without the input of layer {index}: see keep_inputs")
            self._check_unchanged(index, weights)
            with torch.no_grad(), evaluating(self.module):
                return detached(recompute_terms(self, edits, index, u, batch.mask))

        def freeze(index: int) -> LinearizedLayer:
            layer = recompute(index)
            with torch.no_grad(), evaluating(self.module):
                return detached(linearize(found[index], layer))

        return Trace(
            input_ids=batch.input_ids,
            mask=batch.mask,
            retention=seen.retention,
            logits=logits,
            tokens=batch.tokens,
            words=batch.words,
            spelled=batch.spelled,
            answers=self.answers_of(logits),
            source=self._source(self._fingerprint(weights)),
            layers=Layers(len(found), recompute),
            linearized=Layers(len(found), freeze),
            pixels=self.images_of(batch),
            numbers=numbers,
            **keeps,
        )

    def _check_unchanged(self, index: int, before: dict[str, int]) -> None:
        """Refuse, as an InputError, to recompute what a layer did where its weights, or those of layers that it reads,
        are not those with these versions."""
        names = {id(part): path for path, part in self.module.named_modules()}
        mixer = self.mixers[index]
        for part in (mixer, *getattr(mixer, "before", ())):
            prefix = f"{names[id(part)]}." if names[id(part)] else ""
            now = versions(
                {prefix + name: value for name, value in stored_weights(part).items()},
                {prefix + name if name else prefix[:-1]: value for name, value in adapters(part).items()},
            )
            if any(before.get(name) != version for name, version in now.items()):
                raise InputError(
                    f"the weights of layer {index} of {self.name} have changed since this trace was taken: its terms "
                    "cannot be recomputed; take a new trace"
                )

    def images_of(self, batch: Batch) -> Tensor | None:
        """The pixels of a batch, (images, height, width, channels); None where it has none, or no shape is known."""
        size = self.config.image_size if batch.values is not None else None
        if batch.values is None or size is None or size[0] * size[1] != batch.values.shape[1]:
            return None
        return as_images(batch.values, size, self.config.patch)

    def forward(self, batch: Batch, last_only: bool = False, *, checked: bool = True) -> Tensor:
        """The module's own logits in the caller's context: with gradients unless they are off, and through `ops.scan`
        within `running`. With `last_only` a language model's are those at each text's last position.

        Raises:
            InputError: for a batch of another kind, and, unless `checked` is off, for logits that are not finite.
        """
        if (batch.values is None) != (self.channels is None):
            wanted = "tokens" if self.channels is None else "pixels"
            raise InputError(f"{self.name} reads {wanted}: give it a batch of its own encode()")
        if batch.values is not None:
            count_tokens(batch.mask.numel())
            logits = self.module(input_values=batch.values, attention_mask=batch.mask.long()).logits
        else:
            given = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
            logits = own_logits(self.module, given, batch.last if last_only else None).to(self.device)
        return self._checked(logits) if checked else logits

    def embed(self, batch: Batch) -> Tensor:
        """The embeddings of a batch's tokens, (batch, length, width); of a pixel classifier with the class token's."""
        if batch.values is not None:
            return self.module.embed_values(batch.values)
        return self.module.get_input_embeddings()(batch.input_ids)

    def forward_embeddings(self, embeddings: Tensor, mask: Tensor, last_only: bool = True) -> Tensor:
        """As `forward`, from embeddings (batch, length, width) padded on the right, whose real positions `mask` has."""
        arguments = {"inputs_embeds": embeddings, "attention_mask": mask.long()}
        count_tokens(mask.numel())
        return self._checked(
            own_logits(self.module, arguments, last_positions(mask) if last_only else None).to(self.device)
        )

    def _checked(self, logits: Tensor) -> Tensor:
        """The logits, or an InputError where there are none, or one is NaN or infinite."""
        self._check_head()
        found = logits.detach()
        if not found.numel():
            return logits
        low, high = torch.aminmax(found)
        try:
            finite = bool(low.isfinite() & high.isfinite())
        except RuntimeError:  # under torch.func.vmap there is no single answer
            return logits
        if not finite:
            raise InputError(
                f"the logits of {self.name} are not finite: it is damaged, or overflows on this input"
                + (" in float16; try float32, load(dtype=…)" if logits.dtype == torch.float16 else "")
            )
        return logits

    def answers_of(self, logits: Tensor) -> tuple[tuple[str, float], ...]:
        """For each row of logits (texts, classes) the class, label or next token of the highest, by name, and its
        probability; of a model that gives numbers these, and NaN."""
        labels = self.labels
        if labels is not None and self.gives == "numbers":
            said = [", ".join(f"{name} = {each:.4g}" for name, each in zip(labels, row)) for row in logits.tolist()]
            return tuple((each, math.nan) for each in said)
        if self.gives == "nothing":
            return (("no head", math.nan),) * len(logits)
        best = self.probabilities(logits).max(-1)
        name_of = str if self.tokenizer is None else lambda i: self.tokenizer.decode([i])
        names = map(name_of if labels is None else labels.__getitem__, best.indices.tolist())
        return tuple(zip(names, best.values.tolist()))


def as_batch(model: Model | None, texts: TextsLike) -> Batch:
    """What an analysis reads as one batch: a text, several, a batch, or the texts of a trace.

    Raises:
        InputError: as `Model.encode`, for a trace of images, which does not hold them, and without a model.
    """
    if model is None:
        raise InputError(f"a {type(texts).__name__} was given without its model; give the model first")
    if isinstance(texts, Batch):
        return texts
    if not isinstance(texts, Trace):
        return model.encode(texts)
    if model.channels is not None:
        raise InputError("a trace does not hold the images that it is of; give their batch")
    return Batch(texts.input_ids, texts.mask, texts.tokens, texts.words, spelled=texts.spelled)


def as_trace(model: Model | None, texts: TextsLike, *, keep_inputs: bool | Sequence[int] = True) -> Trace:
    """What an analysis reads as a trace: a trace is itself, and needs no model; anything else is run."""
    if isinstance(texts, Trace):
        return texts
    if model is None:
        raise InputError(f"a {type(texts).__name__} was given without its model; give the model first")
    return model.trace(texts, keep_inputs=keep_inputs)
