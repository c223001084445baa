"""Processes that are forked off one that has imported what they need: an import of transformers takes seconds. For
tests of a process of its own, or of its remains when it is killed. Nothing of ssmscope is imported in them before their
own code imports it, and in those of `PLAIN` and `TORCH` nothing of transformers."""

from __future__ import annotations

import array
import atexit
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
MESSAGE = 1 << 17
"""The longest request in bytes: a process's code, arguments and environment."""


class Warm:
    """A process that has imported some modules, if they are installed, and from which others are forked. It is itself
    forked off its `parent`, at the first use, and ends with the process that uses it."""

    def __init__(self, *modules: str, parent: Warm | None = None) -> None:
        self.modules, self.parent = modules, parent
        self._server: socket.socket | None = None

    def start(self, code: str, *arguments: object, **options: Any) -> Process:
        """Run code as `python -c CODE ARGUMENTS` does; with the options of `Process`."""
        return Process(self, code, [str(each) for each in arguments], **options)

    def run(self, code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """`start`, and what it printed when it has ended."""
        given = [str(each) for each in arguments]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code_of_exit = self.start(code, *given, **{"stdout": out, "stderr": err, **options}).wait()
            printed = [each.seek(0) or each.read() for each in (out, err)]
        return subprocess.CompletedProcess([sys.executable, "-c", code, *given], code_of_exit, *printed)

    def send(self, request: Mapping[str, object], descriptors: list[int]) -> None:
        message = json.dumps(request).encode()
        assert len(message) < MESSAGE
        if self._server is None:
            self._server = self._started()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self._server.sendmsg([message], rights)

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if self.parent is not None:
                self.parent.send({"modules": self.modules}, [theirs.fileno()])
            else:
                command = [sys.executable, __file__, str(theirs.fileno()), *self.modules]
                atexit.register(subprocess.Popen(command, pass_fds=[theirs.fileno()]).wait)
        atexit.register(ours.close)  # which ends it; these run before what was registered earlier
        return ours


class Process:
    """One that runs; as a `subprocess.Popen`, with what is needed of it. Output goes where that of this process goes,
    or to the files `stdout` and `stderr`. ssmscope is that of this checkout, whatever `env` says. It leads a process
    group of its own."""

    stdin = None

    def __init__(
        self, warm: Warm, code: str, arguments: list[str], *, env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None, stdout: TextIO | int = 1, stderr: TextIO | int = 2,
    ) -> None:  # fmt: skip
        self.returncode: int | None = None
        self.stdout = self.stderr = None
        self._read, status = os.pipe()
        request = {
            "code": code,
            "arguments": arguments,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
        }
        places = [place if isinstance(place, int) else place.fileno() for place in (stdout, stderr)]
        try:
            warm.send(request, [status, *places])
        finally:
            os.close(status)
        self.pid = int(self._line())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._read], [], [], 0)[0]:
            return self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._line())
            os.close(self._read)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _line(self) -> str:
        found = b""
        while not found.endswith(b"\n"):
            byte = os.read(self._read, 1)
            assert byte, "the process from which others are forked has ended"
            found += byte
        return found.decode()


PLAIN = Warm()
"""Has imported nothing: a fork of it takes 2 ms, of a process with torch 10 to 50."""
TORCH = Warm(
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.export", "sklearn.metrics", "pandas", "accelerate",
    "torch.nn.attention.flex_attention", "huggingface_hub", "regex", "safetensors.torch", "tokenizers", "xxhash",
    "jaxtyping", "einops", parent=PLAIN,
)  # fmt: skip
"""What transformers and ssmscope import, and neither of them."""
TRANSFORMERS = Warm(
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("mamba", "mamba2", "bamba", "falcon_mamba", "rwkv", "auto")
    ),
    "transformers",
    parent=TORCH,
)
"""What ssmscope imports."""


def serve(asked: socket.socket, modules: list[str]) -> None:
    """Import modules, then fork a process for every request, until nobody can ask any more."""
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    ended, ending = os.pipe()
    for end in (ended, ending):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ending)
    running: dict[int, int] = {}
    servers: list[int] = []
    while True:
        ready, _, _ = select.select([asked, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            reap(running)
        if asked not in ready:
            continue
        message, rights, _, _ = asked.recvmsg(MESSAGE, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        if not message:
            for each in servers:
                os.waitpid(each, 0)
            os._exit(0)
        descriptors = array.array("i")
        for _, _, given in rights:
            descriptors.frombytes(given)
        request = json.loads(message)
        if child := os.fork():
            if "code" in request:
                os.setpgid(child, child)
                running[child] = descriptors[0]
                os.write(descriptors[0], f"{child}\n".encode())
            else:
                servers.append(child)
            for each in descriptors[1 if "code" in request else 0 :]:
                os.close(each)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (asked.detach(), ended, ending, *running.values()):
            os.close(each)
        if "modules" in request:
            return serve(socket.socket(fileno=descriptors[0]), request["modules"])
        os.close(descriptors[0])
        become(request, *descriptors[1:])


def reap(running: dict[int, int]) -> None:
    """Tell how the processes ended that have."""
    for child, place in list(running.items()):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with suppress(BrokenPipeError):
                os.write(place, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(place)
            del running[child]


def become(request: dict[str, Any], out: int, err: int) -> None:
    """Be a fresh interpreter that runs a piece of code, and end as it does."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for place, number in ((out, 1), (err, 2)):
        os.dup2(place, number)
        os.close(place)
    for number in (1, 2):
        name = {1: "stdout", 2: "stderr"}[number]
        setattr(sys, name, io.TextIOWrapper(open(number, "wb", closefd=False), line_buffering=number == 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = str(ROOT)
    sys.argv = ["-c", *request["arguments"]]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    status: object = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else status is not None)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
