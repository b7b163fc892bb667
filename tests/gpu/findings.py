"""What a script here found: facts and checked statements in one JSON file, saved after every step."""

import json
from pathlib import Path
from typing import Any

WORDS = "river stone light paper engine garden window number silver morning question answer forest circle"
"""Words of made-up prompts."""

SHOWN_CHARACTERS = 300


class Findings:
    """`result` is what the file holds; `failed` in it names the statements that were not so."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self.path = path
        self.result: dict[str, Any] = {**facts, "failed": [], "checks": {}}

    def save(self, **facts: Any) -> None:
        """Merge and write."""
        self.result.update(facts)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.result, indent=1, default=str) + "\n")

    def check(self, name: str, good: bool, found: Any) -> None:
        """Record one statement."""
        print(f"    {'ok  ' if good else 'FAIL'} {name}: {str(found)[:SHOWN_CHARACTERS]}", flush=True)
        self.result["checks"][name] = {"ok": bool(good), "found": found}
        if not good:
            self.result["failed"].append(name)
        self.save()
