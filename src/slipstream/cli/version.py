"""`slipstream version`."""

from __future__ import annotations

import platform
from importlib import metadata

from slipstream import __version__


def torch_version() -> str:
    """The installed torch's version, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"


def print_version() -> None:
    print(f"slipstream {__version__} (Python {platform.python_version()}, torch {torch_version()})")


def version() -> None:
    """Show the versions of Slipstream, Python and torch."""
    print_version()
