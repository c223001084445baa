"""One registry for all that can be added: layers, analyses, attacks, methods of explanation, layouts of checkpoints.

A package adds to one by an entry point of the registry's group, without a line changed here:

    [project.entry-points."ssmscope.methods"]
    saliency = "my_package.saliency:saliency"
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Generic, TypeVar

from ssmscope.errors import InputError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects by name, each imported when it is first asked for: our own, those that installed packages declare as
    entry points of `group`, and those that running code adds. `what` names one of them in messages."""

    def __init__(self, what: str, group: str) -> None:
        self.what, self.group = what, group
        self._found: dict[str, T | str] = {}
        self._asked_packages = False

    def add(self, name: str, found: T | str, *, instead: bool = False) -> None:
        """Register an object, or its place as "package.module:object". Raise TypeError if the name is another's, unless
        it comes `instead`."""
        known = found if instead else self._entries().get(name, found)
        if known != found and place_of(known) != place_of(found):
            raise TypeError(f"the {self.what} {name!r} of {place_of(found)} is already that of {place_of(known)}")
        self._found[name] = found

    def __getitem__(self, name: str) -> T:
        """Return the object of a name. Raise InputError, naming the nearest, if there is none, or if the package that
        declares it cannot be imported."""
        if name not in self:
            said = f"unknown {self.what} {str(name)!r:.80}; choose one of {', '.join(self)}"
            raise InputError(f"{said}{did_you_mean(str(name), self)}")
        found = self._entries()[name]
        if isinstance(found, str):
            found = self._found[name] = self._imported(name, found)
        return found

    def _imported(self, name: str, place: str) -> T:
        module, _, path = place.partition(":")
        try:
            found: Any = importlib.import_module(module)
            return functools.reduce(getattr, filter(None, path.split(".")), found)
        except (ImportError, AttributeError) as error:
            if module.partition(".")[0] == __name__.partition(".")[0]:
                raise
            said = f"the {self.what} {name!r} is declared as {place} by an installed package, which has none there"
            raise InputError(f"{said} ({error}): mend or uninstall that package") from error

    def _entries(self) -> dict[str, T | str]:
        if not self._asked_packages:
            self._asked_packages = True
            for room in _rooms():
                self._found |= room.get(self.group, {})
            for each in sorted(_declared().select(group=self.group), key=lambda each: each.name):
                if each.name in self._found:
                    said = (
                        f"an installed package declares {each.value} as the {self.what} {each.name!r}, which is that of"
                    )
                    raise InputError(f"{said} {place_of(self._found[each.name])}: uninstall one of the two")
                self._found[each.name] = each.value
        return self._found

    @property
    def places(self) -> Mapping[str, str]:
        """Read-only view of the places of all objects as "package.module:object", by name."""
        return MappingProxyType({name: place_of(found) for name, found in self._entries().items()})

    def __contains__(self, name: object) -> bool:
        return name in self._entries()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries()))

    def __len__(self) -> int:
        return len(self._entries())


@functools.cache
def _declared() -> Any:
    """Return the entry points of all installed packages, whose files are read once."""
    return metadata.entry_points()


@functools.cache
def _rooms() -> list[Mapping[str, Mapping[str, str]]]:
    """Return what rooms of our own package register, by group and name, the ENTRIES in their `entries`: first those of
    rooms without an ORDER, then by it."""
    package = __name__.partition(".")[0]
    files = sorted(Path(__file__).parents[1].glob("*/entries.py"))
    found = [importlib.import_module(f"{package}.{file.parent.name}.entries") for file in files]
    return [room.ENTRIES for room in sorted(found, key=lambda room: getattr(room, "ORDER", 0))]


def place_of(found: Any) -> str:
    """Return the place of an object, or one already written, as "package.module:object", and that of a module."""
    if isinstance(found, str):
        return found
    if isinstance(found, ModuleType):
        return found.__name__
    return f"{found.__module__}:{getattr(found, '__qualname__', repr(found))}"
