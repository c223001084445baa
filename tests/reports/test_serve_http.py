"""The served page as a hostile client meets it: only its own calls, from itself, of the right types and sizes."""

import http.client
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ssmscope.loading.load import load
from ssmscope.reports import live as forms
from ssmscope.reports import serving
from ssmscope.reports.live import Live
from ssmscope.reports.serving import CALLS, Refused, check_origin, checked_call, start

HOSTS = {"localhost", "127.0.0.1", "[::1]"}
ARGUMENTS = {"number": 0, "text": "A film.", "edited": "", "layer": "mean", "position": "0"}


def arguments(name: str) -> dict:
    """Arguments that a call may have."""
    found = {each: {} if kind is dict else ARGUMENTS[each] for each, kind in CALLS[name].items()}
    return found | ({"layer": 0} if name == "row" else {})


@pytest.fixture(scope="module")
def server():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    started, _ = start(Live([load("demo/sst2-mamba2")], max_tokens=60), port=port)
    yield started
    started.close()


def asked(server, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, dict]:
    """Status, body and headers of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def called(server, name: str, given: dict) -> list[str]:
    status, body, _ = asked(server, "POST", f"/{name}", json.dumps(given).encode(), content_type="application/json")
    assert status == 200, body
    return json.loads(body)


def test_the_page_allows_its_own_script_alone(server):
    status, page, headers = asked(server, "GET", "/")
    policy = headers["content-security-policy"]
    assert status == 200 and "http" not in policy and "unsafe-eval" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src 'self'" in policy
    assert "script-src 'unsafe-inline'" not in policy and page.count("<script") == 1


@pytest.mark.parametrize("path", ["/file=https://evil.example/x", "/../etc/passwd", "/trace", "/answer", "/__init__"])
def test_there_are_no_other_routes(server, path):
    assert asked(server, "GET", path)[:2] == (404, "this page has no such route")
    if path != "/answer":
        assert asked(server, "POST", path, b"{}", content_type="application/json")[0] == 404


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_pieces_of_its_method(server, name):
    live, found = server.live, called(server, name, arguments(name))
    wanted = {
        "answer": lambda: live.answer(0, "A film."),
        "heatmaps": lambda: live.heatmaps(0, "A film.", layer="mean"),
        "change": lambda: [live.change(0, "A film.", "")],
        "explained": lambda: [live.explained(0, "A film.", "")],
        "row": lambda: [live.row(0, "A film.", "0", layer=0)],
    }[name]()
    wanted = list(vars(wanted).values()) if name == "answer" else list(wanted)
    assert found == wanted


def test_options_reach_the_analysis(server):
    given = {**arguments("heatmaps"), "heatmap": {"score": "write"}}
    assert called(server, "heatmaps", given) == list(server.live.heatmaps(0, "A film.", layer="mean", score="write"))
    (line,) = called(server, "row", {**arguments("row"), "attention": {"level": "blocks"}})
    assert "unknown level" in line


def test_half_of_a_character_is_answered(server):
    for name in CALLS:
        given = {
            each: "\ud83d" if value and isinstance(value, str) else value for each, value in arguments(name).items()
        }
        assert called(server, name, given)


def test_a_call_that_is_too_large_is_refused_unread(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest("POST", "/answer")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(2 * 10**8))
    connection.endheaders()  # It answers before anything of that is sent.
    answer = connection.getresponse()
    assert answer.status == 413 and answer.read().startswith(b"a call has at most 1,")
    connection.close()


def test_only_json_of_a_known_size_is_read(server):
    body = json.dumps(arguments("answer")).encode()
    assert asked(server, "POST", "/answer", body)[0] == 415
    assert asked(server, "POST", "/answer", body, content_type="text/plain")[0] == 415
    for size in ("-1", "x", "1" * 30):
        assert asked(server, "POST", "/answer", b"", content_type="application/json", content_length=size)[0] == 413


def test_calls_from_elsewhere_reach_no_model(server, monkeypatch):
    monkeypatch.setattr(server.live, "answer", lambda **_: pytest.fail("it was called"), raising=False)
    body = json.dumps(arguments("answer")).encode()
    for headers in ({"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}):
        assert asked(server, "POST", "/answer", body, content_type="application/json", **headers)[0] == 403
    assert asked(server, "POST", "/answer", body, content_type="application/json", host="evil.example")[0] == 400


def test_any_page_may_link_to_the_page(server):
    assert asked(server, "GET", "/", sec_fetch_site="cross-site")[0] == 200


def refusal(page: bool = False, hosts=frozenset(HOSTS), **headers: str | None) -> int:
    """Status of the refusal of a request with these headers; 200 if it passes."""
    every = {"Host": "localhost:7860", **{name.replace("_", "-").title(): value for name, value in headers.items()}}
    try:
        check_origin({name: value for name, value in every.items() if value is not None}, hosts, page=page)
    except Refused as refused:
        assert "\n" not in refused.args[1]
        return refused.args[0]
    return 200


@pytest.mark.parametrize(("headers", "status"), [
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
    ({"host": ""}, 400),
    ({"host": None}, 400),
    ({"host": "LOCALHOST"}, 200),
])  # fmt: skip
def test_only_the_page_itself_may_call(headers, status):
    assert refusal(**headers) == status


@pytest.mark.parametrize(("host", "status"), [
    ("192.168.0.7:7860", 200), ("[fe80::1]:7860", 200), ("localhost", 200), ("lab7:7860", 200),
    ("lab7.example.org", 200), ("evil.example.org", 400), ("192.168.0.7.example.org", 400),
])  # fmt: skip
def test_where_others_may_ask_no_name_of_another_host_stands_for_it(monkeypatch, host, status):
    monkeypatch.setattr(serving.socket, "gethostname", lambda: "lab7")
    monkeypatch.setattr(serving.socket, "getfqdn", lambda: "LAB7.example.org")
    assert refusal(hosts=None, host=host) == status


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b"null", b"1e999", b"{}", b'{"number": 0}', b"[" * 10**5, b"\xff"])
def test_what_is_no_call_is_one_line(body):
    with pytest.raises(Refused) as refused:
        checked_call("answer", body, 1)
    status, line = refused.value.args
    assert status in (400, 422) and "\n" not in line


@pytest.mark.parametrize("wrong", [
    {"number": 1}, {"number": -1}, {"number": True}, {"number": "0"}, {"text": None}, {"text": ["a"]}, {"layer": 0},
    {"heatmap": []}, {"heatmap": {"contrast": "/etc/passwd"}}, {"heatmap": {"layers": "0"}},
    {"heatmap": {"top": 3}}, {"heatmap": {"top": ["3"]}}, {"more": 1},
])  # fmt: skip
def test_values_of_other_types_are_refused(wrong):
    with pytest.raises(Refused) as refused:
        checked_call("answer", json.dumps({**arguments("answer"), **wrong}).encode(), 1)
    assert refused.value.args[0] == 422


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(CALLS)), st.dictionaries(st.sampled_from([*ARGUMENTS, "heatmap", "effect"]), JSON))
def test_whatever_passes_has_the_types_of_the_method(name, more):
    try:
        found = checked_call(name, json.dumps({**arguments(name), **more}).encode(), 1)
    except Refused:
        return
    kinds = {each: kind for each, kind in CALLS[name].items() if kind is not dict or name == "answer"}
    assert {each: type(found[each]) for each in kinds} == kinds and found["number"] == 0


def test_options_of_a_form_are_arguments():
    (first, *_) = forms.form_options("heatmap")
    found = checked_call("heatmaps", json.dumps({**arguments("heatmaps"), "heatmap": {first: "write"}}).encode(), 1)
    assert found == {"number": 0, "text": "A film.", "edited": "", "layer": "mean", first: "write"}
