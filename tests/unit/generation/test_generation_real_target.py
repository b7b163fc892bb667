"""A run whose simulated answers are in the real tokenizer's ids: what the server saw is what we can render again."""

from pathlib import Path

from runs_for_tests import NO_BREAKER, check_accounts, completions, drain, new_run, prompts
from simulator import SimFleet, SimSettings, TargetCodec
from targets import qwen36
from tasks.generation.engine import Engine
from tasks.generation.settings import GenerationSettings
from tasks.records import Message
from tasks.settings import SamplingSettings


async def test_ids_of_a_real_tokenizer_pass_every_check(tmp_path: Path) -> None:
    target = qwen36()
    made = prompts(12)
    paths = new_run(tmp_path, made)
    for api in ("sglang", "sglang-old"):
        paths = new_run(tmp_path / api, made)
        sim = SimSettings(median_tokens=60, sigma=0.5, speedup=200, api=api)  # type: ignore[arg-type]
        with SimFleet(1, sim, codec=TargetCodec(target)) as fleet:
            settings = GenerationSettings(ramp_s=0, breaker=NO_BREAKER)
            running = Engine(paths, target, SamplingSettings(max_tokens=4096), settings, fleet.records(), limits=8)
            running.start()
            await drain(running)
            await running.stop()
        _, failed = check_accounts(paths, made)
        assert not failed
        for row in completions(paths).iter_rows(named=True):
            turn = row["turns"][0]
            history = [Message("user", row["messages"][0]["content"])]
            again = target.prompt_ids(history, tools=None, thinking=True, preserve_thinking=False)
            assert list(again) == turn["prompt_token_ids"]
            said = target.parse_answer(turn["token_ids"], thinking=True)
            assert said.content.strip() == turn["content"].strip()
            assert (said.reasoning_content or "").strip() == turn["reasoning_content"].strip()
            assert turn["token_ids"][-1] in target.eos_ids
