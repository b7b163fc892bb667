"""SGLang's command line, version by version."""

from pathlib import Path

import pytest

from paths import REPOSITORY
from provisioning_helpers import CONFIG_DENSE, model_27b
from tasks.provisioning.arguments import Place, StartConfig, build, environment, flag_value
from tasks.provisioning.model_config import parse_model
from tasks.provisioning.settings import PROVEN_SGLANG, MtpSettings

PLACE = Place("/models/qwen", "Qwen/Qwen3.6-27B", 31_000, api_key="s3cret")
COMMON = (
    "--model-path /models/qwen --served-model-name Qwen/Qwen3.6-27B --host 127.0.0.1 --port 31000 --api-key s3cret "
    "--enable-metrics --max-running-requests 64 --mem-fraction-static 0.930 --reasoning-parser qwen3 "
    "--tool-call-parser qwen3_coder"
)
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
GOLDEN = {
    "0.5.11": f"{COMMON} --disable-radix-cache --cuda-graph-max-bs 64 {MTP}",
    "0.5.15": f"{COMMON} --disable-radix-cache --cuda-graph-max-bs-decode 64 {MTP}",
    "0.5.17": f"{COMMON} --disable-radix-cache --cuda-graph-max-bs-decode 64 --mm-feature-transport cpu {MTP}",
    "0.5.23": f"{COMMON} --disable-radix-cache --cuda-graph-max-bs-decode 64 --mm-feature-transport cpu {MTP}",
}
STRATEGY = {
    "0.5.11": "--mamba-scheduler-strategy",
    "0.5.15": "--mamba-radix-cache-strategy",
    "0.5.17": "--mamba-radix-cache-strategy",
    "0.5.23": "--mamba-radix-cache-strategy",
}


def config(**changes: object) -> StartConfig:
    return StartConfig(**{"max_running": 64, "mem_fraction": 0.93, "mtp": MtpSettings(), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("version", GOLDEN)
def test_golden_command_lines_with_mtp(version: str) -> None:
    assert build(version, model_27b(), PLACE, config()) == GOLDEN[version].split()


@pytest.mark.parametrize("version", GOLDEN)
def test_golden_command_lines_without_mtp(version: str) -> None:
    assert build(version, model_27b(), PLACE, config(mtp=None)) == GOLDEN[version].removesuffix(" " + MTP).split()


@pytest.mark.parametrize("version", STRATEGY)
def test_radix_cache_with_mtp_names_extra_buffer_as_the_version_does(version: str) -> None:
    words = build(version, model_27b(), PLACE, config(radix=True, max_states=320))
    assert flag_value(words, STRATEGY[version]) == "extra_buffer"
    assert flag_value(words, "--max-mamba-cache-size") == "320"
    assert "--disable-radix-cache" not in words


def test_radix_cache_without_mtp_needs_no_strategy() -> None:
    words = build("0.5.17", model_27b(), PLACE, config(radix=True, mtp=None))
    assert not any(word.startswith("--mamba") for word in words)


def test_no_hierarchical_cache_unless_asked() -> None:
    assert not any("hierarchical" in word for word in build("0.5.17", model_27b(), PLACE, config()))
    words = build("0.5.17", model_27b(), PLACE, config(hierarchical=True))
    assert "--enable-hierarchical-cache" in words and "--disable-radix-cache" not in words
    assert flag_value(words, "--hicache-io-backend") == "direct"


def test_user_flags_replace_ours_and_come_last() -> None:
    extra = ["--max-running-requests", "7", "--mem-fraction-static=0.5", "--load-format", "dummy"]
    words = build("0.5.17", model_27b(), PLACE, config(), extra)
    assert words[-len(extra) :] == extra
    assert words.count("--max-running-requests") == 1
    assert flag_value(words, "--max-running-requests") == "7"
    assert flag_value(words, "--mem-fraction-static") == "0.5"
    assert "0.930" not in words


def test_max_running_requests_is_always_explicit() -> None:
    assert flag_value(build("0.5.17", model_27b(), PLACE, config(mtp=None)), "--max-running-requests") == "64"


def test_only_loopback_unless_the_place_says_otherwise() -> None:
    assert flag_value(build("0.5.17", model_27b(), PLACE, config()), "--host") == "127.0.0.1"


def test_a_model_without_known_parser_gets_none() -> None:
    words = build("0.5.17", parse_model(CONFIG_DENSE), PLACE, config(mtp=None))
    assert "--reasoning-parser" not in words and "--mm-feature-transport" not in words


def test_the_ladders_knobs_become_flags() -> None:
    turned = config(state_dtype="bfloat16", quantization="fp8", tp=2, graph_size=8, prefill_graph=False)
    words = build("0.5.17", model_27b(), PLACE, turned)
    assert flag_value(words, "--mamba-ssm-dtype") == "bfloat16"
    assert flag_value(words, "--quantization") == "fp8"
    assert flag_value(words, "--tp-size") == "2"
    assert flag_value(words, "--cuda-graph-max-bs-decode") == "8"
    assert "--disable-prefill-cuda-graph" in words
    dropped = build("0.5.17", model_27b(), PLACE, config(dropped=("--tool-call-parser",)))
    assert "--tool-call-parser" not in dropped and "qwen3_coder" not in dropped


@pytest.mark.parametrize(("version", "expected"), [("0.5.11", {"SGLANG_ENABLE_SPEC_V2": "1"}), ("0.5.17", {})])
def test_spec_v2_is_asked_for_only_where_it_exists(version: str, expected: dict[str, str]) -> None:
    assert environment(version, config()) == expected
    assert environment(version, config(mtp=None)) == {}


def test_simulation_comes_only_by_argument() -> None:
    assert environment("0.5.17", config(), 3.0) == {"SGLANG_SIMULATE_ACC_LEN": "3.0"}


def test_the_pinned_sglang_is_the_proven_one() -> None:
    text = Path(REPOSITORY / "docker" / "requirements-sglang.txt").read_text()
    pins = [line for line in text.splitlines() if line.startswith("sglang")]
    assert pins == [f"sglang=={PROVEN_SGLANG}"]
