"""A chunk in which nothing became a row is not data but a mistake of the set-up: stop, and say the reasons."""

from tasks.errors import GateError
from tasks.records import Expectation, GateReport, Level, TokenRecord
from tasks.tokenization.reasons import Reason

ENOUGH = 16
"""Answers from which on "everything was rejected" cannot be chance."""
SYSTEMATIC = {
    Reason.RENDER_MISMATCH: "the server renders or tokenizes differently: give it target.chat_template and the "
    "target's own tokenizer, or name the model that is really served",
    Reason.TEMPLATE_REFUSED: "the chat template refuses every conversation: read the detail in tokens_rejected.parquet",
    Reason.ANSWER_NOT_RENDERED: "describe the template's family in target.families",
    Reason.ID_OUT_OF_RANGE: "the tokenizer is not the served model's: name its own as target.tokenizer",
}
"""Reasons that have one cause for all rows, and what to do about it."""


def judge_chunk(record: TokenRecord) -> GateReport:
    """CRITICAL when every answer of a chunk was rejected for one systematic reason, or when there were many of them."""
    answers = record.rows + record.rejected
    top = max(record.reasons, key=lambda reason: record.reasons[reason], default="")
    said = ", ".join(f"{reason} {count:,}" for reason, count in sorted(record.reasons.items(), key=lambda kv: -kv[1]))
    lost = answers > 0 and record.rows == 0 and (top in SYSTEMATIC or answers >= ENOUGH)
    step = SYSTEMATIC.get(Reason(top), "lower tokenization.min_content_tokens or look at the answers") if top else ""
    summary = f"{record.rows:,} of {answers:,} answers of chunk {record.index} became rows"
    return GateReport(
        gate="tokenization",
        verdict="EVERYTHING_REJECTED" if lost else "PASSED",
        level=Level.CRITICAL if lost else Level.OK,
        mode="enforce",
        summary=f"{summary} ({said})" if said else summary,
        expectations=(Expectation("some answers become rows", not lost, summary),),
        next_steps=(step,) if lost else (),
        details={
            "reasons": dict(record.reasons),
            "rejected": record.tokens_path.replace("tokens.", "tokens_rejected."),
        },
    )


def check_chunk(record: TokenRecord) -> GateReport:
    """`judge_chunk`, raising GateError with the reasons when it stops."""
    report = judge_chunk(record)
    if report.stops:
        raise GateError(f"{report.summary}; {report.next_steps[0]}", report.as_dict())
    return report
