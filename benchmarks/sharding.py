"""Fidelity over many texts on the workers of Ray, with one of them killed; and batches over the nodes of a cluster.

    OMP_NUM_THREADS=1 python benchmarks/sharding.py
    OMP_NUM_THREADS=1 python benchmarks/sharding.py --texts 200 --local
    python benchmarks/sharding.py --cluster

Seconds are from the call to the result: they have Ray's start, the workers' imports and their loading of the model in
them. With --cluster a Ray of 8 nodes with 1 CPU each is simulated on this machine, and one of them dies. The batches
wait and compute next to nothing: it shows which nodes do the work and that none is lost, not how fast machines are.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from timing import machine
import ssmscope
from ssmscope.api.sharding.parts import over
from ssmscope.api.sharding.workers import on_engine
from ssmscope.data.text import load_text

NODES = 8


def digits(result: Any) -> str:
    """Return a result without its date."""
    found = json.loads(result.to_json())
    found["provenance"].pop("date")
    return json.dumps(found, sort_keys=True)


def kill_a_worker(ended: threading.Event, after: float) -> None:
    """SIGKILL a worker that is at work, once one has had so many seconds of the processor."""
    while not ended.wait(0.2):
        at_work = [each for each in psutil.Process().children(recursive=True) if _title(each) == "ray::_measured"]
        if at_work and max(sum(each.cpu_times()[:2]) for each in at_work) > after:
            os.kill(at_work[0].pid, signal.SIGKILL)
            print(f"killed worker {at_work[0].pid}", flush=True)
            return


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def fidelity(texts: int, after: float, local: bool) -> None:
    model, data = ssmscope.load("demo/sst2-mamba2"), load_text("sst2", "train")
    runs: list[tuple[str, dict[str, Any], bool]] = [
        ("1 worker", dict(engine="ray", workers=1), False),
        ("2 workers", dict(engine="ray", workers=2), False),
        ("2 workers, one killed", dict(engine="ray", workers=2), True),
    ]
    runs = [("this process", {}, False), *runs] if local else runs
    seconds, found = {}, {}
    for name, options, kill in runs:
        ended = threading.Event()
        killer = threading.Thread(target=kill_a_worker, args=(ended, after))
        if kill:
            killer.start()
        start = time.perf_counter()
        with on_engine(**options):
            found[name] = digits(ssmscope.fidelity(model, data, limit=texts))
        seconds[name] = time.perf_counter() - start
        ended.set()
        share = f", {seconds[name] / seconds['1 worker']:.2f} of one worker's" if "1 worker" in seconds else ""
        print(f"{name}: {seconds[name]:.1f} s{share}, {texts / seconds[name]:.1f} texts a second", flush=True)
    print("same digits:", len(set(found.values())) == 1)


def cluster(batches: int, seconds: float) -> None:
    import ray
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    made = Cluster(initialize_head=True, head_node_args={**small, "num_cpus": 0, "_system_config": soon})
    nodes = [made.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(NODES)]
    model, texts = ssmscope.load("demo/sst2-mamba2"), load_text("sst2").texts

    def measure(rows: Sequence[int]) -> dict[str, np.ndarray]:
        import ray

        time.sleep(seconds)
        logits = model.logits(model.encode([texts[row] for row in rows])).numpy()
        return {"logits": logits, "node": np.array(ray.get_runtime_context().get_node_id())}

    try:
        by_node: collections.Counter[str] = collections.Counter()
        start, logits = time.perf_counter(), []
        with on_engine(engine="ray", address=made.address):
            for number, (_, part) in enumerate(over(model, [[row] for row in range(batches)], measure)):
                by_node[str(part["node"])] += 1
                logits.append(part["logits"])
                if number == batches // 2:
                    made.remove_node(nodes[0], allow_graceful=False)
                    print("killed a node", flush=True)
        taken = time.perf_counter() - start
        print(f"{batches} batches of {seconds} s in {taken:.1f} s on {len(by_node)} nodes of 1 CPU")
        print("batches of each node:", *sorted(by_node.values(), reverse=True))
        expected = [model.logits(model.encode([texts[row]])).numpy() for row in range(batches)]
        print("same digits:", all(np.array_equal(*pair) for pair in zip(logits, expected, strict=True)))
    finally:
        ray.shutdown()
        made.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--after", type=float, default=30, help="seconds of work of the worker that is killed")
    parser.add_argument("--local", action="store_true", help="first without Ray")
    parser.add_argument("--cluster", action="store_true", help="the simulated cluster instead")
    parser.add_argument("--batches", type=int, default=240)
    options = parser.parse_args()
    print(machine())
    if options.cluster:
        cluster(options.batches, 1.0)
    else:
        fidelity(options.texts, options.after, options.local)


if __name__ == "__main__":
    main()
