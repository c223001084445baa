"""Models whose state-space layers stand between others: the layers' names, and when architectures are imported."""

from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from examples import EXAMPLES, random_example
from loud import loud
from torch import nn
from warm import TORCH
import ssmscope
from ssmscope.core.known_models import LAYERS, of_transformers
from ssmscope.core.model import Model
from ssmscope.errors import InputError

HYBRIDS = set(of_transformers().values()) - {"mamba", "falcon_mamba", "mamba2", "rwkv"}
IDS = [5, 17, 3, 9, 22, 1, 4]


@pytest.fixture(scope="module")
def model() -> Model:
    """Layers of Mamba-2, of softmax attention, and of Mamba-2."""
    return Model(loud(random_example("granitemoehybrid")), name="hybrid")


def test_layers_keep_the_models_numbers(model):
    assert model.layer_numbers == (0, 2) and model.trace(ids=IDS).layer_numbers == (0, 2)
    assert Model(random_example("mamba")).layer_numbers == (0, 1)


def test_analyses_name_layers_by_them(model):
    batch = model.encode(ids=IDS)
    heatmap = ssmscope.heatmap(model, batch, layers=[2])
    assert heatmap.layers == (2,)
    every = ssmscope.heatmap(model, batch, layers="all")
    assert every.layers == (0, 2) and (every[0].scores[1] == heatmap[0].scores[0]).all()
    for gradient in (False, True):
        found = ssmscope.attention(model, batch, layers=[2], gradient=gradient)
        both = ssmscope.attention(model, batch, gradient=gradient)
        assert [each.layer for each in found[0].maps] == ["2"]
        assert [each.layer for each in both[0].maps] == ["0", "1 attention", "2"]
        # attention whose weights are wanted is run by another function
        assert np.allclose(found[0].maps[0].values, both[0].maps[-1].values, atol=1e-5 if gradient else 0)
    stability = ssmscope.stability(model, batch)
    assert [each.layer for each in stability.layers] == [0, 2] and stability.to_frame()["layer"].tolist() == [0, 2]
    assert stability.numbers == (0, 2) and len(stability.norms) == 2
    influence = ssmscope.influence(model, batch, at="layers", fit_from=0)
    assert [reach.place for reach in influence.reaches] == ["output", "0", "2"]
    assert influence.similarity.places == ("embeddings", "0", "2", "output")


def test_a_layer_of_attention_is_no_state_space_layer(model):
    with pytest.raises(InputError, match="there is no layer 1; this model's state-space layers are 0, 2"):
        ssmscope.heatmap(model, model.encode(ids=IDS), layers=[1])


def test_every_layer_and_reader_of_the_table_exists():
    for name in LAYERS:
        module, _, layer = name.rpartition(".")
        of_transformers = module.startswith("transformers.")
        there = find_spec(module.rpartition(".")[0] if of_transformers else module.partition(".")[0]) is not None
        if there:
            assert issubclass(getattr(import_module(module), layer), nn.Module)
        if there or not of_transformers:
            has = set(dir(LAYERS[name]))
            assert "compute_terms" in has and ("FORM" in has or {"output", "linearized"} <= has)
    assert {"granitemoehybrid", "falcon_h1", "jamba", "zamba", "zamba2", "qwen3_next"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", ["granitemoehybrid", "jamba", "qwen3_next"])
def test_experts_run_in_float64_too(name):
    """The grouped products of transformers 5 have no float64."""
    module = loud(random_example(name))
    model = ssmscope.load(module, dtype="float64")
    with torch.no_grad():
        plain = module(torch.tensor([IDS])).logits
    torch.testing.assert_close(model.run(model.encode(ids=[IDS])).logits.float(), plain, rtol=1e-4, atol=1e-4)


def test_a_family_is_imported_with_its_first_model():
    own = {"minimax"}  # A model of ours is derived from its classes.
    families = [f"transformers.models.{name}.modeling_{name}" for name in HYBRIDS if name not in own]
    code = f"""
import sys, ssmscope.loading
from ssmscope.core.mixers import mixers
print(sorted(set({families}) & set(sys.modules)))
from transformers import Lfm2Config, Lfm2ForCausalLM
small = Lfm2Config(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, layer_types=["conv"])
print(len(mixers(Lfm2ForCausalLM(small))), sorted(n for n in sys.modules if n.endswith("layers.lfm2")))
"""
    done = TORCH.run(code, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "1 ['ssmscope.layers.lfm2']"]
