"""A small run on disk as the stages before publication leave it, for tests of publication and report."""

import hashlib
from pathlib import Path

import polars as pl

from tasks.records import ChunkRecord
from tasks.runs import RunPaths, write_json


def prompt_id(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


def message(role: str, content: str) -> dict:
    return {
        "role": role,
        "content": content,
        "reasoning_content": None,
        "tool_calls": None,
        "tool_call_id": None,
        "name": None,
    }


def make_chunk(
    paths: RunPaths, index: int, done: list[int], failed: list[int] = (), text: str = "answer"
) -> ChunkRecord:
    """Write one chunk folder; answers carry `text` so that two generations differ."""
    folder = paths.chunk(index)
    folder.mkdir(parents=True, exist_ok=True)
    completions = pl.DataFrame(
        {
            "prompt_id": [prompt_id(n) for n in done],
            "messages": [[message("user", f"question {n}"), message("assistant", f"{text} {n}")] for n in done],
            "turns": [
                [{"turn": 0, "content": f"{text} {n}", "finish_reason": "stop", "completion_tokens": 10 + n}]
                for n in done
            ],
            "output_tokens": [10 + n for n in done],
        },
        schema_overrides={"prompt_id": pl.String, "output_tokens": pl.Int64},
    )
    completions.write_parquet(folder / "completions.parquet")
    pl.DataFrame(
        {
            "prompt_id": [prompt_id(n) for n in failed],
            "reason": ["DEGENERATE_REPETITION" for _ in failed],
            "detail": ["" for _ in failed],
        },
        schema={"prompt_id": pl.String, "reason": pl.String, "detail": pl.String},
    ).write_parquet(folder / "failed.parquet")
    pl.DataFrame(
        {
            "prompt_id": [prompt_id(n) for n in done],
            "turn": [0 for _ in done],
            "input_ids": [[1, 2, 3, n] for n in done],
            "loss_mask": [[0, 0, 1, 1] for _ in done],
            "n_supervised": [2 + n for n in done],
            "ids_exact": [True for _ in done],
        },
        schema_overrides={"prompt_id": pl.String, "turn": pl.Int32, "n_supervised": pl.Int32},
    ).write_parquet(folder / "tokens.parquet")
    record = ChunkRecord(
        index=index,
        directory=str(folder),
        prompts=len(done) + len(failed),
        done=len(done),
        failed=len(failed),
        output_tokens=sum(10 + n for n in done),
        completions_path=str(folder / "completions.parquet"),
        failed_reasons={"DEGENERATE_REPETITION": len(failed)} if failed else {},
    )
    write_json(folder / "chunk.json", record)
    return record


def make_run(dataset_dir: Path, run_id: str, **facts) -> RunPaths:
    """spec.json and record.json of a run."""
    paths = RunPaths(dataset_dir, run_id)
    identity = {"template_sha256": "t" * 64, "tokenizer_sha256": "k" * 64, "target.model": "tiny"}
    write_json(
        paths.spec,
        {
            "spec": {
                "target": {"model": "org/tiny", "revision": "abc", "quantization": None},
                "sampling": {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "max_tokens": 64, "thinking": True},
                "publish": {"dataset": dataset_dir.name},
            },
            "identity": identity,
            "identity_digest": "d" * 64,
            "versions": {"drafter-regen": "0.1.0"},
        },
    )
    server = {
        "name": "s0",
        "engine": "sglang",
        "version": "0.5.19",
        "model": "org/tiny",
        "arguments": {"api_key": "very-secret", "mem_fraction_static": 0.8, "speculative_algorithm": "EAGLE"},
        "gpu_uuids": ["GPU-1"],
        "simulated_acceptance": False,
    }
    record = {
        "started": 1_000_000.0,
        "servers": [server],
        "gates": {"mtp": {"verdict": "ON_AND_EFFECTIVE", "level": "ok", "details": {"accept_length": 2.9}}},
        "gpus": [{"name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.1"}],
        "validation": {"rows": 10, "kept": 7, "rejected": 2, "duplicates": 1, "reasons": {"NO_USER_TURN": 2}},
        **facts,
    }
    write_json(paths.record, record)
    return paths
