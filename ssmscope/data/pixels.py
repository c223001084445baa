"""Images as sequences of pixels for sequence models (Long Range Arena, Tay et al. 2020)."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ssmscope.data.hub import is_hub_id
from ssmscope.data.rows import Row, check_split, checked_class_id, checked_path, first_line
from ssmscope.data.text import SOURCES, Source, TextData, known_rows, load_text
from ssmscope.data.tokens import ArrayData
from ssmscope.errors import InputError, did_you_mean

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Formats that Pillow reads by itself; for others, such as PostScript, it runs other programs."""
MAX_PIXELS = 2**24
"""Maximum number of pixels, and so of tokens, of an image."""
DECODING_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error),
    *(IndexError, KeyError, TypeError, OverflowError),
)
"""Errors that Pillow's readers raise for damaged images."""

KNOWN = ("cifar10", "digits")
LABELLED = (*KNOWN, *SOURCES)
"""Names that `load_pixels` and `load_labelled` know."""

CIFAR10 = Source(
    "uoft-cs/cifar10",
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ("train", "test"),
    columns=("img", "image"),
)


@dataclass(frozen=True, eq=False)
class PixelData(ArrayData):
    """Images with their class ids `labels` (examples,), one token per pixel: row by row, from the top left. `pixels`
    are (examples, height · width, channels) uint8, of which a model reads 1 / 255, and `shape` is (height, width); of
    series they are floats, which are read as they are, and `shape` is (1, length)."""

    pixels: np.ndarray
    labels: np.ndarray
    label_names: tuple[str, ...]
    shape: tuple[int, int]

    @property
    def channels(self) -> int:
        return self.pixels.shape[2]

    @property
    def largest(self) -> float:
        """The number that stands for 1."""
        return 255 if self.pixels.dtype == np.uint8 else 1


def load_pixels(data: str, split: str | None = None) -> PixelData:
    """Load one split of a known data set of images, `train` or `test` (default).

    `cifar10` (32 × 32 RGB, 1024 tokens of 3 channels; 50,000 and 10,000 images) is read from
    `$SSMSCOPE_DATA/cifar10/<split>.parquet` when that variable is set, else through `datasets` from the hub. `digits`
    (8 × 8 grey, 64 tokens of 1 channel) is the function `digits` with seed 0.
    """
    if data not in KNOWN:
        raise InputError(f"unknown images {data!r}; give one of {', '.join(KNOWN)}{did_you_mean(str(data), KNOWN)}")
    split = split or "test"
    check_split(data, split, CIFAR10.splits)
    if data == "digits":
        train, test = digits()
        return train if split == "train" else test
    rows = known_rows(data, CIFAR10, split)
    labels = [checked_class_id(row, CIFAR10.labels) for row in rows]
    pixels, shape = decoded(list(map(_image_of, rows)), "RGB", str(rows[0].place) if rows else f"{data} ({split})")
    return PixelData(data, split, pixels, np.array(labels, dtype=np.int64), CIFAR10.labels, shape)


def load_labelled(
    data: Any, split: str | None = None, *, label_names: Sequence[str] | None = None
) -> PixelData | TextData:
    """Load labelled examples for a classifier: images (`load_pixels`), or texts of a data set, a file or a table
    (`load_text`)."""
    if isinstance(data, str) and data in KNOWN:
        return load_pixels(data, split)
    if isinstance(data, str | os.PathLike) and str(data) not in SOURCES and not is_hub_id(data):
        checked_path(Path(data), LABELLED)
    return load_text(data, split, label_names=label_names)


def digits(*, seed: int = 0, test: float = 0.2) -> tuple[PixelData, PixelData]:
    """Load a training and a test part of scikit-learn's 1797 handwritten digits (UCI, test part), 8 × 8 grey pixels.

    A grey value g from 0 to 16 becomes round(255 g / 16), halves to the even neighbour. A share `test` of the images,
    drawn with `seed`, is the test part; the rest is the training part. Raise InputError without scikit-learn, or for
    a share that leaves a part empty.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise InputError(
            "the digits come with the package scikit-learn, which is not installed; pip install scikit-learn"
        ) from error
    bunch = load_digits()
    pixels = np.rint(np.asarray(bunch.data) * (255 / 16)).astype(np.uint8)[:, :, None]
    labels = np.asarray(bunch.target, dtype=np.int64)
    everything = PixelData("digits", "all", pixels, labels, tuple("0123456789"), (8, 8))
    return everything.divide(test, seed=seed, what="a test share of", splits=("train", "test"))


def read_images(
    files: Sequence[str | os.PathLike[str]], channels: int, shape: Sequence[int] | None = None
) -> np.ndarray:
    """Read image files as tokens (files, height · width, channels) uint8, in RGB for 3 channels and in grey for 1.
    Images are turned as their EXIF orientation says, and none is resized. Raise InputError if a file cannot be read, is
    not an image, is transparent anywhere, has more than 8 bits per channel, or another size than `shape` (height,
    width), by default that of the first."""
    modes, found = {1: "L", 3: "RGB"}, []
    if channels not in modes:
        raise InputError(f"an image file has 1 or 3 channels, the model reads {channels}: give it arrays from Python")
    for file in files:
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise InputError(f"cannot read the image {os.fspath(file)}: {error.strerror or error}") from error
        pixels, shape = decoded([content], modes[channels], os.fspath(file), shape)
        found.append(pixels[0])
    return np.stack(found)


def decoded(
    images: Sequence[Any], mode: str, place: str, shape: Sequence[int] | None = None
) -> tuple[np.ndarray, tuple[int, int]]:
    """Decode images (PNG or JPEG bytes, or PIL images) to tokens (n, height · width, channels) uint8, and return their
    size (height, width), both as the EXIF orientation turns them. Raise InputError if there is no image, or one cannot
    be decoded, is transparent anywhere, has more than 8 bits per channel or more than `MAX_PIXELS` pixels, or another
    size than `shape` or the first."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not images:
        raise InputError(f"{place} holds no image")

    def open_image(image: Any) -> np.ndarray:
        opened = Image.open(io.BytesIO(image), formats=FORMATS) if isinstance(image, bytes) else image
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise InputError(f"an image of {place} has {width} × {height} pixels; allowed are up to {MAX_PIXELS:,}")
        opened = ImageOps.exif_transpose(opened)
        width, height = opened.size
        if shape is not None and (height, width) != tuple(shape):
            needed = f"the model reads {shape[1]} × {shape[0]}: resize it first"
            raise InputError(f"the image {place} is {width} × {height} pixels; {needed}")
        if opened.mode.startswith(("I", "F")):  # Pillow would clip these at 255.
            raise InputError(f"an image of {place} has more than 8 bits a channel (mode {opened.mode}): save it with 8")
        if opened.mode.endswith(("A", "a")) or "transparency" in opened.info:
            # The colour of what is transparent depends on a background.
            if opened.convert("RGBA").getchannel("A").getextrema() != (255, 255):
                raise InputError(f"an image of {place} is transparent in places: save it on a background of one colour")
        return np.asarray(opened.convert(mode), dtype=np.uint8)

    try:
        # Pillow decodes outside Python's lock. Whatever it warns of is either refused or harmless.
        with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
            warnings.simplefilter("ignore")
            arrays = list(pool.map(open_image, images))
    except InputError:
        raise
    except UnidentifiedImageError as error:  # Its message is only the address of a buffer.
        raise InputError(f"an image of {place} cannot be decoded: it is not an image that Pillow can read") from error
    except (*DECODING_ERRORS, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"an image of {place} cannot be decoded: {first_line(error)}") from error
    height, width = arrays[0].shape[:2]
    for at, (tall, wide, *_) in enumerate((array.shape for array in arrays), 1):
        if (tall, wide) != (height, width):
            raise InputError(
                f"image {at} of {place} is {wide} × {tall} pixels, the first {width} × {height}; one size is needed"
            )
    return np.stack([array.reshape(height * width, -1) for array in arrays]), (height, width)


def _image_of(row: Row) -> Any:
    """Return the image of a row: encoded bytes, or an image that `datasets` has opened."""
    column = next((name for name in CIFAR10.columns if name in row), None)
    if column is None:
        raise InputError(f"{row.where} has no column 'img' or 'image'; its columns are {', '.join(row)}")
    image = row[column]
    image = image.get("bytes") if isinstance(image, dict) else image
    if image is None:
        raise InputError(f"{row.where} has an empty {column}; every row needs an image")
    return image
