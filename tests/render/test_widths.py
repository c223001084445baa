"""Figures as wide as a page's text: no text is cut off by the picture's edge, and none overlaps another."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn import TEXT_WIDTH, assert_fits

from ssmscope.api.results import Result

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
KINDS = {file.stem: file for file in sorted(RECORDED.glob("*/*.json"))}


@pytest.mark.parametrize("kind", KINDS)
def test_every_recorded_kind_fits(kind: str) -> None:
    assert_fits(Result.load(KINDS[kind]), TEXT_WIDTH)
