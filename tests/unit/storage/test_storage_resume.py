"""An interrupted upload goes on: journals that are torn, stale or about other content; parts that vanished."""

import os

import pytest

from s3_faults import proxy
from s3_servers import BUCKET
from tasks.errors import StorageError
from tasks.storage import Retry, open_store

MIB = 1 << 20
FAST = Retry(attempts=3, base_s=0.01, cap_s=0.05)


@pytest.fixture
def broken(moto_server, tmp_path):
    """A 27 MiB file of 6 parts of which part 5 could not be sent: (store, file, proxy, heal)."""
    state = {"broken": True}

    def decide(seen):
        return "answer:500:InternalError" if state["broken"] and seen.query.get("partNumber") == "5" else ""

    path = tmp_path / "f.bin"
    path.write_bytes(os.urandom(27 * MIB))
    with proxy(moto_server.endpoint_url, decide) as network:
        store = open_store(
            f"s3://{BUCKET}/{tmp_path.name}",
            endpoint_url=network.url,
            credentials=moto_server.credentials,
            part_mb=5,
            retry=FAST,
        )
        with pytest.raises(StorageError, match="same command again"):
            store.put_file("f", path)
        state["broken"] = False
        network.seen.clear()
        yield store, path, network, path.with_name(".f.bin.upload")


def parts_sent(network):
    return sorted(int(s.query["partNumber"]) for s in network.seen if "partNumber" in s.query)


def test_only_missing_parts_are_sent(broken):
    store, path, network, journal = broken
    store.verify(store.put_file("f", path))
    assert parts_sent(network) == [5]
    assert not journal.exists()


def test_a_torn_journal_line_costs_one_part(broken):
    store, path, network, journal = broken
    journal.write_bytes(journal.read_bytes()[:-7])
    store.verify(store.put_file("f", path))
    sent = parts_sent(network)
    assert len(sent) == 2 and 5 in sent


def test_a_lost_journal_starts_again_and_leaves_right_bytes(broken):
    store, path, network, journal = broken
    journal.unlink()
    store.verify(store.put_file("f", path))
    assert parts_sent(network) == [1, 2, 3, 4, 5, 6]
    assert store.abandon_uploads() == 1


def test_another_content_never_takes_over_parts(broken):
    store, path, network, _ = broken
    path.write_bytes(os.urandom(27 * MIB))
    store.verify(store.put_file("f", path))
    assert parts_sent(network) == [1, 2, 3, 4, 5, 6]


def test_an_upload_that_vanished_is_begun_again(broken):
    store, path, network, _ = broken
    assert store.abandon_uploads() == 1
    store.verify(store.put_file("f", path))
    assert parts_sent(network) == [1, 2, 3, 4, 5, 6]


def test_a_file_that_shrinks_while_it_is_sent_is_an_error(broken, monkeypatch):
    from tasks.storage import s3

    store, path, _, _ = broken
    whole = s3.digest_file(path)
    path.write_bytes(path.read_bytes()[: 20 * MIB])
    monkeypatch.setattr(s3, "digest_file", lambda _: whole)
    with pytest.raises(StorageError, match="ended at byte"):
        store.put_file("f", path)
