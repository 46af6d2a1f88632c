"""Verdicts of admission on disk: one JSON file, written atomically, rebuilt rather than trusted when anything is off.

Every entry carries the full key it was proven under and a digest over key and verdict; an entry whose key, digest or
type does not fit is as good as absent. Knows no kernels. A file that cannot be written costs time at the next start,
and a warning, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isobit.kernels.bitcompare import Difference

__all__ = [
    "ADMITTED", "NOT_OFFERED", "REFUSED", "Verdict", "VerdictCache", "default_cache_path", "digest", "read_entries",
    "replace_file",
]  # fmt: skip

ADMITTED, REFUSED, NOT_OFFERED = "admitted", "refused", "not offered"
FORMAT = 1
MAX_ENTRIES = 4000  # the oldest go first


@dataclass(frozen=True)
class Verdict:
    """What the proof said. `detail`: the run that differed, or why the kernel is not offered; empty when admitted."""

    status: str
    detail: str = ""
    difference: Difference | None = None

    def __str__(self) -> str:
        parts = [self.status, self.detail, str(self.difference) if self.difference else ""]
        return ": ".join(part for part in parts if part)


def default_cache_path() -> Path:
    """`admission.json` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "isobit" / "admission.json"


class VerdictCache:
    """Verdicts of earlier starts, by key: a flat JSON object of everything the proof depended on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_entries(path, "verdicts", FORMAT)
        self._new: dict[str, dict[str, Any]] = {}

    def get(self, key: Mapping[str, Any]) -> Verdict | None:
        """The verdict proven under exactly `key`, or None."""
        entry = self._entries.get(digest(key))
        if not isinstance(entry, dict) or entry.get("key") != json.loads(json.dumps(key)):
            return None
        if entry.get("digest") != digest([entry["key"], entry.get("verdict")]):
            return None
        return _parse(entry.get("verdict"))

    def put(self, key: Mapping[str, Any], verdict: Verdict) -> None:
        """Remember a verdict; `save` writes it."""
        body = json.loads(json.dumps([key, asdict(verdict)]))
        self._new[digest(key)] = {"key": body[0], "verdict": body[1], "digest": digest(body)}

    def save(self) -> None:
        """Merge what is new into the file, in one atomic step. Warns when it cannot be written."""
        if not self._new:
            return
        kept_before = read_entries(self.path, "verdicts", FORMAT)
        entries = {name: entry for name, entry in kept_before.items() if name not in self._new}
        entries.update(self._new)
        kept = dict(list(entries.items())[-MAX_ENTRIES:])
        text = json.dumps({"format": FORMAT, "verdicts": kept}, indent=0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, text)
        except OSError as error:
            warnings.warn(
                f"admission verdicts cannot be kept in {self.path} ({error}); they are proven again at every start",
                stacklevel=2,
            )


def replace_file(path: Path, text: str) -> None:
    """Write a file in one atomic step. Raises OSError, and leaves the old one, when it cannot be written."""
    descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_entries(path: Path, name: str, version: int) -> dict[str, Any]:
    """The object `name` of a JSON file of this format version; empty for any other file, or none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict) or data.get("format") != version or not isinstance(data.get(name), dict):
        return {}
    entries: dict[str, Any] = data[name]
    return entries


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _parse(value: Any) -> Verdict | None:
    """A Verdict from its JSON form, or None when that is not one."""
    try:
        difference = value["difference"]
        if difference is not None:
            coordinate = tuple(int(i) for i in difference["coordinate"])
            difference = Difference(**{**difference, "coordinate": coordinate})
        verdict = Verdict(value["status"], value["detail"], difference)
    except (KeyError, TypeError, ValueError):
        return None
    return verdict if verdict.status in (ADMITTED, REFUSED) else None
