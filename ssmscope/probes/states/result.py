"""Norms of a model's states after chosen tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.render.numbers import counted, number
from ssmscope.render.tokens import short_token


@dataclass(frozen=True)
class StateNorms(Result, kind="states"):
    """Sizes of all that a model keeps of the tokens before, after chosen tokens."""

    rows: tuple[tuple[int, int, str], ...]
    """Text, position and token that each row has read last."""
    names: tuple[str, ...]
    """Names of the tensors in a file."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each, of one row."""
    norms: np.ndarray
    """(rows, tensors): the Frobenius norm."""
    largest: np.ndarray
    """(rows, tensors): the largest absolute number."""

    @property
    def recurrent(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Names of the layers with recurrent states, and the norms of these, (rows, layers)."""
        of = [name.rpartition(".state.")[0] for name in self.names]
        layers = tuple(dict.fromkeys(filter(None, of)))
        squares = [(self.norms[:, [each == layer for each in of]] ** 2).sum(1) for layer in layers]
        return layers, np.sqrt(np.array(squares).T.reshape(len(self.rows), len(layers)))

    @property
    def headline(self) -> str:
        layers, norms = self.recurrent
        size = counted(sum(int(np.prod(shape)) for shape in self.shapes), "number")
        said = f"States of {self.model_name}: {size} in {counted(len(self.names), 'tensor')} after each token"
        if not layers:
            return f"{said}, none of them recurrent"
        row, at = np.unravel_index(int(norms.argmax()), norms.shape)
        text, position, token = self.rows[row]
        layer = layers[at].replace("layers.", "layer ")
        most = f"the largest norm is {number(float(norms[row, at]))}, in {layer} after token {position}"
        return f"{said}; {most} “{short_token(token, 24)}”" + f" of text {text}" * (self.rows[-1][0] > 0)

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, position and tensor: columns text, position, token, tensor, numbers, norm, largest."""
        rows = [
            (*row, name, int(np.prod(shape)), norm, most)
            for row, norms, largest in zip(self.rows, self.norms, self.largest)
            for name, shape, norm, most in zip(self.names, self.shapes, norms, largest)
        ]
        return pd.DataFrame(rows, columns=["text", "position", "token", "tensor", "numbers", "norm", "largest"])
