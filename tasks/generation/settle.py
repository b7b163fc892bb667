"""What an outcome means for its row: journal it, ask again, go on with the conversation, or give up."""

import time
from typing import Any

from tasks.client.chat import ChatOutcome
from tasks.generation.asking import Question, attempt_record, completion_tokens, turn_record
from tasks.generation.breaker import Breaker, Seen
from tasks.generation.conversation import next_step
from tasks.generation.feeder import Feeder
from tasks.generation.jobs import Job, Pool
from tasks.generation.journal import Kind
from tasks.generation.lengths import Lengths, Meter
from tasks.generation.policy import Action, Do, after_answer
from tasks.generation.quality import Judge, Judged
from tasks.generation.reasons import Reason
from tasks.generation.settings import GenerationSettings
from tasks.generation.writer import answer_message
from tasks.records import GateReport, Server


class Settler:
    """Runs in the engine's loop. Each method returns the breaker's report when the window went over the budget."""

    def __init__(
        self,
        settings: GenerationSettings,
        judge: Judge,
        feeder: Feeder,
        pool: Pool,
        breaker: Breaker,
        lengths: Lengths,
        meter: Meter,
    ) -> None:
        self._settings, self._judge, self._feeder, self._pool = settings, judge, feeder, pool
        self._breaker, self._lengths, self._meter = breaker, lengths, meter
        self.output_tokens = 0
        self.done = self.failed = 0
        self.accepted_drafts: list[float] = [0.0, 0.0]  # tokens, verification steps

    def answered(self, job: Job, server: Server, question: Question, outcome: ChatOutcome) -> GateReport | None:
        """A complete or cut answer: judge it, keep it or ask again."""
        tokens = completion_tokens(outcome) or 0
        self._meter.add(time.monotonic(), tokens)
        self._lengths.add(tokens, outcome.latency_s)
        judged = self._judge.judge(outcome, thinking=job.arm.thinking)
        action = after_answer(
            judged.reason,
            attempt=job.attempt - job.first_attempt,
            max_tokens=question.request.sampling.max_tokens,
            room=question.room,
            settings=self._settings,
        )
        if action.do is Do.ACCEPT:
            self._accept(job, server, question, judged, action.reason)
            return self._breaker.observe(Seen(None))
        limit = question.request.sampling.max_tokens
        if action.do is Do.FAIL:
            return self.give_up(job, server.name, action, judged.detail, limit)
        self._again(job, server.name, action, judged.detail, limit)
        return self._breaker.observe(Seen(action.reason, job.prompt.prompt_id, server.name, judged.detail))

    def _accept(self, job: Job, server: Server, question: Question, judged: Judged, kept_cut: Reason | None) -> None:
        outcome = judged.outcome
        record: dict[str, Any] = turn_record(job, server, question, judged, None)
        answers = [*job.answers, answer_message(record)]
        step = next_step(job.prompt.messages, answers, self._settings.turn_policy)
        # A cut answer that is kept ends its conversation: nobody answers half a sentence.
        cut = step.cut or (kept_cut if not step.done else None)
        record["cut_reason"] = cut.value if cut else None
        last = step.done or cut is not None
        self._feeder.append(job, Kind.LAST if last else Kind.TURN, record)
        job.answers = answers
        self.output_tokens += completion_tokens(outcome) or 0
        if outcome.verify_ct and outcome.completion_tokens:
            self.accepted_drafts[0] += outcome.completion_tokens
            self.accepted_drafts[1] += outcome.verify_ct
        if last:
            self.done += 1
            self._feeder.row_done(job)
        else:
            job.next_turn()
            self._pool.put_back(job)

    def unanswered(
        self, job: Job, server: str, question: Question, outcome: ChatOutcome, action: Action
    ) -> GateReport | None:
        """No answer came. Trouble with servers counts in the breaker only when it uses up a row's attempts."""
        limit = question.request.sampling.max_tokens
        if action.do is Do.FAIL:
            return self.give_up(job, server, action, outcome.message, limit)
        self._again(job, server, action, outcome.message, limit)
        return None

    def _again(self, job: Job, server: str, action: Action, detail: str, limit: int) -> None:
        record = attempt_record(job, server, str(action.reason), detail, limit, action.max_tokens or job.max_tokens)
        if action.do is Do.RETRY:
            self._feeder.append(job, Kind.ATTEMPT, record)
            job.attempt += 1
            job.max_tokens = action.max_tokens or job.max_tokens
        else:
            job.requeues += 1
        self._pool.put_back(job, time.monotonic() + action.delay_s if action.delay_s > 0 else None)

    def give_up(self, job: Job, server: str, action: Action, detail: str, limit: int | None) -> GateReport | None:
        """Terminal failure of the row, with its reason; it runs again only by request."""
        assert action.reason is not None
        self._feeder.append(
            job, Kind.ATTEMPT, attempt_record(job, server, action.reason.value, detail, limit, job.max_tokens)
        )
        failure = {
            "prompt_id": job.prompt.prompt_id,
            "reason": action.reason.value,
            "detail": detail[:500],
            "attempts": job.attempts_total,
            "turn": job.turn,
        }
        self._feeder.append(job, Kind.FAILED, failure)
        self.failed += 1
        self._feeder.row_failed(job)
        return self._breaker.observe(Seen(action.reason, job.prompt.prompt_id, server, detail))
