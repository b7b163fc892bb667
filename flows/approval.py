"""A run over its budget may go on when a person says so in the Prefect UI (Resume, with the form below)."""

from dataclasses import replace
from typing import Any

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from pydantic import Field

from tasks.calibration.settings import BudgetSettings
from tasks.errors import GateError
from tasks.records import GateReport


class BudgetApproval(RunInput):
    """The form that a person fills in to resume a run whose forecast is over its budget."""

    approve: bool = Field(False, title="Go on", description="Generate although the forecast is over the budget.")
    name: str = Field("", title="Your name", description="Kept in the run's record.")
    reason: str = Field("", title="Reason", description="Kept in the run's record.")


async def approved(report: GateReport, budget: BudgetSettings) -> GateReport:
    """The report to judge by: as it is, or no longer stopping once a person approved.

    Pauses the flow run (its process stays, servers stay warm) when the report stops and `over_budget` is `approve`.
    Raises GateError when nobody answers within `approval_timeout_s`.
    """
    if not report.stops or budget.over_budget != "approve":
        return report
    form = BudgetApproval.with_initial_data(description=question(report))
    try:
        answer = await apause_flow_run(wait_for_input=form, timeout=budget.approval_timeout_s)
    except FlowPauseTimeout as error:
        raise GateError(
            f"{report.summary}. Nobody approved within {budget.approval_timeout_s:,} s; run again to go on from here",
            report.as_dict(),
        ) from error
    return decided(report, answer)


def decided(report: GateReport, answer: BudgetApproval | None) -> GateReport:
    """The report after a person's answer; a refusal leaves it stopping."""
    said = {"approve": bool(answer and answer.approve), **_person(answer)}
    details = {**report.details, "approval": said}
    if answer is None or not answer.approve:
        return replace(report, summary=f"{report.summary}; refused by {said['name']}", details=details)
    return replace(
        report,
        verdict="APPROVED",
        mode="monitor",
        summary=f"{report.summary}; approved by {said['name']}",
        details=details,
    )


def _person(answer: BudgetApproval | None) -> dict[str, Any]:
    return {"name": (answer.name if answer else "") or "somebody", "reason": answer.reason if answer else ""}


def question(report: GateReport) -> str:
    """Markdown shown above the form."""
    checks = "\n".join(f"- **{check.name}**: {check.message}" for check in report.expectations)
    return f"### {report.verdict}\n\n{report.summary}\n\n{checks}\n\nAnswers made so far are kept either way."
