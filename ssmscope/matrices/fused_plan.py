"""How the matrices of `fused` are cut into work for kernels, and where what these write for others lies in memory."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

EVEN = 256  # bytes of which each table begins at a multiple
FLOATS = ("since", "rest", "until", "written", "wrote", "read", "most", "decays", "slowest", "units", "shifts", "strip")
TABLES = (*FLOATS, "packed", "found", "counts", "cuts", "totals", "before", "table")


@dataclass(frozen=True)
class Plan:
    """How matrices are cut: into tiles of `tile` rows; channels into chunks of at most `most` below the diagonal, and
    `wide` on it, where they are shared among `strip_splits` programs."""

    batch: int
    length: int
    heads: int
    state: int
    groups: int
    bc_groups: int
    terms: int
    tile: int
    near: int
    most: int
    wide: int
    fill: int
    shares: int
    room: int
    spread: int

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles on the diagonal."""
        return -(-self.length // self.tile)

    @functools.cached_property
    def rows(self) -> int:
        """Steps of all tiles."""
        return self.tiles * self.tile

    @functools.cached_property
    def below(self) -> int:
        """Tiles below the diagonal."""
        return self.tiles * (self.tiles - 1) // 2

    @functools.cached_property
    def works(self) -> dict[int, int]:
        """Tiles below the diagonal, and how many they are where two above each other are made together."""
        high = (self.tiles + 1) // 2
        return {1: self.below, 2: high * (high - 1) + self.tiles // 2}

    @functools.cached_property
    def levels(self) -> int:
        """Of squares of tiles below the diagonal."""
        return (self.tiles - 1).bit_length()

    @functools.cached_property
    def inner(self) -> int:
        """Levels of squares within the tiles on the diagonal."""
        return max(0, (min(self.tile, self.length) - 1).bit_length() - self.near.bit_length() + 1)

    @functools.cached_property
    def matrices(self) -> int:
        return self.batch * self.groups

    @functools.cached_property
    def segment(self) -> int:
        """Neighbouring channels that have both groups in common."""
        return math.gcd(self.heads // self.groups, self.heads // self.bc_groups)

    def cut(self, most: int) -> tuple[int, int]:
        """Channels of a chunk, a power of two of at least 16 and at most `most`, and the chunks of a group: each lies
        within a segment."""
        channels = min(most, max(16, 1 << max(self.segment - 1, 0).bit_length()))
        return channels, self.heads // self.groups // self.segment * -(-self.segment // channels)

    @functools.cached_property
    def bytes(self) -> int:
        """Of a chunk's factors, of one sequence."""
        return 2 * self.terms * self.groups * self.levels * self.state * self.rows * self.cut(self.most)[0]

    @functools.cached_property
    def together(self) -> int:
        """Sequences whose factors are made together."""
        return max(1, self.room // max(1, self.bytes))

    @functools.cached_property
    def passes(self) -> list[range]:
        """The chunks whose factors are made together."""
        chunks = self.cut(self.most)[1]
        count = -(-chunks // max(1, self.room // max(1, self.batch * self.bytes)))
        size = -(-chunks // count)
        return [range(first, min(first + size, chunks)) for first in range(0, chunks, size)]

    @functools.cached_property
    def splits(self) -> int:
        """The most programs for a tile: as many as let each processor take `spread` after the other, or twice that
        where tiles with less to do have fewer."""
        allowed = max(1, int(self.shares * self.length**2 / max(self.below * self.tile**2, 1)))
        wanted = -(-self.spread * self.fill // max(self.below * self.matrices, 1))
        return max(1, min(wanted if len(self.passes) > 1 else 2 * wanted, allowed, self.cut(self.most)[1]))

    @functools.cached_property
    def wanted(self) -> int:
        """Shares of tiles that are alike, for a matrix; 0 where every tile has as many."""
        return -(-self.spread * self.fill // self.matrices) if self.splits > 1 and len(self.passes) == 1 else 0

    @functools.cached_property
    def strip_splits(self) -> int:
        allowed = max(1, self.shares * self.length // self.tile)
        wanted = self.fill // (self.tiles * self.matrices)
        return max(1, min(wanted, allowed, self.cut(self.wide)[1]))

    @functools.cached_property
    def steps(self) -> tuple[int, int]:
        """From one share of the tiles below the diagonal to the next, and from one matrix to the next."""
        each = self.below * self.tile**2
        return (each * self.matrices, each) if self.splits > 1 else (0, self.length**2)

    @functools.cached_property
    def strip_steps(self) -> tuple[int, int]:
        """As `steps` of the tiles on the diagonal."""
        return self.matrices * self.length * self.tile, self.length * self.tile

    @functools.cached_property
    def factors(self) -> int:
        """Numbers in the table of them."""
        return self.batch * len(self.passes[0]) * self.bytes // 2

    @functools.cached_property
    def tables(self) -> dict[str, tuple[torch.dtype, int]]:
        """What kernels write for others: the type and the count of its numbers."""
        table, vectors = self.batch * self.length * self.heads, self.batch * self.bc_groups * self.rows
        below = self.matrices * self.below
        floats = dict.fromkeys(("since", "rest", "until", "written"), table)
        floats |= {"wrote": vectors * self.state, "read": vectors * self.state, "most": vectors * 2}
        floats |= {"decays": self.state * self.heads, "slowest": self.heads}
        floats |= {"units": self.matrices * 2 * self.rows, "shifts": self.matrices * self.levels * self.tiles}
        floats |= {"strip": self.strip_splits * self.strip_steps[0], "packed": self.splits * self.steps[0]}
        indices = {"found": below * len(self.passes[0]) * self.state, "counts": below, "cuts": below}
        doubles = {"totals": self.batch * (self.tiles + (self.tiles & 1)) * self.heads}
        doubles |= {"before": self.batch * (self.tiles + 1) * self.heads}
        of_type = {torch.float32: floats, torch.int32: indices, torch.float64: doubles}
        of_type |= {torch.float16: {"table": self.factors}}
        found = {name: (dtype, size) for dtype, sizes in of_type.items() for name, size in sizes.items()}
        return {name: found[name] for name in TABLES}

    @functools.cached_property
    def places(self) -> tuple[list[int], int]:
        """Where each of the `tables` begins in memory that they share, and the bytes of that."""
        sizes = [-(-size * dtype.itemsize // EVEN) * EVEN for dtype, size in self.tables.values()]
        ends = list(itertools.accumulate(sizes))
        return [0, *ends[:-1]], ends[-1]
