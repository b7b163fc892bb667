"""What real SGLang servers reported becomes rows with exact ids, and their prompts are what we render."""

import json

import pytest

from completions import batch, completion, turn_of
from paths import shared
from targets import qwen3_captured
from tasks.records import Message
from tasks.tokenization.rows import RowBuilder
from tasks.tokenization.settings import TokenizationSettings

NAMES = ("chat_token_ids", "chat_token_ids_no_thinking", "chat_token_ids_cut_in_thinking")


@pytest.mark.parametrize("server", ["tiny-plain", "tiny-mtp-eagle"])
@pytest.mark.parametrize("name", NAMES)
def test_render_parity_with_a_real_server(server: str, name: str):
    capture = json.loads(shared(f"captures/sglang-0.5.17-h200/{server}/{name}.json").read_text())
    target, body = qwen3_captured(), capture["request"]["body"]
    (choice,) = capture["body"]["choices"]
    thinking = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
    asked = [Message(m["role"], m["content"]) for m in body["messages"]]
    said = choice["message"]
    answer = Message("assistant", said["content"] or "", said["reasoning_content"])
    turn = turn_of(0, answer, choice["prompt_token_ids"], choice["token_ids"], choice["finish_reason"])
    row = completion("p", [*asked, answer], [turn], thinking=thinking)
    built = RowBuilder(target, TokenizationSettings(min_content_tokens=0), False).build(batch([row]))
    assert built.rejected.num_rows == 0
    assert built.tokens.column("ids_exact").to_pylist() == [True]
    assert built.tokens.column("n_supervised").to_pylist() == [len(choice["token_ids"])]
    parsed = target.parse_answer(choice["token_ids"], thinking=thinking)
    assert parsed.content.strip() == (said["content"] or "").strip()
    assert (parsed.reasoning_content or "").strip() == (said["reasoning_content"] or "").strip()
    assert parsed.ends_with_eot is (choice["finish_reason"] == "stop")
