"""What stands before the served page: only its own requests, from itself, of the right types and of bounded size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssmscope.reports import guard
from ssmscope.reports.guard import ANSWERS, CALL, OwnPage, checked_call

CALLS = {0: [str, str], 1: [None, str, ("ssm", "block")]}
HOSTS = {"localhost", "127.0.0.1", "[::1]"}
OWN = {"host": "localhost:7860", "content-type": "application/json"}


class Application:
    """Answers everything, and keeps what reached it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["method"] == "POST":
            message = await receive()
            assert not message["more_body"]
            body = message["body"]
            assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"own"})


def asked(
    page: OwnPage,
    method: str = "GET",
    path: str = "/",
    *,
    parts: tuple[bytes, ...] = (b"",),
    query: str = "",
    **headers: str | None,
) -> tuple[int, str]:
    """Status and body of one request."""
    sent: list[dict] = []
    left = list(parts)
    named = {**OWN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    given = {name: value for name, value in named.items() if value is not None}

    async def receive() -> dict[str, Any]:
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    asyncio.run(page(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], sent[1]["body"].decode()


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def page(application: Application) -> OwnPage:
    return OwnPage(application, HOSTS, CALLS, max_bytes=500)


def call(data: Any, number: Any = 0, session: Any = "abc", **more: Any) -> bytes:
    return json.dumps({"data": data, "fn_index": number, "session_hash": session, **more}).encode()


class TestWhoAsks:
    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 200),
            ({"origin": "http://localhost:7860"}, 200),
            ({"host": "[::1]:7860", "origin": "http://[::1]:7860"}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "http://localhost:7861"}, 403),
            ({"origin": "http://localhost"}, 403),
            ({"origin": "http://127.0.0.1:7860"}, 403),
            ({"origin": "http://localhost:7860.evil.example"}, 403),
            ({"origin": "http://evil.example#localhost:7860"}, 403),
            ({"origin": "ftp://localhost:7860"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": ""}, 403),
            ({"origin": "http://[::1"}, 403),
            ({"sec_fetch_site": "cross-site"}, 403),
            ({"sec_fetch_site": "same-site"}, 403),
            ({"sec_fetch_site": "same-origin"}, 200),
            ({"sec_fetch_site": "none"}, 200),
            ({"host": "evil.example:7860", "origin": "http://evil.example:7860"}, 400),
            ({"host": "localhost.evil.example"}, 400),
            ({"host": None}, 400),
        ],
    )
    def test_only_the_page_itself_may_call(self, page, application, headers, status) -> None:
        found, body = asked(page, "POST", CALL, parts=(call(["a", "b"]),), **headers)
        assert found == status and (len(application.bodies) == 1) == (status == 200)
        assert "\n" not in body

    def test_any_page_may_link_to_it(self, page) -> None:
        assert asked(page, sec_fetch_site="cross-site")[0] == 200
        assert asked(page, path="/theme.css", sec_fetch_site="cross-site")[0] == 403

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("192.168.0.7:7860", 200),
            ("[fe80::1]:7860", 200),
            ("localhost", 200),
            ("lab7:7860", 200),
            ("lab7.example.org", 200),
            ("evil.example.org", 400),
            ("192.168.0.7.example.org", 400),
        ],
    )
    def test_where_others_may_ask_no_name_of_another_host_stands_for_it(self, application, monkeypatch, host, status):
        monkeypatch.setattr(guard.socket, "gethostname", lambda: "lab7")
        monkeypatch.setattr(guard.socket, "getfqdn", lambda: "LAB7.example.org")
        assert asked(OwnPage(application), host=host)[0] == status

    def test_no_websocket_is_opened(self, page, application) -> None:
        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        asyncio.run(page({"type": "websocket", "path": "/", "headers": []}, None, send))
        assert sent == [{"type": "websocket.close", "code": 1008}] and not application.bodies


class TestWhatIsAsked:
    @pytest.mark.parametrize(
        "path", ["/", "/theme.css", "/assets/index-B_x.js", "/static/fonts/a/b-c.woff2", "/gradio_api/heartbeat/a1"]
    )
    def test_what_the_page_reads(self, page, path) -> None:
        assert asked(page, path=path) == (200, "own")

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/gradio_api/upload"),
            ("GET", "/gradio_api/upload_progress"),
            ("GET", "/gradio_api/file=https://evil.example/x"),
            ("GET", "/file=https://evil.example/x"),
            ("GET", "/gradio_api/file=/etc/passwd"),
            ("GET", "/gradio_api/proxy=https://x.hf.space/"),
            ("GET", "/assets/../../etc/passwd"),
            ("GET", "/assets/..%2f"),
            ("GET", "/assets/a b"),
            ("GET", "/openapi.json"),
            ("GET", "/gradio_api/info"),
            ("GET", "/config"),
            ("GET", "/monitoring"),
            ("POST", "/gradio_api/vibe-code"),
            ("POST", "/gradio_api/run/predict"),
            ("POST", "/gradio_api/component_server"),
            ("POST", "/login"),
            ("POST", "/"),
            ("PUT", CALL),
            ("GET", CALL),
            ("OPTIONS", CALL),
            ("POST", ANSWERS),
            ("GET", "//"),
            ("GET", "/\n"),
            ("GET", ""),
        ],
    )
    def test_nothing_else(self, page, application, method, path) -> None:
        assert asked(page, method, path, parts=(b"x",)) == (404, "this page has no such route")
        assert not application.bodies

    def test_answers_are_of_those_who_called(self, page) -> None:
        assert asked(page, path=ANSWERS, query="session_hash=abc") == (404, "this session has made no call")
        assert asked(page, path=ANSWERS)[0] == 404
        asked(page, "POST", CALL, parts=(call(["a", "b"]),))
        for _ in range(2):  # a page may ask again when it has read all
            assert asked(page, path=ANSWERS, query="session_hash=abc") == (200, "own")

    def test_few_sessions_are_remembered(self, page, monkeypatch) -> None:
        monkeypatch.setattr(guard, "MAX_SESSIONS", 2)
        for session in "abc":
            asked(page, "POST", CALL, parts=(call(["a", "b"], session=session),))
        found = [asked(page, path=ANSWERS, query=f"session_hash={session}")[0] for session in "abc"]
        assert found == [404, 200, 200]


class TestCalls:
    def test_what_the_page_sends_arrives_and_nothing_besides(self, page, application) -> None:
        parts = call(["<ä>", ""], trigger_id=7, event_data={"a": 1}, simple_format=True, request={"x": 1})
        assert asked(page, "POST", CALL, parts=(parts[:9], parts[9:])) == (200, "own")
        (body,) = application.bodies
        assert json.loads(body) == {
            "data": ["<ä>", ""], "fn_index": 0, "session_hash": "abc", "trigger_id": 7, "event_data": None,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("body", "status", "line"),
        [
            (b"", 400, "the call is not valid JSON"),
            (b"[1, 2", 400, "the call is not valid JSON"),
            (b"\xff", 400, "the call is not valid JSON"),
            (b"[" * 400, 400, "the call is not valid JSON"),
            (b"[1]", 422, "a call is an object with fn_index, data and session_hash"),
            (call(["a", "b"], 2), 422, "fn_index is not a call of this page"),
            (call(["a", "b"], "0"), 422, "fn_index is not a call of this page"),
            (call(["a", "b"], False), 422, "fn_index is not a call of this page"),
            (call(["a", "b"], None), 422, "fn_index is not a call of this page"),
            (call(["a", "b"], [0]), 422, "fn_index is not a call of this page"),
            (call(["a", "b"], session=None), 422, "session_hash is up to 64 letters and digits"),
            (call(["a", "b"], session="a/b"), 422, "session_hash is up to 64 letters and digits"),
            (call(["a", "b"], session="a" * 65), 422, "session_hash is up to 64 letters and digits"),
            (call(None), 422, "data is a list of 2 values"),
            (call("ab"), 422, "data is a list of 2 values"),
            (call(["a"]), 422, "data is a list of 2 values"),
            (call(["a", 5]), 422, "data[1] is not a text"),
            (call([{"path": "/etc/passwd"}, "b"]), 422, "data[0] is not a text"),
            (call([None, "b"]), 422, "data[0] is not a text"),
            (call([["a", "b"], "3", "ssm"], 1), 422, "data[0] is not null"),
            (call([None, "3", "blocks"], 1), 422, "data[2] is not ssm, block"),
            (call([None, "3", ["ssm"]], 1), 422, "data[2] is not ssm, block"),
        ],
    )
    def test_wrong_types_are_one_line(self, page, application, body, status, line) -> None:
        assert asked(page, "POST", CALL, parts=(body,)) == (status, line)
        assert not application.bodies

    def test_a_choice_and_a_value_that_the_server_keeps(self, page, application) -> None:
        assert asked(page, "POST", CALL, parts=(call([None, "3", "ssm"], 1),))[0] == 200

    @pytest.mark.parametrize("sized", [True, False])
    def test_no_more_than_the_limit_is_read(self, page, application, sized) -> None:
        body = call(["a" * 400, "b"])
        assert len(body) <= 500 and asked(page, "POST", CALL, parts=(body,))[0] == 200
        read: list[bytes] = []

        def endless():
            while True:
                read.append(b"x" * 100)
                yield read[-1]

        sizes = {"content_length": str(10**6)} if sized else {}
        status, line = asked_lazily(page, endless(), **sizes)
        assert (status, line) == (413, "a call has at most 500 bytes")
        assert len(read) == (0 if sized else 6)

    @pytest.mark.parametrize("size", ["-1", "1e3", "", "9" * 4000, "501"])
    def test_a_length_that_is_none_or_too_large(self, page, size) -> None:
        assert asked(page, "POST", CALL, parts=(call(["a", "b"]),), content_length=size)[0] == 413

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
    def test_what_a_form_of_another_page_could_send_is_no_call(self, page, kind) -> None:
        assert asked(page, "POST", CALL, parts=(call(["a", "b"]),), content_type=kind) == (415, "a call is JSON")

    def test_a_call_that_is_broken_off(self, page) -> None:
        assert asked(page, "POST", CALL, parts=()) == (400, "the call was interrupted")

    @settings(max_examples=200, deadline=None)
    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda sub: st.lists(sub)))
    def test_any_data_is_a_call_or_refused(self, data: Any) -> None:
        for number in CALLS:
            try:
                assert checked_call(call(data, number), CALLS)["data"] == data
            except guard.Refused as refusal:
                assert refusal.status == 422


def asked_lazily(page: OwnPage, parts: Iterator[bytes], **headers: str) -> tuple[int, str]:
    """As `asked`, its body being made as it is read."""
    sent: list[dict] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(parts), "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    given = {**OWN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http", "method": "POST", "path": CALL, "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    asyncio.run(page(scope, receive, send))
    return sent[0]["status"], sent[1]["body"].decode()
