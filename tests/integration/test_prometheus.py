"""A real Prometheus with docker/prometheus.yaml answers the dashboard's expressions.

Its targets are replaced by a server that prints what SGLang 0.5.17 printed on an H200, by the simulator, and by made-up
readings of the fields in docker/dcgm-counters.csv. Grafana and dcgm-exporter themselves are not run.
"""

import json
import math
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring import CAPTURE, DOCKER, EXPRESSIONS, PROMETHEUS, dcgm_counters, metrics_of, names_in
from paths import shared
from simulator import SimFleet

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus and promtool are not on this machine (apt-get install prometheus)",
    ),
    pytest.mark.timeout(120),
]
FRESH_SCRAPES = 2
POWER_W = 650.0


class Exporter:
    """Serves `text()` at /metrics."""

    def __init__(self, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Exporter":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def captured_server(text: str) -> Callable[[], str]:
    """A server that has just started, every value 0, and then is as it was captured: rates need a growth."""
    fresh, scrapes = re.sub(r"(?m)^([^#\n].*) \S+$", r"\1 0.0", text), iter(range(FRESH_SCRAPES))
    return lambda: fresh if next(scrapes, None) is not None else text


def dcgm_text() -> str:
    """The fields of docker/dcgm-counters.csv for one GPU that draws POWER_W."""
    values = {
        "DCGM_FI_DEV_POWER_USAGE": POWER_W,
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": 700.0,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": time.time() % 1e6 * POWER_W * 1e3,
        "DCGM_FI_DEV_SM_CLOCK": 1980.0,
    }
    lines = []
    for counter in dcgm_counters():
        lines += [f"# HELP {counter.name} {counter.help}", f"# TYPE {counter.name} {counter.kind}"]
        lines += [f'{counter.name}{{gpu="0",UUID="GPU-0",device="nvidia0"}} {values[counter.name]}']
    return "\n".join(lines) + "\n"


class Prometheus:
    """A running one, asked over its HTTP API."""

    def __init__(self, url: str, captured: str, simulated: str) -> None:
        self.url, self.captured, self.simulated = url, captured, simulated

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query, each with `metric` and `value`. Raises HTTPError where PromQL is refused."""
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}") as got:
            answer = json.load(got)
        assert answer["status"] == "success"
        return answer["data"]["result"]  # type: ignore[no-any-return]

    def values(self, expression: str) -> list[float]:
        return [float(series["value"][1]) for series in self.query(expression)]

    def has_data(self, expression: str) -> bool:
        values = self.values(expression)
        return bool(values) and all(map(math.isfinite, values))


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return True
        except OSError:
            pass
        time.sleep(0.25)
    return False


@contextmanager
def running(config: Path, folder: Path) -> Iterator[str]:
    """Its address, once it is ready. It picks the port itself and says it in its log."""
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command = ["prometheus", *options, "--web.listen-address=127.0.0.1:0"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        assert until(lambda: b"ready to receive web requests" in log.read_bytes(), 60), log.read_text()[-2000:]
        listening = re.search(r'"Listening on".* address=(\S+:\d+)', log.read_text())
        assert listening is not None, log.read_text()
        yield f"http://{listening.group(1)}"
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    text, folder = shared(CAPTURE).read_text(), tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        captured = stack.enter_context(Exporter(captured_server(text))).address
        gpu = stack.enter_context(Exporter(dcgm_text)).address
        simulated = stack.enter_context(SimFleet(1)).records()[0].base_url.removeprefix("http://")
        config = json.loads(json.dumps(PROMETHEUS))
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        targets = {"sglang": [captured, simulated], "dcgm": [gpu]}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        found = Prometheus(stack.enter_context(running(folder / "prometheus.yaml", folder)), captured, simulated)
        assert until(lambda: all(map(found.has_data, EXPRESSIONS)), 45), [
            e for e in EXPRESSIONS if not found.has_data(e)
        ]
        yield found


def test_promtool_accepts_the_configuration() -> None:
    checked = subprocess.run(
        ["promtool", "check", "config", str(DOCKER / "prometheus.yaml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_of_the_dashboard_is_answered_with_numbers(prometheus: Prometheus, expression: str) -> None:
    assert prometheus.has_data(expression)


def test_what_the_dashboard_shows_is_what_the_server_said(prometheus: Prometheus) -> None:
    at = f'{{instance="{prometheus.captured}"}}'
    assert prometheus.values(f"sglang:num_running_reqs{at}") == [48.0]
    assert prometheus.values(f"max by (instance) (sglang:spec_accept_length{at})") == [3.075]
    (median,) = prometheus.values(next(e for e in EXPRESSIONS if "0.5" in e and "inter_token" in e))
    assert 0.001 < median < 0.01, "48.3 s over 16,821 tokens is a mean of 2.9 ms"


@pytest.mark.parametrize(("tokens", "samples"), [(1024, [{"labels": "{}", "value": 0.5}]), (0, [])])
def test_512_w_at_1024_tokens_a_second_are_half_a_joule_a_token(
    tmp_path: Path, tokens: int, samples: list[dict[str, object]]
) -> None:
    """In promtool's own time, five seconds a step; without tokens there is no such number, rather than infinity."""
    (expression,) = [e for e in EXPRESSIONS if "ENERGY" in e]
    series = {
        'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"}': 512_000 * 5,
        'sglang:realtime_tokens_total{mode="decode"}': tokens * 5,
        'sglang:realtime_tokens_total{mode="prefill_compute"}': 1_000_000,
    }
    case = {
        "interval": "5s",
        "input_series": [{"series": name, "values": f"0+{step}x60"} for name, step in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "4m", "exp_samples": samples}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    ran = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_real_prometheus_reads_the_simulator_under_the_same_names(prometheus: Prometheus) -> None:
    assert prometheus.values(f'up{{instance="{prometheus.simulated}"}}') == [1.0]
    with urllib.request.urlopen(f"http://{prometheus.simulated}/metrics") as answer:
        printed = names_in(answer.read().decode())
    used = set().union(*map(metrics_of, EXPRESSIONS)) & printed
    assert {"sglang:realtime_tokens_total", "sglang:num_running_reqs", "sglang:spec_accept_length"} <= used
    for name in used:
        assert prometheus.values(f'{name}{{instance="{prometheus.simulated}"}}'), name
