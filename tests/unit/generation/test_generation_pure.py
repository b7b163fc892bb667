"""Pure parts: seeds, mixes, controller, breaker, policy, conversation, pool."""

import json
import random

import pytest

from tasks.client.chat import ChatOutcome, OutcomeKind
from tasks.generation.breaker import Breaker, Seen
from tasks.generation.controller import LimitController
from tasks.generation.conversation import next_step, to_server
from tasks.generation.jobs import Job, Pool
from tasks.generation.policy import Do, after_answer, after_failure, backoff, deadline_s, room_for
from tasks.generation.reasons import Reason, describe
from tasks.generation.sampling import Arm, Sampler, request_id, seed_of
from tasks.generation.settings import BreakerSettings, GenerationSettings
from tasks.records import Message, Prompt, ServiceSample
from tasks.settings import SamplingMix, SamplingSettings

SETTINGS = GenerationSettings()


def test_every_reason_is_documented() -> None:
    assert all(len(describe(reason)) > 20 for reason in Reason)


def test_seeds_repeat_on_resume_and_change_on_retry() -> None:
    assert seed_of(0, "a", 0, 0, 0) == seed_of(0, "a", 0, 0, 0)
    different = {seed_of(0, "a", s, t, a) for s in range(3) for t in range(3) for a in range(3)}
    assert len(different) == 27
    assert all(0 <= seed < 2**31 for seed in different)


def test_request_ids_have_one_length_and_keep_their_question() -> None:
    first, moved = request_id("a", 0, 0, 0, 0), request_id("a", 0, 0, 0, 3)
    assert len(first) == len(moved) == 32
    assert first[:30] == moved[:30]
    assert request_id("a", 0, 0, 1, 0)[:30] != first[:30]


def test_a_mix_is_a_function_of_the_prompt_and_has_its_weights() -> None:
    mix = (SamplingMix(weight=3, temperature=0.6), SamplingMix(weight=1, thinking=False))
    sampler = Sampler(SamplingSettings(mix=mix, top_k=5), {"temperature": 1.0, "top_p": 0.95, "top_k": 20})
    arms = [sampler.arm(f"{index:032x}") for index in range(4000)]
    assert arms == [sampler.arm(f"{index:032x}") for index in range(4000)]
    share = sum(arm.temperature == 0.6 for arm in arms) / len(arms)
    assert share == pytest.approx(0.75, abs=0.03)
    assert {(arm.temperature, arm.thinking, arm.top_p, arm.top_k) for arm in arms} == {
        (0.6, True, 0.95, 5),
        (1.0, False, 0.95, 5),
    }


def sample(**values: object) -> ServiceSample:
    return ServiceSample(0.0, "s", **values)  # type: ignore[arg-type]


def test_the_controller_backs_off_on_kv_pressure_and_comes_back() -> None:
    controller = LimitController(100)
    assert controller.observe(sample(kv_usage=0.5, queued=0, running=100)) == 100
    assert controller.observe(sample(kv_usage=0.93, queued=0, running=100)) == 90
    assert controller.observe(sample(kv_usage=0.93, queued=0, running=90)) == 81
    calm = [controller.observe(sample(kv_usage=0.6, queued=0, running=81)) for _ in range(30)]
    assert calm[-1] == 100
    assert calm == sorted(calm)


def test_the_controller_backs_off_on_retractions_but_not_on_the_first_reading() -> None:
    controller = LimitController(50)
    assert controller.observe(sample(retracted_total=7.0)) == 50
    assert controller.observe(sample(retracted_total=9.0)) == 45
    assert controller.observe(sample(retracted_total=9.0)) == 45


def test_a_queue_that_stays_lowers_to_what_runs() -> None:
    controller = LimitController(64)
    assert controller.observe(sample(running=22, queued=42)) == 64  # one reading may be a burst
    assert controller.observe(sample(running=22, queued=42)) == 25
    assert controller.observe(sample(running=22, queued=3)) <= 25


def test_a_server_that_tells_nothing_is_left_alone() -> None:
    controller = LimitController(10)
    assert [controller.observe(sample()) for _ in range(20)] == [10] * 20


def test_the_breaker_stops_the_incident_within_its_first_500_answers() -> None:
    """87 % of the incident's answers were an empty think block and `OK.`."""
    breaker, rng = Breaker(BreakerSettings()), random.Random(1)
    for count in range(1, 501):
        bad = Reason.MISSING_REASONING if rng.random() < 0.87 else None
        report = breaker.observe(Seen(bad, f"p{count}", "s0", "OK."))
        if report is not None:
            break
    assert report is not None and report.stops
    assert count <= 120
    assert "MISSING_REASONING" in report.summary
    assert report.details["servers"]["s0"] > 50
    assert report.expectations[0].details["examples"][0]["detail"] == "OK."


def test_the_breaker_slides() -> None:
    breaker = Breaker(BreakerSettings(window=50, min_answers=20, max_bad_share=0.5))
    assert all(breaker.observe(Seen(Reason.TIMEOUT if i % 3 == 0 else None)) is None for i in range(500))
    reports = [breaker.observe(Seen(Reason.TIMEOUT)) for _ in range(20)]
    assert reports[-1] is not None


OK = ChatOutcome(OutcomeKind.OK)


@pytest.mark.parametrize("kind", [k for k in OutcomeKind if k not in (OutcomeKind.OK, OutcomeKind.CUT)])
def test_attempts_are_bounded_whatever_happens(kind: OutcomeKind) -> None:
    attempt = requeues = sent = 0
    while sent < 100:
        sent += 1
        action = after_failure(
            ChatOutcome(kind), attempt=attempt, requeues=requeues, server_down=True, settings=SETTINGS
        )
        if action.do is Do.FAIL:
            break
        attempt += action.do is Do.RETRY
        requeues += action.do is Do.REQUEUE
    assert sent <= SETTINGS.max_attempts * 3 + 1
    if kind in (OutcomeKind.BAD_REQUEST, OutcomeKind.OVERFLOW):
        assert sent == 1


def test_a_dead_servers_requests_keep_their_attempt() -> None:
    action = after_failure(
        ChatOutcome(OutcomeKind.CONNECTION), attempt=3, requeues=0, server_down=True, settings=SETTINGS
    )
    assert action.do is Do.REQUEUE


def test_length_policies() -> None:
    def act(policy: str, max_tokens: int, room: int | None, attempt: int = 0) -> tuple[Do, int | None]:
        settings = GenerationSettings(on_length=policy)  # type: ignore[arg-type]
        action = after_answer(
            Reason.TRUNCATED_BY_LENGTH, attempt=attempt, max_tokens=max_tokens, room=room, settings=settings
        )
        return action.do, action.max_tokens

    assert act("reject", 64, None) == (Do.FAIL, None)
    assert act("keep_prefix", 64, None) == (Do.ACCEPT, None)
    assert act("retry_larger", 64, None) == (Do.RETRY, 128)
    assert act("retry_larger", 64, 100) == (Do.RETRY, 100)
    assert act("retry_larger", 100, 100) == (Do.FAIL, None)
    assert act("retry_larger", 64, None, attempt=3)[0] is Do.FAIL


def test_waits_grow_and_differ() -> None:
    rng = random.Random(0)
    waits = [backoff(3, SETTINGS, rng) for _ in range(50)]
    assert len(set(waits)) == 50
    assert max(waits) <= SETTINGS.retry_base_s * 8
    assert backoff(30, SETTINGS, rng) <= SETTINGS.retry_most_s


def test_the_deadline_lets_a_whole_answer_arrive() -> None:
    """The openai client's 600 s would kill a 32K-token answer under 55 tok/s."""
    assert deadline_s(32768, 1000, SETTINGS) > 32768 / SETTINGS.min_tok_s
    assert room_for(4096, 300) == 4096 - 300 - 16
    assert (room_for(4096, 5200) or 0) < 1
    assert room_for(None, 10) is None


U, V = Message("user", "one"), Message("user", "two")


def test_every_turn_is_asked_on_regenerated_history() -> None:
    messages = (U, Message("assistant", ""), V)
    assert next_step(messages, []).history == (U,)
    answer = Message("assistant", "new", "why")
    second = next_step(messages, [answer])
    assert (second.history, second.done) == ((U, answer, V), False)
    end = next_step(messages, [answer, Message("assistant", "end")])
    assert end.done
    assert [m.content for m in end.history] == ["one", "new", "two", "end"]


def test_the_last_turn_policy_keeps_given_text() -> None:
    messages = (U, Message("assistant", "given"), V)
    assert next_step(messages, [], "last").history == messages
    placeholder = (U, Message("assistant", ""), V)
    assert next_step(placeholder, [], "last").history == (U,)


def call(city: str, identifier: str, as_text: bool = True) -> str:
    arguments: object = {"city": city}
    return json.dumps(
        [
            {
                "id": identifier,
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments},
            }
        ]
    )


RECORDED = (
    Message("user", "weather?"),
    Message("assistant", "", None, call("Oslo", "old", as_text=False)),
    Message("tool", "3 C", tool_call_id="old"),
)


def test_recorded_results_follow_calls_that_match_under_the_new_id() -> None:
    answer = Message("assistant", "", "look it up", call("Oslo", "new"))
    step = next_step(RECORDED, [answer])
    assert not step.done
    assert step.history[1].reasoning_content == "look it up"
    assert (step.history[2].content, step.history[2].tool_call_id) == ("3 C", "new")


def test_other_calls_cut_the_conversation_there() -> None:
    other = next_step(RECORDED, [Message("assistant", "", "r", call("Rome", "new"))])
    assert (other.done, other.cut, len(other.history)) == (True, Reason.TOOL_CALLS_DIFFER, 2)
    none = next_step(RECORDED, [Message("assistant", "It is cold.")])
    assert none.cut is Reason.TOOL_CALLS_DIFFER
    unexpected = next_step((U, Message("assistant", ""), V), [Message("assistant", "", None, call("x", "i"))])
    assert unexpected.cut is Reason.UNEXPECTED_TOOL_CALL


def test_messages_for_the_server() -> None:
    value = to_server(Message("assistant", "", "R", call("Oslo", "c", as_text=False)))
    assert value["reasoning_content"] == "R"
    assert value["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert to_server(Message("user", "q")) == {"role": "user", "content": "q"}
    with pytest.raises(ValueError, match="list"):
        to_server(Message("assistant", "", None, '{"a": 1}'))


def job(name: str) -> Job:
    return Job(0, 0, Prompt(name, (U,)), Arm(1.0, 1.0, 1, None, True))


def test_the_pools_order() -> None:
    pool = Pool()
    pool.add(job("new"))
    pool.put_back(job("continued"))
    pool.put_back(job("later"), ready_s=10.0)
    assert pool.waiting_new == 1
    taken = [pool.take(5.0), pool.take(5.0), pool.take(5.0), pool.take(11.0)]
    assert [j.prompt.prompt_id if j else None for j in taken] == ["continued", "new", None, "later"]
