"""Batches of a data set as tasks of a Ray cluster, running or started on this machine; a task whose worker or node dies
restarts elsewhere."""

from __future__ import annotations

import importlib.util
import io
import itertools
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from ssmscope.api.options import Metavar, Range
from ssmscope.errors import InputError, extra

if TYPE_CHECKING:
    from ssmscope.api.sharding.parts import Columns, Measure
    from ssmscope.core.model import Model


T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 10.0
"""Seconds within which the address of a cluster must answer."""
TASKS_PER_CPU = 2
"""Submitted tasks per task that can run at once, so that none waits for the next batch."""
MAX_RETRIES = 3
"""Maximum restarts of a task whose worker or node died."""
OBJECT_STORE_BYTES = 256 * 2**20
"""Size of the object store of a Ray that is started here; results are small."""
OWN_GPU = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Variable that keeps Ray from hiding all GPUs but a task's own: a process that has used one GPU never sees another,
but Ray may give the next task of the same process a different one."""
PRELOADED_MODULES = ("ssmscope.loading.load", "ssmscope.interp.objective")
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
    """Settings with which a worker computes as this process would: the number of `models` that it keeps loaded, and of
    torch's `threads`, on which the last digit of a sum may depend."""

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
    """Connect to Ray or start it (`prepared`: with `RAY_VARIABLES`), and disconnect unless it was connected before."""
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
    """Submit a task for each item, at most `most` at once, and yield each with its reference as it finishes. What still
    runs when the caller stops is cancelled."""
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


# ---- an engine of batches


@contextmanager
def on_engine(
    *,
    engine: Annotated[Literal["local", "ray"], "Run in this process, or on Ray's workers."] = "local",
    workers: Annotated[int | None, "Workers of a Ray that is started here; by default one per CPU.", Range(1)] = None,
    gpus_per_worker: Annotated[
        float | None, "GPUs per worker, may be a fraction; by default 1 if the device is cuda.", Range(0, 64)
    ] = None,
    address: Annotated[str | None, "A running Ray cluster; by default one is started.", Metavar("HOST:PORT")] = None,
) -> Iterator[None]:
    """Measure the batches of analyses over a data set with an engine, within the context.

    Ray's workers load the model themselves, by its name, and use one thread each: they need the package, the model and
    Ray. A cluster is connected or started when the first batches arrive.

    Raises:
        InputError: options contradict each other, Ray is not installed, or no cluster answers. An analysis within the
            context also raises it if the model is edited or is not what its name loads, if no node has enough GPUs,
            and if workers die repeatedly.
    """
    check_engine(engine, workers=workers, gpus_per_worker=gpus_per_worker, address=address)
    if engine == "local":
        yield
        return
    check_installed()
    from ssmscope.api.sharding import parts

    with ExitStack() as stack:
        ray, started = None, False

        def run(model: Model, measure: Measure, batches: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Columns]]:
            nonlocal ray, started
            payload = packed(model, measure)
            gpus = float(model.device.type == "cuda") if gpus_per_worker is None else gpus_per_worker
            if ray is None:
                import ray as imported

                started = address is None and not imported.is_initialized()
                ray = stack.enter_context(connected(address, workers, prepared=True))
            yield from _through(ray, payload, batches, gpus, started)

        token = parts.engine.set(run)
        try:
            yield
        finally:
            parts.engine.reset(token)


def _through(
    ray: Any, payload: bytes, batches: Sequence[tuple[int, Any]], gpus: float, started: bool
) -> Iterator[tuple[int, Columns]]:
    lacks = lacking(ray.nodes(), 1, gpus)
    if lacks is not None:
        raise InputError(f"{lacks} that a worker needs; start such a node, or lower gpus_per_worker=…")
    total = ray.cluster_resources()
    places = int(min(total["CPU"], total.get("GPU", 0) / gpus if gpus else total["CPU"]))
    needs: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "max_retries": MAX_RETRIES}
    if gpus and not started:  # A Ray that is started here has the variable from `RAY_VARIABLES`.
        needs["runtime_env"] = {"env_vars": {OWN_GPU: "1"}}
    task = ray.remote(_measured).options(**needs)
    what = [ray.put(payload)]  # Ray does not resolve a reference within a list, so a worker fetches it only if needed.
    key, setting = uuid.uuid4().hex, Setting(1, threads=1)

    def submit(batch: tuple[int, Any]) -> Any:
        return task.remote(key, what, setting, batch[1])

    for (number, _), done in finished(ray, submit, batches, TASKS_PER_CPU * max(1, places)):
        yield number, _received(ray, done)


def _received(ray: Any, done: Any) -> Columns:
    gone = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)
    try:
        part, refusal = ray.get(done)
    except gone as error:
        raise InputError(
            f"the workers that measured a batch died, {1 + MAX_RETRIES} times: they may need more memory; give fewer "
            "workers or smaller batches. Finished batches are kept; the same command continues from them"
        ) from error
    if refusal is not None:
        raise InputError(refusal)
    return part


# ---- what runs in a worker

_prepared: tuple[str, int | None, Any] = ("", None, None)
"""Key, GPU and measure of this worker's current job."""
_models: Any = None
"""Models that this worker keeps loaded."""


def _measured(key: str, what: Sequence[Any], setting: Setting, batch: Any) -> tuple[Columns | None, str | None]:
    """Measure a batch in a worker; return its part, or the reason for refusing it."""
    global _prepared
    try:
        gpu = gpu_given()
        if _prepared[:2] != (key, gpu):
            import ray

            setting.apply()
            _prepared = key, gpu, unpacked(ray.get(what[0]), setting.models, gpu)
        return _prepared[2](batch), None
    except InputError as error:
        return None, str(error)


def packed(model: Model, measure: Measure) -> bytes:
    """Pickle a measure, with names in place of the model, its modules and its parameters, and tensors on the CPU. Raise
    InputError if the model is edited."""
    import torch
    from ray import cloudpickle
    from torch import nn
    from ssmscope.core.edits import edits_of
    from ssmscope.core.model import Model

    if edits_of(model.module):
        raise InputError(f"{model.name} is edited, which workers do not see: leave the engine ray out")
    modules = {id(part): ("module", name) for name, part in model.module.named_modules()}
    known = modules | {id(part): ("parameter", name) for name, part in model.module.named_parameters()}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, Model):
                if value.module is not model.module:
                    raise TypeError("a measure is of one model")
                dtype = str(next(model.module.parameters()).dtype).removeprefix("torch.")
                rest = model.tokenizer, model.class_names, dtype, model.device.type, model.fingerprint
                return "model", model.name, *rest
            if id(value) in known:
                return known[id(value)]
            if isinstance(value, nn.Module):
                raise TypeError(f"{type(value).__name__} is not part of the model that is measured")
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return "tensor", value.detach().cpu()
            return None

    stream = io.BytesIO()
    # The model comes first, because its parts are looked up in it.
    Pickler(stream).dump((model, measure))
    return stream.getvalue()


def unpacked(payload: bytes, models: int, gpu: int | None = None) -> Measure:
    """Unpickle what `packed` made, with the model as this process loads it, of which `models` stay loaded; `gpu` is the
    number of the GPU for a model that was on one. Raise InputError if it cannot be loaded, or is not the one that was
    packed."""
    import pickle

    from ssmscope.core.model import Model
    from ssmscope.loading.load import ModelCache, cache_models, load

    global _models
    _models = _models or ModelCache(models)
    place: list[Model] = []

    def loaded(
        name: str, tokenizer: Any, class_names: tuple[str, ...] | None, dtype: str, device: str, fingerprint: str
    ) -> Model:
        if not place:
            with cache_models(_models):
                found = load(name, dtype=dtype, device=device if gpu is None else device.replace("cuda", f"cuda:{gpu}"))
            if found.fingerprint != fingerprint:
                raise InputError(
                    f"the model in memory is not what {name} holds, from which workers load it: save it and give its "
                    "directory, or leave the engine ray out"
                )
            place.append(Model(found.module, tokenizer, name, class_names))
        return place[0]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, found: Any) -> Any:
            kind, *rest = found
            if kind == "model":
                return loaded(*rest)
            if kind == "tensor":
                return rest[0].to(place[0].device)
            module = place[0].module
            return module.get_submodule(rest[0]) if kind == "module" else module.get_parameter(rest[0])

    return Unpickler(io.BytesIO(payload)).load()[1]
