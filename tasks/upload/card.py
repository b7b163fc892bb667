"""The data set card: README.md with the YAML header that Hugging Face tools read, and code that loads the files.

The card is derived from the manifest and written after it; the manifest stays the truth.
"""

import json
from typing import Any

from tasks.cuts import NAMES, cut_text
from tasks.storage import Store
from tasks.upload.counts import total
from tasks.upload.layout import CARD
from tasks.upload.manifest import Manifest, active_parts

CONFIGS = ("tokens", "completions")
"""Kinds that are data sets of their own; `load_dataset` gets one configuration for each."""


def write_card(store: Store, manifest: Manifest) -> str:
    """Publish the card of the newest snapshot; returns its text."""
    text = render_card(manifest, store.url)
    store.put_bytes(CARD, text.encode())
    return text


def render_card(manifest: Manifest, url: str) -> str:
    """The card as text; `url` is where the data set lies."""
    parts = [header(manifest), f"# {manifest['dataset']}\n", _about(manifest), "## Load it\n", load_code(manifest, url)]
    return "\n".join([*parts, _conventions(manifest), _snapshots(manifest)])


def header(manifest: Manifest) -> str:
    """YAML header. JSON is YAML: strings are quoted once and for all."""
    files = manifest["current"].get("files", {})
    lines = ["---", "tags:", "- speculative-decoding", "- drafter", "- self-generated", "configs:"]
    for name in CONFIGS:
        if files.get(name):
            lines += [f"- config_name: {name}", "  data_files:", "  - split: train", "    path:"]
            lines += [f"    - {json.dumps(key)}" for key in files[name]]
            lines += ["  default: true"] if name == CONFIGS[0] or not files.get(CONFIGS[0]) else []
    return "\n".join([*lines, "---", ""])


def load_code(manifest: Manifest, url: str) -> str:
    """Code that reads the newest snapshot, for a folder or for a bucket."""
    kind = CONFIGS[0] if manifest["current"].get("files", {}).get(CONFIGS[0]) else CONFIGS[1]
    if url.startswith("s3://"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        key = f"{prefix}/manifest.json".lstrip("/")
        read = ["import boto3", f'text = boto3.client("s3").get_object(Bucket="{bucket}", Key="{key}")["Body"].read()']
    else:
        read = ["from pathlib import Path", 'text = Path(f"{root}/manifest.json").read_text()']
    lines = [
        "```python",
        "import json",
        "import polars as pl",
        *read[:1],
        "",
        f"root = {json.dumps(url)}",
        *read[1:],
        f'files = [f"{{root}}/{{key}}" for key in json.loads(text)["current"]["files"]["{kind}"]]',
        "rows = pl.scan_parquet(files)",
        "```",
        "",
        "or, with the same `files`,",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'rows = load_dataset("parquet", data_files=files, split="train")',
        "```",
        "",
    ]
    return "\n".join(lines)


def _about(manifest: Manifest) -> str:
    current, newest = manifest["current"], manifest["snapshots"][-1]
    sampling = newest.get("sampling") or {}
    shown = ", ".join(f"{name} {sampling[name]}" for name in ("temperature", "top_p", "top_k", "max_tokens", "thinking")
                      if sampling.get(name) is not None)  # fmt: skip
    rows = current["rows"]
    cut = cut_text(total({name: part["counts"].get(name, 0) for name in NAMES} for part in _parts(manifest)))
    mtp = newest.get("mtp") or {}
    accept = f", acceptance length {mtp['accept_length']:.2f}" if mtp.get("accept_length") else ""
    servers = sorted({f"{s.get('engine')} {s.get('version')}".strip() for s in newest.get("servers", [])})
    revision = f" at revision `{newest['revision']}`" if newest.get("revision") else ""
    lines = [
        f"Completions that `{newest.get('model')}`{revision} wrote itself, regenerated to train its drafter.",
        "",
        f"- {rows.get('completions', 0):,} answered prompts, {rows.get('tokens', 0):,} training rows (one a turn), "
        f"{current['bytes'] / 1e6:,.1f} MB in snapshot `{current['snapshot']}`",
        *([f"- cut at the output limit: {cut}"] if cut else []),
        f"- sampling: {shown or 'as the model says'}",
        f"- made by {', '.join(servers) or 'an unknown server'}; MTP {mtp.get('verdict', 'UNKNOWN')}{accept}",
        f"- identity `{newest.get('identity_digest')}`, chat template sha256 `{newest.get('template_sha256')}`",
        "",
        "The model's licence applies to what it wrote.",
        "",
    ]
    return "\n".join(lines)


def _parts(manifest: Manifest) -> list[dict[str, Any]]:
    """Parts of the newest snapshot."""
    return [{"counts": {}, **manifest["parts"][name]} for name in active_parts(manifest)]


def _conventions(manifest: Manifest) -> str:
    lines = [f"- **{name}**: {text}" for name, text in manifest["conventions"].items()]
    return "\n".join(
        ["## Conventions\n", *lines, "", "`manifest.json` names every file with its bytes and sha256.", ""]
    )


def _snapshots(manifest: Manifest) -> str:
    columns = ("snapshot", "created", "prompts", "training rows", "failed", "turns", "of them cut")
    rows = ["## Snapshots\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for snapshot in manifest["snapshots"]:
        counts: dict[str, Any] = snapshot["counts"]
        figures = " | ".join(f"{counts.get(name, 0):,}" for name in ("done", "rows", "failed", "turns", "cut_turns"))
        rows.append(f"| `{snapshot['id']}` | {snapshot['created']} | {figures} |")
    return "\n".join([*rows, ""])
