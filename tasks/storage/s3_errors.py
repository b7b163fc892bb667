"""What an S3 failure means: try again, or one sentence that says what to do."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from tasks.errors import StorageError
from tasks.storage.base import ConflictError, MissingError


class Trouble(StrEnum):
    """How a failure is handled."""

    TRANSIENT = "transient"
    DAMAGED = "damaged"
    SKEW = "skew"
    CREDENTIALS = "credentials"
    DENIED = "denied"
    NO_BUCKET = "no bucket"
    MISSING = "missing"
    CONFLICT = "conflict"
    GONE = "gone"
    REFUSED = "refused"


CODES = {
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "InternalError",
         "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException", "OperationAborted", "Busy"),
        Trouble.TRANSIENT,
    ),
    **dict.fromkeys(
        ("BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "IncompleteBody"),
        Trouble.DAMAGED,
    ),
    **dict.fromkeys(("RequestTimeTooSkewed",), Trouble.SKEW),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"),
        Trouble.CREDENTIALS,
    ),
    **dict.fromkeys(
        ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled", "403", "401"),
        Trouble.DENIED,
    ),
    **dict.fromkeys(("NoSuchBucket",), Trouble.NO_BUCKET),
    **dict.fromkeys(("NoSuchKey", "404", "NotFound"), Trouble.MISSING),
    **dict.fromkeys(("PreconditionFailed", "412", "ConditionalRequestConflict"), Trouble.CONFLICT),
    **dict.fromkeys(("NoSuchUpload", "InvalidPart", "InvalidPartOrder"), Trouble.GONE),
}  # fmt: skip
"""Error codes of the S3 API reference, "Error responses"; bare numbers are what a HEAD answers."""

CONNECTION = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.EndpointConnectionError,
    ConnectionError,
    TimeoutError,
)
NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.UnauthorizedSSOTokenError,
    boto.SSOTokenLoadError,
)


class S3Error(StorageError):
    """A final refusal; `trouble` says of which kind."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        super().__init__(message)
        self.trouble = trouble


class DamagedError(Exception):
    """Bytes arrived here that are not what the store has; reading again may help."""


UNREADABLE = (DamagedError, ResponseParserError, boto.FlexibleChecksumError, ValueError, KeyError)
"""Also what botocore raises on an answer that was damaged on its way: a date that is none, a missing element."""


def classify(error: BaseException) -> Trouble | None:
    """What to do about `error`; None for errors that are not the store's."""
    if isinstance(error, boto.ClientError):
        code, status = _code(error), _status(error)
        if code in CODES:
            return CODES[code]
        return Trouble.TRANSIENT if (status >= 500 and status != 501) or status in (408, 429) else Trouble.REFUSED
    if isinstance(error, NO_CREDENTIALS):
        return Trouble.CREDENTIALS
    if isinstance(error, UNREADABLE):
        return Trouble.DAMAGED
    if isinstance(error, CONNECTION):
        return Trouble.TRANSIENT
    return Trouble.REFUSED if isinstance(error, boto.BotoCoreError) else None


def explain(what: str, where: str, error: BaseException, trouble: Trouble, attempts: int) -> StorageError:
    """The one error a person reads."""
    found = f"{what} at {where}: {_text(error)}"
    after = f" (after {attempts} attempts)" if attempts > 1 else ""
    if trouble is Trouble.MISSING:
        return MissingError(f"{found}: it is not there")
    if trouble is Trouble.CONFLICT:
        return ConflictError(f"{found}: somebody else wrote it; read it again and merge")
    return S3Error(found + after + advice(error, trouble), trouble)


def advice(error: BaseException, trouble: Trouble) -> str:
    """What to do next, for each kind of trouble."""
    if trouble is Trouble.SKEW:
        return (
            f"; CLOCK_SKEW: this machine says {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, the server says "
            f"{_server_date(error)}: set the clock (NTP); if the link is so slow that a request takes minutes, "
            "choose a smaller publish.part_mb"
        )
    texts = {
        Trouble.CREDENTIALS: "; the credentials are missing or expired: renew them (aws sso login, a new session "
        "token, or the credentials block) and run the same command again; what was sent is kept",
        Trouble.DENIED: "; check the access key, the region and the bucket's policy "
        "(needed: Get, Put, Delete, List, multipart)",
        Trouble.NO_BUCKET: "; the bucket does not exist (any more): create it or correct publish.store",
        Trouble.DAMAGED: "; bytes keep arriving damaged: suspect a proxy or network card between here and the store",
        Trouble.TRANSIENT: "; the store is unreachable or overloaded: look at it, then run the same command again; "
        "finished parts are not sent again",
        Trouble.GONE: "; the unfinished upload vanished from the store; run the same command again",
    }
    return texts.get(trouble, "; the store refuses this request: compare publish.checksums and endpoint_url")


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _server_date(error: Any) -> str:
    headers = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("date", "nothing about its time"))


def _text(error: BaseException) -> str:
    if isinstance(error, boto.ClientError):
        return f"{_code(error)} {error.response.get('Error', {}).get('Message', '')}".strip() + f" ({_status(error)})"
    return f"{type(error).__name__}: {error}"
