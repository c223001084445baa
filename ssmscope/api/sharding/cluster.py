"""Connection to a Ray cluster, running or started on this machine, and the settings that its workers need."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ssmscope.errors import InputError, extra

T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 10.0
"""Seconds within which the address of a cluster must answer."""
MAX_RETRIES = 3
"""Maximum restarts of a task whose worker or node died."""
OBJECT_STORE_BYTES = 256 * 2**20
"""Size of the object store of a Ray that is started here; results are small."""
OWN_GPU = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Variable that keeps Ray from hiding all GPUs but a task's own: a process that has used one GPU never sees another,
but Ray may give the next task of the same process a different one."""
PRELOADED_MODULES = ("ssmscope.architectures.loading.load", "ssmscope.interp.objective")
"""Modules, slow to import, that workers of a Ray that is started here import at once."""
RAY_VARIABLES = {"RAY_preload_python_modules": ",".join(PRELOADED_MODULES), OWN_GPU: "1"}
"""Environment variables of a Ray that is started here for analyses."""
WORKER_VARIABLE_PREFIXES = ("SSMSCOPE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "NLTK_")
"""Prefixes of the environment variables that workers receive."""


def check_installed() -> None:
    """Raise InputError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"engine ray needs the package ray, which is not installed; install it {extra('ray')}")


def check_engine(engine: str, **own: Any) -> None:
    """Raise InputError for Ray's options without Ray, or for two that contradict each other."""
    given = next((name.replace("_", "-") for name, value in own.items() if value is not None), None)
    if engine == "local" and given is not None:
        raise InputError(f"--{given} needs --engine ray; give that too, or leave it out")
    if own.get("address") is not None and own.get("workers") is not None:
        raise InputError("--workers is for a Ray that is started here, and --address for one that runs; give one")


class Setting:
    """Settings with which a worker computes as this process would.

    Attributes:
        models: number of models that it keeps loaded.
        threads: number of torch's threads, on which the last digit of a sum may depend.
    """

    def __init__(self, models: int, threads: int | None = None) -> None:
        import torch

        self.models, self.directory = models, os.getcwd()
        self.threads = torch.get_num_threads() if threads is None else threads
        self.environment = {name: v for name, v in os.environ.items() if name.startswith(WORKER_VARIABLE_PREFIXES)}

    def apply(self) -> None:
        os.environ.update(self.environment)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        import torch

        torch.set_num_threads(self.threads)


def lacking(nodes: Sequence[Mapping[str, Any]], cpus: float, gpus: float) -> str | None:
    """Return why no node can ever run a task with these needs; None if one can."""
    for node in nodes:
        has = node["Resources"]
        if node["Alive"] and has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus:
            return None
    return f"no node of the cluster has the {cpus:g} CPUs and {gpus:g} GPUs"


def gpu_given() -> int | None:
    """Return the number, as this process sees it, of the GPU that Ray assigned to the task; None if there is none."""
    import ray

    if not ray.is_initialized():
        return None
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not given:
        return None
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",").index(given[0]) if seen else int(given[0])


@contextmanager
def connected(address: str | None, workers: int | None, *, prepared: bool = False) -> Iterator[Any]:
    """Connect to Ray or start it (`prepared`: with `RAY_VARIABLES`), and disconnect what was not connected before."""
    import ray

    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        with _environment(RAY_VARIABLES if prepared else {}):
            ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    else:
        _check_listens(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            tokens = isinstance(error, ConnectionError) and ":" in address and "RAY_AUTH_MODE" not in os.environ
            raise _unanswered(address, error, "; one that checks tokens needs RAY_AUTH_MODE=token" * tokens) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raise InputError for an address HOST:PORT where nothing listens, which Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # An address may also be "auto".
        return
    import ray

    hosts = [host.strip("[]")]
    if hosts[0] in ("localhost", "127.0.0.1", "::1"):  # Ray then uses this machine's own address.
        hosts.append(ray.util.get_node_ip_address())
    for one in hosts:
        try:
            socket.create_connection((one, int(port)), CONNECT_TIMEOUT_SECONDS).close()
            return
        except (OSError, OverflowError) as error:
            refused = error
    raise _unanswered(address, refused) from refused


def _unanswered(address: str, error: Exception, advice: str = "") -> InputError:
    reason = " ".join(str(error).split())[:200]
    return InputError(f"--address {address}: no Ray cluster answers there ({reason}){advice}")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context, except those that are set already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def finished(
    ray: Any, submit: Callable[[T], Any], items: Iterable[T], most: int | None = None
) -> Iterator[tuple[T, Any]]:
    """Submit a task for each item, at most `most` at once, and yield each with its reference as it finishes.

    What still runs when the caller stops is cancelled.
    """
    running: dict[Any, T] = {}
    left = iter(items)
    try:
        while True:
            for item in itertools.islice(left, None if most is None else most - len(running)):
                running[submit(item)] = item
            if not running:
                return
            for done in ray.wait(list(running), num_returns=1)[0]:
                yield running.pop(done), done
    finally:
        for task in running:
            ray.cancel(task, force=True)
