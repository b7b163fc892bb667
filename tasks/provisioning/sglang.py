"""From settings, model and GPUs to the configuration and command line of this run's SGLang servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.errors import ServerError, SpecError, TargetError
from tasks.provisioning.arguments import Place, StartConfig, build, environment, flag_value
from tasks.provisioning.engines import DOCKER_PORT, default_image, docker_command, process_command, sglang_python
from tasks.provisioning.gpus import least_free
from tasks.provisioning.launcher import CommandLine
from tasks.provisioning.model_config import Model, read_model
from tasks.provisioning.planner import Plan, Request, smallest_group
from tasks.provisioning.settings import ServingSettings
from tasks.records import GpuFacts
from tasks.settings import TargetSettings

PROMPT_TOKENS = 1024
"""Least room for a prompt beside the longest answer."""
OWN_FLAGS = {"--port", "--host"}
"""Flags that cannot be the same for several servers, or that would take them off loopback."""
OCCUPIED_BYTES = 3 << 30
"""More than a driver and an idle context take: somebody else is on the GPU."""
CONFIG_FILES = ("config.json", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything that the servers of one fleet share."""

    serving: ServingSettings
    target: TargetSettings
    model: Model
    version: str
    executable: str
    plan: Plan
    config: StartConfig
    fixed_flags: frozenset[str]

    def commander(
        self, api_key: str, gpu_uuids: Sequence[str], container: str, simulate: float | None
    ) -> Callable[[StartConfig | None, int], CommandLine]:
        """How one server's command line follows from a configuration and a port."""

        def command(config: StartConfig | None, port: int) -> CommandLine:
            assert config is not None
            env = {**environment(self.version, config, simulate), **self.serving.env}
            if self.serving.mode == "docker":
                place = replace(self._place(DOCKER_PORT, api_key), host="0.0.0.0")
                arguments = build(self.version, self.model, place, config, self.serving.extra_args)
                image = self.serving.image or default_image(self.version)
                mounts = self._mounts()
                return docker_command(image, container, port, arguments, env, gpu_uuids, api_key, mounts)
            arguments = build(self.version, self.model, self._place(port, api_key), config, self.serving.extra_args)
            return process_command(self.executable, arguments, env, gpu_uuids, api_key)

        return command

    def _place(self, port: int, api_key: str) -> Place:
        target = self.target
        return Place(
            model_path=_path(target.model) or target.model,
            served_name=target.model,
            port=port,
            api_key=api_key,
            revision=target.revision if not Path(target.model).is_dir() else None,
            tokenizer=_path(target.tokenizer),
            chat_template=_path(target.chat_template),
            context_tokens=self.serving.context_tokens,
        )

    def _mounts(self) -> list[str]:
        """Local folders under their own path, read-only; otherwise the download cache, which must be writable."""
        named = [self.target.model, self.target.tokenizer, self.target.chat_template]
        paths = dict.fromkeys(Path(name).absolute() for name in named if name and Path(name).exists())
        mounts = [f"{path}:{path}:ro" for path in paths]
        if not Path(self.target.model).exists():
            mounts.append(f"{Path.home() / '.cache' / 'huggingface'}:/root/.cache/huggingface")
        return mounts


def _path(name: str | None) -> str | None:
    """An absolute path where `name` is a file or folder here: a container has another working directory."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


def draw(
    serving: ServingSettings,
    target: TargetSettings,
    gpus: Sequence[GpuFacts],
    max_tokens: int,
    changes: Mapping[str, Any],
    say: Callable[[str], None],
) -> Blueprint:
    """Plan the memory and choose the configuration. `changes`: what the ladder changed when this run began.

    Raises ServerError saying what does not fit and which knob would make it, SpecError where extra_args take what is
    ours.
    """
    taken = OWN_FLAGS & {word.split("=", 1)[0] for word in serving.extra_args}
    if taken:
        raise SpecError(f"serving.extra_args has {', '.join(sorted(taken))}: every server gets its own; leave it out")
    model = read_model(locate(target))
    if serving.mode == "docker":
        executable, version = "docker", serving.sglang_version
    else:
        executable, version = sglang_python(serving, say)
        if version != serving.sglang_version:
            say(
                f"sglang {version} is installed, serving.sglang_version is {serving.sglang_version}: flags of the first"
            )
    request = request_of(serving, target, model, version, max_tokens, changes)
    plan = smallest_group(model, least_free(gpus), request, len(gpus), serving.tensor_parallel)
    plan = _last_resorts(model, plan, serving, gpus)
    if not plan.fits:
        raise ServerError(
            f"{target.model} does not fit on {gpus[0].name or 'this GPU'} "
            f"with {least_free(gpus) / (1 << 30):.1f} GiB free: "
            f"{'; '.join(plan.problems)}. {'What would make it fit: ' + '; '.join(plan.knobs) if plan.knobs else ''}"
        )
    for gpu in gpus:
        if gpu.total_bytes - gpu.free_bytes > OCCUPIED_BYTES:
            held = (gpu.total_bytes - gpu.free_bytes) / (1 << 30)
            say(f"GPU {gpu.index}: others hold {held:.1f} GiB; the plan counts on the fullest GPU")
    say(f"memory plan: {plan.max_running} running requests, {plan.kv_tokens:,} KV tokens, fraction {plan.fraction}")
    config = config_of(serving, target, plan)
    fixed = frozenset(word.split("=", 1)[0] for word in serving.extra_args if word.startswith("--"))
    return Blueprint(serving, target, model, version, executable, plan, config, fixed)


def request_of(
    serving: ServingSettings,
    target: TargetSettings,
    model: Model,
    version: str,
    max_tokens: int,
    changes: Mapping[str, Any],
) -> Request:
    """What is asked of one server's memory. Flags that the user passes through count as if they were settings."""
    running = flag_value(serving.extra_args, "--max-running-requests")
    fraction = flag_value(serving.extra_args, "--mem-fraction-static")
    dtype = changes.get("target.state_dtype") or target.state_dtype
    quantization = changes.get("target.quantization") or target.quantization
    need = serving.context_tokens or min(max_tokens + PROMPT_TOKENS, model.max_position)
    return Request(
        version=version,
        draft_tokens=serving.mtp.draft_tokens if target.mtp else 0,
        mean_tokens=min(serving.mean_tokens, need),
        need_tokens=need,
        slots=int(running) if running else serving.slots,
        fraction=float(fraction) if fraction else serving.mem_fraction,
        radix=serving.radix_cache or serving.hierarchical_cache,
        ssm_bytes={"bfloat16": 2, "float32": 4}.get(dtype or ""),
        fp8=quantization == "fp8",
    )


def config_of(serving: ServingSettings, target: TargetSettings, plan: Plan) -> StartConfig:
    """The first rung of the ladder."""
    request = plan.request
    planned_bf16 = request.ssm_bytes == 2
    return StartConfig(
        max_running=plan.max_running,
        mem_fraction=plan.fraction,
        mtp=serving.mtp if target.mtp else None,
        radix=serving.radix_cache,
        hierarchical=serving.hierarchical_cache,
        max_states=plan.pools.states if request.radix else None,
        state_dtype="bfloat16" if planned_bf16 else target.state_dtype,
        quantization="fp8" if request.fp8 else target.quantization,
        tp=request.tp,
    )


def _last_resorts(model: Model, plan: Plan, serving: ServingSettings, gpus: Sequence[GpuFacts]) -> Plan:
    """bf16 state, then FP8 weights, only where the settings allow them and nothing else fits."""
    for allowed, change in ((serving.allow_bf16_state, {"ssm_bytes": 2}), (serving.allow_fp8, {"fp8": True})):
        if not plan.fits and allowed:
            request = replace(plan.request, tp=1, **change)  # type: ignore[arg-type]
            plan = smallest_group(model, least_free(gpus), request, len(gpus), serving.tensor_parallel)
    return plan


def locate(target: TargetSettings) -> Path:
    """The folder with the checkpoint's config.json and index; downloads these two small files of a hub model.

    Raises TargetError when they cannot be had.
    """
    folder = Path(target.model)
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target.model, revision=target.revision, allow_patterns=list(CONFIG_FILES)))
    except Exception as error:
        raise TargetError(
            f"target.model {target.model!r} is no folder here and its config.json could not be fetched: {error}"
        ) from error
