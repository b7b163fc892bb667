"""Every job file under deployments/ is a valid RegenSpec, and what it promises is asserted here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.jobs import job
from flows.spec import RegenSpec, load_job
from paths import REPOSITORY
from tasks.errors import SpecError

DEPLOYMENTS = REPOSITORY / "deployments"
JOBS = sorted(p for p in DEPLOYMENTS.glob("*.yaml") if p.name != "prefect.yaml")


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.name)
def test_a_job_file_is_a_spec_and_survives_the_round_trip_through_prefect(path: Path) -> None:
    spec = load_job(path)
    assert RegenSpec.model_validate(json.loads(json.dumps(job(str(path))))) == spec


def test_qwen36_is_what_the_incident_asks_for() -> None:
    spec = load_job(DEPLOYMENTS / "qwen36.yaml")
    assert (spec.target.model, spec.target.mtp, spec.serving.mode) == ("Qwen/Qwen3.6-27B", True, "process")
    assert (spec.serving.mtp.steps, spec.serving.mtp.topk, spec.serving.mtp.draft_tokens) == (3, 1, 4)
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 0.95, 20, 32_768)
    assert sampling.thinking
    modes = (spec.serving.thinking_gate, spec.serving.mtp.gate, spec.power.gate, spec.generation.breaker.mode)
    assert set(modes) == {"enforce"}


def test_the_demo_reports_what_its_model_cannot_do_instead_of_enforcing_it() -> None:
    spec = load_job(DEPLOYMENTS / "demo.yaml")
    assert spec.serving.mode == "embedded" and spec.sampling.thinking
    assert spec.serving.thinking_gate == spec.generation.breaker.mode == spec.serving.mtp.gate == "monitor"


def test_prefect_yaml_passes_every_group_of_its_job_file() -> None:
    declared = yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())["deployments"]
    names = {(d["entrypoint"].split(".")[-1], d["name"]) for d in declared}
    assert names == {("regen", "qwen36"), ("regen", "demo"), ("validate", "qwen36"), ("calibrate", "qwen36")}
    for deployment in declared:
        if deployment["entrypoint"] == "flows.regen.regen":
            assert set(deployment["parameters"]) == set(RegenSpec.model_fields)
            assert deployment["concurrency_limit"]["limit"] == 1
    (daily,) = [s for d in declared for s in d.get("schedules", [])]
    assert daily["active"] and daily["cron"] == "0 3 * * *"


def test_the_identity_changes_with_the_data_and_with_nothing_else() -> None:
    spec = load_job(DEPLOYMENTS / "qwen36.yaml")

    def digest(group: str, **changes: object) -> str:
        return spec.model_copy(update={group: getattr(spec, group).model_copy(update=changes)}).identity_digest()

    for group, change in [
        ("sampling", {"temperature": 0.6}),
        ("sampling", {"max_tokens": 1024}),
        ("sampling", {"thinking": False}),
        ("sampling", {"preserve_thinking": True}),
        ("target", {"revision": "other"}),
        ("target", {"quantization": "fp8"}),
        ("target", {"state_dtype": "bfloat16"}),
        ("generation", {"turn_policy": "last"}),
        ("tokenization", {"mask": "answer_only"}),
    ]:
        assert digest(group, **change) != spec.identity_digest(), (group, change)
    for group, change in [
        ("serving", {"gpus": (0, 1), "slots": 7}),
        ("generation", {"chunk_rows": 7, "max_attempts": 9}),
        ("publish", {"work_dir": "/elsewhere", "store": "s3://b/p"}),
        ("calibration", {"limit": 9}),
        ("source", {"paths": ("more.jsonl",)}),
        ("tokenization", {"workers": 2}),
    ]:
        assert digest(group, **change) == spec.identity_digest(), (group, change)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source: {paths: [a]}\n", "target"),
        ("source: {paths: [a], typo: 1}\ntarget: {model: m}\npublish: {dataset: d}\n", "source.typo"),
        ("source: {paths: [a]}\ntarget: {model: m}\npublish: {dataset: Has Space}\n", "publish.dataset"),
        ("source: {paths: [a]}\ntarget: {model: m}\npublish: {dataset: d}\nserving: {mode: attach}\n", "serving.urls"),
        ("a: [", "job file"),
    ],
)
def test_a_wrong_job_file_is_one_error_that_names_the_field(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=expected):
        load_job(path)


def test_the_spec_and_the_command_line_import_nothing_heavy() -> None:
    heavy = ("prefect", "torch", "sglang", "datasets", "boto3", "polars", "pyarrow", "transformers", "altair", "openai")
    for module in ("flows.spec", "flows.cli"):
        code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.strip() == "[]", module
