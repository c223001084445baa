"""The scan with a decay per state by a C kernel (`native.c`), for float32 on a CPU; optional, silent when absent.

Without the kernel (`building`) `diagonal.scan` stays with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.autograd import forward_ad

from ssmscope.scans import building
from ssmscope.scans.building import SWITCH, address

__all__ = ["SWITCH", "applicable", "available", "is_plain", "scan", "why_not"]
SOURCE = Path(__file__).with_name("native.c")
PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED, _level = torch.strided, torch._C._functorch.maybe_current_level  # asked of every term of every scan
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
SMALL = 2**15  # decays; fewer are not worth waking threads for


def applicable(x: Tensor, b: Tensor, c: Tensor, initial: Tensor, delta: Tensor, A: Tensor) -> bool:
    """Whether `scan` takes these terms: width 1, one group, a decay per state, float32, on a CPU."""
    if x.shape[3] != 1 or b.shape[2] != 1 or A.shape[-1] != b.shape[3]:
        return False
    terms = (x, b, c, initial, delta, A)
    plain = x.device.type == "cpu" and are_plain(terms, x.device)
    return plain and not torch.compiler.is_compiling() and available()


def is_plain(t: Tensor, device: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether the tensor is what such a device's memory says: of these types, no subclass, no lazy negation, no
    forward-mode tangent, no batch or other level of torch.func."""
    return t.device.type == device and are_plain((t,), t.device, dtypes)


def are_plain(
    terms: Sequence[Tensor], device: torch.device, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> bool:
    """Whether all terms are on this device, and `is_plain` there."""
    if _level() is not None and any(map(_wrapped, terms)):
        return False
    for t in terms:
        if type(t) not in PLAIN or t.device != device or t.dtype not in dtypes:
            return False
        if t.layout is not _STRIDED or t.is_neg():
            return False
    return forward_ad._current_level < 0 or all(forward_ad.unpack_dual(t).tangent is None for t in terms)


def adds_skip(D: Tensor | None, x: Tensor) -> bool:
    """Whether `scan` adds D x itself."""
    return D is not None and D.numel() == x.shape[2] and is_plain(D, "cpu")


def scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor,
    delta: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    *,
    expected: bool,
    retention: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `diagonal.scan` with Δ and A, where `applicable`, and with D where it `adds_skip`; results do not depend on
    the number of threads.

    Raises:
        MemoryError: when there is none left for the work.
    """
    terms = (x, b, c, initial, delta, A, D)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        y, final, kept = _Scan.apply(*terms, expected, retention)
        return y, final, kept if retention else None
    y, final, kept, _ = _forward(*terms, expected, retention, keep=False)
    return y, final, kept


def keys(b: Tensor, elapsed: Tensor, A: Tensor, *, to_end: bool) -> Tensor:
    """Σ_n (exp(elapsed_t[d] A[d, n]) b_t[n])², (batch, length, heads), of terms that are `applicable`.

    Args:
        elapsed: a time for each position, or with `to_end` a step, which are summed from the next one to the last.

    Raises:
        MemoryError: when there is none left for the work.
    """
    b, A = b.contiguous(), A.contiguous()
    squares = elapsed.new_empty(elapsed.shape)
    if kernels.loaded().ssm_keys(_shape(elapsed, b, False), _view(elapsed), *map(address, (A, b, squares)), to_end):
        raise MemoryError("no memory left for the keys of the selective scan")
    return squares


class Tree:
    """Pieces of rows of which some begin alike, one after the other in one sequence.

    Attributes:
        bounds: (pieces + 1,) int64, where each begins in the sequence, and where the last one ends; none is empty.
        above: (pieces,) int64, from the end of which earlier piece it continues; −1 at the beginning of a row.
        place: (pieces,) int64, of its state among those from which others continue; −1 where none does.
        places: how many of these there are.
    """

    def __init__(self, lengths: Int[np.ndarray, " pieces"], above: Int[np.ndarray, " pieces"]) -> None:
        kept = np.zeros(len(above), dtype=bool)
        kept[above[above >= 0]] = True
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        self._before = np.arange(-1, bounds[-1])  # of each token the one that it comes after, and −1 of none
        self._before[-1] = -1
        self._before[bounds[:-1]] = np.where(above < 0, -1, bounds[above + 1] - 1)
        place = np.where(kept, kept.cumsum() - 1, -1)
        self.bounds, self.above, self.place = map(torch.from_numpy, (bounds, np.array(above), place))
        self.places = int(kept.sum())
        self._inputs: dict[int, Tensor] = {}

    def inputs(self, taps: int) -> Int[Tensor, "tokens taps"]:
        """Which tokens a convolution reads at each token, itself first; −1 where there are none."""
        if taps not in self._inputs:
            found = [np.arange(len(self._before) - 1)]
            for _ in range(taps - 1):
                found.append(self._before[found[-1]])
            self._inputs[taps] = torch.from_numpy(np.stack(found, axis=1))
        return self._inputs[taps]


class _Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("batch", "length", "channels", "states")] + [
        (n, ctypes.c_int) for n in ("threads", "expected")
    ]


class _View(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "step", "channel")]


def _shape(x: Tensor, b: Tensor, expected: bool) -> _Shape:
    sizes = (*x.shape[:3], b.shape[3])
    work = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    return _Shape(*sizes, torch.get_num_threads() if work > SMALL else 1, expected)


def _view(t: Tensor | None) -> _View:
    """Of (batch, length, channels, …) with any strides."""
    return _View(None, 0, 0, 0) if t is None else _View(t.data_ptr(), *t.stride()[:3])


def _forward(x, b, c, initial, delta, A, D, expected: bool, retention: bool, keep: bool, bias=None, z=None):
    """y, the final state, the mean decays or None, and the states at the chunks' starts or None; with `bias` and `z`,
    of what is softplus(delta + bias) and of y ⊙ SiLU(z)."""
    library, shape = kernels.loaded(), _shape(x, b, expected)
    b, c, initial, A = (t.contiguous() for t in (b, c, initial, A))
    D = None if D is None else D.contiguous()
    y = x.new_empty(x.shape)
    final = x.new_empty(initial.shape)
    starts = x.new_empty(library.ssm_starts_size(shape)) if keep else None
    kept = x.new_empty(x.shape[:2]) if retention else None
    failed = library.ssm_forward(
        shape, *map(_view, (x, delta, z)), *map(address, (bias, A, b, c, D, initial, y, final, starts, kept))
    )
    if failed:
        raise MemoryError("no memory left for the selective scan")
    return y, final, kept, starts


def forward_tree(x, b, c, delta, A, D, tree: Tree, bias=None, z=None) -> Tensor:
    """As `_forward`'s y of one sequence, which holds the pieces of a tree, without gradients."""
    shape = _shape(x, b, False)
    b, c, A = (t.contiguous() for t in (b, c, A))
    D, y = None if D is None else D.contiguous(), x.new_empty(x.shape)
    numbers = (address(bias), *map(address, (A, b, c, D, y, tree.bounds, tree.above, tree.place)))
    if kernels.loaded().ssm_forward_tree(shape, *map(_view, (x, delta, z)), *numbers, len(tree.above), tree.places):
        raise MemoryError("no memory left for the selective scan")
    return y


def _backward(x, b, c, delta, A, D, starts, grad_y, grad_final, expected: bool, bias=None, z=None, grad_z=None):
    """The gradients of x, b, c, initial (None without `grad_final`), delta, A and D; that of z (batch, length,
    channels) is put into `grad_z`, whose channels are side by side."""
    shape = _shape(x, b, expected)
    b, c, A = (t.contiguous() for t in (b, c, A))
    grad_final = None if grad_final is None else grad_final.contiguous()
    near = None if D is None else D.contiguous()
    grad_D = None if D is None else D.new_empty(len(x), D.numel())
    grad_x, grad_delta, grad_A, grad_b, grad_c = back = [t.new_empty(t.shape) for t in (x, delta, A, b, c)]
    grad_initial = None if grad_final is None else grad_final.new_empty(grad_final.shape)
    failed = kernels.loaded().ssm_backward(
        shape,
        *map(_view, (x, delta, z)),
        *map(address, (bias, A, b, c, near, starts)),
        _view(grad_y),
        *map(address, (grad_final, *back, grad_initial, grad_D, grad_z)),
        0 if grad_z is None else grad_z.stride(1),
    )
    if failed:
        raise MemoryError("no memory left for the gradient of the selective scan")
    return grad_x, grad_b, grad_c, grad_initial, grad_delta, grad_A, None if grad_D is None else grad_D.sum(0)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, D, expected, retention):
        y, final, kept, starts = _forward(x, b, c, initial, delta, A, D, expected, retention, keep=True)
        ctx.save_for_backward(x, b, c, delta, A, D, starts)
        ctx.expected = expected
        if kept is None:
            kept = x.new_empty(0)
        ctx.mark_non_differentiable(kept)
        return y, final, kept

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final, _):
        x, b, c, delta, A, D, starts = ctx.saved_tensors
        back = _backward(x, b, c, delta, A, D, starts, grad_y, grad_final, ctx.expected)
        grad_x, grad_b, grad_c, grad_initial, grad_delta, grad_A, grad_D = back
        grad_D = None if D is None or grad_D is None else grad_D.view(D.shape)
        return grad_x, grad_b, grad_c, grad_initial, grad_delta, grad_A, grad_D, None, None


def _declare(library: ctypes.CDLL) -> None:
    shape, view, numbers = ctypes.POINTER(_Shape), ctypes.POINTER(_View), ctypes.c_void_p
    library.ssm_starts_size.argtypes, library.ssm_starts_size.restype = [shape], ctypes.c_int64
    library.ssm_forward.argtypes = [shape, view, view, view, *[numbers] * 10]
    library.ssm_forward_tree.argtypes = [shape, view, view, view, *[numbers] * 9, *[ctypes.c_int64] * 2]
    library.ssm_keys.argtypes = [shape, view, *[numbers] * 3, ctypes.c_int]
    library.ssm_backward.argtypes = [shape, *[view] * 3, *[numbers] * 6, view, *[numbers] * 9, ctypes.c_int64]


kernels = building.Library(SOURCE, "scan", "the C scan", _declare)
available, why_not = kernels.available, kernels.why_not
