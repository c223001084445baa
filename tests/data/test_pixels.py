"""Images as pixels: their order, their sources, and what is refused."""

import io
import sys

import numpy as np
import pytest
from PIL import Image
from refusals import refuses
from written_rows import write_rows
from ssmscope.data.pixels import decoded, digits, load_pixels, read_images
from ssmscope.errors import InputError

RASTER = np.arange(3 * 4 * 3, dtype=np.uint8).reshape(3, 4, 3) * 5


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="png")
    return buffer.getvalue()


def test_tokens_are_in_raster_order_and_images_in_theirs():
    pixels, shape = decoded([png(RASTER), png(255 - RASTER)], "RGB", "here")
    assert shape == (3, 4) and pixels.shape == (2, 12, 3) and pixels.dtype == np.uint8
    assert pixels[0, 0].tolist() == [0, 5, 10] and pixels[0, 1].tolist() == [15, 20, 25]
    assert (pixels[0, 4] == RASTER[1, 0]).all() and (pixels[1] == 255 - pixels[0]).all()
    images = [png(np.full((2, 2, 3), number % 251, np.uint8)) for number in range(600)]
    pixels, _ = decoded(images, "RGB", "here")
    assert (pixels[:, 0, 0] == np.arange(600) % 251).all()


def test_one_size_only_and_only_images(monkeypatch):
    with pytest.raises(InputError, match="image 2 of here is 4 × 3 pixels, the first 3 × 4"):
        decoded([png(RASTER.transpose(1, 0, 2)), png(RASTER)], "RGB", "here")
    refuses("an image of here cannot be decoded", decoded, [b"no image"], "RGB", "here")
    refuses("here cannot be decoded: it is not an image that Pillow can read", decoded, [b""], "RGB", "here")
    refuses("here holds no image", decoded, [], "RGB", "here")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    said = "an image of here cannot be decoded: Image size .12 pixels. exceeds limit"
    refuses(said, decoded, [png(RASTER)], "RGB", "here")


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_deep_greys_are_refused(mode):
    """Pillow would give 255 for every grey above 255 of 65535."""
    deep = png(np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4))
    refuses("an image of here has more than 8 bits a channel .mode I.*: save it with 8", decoded, [deep], mode, "here")


def write(folder, rows):
    write_rows(folder / "cifar10" / "test.parquet", rows)


@pytest.mark.parametrize("column", ["img", "image"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_parquet_file_in_either_layout(tmp_path, monkeypatch, column, wrapped):
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    image = {"bytes": png(RASTER), "path": None} if wrapped else png(RASTER)
    write(tmp_path, [{column: image, "label": 3}, {column: image, "label": 9}])
    data = load_pixels("cifar10")
    assert data.labels.tolist() == [3, 9] and data.label_names[3] == "cat" and data.shape == (3, 4)
    assert (data.pixels[1].reshape(3, 4, 3) == RASTER).all()
    assert data.channels == 3 and len(data) == 2 and len(data.take([1])) == 1 and len(data.fingerprint) == 16


def test_the_hub_gives_opened_images(monkeypatch):
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    rows = [{"img": Image.fromarray(RASTER), "label": 2}]
    given = {"train": rows}
    monkeypatch.setattr("ssmscope.data.text.hub_rows", lambda name, _, split, advice: (given.get(split, []), None))
    data = load_pixels("cifar10", "train")
    assert (data.pixels[0].reshape(3, 4, 3) == RASTER).all() and data.split == "train" and data.labels.tolist() == [2]


def test_damaged_rows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    refuses("cifar10 has no split 'test' in .*; it holds no parquet file", load_pixels, "cifar10")
    good = {"img": png(RASTER), "label": 3}
    for bad, says in (
        ({**good, "label": 10}, "row 2 of .* has the label '10'; allowed are 0 .airplane"),
        ({**good, "img": None}, "row 2 of .* has an empty img"),
        ({**good, "img": b"x"}, "cannot be decoded"),
    ):
        write(tmp_path, [good, bad])
        refuses(says, load_pixels, "cifar10")
    write(tmp_path, [{"picture": png(RASTER), "label": 3}])
    refuses("has no column 'img' or 'image'; its columns are picture, label", load_pixels, "cifar10")
    (tmp_path / "cifar10" / "test.parquet").write_bytes(b"no parquet")
    refuses("could not be read as parquet", load_pixels, "cifar10")


def test_names_and_splits():
    refuses("unknown images 'cifar'; give one of cifar10, digits; did you mean 'cifar10'", load_pixels, "cifar")
    refuses("no split 'tset'; there are train, test; did you mean 'test'", load_pixels, "digits", "tset")


def test_cifar10(real_data):
    real_data("cifar10", "test")
    data = load_pixels("cifar10")
    assert data.pixels.shape == (10_000, 1024, 3) and data.shape == (32, 32)
    assert np.bincount(data.labels).tolist() == [1000] * 10
    ship, cat = data.pixels[data.labels == 8].mean((0, 1)), data.pixels[data.labels == 3].mean((0, 1))
    assert ship[2] > ship[0] and cat[0] > cat[2]  # ships are on the blue sea, cats are not: channels are R, G, B


class TestDigits:
    @pytest.fixture(autouse=True)
    def needs_sklearn(self):
        pytest.importorskip("sklearn")

    def test_are_those_of_scikit_learn(self):
        from sklearn.datasets import load_digits

        train, test = digits()
        bunch = load_digits()
        assert len(train) + len(test) == 1797 and len(test) == 359 and train.shape == (8, 8)
        assert train.pixels.shape == (1438, 64, 1) and set(np.unique(train.pixels)) <= set(range(256))
        scaled = {tuple(np.rint(row * 255 / 16).astype(int)) for row in bunch.data}
        ours = {tuple(row) for part in (train, test) for row in part.pixels[:, :, 0]}
        assert ours == scaled and len(ours) == 1797  # every image is in exactly one part
        assert (load_pixels("digits").pixels == test.pixels).all()
        assert (load_pixels("digits", "train").labels == train.labels).all()

    def test_the_seed_draws_the_parts(self):
        assert digits(seed=1)[1].fingerprint == digits(seed=1)[1].fingerprint != digits(seed=2)[1].fingerprint
        refuses("a test share of 0 of 1797 examples leaves one of two parts empty", digits, test=0)

    def test_without_scikit_learn(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        refuses("pip install scikit-learn", digits)


def test_image_files(tmp_path):
    (tmp_path / "a.png").write_bytes(png(RASTER))
    (tmp_path / "b.png").write_bytes(png(255 - RASTER))
    (tmp_path / "turned.png").write_bytes(png(RASTER.transpose(1, 0, 2)))
    both = read_images([tmp_path / "a.png", tmp_path / "b.png"], 3, [3, 4])
    assert (both[0].reshape(3, 4, 3) == RASTER).all() and (both[1] == 255 - both[0]).all()
    assert read_images([tmp_path / "a.png"], 1).shape == (1, 12, 1)
    with pytest.raises(InputError, match=r"a.png is 4 × 3 pixels; the model reads 32 × 32: resize it first"):
        read_images([tmp_path / "a.png"], 3, (32, 32))
    with pytest.raises(InputError, match=r"turned.png is 3 × 4 pixels; the model reads 4 × 3"):
        read_images([tmp_path / "a.png", tmp_path / "turned.png"], 3)
    refuses("has 1 or 3 channels, the model reads 2", read_images, [tmp_path / "a.png"], 2)
    refuses("cannot read the image", read_images, [tmp_path / "absent.png"], 3)
    (tmp_path / "c.png").write_text("no image")
    refuses("c.png cannot be decoded", read_images, [tmp_path / "c.png"], 3)


def test_images_are_turned_as_people_see_them(tmp_path, monkeypatch):
    """EXIF's orientations 1 to 8, of PNG, TIFF and WEBP files and of what `datasets` opens."""
    turned = [RASTER, RASTER[:, ::-1], RASTER[::-1, ::-1], RASTER[::-1], RASTER.swapaxes(0, 1), np.rot90(RASTER, -1)]
    for orientation, seen in enumerate([*turned, np.rot90(RASTER, 2).swapaxes(0, 1), np.rot90(RASTER)], 1):
        exif = Image.Exif()
        exif[274] = orientation
        for kind in ("png", "tiff", "webp"):
            place = tmp_path / f"{orientation}.{kind}"
            Image.fromarray(RASTER).save(place, exif=exif, **{"lossless": True} if kind == "webp" else {})
            found = read_images([place], 3, seen.shape[:2])
            assert (found[0].reshape(seen.shape) == seen).all(), (kind, orientation)
            opened, shape = decoded([Image.open(place)], "RGB", "here")
            assert shape == seen.shape[:2] and (opened == found).all()
            if seen.shape != RASTER.shape:
                refuses("is 3 × 4 pixels; the model reads 4 × 3", read_images, [place], 3, (3, 4))
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    write(tmp_path, [{"img": (tmp_path / "3.png").read_bytes(), "label": 3}])
    assert (load_pixels("cifar10").pixels[0].reshape(3, 4, 3) == turned[2]).all()


def test_transparent_images_are_refused(tmp_path):
    """Their colours depend on a background that no model knows; opaque ones keep theirs."""
    opaque = np.dstack([RASTER, np.full(RASTER.shape[:2], 255, np.uint8)])
    assert (decoded([png(opaque)], "RGB", "here")[0][0].reshape(3, 4, 3) == RASTER).all()
    opaque[1, 1, 3] = 254
    one = Image.fromarray(opaque)
    keyed, palette = Image.fromarray(RASTER), Image.fromarray(RASTER).quantize(8)
    keyed.info["transparency"], palette.info["transparency"] = (0, 5, 10), 0
    for number, image in enumerate((one, one.convert("LA"), keyed, palette)):
        image.save(tmp_path / f"{number}.png")
        for channels in (1, 3):
            with pytest.raises(InputError, match=f"{number}.png is transparent in places: save it on a background"):
                read_images([tmp_path / f"{number}.png"], channels)
