"""Windows and macOS, by reading: no call that only POSIX has, no encoding of the machine's, no name Windows refuses."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssmscope.backends.c import compiler

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "ssmscope").rglob("*.py"))

POSIX_MODULES = {"crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "spwd"}
POSIX_MODULES |= {"syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": """chown chroot confstr ctermid fchdir fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg
        getpgid getpgrp getpriority getresuid getsid getuid initgroups killpg lchown lockf major makedev mkfifo mknod
        nice openpty pathconf posix_fadvise posix_spawn pread preadv pwrite register_at_fork sched_getaffinity
        sched_setaffinity sched_yield sendfile setegid seteuid setgid setgroups setpgid setpgrp setpriority setsid
        setuid statvfs sync sysconf tcgetpgrp tcsetpgrp ttyname uname wait wait3 wait4 waitid WEXITSTATUS WIFEXITED
        O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_SYNC O_CLOEXEC""",
    "signal": """SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGTSTP SIGUSR1
        SIGUSR2 SIGVTALRM SIGWINCH alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending
        sigtimedwait sigwait""",
    "socket": "AF_UNIX SO_REUSEPORT socketpair",
    "select": "poll epoll kqueue",
    "time": "tzset clock_gettime",
}
"""Names of the standard library that Windows lacks, or macOS: sched_getaffinity, for one."""
OF_POSIX = {(module, name) for module, names in POSIX_NAMES.items() for name in names.split()}
WHERE_POSIX = {"compiler.py": "getuid"}
"""Files that only POSIX runs, and the name whose absence they ask for first."""

TEXT_METHODS = {"read_text": 0, "write_text": 1}
"""Methods of paths, and at which place the encoding may stand."""
FOR_ALL = re.compile(r"^(/tmp|/dev|/proc|/var|/etc|/usr|/home|[A-Za-z]:\\)(/|$)")
RESERVED = re.compile(r"^(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)


def found_in(source: str, name: str = "example.py") -> list[str]:
    """Everything in a source that Windows or macOS lacks, or that depends on the machine's encoding."""
    nodes = [*ast.walk(ast.parse(source))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    asked = {ast.unparse(call.args[1]).strip("'") for call in calls if getattr(call.func, "id", "") == "hasattr"}
    asked |= {WHERE_POSIX[name]} if name in WHERE_POSIX else set()
    return [said for node in nodes for said in _faults(node, asked, name)]


def _faults(node: ast.AST, asked: set[str], name: str) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        yield from (f"{node.lineno}: {module}" for module in modules if module.partition(".")[0] in POSIX_MODULES)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.lineno}: {a.name}" for a in node.names if (node.module, a.name) in OF_POSIX)
    if isinstance(node, ast.Attribute) and (getattr(node.value, "id", ""), node.attr) in OF_POSIX:
        if node.attr not in asked:
            yield f"{node.lineno}: {ast.unparse(node)}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and name not in WHERE_POSIX:
        if FOR_ALL.match(node.value) or node.value in ("fork", "forkserver"):
            yield f"{node.lineno}: {node.value!r}"
    if isinstance(node, ast.Call):
        yield from _without_encoding(node)


def _without_encoding(call: ast.Call) -> Iterator[str]:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given or None in given:
        return
    if called in TEXT_METHODS and isinstance(call.func, ast.Attribute):
        lacks = len(call.args) <= TEXT_METHODS[called]
    elif called in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile") and owner not in ("os", "Image"):
        place = 1 if isinstance(call.func, ast.Name) or owner == "io" or called == "fdopen" else 0
        mode = given.get("mode", call.args[place] if len(call.args) > place else None)
        said = mode.value if isinstance(mode, ast.Constant) else "w+b" if "File" in called else "r"
        lacks = "b" not in str(said)
    else:
        said = {*given} & {"text", "universal_newlines"}
        lacks = called in ("run", "Popen", "check_output") and bool(said)
    if lacks:
        yield f"{call.lineno}: no encoding in {ast.unparse(call):.60}"


def test_nothing_needs_posix_or_the_machines_encoding() -> None:
    found = {file: found_in(file.read_text(encoding="utf-8"), file.name) for file in FILES}
    assert len(found) > 300 and not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize("name", WHERE_POSIX.values())
def test_without_posix_a_kernel_is_unavailable_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(compiler.os, name)
    with pytest.raises(compiler.Unavailable, match="^C kernels are compiled on POSIX systems only$"):
        compiler.load(ROOT / "ssmscope" / "backends" / "c" / "selective_scan.c")


def test_every_system_can_hold_the_names_of_the_files() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    names = listed.stdout.splitlines() or [path.relative_to(ROOT).as_posix() for path in (ROOT / "ssmscope").rglob("*")]
    assert len(names) > 500
    assert not [name for name in names if re.search(r'[:<>"|?*\\]|[. ](/|$)', name) or not name.isascii()]
    assert not [name for name in names if any(RESERVED.match(part) for part in name.split("/"))]
    assert len({name.lower() for name in names}) == len(names)
    assert max(map(len, names)) <= 120
