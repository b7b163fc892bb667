"""What a job looked like when it was known good, and the band around it.

The key is the intended job alone (GPU SKU, model digest, workload, concurrency). GPU UUIDs, driver, enforced limit,
server arguments and speculation are *compared*: keyed on them, a lowered limit or a missing MTP would only find no
baseline, and pass. Baselines lie in `baselines/<key>.json` beside the data set, in a folder or a Store.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import StorageError
from tasks.power.evidence import Evidence, Expected, Speculation
from tasks.power.readings import GpuInfo
from tasks.runs import write_json

if TYPE_CHECKING:
    from tasks.storage.base import Store

VERSION = 1
BAND_SD = 3.0
"""Standard deviations of the windows that the band is at least wide."""
VOLATILE = frozenset(
    {
        *("host", "port", "nccl_port", "dist_init_addr", "random_seed", "startup_time", "status", "internal_states"),
        *(
            "log_level",
            "log_level_http",
            "api_key",
            "admin_api_key",
            "served_model_name",
            "weight_version",
            "base_gpu_id",
        ),
        *("model_path", "tokenizer_path", "file_storage_path", "crash_dump_folder", "kv_events", "launch_command"),
        *("max_total_num_tokens", "engine_info_bootstrap_port", "forward_pass_metrics_ipc_name", "watchdog_timeout"),
    }
)
"""Server arguments that differ between starts without changing speed (the model is in the key)."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """The intended job. `workload` names the probe (or data) that was measured."""

    sku: str
    model_digest: str
    workload: str
    concurrency: int

    @property
    def text(self) -> str:
        """File-safe and unique: readable head, digest of all four parts."""
        parts = json.dumps(asdict(self), sort_keys=True)
        head = re.sub(r"[^a-z0-9]+", "-", f"{self.sku} {self.workload} c{self.concurrency}".lower()).strip("-")
        return f"{head}-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """Known-good values. Watts of one GPU; tokens a second of one server; sd over `windows` windows."""

    key: JobKey
    tok_s: float
    tok_s_sd: float
    power_w: float | None
    power_w_sd: float | None
    windows: int
    j_per_token: float | None = None
    accept_length: float | None = None
    sm_clock_mhz: float | None = None
    idle_w: float | None = None
    compared: Mapping[str, Any] = field(default_factory=dict)
    written_at: str = ""
    version: int = VERSION


def sku_of(infos: Sequence[GpuInfo], count: int | None = None) -> str:
    """Key text of the GPUs behind one server: `NVIDIA H200 140GiB`, `2x …` for a group."""
    if not infos:
        return "no-nvidia"
    names = sorted({info.sku for info in infos})
    number = count or len(infos)
    return (f"{number}x " if number > 1 else "") + " + ".join(names)


def model_digest(model: str, revision: str | None = None, quantization: str | None = None, **more: Any) -> str:
    """A short digest of what is served; add whatever changes the work of one token (state dtype, template)."""
    text = json.dumps([model, revision, quantization, sorted(more.items())], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compared_fields(
    infos: Sequence[GpuInfo], arguments: Mapping[str, Any], speculation: Speculation, version: str = ""
) -> dict[str, Any]:
    """What is held against the next run, JSON-able."""
    kept = {name: value for name, value in arguments.items() if name not in VOLATILE}
    return {
        "gpu_uuids": sorted(info.uuid for info in infos),
        "driver": infos[0].driver if infos else None,
        "enforced_limit_w": infos[0].enforced_limit_w if infos else None,
        "speculation": speculation,
        "engine_version": version,
        "arguments": json.loads(json.dumps(kept, default=str)),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compared fields that differ, arguments one by one: name to (then, now)."""
    found = {
        name: (before.get(name), now.get(name))
        for name in ("driver", "enforced_limit_w", "speculation", "engine_version", "gpu_uuids")
        if before.get(name) != now.get(name)
    }
    then, today = before.get("arguments") or {}, now.get("arguments") or {}
    for name in sorted({*then, *today}):
        if then.get(name) != today.get(name) and name in then and name in today:
            found[f"--{name.replace('_', '-')}"] = (then[name], today[name])
    return found


def expected_from(
    baseline: Baseline, now: Mapping[str, Any], *, same_board: float = 0.08, other_board: float = 0.15
) -> Expected:
    """The band to hold a run against: max(3 sd, 8 %) on the same boards, max(3 sd, 15 %) on others of the SKU."""
    same = bool(baseline.compared.get("gpu_uuids")) and baseline.compared.get("gpu_uuids") == now.get("gpu_uuids")
    least = same_board if same else other_board
    power_w, power_sd = baseline.power_w, baseline.power_w_sd or 0.0
    return Expected(
        tok_s=baseline.tok_s,
        power_w=power_w,
        tok_s_band=max(least, BAND_SD * baseline.tok_s_sd / baseline.tok_s) if baseline.tok_s > 0 else least,
        power_band=max(least, BAND_SD * power_sd / power_w) if power_w else least,
        j_per_token=baseline.j_per_token,
        accept_length=baseline.accept_length,
        idle_w=baseline.idle_w,
        enforced_limit_w=baseline.compared.get("enforced_limit_w"),
        speculation=baseline.compared.get("speculation", "unknown"),
        changed=changes(baseline.compared, now),
        same_board=same,
    )


def build(key: JobKey, windows: Sequence[Evidence], whole: Evidence, compared: Mapping[str, Any]) -> Baseline | None:
    """A baseline from >= 3 windows of one steady probe and its sum `whole`; None without tokens per second."""
    rates = [w.service.tok_s for w in windows if w.service.tok_s]
    watts = [w.power_w for w in windows if w.power_w is not None]
    tok_s = whole.service.tok_s
    if not tok_s or len(rates) < 3:
        return None
    clocks = [s.sm_clock_mhz for s in whole.stats if s.sm_clock_mhz is not None]
    return Baseline(
        key=key,
        tok_s=tok_s,
        tok_s_sd=statistics.stdev(rates),
        power_w=whole.power_w,
        power_w_sd=statistics.stdev(watts) if len(watts) > 1 else None,
        windows=len(rates),
        j_per_token=whole.j_per_token,
        accept_length=whole.service.accept_length,
        sm_clock_mhz=statistics.fmean(clocks) if clocks else None,
        idle_w=whole.idle_w,
        compared=dict(compared),
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def not_known_good(whole: Evidence, problems: Sequence[str], hard_rules_passed: bool) -> list[str]:
    """Why this run may not become the measure of later ones. Empty when it may."""
    reasons = list(problems)
    if not hard_rules_passed:
        reasons.append("a hard rule fires")
    if whole.job.mtp_wanted and whole.service.speculation != "on":
        reasons.append(f"MTP was asked for and speculation is {whole.service.speculation}")
    accept = whole.service.accept_length
    if whole.job.mtp_wanted and (accept is None or accept < whole.job.min_accept_length):
        reasons.append(f"MTP was asked for and its acceptance length is {accept}")
    if not whole.stats:
        reasons.append("power was not read")
    return reasons


class Baselines:
    """Baselines of one data set: a local folder, and a Store that outlives it where there is one.

    Reading prefers the folder and falls back to the store; writing writes both. A damaged file is an error.
    """

    def __init__(self, folder: Path, store: "Store | None" = None) -> None:
        self.folder, self.store = folder, store

    def read(self, key: JobKey) -> Baseline | None:
        """The baseline of `key`, or None where there is none. Raises StorageError on a damaged one."""
        path = self.folder / f"{key.text}.json"
        if path.exists():
            return parse(path.read_bytes(), str(path))
        name = f"baselines/{key.text}.json"
        if self.store is None or not self.store.exists(name):
            return None
        return parse(self.store.get_bytes(name), f"{self.store.url}/{name}")

    def write(self, baseline: Baseline) -> Path:
        """Write `baseline` to the folder and the store; returns the local path."""
        path = self.folder / f"{baseline.key.text}.json"
        write_json(path, asdict(baseline))
        if self.store is not None:
            self.store.put_bytes(f"baselines/{baseline.key.text}.json", path.read_bytes())
        return path


def parse(data: bytes, where: str) -> Baseline:
    """A baseline from its JSON. Raises StorageError naming `where` when it is damaged or of another version."""
    try:
        value = json.loads(data)
        if value["version"] != VERSION:
            raise StorageError(
                f"{where} is of version {value['version']}, expected {VERSION}; delete it to recalibrate"
            )
        return Baseline(**{**value, "key": JobKey(**value["key"])})
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{where} is not a baseline ({error!r}); delete it, and the next good run writes one"
        ) from error
