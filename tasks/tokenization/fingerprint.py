"""What a tokenized file depends on. A file is reused only when all of it is the same."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.target.family import as_dict
from tasks.target.text import TargetText
from tasks.tokenization.schema import MASK_CONVENTION
from tasks.tokenization.settings import TokenizationSettings

FORMAT = 1
"""Raised when the meaning of a column or a mask changes."""


def fingerprint(target: TargetText, settings: TokenizationSettings, preserve_thinking: bool) -> dict[str, Any]:
    """Template text, tokenizer files, family, thinking flag, lengths, mask method and the libraries that matter."""
    return {
        "format": FORMAT,
        "template_sha256": target.template_sha256,
        "tokenizer_sha256": target.tokenizer_sha256,
        "family": json.loads(json.dumps(as_dict(target.family))),  # as it reads back from a file
        "special_tokens": target.special,
        "preserve_thinking": preserve_thinking,
        "mask_convention": MASK_CONVENTION,
        "settings": settings.model_dump(mode="json", exclude={"workers"}),
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
        "jinja2": version("jinja2"),
    }


def digest(value: dict[str, Any]) -> str:
    """sha256 of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes: a path that was regenerated is another input."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
