"""Formats in which a state may be kept, and the numbers that share a scale."""

from __future__ import annotations

from typing import Literal

Format = Literal["bfloat16", "float16", "e4m3", "e5m2", "int8", "int4"]
Per = Literal["tensor", "head", "row"]
