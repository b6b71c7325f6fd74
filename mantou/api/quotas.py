"""Requests and tokens a minute, by key. Knows no HTTP library and no clock of its own.

Each quota is a bucket that holds one minute's worth and fills evenly. A request takes one from its bucket as it comes;
tokens are taken as they are used, since nobody knows how long an answer gets, so their bucket may fall below zero and
the next request then waits until it has filled again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from mantou.api.keys import Key
from mantou.errors import MantouError

_MINUTE_S = 60.0


class RateLimited(MantouError):
    """A key has used up a quota of its own; `retry_after_s` says when it has some of it again."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


@dataclass(slots=True)
class Bucket:
    """`limit` a minute. `level` as of `seen_at`, at most `limit`."""

    limit: int
    level: float
    seen_at: float

    def fill(self, now: float) -> None:
        self.level = min(self.limit, self.level + (now - self.seen_at) * self.limit / _MINUTE_S)
        self.seen_at = now

    def wait_s(self, wanted: float) -> float:
        """Seconds until `wanted` is there; 0 = now."""
        return max(wanted - self.level, 0.0) * _MINUTE_S / self.limit


class Quotas:
    """What each key has left. Belongs to one thread. A quota that changes in the key file begins anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, dict[str, Bucket]] = {}

    def admit(self, key: Key) -> None:
        """Takes one request. Raises RateLimited, and takes nothing, if a quota of the key is used up."""
        buckets = self._filled(key)
        for kind, bucket in buckets.items():
            wait_s = bucket.wait_s(1)
            if wait_s > 0:
                error = RateLimited(
                    f"The key {key.name} has used up its {bucket.limit} {kind} a minute; "
                    f"try again in {math.ceil(wait_s)} s."
                )
                error.retry_after_s = math.ceil(wait_s)
                raise error
        if "requests" in buckets:
            buckets["requests"].level -= 1

    def charge(self, key: Key, num_tokens: int) -> None:
        """Takes tokens that were used, whether or not there are so many."""
        bucket = self._filled(key).get("tokens")
        if bucket is not None:
            bucket.level -= num_tokens

    def headers(self, key: Key) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers for the quotas that the key has; reset = until the bucket is full."""
        found: dict[str, str] = {}
        for kind, bucket in self._filled(key).items():
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(math.floor(bucket.level), 0))
            found[f"x-ratelimit-reset-{kind}"] = f"{bucket.wait_s(bucket.limit):.3f}s"
        return found

    def anthropic_headers(self, key: Key) -> dict[str, str]:
        """The same with Anthropic's names; reset is a point in time (RFC 3339)."""
        found: dict[str, str] = {}
        for kind, bucket in self._filled(key).items():
            full_at = datetime.now(UTC) + timedelta(seconds=bucket.wait_s(bucket.limit))
            found[f"anthropic-ratelimit-{kind}-limit"] = str(bucket.limit)
            found[f"anthropic-ratelimit-{kind}-remaining"] = str(max(math.floor(bucket.level), 0))
            found[f"anthropic-ratelimit-{kind}-reset"] = f"{full_at:%Y-%m-%dT%H:%M:%SZ}"
        return found

    def _filled(self, key: Key) -> dict[str, Bucket]:
        now = self._clock()
        buckets = self._accounts.setdefault(key.name, {})
        for kind, limit in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            known = buckets.get(kind)
            if not limit:
                buckets.pop(kind, None)
            elif known is None or known.limit != limit:
                buckets[kind] = Bucket(limit, limit, now)
            else:
                known.fill(now)
        return buckets
