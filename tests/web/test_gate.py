"""The gate by itself, as an ASGI application: what a server does not show of it."""

import asyncio
import json

import pytest

from eagle31_hf.web import gate
from eagle31_hf.web.address import is_of_this_machine
from eagle31_hf.web.gate import Gate


async def hello(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def asked(app, headers, kind="http", method="GET"):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    await app({"type": kind, "method": method, "path": "/", "headers": pairs}, receive, send)
    return sent


def status(headers, hosts=(), **options):
    app = Gate(hello, hosts, lambda method, path: True, **options)
    return asyncio.run(asked(app, headers))[0]["status"]


HOSTS = {
    "localhost:1": 200,
    "127.0.0.1": 200,
    "[::1]:65535": 200,
    "192.168.1.7:8000": 200,
    "my.box": 200,
    "MY.BOX:80": 200,
    "my.box.": 403,
    "[::1]evil.example": 403,
    "a[::1]": 403,
    "[my.box]": 403,
    "user@my.box": 403,
    "my.box:x": 403,
    "my.box/evil": 403,
    "my.box#": 403,
    "evil.example": 403,
    "m\u00fc.box": 403,
    "": 403,
}


@pytest.mark.parametrize("host", HOSTS)
def test_hosts(host):
    assert status([("host", host)], hosts=["my.box"]) == HOSTS[host]


def test_headers_that_could_be_read_in_two_ways():
    usual = [("host", "localhost")]
    assert status(usual) == 200
    assert status([]) == 403
    for name, value in (("Host", "localhost"), ("host", "evil.example")):
        assert status([*usual, (name, value)]) == 400
    assert status([*usual, ("origin", "http://localhost"), ("Origin", "http://evil.example")]) == 400
    assert status([*usual, ("authorization", "Bearer a"), ("authorization", "Bearer b")], key="b") == 400


ORIGINS = {"http://a:1": 200, "https://A:1": 200, "http://a": 403, "a:1": 403, "null": 403, "ftp://a:1": 403}


@pytest.mark.parametrize("origin", ORIGINS)
def test_origins(origin):
    assert status([("host", "a:1"), ("origin", origin)], hosts=["a"]) == ORIGINS[origin]
    assert status([("host", "a:1"), ("origin", origin)], hosts=["a"], any_origin=True) == 200


def test_a_web_socket_is_refused():
    app = Gate(hello, [], lambda method, path: True)
    assert asyncio.run(asked(app, [("host", "localhost")], kind="websocket")) == [{"type": "websocket.close"}]


def test_too_many_at_once_are_told(monkeypatch):
    monkeypatch.setattr(gate, "MOST_INSIDE", 2)

    async def all_of_them():
        free = asyncio.Event()

        async def wait(scope, receive, send):
            await free.wait()
            await hello(scope, receive, send)

        app = Gate(wait, [], lambda method, path: True)
        first = [asyncio.create_task(asked(app, [("host", "localhost")])) for _ in range(2)]
        await asyncio.sleep(0)
        third = await asked(app, [("host", "localhost")])
        free.set()
        return [(await task)[0]["status"] for task in first], third, await asked(app, [("host", "localhost")])

    first, third, last = asyncio.run(all_of_them())
    assert first == [200, 200]
    assert third[0]["status"] == 503
    assert json.loads(third[1]["body"])["error"]["type"] == "server_error"
    assert last[0]["status"] == 200


def test_the_gate_s_own_headers_stand_on_every_answer():
    app = Gate(hello, [], lambda method, path: True, headers=[(b"x-a", b"b")])
    for host in ("localhost", "evil.example"):
        headers = dict(asyncio.run(asked(app, [("host", host)]))[0]["headers"])
        assert (headers[b"x-a"], headers[b"x-content-type-options"]) == (b"b", b"nosniff")


def test_its_key_is_in_no_log():
    assert "secret" not in repr(Gate(hello, [], lambda method, path: True, key="secret"))


def test_whom_an_address_lets_in():
    addresses = ("127.0.0.1", "127.9.9.9", "0.0.0.0", "::")
    assert [is_of_this_machine(host) for host in addresses] == [True, True, False, False]
