"""Every field of a configuration that is read is varied: logits follow the library's own, or the field is refused."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from damaged import save
from examples import EXAMPLES, FEW, SAME, VARIANTS, random_example, relative
from exhaustive import ALL
from loud import loud
from refusals import refused
from saving import write_mamba_ssm
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.errors import InputError
from ssmscope.layers.parts import BY_WEIGHT
from ssmscope.loading.mamba_checkpoints import FIELDS, SSM_FIELDS
from ssmscope.reports.sources import kind_of

IDS = [5, 17, 3, 9, 22, 1, 60, 61, 5, 17]
LIBRARY = tuple(
    name
    for name, made in EXAMPLES.items()
    if type(made.models[name]).__module__.startswith("transformers.") and (ALL or name not in VARIANTS | SAME)
)
COMMON = {*transformers.PretrainedConfig().to_dict(), "vocab_size", "use_cache"}


def others(name: str, value: Any) -> Iterator[Any]:
    """Return further values of a field."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value) if ALL else (2 * value or 1,)
    elif isinstance(value, float):
        yield from ((0.03,) if name.endswith(("eps", "epsilon")) else (value * 1.5 + 0.25,))
    elif name.endswith("time_step_limit"):
        yield (0.02, 0.3)
    elif isinstance(value, list | tuple) and value and all(isinstance(each, float) for each in value):
        yield [1.25 * each + 0.1 for each in value]
    elif isinstance(value, str) and (name.endswith("act") or name == "hidden_activation"):
        yield "gelu" if value != "gelu" else "relu"


def rebuilt(module: Any, name: str, value: Any) -> Any:
    """The model with another value of a field and the same weights; None where no such model can have them."""
    config = copy.deepcopy(module.config)
    try:
        setattr(config, name, value)
        with torch.random.fork_rng():
            made = type(module)(config)
        made.load_state_dict(module.state_dict())
    except Exception:  # whatever the library says to such a value
        return None
    return made.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", LIBRARY if ALL else LIBRARY[BY_WEIGHT::2])
def test_logits_follow_the_librarys_whatever_a_field_says(family):
    """Every field is tried that shows in no weight's shape, of half of the families on either release."""
    module = loud(random_example(family))
    own = reference(module)
    tried, seen = set(), set()
    for name, value in module.config.to_dict().items():
        for other in others(name, value) if name not in COMMON and "token_id" not in name else ():
            made = rebuilt(module, name, other)
            try:
                expected = None if made is None else reference(made)
            except Exception:  # the library itself cannot run it
                expected = None
            if expected is None or not expected.isfinite().all():
                continue
            try:
                model = ssmscope.load(made)
                found = model.run(model.encode(ids=[IDS])).logits[0]
            except InputError as error:
                assert "\n" not in str(error)
                continue
            tried.add(name)
            if relative(expected, own) > 1e-3:
                seen.add(name)
            assert relative(found, expected) < 1e-3, (family, name, value, other)
    assert seen, tried


def reference(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", FEW)
def test_a_configuration_is_read_whole(tmp_path, name):
    module = random_example(name)
    module.save_pretrained(tmp_path)
    found, expected = ssmscope.load(tmp_path).module.config, type(module.config).from_pretrained(tmp_path)
    of_the_load = {"dtype": None, "_name_or_path": None}
    said = [json.loads(json.dumps({**config.to_dict(), **of_the_load})) for config in (found, expected)]
    assert said[0] == said[1]


@pytest.mark.parametrize("layout", ["mamba", "mamba2", "diff-mamba"])
def test_a_configuration_without_architectures(tmp_path, layout):
    path = save(layout, tmp_path / "model")
    own = ssmscope.load(path)
    fields = json.loads((path / "config.json").read_text())
    for change in ({}, {"architectures": None}, {"architectures": []}):
        without = {name: value for name, value in fields.items() if name != "architectures"}
        (path / "config.json").write_text(json.dumps({**without, **change}))
        model = ssmscope.load(path)
        assert type(model.module) is type(own.module) and not model.is_classifier
        found, expected = (each.run(each.encode(ids=[IDS[:5]])).logits for each in (model, own))
        assert relative(found, expected) < 1e-6
        assert kind_of(path) == "token-model"


SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4, tie_word_embeddings=False
)
FOLLOWED = {
    "norm_epsilon": (0.02, dict(layer_norm_epsilon=0.02)),
    "dt_limit": ([0.4, 0.9], dict(time_step_limit=(0.4, 0.9))),
    "chunk_size": (3, dict(chunk_size=3)),
}
"""Fields that show in no weight's shape and that are followed."""
IN_HALVES = {"residual_in_fp32": (False, dict(residual_in_fp32=False))}
"""Those that show in half precision alone."""
SHAPES = {"d_model", "n_layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "dt_rank", "bias", "conv_bias"}
"""Fields that weights of another model do not fit."""
REFUSED = {
    "tie_embeddings": True, "rms_norm": False, "attn_layer_idx": [1], "d_intermediate": 64, "layer": "Mamba3",
    "rmsnorm": False, "norm_before_gate": True, "D_has_hdim": True, "is_mimo": True,
}  # fmt: skip
"""What the layers or these weights do not have."""
MAMBA3 = {"rope_fraction", "A_floor", "is_outproj_norm", "decay", "norm_eps"}
"""Fields of its Mamba-3 alone, tried in test_mamba3."""


def test_every_field_of_mamba_ssm_is_tried():
    assert {*FOLLOWED, *IN_HALVES, *SHAPES, *REFUSED, *MAMBA3} == {*FIELDS, *SSM_FIELDS}


def written(path: Path, second: bool) -> Any:
    heads = dict(num_heads=4, head_dim=8, n_groups=1)
    module: Any = (
        Mamba2ForCausalLM(Mamba2Config(**SIZES, **heads))
        if second
        else MambaForCausalLM(MambaConfig(**SIZES, time_step_rank=3))
    )
    loud(module)
    torch.nn.init.normal_(module.lm_head.weight)
    write_mamba_ssm(module, path)
    return module


def set_field(path: Path, name: str, value: Any) -> None:
    fields = json.loads((path / "config.json").read_text())
    (fields if name in FIELDS else fields["ssm_cfg"])[name] = value
    (path / "config.json").write_text(json.dumps(fields))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("second", [False, True], ids=["mamba", "mamba2"])
@pytest.mark.parametrize("name", [*FOLLOWED, *IN_HALVES])
def test_fields_of_mamba_ssm_that_are_followed(tmp_path, name, second):
    if not second and name in ("dt_limit", "chunk_size"):
        pytest.skip("of Mamba-2 alone")
    module, dtype = written(tmp_path, second), torch.bfloat16 if name in IN_HALVES else torch.float32

    def logits() -> torch.Tensor:
        model = ssmscope.load(tmp_path, dtype=dtype)
        return model.run(model.encode(ids=[IDS])).logits[0].detach().float()

    before = logits()
    value, field = {**FOLLOWED, **IN_HALVES}[name]
    set_field(tmp_path, name, value)
    for ours, theirs in field.items():
        told = getattr(ssmscope.load(tmp_path).config, ours)
        assert (tuple(told) if isinstance(told, list | tuple) else told) == theirs
    if name in IN_HALVES:  # which rounding hides from a comparison with another forward pass
        assert not torch.equal(logits(), before)
        return
    made = type(module)(type(module.config)(**{**module.config.to_dict(), **field}))
    made.load_state_dict(module.state_dict())
    assert relative(logits(), reference(made.eval())) < 1e-4
    assert name == "chunk_size" or relative(logits(), before) > 1e-2


@pytest.mark.parametrize("name", sorted([*SHAPES, *REFUSED]))
def test_fields_of_mamba_ssm_that_weights_or_layers_do_not_have(tmp_path, name):
    second = name not in ("dt_rank", "attn_layer_idx", "d_intermediate")
    written(tmp_path, second)
    fields = json.loads((tmp_path / "config.json").read_text())
    value = {**fields, **fields["ssm_cfg"]}.get(name, False)
    set_field(tmp_path, name, REFUSED[name] if name in REFUSED else not value if isinstance(value, bool) else value + 1)
    refused(ssmscope.load, tmp_path)
