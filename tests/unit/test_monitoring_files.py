"""The profile `monitor` of docker/compose.yaml: its files fit each other, and what SGLang 0.5.17 was seen to print."""

import itertools
import re

import pytest
import yaml

from monitoring import CAPTURE, DASHBOARD, DOCKER, EXPRESSIONS, PROMETHEUS, dcgm_counters, metrics_of, names_in
from paths import shared

COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MONITOR = {name for name, service in SERVICES.items() if service.get("profiles") == ["monitor"]}


def test_compose_publishes_ports_on_the_loopback_address_only_and_mounts_what_is_there() -> None:
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).is_file(), source
            elif not source.startswith(".."):
                assert source in COMPOSE["volumes"], source
    assert "ports" not in SERVICES["sglang"]


def test_compose_wants_every_secret_from_the_environment_and_its_first_lines_say_which() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    wanted = set(re.findall(r"\$\{(\w+):\?", text))
    exported = next(line for line in text.splitlines() if line.startswith("#   export "))
    assert wanted == set(re.findall(r"(\w+)=", exported))
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= wanted
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


def test_the_profile_is_pinned_and_sees_the_gpu_of_the_server() -> None:
    assert {"prometheus", "dcgm-exporter", "grafana"} == MONITOR
    for name in MONITOR:
        assert re.search(r":v?\d+\.\d+\.\d+", SERVICES[name]["image"]), name
    assert SERVICES["dcgm-exporter"]["deploy"] == SERVICES["sglang"]["deploy"]


def test_prometheus_scrapes_the_services_at_the_ports_they_listen_on() -> None:
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in PROMETHEUS["scrape_configs"]}
    port = re.search(r"--port (\d+)", SERVICES["sglang"]["command"])
    assert port is not None
    assert targets == {"sglang": [f"sglang:{port.group(1)}"], "dcgm": ["dcgm-exporter:9400"]}
    assert "--enable-metrics" in SERVICES["sglang"]["command"]


def test_grafana_finds_its_data_source_and_its_dashboard_where_compose_mounts_them() -> None:
    (source,) = yaml.safe_load((DOCKER / "grafana" / "datasource.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((DOCKER / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted and home.startswith(provider["options"]["path"])


def test_panels_have_their_own_places_and_say_what_they_show() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in panels)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_dashboard_reads_only_what_the_exporters_print(expression: str) -> None:
    printed = names_in(shared(CAPTURE).read_text()) | {counter.name for counter in dcgm_counters()}
    assert metrics_of(expression) and metrics_of(expression) <= printed


def test_the_dashboard_counts_tokens_while_requests_run() -> None:
    used = set().union(*map(metrics_of, EXPRESSIONS))
    assert "sglang:realtime_tokens_total" in used and "sglang:generation_tokens_total" not in used
