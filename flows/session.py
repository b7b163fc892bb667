"""What one run holds open: its folder, its lease, its store, the power sampler. Everything closes in reverse order."""

import asyncio
import contextlib
import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# pyarrow imports pandas by itself, in whichever thread first converts a list, and altair fails on a half-imported one.
import pandas  # noqa: F401

from flows.spec import RegenSpec
from tasks.runs import RunPaths, begin_run, check_identity, host_name, open_run, read_json
from tasks.settings import TargetSettings
from tasks.storage import Store, open_store
from tasks.target.load import load_target
from tasks.target.text import TargetText
from tasks.upload.lease import Lease, hold_lease
from tasks.upload.manifest import read_manifest

log = logging.getLogger(__name__)


@dataclass
class Session:
    """One open run. `facts` gathers what the manifest and the report will say."""

    spec: RegenSpec
    paths: RunPaths
    target: TargetText
    store: Store
    lease: Lease
    adopted: bool
    identity: Mapping[str, Any]
    digest: str
    facts: dict[str, Any] = field(default_factory=dict)

    def note(self, **facts: Any) -> None:
        """Remember `facts` in record.json, and for the manifest."""
        self.facts.update(facts)
        self.paths.note(**facts)


@contextlib.asynccontextmanager
async def open_session(spec: RegenSpec) -> AsyncIterator[Session]:
    """Resolve the target, adopt or begin a run, and hold the data set's lease until the end.

    Raises SpecError where an unfinished run of another identity is in the way, StorageError where the store refuses.
    """
    spec = resolve(spec)
    target = await asyncio.to_thread(load_target, target_files(spec))
    resolved = {"template_sha256": target.template_sha256, "tokenizer_sha256": target.tokenizer_sha256}
    identity, digest = spec.identity(**resolved), spec.identity_digest(**resolved)
    dataset_dir = dataset_folder(spec)
    store = open_store(
        spec.publish.store or dataset_dir,
        endpoint_url=spec.publish.endpoint_url,
        region=spec.publish.region,
        checksums=spec.publish.checksums,
        part_mb=spec.publish.part_mb,
        credentials=await credentials(spec.publish.credentials_block),
    )
    refuse_other_identity(store, identity, digest)
    paths, adopted = open_run(dataset_dir, identity, digest)  # after what may refuse: no folder is left behind
    holder = f"{host_name()}:{os.getpid()}:{paths.run_id}"
    with contextlib.ExitStack() as stack:
        # In a thread: it may wait for a holder that may be dead, and a cancel must get through meanwhile.
        lease = await asyncio.to_thread(stack.enter_context, hold_lease(store, holder, spec.publish.lease_s))
        begin_run(paths, run_description(spec, identity, digest))
        facts = read_json(paths.record) if paths.record.exists() else {}
        run = Session(spec, paths, target, store, lease, adopted, identity, digest, facts)
        run.note(error=None)
        try:
            yield run
        except BaseException as error:
            run.note(error={"kind": type(error).__name__, "message": str(error)})
            raise


def refuse_other_identity(store: Store, identity: Mapping[str, Any], digest: str) -> None:
    """One data set is one identity: rows of another model, sampling or mask never mix with those published.

    Raises SpecError naming each field that differs.
    """
    manifest, _ = read_manifest(store)
    snapshots = (manifest or {}).get("snapshots") or []
    if snapshots:
        check_identity(snapshots[-1], identity, digest, store.url)


def dataset_folder(spec: RegenSpec) -> Path:
    """Where the data set's runs live on this node."""
    return Path(spec.publish.work_dir).resolve() / spec.publish.dataset


def resolve(spec: RegenSpec) -> RegenSpec:
    """Turn names that stand for files of this installation into paths."""
    updates: dict[str, Any] = {}
    if "demo:prompts" in spec.source.paths:
        shipped = str(Path(__file__).with_name("demo_prompts.jsonl"))
        paths = tuple(shipped if path == "demo:prompts" else path for path in spec.source.paths)
        updates["source"] = spec.source.model_copy(update={"paths": paths})
    return spec.model_copy(update=updates)


def target_files(spec: RegenSpec) -> TargetSettings:
    """Where the target's tokenizer and template are read; the embedded model's are made from its own file."""
    if not spec.target.model.startswith("embedded:"):
        return spec.target
    from tasks.provisioning.embedded import materialize_target

    folder = str(materialize_target(Path(spec.publish.work_dir).resolve() / ".cache"))
    return spec.target.model_copy(update={"model": folder})


async def credentials(block: str | None) -> dict[str, str] | None:
    """Keys from an aws-credentials block, or None for the usual AWS chain. Never logged, never in a record."""
    if block is None:
        return None
    from prefect_aws import AwsCredentials

    loaded: Any = await AwsCredentials.aload(block)
    secret = loaded.aws_secret_access_key
    return {
        "aws_access_key_id": loaded.aws_access_key_id or "",
        "aws_secret_access_key": secret.get_secret_value() if secret else "",
        **({"aws_session_token": loaded.aws_session_token} if loaded.aws_session_token else {}),
    }


def run_description(spec: RegenSpec, identity: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """spec.json: the resolved spec, its identity and the versions in use."""
    packages = ("drafter-regen", "prefect", "transformers", "tokenizers", "openai", "polars", "pyarrow", "boto3")
    return {
        "spec": spec.groups(),
        "identity": dict(identity),
        "identity_digest": digest,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "host": host_name(),
    }
