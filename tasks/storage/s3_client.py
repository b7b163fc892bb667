"""The boto3 client and the one loop that calls it: typed retries, fresh signatures, one clear error at the end."""

import os
import random
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from tasks.errors import StorageError
from tasks.storage.s3_errors import Trouble, classify, explain

T = TypeVar("T")
Checksums = Literal["auto", "when_supported", "when_required"]
CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Retry:
    """How patiently a request is repeated: `attempts` in all, waits doubling from `base_s` to `cap_s`, with jitter.

    Ten attempts wait about a minute in all: longer than S3's usual SlowDown, shorter than a person's patience.
    """

    attempts: int = 10
    base_s: float = 0.25
    cap_s: float = 20.0

    def wait_s(self, attempt: int) -> float:
        """Seconds before attempt number `attempt + 1`; 50 to 100 % of the exponential value, so workers spread out."""
        return float(min(self.cap_s, self.base_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))


LIMITS: Mapping[Trouble, int] = {Trouble.SKEW: 2, Trouble.DENIED: 1, Trouble.CREDENTIALS: 2, Trouble.DAMAGED: 8}
"""Attempts for troubles that patience does not cure; a skewed clock gets one re-signed retry."""


class Caller:
    """Runs actions against a store until they succeed or their trouble is final. Safe for many threads."""

    def __init__(self, url: str, retry: Retry, sleep: Callable[[float], None] = time.sleep) -> None:
        self._url, self._retry, self._sleep = url, retry, sleep
        self._lock = threading.Lock()
        self.retries = 0
        self.reached = False

    def attempt(self, what: str, action: Callable[[], T], once: Container[Trouble] = ()) -> T:
        """The value of `action`; each try is signed anew. Troubles in `once` are not retried.

        Raises S3Error, MissingError or ConflictError.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                value = action()
            except Exception as error:
                trouble = classify(error)
                if trouble is None:
                    raise
                if trouble in once or attempt >= self._limit(trouble, error):
                    raise explain(what, self._url, error, trouble, attempt) from error
            else:
                self.reached = True
                return value
            with self._lock:
                self.retries += 1
            self._sleep(self._retry.wait_s(attempt))

    def _limit(self, trouble: Trouble, error: Exception) -> int:
        if trouble is Trouble.TRANSIENT:
            # A store that never answered is more likely misspelt than busy.
            never = not self.reached and isinstance(error, (boto.EndpointConnectionError, boto.ConnectTimeoutError))
            return min(3, self._retry.attempts) if never else self._retry.attempts
        return min(LIMITS.get(trouble, 1), self._retry.attempts)


def make_client(
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    checksums: Checksums = "auto",
    credentials: Mapping[str, Any] | None = None,
) -> Any:
    """A boto3 S3 client on the usual AWS chain, or with `credentials` (aws_access_key_id, …).

    `auto` keeps the AWS defaults for AWS; elsewhere `when_required`, because many stores refuse the checksum
    trailers (`aws-chunked`) that newer SDKs send. Retries are `Caller`'s, not botocore's.
    """
    custom = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    aws = is_aws(custom) if custom else True
    mode = checksums if checksums != "auto" else ("when_supported" if aws else "when_required")
    config = Config(
        request_checksum_calculation=mode,
        response_checksum_validation=mode,
        retries={"mode": "standard", "total_max_attempts": 1},
        s3={} if aws else {"addressing_style": "path"},
        max_pool_connections=CONNECTIONS,
        connect_timeout=10,
        read_timeout=60,
        tcp_keepalive=True,
    )
    try:
        session = boto3.session.Session(**dict(credentials or {}), region_name=region)
        fallback = None if aws or session.region_name else "us-east-1"
        return session.client("s3", endpoint_url=endpoint_url, region_name=fallback, config=config)
    except (boto.BotoCoreError, ValueError, TypeError) as error:
        raise StorageError(
            f"cannot set up S3 access: {error}; check publish.region, endpoint_url, credentials"
        ) from error


def is_aws(endpoint_url: str) -> bool:
    """Whether an endpoint belongs to AWS (its partitions included)."""
    host = (urlsplit(endpoint_url).hostname or "").lower()
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
