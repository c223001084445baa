"""`Model`, which turns texts or pixels into logits, traces and states."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from ssmscope import outline
from ssmscope.core.attention_layers import IMPLEMENTATIONS, attending, check_readable, keeps_caches, runs_in_two_pieces
from ssmscope.core.edits import Edit, edited, edits_of
from ssmscope.core.encoding import Batch, as_images, encode, last_positions
from ssmscope.core.fingerprint import adapters, check_finite, fingerprint, versions
from ssmscope.core.generation import Generation, Step, Writer, writes
from ssmscope.core.heads import LogitsKind, check_class_names, gives, own_logits, role_of
from ssmscope.core.intercept import evaluating, out_of_inference
from ssmscope.core.mixers import Visit, collect_states, fast_scan, layer_numbers, memory_of, mixers, stored_weights
from ssmscope.core.ngrams import reads_ids
from ssmscope.core.progress import count_tokens
from ssmscope.core.take_trace import Look, take_trace
from ssmscope.core.trace import Earlier, LayerState, Trace, check_recurrent_state
from ssmscope.errors import InputError, Unanswerable, check_whole
from ssmscope.outline import outlined

Texts = str | Iterable[str] | Mapping[str, Any] | None
Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor | np.ndarray | None
Pixels = Tensor | np.ndarray | None


@outlined
class Run(NamedTuple):
    """Logits of a run, (batch, length, vocabulary) or (batch, vocabulary), a classifier's (batch, classes), and the
    states from which `Model.run` continues: those of the mixers, then those of softmax attention."""

    logits: Tensor
    states: tuple[LayerState, ...]


@dataclass(frozen=True, eq=False)
class Model:
    """Trained transformers model `module` and its `tokenizer`, or None, under the user's `name` for it.

    `class_names` replace those of its configuration. It runs in evaluation mode, and is in its earlier mode afterwards.
    Raises InputError if no layer can be read, a weight is not in memory, NaN or infinite, or names do not fit.
    """

    module: Any
    tokenizer: Any = None
    name: str = "model"
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_class_names(self.module, self.class_names, self.name)
        check_readable(self.module, self.name)
        check_finite(self.module, self.name)

    def __repr__(self) -> str:
        labels = self.labels
        names = ", ".join(map(str, labels[:4])) + ", …" * (len(labels) > 4) if labels is not None else ""
        what = self.role.partition(" ")[2] + (f" ({names})" if labels is not None else "")
        weights = list(self.module.parameters())
        return (
            f"Model {self.name}: {self.architecture} {what}, {self.num_layers} state-space layers, "
            f"{sum(each.numel() for each in weights):,} parameters, {str(weights[0].dtype).removeprefix('torch.')} on "
            f"{self.device}" + ("" if self.tokenizer is not None or self.channels is not None else ", no tokenizer")
        )

    def _repr_html_(self) -> str:
        layers = {f"layer {at}": type(mixer).__name__ for at, mixer in enumerate(mixers(self.module))}
        return outline.titled_tree(repr(self), layers | {"config": vars(self.config)})

    @property
    def config(self) -> Any:
        """Configuration of the transformers model."""
        return self.module.config

    @property
    def architecture(self) -> str:
        """Model type, e.g. `mamba2`; a classifier's is that of its backbone."""
        return getattr(getattr(self.config, "backbone", None), "model_type", None) or self.config.model_type

    @property
    def is_classifier(self) -> bool:
        """True if a text has one vector of logits, one for each of `labels`, instead of one at every position."""
        return self.gives not in ("next tokens", "nothing")

    @property
    def gives(self) -> LogitsKind:
        """Kind of the model's logits."""
        return gives(self.module)

    role = property(role_of)

    @property
    def position(self) -> int | None:
        """The position whose answer is asked about, of a model that gives one at each; None where that is the last."""
        found = getattr(self.module, "position", None)
        return found if found is not None and found >= 0 else None

    def at(self, position: int) -> Model:
        """Return the model whose answer is the one at this position, −1 for the last. Raises InputError for a model
        that does not give one at every position."""
        if getattr(self.module, "position", None) is None:
            raise InputError(f"{self.name} gives one answer, not one at every position that at=… could choose from")
        check_whole(-sys.maxsize, position=position)
        module = copy.copy(self.module)
        module.position = int(position)
        return replace(self, module=module)

    def check_classes(self, what: str) -> None:
        """Raise InputError if the model does not give each text one class, which `what` needs."""
        self._check_head()
        if self.gives in ("labels", "numbers"):
            each = "labels of which several may be right" if self.gives == "labels" else "numbers, as a regression does"
            each = f"{each}, and {what} needs one class for each text"
            raise Unanswerable(f"{self.name} gives {each}; ask what they rest on instead, with explain")

    def _check_head(self) -> None:
        if self.gives == "nothing":
            said = f"{self.name} has no head and gives no answer: its layers can be read (trace, heatmap, attention,"
            raise Unanswerable(f"{said} stability), but questions about an answer need a model with a head")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of logits, over their last dimension. Raises InputError for a model of numbers."""
        if self.gives == "numbers":
            what = "gives numbers, as a regression does, and no probabilities"
            raise Unanswerable(f"{self.name} {what}; ask what they rest on instead, with explain")
        return logits.sigmoid() if self.gives == "labels" else logits.softmax(-1)

    @property
    def channels(self) -> int | None:
        """Channels of a pixel, or of a step of a series, for a model that reads these; None for a model of tokens."""
        read = self.is_classifier or getattr(self.config, "series", False)
        return getattr(self.config, "channels", None) if read else None

    @property
    def reads(self) -> str:
        """Kind of the model's input: "tokens", "pixels", or "series", numbers (length, channels) at steps."""
        return "series" if getattr(self.config, "series", False) else "tokens" if self.channels is None else "pixels"

    @property
    def unit(self) -> str:
        """Name of what a position holds: "tokens", "pixels" or "steps"."""
        return "steps" if self.reads == "series" else self.reads

    @property
    def embeds(self) -> bool:
        """False where the numbers of the input themselves stand in for embeddings."""
        return self.module.get_input_embeddings() is not None

    @property
    def labels(self) -> list[str] | None:
        """Names of a classifier's outputs in the order of its logits; None for a language model."""
        own = self.config.id2label if self.class_names is None else self.class_names
        return [own[i] for i in range(self.config.num_labels)] if self.is_classifier else None

    @property
    def mixers(self) -> list[nn.Module]:
        """State-space mixers, first layer first."""
        return mixers(self.module)

    @property
    def num_layers(self) -> int:
        """Number of state-space layers."""
        return len(self.mixers)

    def check_recurrent_state(self, what: str) -> None:
        """Raise InputError if `what` asks about a memory that the model's layers do not keep."""
        check_recurrent_state(memory_of(self.module)["has_recurrent_state"], self.name, what)

    def check_tokenizer(self, what: str = "texts") -> None:
        """Raise InputError if there is no tokenizer to read `what` with."""
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer to read {what} with; give one, load(tokenizer=…)")

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the state-space layers in the model's list of layers, see `ssmscope.core.mixers.layer_numbers`."""
        return layer_numbers(self.module)

    @property
    def width(self) -> int:
        """Width of the token embeddings; of a model of series that of its layers."""
        table = self.module.get_input_embeddings()
        return self.config.hidden_size if table is None else table.weight.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the first weight."""
        return next(self.module.parameters()).device

    @property
    def fingerprint(self) -> str:
        """Hash over configuration, weights and PEFT adapters; InputError if weights are not finite or not in memory."""
        return self.source_of()["fingerprint"]

    @property
    def source(self) -> dict[str, Any]:
        """Provenance of a result: model, architecture, fingerprint, dtype, device and the edits of its runs."""
        return self.source_of()

    def source_of(self, found: dict[str, int] | None = None) -> dict[str, Any]:
        """Return `source`, computing the weights' versions unless `found` has them."""
        edits, weights = [edit.describe() for edit in edits_of(self.module)], stored_weights(self.module)
        found = versions(weights, adapters(self.module)) if found is None else found
        hashed = self.__dict__.get("_hashed")
        if hashed is None or hashed[0] != found:
            check_finite(self.module, self.name)
            hashed = self.__dict__["_hashed"] = found, fingerprint(self.config, weights, adapters(self.module))
        return {
            "model": self.name,
            "architecture": self.architecture,
            "fingerprint": hashed[1],
            "dtype": str(next(self.module.parameters()).dtype).removeprefix("torch."),
            "device": self.device.type,
            **({} if (at := getattr(self.module, "position", None)) is None else {"position": at}),
            **({"edits": edits} if edits else {}) | ({"labels": list(self.class_names)} if self.class_names else {}),
            **({"reads": "series"} if self.reads == "series" else {}),
        }

    @out_of_inference()
    def encode(
        self, texts: Texts | Batch = None, *, ids: Ids = None, values: Pixels = None, max_tokens: int | None = None
    ) -> Batch:
        """Encode texts, or token ids for a model without a tokenizer, as one batch padded on the right. A batch is
        moved to the model's device.

        `texts` may also be a tokenizer's output, token ids, or chats, lists of {"role": …, "content": …} that the
        tokenizer's template spells out. A pixel classifier reads `values` (n, length, channels) or (length, channels):
        uint8, divided by 255, or floats in [0, 1]. Raises InputError if a text is empty, has control characters or only
        unknown tokens, an id is unknown, `max_tokens` is exceeded, or the input is of another kind, shape or dtype.
        """
        return encode(self, texts, ids, values, max_tokens)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model has embeddings for; 0 of a model of series."""
        table = self.module.get_input_embeddings()
        return 0 if table is None else table.weight.shape[0]

    def logits(self, batch: Batch) -> Tensor:
        """Return a classifier's logits (batch, classes), or a language model's at every position, without gradients."""
        batch = batch.to(self.device)
        with torch.no_grad(), self.running(mask=batch.mask):
            return self.forward(batch)

    @contextmanager
    def running(
        self,
        *,
        mask: Tensor | None = None,
        states: Earlier = None,
        retention: bool = False,
        visit: Visit | None = None,
        keep: list[LayerState] | None = None,
    ) -> Iterator[None]:
        """Run the module in evaluation mode through `fast_scan` within the context. On leaving, `keep` has the states
        after the run: those of the state-space layers, then those of softmax attention. Raises InputError as
        `fast_scan`, and if `states` are given to a model that cannot continue from states."""
        if keep is None and any(edit.after == -1 for edit in edits_of(self.module)):
            raise InputError("a state at the end of a run is edited, which this run does not keep; use run or generate")
        if states is not None and not self.continues:
            said = f"{self.name} cannot continue from its states: a part that reads earlier tokens keeps no state, or"
            raise InputError(f"{said} attention is neither {' nor '.join(IMPLEMENTATIONS)}; run the whole text")
        attended: list[LayerState] | None = None if keep is None else []
        visit = visit if keep is None else collect_states(self.module, keep, visit)
        fast = fast_scan(self.module, mask=mask, states=states, retention=retention, visit=visit)
        with evaluating(self.module), fast:  # Which checks the states.
            with attending(self.module, mask=mask, states=states and states[self.num_layers :], keep=attended):
                yield
        if keep is not None and attended:
            keep += attended

    def run(
        self, batch: Batch, states: Earlier = None, *, last_only: bool = False, edits: Edit | Sequence[Edit] = ()
    ) -> Run:
        """Return logits and the states after the batch; with `states`, continue the run that gave them.

        A text cut in two, its second part run from the states of the first, gives the logits of the whole text. In a
        padded batch every row continues from its own last real position. With `last_only` a language model's logits are
        those at each text's last position. `edits` change what the layers compute, see `ssmscope.core.edits`. Raises
        InputError as `running` and `edited`.
        """
        after: list[LayerState] = []
        batch = batch.to(self.device)
        changed = edited(self, edits) if edits else nullcontext()
        with changed, self.running(mask=batch.mask, states=states, keep=after), torch.no_grad():
            logits = self.forward(batch, last_only=last_only)
        return Run(logits, tuple(after))

    @writes
    @out_of_inference()
    def generate(
        self,
        texts: Texts | Batch = None,
        *,
        ids: Ids = None,
        batch_size: int | None = None,
        states: Earlier = None,
        **how: Any,
    ) -> Generation:
        """Continue texts: the model reads each once, and then one written token at a time from its states.

        A text's tokens do not depend on the texts beside it, and are chosen from its own last real position. It ends
        with an end token of the model's generation settings or tokenizer, a stop string, or after `max_new_tokens`.

        - `max_new_tokens`: number of tokens at which a text ends
        - `edits`: changes of the prompt's run and, with `while_writing`, of those that read written tokens, see
          `ssmscope.core.lasting_edits`; "state" edits after −1 change each run's end; those of `edited` act in all
        - `temperature`: 0 for the likeliest token; else one is drawn from softmax(logits / temperature), with `top_k`
          and `top_p` from so many, and of that probability, of the likeliest tokens
        - `seed`: random seed; with the same one, a prompt is continued in the same way, its copies in others
        - `stop`: strings that end a text, or a function from its written ids to True if they do
        - `keep_states`: keep the states before each text's last token is read
        - `compile`: compile the layers' step, where torch can and nothing edits it; by default from 4,096 tokens on

        Args:
            batch_size: texts written together, 32 by default; all with edits, which may have values for every text.
            states: continue the run that gave these states, a row for each text, as `run` does.

        Raises InputError as `encode` and `edited`, for options that do not fit, and for a model that cannot write.
        """
        return Writer(self, **how).generate(self.encode(texts, ids=ids), batch_size, states)

    @writes
    @out_of_inference()
    def generate_stream(
        self, texts: Texts | Batch = None, *, ids: Ids = None, states: Earlier = None, **how: Any
    ) -> Iterator[Step]:
        """Return an iterator over the steps of `generate` for all texts together; arguments and errors are shared."""
        return Writer(self, **how).stream(self.encode(texts, ids=ids), states=states)

    @property
    def continues(self) -> bool:
        """True if runs can continue from states: every part that reads earlier tokens keeps a state. Decided by the
        names of the model's parts and, once, by a short text run in two pieces, unedited."""
        if "_continues" not in self.__dict__:
            cut = getattr(self.config, "steps", None) is None and (self.embeds or self.config.patch is None)
            kept = cut and keeps_caches(self.module)
            pixels = self.channels is not None and self.embeds
            self.__dict__["_continues"] = kept and (pixels or Context().run(runs_in_two_pieces, self))
        return self.__dict__["_continues"]

    @out_of_inference()
    def trace(
        self,
        texts: Texts | Batch = None,
        *,
        ids: Ids = None,
        values: Pixels = None,
        keep_inputs: bool | Sequence[int] = True,
        retention: bool = True,
        visit: Look | None = None,
    ) -> Trace:
        """Run the model and record what its layers compute.

        Within `edited` it is the edited run; edits of scans are in its retention and logits, not in its layers.

        Args:
            keep_inputs: keep every mixer's input, or that of the layers with these numbers; `trace.layers[i]` is
                recomputed from it. Without, the trace has no layers, and a long text costs the memory of one layer.
            retention: sum the retention map inside the scans; else it is NaN.
            visit: called with each layer as the model runs.

        Raises InputError as `encode`, if there is no such layer, and if the run's states are edited.
        """
        return take_trace(self, self.encode(texts, ids=ids, values=values), keep_inputs, retention, visit)

    def images_of(self, batch: Batch) -> Tensor | None:
        """Return a batch's pixels, (images, height, width, channels); None without pixels or a known image size."""
        size = self.config.image_size if batch.values is not None else None
        if batch.values is None or size is None or size[0] * size[1] != batch.values.shape[1]:
            return None
        return as_images(batch.values, size, self.config.patch)

    def forward(self, batch: Batch, last_only: bool = False, *, checked: bool = True) -> Tensor:
        """Return the module's own logits in the caller's context: with gradients unless they are off, and through
        `ops.scan` within `running`. With `last_only` a language model's are those at each text's last position. Raises
        InputError for a batch of another kind, and, unless `checked` is off, for logits that are not finite."""
        if (batch.values is None) != (self.channels is None):
            raise InputError(f"{self.name} reads {self.reads}: give it a batch of its own encode()")
        if batch.values is not None:
            count_tokens(batch.mask.numel())
            logits = self.module(input_values=batch.values, attention_mask=batch.mask.long()).logits
        else:
            given = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
            logits = own_logits(self.module, given, batch.last if last_only else None).to(self.device)
        return self.checked(logits) if checked else logits

    def embed(self, batch: Batch) -> Tensor:
        """Return the embeddings of a batch's tokens, (batch, length, width), the class token's too."""
        if batch.values is not None:
            return self.module.embed_values(batch.values)
        return self.module.get_input_embeddings()(batch.input_ids)

    def forward_embeddings(self, embeddings: Tensor, mask: Tensor, last_only: bool = True) -> Tensor:
        """Return the logits of embeddings (batch, length, width) padded on the right; `mask` is true at real ones.
        Raises InputError for a model whose layers read the tokens' ids too."""
        if reads_ids(self.module):
            said = f"{self.name} reads its tokens' ids besides their embeddings: explanations by embeddings"
            raise Unanswerable(f"{said} would leave these out; ask by interventions, such as knockout")
        arguments = {"inputs_embeds": embeddings, "attention_mask": mask.long()}
        count_tokens(mask.numel())
        logits = own_logits(self.module, arguments, last_positions(mask) if last_only else None)
        return self.checked(logits.to(self.device))

    def checked(self, logits: Tensor) -> Tensor:
        """Return the logits, or raise InputError if there are none or one is NaN or infinite."""
        self._check_head()
        found = logits.detach()
        if not found.numel():
            return logits
        low, high = torch.aminmax(found)
        try:
            finite = bool(low.isfinite() & high.isfinite())
        except RuntimeError:  # There is no single answer under torch.func.vmap.
            return logits
        if not finite:
            half = " in float16; try float32, load(dtype=…)" if logits.dtype == torch.float16 else ""
            raise InputError(
                f"the logits of {self.name} are not finite: it is damaged, or overflows on this input{half}"
            )
        return logits

    def answers_of(self, logits: Tensor) -> tuple[tuple[str, float], ...]:
        """Return the most probable class, label or next token, by name, and its probability for each row of logits
        (texts, classes). For a model that gives numbers, these and NaN."""
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
