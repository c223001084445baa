"""Modules of one's own around layers that can be read, without a transformers model in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from ssmscope.core.adapted import Adapted
from ssmscope.core.heads import LogitsKind
from ssmscope.core.intercept import active_override, evaluating, observe, override_forward
from ssmscope.core.mixers import adapter_for, as_returned, fast_scan, mixers, positions
from ssmscope.errors import InputError, did_you_mean
from ssmscope.layers.packages import recognise
from ssmscope.loading.in_memory import TRIAL_LENGTHS, OwnModel, given_and_mask, written
from ssmscope.loading.seen_layers import FEWER_TOKENS, TRIAL_TOKENS, SeenLayers
from ssmscope.loading.stored import DAMAGE_ERRORS, reason

ANSWERS: dict[str, LogitsKind | None] = {
    "next": "next tokens",
    "class": "classes",
    "labels": "labels",
    "number": "numbers",
    "position": None,
}
"""Kinds of answers by the words for them; a class at every position is asked about at one."""
INPUTS = ("tokens", "floats")
READING = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest difference of logits where the layers are read, in units of the largest; .1 in half precision."""
Answer = str | Callable[..., Tensor]
Inputs = str | Callable[[Tensor], Any]


class Host(OwnModel):
    """Any module from token ids, numbers (batch, length, channels) or images (batch, channels, height, width) to
    logits, around layers that are read, with a transformers model's interface. The tokens of an image are the patches
    under the positions that the layers read.

    A padded batch runs whole, and then, unless logits are those of next tokens, what is not a layer runs for the rows
    of each length by themselves, with the layers' outputs as they were.

    Args:
        embedding, head: paths of the embedding that reads the ids, and of the linear layer that gives logits; by
            default they are found.
        answer: one of `ANSWERS`, by default found by the logits' shape; or a function of the module's output, or of
            that and the input, that returns the logits, (batch, classes) or (batch, length, vocabulary).
        example: ids, numbers or images that the module is tried on.
        inputs: function from these to what the module is called with: one argument, a tuple, or a dictionary by name.
        layers: path of the part whose layers are read; by default all are.
        position: the position whose logits are the answer, −1 for the last; None for logits of the whole input.

    Raises InputError if the module cannot be run on its input, a layer runs several times or on other positions, an
    adapted layer does not compute what its adapter says, or the module gives other logits where its layers are read.
    """

    ignores_padding = ("nothing", "next tokens")
    reads_ids_too = False
    """True if more than one embedding reads the ids: embeddings alone do not give the logits."""

    def __init__(
        self,
        module: nn.Module,
        embedding: str | None = None,
        head: str | None = None,
        answer: Answer | None = None,
        example: Tensor | None = None,
        position: int | None = None,
        inputs: Callable[[Tensor], Any] | None = None,
        layers: str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.module, self.path, self.gives, self.position = module, "", "nothing", position
        self._inputs, self._layers, self._patch, self._is_tried = inputs, layers, 0, True
        self.of_series = example is not None and example.is_floating_point()
        self._answer = None if isinstance(answer, str) else answer
        self._reads_ids = callable(answer) and len(inspect.signature(answer).parameters) > 1
        self.config = PretrainedConfig()
        self.config.model_type = type(module).__name__
        self.config.around = written(module)
        if self.of_series:
            assert example is not None
            self.config.channels, self.config.series = example.shape[-1], example.ndim == 3
            self.config.image_size = self.config.patch = None
            self.config.class_token = self.config.normalises = False
        named = {name: part for name, part in module.named_modules() if name}
        for what, path in {"embedding": embedding, "head": head, "layers": layers}.items():
            if path is not None and path not in named:
                said = f"{self._name} has no part {path!r}, which {what} names"
                raise InputError(f"{said}; its parts are {', '.join(named)}{did_you_mean(path, named)}")
        if head is not None and not hasattr(named[head], "out_features"):
            said = f"head={head!r} is a {type(named[head]).__name__}; give the path of the linear layer that gives the"
            raise InputError(f"{said} logits")
        self._head = head
        tables = [name for name, part in named.items() if isinstance(part, nn.Embedding)]
        if embedding is None and not tables and not self.of_series:
            said = f"{self._name} has no embedding of token ids: give its path, embedding=…, or, if it reads numbers,"
            raise InputError(f'{said} inputs="floats" and example=…')
        self._table = "" if self.of_series else tables[0] if embedding is None else embedding
        weight = next(module.parameters())
        self._example = None if example is None else example.to(weight if self.of_series else weight.device)
        with torch.no_grad(), evaluating(module):
            if example is not None and example.ndim == 4:
                self._take_images()
            self._table = self._table if self.of_series or embedding is not None else self._find_embeddings()
            if example is not None and example.ndim < 4 and not self._runs_on_any_length():
                self.config.steps = example.shape[1]
            self._check_layers()
            self.gives = self._find_what_it_gives()
            self._check_reading()
        if isinstance(answer, str):
            self._call_it(answer)
        if self.gives == "numbers" and self.config.id2label[0] == "LABEL_0":
            numbers = range(self.config.num_labels)
            self.config.id2label = {at: f"number {at}" if len(numbers) > 1 else "number" for at in numbers}
        self._example, self._is_tried = None, False

    @property
    def base_model(self) -> Any:
        return self.module

    def get_input_embeddings(self) -> Any:
        """Return the embedding that reads the token ids; None where numbers are read."""
        return None if self.of_series else super().get_input_embeddings()

    def embed_values(self, values: Tensor) -> Tensor:
        """Return the numbers of series, which stand in for embeddings."""
        return values

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        input_values: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return logits as `OwnModel` does, of series `input_values` (batch, length, channels) too. Raises InputError
        if a module that was not run on any length cannot be run on this one."""
        numbers = input_values if inputs_embeds is None else inputs_embeds
        try:
            return super().forward(input_ids, attention_mask, numbers)
        except RuntimeError as error:
            known, given = getattr(self.config, "steps", None), input_ids if numbers is None else numbers
            if known is None or given is None or given.shape[1] == known:
                raise
            said = f"{self._name} cannot be run on {given.shape[1]} positions ({reason(error)}): give inputs as long as"
            raise InputError(f"{said} its example, of {known}") from error

    def get_output_embeddings(self) -> Any:
        """Return the linear layer that gives the logits: the one of `head`, or the only one outside the layers with one
        output per logit; None if there is not exactly one."""
        if self._head is not None:
            return self.module.get_submodule(self._head)
        outputs = self.get_input_embeddings().weight.shape[0] if self.gives == "next tokens" else self.config.num_labels
        inside = {part for mixer in mixers(self) for part in mixer.modules()}
        heads = [part for part in self.module.modules() if isinstance(part, nn.Linear) and part not in inside]
        heads = [part for part in heads if part.out_features == outputs]
        return heads[0] if len(heads) == 1 else None

    def _outputs_of_parts(self, given: Tensor, mask: Tensor, arguments: tuple[Any, ...]) -> list[tuple[nn.Module, Any]]:
        found: list[tuple[nn.Module, Tensor]] = []

        def keep(mixer: nn.Module) -> Callable[..., Tensor]:
            taker = active_override(mixer)

            def run(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                found.append((mixer, below(*args, **kwargs) if taker is None else taker(below, *args, **kwargs)))
                return found[-1][1]

            return run

        with override_forward([(mixer, keep(mixer)) for mixer in mixers(self)]):
            self._run(given, mask)
        return found

    def _changed(self, part: nn.Module, output: Any, shape: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if not isinstance(adapter_for(part), Adapted):
            return super()._changed(part, output, shape, change)
        return as_returned(part, change(positions(part, output[0] if isinstance(output, tuple) else output)))

    def run_backbone(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Any:
        """Return what the head reads, as the first of a tuple. Raises InputError if it is not at every position."""
        head, seen = self.get_output_embeddings(), list[Tensor]()
        if head is None:
            raise InputError(f"which part of {self._name} gives the logits is not known: load it with head=…")
        given, mask = given_and_mask(input_ids, attention_mask, inputs_embeds)
        with observe(before=[(head, lambda part, args, kwargs: seen.append(args[0]))]):
            self._run(given, mask)
        if len(seen) != 1 or seen[0].shape[:2] != given.shape[:2]:
            raise InputError(f"the head of {self._name} does not read one vector at every position")
        return (seen[0],)

    def _call_it(self, answer: str) -> None:
        """Take the logits as what they are called. Raises InputError if their shape is not that of such."""
        wanted = ANSWERS[answer]
        if wanted is None:
            return
        if wanted == "labels" and self.gives == "classes":
            self.config.problem_type = "multi_label_classification"
        elif wanted == "numbers" and self.gives == "classes":
            self.config.problem_type = "regression"
        elif wanted != self.gives:
            said = f"{self._name} gives logits of {self.gives}, for which {answer!r} is no name"
            raise InputError(f"{said}: leave answer out, or give a function that returns others")
        self.gives = wanted

    def _logits_of(self, output: Any, given: Tensor | None = None) -> Tensor | None:
        if self._answer is None:
            logits = super()._logits_of(output, given)
        else:
            logits = self._answer(output, given) if self._reads_ids else self._answer(output)
        if self.position is None or logits is None:
            return logits
        if logits.ndim != 3:
            said = f"{self._name} gives logits {tuple(logits.shape)}, not (batch, length, classes) at every position:"
            raise InputError(f"{said} leave at=… out")
        if self._is_tried:  # At lengths that may be shorter.
            return logits[:, -1]
        if not -logits.shape[1] <= self.position < logits.shape[1]:
            raise InputError(f"there is no position {self.position} in an input of {logits.shape[1]}")
        return logits[:, self.position]

    def _refuse(self, what: str) -> None:
        said = f"{self._name} gives {what}; ssmscope explains one answer at a time: say where, at=… (−1 for the last),"
        raise InputError(f"{said} or which, answer=…, with a function of its output that returns the logits")

    def _run(self, given: Tensor, mask: Tensor) -> Any:
        if not self.of_series:
            return super()._run(given, mask)
        known = inspect.signature(self.module.forward).parameters
        if self._patch:
            high, size = self.config.image_size[0], self._patch
            given = rearrange(given, "n (y x) (a b c) -> n c (y a) (x b)", y=high, a=size, b=size)
        more = {name: mask.long() for name in ("attention_mask", "mask") if name in known and not self._patch}
        return self._call(given, **more)

    def _call(self, ids: Tensor, **arguments: Any) -> Any:
        if self._inputs is None:
            return self.module(ids, **arguments) if self.of_series else super()._call(ids, **arguments)
        called = self._inputs(ids)
        if isinstance(called, Mapping):
            return self.module(**arguments | dict(called))
        called = called if isinstance(called, tuple) else (called,)
        taken = [*inspect.signature(self.module.forward).parameters][: len(called)]
        return self.module(*called, **{name: each for name, each in arguments.items() if name not in taken})

    def _tried(self, length: int) -> tuple[Any, Tensor]:
        shown, given = self._example, torch.empty(0)
        if shown is None or (shown.shape[1] < length and not self.of_series and not hasattr(self.config, "steps")):
            table = self.get_input_embeddings().weight
            given = torch.arange(1, 2 * length + 1, device=table.device).view(2, length).remainder(len(table))
        else:
            one_length = self._patch or getattr(self.config, "steps", None)
            rows, length = torch.arange(2) % len(shown), shown.shape[1] if one_length else length
            given = shown[rows][:, torch.arange(length) % shown.shape[1]]
        return self._run_on(given), given

    def _runs_on_any_length(self) -> bool:
        """Return False for a module that cannot be run on other lengths than its example's, such as a U-Net."""
        try:
            return all(self._tried(length) for length in TRIAL_LENGTHS)
        except InputError:
            return False

    def _run_on(self, given: Tensor) -> Any:
        try:
            return self._run(given, torch.ones(given.shape[:2], dtype=torch.bool, device=given.device))
        except DAMAGE_ERRORS as error:
            why = f"{type(error).__name__} ({reason(error)})"
            kind = "images (batch, channels, height, width)" if self._patch else "numbers (batch, length, channels)"
            kind = kind if self.of_series else "token ids (batch, length)"
            raise InputError(f"{self._name} cannot be run on {kind}: {why}") from error

    @property
    def read_layers(self) -> list[nn.Module] | None:
        """The layers that are read, where they are not all: see `ssmscope.core.mixers.mixers`."""
        return None if self._layers is None else mixers(self.module.get_submodule(self._layers))

    def _take_images(self) -> None:
        """Have images read as the patches under the positions of the layers. Raises InputError if there are none."""
        images = self._example
        assert images is not None
        height, width = images.shape[2:]
        number = SeenLayers(self.module, mixers(self), lambda: self._call_on_images(images)).positions()
        size = isqrt(max(1, height * width // number))
        if height % size or width % size or height * width != number * size**2:
            said = f"the layers of {self._name} read {number} positions of an image of {height} × {width}:"
            raise InputError(f"{said} these are no square patches")
        self._patch = size
        self.config.image_size, self.config.patch = (height // size, width // size), (size, size)
        self.config.channels = images.shape[1] * size**2
        self._example = rearrange(images, "n c (y a) (x b) -> n (y x) (a b c)", a=size, b=size)

    def _call_on_images(self, images: Tensor) -> Any:
        try:
            return self._call(images)
        except DAMAGE_ERRORS as error:
            why = f"{type(error).__name__} ({reason(error)})"
            raise InputError(f"{self._name} cannot be run on images (batch, channels, height, width): {why}") from error

    def _check_layers(self) -> None:
        try:
            given = self._tried(TRIAL_TOKENS if self._example is None else self._example.shape[1])[1]
        except InputError:
            given = self._tried(FEWER_TOKENS)[1]
        other = given.clone()
        other[:, -1] = given[:, -2] + 1 if given.is_floating_point() else (given[:, -1] + 1) % self._vocabulary
        seen = SeenLayers(self.module, mixers(self), lambda: self._run_on(given))
        if self.of_series:
            self.config.hidden_size = max((u.shape[-1] for u in seen.inputs.values()), default=self.config.channels)
        if seen.find_pair():
            seen = SeenLayers(self.module, mixers(self), lambda: self._run_on(given))
        seen.check(given, lambda: self._run_on(other))

    @property
    def _vocabulary(self) -> int:
        return len(self.get_input_embeddings().weight)

    def _check_reading(self) -> None:
        """Raise InputError if the module gives other logits where its layers are read than by itself."""
        given = self._tried(FEWER_TOKENS)[1]
        mask = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
        own = self._logits(given, mask)
        try:
            with fast_scan(self):
                read = self._logits(given, mask)
        except DAMAGE_ERRORS as error:
            said = f"{self._name} cannot be run where its layers are read ({type(error).__name__}: {reason(error)}):"
            raise InputError(f"{said} what a layer gives after its output, such as a state, is None there") from error
        allowed = READING.get(own.dtype, 0.1) * own.abs().max()
        if not bool(own.isfinite().all()):
            raise InputError(f"{self._name} gives logits that are not finite on its example")
        if not self.of_series and not self._reads_ids:
            try:
                embedded = self._logits(self.get_input_embeddings()(given), mask)
                self.reads_ids_too = not bool((embedded - own).abs().max() <= allowed)
            except DAMAGE_ERRORS:
                self.reads_ids_too = True
        if not bool((read - own).abs().max() <= allowed):
            said = f"{self._name} gives other logits where its layers are read than by itself: one"
            raise InputError(f"{said} writes into its input, or keeps something from call to call")


def host(
    module: nn.Module,
    *,
    embedding: str | None = None,
    head: str | None = None,
    inputs: Inputs | None = None,
    answer: Answer | None = None,
    at: int | None = None,
    example: Any = None,
    layers: str | None = None,
) -> Host | None:
    """Return a module as `Host`; None if it has no layer that can be read. Raises InputError as `Host`, and for an
    example that does not fit the inputs."""
    for what, path in {"embedding": embedding, "head": head, "layers": layers}.items():
        if not isinstance(path, str | None):
            raise InputError(f"{what} is {path!r:.60}; give the path of one part of the module, such as 'encoder.0'")
    recognise(module)
    if not mixers(module) or mixers(module) == [module]:
        return None
    try:
        shown = None if example is None else torch.as_tensor(example)
    except (TypeError, ValueError, RuntimeError) as error:
        said = f"the example is a {type(example).__name__} that is no array ({error}); give token ids (batch, length),"
        raise InputError(f"{said} or numbers (batch, length, channels)") from error
    if shown is not None and not len(shown):
        raise InputError("the example has no row; give one at least")
    floats = inputs == "floats" or (inputs != "tokens" and shown is not None and shown.is_floating_point())
    if not (inputs is None or callable(inputs) or inputs in INPUTS):
        said = f"inputs is {inputs!r:.60}; give one of {', '.join(INPUTS)}, or a function that makes the module's own"
        raise InputError(f"{said}{did_you_mean(str(inputs), INPUTS)}")
    given = "nothing" if shown is None else f"{tuple(shown.shape)} {shown.dtype}"
    fits = shown is not None and shown.is_floating_point()
    fits = fits and (shown.ndim == 4 or (shown.ndim == 3 and shown.shape[1] > 1))  # type: ignore[union-attr]
    if floats and not fits:
        said = f"the example is {given}; for floats give numbers (batch, length, channels), two steps or more,"
        raise InputError(f"{said} or images (batch, channels, height, width)")
    if shown is not None and not floats and (shown.ndim != 2 or shown.is_floating_point() or shown.shape[1] < 2):
        raise InputError(f"the example is {given}; give token ids (batch, length), two or more")
    if answer is not None and not callable(answer) and answer not in ANSWERS:
        said = f"answer is {answer!r:.60}; give one of {', '.join(ANSWERS)}, or a function of the module's output"
        raise InputError(f"{said} that returns the logits")
    whole = isinstance(at, int) and not isinstance(at, bool)
    if at is not None and not (whole and (shown is None or -shown.shape[1] <= at < shown.shape[1])):
        raise InputError(f"at is {at!r:.60}; give the number of a position in the example, −1 for the last")
    own = inputs if callable(inputs) else None
    return Host(module, embedding, head, answer, shown, -1 if at is None and answer == "position" else at, own, layers)
