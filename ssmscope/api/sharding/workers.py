"""Batches of a data set as tasks of a Ray cluster; a task whose worker or node dies restarts elsewhere."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.options import Metavar, Range
from ssmscope.api.sharding.cluster import (
    MAX_RETRIES,
    OWN_GPU,
    Setting,
    check_engine,
    check_installed,
    connected,
    finished,
    gpu_given,
    lacking,
)
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.api.sharding.parts import Columns, Measure
    from ssmscope.core.model import Model

TASKS_PER_CPU = 2
"""Submitted tasks per task that can run at once, so that none waits for the next batch."""


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
                return "model", model.name, model.tokenizer, dtype, model.device.type, model.fingerprint
            if id(value) in known:
                return known[id(value)]
            if isinstance(value, nn.Module):
                raise TypeError(f"{type(value).__name__} is no part of the model that is measured")
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

    from ssmscope.architectures.loading.load import ModelCache, cache_models, load
    from ssmscope.core.model import Model

    global _models
    _models = _models or ModelCache(models)
    place: list[Model] = []

    def loaded(name: str, tokenizer: Any, dtype: str, device: str, fingerprint: str) -> Model:
        if not place:
            with cache_models(_models):
                found = load(name, dtype=dtype, device=device if gpu is None else device.replace("cuda", f"cuda:{gpu}"))
            if found.fingerprint != fingerprint:
                raise InputError(
                    f"the model in memory is not what {name} holds, from which workers load it: save it and give its "
                    "directory, or leave the engine ray out"
                )
            place.append(Model(found.module, tokenizer, name))
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
