"""Live page on Python's own HTTP server, which contacts no other host.

`GET /` is the page, `POST /NAME` a call of `Live.NAME`, answered by its pieces of HTML. A call passes only if it uses
the server's own name, comes from no other page, and has arguments of the right types and of bounded size.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import astuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from markupsafe import Markup
from ssmscope.api.analyses import analysis_of
from ssmscope.core.encoding import MAX_CHARACTERS_PER_TOKEN
from ssmscope.errors import InputError
from ssmscope.render.html import stylesheet
from ssmscope.render.tokens import visible
from ssmscope.reports.live import EXCLUDED_OPTIONS, Live, choices, form_options, shown
from ssmscope.reports.page import file, policy, template

FIRST_PORT, PORTS_TRIED = 7860, 100
MAX_CALL_BYTES = 2**20
"""Maximum size of a call, without the room for long texts."""
MAX_QUEUED_CALLS = 32
"""Maximum number of waiting calls."""
TIMEOUT_SECONDS = 60
"""Seconds within which a request must have arrived."""
TEXTS = {"number": int, "text": str, "edited": str}
CALLS: Mapping[str, Mapping[str, type]] = {
    "answer": {**TEXTS, "layer": str, "heatmap": dict, "effect": dict},
    "heatmaps": {**TEXTS, "layer": str, "heatmap": dict},
    "change": {**TEXTS, "effect": dict},
    "explained": {**TEXTS, "explain": dict},
    "row": {"number": int, "text": str, "position": str, "layer": int, "attention": dict},
}
"""Methods of `Live` that the page calls, with their arguments; a mapping holds the options of an analysis."""
EXAMPLE = "A gripping, beautifully acted film, though the ending feels a little rushed."
"""Text with which a page opens."""


class Refused(Exception):
    """Refusal of a request, with its HTTP status and a line that says why."""


class Server(ThreadingHTTPServer):
    """Server of a page. `hosts` are the allowed host names, which prevents DNS rebinding by other pages; None allows
    any numeric address and this machine's names."""

    daemon_threads = True

    def __init__(self, live: Live, host: str, port: int, hosts: Collection[str] | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.live, self.hosts, self.page = live, hosts, page(live).encode(errors="backslashreplace")
        self.room = threading.BoundedSemaphore(MAX_QUEUED_CALLS)
        # A character takes up to 12 bytes in JSON. A text that is too long for the model still gets its own message.
        self.max_bytes = MAX_CALL_BYTES + 2 * 12 * MAX_CHARACTERS_PER_TOKEN * live.max_tokens
        super().__init__((host, port), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # A browser need not wait for an answer.
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answer to one request."""

    server: Server
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        self._answer(self._page)

    def do_POST(self) -> None:
        self._answer(self._call)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _answer(self, answer: Any) -> None:
        try:
            status, kind, body = answer()
        except Refused as refusal:
            status, line = refusal.args
            kind, body = "text/plain", line.encode(errors="backslashreplace")
        self.send_response(status)
        shared = f"{policy([file('serve.js')])}; connect-src 'self'; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": shared, "X-Content-Type-Options": "nosniff"}
        headers |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _page(self) -> tuple[int, str, bytes]:
        check_origin(self.headers, self.server.hosts, page=True)
        if self.path != "/":
            raise Refused(404, "this page has no such route")
        return 200, "text/html", self.server.page

    def _call(self) -> tuple[int, str, bytes]:
        check_origin(self.headers, self.server.hosts)
        name = self.path.removeprefix("/")
        if name not in CALLS:
            raise Refused(404, "this page has no such route")
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "a call is JSON")
        size = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,18}", size, re.ASCII) or int(size) > self.server.max_bytes:
            raise Refused(413, f"a call has at most {self.server.max_bytes:,} bytes")
        given = checked_call(name, self.rfile.read(int(size)), len(self.server.live.models))
        if not self.server.room.acquire(blocking=False):
            raise Refused(503, "too many calls are waiting; try again")
        try:
            found: Any = getattr(self.server.live, name)(**given)
        finally:
            self.server.room.release()
        pieces = [found] if isinstance(found, str) else found if isinstance(found, tuple) else astuple(found)
        return 200, "application/json", json.dumps(pieces).encode()


def checked_call(name: str, body: bytes, models: int) -> dict[str, Any]:
    """Return the arguments of a call of `Live`; raise Refused for no call of the page, or values of other types."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the call is not valid JSON") from None
    wanted = CALLS[name]
    if not isinstance(given, dict) or given.keys() != wanted.keys():
        raise Refused(422, f"a call of {name} is an object with {', '.join(wanted)}")
    for each, kind in wanted.items():
        if type(given[each]) is not kind:
            raise Refused(422, f"{each} is not {'an object' if kind is dict else f'of type {kind.__name__}'}")
        if kind is dict and not given[each].keys() <= form_options(each).keys():
            raise Refused(422, f"{each} has options that the page does not have")
        if kind is dict and not all(isinstance(value, str | bool) for value in given[each].values()):
            raise Refused(422, f"an option of {each} is neither a text nor true or false")
    if not 0 <= given["number"] < models:
        raise Refused(422, "number is not that of a model")
    options = {} if name == "answer" else next(each for each in given.values() if isinstance(each, dict))
    plain = {each: value for each, value in given.items() if name == "answer" or not isinstance(value, dict)}
    return {**plain, **options}


def check_origin(headers: Any, hosts: Collection[str] | None, *, page: bool = False) -> None:
    """Raise Refused for a request that uses another name than the server's own (status 400), or comes from another page
    (403); any page may link to `page` itself."""
    host = headers.get("Host", "").lower()
    name = re.sub(r":\d+$", "", host)
    if not (name in hosts if hosts is not None else _is_own(name)):
        raise Refused(400, "call this server by its own name")
    origin, other = headers.get("Origin"), Refused(403, "another page may not use this server")
    if origin is None:
        if not page and headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            raise other
        return
    try:
        parts = urlsplit(origin.lower())
    except ValueError:  # The brackets hold no IPv6 address.
        raise other from None
    if parts.scheme not in ("http", "https") or parts.netloc != host:
        raise other


def _is_own(name: str) -> bool:
    """Return True if a name is a numeric address, which no other host can claim, or one of this machine's names."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    except ValueError:
        return name in {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}


def page(live: Live) -> str:
    """Return the page of the models, with a form of each analysis's options."""
    return template("serve.html").render(
        models=live.models,
        visible=visible,
        example=EXAMPLE,
        forms={verb: (analysis_of(verb).question, form_options(verb)) for verb in EXCLUDED_OPTIONS},
        choices=choices,
        default=shown,
        style=Markup(stylesheet() + file("serve.css")),
        script=Markup(file("serve.js")),
    )


def serve(live: Live, *, host: str = "127.0.0.1", port: int | None = None) -> None:
    """Serve the page until the process is interrupted, by default at the first free port from 7860 on; other machines
    can reach it unless the host is a loopback address. Raise InputError if the address cannot be listened on."""
    server, url = start(live, host=host, port=port)
    print(f"Serving {', '.join(model.name for model in live.models)} at {url} (Ctrl+C ends it)", flush=True)
    if not _is_loopback(host):
        print(f"Anyone who can reach {host} can use this page: it has no password.", file=sys.stderr, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    finally:
        server.close()


def start(live: Live, *, host: str = "127.0.0.1", port: int | None = None) -> tuple[Server, str]:
    """Start serving the page as `serve`; return the server, whose `close` ends it, and the page's address."""
    check_address(host, port)
    hosts = {"localhost", "127.0.0.1", "[::1]", host.lower()} if _is_loopback(host) else None
    error: Exception | None = None
    for number in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED) if port is None else [port]:
        try:
            server = Server(live, host, number, hosts)
            return server, f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/"
        except OSError as refused:
            error = refused
    assert error is not None
    raise _refused(host, port, error) from error


def check_address(host: str, port: int | None) -> None:
    """Raise InputError if the port is invalid or taken, or the host is not this machine's."""
    if port is not None and not 1 <= port <= 65535:
        raise InputError(f"--port is {port}; allowed are 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port or 0), family=family).close()
    except (OSError, TypeError, ValueError) as error:  # Names that cannot be encoded raise the last two.
        raise _refused(host, port, error) from error


def _refused(host: str, port: int | None, error: Exception) -> InputError:
    where = host if port is None else f"{host}:{port}"
    why = (getattr(error, "strerror", None) or str(error)).partition(" (")[0]
    return InputError(f"cannot listen on {where}: {why}; give another --host or --port")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
