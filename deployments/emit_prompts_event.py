#!/usr/bin/env python3
"""Tell Prefect that prompts arrived: `POST /api/events`, which the trigger of a deployment waits for. No dependencies.

By hand or from cron:      python deployments/emit_prompts_event.py s3://bucket/new.jsonl
From an S3 notification:   python deployments/emit_prompts_event.py --notification - < message.json
As an AWS Lambda:          handler `emit_prompts_event.handler`, PREFECT_API_URL in its environment

A notification is S3's own JSON (`Records`), EventBridge's (`detail`), or either inside SNS or SQS. Notifications come
at least once: a run that finds nothing new ends within seconds. Exit status 0 sent, 2 nothing to send, 4 not taken.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

EVENT = "prompts.arrived"
RESOURCE = "regen.prompts.qwen36"
"""What deployments/prefect.yaml matches."""

TRIES = 5


def paths_in(notification: Any) -> Iterator[str]:
    """s3:// URLs named by a notification, whatever it is wrapped in."""
    if isinstance(notification, str):
        try:
            notification = json.loads(notification)
        except ValueError:
            return
    if isinstance(notification, list):
        for item in notification:
            yield from paths_in(item)
        return
    if not isinstance(notification, dict):
        return
    found = notification.get("s3") or notification.get("detail") or {}
    if isinstance(found, dict) and "bucket" in found and "object" in found:
        key = found["object"]["key"]
        # S3's own notifications encode keys like a form; EventBridge's do not.
        yield f"s3://{found['bucket']['name']}/{urllib.parse.unquote_plus(key) if 's3' in notification else key}"
    for wrapper in ("Records", "Message", "body", "Sns"):
        if wrapper in notification:
            yield from paths_in(notification[wrapper])


def event_of(paths: list[str], resource: str = RESOURCE) -> dict[str, Any]:
    """The event as Prefect's API takes it."""
    return {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": EVENT,
        "resource": {"prefect.resource.id": resource},
        "related": [],
        "payload": {"paths": paths},
    }


def send(event: dict[str, Any], api_url: str, api_key: str | None = None) -> None:
    """POST it, waiting a little for a server that is restarting. Raises OSError when it was not taken."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(f"{api_url.rstrip('/')}/events", json.dumps([event]).encode(), headers)
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=30):
                return
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429
            if refused or attempt == TRIES - 1:
                raise
            time.sleep(2.0**attempt)


def handler(event: Any, context: object = None) -> dict[str, Any]:
    """Entry point of an AWS Lambda function."""
    paths = list(dict.fromkeys(paths_in(event)))
    if paths:
        send(event_of(paths), os.environ["PREFECT_API_URL"], os.environ.get("PREFECT_API_KEY"))
    return {"paths": paths}


def main() -> int:
    """Command line; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="sources as a job file has them: s3:// URLs, files, globs")
    parser.add_argument(
        "--notification", type=argparse.FileType("r"), metavar="FILE", help="S3 notification; - is stdin"
    )
    parser.add_argument("--resource", default=RESOURCE, help="prefect.resource.id that the trigger matches")
    parser.add_argument("--api-url", default=os.environ.get("PREFECT_API_URL", "http://127.0.0.1:4200/api"))
    options = parser.parse_args()
    named = list(paths_in(options.notification.read())) if options.notification else []
    paths = list(dict.fromkeys([*options.paths, *named]))
    if not paths:
        print(json.dumps({"error": "no path was given and the notification names no object", "kind": "usage"}))
        return 2
    try:
        send(event_of(paths, options.resource), options.api_url, os.environ.get("PREFECT_API_KEY"))
    except OSError as error:
        print(json.dumps({"error": f"{options.api_url} did not take the event: {error}", "kind": "ControlPlaneError"}))
        return 4
    print(json.dumps({"event": EVENT, "resource": options.resource, "paths": paths}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
