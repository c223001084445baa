"""Architectures that can be trained from scratch, with their bases, options and configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from ssmscope.errors import InputError, did_you_mean

SIZES = {
    "mamba2": ("width", "layers", "state", "head_width", "expand"),
    "mamba": ("width", "layers", "state", "expand"),
    "attention": ("width", "layers", "state", "heads", "expand"),
    "rwkv": ("width", "layers"),
    "selective": ("width", "state"),
}
"""Sizes of each base: width of the residual stream, number of layers, N, P, inner channels per channel."""

GATE_OPTIONS = ("beta", "tau", "prior", "kl", "samples", "kl_over", "prior_per")
"""Fields of a Baleen's configuration."""

ANNEALING = ("prior_from", "prior_step", "prior_every")
"""Schedule of a Baleen-B's prior."""


class Tokens(NamedTuple):
    """Vocabulary of a model: the number of tokens, and the ids of padding and of the end of a text."""

    number: int
    pad_id: int = 0
    end_id: int = 0


@dataclass(frozen=True)
class Architecture:
    """Architecture that can be trained. It is built on one of its `bases`, keys of `SIZES`, the default first, and has
    its `own` options. Its further training starts from a model of one of its `kinds`, or of a Mamba or Mamba-2
    converted to its random `gate`."""

    bases: tuple[str, ...]
    configure: Callable[[Mapping[str, Any], Tokens], Any]
    kinds: tuple[str, ...]
    own: tuple[str, ...] = ()
    gate: str | None = None


def named(name: str) -> Architecture:
    """Return the architecture of that name, or raise InputError if there is none."""
    if str(name) not in ARCHITECTURES:
        known = f"{', '.join(ARCHITECTURES)}{did_you_mean(str(name), ARCHITECTURES)}"
        raise InputError(f"unknown architecture '{name}'; choose one of {known}")
    return ARCHITECTURES[name]


def _shared(options: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    return {
        "vocab_size": tokens.number,
        "hidden_size": options["width"],
        "num_hidden_layers": options["layers"],
        "pad_token_id": tokens.pad_id,
        "bos_token_id": tokens.end_id,
        "eos_token_id": tokens.end_id,
        "use_cache": False,
        "tie_word_embeddings": bool(options["tied"]),
    }


def _on_mamba(options: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    """Return the fields of a `MambaConfig` or a `Mamba2Config`."""
    low, high = options["steps"]
    fields = {"state_size": options["state"], "expand": options["expand"], "time_step_min": low, "time_step_max": high}
    fields |= _shared(options, tokens)
    if options["base"] == "mamba2":
        fields["head_dim"] = options["head_width"]
        fields["num_heads"] = options["width"] * options["expand"] // options["head_width"]
        fields["n_groups"], fields["chunk_size"] = 1, 32
        # The limit is finite, because transformers 4 cannot read the infinity that transformers 5 writes to JSON.
        fields["time_step_limit"] = (0.0, 1e9)
    return fields


def _mamba_based(
    classes: str,
    kinds: tuple[str, ...],
    own: tuple[str, ...] = (),
    *,
    bases: tuple[str, ...] = ("mamba2", "mamba"),
    gate: str | None = None,
) -> Architecture:
    """Return an architecture whose two configurations, on Mamba-2 and on Mamba, are `classes`: "module:A,B"."""

    def configure(options: Mapping[str, Any], tokens: Tokens) -> Any:
        module, _, names = classes.partition(":")
        kind = getattr(import_module(module), names.split(",")[options["base"] != "mamba2"])
        given = {name: options[name] for name in own if name not in ANNEALING and options[name] is not None}
        return kind(**_on_mamba(options, tokens), **({"gate": gate} if gate else {}), **given)

    return Architecture(bases, configure, kinds, own, gate)


def _linear_attention(module: str, name: str, kind: str) -> Architecture:
    """Return GLA, RetNet or Gated DeltaNet: `state` keys per head, inner width as values."""

    def configure(options: Mapping[str, Any], tokens: Tokens) -> Any:
        return getattr(import_module(f"ssmscope.layers.{module}"), name)(
            **_shared(options, tokens),
            num_heads=options["heads"],
            key_size=options["heads"] * options["state"],
            value_size=options["width"] * options["expand"],
        )

    return Architecture(("attention",), configure, (kind,))


def _rwkv(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from transformers import RwkvConfig

    return RwkvConfig(**_shared(options, tokens), rescale_every=0)


def _hybrid(options: Mapping[str, Any], tokens: Tokens) -> Any:
    """Configure Bamba: Mamba-2's mixers, softmax attention in every third layer, and a narrow feed-forward part."""
    from transformers import BambaConfig

    width, layers = options["width"], options["layers"]
    heads = max(width // 32, 1)
    return BambaConfig(
        **_shared(options, tokens),
        intermediate_size=max(width // 5, 1),
        attn_layer_indices=list(range(2, layers, 3)),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=32768,
        mamba_n_heads=width * options["expand"] // options["head_width"],
        mamba_d_head=options["head_width"],
        mamba_d_state=options["state"],
        mamba_expand=options["expand"],
        mamba_chunk_size=32,
    )


def _selective(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from ssmscope.zoo.selective import SelectiveSSMConfig

    own = {"state_size": options["state"], "spectral_abscissa": options["spectral_abscissa"]}
    shared = _shared(options, tokens)
    for name in ("num_hidden_layers", "use_cache", "tie_word_embeddings"):
        del shared[name]
    return SelectiveSSMConfig(**own, **shared)


PLAIN = "transformers:Mamba2Config,MambaConfig"
OURS = "ssmscope.zoo"
BALEEN = f"{OURS}.baleen:BaleenMamba2Config,BaleenMambaConfig"
BERNOULLI = ("beta", "tau", "prior", "samples", "kl_over", *ANNEALING)
EXPONENTIAL = ("beta", "prior", "kl", "kl_over", "prior_per")
DIFFERENTIAL = ("scope", "differential_layers", "normalize", "lambda_form")

ARCHITECTURES: Mapping[str, Architecture] = {
    "mamba": _mamba_based(PLAIN, ("mamba",), bases=("mamba",)),
    "mamba2": _mamba_based(PLAIN, ("mamba2",), bases=("mamba2",)),
    "baleen-b": _mamba_based(BALEEN, (), BERNOULLI, gate="bernoulli"),
    "baleen-e": _mamba_based(BALEEN, (), EXPONENTIAL, gate="exponential"),
    "diff-mamba": _mamba_based(
        f"{OURS}.diff_mamba:DiffMambaConfig,DiffMamba1Config", ("diff-mamba", "diff-mamba1"), DIFFERENTIAL
    ),
    "groupmamba": _mamba_based(
        f"{OURS}.groupmamba:GroupMamba2Config,GroupMambaConfig",
        ("groupmamba", "groupmamba-mamba2"),
        ("k", "cross_attention"),
    ),
    "gfssm": _mamba_based(
        f"{OURS}.gfssm:GFSSMConfig,GFSSMMambaConfig", ("gfssm", "gfssm-mamba"), ("state_groups", "fir_taps", "prompt")
    ),
    "gla": _linear_attention("linear_attention", "GLAConfig", "ssm-gla"),
    "retnet": _linear_attention("linear_attention", "RetNetConfig", "ssm-retnet"),
    "deltanet": _linear_attention("delta", "DeltaNetConfig", "ssm-deltanet"),
    "rwkv": Architecture(("rwkv",), _rwkv, ("rwkv",)),
    "hybrid": Architecture(("mamba2",), _hybrid, ("bamba",)),
    "selective": Architecture(("selective",), _selective, ("selective-ssm",), ("spectral_abscissa", "start")),
}

OWN = tuple(dict.fromkeys(name for architecture in ARCHITECTURES.values() for name in architecture.own))
"""Options of some architectures only."""
