"""Small HTTP calls to one server, on the standard library: start-up, health, probes. Real work goes through the client.

Nothing here raises for an answer, whatever its status; a server that does not answer is `Answer(0, …)`.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 0: nobody answered; `error` then says why. `body` is the decoded JSON, or the text."""

    status: int
    body: Any = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """A 2xx answer."""
        return 200 <= self.status < 300

    def object(self) -> dict[str, Any]:
        """The JSON object, or an empty one where the body is something else."""
        return self.body if self.ok and isinstance(self.body, dict) else {}


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(
    url: str, body: Mapping[str, Any] | None = None, *, api_key: str = "", timeout_s: float = 10.0, method: str = ""
) -> Answer:
    """GET, or POST of a JSON body. Proxies of the environment are not used: servers are on this network."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers, method=method or None)
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            return Answer(reply.status, _decode(reply.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _decode(error.read()))
    except (OSError, ValueError) as error:
        return Answer(0, None, str(getattr(error, "reason", error)) or type(error).__name__)
    except Exception as error:  # http.client raises its own kinds when a server dies inside an answer
        return Answer(0, None, f"{type(error).__name__}: {error}")


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
