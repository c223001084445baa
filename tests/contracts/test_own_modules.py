"""A user's own head around the backbone of every architecture: rows of a batch give what the texts give alone."""

import pytest
import torch
from examples import TEXTS, relative
from torch import nn
import ssmscope
from ssmscope.interp.explain import explain
from ssmscope.layers.parts import BY_WEIGHT


class Pooled(nn.Module):
    """A head that makes something of every position that it is given."""

    def __init__(self, encoder: nn.Module, width: int):
        super().__init__()
        self.encoder, self.norm, self.out = encoder, nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, input_ids):
        hidden = self.encoder(input_ids).last_hidden_state
        return self.out(self.norm(hidden[:, -1]) + hidden.mean(1))


@pytest.fixture
def own(module):
    if module.base_model is module or getattr(module.config, "channels", None) is not None:
        pytest.skip("this architecture has no backbone of tokens apart from its head")
    if not BY_WEIGHT and module.config.model_type == "recurrent_gemma":
        pytest.skip("in release 4 its backbone keeps the states of a batch and fails on a next one of another size")
    torch.manual_seed(0)
    return Pooled(module.base_model, module.base_model.config.hidden_size).eval()


def test_logits_of_a_head_of_ones_own(own):
    model = ssmscope.load(own)
    with torch.no_grad():
        expected = torch.cat([own(torch.tensor([text])) for text in TEXTS])
    batch = model.encode(ids=TEXTS)
    assert relative(model.logits(batch), expected) < 1e-4
    with torch.no_grad(), model.running(mask=batch.mask):
        assert relative(model.forward_embeddings(model.embed(batch), batch.mask), expected) < 1e-4


def test_relevance_of_a_head_of_ones_own(own):
    if type(own.encoder).__name__ in ("Lfm2MoeModel", "Glm5NextTextModel", "Qwen4ExpTextModel"):
        pytest.skip("lrp refuses its experts, whose activation is not a module, or its several residual streams")
    model = ssmscope.load(own)
    for text in explain(model, model.encode(ids=TEXTS), methods=("lrp",), target=1).texts:
        assert text.attributions[0].delta < 1e-2 * max(1.0, abs(1 / text.value))
