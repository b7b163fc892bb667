"""Calibrate a fleet for a job without generating the rest: best requests in flight, forecast, power baseline.

Answers made on the way are journaled in the data set's run; the next `regen` of the same spec goes on from them.
"""

from typing import Any

from prefect import flow

from flows import machines, plain_logs, stages
from flows.hooks import end_leftovers, run_name
from flows.mtp_steps import compare_steps, with_steps
from flows.session import open_session
from flows.spec import RegenSpec
from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.generation.settings import GenerationSettings
from tasks.power.settings import PowerSettings
from tasks.provisioning.settings import ServingSettings
from tasks.settings import SamplingSettings, TargetSettings
from tasks.tokenization.settings import TokenizationSettings
from tasks.upload.settings import PublishSettings
from tasks.validation.settings import SourceSettings

plain_logs.install()


@flow(
    name="calibrate",
    flow_run_name=run_name,
    persist_result=False,
    on_cancellation=[end_leftovers],
    on_crashed=[end_leftovers],
)
async def calibrate(
    source: SourceSettings,
    target: TargetSettings,
    publish: PublishSettings,
    sampling: SamplingSettings = SamplingSettings(),
    serving: ServingSettings = ServingSettings(),
    power: PowerSettings = PowerSettings(),
    calibration: CalibrationSettings = CalibrationSettings(),
    budget: BudgetSettings = BudgetSettings(),
    generation: GenerationSettings = GenerationSettings(),
    tokenization: TokenizationSettings = TokenizationSettings(),
) -> dict[str, Any]:
    """Find the best load for this job on these servers; measured anew, whatever is cached."""
    spec = RegenSpec(
        source=source,
        target=target,
        sampling=sampling,
        serving=serving,
        power=power,
        calibration=calibration.model_copy(update={"use_cache": False}),
        budget=budget,
        generation=generation,
        tokenization=tokenization,
        publish=publish,
    )
    async with open_session(spec) as run:
        prompts = await stages.validation(run)
        if not prompts.pending:
            return await stages.nothing_to_do(run, prompts)
        if calibration.compare_mtp_steps:
            run.spec = with_steps(run.spec, (await compare_steps(run, prompts)).best.steps)
        async with machines.servers(run) as (fleet, rig):
            await machines.canaries(run, fleet)
            await machines.power_hard_rules(run, rig)
            async with machines.engine(run, fleet, rig, prompts) as work:
                found = await machines.calibration(run, rig, work)
                await machines.forecast_against_budget(run, rig, work, found)
                await machines.power_against_baseline(run, rig, work, found)
        return {"run_id": run.paths.run_id, "limits": dict(found.limits), "tok_s": found.tok_s, "key": found.key}
