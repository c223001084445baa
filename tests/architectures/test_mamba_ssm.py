"""mamba_ssm's language models in memory: their own parameters, read as transformers' model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from examples import random_example
from torch import nn

import ssmscope
from ssmscope.errors import InputError

IDS = [[5, 17, 3, 9, 22], [7, 8]]


def language_model(name: str = "mamba2-one-group", **other) -> tuple[nn.Module, nn.Module]:
    """A model as mamba_ssm names its parts, and transformers' of which it is made."""
    module = random_example(name)
    c = module.config
    cfg = {"d_state": c.state_size, "expand": c.expand, "d_conv": c.conv_kernel, "bias": c.use_bias}
    cfg |= {"conv_bias": c.use_conv_bias, "ngroups": 1, "dt_limit": getattr(c, "time_step_limit", (0.0, float("inf")))}
    cfg |= {"dt_rank": c.time_step_rank} if name == "mamba" else {"layer": "Mamba2", "headdim": c.head_dim}
    fields = {"d_model": c.hidden_size, "n_layer": c.num_hidden_layers, "tie_embeddings": c.tie_word_embeddings}
    MambaLMHeadModel = type("MambaLMHeadModel", (nn.Module,), {"__module__": "mamba_ssm.models.mixer_seq_simple"})
    theirs = MambaLMHeadModel()
    theirs.config = SimpleNamespace(**fields, ssm_cfg=cfg, **other)
    theirs.backbone, theirs.lm_head = nn.Module(), module.lm_head
    parts, theirs.backbone.embedding = module.backbone, module.backbone.embeddings
    theirs.backbone.layers, theirs.backbone.norm_f = parts.layers, parts.norm_f
    return theirs, module


@pytest.mark.parametrize("name", ["mamba", "mamba2-one-group"])
def test_its_parameters_are_read_and_neither_copied_nor_changed(name):
    theirs, module = language_model(name)
    before = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    model = ssmscope.load(nn.DataParallel(theirs))
    batch = model.encode(ids=IDS)
    with torch.no_grad():
        own = module(batch.input_ids[:1], use_cache=False).logits
    torch.testing.assert_close(model.logits(batch)[:1], own, rtol=1e-4, atol=1e-4)
    assert {id(weight) for weight in model.module.parameters()} == {id(weight) for weight in theirs.parameters()}
    trace = model.trace(batch)
    assert all(torch.equal(weight, before[name]) for name, weight in theirs.state_dict().items())
    with torch.no_grad():
        theirs.lm_head.weight.mul_(2)
        theirs.backbone.layers[0].mixer.out_proj.weight.mul_(2)
    assert not torch.allclose(model.logits(batch)[:1], own, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="the weights of layer 0 .* have changed"):
        _ = trace.layers[0]


def test_what_it_has_that_is_not_read_is_refused():
    for other, words in (
        ({"attn_layer_idx": [1]}, "has attention layers .* with Mamba-1"),
        ({"d_intermediate": 32}, "has MLPs .* with Mamba-1"),
        ({"rms_norm": False}, "has LayerNorm"),
    ):
        with pytest.raises(InputError, match=f"MambaLMHeadModel {words}"):
            ssmscope.load(language_model("mamba", **other)[0])
    theirs, _ = language_model()
    theirs.backbone.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="MambaLMHeadModel has hooks"):
        ssmscope.load(theirs)
    theirs, _ = language_model()
    theirs.backbone.layers[0].mixer.in_proj.weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(
        InputError, match="do not fit its configuration: backbone.layers.0.mixer.in_proj.weight is 3 × 3"
    ):
        ssmscope.load(theirs)


def test_the_packages_own_classes():
    where = os.environ.get("SSMSCOPE_MAMBA_SSM")
    if where is None:
        pytest.skip("set SSMSCOPE_MAMBA_SSM to a directory with mamba_ssm's source")
    script = Path(__file__).resolve().parents[1] / "stubbed.py"
    done = subprocess.run([sys.executable, script, where], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split("\n")[-2] == "as stored", done.stderr
