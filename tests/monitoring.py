"""What docker/prometheus.yaml and the dashboard ask for, read from the files themselves."""

import csv
import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from paths import REPOSITORY

DOCKER = REPOSITORY / "docker"
CAPTURE = "captures/sglang-0.5.17-h200/tiny-mtp-eagle/metrics_busy.txt"
PROMETHEUS: dict[str, Any] = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DOCKER / "grafana" / "serving.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@dataclass(frozen=True, slots=True)
class Counter:
    """One line of docker/dcgm-counters.csv."""

    name: str
    kind: str
    help: str


def dcgm_counters() -> list[Counter]:
    """The fields that dcgm-exporter is told to read."""
    lines = [line for line in (DOCKER / "dcgm-counters.csv").read_text().splitlines() if not line.startswith("#")]
    return [Counter(*(cell.strip() for cell in row)) for row in csv.reader(lines)]


def metrics_of(expression: str) -> set[str]:
    """Names of series that a PromQL expression of this dashboard reads."""
    return set(re.findall(r"\b(?:sglang:|DCGM_FI_)\w+", expression))


def names_in(exposition: str) -> set[str]:
    """Names of series in a /metrics text."""
    return {re.split(r"[{ ]", line)[0] for line in exposition.splitlines() if line and not line.startswith("#")}
