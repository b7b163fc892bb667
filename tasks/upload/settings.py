"""Where the data set is published."""

from typing import Literal

from pydantic import Field

from tasks.settings import Settings


class PublishSettings(Settings):
    """The data set's name, its working folder and its public home."""

    dataset: str = Field(title="Data set", pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Name: [a-z0-9._-].")
    work_dir: str = Field("out", title="Working folder", description="Local root for runs, journals and logs.")
    store: str | None = Field(
        None, title="Store", description="s3://bucket/prefix or a folder; empty: the working folder itself."
    )
    endpoint_url: str | None = Field(None, title="S3 endpoint", description="For stores that are not AWS.")
    region: str | None = Field(None, title="Region", description="Empty: the usual AWS chain.")
    credentials_block: str | None = Field(
        None, title="Credentials", description="Name of an aws-credentials block; empty: the usual AWS chain."
    )
    checksums: Literal["auto", "when_supported", "when_required"] = Field(
        "auto", title="Checksums", description="auto: what AWS wants for AWS, when_required elsewhere."
    )
    part_mb: int | None = Field(None, ge=5, title="Part size", description="MiB; empty: from the file's size.")
    lease_s: int = Field(900, ge=30, title="Lease", description="A crashed run loses the data set after this.")
