"""Why a model cannot be run by the native step."""

from __future__ import annotations


class NotLowerable(Exception):
    """The reason, as the end of a sentence."""
