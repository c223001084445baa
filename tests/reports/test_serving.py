"""Address of a page, and its server's answers to one request after the other."""

import http.client
import json
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refuses
from ssmscope.core.encoding import MAX_CHARACTERS_PER_TOKEN
from ssmscope.reports import serving
from ssmscope.reports.live import Answer
from ssmscope.reports.serving import MAX_CALL_BYTES, Server, check_address, start


class Stub:
    """Pieces of a page that name their arguments."""

    models = tuple(
        SimpleNamespace(name=name, architecture="mamba", is_classifier=True, num_layers=2, layer_numbers=(0, 1))
        for name in "mn"
    )
    max_tokens = 3

    def answer(self, **given: Any) -> Answer:
        return Answer("prediction", "given", "edited", json.dumps(given))

    def heatmaps(self, **given: Any) -> tuple[str, str]:
        return "first", "second"

    def change(self, **given: Any) -> str:
        return "changed"


class TestStart:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        """The arguments of every server; ports below 7863 are taken."""
        found: list[tuple[Any, ...]] = []

        def server(live: Any, *given: Any) -> Any:
            found.append(given)
            if given[1] < 7863:
                raise OSError(98, "Address already in use")
            return SimpleNamespace(server_port=given[1] + 1)

        monkeypatch.setattr(serving, "Server", server)
        monkeypatch.setattr(serving, "check_address", lambda host, port: None)
        return found

    def test_at_the_first_free_port(self, made) -> None:
        _, url = start(Stub())  # type: ignore[arg-type]
        hosts = {"localhost", "127.0.0.1", "[::1]"}
        assert made == [("127.0.0.1", port, hosts) for port in (7860, 7861, 7862, 7863)]
        assert url == "http://127.0.0.1:7864/"

    @pytest.mark.parametrize(("host", "hosts", "shown"), [
        ("::1", {"localhost", "127.0.0.1", "[::1]", "::1"}, "[::1]"),
        ("LOCALHOST", None, "LOCALHOST"),
        ("127.0.0.9", {"localhost", "127.0.0.1", "[::1]", "127.0.0.9"}, "127.0.0.9"),
        ("0.0.0.0", None, "0.0.0.0"),
    ])  # fmt: skip
    def test_at_a_given_port(self, made, host, hosts, shown) -> None:
        assert start(Stub(), host=host, port=9000)[1] == f"http://{shown}:9001/"  # type: ignore[arg-type]
        assert made == [(host, 9000, hosts)]

    def test_where_every_port_is_taken(self, made, monkeypatch) -> None:
        monkeypatch.setattr(serving, "FIRST_PORT", 7000)
        monkeypatch.setattr(serving, "PORTS_TRIED", 3)
        refuses(r"^cannot listen on 127\.0\.0\.1: Address already in use; give another", start, Stub())
        assert [port for _, port, _ in made] == [7000, 7001, 7002]
        refuses(r"^cannot listen on 127\.0\.0\.1:7000: Address already in use; give", start, Stub(), port=7000)

    def test_an_address_is_tried_once(self, monkeypatch) -> None:
        tried: list[Any] = []
        monkeypatch.setattr(
            serving.socket,
            "create_server",
            lambda place, family: (
                tried.append((place, family)) or SimpleNamespace(close=lambda: tried.append("closed"))
            ),
        )
        for host, port in (("127.0.0.1", None), ("::1", 1), ("h", 65535)):
            check_address(host, port)
        families = socket.AF_INET, socket.AF_INET6
        assert tried[::2] == [(("127.0.0.1", 0), families[0]), (("::1", 1), families[1]), (("h", 65535), families[0])]
        assert tried[1::2] == ["closed"] * 3
        for port in (0, 65536):
            refuses(f"^--port is {port}; allowed are 1 to 65535$", check_address, "127.0.0.1", port)

        def refuse(place: Any, family: Any) -> None:
            raise OSError(98, "Address already in use (while attempting to bind on address (a, 1))")

        monkeypatch.setattr(serving.socket, "create_server", refuse)
        refuses(r"^cannot listen on h:1: Address already in use; give another --host or", check_address, "h", 1)


def asked(
    server: Server, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


class TestRequests:
    @pytest.fixture
    def server(self) -> Any:
        made = Server(Stub(), "127.0.0.1", 0, {"127.0.0.1"})  # type: ignore[arg-type]
        yield made
        made.close()

    def test_the_page_names_its_models(self, server) -> None:
        status, body, headers = asked(server, "GET", "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8") and body == server.page
        assert (headers["x-content-type-options"], headers["content-length"]) == ("nosniff", str(len(body)))
        assert headers["content-security-policy"].endswith("; connect-src 'self'; frame-ancestors 'none'")
        assert b">m <small>mamba" in body and b">n <small>mamba" in body and server.address_family == socket.AF_INET

    def test_one_call_after_the_other(self, server) -> None:
        """The room of a call is given back, whatever becomes of it."""
        server.room = threading.BoundedSemaphore(1)
        kind = {"Content-Type": "application/json"}
        texts = {"number": 1, "text": "a", "edited": "b"}
        calls = [
            ("heatmaps", {**texts, "layer": "mean", "heatmap": {}}, ["first", "second"]),
            ("change", {**texts, "effect": {}}, ["changed"]),
        ]
        for name, given, pieces in calls * 2:
            status, body, headers = asked(server, "POST", f"/{name}", json.dumps(given).encode(), **kind)
            assert (status, json.loads(body), headers["content-type"]) == (
                200,
                pieces,
                "application/json; charset=utf-8",
            )
        whole = {**texts, "layer": "0", "heatmap": {"score": "write"}, "effect": {}}
        status, body, _ = asked(server, "POST", "/answer", json.dumps(whole).encode(), **kind)
        assert json.loads(body)[:3] == ["prediction", "given", "edited"] and json.loads(json.loads(body)[3]) == whole
        server.room.acquire()
        status, body, headers = asked(server, "POST", "/change", json.dumps(calls[1][1]).encode(), **kind)
        assert (status, body, headers["content-type"]) == (
            503,
            b"too many calls are waiting; try again",
            "text/plain; charset=utf-8",
        )

    def test_a_call_has_room_for_the_longest_texts(self, server) -> None:
        """Two texts of as many characters as the model's tokens can have, each written as two escapes of six bytes."""
        assert server.max_bytes == MAX_CALL_BYTES + 2 * 12 * MAX_CHARACTERS_PER_TOKEN * 3
        server.max_bytes = 60
        body = json.dumps({"number": 0, "text": "a", "edited": "b", "effect": {}}).encode()
        for size, status in ((60, 200), (61, 413)):
            answer = asked(server, "POST", "/change", body.ljust(size), **{"Content-Type": "application/json"})
            assert answer[0] == status
        assert answer[1] == b"a call has at most 60 bytes"

    def test_only_what_is_no_lost_browser_is_told(self, server, capsys) -> None:
        for error, told in (
            (ConnectionResetError("gone"), False),
            (TimeoutError("late"), False),
            (KeyError("x"), True),
        ):
            try:
                raise error
            except (OSError, KeyError):
                server.handle_error(None, ("127.0.0.1", 1))
            assert (type(error).__name__ in capsys.readouterr().err) == told

    def test_nothing_listens_after_its_end(self) -> None:
        made = Server(Stub(), "127.0.0.1", 0, None)  # type: ignore[arg-type]
        port = made.server_port
        made.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        assert made.socket.fileno() == -1


def test_who_can_use_the_page_is_told(monkeypatch, capsys) -> None:
    closed = []
    page = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(serving, "start", lambda live, *, host, port: (page, f"http://{host}:{port}/"))

    def wait(self: threading.Event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", wait)
    for host, warned in (("localhost", 0), ("0.0.0.0", 1)):
        serving.serve(Stub(), host=host, port=7)  # type: ignore[arg-type]
        out, err = capsys.readouterr()
        assert out == f"Serving m, n at http://{host}:7/ (Ctrl+C ends it)\n\n"
        assert err == f"Anyone who can reach {host} can use this page: it has no password.\n" * warned
    assert closed == [True, True] and "ssmscope" in sys.modules
