"""A target that is named after something installed here, as a directory."""

from tasks.settings import TargetSettings


def local_target(target: TargetSettings) -> TargetSettings:
    """The embedded model's own directory; any other target as it is. Raises TargetError."""
    if not target.model.startswith("embedded:"):
        return target
    from tasks.provisioning.embedded import materialize_target

    return target.model_copy(update={"model": str(materialize_target())})
