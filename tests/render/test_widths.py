"""Figures as wide as a page's text: no text is cut off by the picture's edge, and none overlaps another."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn import TEXT_WIDTH, assert_fits

from ssmscope.api.results import Result

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
FILE_BY_KIND = {file.stem: file for file in sorted(RECORDED.glob("*/*.json"))}


@pytest.mark.parametrize("kind", FILE_BY_KIND)
def test_every_recorded_kind_fits(kind: str) -> None:
    assert_fits(Result.load(FILE_BY_KIND[kind]), TEXT_WIDTH)
