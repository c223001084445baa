"""Table of the checkpoint layouts of other projects; what none of them recognises is in transformers' layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ssmscope.architectures.loading.checkpoints import is_mamba_ssm, read_mamba_ssm, read_selective
from ssmscope.architectures.loading.diff_checkpoints import is_diff_mamba2, read_diff_mamba2
from ssmscope.architectures.loading.fla_checkpoints import is_fla, read_fla
from ssmscope.architectures.loading.vim_checkpoints import is_vim, read_vim


class Layout(NamedTuple):
    """A layout of directories with a config.json: its name, the test that recognises it, and the function that builds
    the model. Both take the directory and the content of its config.json."""

    name: str
    recognises: Callable[[Path, Mapping[str, Any]], bool]
    read: Callable[[Path, Mapping[str, Any]], PreTrainedModel]


LAYOUTS = (
    Layout("mamba_ssm", is_mamba_ssm, read_mamba_ssm),
    Layout("flash-linear-attention", is_fla, read_fla),
    Layout("Differential Mamba", is_diff_mamba2, read_diff_mamba2),
)


class StateDict(NamedTuple):
    """A layout of single files with a state dict: its name, the test of the tensors that recognises it, and the
    function that builds the model from the file's path and tensors."""

    name: str
    recognises: Callable[[Mapping[str, Tensor]], bool]
    read: Callable[[Path, Mapping[str, Tensor]], PreTrainedModel]


STATE_DICTS = (
    StateDict("Vision Mamba", is_vim, read_vim),
    StateDict("selective SSM", lambda tensors: True, read_selective),  # It refuses what is none.
)


def layout_of(directory: Path, config: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a directory; None for transformers' own."""
    return next((layout for layout in LAYOUTS if layout.recognises(directory, config)), None)


def read_state_dict(path: Path, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return the model of a file's state dict. Raises InputError when no layout can read it."""
    return next(layout for layout in STATE_DICTS if layout.recognises(tensors)).read(path, tensors)
