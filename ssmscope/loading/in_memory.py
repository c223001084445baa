"""Loading of models in memory: unwrapped, copied to another dtype or device, or a user's module around a backbone."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutput
from ssmscope.core.heads import LogitsKind, given_by, is_sequence_classifier
from ssmscope.core.intercept import active_override, evaluating, observe, override_forward
from ssmscope.core.mixers import arguments, is_bidirectional, mixers
from ssmscope.errors import InputError, did_you_mean
from ssmscope.loading.fla_checkpoints import of_fla
from ssmscope.loading.mamba_checkpoints import of_mamba_ssm
from ssmscope.loading.multimodal import language_model_of
from ssmscope.loading.quantised import dequantised
from ssmscope.loading.stored import DAMAGE_ERRORS, reason


def readable(module: nn.Module, backbone: str | None = None) -> Any:
    """Return the model that can be read in a module.

    That is a transformers model, within `torch.compile`'s, DataParallel's or peft's wrapper too; transformers' form of
    a model of mamba_ssm's, or the language model of a multimodal one, with the same parameters; ours of one of
    rwkv7-hf's, with a copy of its weights; or an `OwnModel` around any other module with a backbone and around a
    backbone without a head. PEFT adapters that are not merged stay part of its layers. Raises InputError if there is no
    such model, its weights are not in memory, or its wrapper changes what it computes; and as `language_model_of`,
    `of_fla` and `own_model`.
    """
    given, module = type(module).__name__, unwrapped(module)
    name = type(module).__name__
    if _is_mamba_ssm(module):
        module = of_mamba_ssm(module)
    module = dequantised(module)
    absent = next((n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta), None)
    if absent is not None:
        where = f"{absent} is on the meta device"
        raise InputError(f"the weights of {name} are not in memory ({where}): load the model without offloading")
    if backbone is None and isinstance(module, PreTrainedModel):
        ours = None if mixers(module) else of_fla(module)
        if ours is not None:
            return ours
        module = language_model_of(module)
        known = module.get_output_embeddings() is not None
        if is_sequence_classifier(module):
            known = type(module).forward.__module__.startswith(("transformers.", "ssmscope."))
        if known:
            return module
    own = own_model(module, backbone)
    if own is None and isinstance(module, PreTrainedModel):
        return module  # `Model` reports that it has no layer that can be read.
    if own is None and mixers(module) not in ([], [module]):
        what = f"the state-space layers of {name} are not all in one transformers model"
        raise InputError(f"{what}: give a part of it, or a module around one backbone")
    if own is None:
        within = f" within the {given} that was given" if name != given else ""
        said = f"{name}{within} is not a transformers model and contains none that can be read; give one, such as"
        said = f"{said} MambaForCausalLM, mamba_ssm's MambaLMHeadModel, or a module around such a model"
        raise InputError(f"{said}; layers of your own are read once ssmscope.adapt says what they compute")
    return own


def of_library(module: nn.Module) -> bool:
    """Return True if a module holds a transformers model, or is a model of mamba_ssm's."""
    return _is_mamba_ssm(module) or any(isinstance(part, PreTrainedModel) for part in module.modules())


def _is_mamba_ssm(module: nn.Module) -> bool:
    return type(module).__name__ == "MambaLMHeadModel" and type(module).__module__.startswith("mamba_ssm.")


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module in wrappers. Raises InputError if a PeftModel changes the input, as prompt tuning does."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: Any) -> nn.Module | None:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return module.module
    # Neither library is imported for this: if it is not yet, the module cannot be one of its wrappers.
    dynamo, peft = sys.modules.get("torch._dynamo"), sys.modules.get("peft")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return module._orig_mod
    if peft is None or not isinstance(module, peft.PeftModel | peft.PeftMixedModel):
        return None
    for config in module.peft_config.values():
        if (
            config.is_prompt_learning
            or config.peft_type in (peft.PeftType.XLORA, peft.PeftType.POLY)
            or getattr(config, "alora_invocation_tokens", None)
        ):
            kind = config.peft_type.value
            raise InputError(f"a PeftModel of {kind} changes the model's input, not only its layers: it cannot be read")
    return module.base_model.model


def converted(module: nn.Module, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Return the module, or a copy in this dtype and device that allows gradients. Raises InputError if copying
    fails."""
    if all(
        (dtype is None or not t.is_floating_point() or t.dtype == dtype)
        and _same(t.device, device)
        and not t.is_inference()
        for t in module.parameters()
    ):
        return module
    try:
        return cast(copy.deepcopy(module), dtype, device)
    except DAMAGE_ERRORS as error:
        what = f"{type(module).__name__} cannot be copied to {dtype or device} ({reason(error)})"
        raise InputError(f"{what}: convert it first, and give neither dtype nor device") from error


def cast(module: nn.Module, dtype: torch.dtype | None, device: torch.device | None) -> nn.Module:
    """Convert a module's weights in place to this dtype and device, and return it."""
    module.to(device=device, dtype=dtype)
    for part in module.modules() if dtype == torch.float64 else ():
        if hasattr(part, "set_experts_implementation"):
            with contextlib.suppress(ValueError):  # The model has no experts.
                part.set_experts_implementation("eager")  # transformers 5 has no grouped products in float64.
    return module


def _same(present: torch.device, wanted: torch.device | None) -> bool:
    if wanted is None:
        return True
    return present.type == wanted.type and (wanted.index is None or present.index == wanted.index)


TRIAL_LENGTHS = (7, 5)
"""Lengths in tokens of two texts that a module is tried on, to tell the axes of its output apart."""


class OwnModel(nn.Module):
    """A user's module with the interface of transformers' models. Its own forward pass gives the logits.

    Its head may treat padding in any way. For a padded batch the backbone, at `path` in the module, runs once, and the
    rest runs on the backbone's output for the rows of each length separately, without their padding. Raises InputError
    if the module cannot be run on token ids, or gives neither logits of a text nor of next tokens.
    """

    ignores_padding: tuple[LogitsKind, ...] = ("nothing",)
    """Kinds of logits for which the whole module runs on padded batches."""
    of_series = False
    """True if it reads numbers in place of token ids."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        self.module, self.path = module, path
        self.config = copy.deepcopy(self.base_model.config)
        self.config.around = written(module)  # The fingerprint is made from this and the weights.
        self.gives: LogitsKind = "nothing"
        with torch.no_grad(), evaluating(module):
            self._table = self._find_embeddings()
            if self.base_model is not module:
                self.gives = self._find_what_it_gives()

    @property
    def base_model(self) -> Any:
        return self.module.get_submodule(self.path)

    def get_input_embeddings(self) -> Any:
        """Return the embedding that reads the token ids."""
        return self.module.get_submodule(self._table)

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the linear layer outside the backbone with one output per logit; None if there is not exactly one."""
        outputs = self.get_input_embeddings().weight.shape[0] if self.gives == "next tokens" else self.config.num_labels
        inside = set(self.base_model.modules())
        heads = [part for part in self.module.modules() if isinstance(part, nn.Linear) and part not in inside]
        heads = [part for part in heads if part.out_features == outputs and self.gives != "nothing"]
        return heads[0] if len(heads) == 1 else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Return logits (batch, classes) or (batch, length, vocabulary), or (batch, 0) without a head."""
        given, mask = given_and_mask(input_ids, attention_mask, inputs_embeds)
        if self.gives in self.ignores_padding or bool(mask.all()):
            return SequenceClassifierOutput(logits=self._logits(given, mask))
        whole = self._outputs_of_parts(given, mask, (input_ids, attention_mask, inputs_embeds))
        places, found = [], []
        for length in mask.sum(1).unique().tolist():
            rows = (mask.sum(1) == length).nonzero()[:, 0]
            real = mask[rows]

            def alone(t: Tensor) -> Tensor:
                return t[rows][real].unflatten(0, real.sum(1).shape + (-1,))  # noqa: B023

            fixed = [(part, _constant(self._changed(part, output, mask.shape, alone))) for part, output in whole]
            with override_forward(fixed):
                logits = self._logits(alone(given), alone(mask))
            if self.gives == "next tokens":
                logits = logits.new_zeros(*real.shape, logits.shape[-1]).masked_scatter(real.unsqueeze(-1), logits)
            places.append(rows)
            found.append(logits)
        return SequenceClassifierOutput(logits=torch.cat(found)[torch.cat(places).argsort()])

    def _outputs_of_parts(self, given: Tensor, mask: Tensor, arguments: tuple[Any, ...]) -> list[tuple[nn.Module, Any]]:
        """Return the parts that run once for a padded batch, with their outputs."""
        return [(self.base_model, self.run_backbone(*arguments))]

    def _changed(self, part: nn.Module, output: Any, shape: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a part's output with `change` applied to every tensor of a batch's `shape`, (batch, length, …)."""
        return _mapped(output, shape, change)

    def run_backbone(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Any:
        """Return the backbone's output as the module runs it. Padding is hidden from layers that read later tokens."""
        hidden, whole = is_bidirectional(self.module), list[Any]()
        taker = active_override(self.base_model)

        def keep(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if hidden and {**dict(zip(arguments(self.base_model), args)), **kwargs}.get("attention_mask") is None:
                kwargs["attention_mask"] = attention_mask
            whole.append(below(*args, **kwargs) if taker is None else taker(below, *args, **kwargs))
            return whole[-1]

        with override_forward([(self.base_model, keep)]):
            self._logits(*given_and_mask(input_ids, attention_mask, inputs_embeds))
        return whole[0]

    def _logits(self, given: Tensor, mask: Tensor) -> Tensor:
        output = self._run(given, mask)
        if self.gives == "nothing":
            return output[0].new_zeros(len(given), 0)
        logits = self._logits_of(output, given if given.ndim == 2 or self.of_series else None)
        assert logits is not None
        return logits.unsqueeze(1) if logits.ndim == 1 else logits

    def _logits_of(self, output: Any, ids: Tensor | None = None) -> Tensor | None:
        return _logits_in(output)

    def _run(self, given: Tensor, mask: Tensor) -> Any:
        """Return the module's output for ids (batch, length) or embeddings (batch, length, width), without padding."""
        known = inspect.signature(self.module.forward).parameters
        arguments: dict[str, Any] = {name: mask.long() for name in ("attention_mask", "mask") if name in known}
        if given.ndim == 2 or "inputs_embeds" not in known:

            def embed(below: Callable[..., Tensor], ids: Tensor) -> Tensor:
                return given if ids.shape == given.shape[:2] else below(ids)

            ids = given if given.ndim == 2 else torch.ones_like(mask, dtype=torch.long)
            with override_forward([] if given.ndim == 2 else [(self.get_input_embeddings(), embed)]):
                return self._call(ids, **arguments)
        return self.module(inputs_embeds=given, **arguments)

    def _call(self, ids: Tensor, **arguments: Any) -> Any:
        """Call the module, with the ids as its first argument or as `input_ids`."""
        known = inspect.signature(self.module.forward).parameters
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        if "input_ids" in known or all(each.kind in by_name for each in known.values()):
            return self.module(input_ids=ids, **arguments)
        return self.module(ids, **arguments)

    def _tried(self, length: int) -> tuple[Any, Tensor]:
        backbone = self.base_model
        vocabulary = backbone.get_input_embeddings().weight.shape[0]
        ids = torch.arange(1, 2 * length + 1).view(2, length).to(backbone.get_input_embeddings().weight.device)
        ids = ids.remainder(vocabulary)
        runs: list[nn.Module] = []
        try:
            with observe(after=[(backbone, lambda part, output: runs.append(part))]):
                found = self._run(ids, torch.ones_like(ids, dtype=torch.bool))
        except DAMAGE_ERRORS as error:
            why = f"{type(error).__name__} ({reason(error)})"
            advice = "its forward pass should take them first or as input_ids, and give logits"
            raise InputError(f"{self._name} cannot be run on token ids: {why}; {advice}") from error
        if len(runs) != 1:
            many = f"{self._name} runs {self.path} {len(runs)} times for a text"
            raise InputError(f"{many}; only a model that runs it once can be read")
        return found, ids

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def _find_embeddings(self) -> str:
        read: list[tuple[str, Tensor]] = []
        names = {part: name for name, part in self.module.named_modules() if isinstance(part, nn.Embedding)}

        def note(name: str) -> Callable[..., None]:
            return lambda part, args, kwargs: read.append((name, args[0])) if args else None

        with observe(before=[(part, note(name)) for part, name in names.items()]):
            ids = self._tried(TRIAL_LENGTHS[0])[1]
        found = [name for name, given in read if given.shape == ids.shape and bool((given == ids).all())]
        if not found:
            raise InputError(f"no embedding of {self._name} reads the token ids, as a model that can be read does")
        return found[0]

    def _find_what_it_gives(self) -> LogitsKind:
        tried = [self._tried(length) for length in TRIAL_LENGTHS]
        outputs, lengths = [output for output, _ in tried], [ids.shape[1] for _, ids in tried]
        if isinstance(outputs[0], ModelOutput) and "start_logits" in outputs[0]:
            self._refuse("a beginning and an end among a text's tokens, as in question answering")
        logits = [self._logits_of(output, ids) for output, ids in tried]
        first, second = logits
        if first is None or second is None:
            said = f"{self._name} gives a {type(outputs[0]).__name__} without logits; its forward pass should return a"
            raise InputError(f"{said} tensor, or an output, a dictionary or a tuple with logits")
        shapes = tuple(first.shape), tuple(second.shape)
        vocabulary = None if self.of_series else self.get_input_embeddings().weight.shape[0]
        if shapes == tuple((2, length, vocabulary) for length in lengths):
            return "next tokens"
        if len(shapes[0]) > 2 and all(shape[:2] == (2, length) for shape, length in zip(shapes, lengths)):
            self._refuse("logits at every position")
        if shapes[0] != shapes[1] or len(shapes[0]) not in (1, 2) or shapes[0][0] != 2:
            raise InputError(
                f"{self._name} gives {shapes[0]} for two texts of {lengths[0]} tokens and {shapes[1]} for two of "
                f"{lengths[1]}; give a module with logits (texts, classes) or (texts, tokens, vocabulary)"
            )
        count = 1 if first.ndim == 1 else first.shape[1]
        own: Any = getattr(self.module, "config", None)
        named = own is not getattr(self.base_model, "config", None) and getattr(own, "num_labels", None) == count
        self.config.num_labels = count
        self.config.problem_type = getattr(own, "problem_type", None) if named else None
        if named and isinstance(getattr(own, "id2label", None), Mapping):
            self.config.id2label = dict(own.id2label)
        return given_by(self.config)

    def _refuse(self, what: str) -> None:
        raise InputError(
            f"{self._name} gives {what}; ssmscope explains one answer per text: give a module whose forward pass "
            f"returns the logits of the token in question, or its backbone, .{self.path}, whose layers can be read "
            "without an answer"
        )


def own_model(module: nn.Module, backbone: str | None = None) -> OwnModel | None:
    """Return a module as `OwnModel`, around the `backbone` at a path in it, by default the innermost transformers model
    with all state-space layers; None without one. Raises InputError as `OwnModel`, and without such a `backbone`."""
    whole = [id(mixer) for mixer in mixers(module)]
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, PreTrainedModel) and whole]
    holding = [name for name, part in parts if [id(mixer) for mixer in mixers(part)] == whole]
    if backbone is None:
        return OwnModel(module, holding[-1]) if holding else None
    if backbone not in holding:
        known = ", ".join(filter(None, holding)) or "none"
        said = f"{type(module).__name__} has no backbone {backbone!r}: transformers models with all of its state-space"
        raise InputError(f"{said} layers are {known}{did_you_mean(backbone, holding)}")
    return OwnModel(module, backbone)


def written(module: nn.Module) -> list[str]:
    """Return the names of a module's classes that a user has written, with a hash of their code if it is available."""
    kinds = {type(part) for part in module.modules()}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "transformers", "ssmscope")]
    found = []
    for kind in own:
        try:
            code = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
        except (OSError, TypeError):
            code = ""
        found.append(f"{kind.__module__}.{kind.__qualname__} {code}")
    return sorted(found)


def _constant(output: Any) -> Callable[..., Any]:
    return lambda below, *args, **kwargs: output


def given_and_mask(ids: Tensor | None, mask: Tensor | None, embeddings: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids, or embeddings, and the mask of real positions."""
    given: Any = ids if embeddings is None else embeddings
    return given, given.new_ones(given.shape[:2], dtype=torch.bool) if mask is None else mask.bool()


def _logits_in(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("logits")
    if isinstance(output, tuple):
        return next((each for each in output if isinstance(each, Tensor) and each.ndim), None)
    return getattr(output, "logits", None)


def _mapped(output: Any, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Any:
    """Return a backbone's output with `change` applied to every tensor of a batch's `shape` (batch, length, …)."""
    if isinstance(output, Tensor):
        return change(output) if output.shape[:2] == shape else output
    if isinstance(output, ModelOutput):
        return type(output)(**{name: _mapped(each, shape, change) for name, each in output.items()})
    if isinstance(output, tuple):
        return tuple(_mapped(each, shape, change) for each in output)
    return output
