"""The selection heatmap of images: maps next to the pixels, from Python and from the command line."""

import json

import numpy as np
import pytest
import torch
from loud import loud
from PIL import Image
from transformers import Mamba2Config
import ssmscope
from ssmscope import cli
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.render.pictures import PHOTO

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


heatmap = pytest.fixture(lambda model, pixels: ssmscope.heatmap(model.trace(values=pixels), top=3))


def pictures(figure):
    return [axes for axes in figure.axes if axes.images and axes.images[0].get_array().shape[:2] == (HEIGHT, WIDTH)]


def test_every_map_holds_its_scores_where_the_pixels_are(heatmap, pixels):
    figure = heatmap.figure()
    first = pictures(figure)[:4]  # image, mean, two layers
    assert [axes.get_gid() for axes in figure.axes].count(PHOTO) == len(heatmap)
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


def test_pixels_of_unknown_shape_are_tokens(model, pixels):
    part = ssmscope.heatmap(model.trace(values=pixels[:, :5]))
    assert not part.of_images and part[0].tokens == ("0", "1", "2", "3", "4", "[class]")
    part.figure()


class TestCommand:
    @pytest.fixture
    def folder(self, model, pixels, tmp_path):
        model.module.save_pretrained(tmp_path / "model")
        for number, image in enumerate(pixels):
            Image.fromarray(image.reshape(HEIGHT, WIDTH, 3)).save(tmp_path / f"{number}.png")
        Image.new("RGB", (WIDTH, WIDTH)).save(tmp_path / "square.png")
        return tmp_path

    def test_is_what_python_gives(self, folder, model, pixels, capsys):
        files = [part for number in (0, 1) for part in ("--image", str(folder / f"{number}.png"))]
        assert cli.run(["heatmap", str(folder / "model"), *files, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        expected = json.loads(ssmscope.heatmap(model.trace(values=pixels)).to_json())
        assert found["texts"] == expected["texts"]

    @pytest.mark.parametrize(("arguments", "says"), [
        (["--image", "square.png"], "square.png is 4 × 4 pixels; the model reads 4 × 3: resize it first"),
        (["--image", "absent.png"], "cannot read the image"),
        (["--image", "model/config.json"], "cannot be decoded"),
        (["--image", "0.png", "--text", "a"], "--image cannot be combined with --text, --file or --ids"),
        (["--text", "a film"], "reads pixels (4 × 3 of 3 channels), not texts: give it images, --image"),
        (["--ids", "0"], "give it images, --image"),
        ([], "--image for one of pixels"),
    ])  # fmt: skip
    def test_refuses(self, folder, capsys, monkeypatch, arguments, says):
        monkeypatch.chdir(folder)
        assert cli.run(["heatmap", "model", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and says in err

    def test_a_model_of_texts_refuses_an_image(self, folder, capsys):
        assert cli.run(["heatmap", "demo/sst2-mamba", "--image", str(folder / "0.png")]) == 2
        assert "reads tokens, not pixels: give --text" in capsys.readouterr().err
