"""The engine against simulated servers."""

from pathlib import Path

from runs_for_tests import check_accounts, completions, engine, finish, new_run, prompts
from simulator import SimFleet, SimSettings

FAST = SimSettings(median_tokens=80, sigma=0.8, speedup=200)


async def test_every_prompt_is_answered_once(tmp_path: Path) -> None:
    made = prompts(230)
    paths = new_run(tmp_path, made)
    with SimFleet(3, FAST) as fleet:
        running = engine(paths, fleet)
        records = await finish(running)
        answered = fleet.answered()
    assert [record.done for record in records] == [50, 50, 50, 50, 30]
    done, failed = check_accounts(paths, made)
    assert (len(done), len(failed)) == (230, 0)
    assert len(answered) == 230
    assert set(answered.values()) == {1}
    table = completions(paths)
    turn = table["turns"][0][0]
    assert turn["ids_source"] == "server"
    assert len(turn["token_ids"]) == turn["completion_tokens"]
    assert len(turn["prompt_token_ids"]) == turn["prompt_tokens"]
    assert table["messages"][0][-1]["role"] == "assistant"
    assert table["messages"][0][-1]["reasoning_content"]
    assert table["thinking"].all()
    assert not list(paths.chunks.glob("*/journal"))
