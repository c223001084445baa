"""Modules of one's own around layers that can be read, without a transformers model in them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ssmscope.core.adapted import Adapted, check_adapted
from ssmscope.core.heads import LogitsKind
from ssmscope.core.intercept import active_override, evaluating, observe, override_forward
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.errors import InputError, did_you_mean
from ssmscope.loading.in_memory import OwnModel, given_and_mask, written
from ssmscope.loading.stored import DAMAGE_ERRORS, reason

TRIAL_TOKENS = 9
ANSWERS: dict[str, LogitsKind] = {"next": "next tokens", "class": "classes", "labels": "labels", "number": "numbers"}
"""Kinds of answers by the words for them."""
Answer = str | Callable[..., Tensor]


class Host(OwnModel):
    """Any module that maps token ids to logits, around layers that are read, with a transformers model's interface.

    A padded batch runs whole, and then, unless logits are those of next tokens, what is not a layer runs for the rows
    of each length by themselves, with the layers' outputs as they were.

    Args:
        embedding, head: paths of the embedding that reads the ids, and of the linear layer that gives logits; by
            default they are found.
        answer: one of `ANSWERS`, by default found by the logits' shape; or a function of the module's output, or of
            that and the token ids, that returns the logits, (batch, classes) or (batch, length, vocabulary).
        example: token ids (batch, length) that the module is tried on.

    Raises InputError if the module cannot be run on token ids, a layer runs several times, or an adapted layer does not
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
    ) -> None:
        nn.Module.__init__(self)
        self.module, self.path, self.gives = module, "", "nothing"
        self._answer = None if isinstance(answer, str) else answer
        self._reads_ids = callable(answer) and len(inspect.signature(answer).parameters) > 1
        self.config = PretrainedConfig()
        self.config.model_type = type(module).__name__
        self.config.around = written(module)
        named = {name: part for name, part in module.named_modules() if name}
        for what, path in {"embedding": embedding, "head": head}.items():
            if path is not None and path not in named:
                said = f"{self._name} has no part {path!r}, which {what} names"
                raise InputError(f"{said}; its parts are {', '.join(named)}{did_you_mean(path, named)}")
        self._head = head
        tables = [name for name, part in named.items() if isinstance(part, nn.Embedding)]
        if embedding is None and not tables:
            raise InputError(f"{self._name} has no embedding of token ids: give its path, embedding=…")
        self._table = tables[0] if embedding is None else embedding
        self._example = None if example is None else example.to(self.get_input_embeddings().weight.device)
        with torch.no_grad(), evaluating(module):
            self._table = self._find_embeddings() if embedding is None else embedding
            self._check_layers()
            self.gives = self._find_what_it_gives()
        if isinstance(answer, str):
            self._call_it(answer)
        self._example = None

    @property
    def base_model(self) -> Any:
        return self.module

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
        if wanted == "labels" and self.gives == "classes":
            self.config.problem_type = "multi_label_classification"
        elif wanted == "numbers" and self.gives == "classes":
            self.config.problem_type = "regression"
        elif wanted != self.gives:
            said = f"{self._name} gives logits of {self.gives}, for which {answer!r} is no name"
            raise InputError(f"{said}: leave answer out, or give a function that returns others")
        self.gives = wanted

    def _logits_of(self, output: Any, ids: Tensor | None = None) -> Tensor | None:
        if self._answer is None:
            return super()._logits_of(output, ids)
        return self._answer(output, ids) if self._reads_ids else self._answer(output)

    def _refuse(self, what: str) -> None:
        said = f"{self._name} gives {what}; ssmscope explains one answer per text: say which, answer=…, with a function"
        raise InputError(f"{said} of its output that returns the logits")

    def _tried(self, length: int) -> tuple[Any, Tensor]:
        table = self.get_input_embeddings().weight
        ids = torch.arange(1, 2 * length + 1, device=table.device).view(2, length).remainder(len(table))
        if self._example is not None and self._example.shape[1] >= length:
            ids = self._example[:2, :length].expand(2, -1)
        try:
            return self._run(ids, torch.ones_like(ids, dtype=torch.bool)), ids
        except DAMAGE_ERRORS as error:
            why = f"{type(error).__name__} ({reason(error)})"
            raise InputError(f"{self._name} cannot be run on token ids (batch, length): {why}") from error

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
        for mixer in found:
            path = paths[id(mixer)]
            if runs[path] != 1:
                raise InputError(f"{self._name} runs its layer {path} {runs[path]} times for a text; once can be read")
            reader = adapter_for(mixer)
            if isinstance(reader, Adapted):
                if path not in inputs or inputs[path].ndim != 3:
                    said = f"{path} ({type(mixer).__name__}) is not called with u (batch, length, width)"
                    raise InputError(f"{said} as its first argument, as an adapted layer is")
                check_adapted(mixer, reader, inputs[path], f"{path} ({type(mixer).__name__})")


def host(
    module: nn.Module,
    *,
    embedding: str | None = None,
    head: str | None = None,
    answer: Answer | None = None,
    example: Any = None,
) -> Host | None:
    """Return a module as `Host`; None if it has no layer that can be read. Raises InputError as `Host`, and for an
    example that is no token ids."""
    if not mixers(module) or mixers(module) == [module]:
        return None
    ids = None if example is None else torch.as_tensor(example)
    if ids is not None and (ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < 2):
        raise InputError(f"the example is {tuple(ids.shape)} {ids.dtype}; give token ids (batch, length), two or more")
    if answer is not None and not callable(answer) and answer not in ANSWERS:
        said = f"answer is {answer!r:.60}; give one of {', '.join(ANSWERS)}, or a function of the module's output"
        raise InputError(f"{said} that returns the logits")
    return Host(module, embedding, head, answer, ids)
