"""deployments/emit_prompts_event.py against a real HTTP listener, and its event against Prefect's own model."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml

from paths import REPOSITORY

SCRIPT = REPOSITORY / "deployments" / "emit_prompts_event.py"
S3 = {"Records": [{"s3": {"bucket": {"name": "b"}, "object": {"key": "in/new+prompts%282%29.jsonl"}}}]}
BRIDGE = {"detail-type": "Object Created", "detail": {"bucket": {"name": "b"}, "object": {"key": "in/a b.jsonl"}}}


@pytest.fixture
def api():
    """A listener that refuses the first request of each test with 503."""
    taken: list = []

    class Handler(BaseHTTPRequestHandler):
        busy = True

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.startswith("/refuse"):
                self.send_response(422)
            elif Handler.busy:
                Handler.busy = False
                self.send_response(503)
            else:
                taken.append((self.path, json.loads(body)))
                self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/api", taken
    server.shutdown()
    server.server_close()


def emit(*arguments, stdin=""):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout.strip().split("\n")[-1])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (S3, ["s3://b/in/new prompts(2).jsonl"]),
        (BRIDGE, ["s3://b/in/a b.jsonl"]),
        ({"Message": json.dumps(S3)}, ["s3://b/in/new prompts(2).jsonl"]),
        ({"Records": [{"body": json.dumps({"Message": json.dumps(S3)})}]}, ["s3://b/in/new prompts(2).jsonl"]),
    ],
)
def test_a_notification_becomes_the_event_that_the_trigger_waits_for(api, message, expected):
    url, taken = api
    status, last = emit("--notification", "-", "--api-url", url, stdin=json.dumps(message))
    assert (status, last["paths"]) == (0, expected)
    ((path, events),) = taken
    assert path == "/api/events"
    from prefect.events import Event

    event = Event.model_validate(events[0])
    assert event.payload == {"paths": expected}
    deployments = yaml.safe_load((REPOSITORY / "deployments" / "prefect.yaml").read_text())["deployments"]
    triggers = [t for d in deployments for t in d.get("triggers", [])]
    assert any(event.event in t["expect"] and t["match"]["prefect.resource.id"] == event.resource.id for t in triggers)


def test_paths_by_hand_and_nothing_at_all(api):
    url, taken = api
    assert emit("a.jsonl", "b.jsonl", "--api-url", url)[0] == 0
    assert taken[0][1][0]["payload"] == {"paths": ["a.jsonl", "b.jsonl"]}
    assert emit("--notification", "-", "--api-url", url, stdin='{"Event": "s3:TestEvent"}')[0] == 2


def test_a_refusal_is_one_clear_error(api):
    url, taken = api
    status, last = emit("a.jsonl", "--api-url", url.replace("/api", "/refuse"))
    assert (status, last["kind"]) == (4, "ControlPlaneError")
    assert "422" in last["error"]
    assert taken == []
