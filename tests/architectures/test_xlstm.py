"""The mLSTM of xLSTM is the library's in states; that it is in outputs is a contract."""

import pytest
import torch
from examples import TEXTS, random_example, relative
from loud import TrueFloat64, doubled, loud
from refusals import refuses
from ssmscope.core.model import Model
from ssmscope.interp.methods.lrp import lrp, propagated
from ssmscope.interp.objective import objective
from ssmscope.layers import xlstm
from ssmscope.layers.parts import BY_WEIGHT

module = pytest.fixture(lambda: doubled(loud(random_example("xlstm"))))


def test_states_are_the_librarys_without_their_stabilizer(module):
    torch.manual_seed(0)
    u, mixer = torch.randn(2, 23, 24, dtype=torch.float64), module.backbone.blocks[0].mlstm_layer
    with torch.no_grad(), TrueFloat64():
        _, (C, n, m) = mixer(u)
        layer = xlstm.compute_terms(mixer, u)
        found = xlstm.state_after(mixer, layer, layer.scan())
    assert relative(found.stabilizer, m.squeeze(-1)) < 1e-12
    assert relative(found.ssm[0], (m.exp().unsqueeze(-1) * C).mT) < 1e-11
    assert relative(found.normalizer.squeeze(2), m.exp() * n) < 1e-11
    normalizer = layer.extras["normalizer"]
    assert (normalizer > 1.1).any() and (normalizer < 1.1).any()  # both sides of the maximum


@pytest.mark.skipif(not BY_WEIGHT, reason="transformers 4.57's own chunks of an mLSTM raise an error")
def test_chunks_of_the_library_are_the_whole(module):
    short = loud(random_example("xlstm")).double()
    for part in short.backbone.blocks:
        part.mlstm_layer.mlstm_backend.__init__(type(short.config)(**{**short.config.to_dict(), "chunk_size": 8}))
    ids = torch.tensor([TEXTS[0] * 2])
    with torch.no_grad(), TrueFloat64():
        own = short(ids).logits
        model = Model(module)
        assert relative(model.logits(model.encode(ids=ids.tolist())), own) < 1e-11


def test_texts_that_the_library_cuts_run_whole():
    model = Model(loud(random_example("xlstm")))
    batch = model.encode(ids=TEXTS)
    whole = model.trace(batch)
    model.config.max_inference_chunksize = 5
    cut, of = model.trace(batch), objective(model, batch)
    assert torch.equal(cut.logits, whole.logits) and torch.equal(cut.layers[1].u, whole.layers[1].u)
    assert torch.equal(cut.retention[:, batch.mask], whole.retention[:, batch.mask])
    refuses("no gradients of texts above 5 tokens .* and this has 11", of.gradient, of.embeddings()[:1], [0])


def test_relevance_passes_a_capped_head(module):
    """The cap halves the logits or more."""
    model = Model(module)
    module.config.output_logit_soft_cap = 1.0
    with TrueFloat64():
        of = objective(model, model.encode(ids=TEXTS))
        f = of(of.embeddings(), range(len(of)))
        assert (f.abs() > 0.7).all() and (f.abs() < 1).all()
        found, constants = lrp(of), propagated(of)[1]
    assert ((found.scores.sum(1) + constants - f).abs() < 1e-9 * f.abs()).all() and found.converged.all()


@pytest.mark.parametrize("field, value, says", [
    ("gate_soft_cap", None, "gate_soft_cap is None: only an xLSTM whose gates are capped at 40 or less can"),
    ("gate_soft_cap", 100.0, "gate_soft_cap is 100"),
    ("weight_mode", "fused", "weight_mode is 'fused'"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(module, field, value, says):
    model = Model(module)
    for part in module.modules():
        if hasattr(part, "config"):
            part.config.__dict__[field] = value
    refuses(says, model.trace, ids=TEXTS)
