"""Fast implementations of the operations in `ssmscope.ops`, and the choice of the one that a call uses.

An implementation is a module with `fits(*terms)`, which says if it serves these shapes and dtypes, and functions with
the operation's results. `find` returns it, or None where torch computes:

    module = backends.find("selective_scan", x, b, c, initial, delta, A)
    if module is not None:
        return module.scan(x, b, c, initial, delta, A, expected=expected, retention=retention)

SSMSCOPE_BACKEND=torch in the environment switches all of them off; `explain` lists which are in use, and why not.
"""

from __future__ import annotations

import functools
import os
import warnings
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from ssmscope.backends import triton
from ssmscope.errors import InputError, did_you_mean

SWITCH = "SSMSCOPE_BACKEND"
CHOICES = ("auto", "torch")
OPERATIONS = {
    "selective_scan": {"cpu": "c.selective_scan", "cuda": "triton.selective_scan"},
    "ssd": {"cuda": "triton.ssd"},
    "delta_rule": {"cuda": "triton.delta_rule"},
    "survival": {"cuda": "triton.survival"},
}
"""Implementations of each operation by type of device, as modules of this package."""
PLAIN_TYPES = (Tensor, torch.nn.Parameter)

_warned: set[str] = set()


class Status(NamedTuple):
    """Implementation of an operation, and the reason why torch computes in its place, or None if it is in use."""

    operation: str
    device: str
    implementation: str
    reason: str | None


def find(operation: str, *terms: Tensor | None) -> ModuleType | None:
    """Return the module that computes this operation of these terms, in the order of its `fits`, or None for torch. If
    only something missing is in the way, such as a C compiler, one warning per process says so. Raises InputError if
    SSMSCOPE_BACKEND has a value that is not allowed."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or get_proxy_mode()  # type: ignore[attr-defined]
    if traced or not enabled():
        return None
    given = [t for t in terms if t is not None]
    device = given[0].device
    path = OPERATIONS[operation].get(device.type)
    # Results are allocated like the last of these: a mode such as FakeTensorMode may give them no memory.
    if path is None or not all(is_in_memory(t, device) for t in (*given, given[0].new_empty(1))):
        return None
    # A Triton module imports triton. A C kernel is compiled only for terms that fit it.
    if path.startswith("triton.") and not _is_available(operation, path, device):
        return None
    module = _module(path)
    return module if module.fits(*terms) and _is_available(operation, path, device) else None


def enabled() -> bool:
    """Return False if SSMSCOPE_BACKEND=torch, True if it is auto or not set. Raises InputError for other values."""
    choice = os.environ.get(SWITCH) or "auto"
    if choice not in CHOICES:
        raise InputError(f"{SWITCH}={choice} is not one of {', '.join(CHOICES)}{did_you_mean(choice, CHOICES)}")
    return choice == "auto"


def explain() -> list[Status]:
    """Return the implementation of each operation on each type of device, compiling and trying those not tried yet."""
    known = ((name, device, path) for name, paths in OPERATIONS.items() for device, path in paths.items())
    return [Status(name, device, path, _reason(path, device)) for name, device, path in known]


def is_in_memory(t: Tensor, device: torch.device) -> bool:
    """Return True if a tensor is fully described by its memory on the device. Subclasses, sparse layouts, lazy
    negation, forward-mode tangents and torch.func's wrappers (of vmap, grad, jvp) hold more than that, or have no
    memory at all, as empty tensors."""
    if type(t) not in PLAIN_TYPES or t.device != device or t.layout is not torch.strided or t.is_neg():
        return False
    try:
        address = t.data_ptr()
    except RuntimeError:  # It is a wrapper of torch.func.
        return False
    return address != 0 and forward_ad.unpack_dual(t).tangent is None


@functools.cache
def _module(path: str) -> ModuleType:
    return import_module(f"{__name__}.{path}")


def _missing(path: str, device: torch.device) -> str | None:
    """Return the reason why an implementation is unavailable on a device, or None; found once."""
    return triton.why_not(device) if path.startswith("triton.") else _module(path).why_not()


def _reason(path: str, device: str) -> str | None:
    """Return the reason why torch computes in place of an implementation, or None."""
    if not enabled():
        return f"switched off by {SWITCH}=torch"
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is available"
    return _missing(path, torch.device(device))


def _is_available(operation: str, path: str, device: torch.device) -> bool:
    """Return True if the implementation is available; if not, a warning says why, once."""
    reason = _missing(path, device)
    if reason is not None and path not in _warned:
        _warned.add(path)
        advice = f"set {SWITCH}=torch to silence this"
        warnings.warn(f"ssmscope computes {operation} with torch, which is slower: {reason} ({advice})", stacklevel=3)
    return reason is None
