"""The served page as a hostile client meets it, over HTTP. Needs Gradio."""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ssmscope.architectures.loading.load import load
from ssmscope.reports import serving
from ssmscope.reports.live import Live
from ssmscope.reports.serving import start

pytest.importorskip("gradio", reason="install the extra serve to test the served page", exc_type=ImportError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def url(folder):
    live = Live([load("demo/sst2-mamba2")], max_tokens=60)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        application, address = start(live, port=port)
        yield address.rstrip("/")
        application.close(verbose=False)


def asked(url: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Status and body; redirects are not followed."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args):
            return None

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        request = urllib.request.Request(url + path, data=body, headers=named)
        with urllib.request.build_opener(Stay).open(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def called(url: str, number: int, data: list, session: str) -> list[dict]:
    """What the server says of a call, in the order of its messages."""
    body = json.dumps({"data": data, "fn_index": number, "session_hash": session}).encode()
    status, line = asked(url, "/gradio_api/queue/join", body, content_type="application/json")
    assert status == 200, line
    status, stream = asked(url, f"/gradio_api/queue/data?session_hash={session}")
    assert status == 200
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]


def last(argument):
    """Of what a call may give, half of a character, true, or the last word."""
    texts = {None: None, str: "\ud83d", bool: True}
    return argument[-1] if isinstance(argument, tuple) else texts[argument]


def test_nothing_can_be_uploaded(url, folder):
    form = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + b"0" * 10**4 + b"\r\n--x--\r\n"
    )
    kind = "multipart/form-data; boundary=x"
    for headers in ({}, {"origin": "https://evil.example"}, {"origin": url}):
        status, _ = asked(url, "/gradio_api/upload", form, content_type=kind, **headers)
        assert status in (403, 404)
    assert not [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("path", ["/file=https://evil.example/x", "/gradio_api/file=https://evil.example/x"])
def test_nobody_is_sent_elsewhere(url, path):
    assert asked(url, path) == (404, "this page has no such route")


def test_wrong_types_are_one_line_and_no_traceback(url, capfd):
    for body in (b"[", b"[]", b'{"data": [1], "fn_index": 9999, "session_hash": "a"}'):
        status, line = asked(url, "/gradio_api/queue/join", body, content_type="application/json")
        assert status in (400, 422) and "\n" not in line
    assert asked(url, "/gradio_api/queue/data?session_hash=zz")[0] == 404
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


def test_every_call_that_is_let_through_is_answered_without_a_failure(url, capfd):
    """Calls of the right types in any order, such as an answer's heatmap before there is an answer."""
    live = Live([load("demo/sst2-mamba2")], max_tokens=60)
    page, _ = serving.build(live, serving.import_gradio())
    calls = serving._calls(page, serving.import_gradio())
    page.close(verbose=False)
    assert len(calls) >= 6
    for number, arguments in calls.items():
        data = [last(one) for one in arguments]
        messages = called(url, number, data, f"s{number}")
        (ended,) = [message for message in messages if message["msg"] == "process_completed"]
        assert ended["success"], ended["output"]
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


def test_a_call_that_is_too_large_is_refused(url):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", "/gradio_api/queue/join")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(2 * 10**8))
    connection.endheaders()  # it answers before anything of that is sent
    answer = connection.getresponse()
    assert answer.status == 413 and answer.read().startswith(b"a call has at most 1,")
    connection.close()


def test_what_gradio_writes_goes_with_the_server(monkeypatch):
    seen = []

    def serve_once(live, host, port):
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        (folder / "file").write_text("x")
        seen.append(folder)

    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    monkeypatch.setattr(serving, "_serve_until_interrupted", serve_once)
    serving.serve(object())
    assert seen and not seen[0].exists()
