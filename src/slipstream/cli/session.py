"""A loaded model for one run of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import Report, progress_bars
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


def make_llm(settings: Mapping[str, Any], progress: Report) -> LLM:
    """Load the model. Importing torch is part of the wait, so it happens while the bar is up."""
    from slipstream.engine.llm import LLM

    return LLM(progress=progress, **settings)


@contextmanager
def open_llm(settings: Mapping[str, Any]) -> Iterator[LLM]:
    """The model that `settings` name, with progress on the terminal while it loads."""
    with progress_bars() as progress:
        progress("starting", 0, 0)
        llm = make_llm(settings, progress)
    try:
        yield llm
    finally:
        llm.shutdown()


def sampling_params(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """What was given over what the model publishes."""
    return replace(llm.get_default_sampling_params(), **given)
