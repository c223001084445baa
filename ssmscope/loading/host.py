"""Modules of one's own around layers that can be read, without a transformers model in them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from ssmscope.core.adapted import Adapted, check_adapted
from ssmscope.core.heads import LogitsKind
from ssmscope.core.intercept import active_override, evaluating, observe, override_forward
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.errors import InputError, did_you_mean
from ssmscope.loading.in_memory import OwnModel, given_and_mask, written
from ssmscope.loading.stored import DAMAGE_ERRORS, reason

TRIAL_TOKENS = 9
ANSWERS: dict[str, LogitsKind | None] = {
    "next": "next tokens",
    "class": "classes",
    "labels": "labels",
    "number": "numbers",
    "position": None,
}
"""Kinds of answers by the words for them; a class at every position is asked about at one."""
INPUTS = ("tokens", "floats")
Answer = str | Callable[..., Tensor]


class Host(OwnModel):
    """Any module from token ids, or numbers (batch, length, channels), to logits, around layers that are read, with a
    transformers model's interface.

    A padded batch runs whole, and then, unless logits are those of next tokens, what is not a layer runs for the rows
    of each length by themselves, with the layers' outputs as they were.

    Args:
        embedding, head: paths of the embedding that reads the ids, and of the linear layer that gives logits; by
            default they are found.
        answer: one of `ANSWERS`, by default found by the logits' shape; or a function of the module's output, or of
            that and the input, that returns the logits, (batch, classes) or (batch, length, vocabulary).
        example: token ids (batch, length), or numbers (batch, length, channels), that the module is tried on.
        position: the position whose logits are the answer, −1 for the last; None for logits of the whole input.

    Raises InputError if the module cannot be run on its input, a layer runs several times, or an adapted layer does not
    compute what its adapter says.
    """

    ignores_padding = ("nothing", "next tokens")

    def __init__(
        self,
        module: nn.Module,
        embedding: str | None = None,
        head: str | None = None,
        answer: Answer | None = None,
        example: Tensor | None = None,
        position: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.module, self.path, self.gives, self.position = module, "", "nothing", position
        self.of_series = example is not None and example.is_floating_point()
        self._answer = None if isinstance(answer, str) else answer
        self._reads_ids = callable(answer) and len(inspect.signature(answer).parameters) > 1
        self.config = PretrainedConfig()
        self.config.model_type = type(module).__name__
        self.config.around = written(module)
        if self.of_series:
            assert example is not None
            self.config.channels, self.config.series = example.shape[2], True
            self.config.image_size = self.config.patch = None
            self.config.class_token = False
        named = {name: part for name, part in module.named_modules() if name}
        for what, path in {"embedding": embedding, "head": head}.items():
            if path is not None and path not in named:
                said = f"{self._name} has no part {path!r}, which {what} names"
                raise InputError(f"{said}; its parts are {', '.join(named)}{did_you_mean(path, named)}")
        self._head = head
        tables = [name for name, part in named.items() if isinstance(part, nn.Embedding)]
        if embedding is None and not tables and not self.of_series:
            said = f"{self._name} has no embedding of token ids: give its path, embedding=…, or, if it reads numbers,"
            raise InputError(f'{said} inputs="floats" and example=…')
        self._table = "" if self.of_series else tables[0] if embedding is None else embedding
        weight = next(module.parameters())
        self._example = None if example is None else example.to(weight if self.of_series else weight.device)
        with torch.no_grad(), evaluating(module):
            self._table = self._table if self.of_series or embedding is not None else self._find_embeddings()
            self._check_layers()
            self.gives = self._find_what_it_gives()
        if isinstance(answer, str):
            self._call_it(answer)
        self._example = None

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
        """Return logits as `OwnModel` does, of series `input_values` (batch, length, channels) too."""
        return super().forward(input_ids, attention_mask, input_values if inputs_embeds is None else inputs_embeds)

    def get_output_embeddings(self) -> Any:
        """Return the linear layer that gives the logits: the one of `head`, or the only one outside the layers with one
        output per logit; None if there is not exactly one."""
        if self._head is not None:
            return self.module.get_submodule(self._head)
        outputs = self.get_input_embeddings().weight.shape[0] if self.gives == "next tokens" else self.config.num_labels
        inside = {part for mixer in mixers(self.module) for part in mixer.modules()}
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

        with override_forward([(mixer, keep(mixer)) for mixer in mixers(self.module)]):
            self._run(given, mask)
        return found

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
        if self._example is not None:  # It is being tried, at lengths that may be shorter.
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
        return self.module(given, **{name: mask.long() for name in ("attention_mask", "mask") if name in known})

    def _tried(self, length: int) -> tuple[Any, Tensor]:
        shown, given = self._example, torch.empty(0)
        if shown is None or (shown.shape[1] < length and not self.of_series):
            table = self.get_input_embeddings().weight
            given = torch.arange(1, 2 * length + 1, device=table.device).view(2, length).remainder(len(table))
        else:
            rows = torch.arange(2) % len(shown)
            given = shown[rows][:, torch.arange(length) % shown.shape[1]]
        try:
            return self._run(given, torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)), given
        except DAMAGE_ERRORS as error:
            why = f"{type(error).__name__} ({reason(error)})"
            what = "numbers (batch, length, channels)" if self.of_series else "token ids (batch, length)"
            raise InputError(f"{self._name} cannot be run on {what}: {why}") from error

    def _check_layers(self) -> None:
        inputs: dict[str, Tensor] = {}
        runs: Counter[str] = Counter()
        paths = {id(part): path for path, part in self.module.named_modules()}

        def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            path = paths[id(part)]
            runs[path] += 1
            if args:
                inputs[path] = args[0]

        found = mixers(self.module)
        with observe(before=[(mixer, note) for mixer in found]):
            self._tried(TRIAL_TOKENS if self._example is None else self._example.shape[1])
        if self.of_series:
            self.config.hidden_size = max((u.shape[-1] for u in inputs.values()), default=self.config.channels)
        for mixer in found:
            path = paths[id(mixer)]
            if runs[path] != 1:
                raise InputError(f"{self._name} runs its layer {path} {runs[path]} times for a text; once can be read")
            _check_layer(mixer, path, inputs.get(path))


def _check_layer(mixer: nn.Module, path: str, u: Any) -> None:
    """Check an adapted layer on the input it had, None without one, as `check_adapted` does; others are known."""
    adapter, name = adapter_for(mixer), f"{path} ({type(mixer).__name__})"
    if not isinstance(adapter, Adapted):
        return
    if u is None or u.ndim != 3:
        said = f"{name} is not called with u (batch, length, width)"
        raise InputError(f"{said} as its first argument, as an adapted layer is")
    check_adapted(mixer, adapter, u, name)


def check_in_library_model(module: Any) -> None:
    """Check the adapted layers within a transformers model on a run of some token ids. Raises InputError as `Host`."""
    paths = {id(part): path for path, part in module.named_modules()}
    found = [mixer for mixer in mixers(module) if isinstance(adapter_for(mixer), Adapted)]
    inputs: dict[int, Tensor] = {}
    if not found:
        return

    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args:
            inputs[id(part)] = args[0]

    table = module.get_input_embeddings().weight
    ids = torch.arange(1, 2 * TRIAL_TOKENS + 1, device=table.device).view(2, -1).remainder(len(table))
    with torch.no_grad(), evaluating(module), observe(before=[(mixer, note) for mixer in found]):
        module(input_ids=ids, attention_mask=torch.ones_like(ids))
    for mixer in found:
        _check_layer(mixer, paths[id(mixer)], inputs.get(id(mixer)))


def host(
    module: nn.Module,
    *,
    embedding: str | None = None,
    head: str | None = None,
    inputs: str | None = None,
    answer: Answer | None = None,
    at: int | None = None,
    example: Any = None,
) -> Host | None:
    """Return a module as `Host`; None if it has no layer that can be read. Raises InputError as `Host`, and for an
    example that does not fit the inputs."""
    if not mixers(module) or mixers(module) == [module]:
        return None
    shown = None if example is None else torch.as_tensor(example)
    floats = inputs == "floats" or (inputs is None and shown is not None and shown.is_floating_point())
    if inputs is not None and inputs not in INPUTS:
        raise InputError(f"inputs is {inputs!r:.60}; give one of {', '.join(INPUTS)}{did_you_mean(inputs, INPUTS)}")
    if floats and (shown is None or not shown.is_floating_point() or shown.ndim != 3 or shown.shape[1] < 2):
        given = "nothing" if shown is None else f"{tuple(shown.shape)} {shown.dtype}"
        raise InputError(
            f"the example is {given}; for floats give numbers (batch, length, channels), two steps or more"
        )
    if shown is not None and not floats and (shown.ndim != 2 or shown.is_floating_point() or shown.shape[1] < 2):
        raise InputError(
            f"the example is {tuple(shown.shape)} {shown.dtype}; give token ids (batch, length), two or more"
        )
    if answer is not None and not callable(answer) and answer not in ANSWERS:
        said = f"answer is {answer!r:.60}; give one of {', '.join(ANSWERS)}, or a function of the module's output"
        raise InputError(f"{said} that returns the logits")
    whole = isinstance(at, int) and not isinstance(at, bool)
    if at is not None and not (whole and (shown is None or -shown.shape[1] <= at < shown.shape[1])):
        raise InputError(f"at is {at!r:.60}; give the number of a position in the example, −1 for the last")
    return Host(module, embedding, head, answer, shown, -1 if at is None and answer == "position" else at)
