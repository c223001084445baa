"""Baleen: state-space models whose selection is a random variable under an information bottleneck.

Baleen-B samples Bernoulli gates that keep each part of the memory with probability Ā_t (Baleen, Eqs. 6 and 7);
Baleen-E samples exponential time steps with mean Δ_t (Eqs. 8 and 9). Both add β · KL to the loss and no parameter to
Mamba or Mamba-2: a trained model of either is converted by changing how its gate is used. In evaluation the gates
have their expected values. As a layer's output is linear in H, this is its exact expected output for given inputs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus
from transformers import PreTrainedModel
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from ssmscope.core.affine import offset, stored_weights
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers.parts import ReadMixer, at_least_float32
from ssmscope.networks.classifier import information_loss
from ssmscope.ops import Scan
from ssmscope.zoo.variants import base_of, variant

GATES = {"bernoulli": "baleen-b", "exponential": "baleen-e"}
SAMPLES = ("hard", "soft")
KL_OVER = ("mean", "sum")
PRIOR_PER = ("layer", "head")
LOG_DROPPED_GATE = -30.0
"""Log-gate of a state that is dropped."""
PAPER_BETA = {"bernoulli": 0.01, "exponential": 0.5}
"""The paper's weight β of the KL for each gate."""


TABLE_STEP = 0.1
"""Distance of the table's ℓ; the cubic between them is right to 1e-7."""
MAX_LOGIT = 100.0
"""Largest ℓ in the table, beyond that of any float32 keep probability."""


def mean_log_gate(logit: Tensor, tau: float) -> Tensor:
    """Return log E[σ((ℓ + z) / τ)] of every ℓ in `logit`, without cancellation at either end; differentiable. The noise
    is symmetric, so 1 − E at ℓ is E at −ℓ: one table of log E for ℓ ≤ 0 does for both."""
    size = logit.abs().clamp(max=MAX_LOGIT)
    log_small = _interpolated(size, tau)
    return torch.where(logit > 0, torch.log1p(-log_small.exp()), log_small)


def _interpolated(size: Tensor, tau: float) -> Tensor:
    """Interpolate the table's log E at ℓ = −`size` by cubic Hermite pieces."""
    values, slopes = (t.to(size) for t in _table(float(tau)))
    place = size / TABLE_STEP
    at = place.detach().floor().clamp(max=len(values) - 2)
    u, at = place - at, at.long()
    v0, v1, s0, s1 = values[at], values[at + 1], slopes[at] * TABLE_STEP, slopes[at + 1] * TABLE_STEP
    rise = v1 - v0
    return v0 + u * (s0 + u * (3 * rise - 2 * s0 - s1 + u * (s0 + s1 - 2 * rise)))


@functools.cache
def _table(tau: float) -> tuple[Tensor, Tensor]:
    """Return log E at ℓ = 0, −TABLE_STEP, …, −MAX_LOGIT and its derivative by −ℓ, float64.

    E = ∫ σ((ℓ + z) / τ) f(z) dz, f the logistic density, by the trapezium rule, which converges exponentially for
    analytic functions: their poles are π and πτ from the real line. The integral further than `reach` below 0 and above
    −ℓ is less than e^−60 of it.
    """
    spacing, reach = min(1.0, tau) / 4, 60 * max(1.0, tau)
    z = torch.arange(-reach, MAX_LOGIT + 1 + reach, spacing, dtype=torch.float64)
    log_density = logsigmoid(z) + logsigmoid(-z) + torch.tensor(spacing, dtype=torch.float64).log()
    values, slopes = [], []
    for size in torch.arange(0.0, MAX_LOGIT + 1.5 * TABLE_STEP, TABLE_STEP, dtype=torch.float64):
        near = slice(int((size + 2 * reach) / spacing))
        score = (z[near] - size) / tau
        opened = logsigmoid(score)
        terms = opened + log_density[near]
        value = torch.logsumexp(terms, 0)
        steep = torch.logsumexp(terms + opened - score, 0)
        values.append(value)
        slopes.append(-(steep - value).exp() / tau)
    return torch.stack(values), torch.stack(slopes)


# ---- the random gates and their divergences from the prior


def gate_logit(log_keep: Tensor) -> Tensor:
    """Return logit(exp(a)) = a − log(1 − exp(a)) for a < 0, without cancellation at either end."""
    a = log_keep.clamp(max=-torch.finfo(log_keep.dtype).tiny)
    return a - torch.log(-torch.expm1(a))


class _StraightThrough(torch.autograd.Function):
    """Log of a hard gate with the soft gate's gradient: d gate / d soft = 1, although log(gate) is passed on."""

    @staticmethod
    def forward(ctx, soft: Tensor) -> Tensor:
        log_gate = torch.where(soft > 0.5, 0.0, LOG_DROPPED_GATE).to(soft.dtype)
        ctx.save_for_backward(log_gate)
        return log_gate

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (log_gate,) = ctx.saved_tensors
        return grad * torch.exp(-log_gate)


def sample_log_gates(log_keep: Tensor, tau: float, samples: str = "hard") -> Tensor:
    """Draw log A_t for A_t ~ Bernoulli(exp(`log_keep`)), any shape: 0 where kept, −30 where dropped (Baleen-B).

    The gate is the hard value of σ((logit + logistic noise) / τ), whose gradient it takes. With `soft` samples it is
    that number itself (GSAT, Miao et al. 2022), at least e⁻³⁰, whose mean is not the keep probability (.963 for .99 at
    τ = 1) but that of `concrete.mean_log_gate`.
    """
    uniform = torch.rand_like(log_keep).clamp(1e-7, 1 - 1e-7)
    noise = torch.log(uniform) - torch.log1p(-uniform)
    score = (gate_logit(log_keep) + noise) / tau
    if samples == "soft":
        return logsigmoid(score).clamp(min=LOG_DROPPED_GATE)
    return _StraightThrough.apply(torch.sigmoid(score))


def bernoulli_kl(log_keep: Tensor, prior: float) -> Tensor:
    """Return KL(Bernoulli(q) ‖ Bernoulli(prior)) per element, q = exp(`log_keep`) (Baleen, Eq. 7)."""
    a = log_keep.clamp(max=-torch.finfo(log_keep.dtype).tiny)
    log_drop = torch.log(-torch.expm1(a))
    return a.exp() * (a - math.log(prior)) - torch.expm1(a) * (log_drop - math.log1p(-prior))


def exponential_kl(delta: Tensor, prior: float | Tensor, form: str = "true") -> Tensor:
    """Return the divergence of the time step from its prior, per element (Baleen, Eq. 9).

    `true`: KL(Exp(mean `delta`) ‖ Exp(mean `prior`)) = log(prior / Δ) + Δ / prior − 1. `printed`: Eq. 9 to the letter,
    which is the divergence of exponentials with *rates* Δ and `prior`.
    """
    ratio = delta / prior
    return ratio - torch.log(ratio) - 1 if form == "true" else torch.log(ratio) + 1 / ratio - 1


# ---- the layer


class BaleenMambaMixer(ReadMixer, MambaMixer):
    """Mamba's mixer with a random gate."""


class BaleenMamba2Mixer(ReadMixer, Mamba2Mixer):
    """Mamba-2's mixer with a random gate."""


MIXERS: tuple[type[nn.Module], ...] = (BaleenMambaMixer, BaleenMamba2Mixer)

RECORDABLE_TRAINING = ("baleen-mamba2",)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the base model's terms with sampled gates in training and expected gates in evaluation.

    In training `extras["kl"]` is the layer's divergence from the prior, its mean over states, heads and sequences and
    its mean or sum over positions (`kl_over`), and `mixer.kl` keeps it for the loss. Gates at the first position act on
    an empty memory: Baleen-B leaves them out. Soft samples differ from hard ones in mean, and so in expected gates.
    """
    gate = mixer.baleen  # The model's configuration.
    layer = base_of(mixer).compute_terms(mixer, u, mask, state)
    recurrence = layer.recurrence
    if not mixer.training:
        if gate.gate == "exponential":
            recurrence = replace(recurrence, expected=True)
        elif gate.samples == "soft":
            log_a = mean_log_gate(gate_logit(recurrence.log_decay()), gate.tau)
            if layer.mask is not None:
                log_a = log_a.masked_fill(~layer.mask[:, :, None, None], 0.0)
            recurrence = replace(recurrence, A=None, log_a=log_a)
        return replace(layer, recurrences=(recurrence,))

    if gate.gate == "bernoulli":
        log_keep = recurrence.log_decay()
        sampled = sample_log_gates(log_keep, gate.tau, gate.samples)
        if layer.mask is not None:
            sampled = sampled.masked_fill(~layer.mask[:, :, None, None], 0.0)
        recurrence = replace(recurrence, A=None, log_a=sampled)
        kl = _over_positions(bernoulli_kl(log_keep[:, 1:], prior_of(mixer)), layer.mask, gate.kl_over, first=1)
    else:
        delta = recurrence.delta
        noise = -torch.log(torch.rand_like(delta).clamp(min=1e-7))
        recurrence = replace(recurrence, delta=delta * noise)
        hidden = delta if layer.mask is None else delta.masked_fill(~layer.mask[..., None], 1.0)
        prior = prior_of(mixer)
        if isinstance(prior, (list, tuple)):
            prior = torch.tensor(prior, dtype=delta.dtype, device=delta.device)
        kl = _over_positions(exponential_kl(hidden, prior, gate.kl), layer.mask, gate.kl_over)
    mixer.kl = kl
    return replace(layer, recurrences=(recurrence,), extras={"kl": kl})


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms, as the base model's."""
    return base_of(mixer).FORM.output(mixer, layer, scans)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map, as the base model's: with the gates that `layer` has, sampled or expected."""
    return base_of(mixer).FORM.linearized(mixer, layer)


def _over_positions(t: Tensor, mask: Tensor | None, how: str, first: int = 0) -> Tensor:
    """Return the mean of divergences (batch, length, …), or with `how` "sum" their sum over positions."""
    t = t.flatten(2).mean(-1)
    if mask is not None:
        t = t * mask[:, first:].to(t.dtype)
    if how == "sum":
        return t.sum(1).mean()
    return t.sum() / max(t.numel() if mask is None else int(mask[:, first:].sum()), 1)


def prior_of(mixer: Any) -> Any:
    """Return a Baleen-B's prior probability, or a Baleen-E's prior mean of Δ, or a list of one per head."""
    config = mixer.baleen
    if "annealed_prior" in mixer.__dict__:
        return mixer.__dict__["annealed_prior"]
    if config.prior is None:  # A base model's checkpoint became a Baleen-E, and has its initial steps.
        return 0.5 if config.gate == "bernoulli" else initial_steps(mixer)
    return config.prior[mixer.layer_idx] if isinstance(config.prior, (list, tuple)) else config.prior


def anneal_prior(model: nn.Module, prior: float) -> None:
    """Use this prior keep probability in the KL of a Baleen-B, in place of the configuration's."""
    for module in model.modules():
        if isinstance(module, MIXERS):
            module.__dict__["annealed_prior"] = prior


def initial_steps(mixer: Any) -> float:
    """Return the geometric mean of softplus(bias of Δ) over a mixer's channels or heads: Baleen-E's prior mean λ."""
    return _initial_steps(mixer).log().mean().exp().item()


def _initial_steps(mixer: Any) -> Tensor:
    bias = offset(mixer.dt_proj, "dt_proj") if isinstance(mixer, MambaMixer) else mixer.dt_bias
    if bias is None:
        bias = mixer.D.new_zeros(mixer.D.shape)
    return softplus(at_least_float32(bias.detach()))


def fix_prior(model: PreTrainedModel) -> None:
    """Set a Baleen-E's prior means of Δ to its current initial steps, one per layer or per head (`prior_per`)."""
    by_layer = model.config.prior_per == "layer"
    mixers = [block.mixer for block in model.base_model.layers]
    model.config.prior = [initial_steps(each) if by_layer else _initial_steps(each).tolist() for each in mixers]


# ---- the models


class BaleenFields:
    """Configuration fields of a Mamba or Mamba-2 with random gates.

    Args (in addition to those of `MambaConfig` or `Mamba2Config`):
        gate: `bernoulli` (Baleen-B) or `exponential` (Baleen-E).
        beta: weight of the KL in the loss; by default the paper's, 0.01 (B) or 0.5 (E).
        tau: temperature of the relaxed Bernoulli sample.
        prior: Baleen-B: the prior keep probability (0.5). Baleen-E: the prior mean of Δ, one number, one per layer or
            a list per layer with one per head; by default the geometric mean of the initial Δ of each layer.
        kl: `true` or `printed`, see `exponential_kl`.
        samples: Baleen-B's gates in training, `hard` or `soft`, see `sample_log_gates`.
        kl_over: `mean` or `sum` of the divergences over positions (Baleen, Eq. 5).
        prior_per: unit with its own default prior in Baleen-E, `layer` or `head` (channel on Mamba).
    """

    def __init__(
        self,
        gate="bernoulli",
        beta=None,
        tau=0.5,
        prior=None,
        kl="true",
        samples="hard",
        kl_over="mean",
        prior_per="layer",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if kl not in ("true", "printed"):
            raise InputError(f"kl {kl!r} is unknown: choose 'true' or 'printed'")
        chosen = {"gate": (gate, GATES), "samples": (samples, SAMPLES)}
        chosen |= {"kl_over": (kl_over, KL_OVER), "prior_per": (prior_per, PRIOR_PER)}
        for name, (value, allowed) in chosen.items():
            if value not in allowed:
                raise InputError(f"{name} {value!r} is unknown: choose one of {', '.join(allowed)}")
        self.gate, self.tau, self.kl = gate, tau, kl
        self.samples, self.kl_over, self.prior_per = samples, kl_over, prior_per
        self.beta, self.prior = beta, prior
        self.use_cache = False

    @property
    def kl_weight(self) -> float:
        """β, by default the paper's for the gate."""
        return PAPER_BETA[self.gate] if self.beta is None else self.beta


class RandomGates:
    """Base of models whose mixers have random gates."""

    config: Any

    def __init__(self, config):
        super().__init__(config)  # type: ignore[call-arg]
        for block in self.base_model.layers:  # type: ignore[attr-defined]
            block.mixer.__class__ = BaleenMambaMixer if isinstance(block.mixer, MambaMixer) else BaleenMamba2Mixer
            block.mixer.baleen = config
        real = next(self.parameters()).device.type != "meta"  # type: ignore[attr-defined]
        if real and config.gate == "exponential" and config.prior is None:
            fix_prior(self)


class BaleenLanguageModel(RandomGates):
    """Base of the language models; with labels, the training loss is CE + β · KL (Baleen, Eq. 5)."""

    def forward(self, *args, labels=None, use_cache=False, **kwargs):
        result = super().forward(*args, labels=labels, use_cache=False, **kwargs)  # type: ignore[misc]
        divergence = information_loss(self) if labels is not None else None
        if divergence is not None and self.training:  # type: ignore[attr-defined]
            result.loss = result.loss + self.config.kl_weight * divergence
        return result


CLASSES = BaleenFields, RandomGates, BaleenLanguageModel
BaleenMambaConfig, BaleenMambaModel, BaleenMambaForCausalLM = variant("Mamba", "BaleenMamba", "baleen-mamba", *CLASSES)
BaleenMamba2Config, BaleenMamba2Model, BaleenMamba2ForCausalLM = variant(
    "Mamba2", "BaleenMamba2", "baleen-mamba2", *CLASSES
)
AUTO = (BaleenMambaModel, BaleenMambaForCausalLM, BaleenMamba2Model, BaleenMamba2ForCausalLM)


def convert(module: PreTrainedModel, gate: str, **options: Any) -> PreTrainedModel:
    """Convert a trained Mamba or Mamba-2 (backbone or language model) to a Baleen with the same parameters.

    Args:
        module: `MambaModel`, `MambaForCausalLM`, `Mamba2Model` or `Mamba2ForCausalLM`; its weights are copied.
        gate: `bernoulli` or `exponential`.
        options: further fields of the Baleen, see `BaleenFields`.

    Raises:
        InputError: for another kind of model.
    """
    classes: dict[str, Any] = {each.__name__.removeprefix("Baleen"): each for each in AUTO}
    name = type(module).__name__
    if name not in classes or not type(module).__module__.startswith("transformers."):
        raise InputError(f"{name} cannot become a Baleen: give one of {', '.join(classes)}")
    target = classes[name]
    fields = module.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "intermediate_size", "torch_dtype", "dtype"):
        fields.pop(name, None)
    converted = target(target.config_class(**fields, gate=gate, **options))
    converted = converted.to(next(module.parameters()).dtype)
    converted.load_state_dict(stored_weights(module))
    if gate == "exponential" and options.get("prior") is None:
        fix_prior(converted)
    return converted.train(module.training)
