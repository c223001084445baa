"""A Ray cluster: one that runs, or one that is started on this machine, and what its workers need to work as we do."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ssmscope.errors import InputError, extra

PATIENCE = 10.0
"""Seconds in which the address of a cluster must answer."""
RETRIES = 3
"""How often a task starts again whose worker or node died."""
OBJECTS = 256 * 2**20
"""Bytes of memory for what workers send, in a Ray that is started here: results are small."""
OWN_GPU = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""The variable with which Ray leaves to a worker to use the GPU that it is given: a process that has used one sees no
other later, and Ray may give the next task of the same process another."""
STARTED_WITH = ("ssmscope.architectures.loading.load", "ssmscope.interp.objective")
"""What the workers of a Ray that is started here import while it starts: what takes long."""
PREPARED = {"RAY_preload_python_modules": ",".join(STARTED_WITH), OWN_GPU: "1"}
"""The variables of a Ray that is started here for analyses."""
PASSED_ON = ("SSMSCOPE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "NLTK_")
"""How the variables of the environment begin that workers get."""


def check_installed() -> None:
    """Refuse, as an InputError, to use Ray where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"engine ray needs the package ray, which is not installed; install it {extra('ray')}")


def check_engine(engine: str, **own: Any) -> None:
    """Refuse Ray's options without Ray, and two that contradict each other.

    Raises:
        InputError: as said.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in own.items() if value is not None]
    if engine == "local" and given:
        raise InputError(f"{given[0]} is of --engine ray; give that too, or leave it out")
    if own.get("address") is not None and own.get("workers") is not None:
        raise InputError("--workers is for a Ray that is started here, and --address names one that runs; give one")


class Setting:
    """What a worker needs so that it works as this process would.

    Attributes:
        models: how many it keeps loaded.
        threads: that torch uses: sums may differ in their last digit by how many there are.
    """

    def __init__(self, models: int, threads: int | None = None) -> None:
        import torch

        self.models = models
        self.threads = torch.get_num_threads() if threads is None else threads
        self.directory = os.getcwd()
        self.environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}

    def apply(self) -> None:
        os.environ.update(self.environment)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        import torch

        torch.set_num_threads(self.threads)


def lacking(nodes: Sequence[Mapping[str, Any]], cpus: float, gpus: float) -> str | None:
    """Why no node can ever run a task that needs so much; None where one can."""
    for node in nodes:
        has = node["Resources"]
        if node["Alive"] and has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus:
            return None
    return f"no node of the cluster has the {cpus:g} CPUs and {gpus:g} GPUs"


def gpu_given() -> int | None:
    """Which of the GPUs that this process sees Ray has given to the task that runs; None where it has given none."""
    import ray

    if not ray.is_initialized():
        return None
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not given:
        return None
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",").index(given[0]) if seen else int(given[0])


def is_to_start(address: str | None) -> bool:
    """Whether `connected` would start a Ray: it is not connected, and no address is given."""
    import ray

    return address is None and not ray.is_initialized()


@contextmanager
def connected(address: str | None, workers: int | None, *, prepared: bool = False) -> Iterator[Any]:
    """Ray, connected or started; what was not connected before is not afterwards.

    Args:
        prepared: the workers of a Ray that is started import `STARTED_WITH` at once, and have `OWN_GPU`.
    """
    import ray

    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        with _environment(PREPARED if prepared else {}):
            ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=OBJECTS, **quiet)
    else:
        _check_listens(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            tokens = isinstance(error, ConnectionError) and ":" in address and "RAY_AUTH_MODE" not in os.environ
            raise _unanswered(address, error, "; one that checks tokens wants RAY_AUTH_MODE=token" * tokens) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Refuse, as an InputError, an address HOST:PORT where nothing listens, which Ray itself would ask for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # such as auto
        return
    import ray

    hosts = [host.strip("[]")]
    if hosts[0] in ("localhost", "127.0.0.1", "::1"):  # Ray takes this machine's own address then
        hosts.append(ray.util.get_node_ip_address())
    for one in hosts:
        try:
            socket.create_connection((one, int(port)), PATIENCE).close()
            return
        except (OSError, OverflowError) as error:
            refused = error
    raise _unanswered(address, refused) from refused


def _unanswered(address: str, error: Exception, advice: str = "") -> InputError:
    reason = " ".join(str(error).split())[:200]
    return InputError(f"--address {address}: no Ray cluster answers there ({reason}){advice}")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within the context these variables have values, but for those that have one already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
