"""The logit lens and the tuned lens: a model's answer if it stopped after an earlier layer.

A lens reads the residual stream h_i that enters block i as the model reads the output of its last block, through the
final norm and the head, after an affine translation for the layer (Belrose et al., Eliciting latent predictions from
transformers with the tuned lens, 2023; with W_i + 1 as the paper's matrix, as in the package tuned-lens):

    lens_i(h_i) = head(norm(h_i + W_i h_i + b_i)).

i = 0 are the embeddings; after the last of L blocks (i = L) nothing is translated, and the lens is the model itself.
The logit lens has W_i = 0 and b_i = 0. A tuned lens is fitted (`ssmscope.lens_fit`). A classifier's lens gives classes.

Translators are objects of the package tuned-lens, stored in its format (config.json, params.pt).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init
from tuned_lens.nn.lenses import TunedLens, TunedLensConfig
from tuned_lens.nn.unembed import Unembed
from ssmscope.core.affine import matrix, offset
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.encoding import Batch
from ssmscope.core.heads import linear_head
from ssmscope.core.intercept import observe, remove_accelerate_hooks
from ssmscope.core.mixers import mixers
from ssmscope.core.model import Model
from ssmscope.core.take_trace import few_tokens
from ssmscope.core.text_files import parse_json
from ssmscope.errors import UNPICKLABLE, InputError, Unanswerable, check_model, check_path
from ssmscope.loading.stored import check_finished, reason
from ssmscope.probes.lens.result import STATISTICS, LensedText, LensFit

CONFIG, WEIGHTS = "config.json", "params.pt"
"""Files of tuned-lens."""
RECORD = "lens.json"
"""File of the `LensFit`, which is written last and marks a finished fit."""
LOGIT = "logit lens"
FIT_ONE = "fit one to this model with fit_lens (analyze lens fit)"
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Maximum number of logits in memory; on a CPU more would no longer fit the cache."""


def stream_blocks(model: Model) -> list[nn.Module]:
    """Return the blocks along the residual stream in order; for a model of one layer, that layer."""
    backbone = model.module.base_model
    stacks = [part for part in backbone.children() if isinstance(part, nn.ModuleList) and mixers(part)]
    if len(stacks) > 1:
        raise Unanswerable(f"{model.name} has {len(stacks)} lists of layers; a lens reads models with one")
    return list(stacks[0]) if stacks else mixers(backbone)


def final_norm_of(model: Model) -> nn.Module | None:
    """Return the module of the backbone that runs between its last block and the head; None if there is none."""
    last, head = stream_blocks(model)[-1], head_of(model)
    ran: list[nn.Module] = []
    parts = (part for part in model.module.base_model.children() if not isinstance(part, nn.ModuleList))
    noted = [(part, lambda module, output: ran.append(module)) for part in parts if part not in (last, head)]
    with observe(after=[(last, lambda module, output: ran.clear()), *noted]):
        model.logits(few_tokens(model))
    if len(ran) > 1:
        names = ", ".join(type(module).__name__ for module in ran)
        raise Unanswerable(f"after the last block of {model.name} run {names}; a lens reads models with one final norm")
    return ran[0] if ran else None


def head_of(model: Model) -> nn.Module:
    """Return the linear map from the width to the vocabulary, or to a classifier's classes."""
    model.check_classes("a lens")
    head = linear_head(model.module)
    if head is None or not getattr(model.config, "class_token", True):
        raise Unanswerable(f"{model.name} has no head that is one linear map; a lens reads models with one")
    return head


class SSMUnembed(Unembed):
    """Unembedding of a state-space model for tuned-lens: frozen copies of its final norm and head in float32. A head of
    one row, the log-odds of class 1, becomes two rows with the same softmax, and a multiplier of the logits after the
    head (Falcon-H1, Granite) is merged into its weight."""

    def __init__(self, model: Model) -> None:
        nn.Module.__init__(self)  # The constructor of `Unembed` only knows the norms of transformers.
        norm, head = final_norm_of(model), head_of(model)
        self.final_norm = nn.Identity() if norm is None else remove_accelerate_hooks(copy.deepcopy(norm))
        self.unembedding = _plain_linear(head)
        self.float().to(model.device).eval().requires_grad_(False)
        self._check(model)

    @torch.no_grad()
    def _check(self, model: Model) -> None:
        batch = few_tokens(model)
        own = model.logits(batch).float()
        found = self(hidden_states(model, batch)[-1])
        if model.is_classifier:
            found = found[torch.arange(len(found)), batch.last]
        digits = max(torch.finfo(dtype).eps for dtype in (torch.float32, next(model.module.parameters()).dtype))
        if (found - own).norm() > digits**0.5 * own.norm():
            multiplier = (found * own).sum() / found.square().sum()
            found = found * multiplier
            for parameter in self.unembedding.parameters():
                parameter.mul_(multiplier)
        apart = (found - own).norm() / own.norm()
        if not apart <= digits**0.5:
            raise Unanswerable(
                f"{model.name}: its final norm and head do not give its own logits (off by {float(apart):.1e}); a lens "
                "cannot read this model"
            )


def _plain_linear(head: nn.Module) -> nn.Linear:
    """Return a head with its PEFT adapters as a plain linear layer; a single row of log-odds becomes two rows."""
    weight, bias = matrix(head, "the head"), offset(head, "the head")
    if len(weight) == 1:
        weight = torch.cat([torch.zeros_like(weight), weight])
        bias = None if bias is None else torch.cat([torch.zeros_like(bias), bias])
    kind: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    plain = skip_init(nn.Linear, weight.shape[1], len(weight), bias=bias is not None, **kind)
    plain.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return plain


def hidden_states(model: Model, batch: Batch) -> Float[Tensor, "streams batch length width"]:
    """Return the residual stream at the input of each block, the embeddings first, and at the output of the last one,
    not normed, in float32. (transformers' `hidden_states` of Mambas lack the embeddings, and end with the normed one.)
    """
    return _streams(model, batch, lambda stream: stream)


def chosen_states(model: Model, batch: Batch, positions: str) -> Float[Tensor, "streams chosen width"]:
    """Return `hidden_states` at the real positions, text after text, or at each text's last one."""
    if positions == "last":
        rows = torch.arange(len(batch.last), device=batch.last.device)
        return _streams(model, batch, lambda stream: stream[rows, batch.last])
    return _streams(model, batch, lambda stream: stream[batch.mask])


def _streams(model: Model, batch: Batch, chosen: Callable[[Tensor], Tensor]) -> Tensor:
    kept: list[Tensor] = []
    blocks, here = stream_blocks(model), model.device  # A model over several devices has blocks elsewhere.

    def keep(stream: Tensor) -> None:
        if stream.ndim != 3 or stream.shape[:2] != batch.mask.shape:
            said = f"the residual stream of {model.name} is {tuple(stream.shape)}, and a lens reads"
            raise Unanswerable(f"{said} (batch, length, width)")
        kept.append(chosen(stream.to(here)).float())

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    def leaving(module: nn.Module, output: Any) -> None:
        keep(output[0] if isinstance(output, tuple) else output)

    observed = observe(before=[(block, entering) for block in blocks], after=[(blocks[-1], leaving)])
    with torch.no_grad(), model.running(mask=batch.mask), observed:
        model.forward(batch, last_only=True)
    if not kept:
        raise Unanswerable(f"{model.name} does not call its blocks as modules, whose outputs a lens reads")
    return torch.stack(kept)


@dataclass(frozen=True, eq=False)
class Lens:
    """Logit lens or tuned lens of one model."""

    tuned: TunedLens
    """Object of tuned-lens: a translator per block and the unembedding, on the model's device."""
    fingerprint: str
    """Fingerprint of the model."""
    positions: str
    """Positions at which it was fitted, `every` or `last`."""
    fit: LensFit | None = None
    """Record of the fit; None for a logit lens, and for a lens fitted by the package tuned-lens."""
    name: str = LOGIT
    """"logit lens", or the directory that it was read from."""

    def __len__(self) -> int:
        return len(self.tuned)

    @property
    def title(self) -> str:
        """Name for views: "logit lens", or "tuned lens" with its directory."""
        return self.name if self.name == LOGIT else f"tuned lens {self.name}"

    @cached_property
    def _stacked(self) -> tuple[Tensor, Tensor]:
        layers = list(self.tuned)
        return torch.stack([part.weight for part in layers]), torch.stack([part.bias for part in layers])

    def log_probs(self, hidden: Float[Tensor, "streams chosen width"]) -> Float[Tensor, "streams chosen classes"]:
        """Return the lens's log-probabilities at every layer, the last row being the model's own answer. `hidden` comes
        from `chosen_states`; `slices` bounds the memory of the result."""
        unembed = self.tuned.unembed
        with torch.no_grad():
            return unembed.unembedding(unembed.final_norm(translated(hidden, *self._stacked))).log_softmax(-1)

    def slices(self, chosen: int) -> Iterator[slice]:
        """Yield slices of positions whose log-probabilities at all layers fit into memory."""
        head = self.tuned.unembed.unembedding
        return slices(chosen, (len(self) + 1) * head.out_features, head.weight.device)


def translated(hidden: Tensor, weight: Tensor, bias: Tensor) -> Float[Tensor, "streams chosen width"]:
    """Return h_i + W_i h_i + b_i for every layer, weights (layers, width, width), and the last stream as it is."""
    added = torch.baddbmm(bias.unsqueeze(1), hidden[:-1], weight.mT)
    return torch.cat([hidden[:-1] + added, hidden[-1:]])


def slices(count: int, numbers: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of 0 … `count` such that `numbers` logits per position fit into memory."""
    step = tokens_at_once(device, numbers, MAX_LOGITS["cuda" if device.type == "cuda" else "cpu"])
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def logit_lens(model: Model) -> Lens:
    """Return the lens without translation: every layer's stream through the model's own norm and head.

    A classifier's lens reads the last position, as its head does.

    Raises:
        InputError: for a model with several final norms or several lists of layers.
    """
    check_model(model, "logit_lens")
    return Lens(untrained_lens(model), model.fingerprint, "last" if model.is_classifier else "every")


def untrained_lens(model: Model) -> TunedLens:
    """Return an object of tuned-lens with W_i = 0 and b_i = 0."""
    unembed = SSMUnembed(model)
    width = unembed.unembedding.in_features
    config = TunedLensConfig(model.name, d_model=width, num_hidden_layers=len(stream_blocks(model)))
    with torch.random.fork_rng(devices=[]):  # Even layers that start at 0 draw random weights.
        return TunedLens(unembed, config).to(model.device).requires_grad_(False).eval()


def load_lens(path: str | Path, model: Model) -> Lens:
    """Load a lens from a directory that `fit_lens` or tuned-lens wrote.

    Raises:
        InputError: no lens, an unfinished or damaged one, or one fitted to another model: with another width or number
            of layers, or other weights (for a lens of tuned-lens, another head).
    """
    path = Path(check_path(path, "a lens"))
    check_model(model, "load_lens")
    check_finished(path, str(path))
    missing = [name for name in (CONFIG, WEIGHTS) if not os.path.isfile(path / name)]
    if missing:
        raise InputError(f"{path} has no lens: {missing[0]} is missing; fit one with fit_lens (analyze lens fit)")
    lens = untrained_lens(model)
    try:
        config = parse_json((path / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path / CONFIG} is not JSON ({error}); fit the lens again") from error
    if not isinstance(config, dict):
        raise InputError(f"{path / CONFIG} is not a JSON object; fit the lens again")
    for field, what in (("d_model", "width"), ("num_hidden_layers", "number of layers")):
        mine, found = getattr(lens.config, field), config.get(field)
        if found != mine:
            raise InputError(f"{path} is a lens for a model of {what} {found}; that of {model.name} is {mine}")
    fit = LensFit.load(path / RECORD) if os.path.isfile(path / RECORD) else None
    fingerprint = fit.provenance.get("fingerprint") if fit is not None else model.fingerprint
    own_head = config.get("unembed_hash") in (None, lens.config.unembed_hash)
    if fingerprint != model.fingerprint or not own_head:
        asked = fit.provenance if fit is not None else {"model": config.get("base_model_name_or_path"), "dtype": "?"}
        other, own = f"{asked.get('model')}, {asked.get('dtype')}", f"{model.name} ({model.source['dtype']})"
        raise InputError(f"{path} was fitted to another model ({other}) than {own}, with other weights; {FIT_ONE}")
    try:
        state = torch.load(path / WEIGHTS, map_location=model.device, weights_only=True)
        lens.layer_translators.load_state_dict(state)
    except UNPICKLABLE as error:
        raise InputError(f"{path / WEIGHTS} is damaged ({reason(error)}); fit the lens again") from error
    positions = fit.positions if fit is not None else ("last" if model.is_classifier else "every")
    return Lens(lens, model.fingerprint, positions, fit, str(path))


def check_lens(lens: Lens, model: Model) -> None:
    """Raise InputError if the lens belongs to another model."""
    if lens.fingerprint != model.fingerprint:
        raise InputError(
            f"the {lens.title} belongs to another model than {model.name}; {FIT_ONE}, or use its logit lens"
        )


def lens_of(lens: Lens | str | Path | None, model: Model) -> Lens:
    """Return a given lens, the lens in a directory, or for None the logit lens."""
    if lens is None:
        return logit_lens(model)
    if isinstance(lens, Lens):
        check_lens(lens, model)
        return lens
    return load_lens(lens, model)


def answers_of(model: Model, lens: Lens, batch: Batch, positions: str) -> list[LensedText]:
    """Read every text of the batch; texts of similar length run together."""
    texts: dict[int, LensedText] = {}

    @cache
    def name(answer: int) -> str:
        if model.labels is not None:
            return model.labels[answer]
        return model.tokenizer.decode([answer]) if model.tokenizer is not None else str(answer)

    for chosen in by_length(batch.lengths, tokens_at_once(model.device, (len(lens) + 1) * model.width)):
        part = batch.rows(chosen)
        hidden = chosen_states(model, part, positions)
        read = _statistics(lens, hidden, _next_tokens(part, positions, asked=not model.is_classifier))
        if not all(np.isfinite(read[name]).all() for name in STATISTICS if name != "cross_entropy"):
            raise InputError(f"{model.name} gives answers that are not finite; its weights are damaged")
        counts = part.lengths if positions == "every" else [1] * len(chosen)
        for row, start, count in zip(chosen, np.cumsum([0, *counts]), counts):
            own = {name: array[:, start : start + count] for name, array in read.items()}
            length = len(batch.tokens[row])
            places = np.arange(length) if positions == "every" else np.array([length - 1])
            answers = tuple(tuple(map(name, layer)) for layer in own["top"].tolist())
            texts[row] = LensedText(batch.tokens[row], batch.words[row], places, **own, answers=answers)
    return [texts[row] for row in sorted(texts)]


def _next_tokens(batch: Batch, positions: str, *, asked: bool) -> Tensor:
    """Return the token that follows each chosen position, −1 where none does."""
    following = torch.full_like(batch.input_ids, -1)
    if asked:
        following[:, :-1] = torch.where(batch.mask[:, 1:], batch.input_ids[:, 1:], -1)
    return following[batch.mask] if positions == "every" else following.gather(1, batch.last.unsqueeze(1)).squeeze(1)


def _statistics(lens: Lens, hidden: Tensor, following: Tensor) -> dict[str, np.ndarray]:
    """Compute all statistics and the index `top` of the leading answer, (layers + 1, positions) each."""
    pieces = []
    for part in lens.slices(hidden.shape[1]):
        logs = lens.log_probs(hidden[:, part])
        probabilities = logs.exp()
        best = probabilities.max(-1)
        answer = best.indices[-1].expand(len(logs), -1).unsqueeze(-1)
        after = following[part].expand(len(logs), -1).unsqueeze(-1)
        cross = -logs.gather(-1, after.clamp(min=0)).masked_fill(after < 0, torch.nan)
        found = [probabilities.gather(-1, answer).squeeze(-1), best.values, -(probabilities * logs).sum(-1)]
        found += [cross.squeeze(-1), ((logs[-1] - logs) * probabilities[-1]).sum(-1), best.indices]
        pieces.append(found)
    names = [*STATISTICS, "top"]
    return {name: torch.cat(each, dim=1).cpu().numpy() for name, each in zip(names, zip(*pieces))}
