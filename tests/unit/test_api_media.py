"""Fetching media: only from the public internet, only to the address that was checked, only within the limits."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

from mantou.api.media import Media, MediaFetch, MediaLimits, is_public, read_data_url
from mantou.errors import BadRequest

PIXEL = b"\x89PNG picture"
LIMITS = MediaLimits(max_bytes=1000, timeout_s=10)


class Site(BaseHTTPRequestHandler):
    """/picture, /text, /large, /packed, /loop, /to/<url>, /slow; remembers the Host headers."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers["host"])
        path = self.path
        if path == "/loop" or path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", "/loop" if path == "/loop" else path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(404 if path == "/missing" else 200)
        self.send_header("content-type", "text/html" if path == "/text" else "image/PNG; q=1")
        if path == "/packed":
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        if path == "/slow":
            self.connection.recv(1)  # until the client gives up
            return
        self.wfile.write(b"x" * 2000 if path == "/large" else PIXEL)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join(10)


class Names:
    """A resolver: name -> addresses; counts how often it was asked."""

    def __init__(self, **names: Sequence[str]) -> None:
        self._names = names
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        found = self._names.get(host.partition(".")[0])
        if found is None:
            raise OSError(f"no {host}")
        return found


NAMES = {"media": ["127.0.0.1"], "inside": ["127.0.0.2"], "both": ["127.0.0.1", "127.0.0.2"]}


def fetch(url: str, limits: MediaLimits = LIMITS, names: Names | None = None) -> Media:
    """With 127.0.0.1 as the public internet, and 127.0.0.2 as the operator's own."""
    resolve = names or Names(**NAMES)
    fetcher = MediaFetch(limits, resolve, public=lambda address: str(address) == "127.0.0.1")
    return asyncio.run(fetcher.fetch(url, "image_url"))


def test_a_picture_is_fetched_from_the_checked_address_under_its_own_name(port: int) -> None:
    names = Names(**NAMES)
    Site.seen.clear()
    assert fetch(f"http://media.example:{port}/picture", names=names) == Media(PIXEL, "image/png")
    assert Site.seen == [f"media.example:{port}"], "the server sees the name, not the address"
    assert names.asked == ["media.example"], "a second look-up could give another address"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("http://inside.example:{port}/picture", "not of the public internet"),
        ("http://both.example:{port}/picture", "not of the public internet"),
        ("http://media.example:{port}/to/http://inside.example:{port}/picture", "not of the public internet"),
        ("http://media.example:{port}/to/file:///etc/passwd", "must be an http, https or data: URL"),
        ("http://media.example:{port}/loop", "redirects more than 3 times"),
        ("http://media.example:{port}/text", "is of type text/html; image/* can be read"),
        ("http://media.example:{port}/large", "larger than"),
        ("http://media.example:{port}/packed", "came compressed"),
        ("http://media.example:{port}/missing", "status 404"),
        ("http://nowhere.example:{port}/picture", "cannot be found"),
        ("http://user:word@media.example:{port}/picture", "may not carry a user"),
        ("ftp://media.example/picture", "must be an http, https or data: URL"),
        ("file:///etc/passwd", "must be an http, https or data: URL"),
        ("http://[bad", "cannot be found"),
        ("http://a:port/", "is not a URL"),
        ("", "must be an http, https or data: URL"),
        ("https://media.example:{port}/picture", "could not be fetched"),
    ],
)
def test_what_is_refused_and_why(port: int, path: str, sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        fetch(path.replace("{port}", str(port)))
    assert sentence in caught.value.message
    assert caught.value.param == "image_url"
    assert "127.0.0" not in caught.value.message, "the reason says nothing of the network inside"


def test_a_slow_server_is_given_up(port: int) -> None:
    with pytest.raises(BadRequest, match=r"within 0\.2 s"):
        fetch(f"http://media.example:{port}/slow", replace(LIMITS, timeout_s=0.2))


def test_redirects_are_followed_and_each_name_is_checked(port: int) -> None:
    names = Names(**NAMES, other=["127.0.0.1"])
    target = f"http://media.example:{port}/to/http://other.example:{port}/picture"
    assert fetch(target, names=names).data == PIXEL
    assert names.asked == ["media.example", "other.example"]


def test_private_addresses_are_a_choice_of_the_operator(port: int) -> None:
    allowed = replace(LIMITS, allow_private=True)
    resolve = Names(inside=["127.0.0.1"])
    found = asyncio.run(MediaFetch(allowed, resolve).fetch(f"http://inside.example:{port}/picture", "x"))
    assert found.data == PIXEL


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("64:ff9b::808:808", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2002:a9fe:a9fe::", False),
    ],
)
def test_is_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_data_urls() -> None:
    assert read_data_url("data:image/png;base64,aGk=", LIMITS, "u") == Media(b"hi", "image/png")
    assert read_data_url("data:image/svg+xml,%3Csvg%3E", LIMITS, "u").data == b"<svg>"
    for url, sentence in (
        ("data:image/png;base64,a!", "not valid base64"),
        ("data:text/html,x", "is of type text/html"),
        ("data:,x", "of type unknown"),
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64," + "aaaa" * 400, "larger than"),
        ("data:image/png," + "a" * 4000, "larger than"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            read_data_url(url, LIMITS, "u")
