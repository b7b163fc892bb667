"""Buckets and the hub: the same rows as from files here, and one clear error where they cannot be read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import datasets
import orjson
import pytest
from moto.server import ThreadedMotoServer

from tasks.errors import DatasetError
from validation_rows import chat


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An S3 server in this process with three objects; returns its endpoint."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, **keys)
    client.create_bucket(Bucket="sets")
    for name, rows in {"chat/a.jsonl": ["a", "b"], "chat/b.jsonl": ["c"], "chat/notes.txt": ["d"]}.items():
        body = b"".join(orjson.dumps(chat(text)) + b"\n" for text in rows)
        client.put_object(Bucket="sets", Key=name, Body=body)
    yield endpoint
    server.stop()


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.mark.parametrize(("path", "rows"), [("chat/a.jsonl", 2), ("chat/*.jsonl", 3), ("chat", 3), ("chat/", 3)])
def test_objects_globs_and_prefixes_of_a_bucket(path: str, rows: int, bucket: str, judge: Any) -> None:
    found = judge(f"s3://sets/{path}", s3_endpoint_url=bucket)
    assert found.sums == (rows, rows, 0, 0)
    assert all(source.startswith("s3://sets/chat/") for source in found.prompts["source"])


@pytest.mark.parametrize("path", ["s3://sets/nothing.jsonl", "s3://sets/none/*.jsonl", "s3://no-such-bucket/x.jsonl"])
def test_what_a_bucket_does_not_have_is_one_clear_error(path: str, bucket: str, judge: Any) -> None:
    with pytest.raises(DatasetError, match=path.split("/")[2]):
        judge(path, s3_endpoint_url=bucket)


def test_a_hub_data_set_is_streamed(tmp_path: Path, judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, config: str | None, **options: Any) -> Any:
        asked.append((name, config, options))
        return datasets.Dataset.from_list([chat("a"), chat("b"), chat("c")]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert judge("hf://org/name:main", limit=2, split="test").sums == (2, 2, 0, 0)
    assert asked == [("org/name", "main", {"split": "test", "streaming": True})]


def test_a_hub_data_set_that_is_not_there_is_one_clear_error(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/none' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DatasetError, match="hf://org/none"):
        judge("hf://org/none")
