"""Fetches media that a request names by URL, without becoming a way into the operator's network. Knows no image format.

A name is resolved once; every address that it has must be one of the public internet; the connection goes to the very
address that was checked, while TLS and the Host header keep the name. Each redirect is a new name and checked anew.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote_to_bytes

from mantou.errors import BadRequest

if TYPE_CHECKING:
    import httpx2

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What may be fetched. `types`: media types, or their beginnings up to the slash."""

    max_bytes: int = 20 << 20
    timeout_s: float = 20.0  # for everything: names, redirects, the last byte
    max_redirects: int = 3
    types: tuple[str, ...] = ("image/",)
    allow_private: bool = False  # also from addresses that are not of the public internet

    def allows(self, media_type: str) -> bool:
        return any(
            media_type.startswith(one) if one.endswith("/") else media_type == one for one in self.types
        )


@dataclass(frozen=True, slots=True)
class Media:
    data: bytes
    media_type: str


def is_public(address: Address) -> bool:
    """Whether it is of the public internet, and so is what it may stand for (mapped, 6to4, Teredo, NAT64)."""
    if isinstance(address, ipaddress.IPv6Address):
        inner: list[ipaddress.IPv4Address] = [
            one
            for one in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
            if one is not None
        ]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return all(map(is_public, inner))
        if not all(map(is_public, inner)):
            return False
    return address.is_global and not address.is_multicast


def read_data_url(url: str, limits: MediaLimits, param: str) -> Media:
    """The content of a data: URL. Raises BadRequest."""
    head, comma, payload = url.partition(",")
    media_type, *options = head.removeprefix("data:").split(";")
    if not comma or not url.startswith("data:"):
        raise BadRequest(f"{param} is not a data: URL with a comma before its content.", param=param)
    _check_type(media_type.lower(), limits, param)
    if len(payload) > limits.max_bytes * 3:
        raise _too_large(limits, param)
    try:
        encoded = options[-1:] == ["base64"]
        data = base64.b64decode(payload, validate=True) if encoded else unquote_to_bytes(payload)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{param} is not valid base64.", param=param) from None
    if len(data) > limits.max_bytes:
        raise _too_large(limits, param)
    return Media(data, media_type.lower())


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Every address of a name, as the system resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class MediaFetch:
    """Fetches over http and https. `resolve` and `public` are seams for tests."""

    def __init__(
        self,
        limits: MediaLimits,
        resolve: Resolve = system_resolve,
        public: Callable[[Address], bool] = is_public,
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._public = public

    async def fetch(self, url: str, param: str) -> Media:
        """The content behind `url`. Raises BadRequest with the reason if it cannot be had within the limits."""
        import httpx2

        try:
            async with asyncio.timeout(self._limits.timeout_s):
                # No proxy and no environment: they would resolve the name once more, elsewhere.
                async with httpx2.AsyncClient(trust_env=False, timeout=self._limits.timeout_s) as client:
                    return await self._follow(client, url, param)
        except TimeoutError:
            raise BadRequest(
                f"{param} did not answer within {self._limits.timeout_s:g} s; send the content as a data: URL.",
                param=param,
            ) from None
        except (httpx2.HTTPError, OSError) as error:
            raise BadRequest(f"{param} could not be fetched ({type(error).__name__}).", param=param) from None

    async def _follow(self, client: httpx2.AsyncClient, url: str, param: str) -> Media:
        import httpx2

        try:
            target = httpx2.URL(url)
        except httpx2.InvalidURL:
            raise BadRequest(f"{param} is not a URL.", param=param) from None
        for _ in range(self._limits.max_redirects + 1):
            request = await self._request(client, target, param)
            response = await client.send(request, stream=True)
            try:
                location = response.headers.get("location")
                if response.status_code not in _REDIRECTS or location is None:
                    return await self._read(response, param)
            finally:
                await response.aclose()
            following = target.join(location)
            if target.scheme == "https" and following.scheme == "http":
                raise BadRequest(f"{param} leads from https to http; name the last address.", param=param)
            target = following
        raise BadRequest(
            f"{param} redirects more than {self._limits.max_redirects} times; name the last address.",
            param=param,
        )

    async def _request(self, client: httpx2.AsyncClient, target: httpx2.URL, param: str) -> httpx2.Request:
        """A request to a checked address that still speaks to the name."""
        if target.scheme not in ("http", "https") or not target.host:
            raise BadRequest(f"{param} must be an http, https or data: URL.", param=param)
        if target.userinfo:
            raise BadRequest(f"{param} may not carry a user or a password.", param=param)
        port = target.port or (443 if target.scheme == "https" else 80)
        address = await self._checked(target.host, port, param)
        headers = {"host": target.netloc.decode("ascii"), "accept-encoding": "identity"}
        pinned = target.copy_with(host=address)
        request = client.build_request("GET", pinned, headers=headers)
        request.extensions["sni_hostname"] = target.host
        return request

    async def _checked(self, host: str, port: int, param: str) -> str:
        try:
            found = await self._resolve(host, port)
            addresses = [ipaddress.ip_address(one.partition("%")[0]) for one in found]
        except (OSError, UnicodeError, ValueError):
            addresses = []
        if not addresses:
            raise BadRequest(f"{param} names a host that cannot be found.", param=param)
        if not self._limits.allow_private and not all(map(self._public, addresses)):
            raise BadRequest(
                f"{param} leads to an address that is not of the public internet; send the content as a data: URL.",
                param=param,
            )
        return str(addresses[0])

    async def _read(self, response: httpx2.Response, param: str) -> Media:
        if response.status_code != 200:
            raise BadRequest(f"{param} answered with status {response.status_code}.", param=param)
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        _check_type(media_type, self._limits, param)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest(f"{param} came compressed, which was not asked for.", param=param)
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > self._limits.max_bytes:
                raise _too_large(self._limits, param)
        return Media(bytes(data), media_type)


def _check_type(media_type: str, limits: MediaLimits, param: str) -> None:
    if not limits.allows(media_type):
        kinds = ", ".join(f"{one}*" if one.endswith("/") else one for one in limits.types)
        raise BadRequest(f"{param} is of type {media_type or 'unknown'}; {kinds} can be read.", param=param)


def _too_large(limits: MediaLimits, param: str) -> BadRequest:
    return BadRequest(
        f"{param} is larger than {limits.max_bytes / 2**20:g} MiB; send a smaller one.", param=param
    )
