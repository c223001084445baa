"""Predictions of a classifier with regions of its inputs (pixels or tokens) replaced, and estimates from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.attacks.curves import no_drop
from ssmscope.attacks.position.regions import Region
from ssmscope.attacks.position.result import Attacked
from ssmscope.core.affine import embedding_table
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import Estimate, estimate, lowest, ratio, resampled_sums
from ssmscope.core.model import Model, Run
from ssmscope.core.tokenizing import tokenize
from ssmscope.core.trace import LayerState
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import TextData
from ssmscope.data.tokens import SequenceData
from ssmscope.errors import InputError, Unanswerable

LEFT_OUT = -1


def draw_donors(labels: np.ndarray, lengths: np.ndarray, needed: np.ndarray, seed: int) -> Int[np.ndarray, " examples"]:
    """Draw for every example one of another class with at least `needed` tokens, or else the longest one."""
    if len(set(labels.tolist())) == 1:
        raise InputError(
            "replacement 'other' takes tokens from an example of another class, but all examples are of one class; "
            "give data of several classes"
        )
    donors = np.empty(len(labels), dtype=np.int64)
    for row, label in enumerate(labels):
        others = np.flatnonzero(labels != label)
        enough = others[lengths[others] >= needed[row]]
        among = enough if len(enough) else others[[lengths[others].argmax()]]
        donors[row] = among[np.random.default_rng([seed, row]).integers(len(among))]
    return donors


def noise_of(row: int, shape: tuple[int, int], seed: int) -> Float[np.ndarray, "length width"]:
    """Draw N(0, 1) noise for the whole of one example, independently of regions and batches."""
    return np.random.default_rng([seed, row]).standard_normal(shape, dtype=np.float32)


def run_embeddings(model: Model, embeddings: Tensor, states: Sequence[LayerState] | None = None) -> Run:
    """Run a classifier on embeddings (batch, length, width) without padding, from `states` if given."""
    after: list[LayerState] = []
    with torch.no_grad(), model.running(states=states, keep=after):
        logits = model.forward_embeddings(embeddings, embeddings.new_ones(embeddings.shape[:2], dtype=torch.bool))
    return Run(logits, tuple(after))


class Inputs(ABC):
    """Examples whose tokens are replaced; `lengths` are the numbers of replaceable tokens."""

    unit = "tokens"
    what = "texts"
    lengths: np.ndarray
    remarks: tuple[str, ...] = ()

    def __init__(self, model: Model, replacement: str, seed: int) -> None:
        self.model, self.replacement, self.seed = model, replacement, seed

    def predict(
        self,
        regions: Sequence[Region],
        donors: np.ndarray | None,
        batch_size: int | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> tuple[Int[np.ndarray, " examples"], Int[np.ndarray, "examples regions"]]:
        """Predict class ids on clean inputs, and with each region replaced; −1 where that is impossible."""
        clean, attacked = (
            np.empty(len(self.lengths), dtype=np.int64),
            np.empty((len(self.lengths), len(regions)), dtype=np.int64),
        )
        measure = partial(self._measured, regions, donors)
        for rows, part in over(self.model, self._batches(batch_size), measure, provenance=provenance, what=self.what):
            clean[list(rows)], attacked[list(rows)] = part["clean"], part["attacked"]
        return clean, attacked

    @abstractmethod
    def _batches(self, size: int | None) -> Iterable[Sequence[int]]: ...

    @abstractmethod
    def _measured(self, regions: Sequence[Region], donors: np.ndarray | None, rows: Sequence[int]) -> Columns: ...


class Pixels(Inputs):
    """Images whose pixels, or series whose steps, are replaced; each run of a region continues from the clean run's
    states at its start, where a model can. For noise a pixel, in [0, 1], is N(0, 1) in each channel, and a step
    N(m, s²) with the data's mean and standard deviation; for zeros black, for mean the data's mean pixel or step;
    other: an example of another class."""

    what = "images"

    def __init__(self, model: Model, data: PixelData, replacement: str, seed: int) -> None:
        super().__init__(model, replacement, seed)
        if model.config.patch is not None:
            raise Unanswerable(f"{model.name} reads patches; the position-bias attack replaces single pixels as tokens")
        if model.channels != data.channels:
            raise InputError(f"{data.name} has {data.channels} channels a pixel, the model reads {model.channels}")
        size = model.config.image_size
        if size is not None and tuple(size) != tuple(data.shape):
            raise InputError(
                f"{data.name} has images of {data.shape[1]} × {data.shape[0]} pixels, the model was trained on "
                f"{size[1]} × {size[0]}"
            )
        self.data, self.unit = data, model.unit
        self.lengths = np.full(len(data), data.pixels.shape[1])
        self.mean = (data.pixels.mean((0, 1)) / data.largest).astype(np.float32)

    def _batches(self, size: int | None) -> Iterable[Sequence[int]]:
        size = size or max(1, tokens_at_once(self.model.device) // (self.data.pixels.shape[1] + 1))
        every = range(len(self.data))
        return [every[first : first + size] for first in every[::size]]

    def _measured(self, regions: Sequence[Region], donors: np.ndarray | None, rows: Sequence[int]) -> Columns:
        images, bounds = np.array(rows), [region.bounds(self.data.pixels.shape[1]) for region in regions]
        attacked = np.empty((len(rows), len(regions)), dtype=np.int64)
        with torch.no_grad():
            kept, put = (self._embed(values) for values in (self.data.pixels[images], self._replaced(images, donors)))
        states, at = None, 0
        starts = {start for start, _ in bounds} if self.model.continues else set[int]()
        for start in sorted({0, *starts}):
            if start > at:
                states, at = run_embeddings(self.model, kept[:, at:start], states).states, start
            for region, (first, stop) in enumerate(bounds):
                if first == start or not starts:
                    spoiled = torch.cat([kept[:, start:first], put[:, first:stop], kept[:, stop:]], dim=1)
                    attacked[:, region] = classes(run_embeddings(self.model, spoiled, states).logits)
        return {"clean": classes(run_embeddings(self.model, kept[:, at:], states).logits), "attacked": attacked}

    def _replaced(self, images: np.ndarray, donors: np.ndarray | None) -> np.ndarray:
        """Return the replacement of every pixel of the images, (images, length, channels)."""
        shape = self.data.pixels.shape[1:]
        if donors is not None:
            return self.data.pixels[donors[images]]
        if self.replacement == "noise":
            noise = np.stack([noise_of(row, shape, self.seed) for row in images.tolist()])
            if self.unit == "pixels":
                return noise
            return (self.mean + noise * self.data.pixels.std((0, 1))).astype(np.float32)
        fill = self.mean if self.replacement == "mean" else np.zeros_like(self.mean)
        return np.broadcast_to(fill, (len(images), *shape)).copy()

    def _embed(self, values: np.ndarray) -> Tensor:
        return self.model.module.embed_values(self.model.encode(values=values).values)


class Tokens(Inputs):
    """Texts, or sequences of ids, whose tokens are replaced; special tokens are not part of a region, but the padding
    of ListOps is, because its models read it. For noise an embedding is N(0, 1) times the standard deviation of the
    embedding table, for zeros 0, for mean the table's mean; other: the tokens of an example of another class at the
    same places."""

    def __init__(self, model: Model, data: TextData | SequenceData, replacement: str, seed: int) -> None:
        super().__init__(model, replacement, seed)
        if isinstance(data, SequenceData):
            ids, special = data.ids.tolist(), np.zeros_like(data.ids)
        else:
            model.check_tokenizer()
            encoded = tokenize(model.tokenizer, list(data.texts), return_special_tokens_mask=True)
            ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
        self.ids = [torch.tensor(row) for row in ids]
        self.places = [np.flatnonzero(np.array(hidden) == 0) for hidden in special]
        self.lengths = np.array([len(places) for places in self.places])
        if not self.lengths.all():
            raise InputError(f"example {int(self.lengths.argmin())} of {data.name} has no token of its own")
        beyond = max(max(row) for row in ids)
        if beyond >= model.vocabulary:
            raise InputError(f"{data.name} has token id {beyond}, outside the model's 0…{model.vocabulary - 1}")
        self.table = embedding_table(model.module)
        self.scale = float(self.table.float().std())
        if replacement == "noise":
            self.remarks = (f"noise is N(0, 1) times {self.scale:.3g}, the standard deviation of the embedding table",)

    def _batches(self, size: int | None) -> Iterable[Sequence[int]]:
        return by_length([len(ids) for ids in self.ids], tokens_at_once(self.model.device), size=size)

    def _measured(self, regions: Sequence[Region], donors: np.ndarray | None, rows: Sequence[int]) -> Columns:
        device = self.model.device
        ids = pad_sequence([self.ids[row] for row in rows], batch_first=True).to(device)
        mask = pad_sequence([torch.ones_like(self.ids[row], dtype=torch.bool) for row in rows], batch_first=True)
        mask, kept = mask.to(device), self._embed(ids)
        reach = [int(self.lengths[row] if donors is None else self.lengths[[row, donors[row]]].min()) for row in rows]
        put = self._replaced(rows, ids, reach, donors)
        attacked = np.full((len(rows), len(regions)), LEFT_OUT, dtype=np.int64)
        for number, region in enumerate(regions):
            hit = torch.zeros(ids.shape, dtype=torch.bool)
            for line, row in enumerate(rows):
                start, stop = region.bounds(int(self.lengths[row]))
                hit[line, self.places[row][start:stop]] = stop <= reach[line]
            fits = hit.any(1).numpy()
            if fits.any():
                found = classes(self._logits(torch.where(hit.to(device).unsqueeze(-1), put, kept), mask))
                attacked[fits, number] = found[fits]
        return {"clean": classes(self._logits(kept, mask)), "attacked": attacked}

    def _embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.module.get_input_embeddings()(ids)

    def _logits(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad(), self.model.running(mask=mask):
            return self.model.forward_embeddings(embeddings, mask)

    def _replaced(
        self, rows: Sequence[int], ids: Tensor, reach: Sequence[int], donors: np.ndarray | None
    ) -> Float[Tensor, "batch length width"]:
        """Return the replacement of every embedding."""
        shape = (*ids.shape, self.table.shape[1])
        if donors is not None:
            mixed = ids.clone()
            for line, (row, length) in enumerate(zip(rows, reach)):
                theirs = self.ids[donors[row]][self.places[donors[row]][:length]]
                mixed[line, self.places[row][:length]] = theirs.to(mixed.device)
            return self._embed(mixed)
        if self.replacement == "noise":
            noise = torch.zeros(shape, dtype=torch.float32)
            for line, row in enumerate(rows):
                own = noise_of(row, (len(self.places[row]), shape[-1]), self.seed)
                noise[line, self.places[row]] = torch.from_numpy(own)
            return (noise * self.scale).to(self.table)
        fill = self.table.mean(0) if self.replacement == "mean" else torch.zeros_like(self.table[0])
        return fill.expand(shape)


def classes(logits: Float[Tensor, "batch classes"]) -> Int[np.ndarray, " batch"]:
    """Return the predicted class ids."""
    return logits.argmax(-1).cpu().numpy()


PAPER = ((0, 32), (0, 96), (928, 1024), (992, 1024))
"""Regions of Baleen's Table 3, in 1024 pixels."""
SHARES = ("0%:10%", "0%:25%", "75%:100%", "90%:100%")
"""Regions for sequences of other lengths than 1024 tokens."""


def measure(
    labels: np.ndarray,
    clean: np.ndarray,
    attacked: np.ndarray,
    donor_labels: np.ndarray | None,
    regions: Sequence[Region],
    windows: Sequence[Region],
    seed: int,
) -> dict[str, Any]:
    """Compute the estimates by the fields of `PositionBias`, from class ids (examples,), and with each region and then
    each window replaced (examples, regions + windows)."""
    right = (clean == labels)[:, None]
    usable = attacked != LEFT_OUT
    changed = usable & right & (attacked != clean[:, None])
    taken = changed & (attacked == (labels if donor_labels is None else donor_labels)[:, None])
    columns = [right, usable, usable & right, usable & (attacked == labels[:, None]), changed, taken]
    sums = resampled_sums(np.concatenate(columns, axis=1).astype(np.float64), seed=seed)
    rights, *rest = np.split(sums, 1 + attacked.shape[1] * np.arange(5), axis=1)
    among, clean_right, hits, changes, takes = rest
    accuracy, drops = ratio(hits, among), 1 - ratio(hits, clean_right)
    parts = {"accuracy": (hits, among), "clean": (clean_right, among), "flipped": (changes, clean_right)}
    parts |= {"success": (takes, clean_right)} if donor_labels is not None else {}
    results = []
    for i, region in enumerate((*regions, *windows)):
        own: dict[str, Any] = {"region": str(region), **vars(region)}
        own |= {"examples": int(usable[:, i].sum()), "left_out": int((~usable[:, i]).sum())}
        own |= {name: estimate(ratio(*part)[:, i], of=part[1][0, i]) for name, part in parts.items()}
        results.append(Attacked(**own, drop=estimate(drops[:, i])))
    number = len(regions)
    accuracies = np.concatenate([rights / len(labels), accuracy[:, :number]], axis=1)
    return {
        "clean": estimate(accuracies[:, 0], of=len(labels)),
        "regions": tuple(results[:number]),
        "windows": tuple(results[number:]),
        "average": estimate(accuracies[:, 1:].mean(1)) if number > 1 else results[0].accuracy,
        "average_drop": estimate(drops[:, :number].mean(1)),
        "average_with_clean": estimate(accuracies.mean(1)),
        "spread": float(accuracies[0].std(ddof=1)),
        "worst_regions": lowest(-drops[:, :number]),
        "worst_windows": lowest(-drops[:, number:]),
        "right": np.concatenate([right, np.where(usable, attacked == labels[:, None], LEFT_OUT)], axis=1).T.astype(
            np.int8
        ),
    }


def notes_on(clean: Estimate, attacked: Sequence[Attacked], examples: int) -> Iterator[str]:
    yield from no_drop(clean)
    if short := [one for one in attacked if one.left_out]:
        most = max(short, key=lambda one: one.left_out)
        yield (
            f"{len(short)} of the regions and windows extend beyond some examples or their donors, which are left out "
            f"there: {most.left_out:,} of {examples:,} at {most.region}"
        )


def replaced_inputs(model: Model, data: Any) -> Callable[..., Pixels | Tokens]:
    """Return the class that replaces tokens in data of this kind."""
    model.check_classes("the position-bias attack")
    if not model.is_classifier:
        raise InputError(f"{model.name} is not a classifier: the position-bias attack measures a classifier's accuracy")
    if not isinstance(data, PixelData | TextData | SequenceData):
        raise InputError(f"data is {type(data).__name__}; allowed are labelled images, texts and sequences")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")
    pixels = isinstance(data, PixelData)
    if pixels != (model.channels is not None):
        reads, given = ("tokens", "images") if pixels else ("pixels", "texts")
        raise InputError(f"{model.name} reads {reads}, but {data.name} holds {given}")
    return Pixels if pixels else Tokens
