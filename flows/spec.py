"""`RegenSpec`: the one description of a run. Deployment parameters, UI form, job file and manifest are all this."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from tasks.calibration.settings import BudgetSettings, CalibrationSettings
from tasks.errors import SpecError
from tasks.generation.settings import GenerationSettings
from tasks.power.settings import PowerSettings
from tasks.provisioning.settings import ServingSettings
from tasks.settings import SamplingSettings, Settings, TargetSettings
from tasks.tokenization.settings import TokenizationSettings
from tasks.upload.settings import PublishSettings
from tasks.validation.settings import SourceSettings


class RegenSpec(Settings):
    """Everything about one run. Prefect merges overrides shallowly: a trigger replaces a whole top-level group."""

    source: SourceSettings = Field(title="Source", description="What is read.")
    target: TargetSettings = Field(title="Target", description="Whose words are wanted.")
    sampling: SamplingSettings = Field(
        default_factory=SamplingSettings, title="Sampling", description="How it samples."
    )
    serving: ServingSettings = Field(default_factory=ServingSettings, title="Serving", description="Where it runs.")
    power: PowerSettings = Field(default_factory=PowerSettings, title="Power", description="The power gate.")
    calibration: CalibrationSettings = Field(
        default_factory=CalibrationSettings, title="Calibration", description="How hard servers are driven."
    )
    budget: BudgetSettings = Field(default_factory=BudgetSettings, title="Budget", description="Time and cost allowed.")
    generation: GenerationSettings = Field(
        default_factory=GenerationSettings, title="Generation", description="The engine."
    )
    tokenization: TokenizationSettings = Field(
        default_factory=TokenizationSettings, title="Tokenization", description="What a training row is."
    )
    publish: PublishSettings = Field(title="Publish", description="Where the data set goes.")

    @model_validator(mode="after")
    def _fits_together(self) -> "RegenSpec":
        if self.serving.mode == "attach" and not self.serving.urls:
            raise ValueError("serving.mode is attach but serving.urls is empty: name at least one server")
        if self.serving.mode == "embedded" and not self.target.model.startswith("embedded:"):
            raise ValueError(f"serving.mode embedded needs an `embedded:` target, found {self.target.model!r}")
        if self.serving.mtp.topk == 1 and self.serving.mtp.draft_tokens != self.serving.mtp.steps + 1:
            raise ValueError("serving.mtp: with topk 1, draft_tokens must be steps + 1")
        return self

    def identity(self, **resolved: Any) -> dict[str, Any]:
        """The fields that change the data, flat; `resolved` adds what was read at run time (template digest…).

        Endpoints, concurrency, paths, GPUs and budgets are left out on purpose: moving a run to other hardware must
        not change which data set it is.
        """
        groups: dict[str, Any] = {
            "target": self.target.model_dump(
                mode="json",
                include={"model", "revision", "quantization", "state_dtype", "chat_template", "family", "families"},
            ),
            "sampling": self.sampling.model_dump(mode="json"),
            "generation": self.generation.model_dump(
                mode="json", include={"on_length", "retry_larger_factor", "turn_policy", "drop_repetition"}
            ),
            "tokenization": self.tokenization.model_dump(mode="json", exclude={"workers"}),
            "serving": {"context_tokens": self.serving.context_tokens},
        }
        flat = {f"{group}.{name}": value for group, fields in groups.items() for name, value in fields.items()}
        return {**flat, **resolved}

    def identity_digest(self, **resolved: Any) -> str:
        """sha256 of the canonical JSON of `identity()`."""
        text = json.dumps(self.identity(**resolved), sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def groups(self) -> dict[str, Any]:
        """Top-level groups as plain JSON: the parameters of a deployment or a flow run."""
        return self.model_dump(mode="json")


def load_job(path: Path) -> RegenSpec:
    """Read a job file (YAML or JSON). Raises SpecError naming the file, the field and what was expected."""
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        return RegenSpec.model_validate(value)
    except OSError as error:
        raise SpecError(f"cannot read job file {path}: {error.strerror}") from error
    except (ValidationError, yaml.YAMLError) as error:
        raise SpecError(f"job file {path}: {describe(error)}") from error


def describe(error: Exception) -> str:
    """A ValidationError as `field: what is wrong (got …)`, one line a problem."""
    if not isinstance(error, ValidationError):
        return str(error)
    lines = [f"{'.'.join(map(str, e['loc'])) or 'spec'}: {e['msg']} (got {e['input']!r:.80})" for e in error.errors()]
    return "; ".join(lines)
