"""Imports point one way, nothing imports in a circle, and the project stands on its own."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import shapes
from ssmscope.api import analyses as registry
from ssmscope.core.known_models import MODELS, of_transformers

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ssmscope"

BELOW = {"errors", "outline", "backends", "ops", "core", "networks", "layers", "loading", "render", "data", "api"}
"""What analyses stand on."""
ANALYSES = {"interp", "probes", "attacks"}
MAY_IMPORT = {
    "errors": set(), "outline": set(), "backends": {"errors"}, "ops": {"errors", "outline", "backends"},
    "core": {"errors", "outline", "ops"}, "networks": {"errors", "ops", "core"},
    "layers": {"errors", "ops", "core", "networks"}, "loading": {"errors", "core", "networks", "layers"},
    "render": {"errors", "outline", "core"}, "data": {"errors", "core"},
    "api": BELOW - {"api", "backends", "networks", "layers"},
    "evaluation": BELOW - {"backends", "render", "networks", "layers"}, "interp": BELOW - {"backends"} | {"evaluation"},
    "probes": BELOW - {"backends", "networks", "layers"} | {"evaluation", "interp"},
    "attacks": BELOW - {"backends", "networks", "layers"} | {"evaluation", "interp"},
    "reports": BELOW - {"backends", "networks", "layers"} | {"evaluation"} | ANALYSES,
    "cli": BELOW - {"networks", "layers"} | {"evaluation", "reports"} | ANALYSES, "testing": BELOW,
    "zoo": BELOW - {"backends"} | {"evaluation", "cli"},
}  # fmt: skip
"""Nothing imports the zoo, which is added as another package would be."""
ENTRANCES = {"__init__", "__main__"}
"""The package's own face, which names everything lazily."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `ssmscope`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def each_of(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Try all names in one test: as thousands of tests most of their time was pytest's."""

    def decorate(test: Callable[[str], None]) -> Callable[[], None]:
        def every() -> None:
            for name in names:
                try:
                    test(name)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from error

        every.__name__, every.__doc__ = test.__name__, test.__doc__
        return every

    return decorate


def imported(tree: ast.AST, name: str, *, at_import: bool = False, running: bool = False) -> Iterator[str]:
    """The names that a module imports, dotted; with `at_import` only those that its import brings with it, with
    `running` those in functions too, but none that is for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # nothing is imported within one, and most of a tree is of them
            continue
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (at_import or running) and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(filter(None, ("ssmscope", *above, node.module)))
            else:
                base = node.module or ""
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node, name, at_import=at_import, running=running)


def ours(names: Iterator[str]) -> set[str]:
    """The modules of ours among the imported names; a name within a module counts as the module."""
    found = set()
    for name in names:
        if name.partition(".")[0] != "ssmscope":
            continue
        parts = name.split(".")[1:]
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        found.add(".".join(parts))
    return found - {""}


@functools.cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


nodes = functools.cache(lambda name: list(ast.walk(parsed(name))))


@each_of(sorted(set(MODULES) - ENTRANCES))
def test_imports_point_one_way(name: str) -> None:
    home = name.partition(".")[0]
    assert home in MAY_IMPORT, f"give ssmscope/{home} its place in MAY_IMPORT"
    reached = {target.partition(".")[0] for target in ours(imported(parsed(name), name))} - {home}
    wrong = reached - MAY_IMPORT[home]
    assert not wrong, f"ssmscope.{name} imports {sorted(wrong)}; {home} may import {sorted(MAY_IMPORT[home])}"


def test_the_order_has_no_circle() -> None:
    left = dict(MAY_IMPORT)
    while free := [home for home, below in left.items() if not below & left.keys()]:
        for home in free:
            del left[home]
    assert not left


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: ours(imported(parsed(name), name, running=True)) - {name} for name in MODULES}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these import each other: {sorted(graph)}"


SAY_EACH_OTHER = [
    {"api.results", "api.scores"},
    {"reports.gates", "reports.hardest", "reports.scores", "reports.store"},
]
"""Modules that name each other, in annotations alone."""


def test_few_modules_name_each_other() -> None:
    names = {name: ours(imported(parsed(name), name)) - {name} for name in MODULES}

    def reached(name: str) -> set[str]:
        found, left = set(), [name]
        while left:
            left += (new := names.get(left.pop(), set()) - found)
            found |= new
        return found

    every = {name: reached(name) for name in names}
    circles = {frozenset(other for other in every[name] if name in every.get(other, ())) for name in names}
    assert sorted(map(sorted, circles - {frozenset()})) == sorted(map(sorted, SAY_EACH_OTHER))


FLOATS = {"zeros", "ones", "empty", "rand", "randn", "eye", "linspace", "logspace"}
"""What torch makes in the process's default dtype, which a user may have set."""
TRAINED = ("networks.", "layers.", "loading.", "zoo.")
"""Where parameters are made, in the dtype that whoever makes a model has chosen."""


@each_of([name for name in MODULES if not name.startswith(TRAINED)])
def test_nothing_is_made_in_the_default_dtype(name: str) -> None:
    made = [
        f"{node.lineno}: torch.{node.func.attr}"
        for node in nodes(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", None) == "torch"
        and node.func.attr in FLOATS
        and "dtype" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not made


@pytest.mark.parametrize(
    "name", ["errors", *(name for name in MODULES if name.startswith(("backends", "ops", "core")))]
)
def test_transformers_is_not_imported_below_architectures(name: str) -> None:
    """The mathematics can be used without the seconds that transformers takes to import."""
    assert not [target for target in imported(parsed(name), name, at_import=True) if target.startswith("transformers")]


QUICK = [
    *("__init__", "cli", "core.batching", "core.known_models", "core.text_files", "data", "data.text", "errors"),
    *("attacks.recipes", "zoo.training"),
    *(name for name in MODULES if name.startswith("api.") and not name.startswith(("api.sharding.", "api.checkpoint"))),
    *(name for name in MODULES if name.startswith("cli.")),
    *(
        module.removeprefix("ssmscope.")
        for module in sorted({place.partition(":")[0] for place in registry.ANALYSES.places.values()})
    ),
]


@pytest.mark.parametrize("name", QUICK)
def test_what_must_be_quick_to_import_imports_nothing_heavy(name: str) -> None:
    heavy = {"torch", "transformers", "datasets", "pandas", "matplotlib", "captum", "pyarrow", "scipy"}
    tops = {target.partition(".")[0] for target in imported(parsed(name), name, at_import=True)}
    assert not tops & heavy


PRIVATE = re.compile(
    r"torch\.(\w+\.)*_(?!dynamo\"\))\w|_functorch|_inductor|os\.environ\._|environ, *\"_|_current_level|_empty_strided"
    r"|mkldnn|mallopt|gc\.(freeze|disable|set_threshold)|cuLaunchKernel|triton\.(compiler|backends|runtime)|\bCDLL\(None"
)
"""Private names of other libraries, and what changes the user's process. torch gives no other name to the class of
compiled modules than one in `torch._dynamo`."""
OWN_PROCESS = "cli"
"""Module whose process is the command line's own, not the user's."""


@each_of(MODULES)
def test_no_private_name_of_another_library(name: str) -> None:
    lines = MODULES[name].read_text("utf-8").splitlines()
    found = [f"{at}: {line.strip()}" for at, line in enumerate(lines, 1) if PRIVATE.search(line)]
    assert [line for line in found if name != OWN_PROCESS or "gc." not in line] == []


@each_of([name for name in MODULES if not name.startswith("backends")])
def test_only_backends_ask_what_applies(name: str) -> None:
    assert "applicable" not in MODULES[name].read_text("utf-8")


def texts() -> list[Path]:
    """The project's own text files."""
    kept = [ROOT / name for name in ("pyproject.toml", "constraints.txt", "Makefile", "README.md", "CONTRIBUTING.md")]
    kept.append(ROOT / ".pre-commit-config.yaml")
    for folder in ("ssmscope", "tests", "benchmarks", "docs", "notebooks"):
        suffixes = {".py", ".md", ".toml", ".json", ".html", ".ipynb", ".yaml", ".txt"}
        kept += [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return [path for path in kept if path.is_file()]


def test_the_project_names_no_path_of_its_makers() -> None:
    private = re.compile(r"\.\./shar" r"ed|\bshar" r"ed/(?:data|oracles|papers)|/wor" r"k/|/ro" r"ot/")
    found = [path for path in texts() if private.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert not found


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b|NotImplemented" r"Error")
    code = [path for path in texts() if path.suffix == ".py"]
    found = [path for path in code if marks.search(path.read_text(encoding="utf-8"))]
    assert code and not found


def test_words_of_an_option_stand_in_one_order():
    """`typing` takes unions of equal words for one, in the order that was met first: messages hung on the imports."""
    orders: dict[frozenset, set] = {}
    for name in MODULES:
        for node in nodes(name):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
                words = ast.literal_eval(node.slice)
                words = words if isinstance(words, tuple) else (words,)
                orders.setdefault(frozenset(words), set()).add(words)
    assert len(orders) > 20 and not [found for found in orders.values() if len(found) > 1]


# What is only reached by a command line, or writes one.
OPTIONS_ARE_TYPED = re.compile(
    r"(api\.(analysis|inputs|options|typed|sharding\.workers)|cli|errors|reports|zoo\.training\.(card|verbs))\b"
)


@each_of([name for name in MODULES if not OPTIONS_ARE_TYPED.match(name)])
def test_messages_speak_python(name: str) -> None:
    """They write an option as `name=…`, which the command line says its way (`ssmscope.errors.as_typed`)."""
    said = [node.value for node in nodes(name) if isinstance(node, ast.Constant)]
    texts = [text for text in said if isinstance(text, str) and "analyze " not in text and "style" not in text]
    assert not [text for text in texts if re.search(r"(?<![\w(-])--[a-z][\w-]*(?![\w-]*:)", text)]


LISTS_KINDS = {"reports.live"}
"""Modules that list analyses: the page of three. A family's own modules may list its own, and a room's `entries`
register them."""


def listed(node: ast.AST) -> set[str]:
    """Strings of a list, tuple, set or text that is split, or keys of a table."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        text = getattr(node.func.value, "value", None)
        return set(text.split()) if isinstance(text, str) else set()
    parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


@each_of(MODULES)
def test_what_is_added_is_named_by_its_owner_alone(name: str) -> None:
    """No other module lists three kinds of results, or three families."""
    kinds = {kind for declared in registry.analyses().values() for kind in (declared.name, *declared.kinds)}
    families = {*MODELS, *of_transformers(), *of_transformers().values()}
    for what, known in (("kinds", kinds), ("families", families)):
        owned = name in LISTS_KINDS if what == "kinds" else name.startswith(("layers.", "zoo."))
        owned |= name.endswith(".entries")
        assert owned or not [found for node in nodes(name) if len(found := listed(node) & known) > 2]


def test_modules_whose_shapes_are_checked_are_there() -> None:
    assert not set(shapes.CHECKED) - MODULES.keys()
