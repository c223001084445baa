"""MambaVision: its published code's checkpoints, against a slow reference of the whole model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import matrices, relative
from loud import TrueFloat64
from mambavision_reference import (
    ACROSS,
    CLASSES,
    DEPTHS,
    HEADS,
    POSITIONS,
    SIDE,
    WIDTH,
    around,
    below,
    layer_normed,
    mixed,
    reference,
    stored,
    widened,
    written,
)
from PIL import Image
from refusals import refuses
from torch import Tensor
import ssmscope
from ssmscope import ops
from ssmscope.api.inputs import TEXTS, Texts
from ssmscope.core.attention_layers import attention_layers, attention_modules
from ssmscope.core.cuts import cut_attention
from ssmscope.core.edits import block_parts, new_state
from ssmscope.core.intercept import override_forward
from ssmscope.core.mixers import adapter_for
from ssmscope.core.trace import LayerState
from ssmscope.data.pixels import PixelData
from ssmscope.errors import InputError
from ssmscope.interp.methods.lrp import lrp, propagated, through_layer
from ssmscope.interp.objective import objective
from ssmscope.layers import mambavision
from ssmscope.layers.mambavision import MambaVisionConfig
from ssmscope.loading import mambavision_checkpoints
from ssmscope.loading.mambavision_checkpoints import Form
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.reports.sources import kind_of

NO_TEXTS = {**dict.fromkeys(TEXTS), "max_tokens": 2000}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ssmscope.load(written(tmp_path_factory.mktemp("hub") / "vision", stored()), dtype="float64")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8)


batch = pytest.fixture(scope="module")(lambda model, pixels: model.encode(values=pixels.reshape(2, -1, 3)))


@pytest.mark.parametrize("scaled", [True, False], ids=["with γ", "without γ"])
def test_logits_are_the_references(scaled, pixels, tmp_path):
    weights = stored(scaled)
    model = ssmscope.load(written(tmp_path, weights), dtype="float64")
    assert model.num_layers == 2 and model.layer_numbers == (0, 1) and model.config.image_size == [ACROSS, ACROSS]
    assert model.labels == [f"class {at}" for at in range(CLASSES)] and model.architecture == "ssm-mambavision"
    batch = model.encode(values=pixels[0].reshape(-1, 3))
    Image.fromarray(pixels[0]).save(tmp_path / "image.png")
    by_name = Texts().read({**NO_TEXTS, "image": [str(tmp_path / "image.png")]}, {}, [model])
    assert torch.equal(by_name.values, batch.values)
    assert batch.lengths == [ACROSS**2] and batch.tokens[0][-1] == "3,3" and batch.words[0][-1] == ACROSS**2 - 1
    expected, embedded = reference(weights, torch.from_numpy(pixels[0]).double() / 255)
    with TrueFloat64():
        assert relative(model.embed(batch)[0], embedded) < 1e-6
        assert relative(model.logits(batch)[0], expected) < 1e-6  # 1/255 and the colours' means are in float32
    with torch.no_grad():  # the model's own pass
        assert relative(model.module(input_values=batch.values).logits[0], expected) < 1e-6


@pytest.mark.parametrize("prefix", ["", "module.", "encoder.", "module.model."])
def test_a_file_of_a_published_model(prefix, model, batch, tmp_path, monkeypatch):
    """The prefixes of modules around the model are left out, and counters of batches need not be there."""
    form = Form(HEADS[2], HEADS[3], ACROSS)
    monkeypatch.setattr(mambavision_checkpoints, "PUBLISHED", {(WIDTH, *DEPTHS[2:]): form})
    file, weights = tmp_path / "mambavision_small_1k.pth.tar", stored()
    kept = {prefix + name: t for name, t in weights.items() if not prefix or "num_batches" not in name}
    torch.save({"epoch": 3, "state_dict": kept, "arch": "mamba_vision"}, file)
    assert torch.equal(ssmscope.load(file, dtype="float64").logits(batch), model.logits(batch))
    monkeypatch.undo()
    refuses("3 and 2 blocks of width 32 in stages 3 and 4, as none .*: give the hub's dir", ssmscope.load, file)


def test_published_models_share_their_widths():
    """Heads have 40, 48, 64 or 49 channels, in stage 4 as in stage 3."""
    for (width, _, _), form in mambavision_checkpoints.PUBLISHED.items():
        assert width // form.heads == 2 * width // form.last_heads in (40, 48, 64, 49) and form.across == 14


def test_every_mixer_is_a_linear_map_of_its_input(model, batch):
    trace, weights = model.trace(batch), {name: t.double() for name, t in stored().items()}
    assert trace.bidirectional and len(trace.layers) == 2
    for index, mixer in enumerate(model.mixers):
        layer, linearized = trace.layers[index], trace.linearized[index]
        with torch.no_grad():
            own = mixer(layer.u)
        expected = torch.stack([mixed(u, below(weights, f"levels.2.blocks.{index}.mixer.")) for u in layer.u])
        assert relative(own, expected) < 1e-10
        assert relative(linearized.matvec(linearized.u) + linearized.bias, own) < 1e-10
        assert relative(adapter_for(mixer).output(mixer, layer), own) < 1e-10
        assert linearized.rest is not None and relative(linearized.rest, own) > 0.1  # z is no gate
        whole = linearized.rest_map(layer.u, layer.u, True)
        assert relative(whole, linearized.rest) < 1e-12


def test_maps_act_on_convolved_values(model, batch):
    """The block's matrices times the convolution's output are the scan's output."""
    trace = model.trace(batch)
    for layer, linearized in zip(trace.layers, trace.linearized):
        (scanned,), (path,) = layer.scan(), linearized.paths
        assert torch.equal(path.input_map.source, layer.extras["convolved"])
        found = matrices(path, "block") @ path.input_map.source.mT.unsqueeze(-1)
        assert relative(found.squeeze(-1).mT, scanned.y.squeeze(-1)) < 1e-10


@pytest.fixture(scope="module")
def attention(model, batch) -> Tensor:
    """Weights (heads, queries, keys) of the attention in stage 3 on the first picture, by the reference's blocks."""
    w = {name: t.double() for name, t in stored().items()}
    stream = model.embed(batch)[0].detach()
    for number in range(2):
        own = below(w, f"levels.2.blocks.{number}.")
        stream = stream + own["gamma_1"] * mixed(layer_normed(stream, own, "norm1"), below(own, "mixer."))
        stream = stream + own["gamma_2"] * widened(layer_normed(stream, own, "norm2"), own)
    own = below(w, "levels.2.blocks.2.")
    u = layer_normed(stream, own, "norm1")
    q, k, _ = (u @ own["mixer.qkv.weight"].T + own["mixer.qkv.bias"]).chunk(3, dim=-1)
    size = WIDTH // HEADS[2]
    return torch.stack([(a @ b.T / size**0.5).softmax(-1) for a, b in zip(q.split(size, 1), k.split(size, 1))])


def test_attention_of_stage_3_alone_is_shown(model, batch, attention):
    """Stage 4 is part of the head: neither its mixers nor its attention are among the layers."""
    assert [*attention_modules(model.module)] == ["backbone.layers.2.mixer"] == [*attention_layers(model.module)]
    assert [*block_parts(model.module, "feed-forward")] == [f"backbone.layers.{number}.mlp" for number in range(3)]
    shown = ssmscope.attention(model, batch, heads="all")
    maps = [map_ for map_ in shown[0].maps if map_.layer == "2 attention"]
    assert np.allclose([map_.values for map_ in maps], attention.numpy(), atol=1e-5)
    later = np.triu(np.ones((POSITIONS, POSITIONS), dtype=bool), 1)
    assert attention.numpy()[:, later].sum() > 0.2 * len(attention) * POSITIONS  # Later positions are read.
    assert shown[0].bidirectional and "maps of layers that read both ways" in shown.verdict()


def test_rollout_is_of_every_position_that_the_answer_reads(model, batch):
    """Pictures have no class token: scores are the mean row of the rollout, not the last patch's."""
    (found, _) = ssmscope.explain(model, batch, methods=["attention-rollout"]).texts
    whole = ssmscope.attention(model, batch, rollout=True, rows="all")[0].maps[0].values
    assert np.allclose(found.attributions[0].scores, whole.mean(0), atol=1e-6)
    assert not np.allclose(whole.mean(0), whole[-1], atol=1e-2)


def test_relevance_adds_up_through_stage_4(model, batch):
    """Positions and constants together have the logit; stage 4 has rules of its own."""
    asked = objective(model, batch, target=2)
    with TrueFloat64():
        found, constants, logits = lrp(asked), propagated(asked)[1], model.logits(batch)[:, 2]
    assert found.delta is not None and float(found.delta.max()) < 1e-10
    assert relative(found.scores.sum(1) + constants, logits) < 1e-10 and relative(found.scores.sum(1), logits) > 1e-3


def test_relevance_does_not_pass_a_watched_mixer_of_stage_4(model, batch):
    hook = model.module.head.blocks[0].mixer.x_proj.register_forward_hook(lambda part, args, output: 2 * output)
    try:
        with pytest.raises(InputError, match="LastMixing: hooks, or a forward pass, put on x_proj may make it compute"):
            lrp(objective(model, batch, target=2))
    finally:
        hook.remove()


def test_relevance_of_a_mixer_goes_through_both_halves(model, batch):
    """Relevance is the derivative of the published formula, W_O [scan(x), z], with Δ, B, C and both SiLU held."""
    layer, linearized, mixer = model.trace(batch).layers[0], model.trace(batch).linearized[0], model.mixers[0]
    weight = {name: t.double() for name, t in below(stored(), "levels.2.blocks.0.mixer.").items()}
    w, inner = torch.randn_like(layer.u), WIDTH // 2
    u, one = layer.u.detach().clone().requires_grad_(), torch.ones(2).double()
    with torch.enable_grad():
        halves = (u @ weight["in_proj.weight"].T).split(inner, -1)
        convolved = [
            torch.stack([around(row, weight[f"conv1d_{name}.weight"]) for row in half])
            for half, name in zip(halves, "xz")
        ]
        held = [half * torch.sigmoid(half.detach()) for half in convolved]
        y = ops.scan_reference(replace(layer.recurrence, x=held[0].unsqueeze(-1))).y.squeeze(-1)
        out = torch.cat([y, held[1]], dim=-1) @ weight["out_proj.weight"].T
        (expected,) = torch.autograd.grad((out * w).sum(), u)
        (found,) = torch.autograd.grad((through_layer(linearized, u, one, True) * w).sum(), u)
    assert relative(found, expected) < 1e-10 and relative(mixer(layer.u).detach(), out.detach()) < 1e-10


def test_occlusion_replaces_the_embedding_of_a_patch(model, batch):
    """Embeddings are those of stage 3: other patches keep theirs, which saw the patch's pixels."""
    (found, _) = ssmscope.explain(model, batch, methods=["occlusion"], target=1).texts
    embeddings, grey = model.embed(batch)[:1].detach(), model.embed(replace(batch, values=0 * batch.values + 0.5))[:1]
    mask = batch.mask[:1]
    with torch.no_grad(), model.running(mask=mask):
        plain = model.forward_embeddings(embeddings, mask)[0, 1]
        for at in (0, 5, POSITIONS - 1):
            without = embeddings.clone()
            without[:, at] = grey[:, at].detach()
            change = plain - model.forward_embeddings(without, mask)[0, 1]
            assert found.attributions[0].scores[at] == pytest.approx(float(change), rel=1e-4)


def test_cut_attention_reads_neither_way(model, batch):
    """Edges to an earlier and to a later patch are cut: the weights left are divided by their sum."""
    sources = torch.zeros_like(batch.mask)
    targets = sources.clone()
    sources[:, [2, 9]] = targets[:, [4, 6]] = True
    with TrueFloat64():
        plain, found = model.logits(batch), model.run(batch, edits=cut_attention(sources, targets)).logits
        part = model.module.backbone.layers[2].mixer

        def without(below, x, unread, *others):
            cut = unread.masked_fill((targets[:, :, None] & sources[:, None])[:, None], torch.finfo(x.dtype).min)
            return below(x, cut, *others)

        with override_forward([(part, without)]):
            expected = model.logits(batch)
    assert relative(expected, plain) > 1e-5 and relative(found, expected) < 1e-9


def test_what_can_be_asked(model, batch, pixels, tmp_path):
    explained = ssmscope.explain(model, batch, methods=["gradxinput", "lrp", "survival", "attention-gradient"])
    assert explained.to_frame().groupby("method").size().eq(2 * POSITIONS).all()
    explained.save(tmp_path, "explained")
    heatmap = ssmscope.heatmap(model, batch)
    assert heatmap.to_frame().notna().any().any()
    heatmap.save(tmp_path, "heatmap")
    images = model.images_of(batch)
    assert images is not None and images.shape == (2, ACROSS, ACROSS, 3)  # A patch is its mean colour.
    corner = torch.from_numpy(pixels[1, :16, 16:32].mean((0, 1)) / 255)
    torch.testing.assert_close(images[1, 0, 1], corner, rtol=1e-5, atol=1e-5)
    cut = ssmscope.knockout(model, model.encode(values=batch.values[:1]), from_=["3"], to="7")
    assert cut.to_frame()["change"].abs().max() > 0
    model.module.save_pretrained(tmp_path / "again")
    again = ssmscope.load(tmp_path / "again", dtype="float64")
    assert torch.equal(again.logits(batch), model.logits(batch))


def test_a_plan_knows_that_a_file_classifies_pictures(tmp_path):
    file = tmp_path / "vision.pth.tar"
    torch.save({"model": {f"encoder.{name}": t for name, t in stored().items()}}, file)
    assert kind_of(file) == kind_of(written(tmp_path / "vision", stored())) == "pixel-classifier"


def test_what_cannot_be_asked_is_one_line(model, batch, pixels):
    shown = PixelData("pictures", "test", pixels.reshape(2, -1, 3), np.arange(2), tuple(model.labels), (SIDE, SIDE))
    assert ssmscope.evaluate(model, shown).to_frame()["examples"].eq(2).all()
    for words, asked in {
        "both ways, and a state after a token needs": lambda: model.run(batch, edits=new_state(3, lambda s, site: s)),
        "has no head that is one linear map": lambda: ssmscope.lens_show(model, batch),
        "read their input both ways, and stability needs": lambda: ssmscope.stability(model, batch),
        "read their input both ways, and influence needs": lambda: ssmscope.influence(model, batch),
        "reads patches; the position-bias attack replaces single pixels": lambda: ssmscope.position(model, shown),
        "cannot continue from its states": lambda: model.run(batch, model.run(batch).states),
        "15 patches were given; the model reads 4 × 4": lambda: model.logits(model.encode(values=torch.rand(15, 768))),
        r"patches \(2, 16, 3\) were given": lambda: model.encode(values=torch.rand(2, 16, 3)),
        r"has 16 tokens, more than the limit of 15 \(a token is a patch\)": lambda: model.encode(
            values=batch.values, max_tokens=15
        ),
    }.items():
        refuses(words, asked)
    assert model.encode(values=batch.values, max_tokens=16).lengths == [16, 16]


@pytest.mark.parametrize("change, words", [
    ({"head.weight": None}, "is not a MambaVision that can be read: it lacks head.weight"),
    ({"head.weight": torch.zeros(0, 64)}, r"its head.weight is \(0, 64\)"),
    ({"levels.2.blocks.0.mixer.A_log": torch.zeros(3)}, r"its levels.2.blocks.0.mixer.A_log is \(3,\)"),
    ({"levels.2.blocks.1.mixer.D": None}, "they lack backbone.layers.1.mixer.D"),
    ({"levels.3.blocks.0.mixer.D": torch.zeros(3)}, "head.blocks.0.mixer.D is 3"),
    ({"levels.0.blocks.0.gamma": torch.zeros(8)}, "no place for embed.stages.0.0.gamma"),
    ({"levels.2.blocks.2.mixer.in_proj.bias": None, "rpb": torch.zeros(3)}, "no place for rpb"),
])  # fmt: skip
def test_weights_that_cannot_be_read_are_named(change, words, tmp_path):
    weights = {name: t for name, t in {**stored(), **change}.items() if t is not None}
    refuses(words, ssmscope.load, written(tmp_path, weights))


@pytest.mark.parametrize("config, words", [
    ({"num_heads": None}, "num_heads is null; allowed is a number for each of the four stages"),
    ({"num_heads": [1, 2, 4]}, "num_heads is .*; allowed is a number for each"),
    ({"num_heads": [1, 2, 5, 8]}, "num_heads is .*; allowed is heads that share the width, 32 in stage 3"),
    ({"window_size": [8, 8, 4, 4]}, "window_size is .*; allowed is windows of stages 3 and 4 that cover the pic"),
    ({"window_size": [8, 8, 3, 1]}, "window_size is "),
    ({"resolution": 128}, "resolution is 128; allowed is 64, which its windows cover"),
    ({"depths": [1, 2, 4, 2]}, r"depths is \[1, 2, 4, 2\]; allowed is \[1, 2, 3, 2\], as the weights have"),
    ({"depths": ["1"]}, "depths is "),
])  # fmt: skip
def test_fields_that_cannot_be_read_are_named(config, words, tmp_path):
    refuses(words, ssmscope.load, written(tmp_path, stored(), config))


@pytest.mark.parametrize("fields, words", [
    (dict(hidden_size=30, num_attention_heads=5, last_heads=5), "hidden_size 30 is not a multiple of 4"),
    (dict(hidden_size=33), "hidden_size 33 must be even and a multiple of 8 heads"),
    (dict(early_layers=(1, 0)), r"early_layers is \(1, 0\); allowed are two numbers of blocks, 1 or more"),
    (dict(last_heads=0), "last_heads 0 must be an integer, 1 or more"),
])  # fmt: skip
def test_sizes_that_no_model_has(fields, words):
    form = dict(channels=768, image_size=(4, 4), patch=(16, 16))

    def make() -> None:
        SSMForSequenceClassification(SSMClassifierConfig(backbone=MambaVisionConfig(**fields), **form))

    refuses(words, make)
    for changed in (dict(channels=3, patch=None), dict(image_size=(5, 4)), dict(channels=48, patch=(4, 4))):
        with pytest.raises(InputError, match="a MambaVision reads patches of 16 × 16 pixels of 3 colours, an even num"):
            SSMForSequenceClassification(SSMClassifierConfig(backbone=MambaVisionConfig(), **{**form, **changed}))


def test_no_run_continues_from_states(model):
    with pytest.raises(InputError, match="MambaVision reads whole images: no run continues from its states"):
        mambavision.compute_terms(model.mixers[0], torch.zeros(1, 4, WIDTH).double(), None, LayerState(None, ()))
