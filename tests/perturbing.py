"""Noise on every forward pass and gradient, as another processor's rounding, larger: `SSMSCOPE_PERTURB=SEED pytest …`.
Orders, ranks, verdicts and recorded texts stay as they are; numbers are then compared with a tolerance that allows for
the noise."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

SIZE = 1e-6
"""Largest relative change of a number."""
LEAST = {"rtol": 1e-3, "atol": 1e-5}
"""Smallest tolerances with noise."""


def noise(found: Tensor, seed: int) -> Tensor:
    """Return factors 1 ± `SIZE` that depend on the seed and the digits of float32 numbers alone, so that the same run
    gives the same numbers, but one in another order of sums others."""
    numbers = found.detach()
    return 1 + SIZE * torch.sin(torch.nan_to_num(1e7 * torch.log(numbers.abs() + 1e-30)) + seed)


def perturb(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Perturb what linear maps and convolutions give, and with it their gradients; float64 stays exact, as tests of
    identities want it."""

    def perturbed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(run)
        def changed(*args: Any, **kwargs: Any) -> Tensor:
            found = run(*args, **kwargs)
            return found * noise(found, seed) if found.dtype == torch.float32 else found

        return changed

    for name in ("linear", "conv1d", "embedding"):
        patch.setattr(functional, name, perturbed(getattr(functional, name)))
    loosen(patch)


def loosen(patch: pytest.MonkeyPatch) -> None:
    """Raise the tolerances of comparisons of numbers to `LEAST`."""

    def looser(compare: Callable[..., Any], default: dict[str, float]) -> Callable[..., Any]:
        @functools.wraps(compare)
        def changed(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs |= dict(zip(("rtol", "atol"), args))
            given = {name: kwargs.get(name) or default[name] for name in LEAST}
            return compare(a, b, *args[2:], **{**kwargs, **{name: max(given[name], LEAST[name]) for name in LEAST}})

        return changed

    for module, name, default in (
        (torch, "allclose", {"rtol": 1e-5, "atol": 1e-8}),
        (torch.testing, "assert_close", {"rtol": 1e-5, "atol": 1e-8}),
        (np, "allclose", {"rtol": 1e-5, "atol": 1e-8}),
        (np.testing, "assert_allclose", {"rtol": 1e-7, "atol": 0.0}),
    ):
        patch.setattr(module, name, looser(getattr(module, name), default))
    approx = pytest.approx

    def looser_approx(expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False) -> Any:
        return approx(expected, rel=max(rel or 0, LEAST["rtol"]), abs=max(abs or 0, LEAST["atol"]), nan_ok=nan_ok)

    patch.setattr(pytest, "approx", looser_approx)
