"""Reading and writing the stand-in's records as JSON. What they hold is said beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load_json_file(kind: Any, path: Any) -> Any:
    """One record from a file."""
    return kind.from_plain(json.loads(Path(path).read_text(encoding="utf-8")))


def load_jsonl_file(kind: Any, path: Any) -> list[Any]:
    """Records from lines."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [kind.from_plain(json.loads(line)) for line in lines if line.strip()]


def save_json_file(record: Any, path: Any) -> None:
    """One record to a file; its folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record.to_plain(), indent=2), encoding="utf-8")
