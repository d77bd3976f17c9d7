"""Breaking up control tokens spelled out in user text, so that no tokenizer can take them for real ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class LookAlikes:
    """Finds where a text must be broken up so that it neither holds nor completes a control token.

    Three cases: a whole control token in the text; the beginning of one at the end of the text, which whatever
    follows might complete; the end of one at the beginning. A break lies inside the look-alike, never beside white
    space, so a template that trims the text still trims the same.
    """

    def __init__(self, control_tokens: Iterable[str]) -> None:
        tokens = [token for token in control_tokens if token]
        firsts = {token[0] for token in tokens}
        self._by_first = {first: tuple(token for token in tokens if token[0] == first) for first in firsts}
        self._heads = {token[:n] for token in tokens if _is_sign(token[0]) for n in range(1, len(token))}
        self._tails = {token[-n:] for token in tokens if _is_sign(token[-1]) for n in range(1, len(token))}
        self._longest = max((len(token) for token in tokens), default=0)

    def breaks(self, text: str, *, borders: bool = True) -> list[int]:
        """Positions in the text, ascending, before which a marker belongs. `borders`: also the ends of the text."""
        found = set()
        for first, tokens in self._by_first.items():
            at = text.find(first)
            while at >= 0:
                if text.startswith(tokens, at):
                    found.add(at + 1)
                at = text.find(first, at + 1)
        if borders:
            for length in range(1, min(self._longest, len(text) + 1)):
                if text[-length:] in self._heads:
                    found.add(len(text) - length + 1)
                if text[:length] in self._tails:
                    found.add(length - 1)
        return sorted(found)

    def mark(self, value: Any, marker: str) -> Any:
        """A copy of plain data (dicts, lists, strings) in which every string is broken up with the marker.

        Keys are broken up only at whole control tokens: templates look them up.
        """
        if isinstance(value, str):
            return self._marked(value, marker)
        if isinstance(value, dict):
            return {self._marked(k, marker, borders=False): self.mark(v, marker) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item, marker) for item in value]
        return value

    def _marked(self, text: Any, marker: str, *, borders: bool = True) -> Any:
        if not isinstance(text, str):
            return text
        places = self.breaks(text, borders=borders)
        if not places:
            return text
        return marker.join(text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True))


def strings_in(value: Any) -> Iterable[str]:
    """All strings in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def _is_sign(char: str) -> bool:
    """Control tokens are fenced by signs. A letter or a space at a border is too common to be broken at."""
    return not char.isalnum() and not char.isspace()
