"""ASGI middleware in front of Gradio that lets only the live page's own requests pass.

Gradio has routes for uploads, files, foreign addresses and code that the page does not use, and accepts any values in a
call. Requests pass only if they use the server's own name, come from no other page, go to a route that the page needs,
and have values of the right types and of bounded size.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

Argument = type[str] | type[bool] | tuple[str, ...] | None
"""Type of a call's argument: a text, a bool, one of these words, or null if the server keeps the value itself."""

ROUTES = re.compile(
    r"/|/theme\.css|/favicon\.ico|/robots\.txt|/manifest\.json|/(?:assets|static|svelte)/[\w.@/-]+"
    r"|/gradio_api/heartbeat/\w{1,64}|/gradio_api/startup-events",
    re.ASCII,
)
"""Routes that the page reads besides its answers: itself, its scripts and styles."""
CALL, ANSWERS = "/gradio_api/queue/join", "/gradio_api/queue/data"
"""Routes to which the page sends its calls and from which it reads the answers."""
MAX_SESSIONS = 1024
"""Number of sessions, those that called last, whose answers can be read."""
SESSION = re.compile(r"\w{1,64}", re.ASCII)
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'self'; "
    "frame-ancestors 'self'"
)
"""Policy that blocks all resources of other hosts and embedding in other pages."""
EXTERNAL_RESOURCES = re.compile(
    rb"""<script[^>]*\bsrc="https?://[^>]*>\s*</script>|<link[^>]*\bhref="https?://[^>]*>""", re.IGNORECASE
)
"""Elements of Gradio's page that load from other hosts: fonts, and a script for embedded pages."""
MAX_CALL_BYTES = 2**20
"""Maximum size of a call, without the room for long texts."""

Headers = Iterable[tuple[bytes, bytes]]


class Refused(Exception):
    """Refusal of a request, with its HTTP status and a line that says why."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class OwnPage:
    """Middleware that passes only the page's own requests and removes external resources from its pages.

    Args:
        app: the wrapped application.
        hosts: allowed host names, which prevents DNS rebinding by other pages; None for any numeric address and this
            machine's names.
        calls: argument types of each call that the page makes, by its number.
        max_bytes: maximum size of a call.
    """

    def __init__(
        self,
        app: Any,
        hosts: Collection[str] | None = None,
        calls: Mapping[int, Sequence[Argument]] | None = None,
        max_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        self.app, self.hosts, self.calls, self.max_bytes = app, hosts, calls or {}, max_bytes
        self._called: OrderedDict[str, None] = OrderedDict()
        """Sessions that made the latest calls."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            check_origin(scope["headers"], self.hosts, page=scope["path"] == "/")
            if (scope["method"], scope["path"]) == ("POST", CALL):
                call = checked_call(await read_body(scope["headers"], receive, self.max_bytes), self.calls)
                self._remember(call["session_hash"])
                body = json.dumps(call).encode()
                scope = {**scope, "headers": _sized(scope["headers"], len(body))}
                receive = _given(body, receive)
            elif (scope["method"], scope["path"]) == ("GET", ANSWERS):
                asked = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])
                if asked[0] not in self._called:  # Gradio would crash on an unknown session.
                    raise Refused(404, "this session has made no call")
            elif scope["method"] not in ("GET", "HEAD") or not _is_read(scope["path"]):
                raise Refused(404, "this page has no such route")
        except Refused as refusal:
            await _refuse(send, refusal)
            return
        await self.app(scope, receive, _own(send))

    def _remember(self, session: str) -> None:
        self._called[session] = None
        self._called.move_to_end(session)
        while len(self._called) > MAX_SESSIONS:
            self._called.popitem(last=False)


# ---- who asks


def check_origin(headers: Headers, hosts: Collection[str] | None, *, page: bool = False) -> None:
    """Refuse a request that uses another name than the server's own, or comes from another page.

    Args:
        page: True if the page itself is requested, to which any other may link.

    Raises:
        Refused: with status 400 for the name, 403 for the other page.
    """
    given = _decoded(headers)
    host = given.get("host", "").lower()
    name = re.sub(r":\d+$", "", host)
    if not (name in hosts if hosts is not None else _is_own(name)):
        raise Refused(400, "call this server by its own name")
    origin = given.get("origin")
    if origin is not None:
        try:
            parts = urlsplit(origin.lower())
        except ValueError:  # The brackets hold no IPv6 address.
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or parts.netloc != host:
            raise Refused(403, "another page may not use this server")
    elif not page and given.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise Refused(403, "another page may not use this server")


def _is_own(name: str) -> bool:
    """Return True if a name is a numeric address, which no other host can claim, or one of this machine's names."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    except ValueError:
        return name in {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}


# ---- what is asked


def _is_read(path: str) -> bool:
    return ROUTES.fullmatch(path) is not None and ".." not in path.split("/")


async def read_body(headers: Headers, receive: Any, max_bytes: int) -> bytes:
    """Read the body of a request.

    Raises:
        Refused: if it has more than `max_bytes` bytes, or its content type is not JSON.
    """
    given = _decoded(headers)
    if given.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "a call is JSON")
    size = given.get("content-length", "0")
    too_large = Refused(413, f"a call has at most {max_bytes:,} bytes")
    if not size.isdecimal() or len(size) > 18 or int(size) > max_bytes:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the call was interrupted")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def checked_call(body: bytes, calls: Mapping[int, Sequence[Argument]]) -> dict[str, Any]:
    """Parse a call and keep only the fields that the page's own calls have.

    Raises:
        Refused: if it is no call of the page, or has values of other types.
    """
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the call is not valid JSON") from None
    if not isinstance(call, dict):
        raise Refused(422, "a call is an object with fn_index, data and session_hash")
    number, data, session = (call.get(key) for key in ("fn_index", "data", "session_hash"))
    if type(number) is not int or number not in calls:
        raise Refused(422, "fn_index is not a call of this page")
    if not isinstance(session, str) or not SESSION.fullmatch(session):
        raise Refused(422, "session_hash is up to 64 letters and digits")
    wanted = calls[number]
    if not isinstance(data, list) or len(data) != len(wanted):
        raise Refused(422, f"data is a list of {len(wanted)} values")
    for at, (value, argument) in enumerate(zip(data, wanted)):
        if not _fits(value, argument):
            kinds = {None: "null", str: "a text", bool: "true or false"}
            words = ", ".join(argument) if isinstance(argument, tuple) else kinds[argument]
            raise Refused(422, f"data[{at}] is not {words}")
    trigger = call.get("trigger_id")
    known = {"data": data, "fn_index": number, "session_hash": session}
    return {**known, "trigger_id": trigger if type(trigger) is int else None, "event_data": None}


def _fits(value: Any, argument: Argument) -> bool:
    if argument is None:
        return value is None
    if isinstance(argument, tuple):
        return isinstance(value, str) and value in argument
    return isinstance(value, argument)


# ---- what is answered


def _own(send: Any) -> Any:
    """Wrap `send` to remove external resources from pages and add the content security policy."""
    start: dict[str, Any] = {}
    body = bytearray()

    async def answer(message: Any) -> None:
        if message["type"] == "http.response.start" and _is_html(message):
            start.update(message)
        elif start and message["type"] == "http.response.body":
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                own = EXTERNAL_RESOURCES.sub(b"", bytes(body))
                policy = (b"content-security-policy", POLICY.encode())
                await send({**start, "headers": [*_sized(start["headers"], len(own)), policy]})
                await send({"type": "http.response.body", "body": own})
        else:
            await send(message)

    return answer


async def _refuse(send: Any, refusal: Refused) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": str(refusal).encode()})


def _given(body: bytes, receive: Any) -> Any:
    """Wrap `receive` to give again a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


def _decoded(headers: Headers) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def _is_html(message: Any) -> bool:
    return _decoded(message.get("headers", [])).get("content-type", "").startswith("text/html")


def _sized(headers: Headers, length: int) -> list[tuple[bytes, bytes]]:
    """Set the headers' content length to that of another body."""
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]
