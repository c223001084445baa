"""Tests of Triton's kernels on a GPU, else in Triton's interpreter, which runs them on the CPU's tensors."""

import os
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_runs = find_spec("triton") is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
needs_triton = pytest.mark.skipif(not _runs, reason="needs triton, and a GPU or TRITON_INTERPRET=1")
