"""Public faults of publishing: S3 checksums, parts, clocks, throttling, ETags; resumed manifests; foreign folders."""

import json
import os
from dataclasses import replace

import pytest

from paths import shared
from published_runs import make_chunk, make_run
from s3_faults import proxy
from s3_servers import BUCKET, client_of, moto
from tasks.errors import SpecError, StorageError, VerificationError
from tasks.records import FileEntry
from tasks.runs import check_identity
from tasks.storage import Retry, open_store
from tasks.storage.digests import MIN_PART_BYTES, part_size
from tasks.upload.chunk import upload_chunk
from tasks.upload.lease import acquire
from tasks.upload.manifest import read_manifest, refuse_foreign
from tasks.upload.snapshot import publish_snapshot
from tasks.upload.verify import verify

FAST = Retry(attempts=10, base_s=0.01, cap_s=0.05)
MIB = 1 << 20


def case(folder):
    return json.loads(shared(f"cases/{folder}/input.json").read_bytes())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with moto(tmp_path_factory.mktemp("moto")) as running:
        yield running


@pytest.fixture
def behind(server, tmp_path):
    """`behind(decide)` opens a store behind a proxy that asks `decide` for every request."""
    opened = []

    def open_behind(decide, keep_bodies=False, **options):
        manager = proxy(server.endpoint_url, decide, keep_bodies)
        one = manager.__enter__()
        opened.append(manager)
        url = f"s3://{BUCKET}/{tmp_path.name}"
        options = {"part_mb": 5, "retry": FAST, "credentials": server.credentials, **options}
        return open_store(url, endpoint_url=one.url, **options), one

    yield open_behind
    for manager in opened:
        manager.__exit__(None, None, None)


def write(path, size):
    path.write_bytes(os.urandom(size))
    return path


def test_checksum_trailers_are_not_sent_to_stores_that_refuse_them(behind, tmp_path):
    refused = ("x-amz-trailer", "x-amz-checksum-crc32")
    assert all(name in case("75_s3_default_checksum_trailer")["fake_server"] for name in refused)

    def old_store(seen):
        names = [name.lower() for name in seen.headers]
        bad = "aws-chunked" in seen.headers.get("Content-Encoding", "") or any(
            n.startswith("x-amz-checksum") for n in names
        )
        return "answer:400:InvalidRequest" if bad or "x-amz-trailer" in names else ""

    store, seen = behind(old_store)
    for size in (1000, 11 * MIB):
        entry = store.put_file(f"f{size}", write(tmp_path / "f", size))
        store.verify(entry)
    after = [s for s in seen.seen if ".probe-" not in s.path]
    assert after and not any(s.fault for s in after)
    store, seen = behind(old_store, checksums="when_required")
    store.put_file("again", write(tmp_path / "f", 11 * MIB))
    assert not any(s.fault for s in seen.seen)


def test_part_size_is_chosen_before_the_first_byte():
    given = case("78_s3_ten_thousand_parts")
    size = given["object_size_bytes"]
    part = part_size(size, given["configured_part_mib"] * MIB)
    assert part >= MIN_PART_BYTES and -(-size // part) <= 10_000
    small = given["scale_down_test"]
    part = part_size(small["size_mib"] * MIB, small["part_mib"] * MIB, max_parts=small["max_parts"])
    assert part >= 12 * MIB and -(-small["size_mib"] * MIB // part) <= 10
    assert part_size(100, 8 * MIB) == 8 * MIB
    with pytest.raises(StorageError, match="5 TiB"):
        part_size((5 << 40) + 1)


def test_a_skewed_clock_gets_one_fresh_signature(behind, tmp_path):
    assert "RequestTimeTooSkewed" in case("79_s3_clock_skew")["fake_server"]
    state = {"left": 1}

    def once(seen):
        if "partNumber" in seen.query and state["left"]:
            state["left"] -= 1
            return "answer:403:RequestTimeTooSkewed"
        return ""

    store, seen = behind(once)
    store.verify(store.put_file("f", write(tmp_path / "f", 6 * MIB)))
    parts = [s for s in seen.seen if "partNumber" in s.query]
    assert len(parts) == 3


def test_a_clock_that_stays_skewed_is_named_and_leaves_no_orphan(behind, server, tmp_path):
    store, _ = behind(lambda seen: "answer:403:RequestTimeTooSkewed" if "partNumber" in seen.query else "")
    with pytest.raises(StorageError, match=r"CLOCK_SKEW: this machine says .* UTC, the server says .*GMT.*part_mb"):
        store.put_file("f", write(tmp_path / "f", 6 * MIB))
    uploads = client_of(server).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert not [u for u in uploads if tmp_path.name in u["Key"]]


def test_slow_down_is_waited_out_and_nothing_is_generated_again(behind, tmp_path):
    assert "7 x 503 SlowDown" in case("80_s3_slow_down")["fake_server"]
    count: dict = {}
    waits: list = []

    def slow_down(seen):
        if "partNumber" not in seen.query:
            return ""
        number = seen.query["partNumber"]
        count[number] = count.get(number, 0) + 1
        return "answer:503:SlowDown" if count[number] <= 7 else ""

    store, _ = behind(slow_down)
    store.caller._sleep = waits.append
    store.verify(store.put_file("f", write(tmp_path / "f", 11 * MIB)))
    assert set(count.values()) == {8}
    assert len(set(waits)) > 3


def test_a_store_that_stays_busy_keeps_what_arrived(behind, tmp_path):
    state = {"busy": True}

    def busy(seen):
        return "answer:503:SlowDown" if state["busy"] and seen.query.get("partNumber") == "3" else ""

    store, seen = behind(busy)
    store.caller._sleep = lambda _: None
    path = write(tmp_path / "f", 11 * MIB)
    with pytest.raises(StorageError, match=r"SlowDown .*after 10 attempts.*same command again"):
        store.put_file("f", path)
    state["busy"] = False
    seen.seen.clear()
    store.verify(store.put_file("f", path))
    assert [s.query["partNumber"] for s in seen.seen if "partNumber" in s.query] == ["3"]


def test_an_etag_is_never_taken_for_content(behind, tmp_path):
    etag = case("81_s3_etag_is_not_md5")["head"]["ETag"]
    assert etag.endswith('-2"')
    store, _ = behind(lambda seen: "")
    entry = store.put_file("f", write(tmp_path / "f", 12 * MIB))
    assert store.head("f").version.rstrip('"').endswith("-3")
    store.verify(entry)
    with pytest.raises(VerificationError):
        store.verify(replace(entry, bytes=entry.bytes - 1))
    # Same size, same kind of ETag, other bytes: only our own digest tells.
    client = store.client
    client.put_object(
        Bucket=BUCKET, Key=f"{tmp_path.name}/f", Body=os.urandom(12 * MIB), Metadata={"sha256": entry.sha256}
    )
    with pytest.raises(VerificationError):
        store.verify(entry)


def test_a_failed_first_try_repeats_identical_bytes(behind, tmp_path):
    assert "500" in case("82_s3_unseekable_stream_retry")["fake_server"]
    state = {"left": 1}

    def fails_once(seen):
        if seen.method == "PUT" and seen.path.endswith("/f") and state["left"]:
            state["left"] -= 1
            return "answer:500:InternalError"
        return ""

    store, seen = behind(fails_once, keep_bodies=True)
    path = write(tmp_path / "f", 3 * MIB)
    store.verify(store.put_file("f", path))
    bodies = [s.body for s in seen.seen if s.method == "PUT" and s.path.endswith("/f")]
    assert bodies == [path.read_bytes()] * 2


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (400, "ExpiredToken", "renew them"),
        (403, "AccessDenied", "bucket's policy"),
        (404, "NoSuchBucket", "create it or correct publish.store"),
        (403, "InvalidAccessKeyId", "access key"),
    ],
)
def test_final_refusals_are_one_clear_error(behind, tmp_path, status, code, words):
    store, seen = behind(lambda seen: f"answer:{status}:{code}" if seen.method == "PUT" else "")
    with pytest.raises(StorageError, match=words):
        store.put_file("f", write(tmp_path / "f", 100))
    assert len([s for s in seen.seen if s.method == "PUT"]) <= 2


def test_a_store_that_is_not_there_is_said_soon(tmp_path):
    store = open_store(
        "s3://b/p",
        endpoint_url="http://127.0.0.1:9",
        credentials={"aws_access_key_id": "a", "aws_secret_access_key": "b"},
        retry=FAST,
    )
    with pytest.raises(StorageError, match="after 3 attempts"):
        store.exists("x")


def test_a_resumed_run_adds_to_the_manifest(tmp_path):
    given = case("59_index_overwritten_on_resume")
    store = open_store(tmp_path / "store")
    rows = {**given["manifest_before"], **given["resumed_rows"]}
    paths = make_run(tmp_path / "set", "run1")
    sent = []
    for step in (given["manifest_before"], given["resumed_rows"]):
        for index, count in step.items():
            numbers = [int(index) * 1000 + n for n in range(count)]
            record = make_chunk(paths, int(index), numbers)
            sent.append(upload_chunk(store, "run1", paths.chunk(int(index)), record))
        publish_snapshot(store, paths, sent)
    manifest, _ = read_manifest(store)
    found = {str(p["index"]): p["counts"]["done"] for p in manifest["parts"].values()}
    assert found == rows
    assert manifest["current"]["rows"]["tokens"] == sum(rows.values())
    assert verify(store.url).verdict == "IDENTICAL"


def test_a_folder_with_somebodys_files_is_refused_by_name(tmp_path):
    given = case("61_unsafe_overwrite")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in given["output_dir"]:
        (folder / name).write_text("{}")
    with pytest.raises(StorageError, match=r"thesis\.docx"):
        refuse_foreign(open_store(folder))
    assert sorted(path.name for path in folder.iterdir()) == sorted(given["output_dir"])


def test_a_changed_template_is_another_identity(tmp_path):
    given = case("30_stale_tokenized_cache")
    one, two = ({"template_sha256": given[run]["template_text"]} for run in ("run1", "run2"))
    with pytest.raises(SpecError, match="template_sha256"):
        check_identity({"identity": one, "identity_digest": "1"}, two, "2", tmp_path)


def test_a_zombie_holds_no_lease_and_spoils_nothing(tmp_path):
    assert "kill -9" in case("83_prefect_zombie_run")["scenario"]
    store = open_store(tmp_path / "store")
    lease = acquire(store, "zombie", 900)
    body = json.loads(store.get_bytes("lease.json")) | {"started_s": 1.0}
    store.put_bytes("lease.json", json.dumps(body).encode())
    again = acquire(store, "second run", 900)
    paths = make_run(tmp_path / "set", "run1")
    sent = [upload_chunk(store, "run1", paths.chunk(0), make_chunk(paths, 0, [1]))]
    before = publish_snapshot(store, paths, sent, lease=again)
    with pytest.raises(StorageError, match="must not publish"):
        publish_snapshot(store, make_run(tmp_path / "set", "run0"), sent, lease=lease)
    assert read_manifest(store)[0] == before


def test_what_passes_through_prefect_is_small(tmp_path):
    assert case("84_prefect_large_results")["rows"] == 200_000
    paths = make_run(tmp_path / "set", "run1")
    record = make_chunk(paths, 0, list(range(2000)))
    sent = upload_chunk(open_store(tmp_path / "store"), "run1", paths.chunk(0), record)
    assert len(repr(sent)) + len(repr(record)) < 64 * 1024
    assert all(isinstance(entry, FileEntry) for entry in sent.files)


def test_a_killed_holder_does_not_block_the_next(tmp_path):
    assert case("86_prefect_orphan_slots")["limit"] == 1
    store = open_store(tmp_path / "store")
    body = {"holder": "killed", "seconds": 60.0, "expires_s": 1.0, "host": "another"}
    store.put_bytes("lease.json", json.dumps(body).encode())
    assert acquire(store, "next", 60, wait=False).holder == "next"
