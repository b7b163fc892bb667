"""What the manifest says about how a snapshot was made, gathered from spec.json, record.json and the flow's facts.

Reads, all optional: spec.json `identity`, `identity_digest`, `versions`, `spec`; record.json `servers` (fields of
`tasks.records.Server`), `gates` ({name: GateReport.as_dict()}; `mtp` with `verdict` and `details.accept_length`),
`gpus` (list of {name, uuid, driver, …}), `driver`, `validation` (fields of ValidationResult), `accept_length`,
`generation`, `code_version`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.errors import GateError

SECRET = re.compile(r"key|token$|secret|password|credential", re.IGNORECASE)


def provenance(spec: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance block of a snapshot. Raises GateError when acceptance was simulated: that is not published."""
    refuse_simulated(facts)
    identity = dict(spec.get("identity", {}))
    groups = spec.get("spec", {})
    target = groups.get("target", {})
    mtp = _mtp(facts)
    validation = facts.get("validation") or {}
    return {
        "identity_digest": spec.get("identity_digest"),
        "identity": identity,
        "model": target.get("model"),
        "revision": target.get("revision"),
        "quantization": target.get("quantization"),
        "template_sha256": identity.get("template_sha256"),
        "tokenizer_sha256": identity.get("tokenizer_sha256"),
        "sampling": groups.get("sampling", {}),
        "servers": [_server(server) for server in _list(facts.get("servers"))],
        "mtp": mtp,
        "gates": {name: _verdict(report) for name, report in (facts.get("gates") or {}).items()},
        "gpus": [dict(gpu) for gpu in _list(facts.get("gpus"))],
        "driver": facts.get("driver"),
        "code_version": facts.get("code_version") or spec.get("versions", {}).get("drafter-regen"),
        "versions": spec.get("versions", {}),
        "rejects": {
            "validation": dict(validation.get("reasons", {})),
            "rows": {name: validation.get(name) for name in ("rows", "kept", "rejected", "duplicates")},
        },
    }


def refuse_simulated(facts: Mapping[str, Any]) -> None:
    """SGLang can pretend that drafts are accepted (for benchmarks); its tokens are then not the target's."""
    for server in _list(facts.get("servers")):
        arguments = server.get("arguments") or {}
        if server.get("simulated_acceptance") or any(
            "simulate_acc" in str(n).lower() and v for n, v in arguments.items()
        ):
            raise GateError(
                f"server {server.get('name')} simulates acceptance: its tokens are not the target's own words. "
                "Nothing was published; unset SGLANG_SIMULATE_ACC_LEN and generate again",
                {"gate": "publish", "verdict": "SIMULATED_ACCEPTANCE", "server": server.get("name")},
            )


def _mtp(facts: Mapping[str, Any]) -> dict[str, Any]:
    report = (facts.get("gates") or {}).get("mtp") or facts.get("mtp") or {}
    details = report.get("details") or {}
    accept = facts.get("accept_length", details.get("accept_length"))
    return {"verdict": report.get("verdict", "UNKNOWN"), "accept_length": accept}


def _server(server: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "engine", "version", "model", "gpu_uuids", "max_running_requests", "context_tokens")
    return {name: server.get(name) for name in names} | {"arguments": redact(server.get("arguments") or {})}


def redact(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without what must stay secret."""
    return {str(n): "(hidden)" if SECRET.search(str(n)) and v and not _number(v) else v for n, v in arguments.items()}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _verdict(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: report.get(name) for name in ("verdict", "level", "mode", "summary")}


def _list(value: Any) -> Sequence[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []
