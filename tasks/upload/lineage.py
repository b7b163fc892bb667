"""Where the published rows come from: the chain of assets of one run, for events and for a table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.upload.layout import MANIFEST
from tasks.upload.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Step:
    """One asset: its URI, what it was made from and its figures."""

    name: str
    key: str
    made_from: tuple[str, ...]
    figures: Mapping[str, Any]

    def row(self) -> dict[str, Any]:
        """A row of the lineage table."""
        return {"asset": self.name, "uri": self.key, "made from": ", ".join(self.made_from), **self.figures}


def steps(url: str, run_id: str, manifest: Manifest) -> list[Step]:
    """prompts → completions → tokens → published, with the sums of the newest snapshot."""
    newest = manifest["snapshots"][-1] if manifest["snapshots"] else {}
    counts, current = newest.get("counts", {}), manifest["current"]
    kept = newest.get("rejects", {}).get("rows", {}).get("kept")
    run = asset_uri(url, f"runs/{run_id}")
    prompts, completions, tokens = f"{run}/prompts", f"{run}/completions", f"{run}/tokens"
    return [
        Step("prompts", prompts, (), {"rows": kept if kept is not None else counts.get("prompts", 0)}),
        Step("completions", completions, (prompts,), _figures(counts, "done", "output_tokens")),
        Step("tokens", tokens, (completions,), _figures(counts, "rows", "supervised_tokens")),
        Step(
            "published",
            asset_uri(url, MANIFEST),
            (tokens,),
            {"rows": current.get("rows", {}).get("tokens", 0), "bytes": current.get("bytes", 0)},
        ),
    ]


def _figures(counts: Mapping[str, Any], rows: str, tokens: str) -> dict[str, Any]:
    return {"rows": counts.get(rows, 0), "tokens": counts.get(tokens, 0)}


def summary(url: str, manifest: Manifest) -> dict[str, Any]:
    """What the flow hands on: small, and enough to find everything."""
    current = manifest["current"]
    return {
        "manifest": f"{url}/{MANIFEST}",
        "snapshot": current.get("snapshot"),
        "rows": current.get("rows", {}),
        "bytes": current.get("bytes", 0),
        "files": sum(len(keys) for keys in current.get("files", {}).values()),
    }


def asset_uri(url: str, key: str) -> str:
    """A URI that Prefect takes as an asset key: a scheme, and only characters that it allows."""
    root = url if "://" in url else f"file://{url}"
    return re.sub(r"[^A-Za-z0-9_.:/-]", "_", f"{root}/{key}")
