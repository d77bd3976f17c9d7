"""One sentence for files whose values have a kind or size that nothing expects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.core.errors import LoadError, SlipstreamError

_UNEXPECTED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what the block trips over into a LoadError that names `what`."""
    try:
        yield
    except SlipstreamError:
        raise
    except _UNEXPECTED as error:
        raise LoadError(f"{what}: a value has a wrong kind or size ({type(error).__name__}: {error})") from error
