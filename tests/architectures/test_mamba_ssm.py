"""mamba_ssm's language models in memory: their own parameters, read as transformers' model."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from examples import random_example
from refusals import refuses
from torch import nn
from warm import TORCH
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
    parallel = nn.DataParallel(theirs)  # It moves the weights to a GPU if there is one.
    before = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    model = ssmscope.load(parallel)
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
        refuses(f"MambaLMHeadModel {words}", ssmscope.load, language_model("mamba", **other)[0])
    theirs, _ = language_model()
    theirs.backbone.layers[0].register_forward_hook(lambda *_: None)
    refuses("MambaLMHeadModel has hooks", ssmscope.load, theirs)
    theirs, _ = language_model()
    theirs.backbone.layers[0].mixer.in_proj.weight = nn.Parameter(torch.zeros(3, 3))
    refuses("do not fit its configuration: backbone.layers.0.mixer.in_proj.weight is 3 × 3", ssmscope.load, theirs)


KERNEL = """
def selective_scan_fn(*given):
    raise RuntimeError("selective_scan_cuda is not installed. To use Mamba-1, reinstall with:\\n  more lines")
"""


def test_missing_kernels_are_one_line(monkeypatch):
    """transformers' own forward pass, which fills a cache, ends in mamba_ssm's error; ours need no kernels."""
    model = ssmscope.load(random_example("mamba"))
    batch = model.encode(ids=IDS[:1])
    expected = model.logits(batch)
    package = ModuleType("mamba_ssm.ops.selective_scan_interface")
    exec(KERNEL, vars(package))
    monkeypatch.setattr(type(model.mixers[0]), "forward", lambda self, *args, **kw: package.selective_scan_fn(*args))
    assert torch.equal(model.logits(batch), expected)
    with pytest.raises(InputError) as caught, model.running():
        model.module(batch.input_ids, use_cache=True)
    said = str(caught.value)
    assert "mamba-ssm, whose kernels transformers calls, cannot compute here (selective_scan_cuda is not" in said
    assert "\n" not in said and said.endswith("pip install --no-build-isolation mamba-ssm causal-conv1d)")
    # what another library, or a want of memory, raises is not about kernels
    full = "def selective_scan_fn(*given):\n    raise RuntimeError('CUDA out of memory')"
    for source, name in ((full, package.__name__), (KERNEL, "another.library")):
        other = ModuleType(name)
        exec(source, vars(other))
        monkeypatch.setattr(package, "selective_scan_fn", other.selective_scan_fn)
        with pytest.raises(RuntimeError, match="CUDA out of memory|selective_scan_cuda"), model.running():
            model.module(batch.input_ids, use_cache=True)


@pytest.mark.skipif(transformers.__version__ >= "5", reason="transformers 5 imports kernels where they can be imported")
def test_missing_kernels_where_there_is_a_gpu_are_one_line_too(tmp_path):
    """transformers 4 imports mamba_ssm with its first model: without its compiled part it cannot."""
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda\n")
    (tmp_path / "mamba_ssm-2.3.2.dist-info").mkdir()
    (tmp_path / "mamba_ssm-2.3.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mamba-ssm\nVersion: 2.3.2\n"
    )
    script = "import sys, torch; torch.cuda.is_available = lambda: True; sys.path.insert(0, sys.argv.pop(1))\n"
    script += "from ssmscope.cli import main; main()"
    done = TORCH.run(script, tmp_path, "heatmap", "demo/sst2-mamba2", "--text", "A film.")
    said = done.stderr.strip().split("\n")[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert said.startswith("analyze: the package mamba-ssm") and "No module named 'selective_scan_cuda'" in said


def test_the_packages_own_classes():
    """Its models in memory, and Mamba-1's and 2's logits by its own references in torch."""
    found = importlib.util.find_spec("mamba_ssm")
    where = os.environ.get("SSMSCOPE_MAMBA_SSM") or (found and Path(found.origin).parents[1])
    if not where:
        pytest.skip("mamba_ssm is not installed: set SSMSCOPE_MAMBA_SSM to a directory with its source")
    script = Path(__file__).resolve().parents[1] / "stubbed.py"
    done = subprocess.run([sys.executable, script, where], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split("\n")[-2] == "as stored", done.stderr
