"""The mission: from prompts and old responses to a verified, tokenized, published set of the target's own words."""

from typing import Any

from prefect import flow

from flows import machines, plain_logs, stages
from flows.hooks import end_leftovers, run_name
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
    name="regen",
    flow_run_name=run_name,
    persist_result=False,
    on_cancellation=[end_leftovers],
    on_crashed=[end_leftovers],
)
async def regen(
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
    """Answer every new prompt once and publish a new snapshot. An unfinished run is finished first."""
    spec = RegenSpec(
        source=source,
        target=target,
        sampling=sampling,
        serving=serving,
        power=power,
        calibration=calibration,
        budget=budget,
        generation=generation,
        tokenization=tokenization,
        publish=publish,
    )
    summary = await one_run(spec)
    if summary["adopted"]:  # what came in since the adopted run had read its sources; failures were asked again there
        once = generation.model_copy(update={"retry_failed": False})
        return stages.add_up(summary, await one_run(spec.model_copy(update={"generation": once})))
    return summary


async def one_run(spec: RegenSpec) -> dict[str, Any]:
    """One run of one data set, stage by stage; each may stop it."""
    async with open_session(spec) as run:
        prompts = await stages.validation(run)
        if not prompts.pending:
            return await stages.nothing_to_do(run, prompts)
        if records := stages.all_generated(run, prompts):
            done = [await stages.finish_chunk(run, record) for record in records]
            return await stages.publication(run, prompts, done, stages.Made())
        async with machines.servers(run) as (fleet, rig):
            await machines.canaries(run, fleet)
            await machines.power_hard_rules(run, rig)
            async with machines.engine(run, fleet, rig, prompts) as work:
                calibration = await machines.calibration(run, rig, work)
                await machines.forecast_against_budget(run, rig, work, calibration)
                await machines.power_against_baseline(run, rig, work, calibration)
                chunks, made = await stages.chunks(run, work.pool), work.made
        return await stages.publication(run, prompts, chunks, made)
