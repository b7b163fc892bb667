"""Two ways to POST: the `openai` client on its aiohttp transport, and aiohttp alone. Neither retries anything."""

import io
import time
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import orjson

from tasks.client.bodies import CHAT

KEEPALIVE_S = 4.0  # below uvicorn's 5 s, so that a request never meets a connection the server is just closing
CONNECT_S = 15.0
_LARGE = 1 << 20


class ConnectionBroken(Exception):
    """Refused, reset, or the body ended early."""


class DeadlinePassed(Exception):
    """No complete answer within the deadline."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One complete HTTP answer."""

    status: int
    payload: bytes
    retry_after: str | None = None


class Transport(Protocol):
    """Raises ConnectionBroken or DeadlinePassed; any complete answer is a Reply."""

    async def post(self, path: str, body: dict[str, Any], deadline_s: float) -> Reply:
        """POST JSON to `path` within `deadline_s` seconds."""

    async def close(self) -> None:
        """Release every connection."""


def open_session(base_url: str, api_key: str) -> aiohttp.ClientSession:
    """A session without a connection cap: the client's own slots are the limit (aiohttp's default of 100 would be)."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=60)
    return aiohttp.ClientSession(
        base_url, connector=connector, headers=headers, read_bufsize=1 << 18, raise_for_status=False
    )


class ThinTransport:
    """aiohttp and orjson, nothing between."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.session = open_session(base_url, api_key)

    async def post(self, path: str, body: dict[str, Any], deadline_s: float) -> Reply:
        """POST JSON to `path` within `deadline_s` seconds."""
        data = orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=min(CONNECT_S, deadline_s))
        payload = io.BytesIO(data) if len(data) > _LARGE else data
        try:
            async with self.session.post(path, data=payload, timeout=timeout) as answer:
                return Reply(answer.status, await answer.read(), answer.headers.get("Retry-After"))
        except aiohttp.ConnectionTimeoutError as error:
            raise ConnectionBroken(f"no connection within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise DeadlinePassed(f"no answer within {deadline_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionBroken(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Release every connection."""
        await self.session.close()


class OpenAITransport:
    """The `openai` client, max_retries=0, on aiohttp; its raw answers, so that extra fields survive."""

    def __init__(self, base_url: str, api_key: str, limit: int) -> None:
        import httpx2
        from openai import AsyncOpenAI, DefaultAioHttpClient

        limits = httpx2.Limits(max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=KEEPALIVE_S)
        self._client = AsyncOpenAI(
            base_url=f"{base_url}/v1",
            api_key=api_key or "none",
            max_retries=0,
            http_client=DefaultAioHttpClient(limits=limits),
        )

    async def post(self, path: str, body: dict[str, Any], deadline_s: float) -> Reply:
        """POST JSON to `path` within `deadline_s` seconds; only chat completions go this way."""
        import httpx2
        import openai

        assert path == CHAT
        rest = {name: value for name, value in body.items() if name not in ("model", "messages")}
        timeout = httpx2.Timeout(deadline_s, connect=min(CONNECT_S, deadline_s))
        begun = time.monotonic()
        try:
            answer = await self._client.chat.completions.with_raw_response.create(
                model=body["model"], messages=body["messages"], extra_body=rest, timeout=timeout
            )
            return Reply(answer.status_code, answer.content, answer.headers.get("Retry-After"))
        except openai.APIStatusError as error:
            return Reply(error.status_code, error.response.content, error.response.headers.get("Retry-After"))
        except openai.APITimeoutError as error:
            # The adapter reports a reset connection as a timeout too: only the clock tells them apart.
            if time.monotonic() - begun < 0.9 * deadline_s:
                raise ConnectionBroken(f"{type(error).__name__}: {error.__cause__ or error}") from error
            raise DeadlinePassed(f"no answer within {deadline_s:.0f} s") from error
        except (openai.APIConnectionError, httpx2.HTTPError, aiohttp.ClientError, OSError) as error:
            raise ConnectionBroken(f"{type(error).__name__}: {error.__cause__ or error}") from error

    async def close(self) -> None:
        """Release every connection."""
        await self._client.close()
