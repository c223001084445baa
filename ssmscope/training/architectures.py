"""The architectures that can be trained from scratch: what each is built on, its options, its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ssmscope.errors import InputError, did_you_mean

SIZES = {
    "mamba2": ("width", "layers", "state", "head_width", "expand"),
    "mamba": ("width", "layers", "state", "expand"),
    "attention": ("width", "layers", "state", "heads", "expand"),
    "rwkv": ("width", "layers"),
    "selective": ("width", "state"),
}
"""The sizes that a base has: of the residual stream, the number of layers, N, P, inner channels per channel."""

GATE_OPTIONS = ("beta", "tau", "prior", "kl", "samples", "kl_over", "prior_per")
"""The fields of a Baleen's configuration."""

ANNEALING = ("prior_from", "prior_step", "prior_every")
"""How the prior of a Baleen-B reaches its value."""

DIFFERENTIAL = ("scope", "differential_layers", "normalize", "lambda_form")
"""The fields of a Diff-Mamba's configuration."""

OWN = (
    *GATE_OPTIONS,
    *ANNEALING,
    *DIFFERENTIAL,
    *("k", "state_groups", "fir_taps", "spectral_abscissa"),
)
"""The options that belong to some architectures only."""


class Tokens(NamedTuple):
    """What a model reads: the number of tokens, and the ids of padding and of the end of a text."""

    number: int
    pad_id: int = 0
    end_id: int = 0


@dataclass(frozen=True)
class Architecture:
    """One that can be trained.

    Attributes:
        bases: what it can be built on, the default first: one of `SIZES`.
        configure: its configuration from the options, its base and the tokens.
        own: its own options and their defaults; None leaves the configuration's own default.
    """

    bases: tuple[str, ...]
    configure: Callable[[Mapping[str, Any], Tokens], Any]
    own: Mapping[str, Any] = field(default_factory=dict)


def named(name: str) -> Architecture:
    """The architecture of that name.

    Raises:
        InputError: when there is none.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        hint = did_you_mean(str(name), ARCHITECTURES)
        raise InputError(f"unknown architecture '{name}'; choose one of {known}{hint}")
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
    """The fields of a `MambaConfig` or a `Mamba2Config`."""
    fields = _shared(options, tokens)
    low, high = options["steps"]
    fields |= {
        "state_size": options["state"],
        "expand": options["expand"],
        "time_step_min": low,
        "time_step_max": high,
    }
    if options["base"] == "mamba2":
        fields["head_dim"] = options["head_width"]
        fields["num_heads"] = options["width"] * options["expand"] // options["head_width"]
        fields["n_groups"], fields["chunk_size"] = 1, 32
        # no limit, in a number that JSON has: transformers 4 cannot read the infinity that transformers 5 writes
        fields["time_step_limit"] = (0.0, 1e9)
    return fields


def _chosen(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options[name] is not None}


def _plain(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from transformers import Mamba2Config, MambaConfig

    return (Mamba2Config if options["base"] == "mamba2" else MambaConfig)(**_on_mamba(options, tokens))


def _baleen(gate: str) -> Callable[[Mapping[str, Any], Tokens], Any]:
    def configure(options: Mapping[str, Any], tokens: Tokens) -> Any:
        from ssmscope.architectures.own.baleen import BaleenMamba2Config, BaleenMambaConfig

        kind = BaleenMamba2Config if options["base"] == "mamba2" else BaleenMambaConfig
        return kind(**_on_mamba(options, tokens), gate=gate, **_chosen(options, *GATE_OPTIONS))

    return configure


def _diff_mamba(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from ssmscope.architectures.own.diff_mamba import DiffMamba1Config, DiffMambaConfig

    kind = DiffMambaConfig if options["base"] == "mamba2" else DiffMamba1Config
    return kind(**_on_mamba(options, tokens), **_chosen(options, *DIFFERENTIAL))


def _groupmamba(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from ssmscope.architectures.own.groupmamba import GroupMamba2Config, GroupMambaConfig

    kind = GroupMamba2Config if options["base"] == "mamba2" else GroupMambaConfig
    return kind(**_on_mamba(options, tokens), **_chosen(options, "k"))


def _gfssm(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from ssmscope.architectures.own.gfssm import GFSSMConfig, GFSSMMambaConfig

    kind = GFSSMConfig if options["base"] == "mamba2" else GFSSMMambaConfig
    return kind(**_on_mamba(options, tokens), **_chosen(options, "state_groups", "fir_taps"))


def _attention(options: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    """The fields of GLA, RetNet and Gated DeltaNet: `state` key dimensions a head, as many values as inner channels."""
    return {
        **_shared(options, tokens),
        "num_heads": options["heads"],
        "key_size": options["heads"] * options["state"],
        "value_size": options["width"] * options["expand"],
    }


def _gla(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from ssmscope.architectures.read.linear_attention import GLAConfig

    return GLAConfig(**_attention(options, tokens))


def _retnet(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from ssmscope.architectures.read.linear_attention import RetNetConfig

    return RetNetConfig(**_attention(options, tokens))


def _deltanet(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from ssmscope.architectures.read.delta import DeltaNetConfig

    return DeltaNetConfig(**_attention(options, tokens))


def _rwkv(options: Mapping[str, Any], tokens: Tokens) -> Any:
    from transformers import RwkvConfig

    return RwkvConfig(**_shared(options, tokens), rescale_every=0)


def _hybrid(options: Mapping[str, Any], tokens: Tokens) -> Any:
    """Bamba: Mamba-2's mixers, every third layer softmax attention, and in every layer a narrow feed-forward part."""
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
    from ssmscope.architectures.own.selective import SelectiveSSMConfig

    return SelectiveSSMConfig(
        vocab_size=tokens.number,
        hidden_size=options["width"],
        state_size=options["state"],
        spectral_abscissa=options["spectral_abscissa"],
        pad_token_id=tokens.pad_id,
        bos_token_id=tokens.end_id,
        eos_token_id=tokens.end_id,
    )


EITHER = ("mamba2", "mamba")
ARCHITECTURES: Mapping[str, Architecture] = {
    "mamba": Architecture(("mamba",), _plain),
    "mamba2": Architecture(("mamba2",), _plain),
    "baleen-b": Architecture(
        EITHER,
        _baleen("bernoulli"),
        dict.fromkeys(("beta", "tau", "prior", "samples", "kl_over", *ANNEALING)),
    ),
    "baleen-e": Architecture(
        EITHER, _baleen("exponential"), dict.fromkeys(("beta", "prior", "kl", "kl_over", "prior_per"))
    ),
    "diff-mamba": Architecture(EITHER, _diff_mamba, dict.fromkeys(DIFFERENTIAL)),
    "groupmamba": Architecture(EITHER, _groupmamba, {"k": None}),
    "gfssm": Architecture(EITHER, _gfssm, {"state_groups": None, "fir_taps": None}),
    "gla": Architecture(("attention",), _gla),
    "retnet": Architecture(("attention",), _retnet),
    "deltanet": Architecture(("attention",), _deltanet),
    "rwkv": Architecture(("rwkv",), _rwkv),
    "hybrid": Architecture(("mamba2",), _hybrid),
    "selective": Architecture(("selective",), _selective, {"spectral_abscissa": 0.0}),
}

GATES = {"baleen-b": "bernoulli", "baleen-e": "exponential"}
"""The random gates into which a trained Mamba or Mamba-2 can be converted."""
