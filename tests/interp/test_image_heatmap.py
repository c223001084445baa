"""The selection heatmap of images: maps next to the pixels, from Python and from the command line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from loud import loud
from matplotlib.text import Text
from seen import render
from transformers import Mamba2Config

import ssmscope
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

HEIGHT, WIDTH = 3, 4


@pytest.fixture(scope="module")
def model() -> ssmscope.Model:
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, state_size=4, num_heads=2, head_dim=8, n_groups=1, num_hidden_layers=2)
    backbone = Mamba2Config(vocab_size=1, **sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    config = SSMClassifierConfig(backbone, channels=3, image_size=(HEIGHT, WIDTH), num_labels=3)
    return ssmscope.load(loud(SSMForSequenceClassification(config)))


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, HEIGHT * WIDTH, 3)).astype(np.uint8)


@pytest.fixture
def heatmap(model, pixels):
    return ssmscope.heatmap(model.trace(values=pixels), top=3)


def pictures(figure):
    return [axes for axes in figure.axes if axes.images and axes.images[0].get_array().shape[:2] == (HEIGHT, WIDTH)]


def test_every_map_holds_its_scores_where_the_pixels_are(heatmap, pixels):
    first = pictures(heatmap.figure())[:4]  # image, mean, two layers
    shown = [np.asarray(axes.images[0].get_array()) for axes in first]
    np.testing.assert_allclose(shown[0], pixels[0].reshape(HEIGHT, WIDTH, 3) / 255, atol=1e-6)
    text = heatmap[0]
    rows = zip(shown[1:], (text.mean, *text.scores), (text.rationale, *text.standing), first[1:])
    for colours, scores, standing, axes in rows:
        scores = scores[:-1].reshape(HEIGHT, WIDTH)
        darkness = -colours.sum(-1)  # more is darker
        order = np.argsort(scores.ravel())
        assert (np.diff(darkness.ravel()[order]) >= -1e-6).all() and np.ptp(darkness) > 1
        framed = {(round(box.get_y() + 0.5), round(box.get_x() + 0.5)) for box in axes.patches}
        assert framed == {divmod(position, WIDTH) for position in standing}
    assert text.rationale and len(text.rationale) <= 3


def test_views_and_files(heatmap, tmp_path):
    assert "1,2" in heatmap.to_frame().token.tolist() and "[class]" in heatmap.to_frame().token.tolist()
    assert "survival of 2 images" in str(heatmap).lower() and "data:image/png;base64" in heatmap.to_html()
    paths = heatmap.save(tmp_path, "heatmap")
    again = ssmscope.Result.load(paths["json"])
    assert again == heatmap and again[1].pixels.shape == (HEIGHT, WIDTH, 3)
    assert len(pictures(again.figure(start=1))) == 4
    with pytest.raises(InputError, match="there is no text 2 to start the figure at; allowed are 0 to 1"):
        heatmap.figure(start=2)


def test_a_flat_map_is_drawn_on_its_own_range_and_says_so(heatmap):
    texts = tuple(replace(text, flat=(True, False, True), rationale=()) for text in heatmap)
    flat = replace(heatmap, texts=texts, score="retention")
    _, *maps = pictures(flat.figure())[:4]
    for axes, scores in zip(maps, (texts[0].mean, *texts[0].scores)):
        darkness = -np.asarray(axes.images[0].get_array()).sum(-1).ravel()
        assert (np.diff(darkness[np.argsort(scores[:-1])]) >= -1e-6).all() and np.ptp(darkness) > 1
    says = [" ".join(axes.get_xlabel().split("\n")) for axes in maps]
    assert ["hardly selects" in each for each in says] == [True, False, True] and all("–" in each for each in says)
    assert "images, mean of layers 0–1, which hardly selects" in flat.verdict()
    assert "“Hardly selects”" in " ".join(render(flat).split()) and "noise" not in render(flat)


def test_scales(model, pixels):
    """Maps have their own ranges, unless one scale is asked for."""
    trace = model.trace(values=pixels)
    assert not ssmscope.heatmap(trace).shared and ssmscope.heatmap(trace, scale="shared").shared


def test_of_many_images_and_of_one_layer(model, pixels):
    trace = model.trace(values=pixels[[0] * 10])
    figure = ssmscope.heatmap(trace, layers=[1]).figure()
    assert len(pictures(figure)) == 8 * 2
    assert any("0–7 of 10" in text.get_text() for text in figure.findobj(Text))


def test_pixels_of_unknown_shape_are_tokens(model, pixels):
    part = ssmscope.heatmap(model.trace(values=pixels[:, :5]))
    assert not part.of_images and part[0].tokens == ("0", "1", "2", "3", "4", "[class]")
    part.figure()
