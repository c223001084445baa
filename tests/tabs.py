"""Pages in a browser that neither complain nor fetch anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def untroubled(page: Any, *allowed: str) -> Iterator[None]:
    """Fail at the end if the page complained, or asked for what does not begin with one of these."""
    troubles: list[str] = []
    heard = {
        "console": lambda message: troubles.append(f"console: {message.type} {message.text}"),
        "pageerror": lambda error: troubles.append(f"error: {error}"),
        "dialog": lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        "request": lambda request: request.url.startswith(allowed) or troubles.append(f"request: {request.url}"),
    }
    for event, hears in heard.items():
        page.on(event, hears)
    yield
    for event, hears in heard.items():
        page.remove_listener(event, hears)
    assert not troubles
