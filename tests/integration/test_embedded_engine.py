"""The real CPU engine: its tokens are the target's tokens, and it returns what the docstring of `embedded` says."""

import random
import socket
import time
from pathlib import Path

import pytest

from tasks.provisioning import embedded
from tasks.provisioning.launcher import CommandLine, Launch, free_port, start
from tasks.provisioning.wire import call
from tasks.records import Message
from tasks.settings import TargetSettings
from tasks.target.load import load_target

KEY = "key-of-the-test"
TEXTS = [
    "Hello 123 4567  89",
    "it's we'll I'D 'S",
    "日本語 🙂🎉👍🏽 ñandú é̂ 中文,标点。!",
    "def f(x):\n\treturn x**2  # ok\r\n\n\n  y",
    "٣٤٥ ½ Ⅷ ²³ १२ 123",
    "   lead",
    "trail   ",
    "\u00a0nbsp\u2003em",
    "<|im_start|>user\nhi<|im_end|>\n",
    "🏳️‍🌈\u200d _a-b/c\\d",
    "",
    "\n\n\n",
]


class Engine:
    def __init__(self, base_url):
        self.base_url = base_url

    def post(self, path, **body):
        answer = call(f"{self.base_url}{path}", body, api_key=KEY, timeout_s=60)
        assert answer.ok, answer
        return answer.body


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    command = embedded.engine_command(free_port(), slots=2, context_tokens=512, api_key=KEY)
    line = CommandLine(command.argv, command.env, secrets=(KEY,))
    running = start(Launch("engine", line, 0, folder / "e.log", folder / "e.json"))
    try:
        for _ in range(300):
            if call(f"{command.base_url}/health", timeout_s=1).ok:
                break
            time.sleep(0.1)
            assert running.poll() is None, (folder / "e.log").read_text()
        yield Engine(command.base_url)
    finally:
        running.stop()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(TargetSettings(model=str(embedded.materialize_target(tmp_path_factory.mktemp("cache")))))


def random_texts(count):
    rng = random.Random(7)
    ranges = [(32, 127), (0xA0, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F650), (48, 58), (10, 11), (32, 33)]
    for _ in range(count):
        yield "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 80)))


def test_the_tokenizer_is_the_engines_token_for_token(engine, target):
    for text in [*TEXTS, *random_texts(150), Path(__file__).read_text()]:
        ids = engine.post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert target.encode(text) == ids, text


def test_the_engine_renders_the_prompt_that_the_target_renders(engine, target):
    turns = [("user", "Hi 🙂"), ("assistant", "Hello."), ("user", " Twice  spaced \n")]
    dicts = [{"role": role, "content": content} for role, content in turns]
    rendered = engine.post("/apply-template", messages=dicts)["prompt"]
    assert rendered == target.render([Message(role, content) for role, content in turns])


def test_exact_ids_come_with_verbose_and_return_tokens_and_not_with_logprobs(engine, target):
    messages = [{"role": "user", "content": "Write Chinese: 你好世界 🙂🎉"}]
    body = {"messages": messages, "max_tokens": 48, "temperature": 0.7, "logprobs": True, "verbose": True}
    lost = 0
    for seed in range(4):
        answer = engine.post("/v1/chat/completions", **body, return_tokens=True, seed=seed)
        choice = answer["choices"][0]
        exact = answer["__verbose"]["tokens"]
        assert len(exact) == answer["usage"]["completion_tokens"]
        text = target.decode([i for i in exact if i not in target.eos_ids])
        assert text.rstrip("\ufffd").startswith(choice["message"]["content"].rstrip("\ufffd"))
        assert (exact[-1] in target.eos_ids) == (choice["finish_reason"] == "stop")
        lost += len(exact) - len(choice["logprobs"]["content"])
    assert lost > 0, "logprobs now carry every id: the docstring of tasks.provisioning.embedded is out of date"
    assert engine.post("/v1/chat/completions", **body)["__verbose"]["tokens"] == []


def test_a_prompt_longer_than_one_slot_is_refused_with_its_length(engine):
    body = {"messages": [{"role": "user", "content": "word " * 600}], "max_tokens": 1}
    answer = call(f"{engine.base_url}/v1/chat/completions", body, api_key=KEY)
    assert answer.status == 400
    assert answer.body["error"]["type"] == "exceed_context_size_error"
    assert answer.body["error"]["n_ctx"] == 512


def test_the_key_is_required_and_metrics_are_on(engine):
    assert call(f"{engine.base_url}/v1/chat/completions", {"messages": []}).status == 401
    metrics = call(f"{engine.base_url}/metrics", api_key=KEY)
    assert metrics.ok and "llamacpp:tokens_predicted_total" in metrics.body


def test_a_taken_port_ends_the_engine_with_a_message(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        command = embedded.engine_command(holder.getsockname()[1], slots=1, context_tokens=256)
        line = CommandLine(command.argv, command.env)
        running = start(Launch("engine", line, 0, tmp_path / "e.log", tmp_path / "e.json"))
        for _ in range(300):
            if running.poll():
                break
            time.sleep(0.1)
        ended = running.stop()
    assert ended is not None and ended.code == 1
    assert "cannot serve" in (tmp_path / "e.log").read_text()
