"""Disguising control tokens spelled out in user text, so that no tokenizer can take them for real ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from slipstream.core.errors import InvalidRequestError

_PRIVATE_USE = range(0xE000, 0xF900)


class LookAlikes:
    """Replaces the signs that fence control tokens by stand-ins.

    Control tokens are fenced by signs, as "<" and ">" fence "<|im_end|>". User text without these signs can neither
    hold a control token nor become one, whatever a template does to it: lower case, cutting, replacing, joining, or
    setting it beside text of its own. A stand-in is one character, so lengths stay as well.

    Only a template that writes both fences itself, as in "<|" + name + "|>", makes a control token of user text.
    """

    def __init__(self, control_tokens: Iterable[str]) -> None:
        self._tokens = tuple(token for token in control_tokens if token)
        self._signs = {char for token in self._tokens for char in (token[0], token[-1]) if _is_sign(char)}
        # The few tokens that begin and end with letters or white space are found as a whole.
        bare = [token for token in self._tokens if self._signs.isdisjoint((token[0], token[-1]))]
        self._found = [*bare, *self._signs]
        self._heads = {token[:n] for token in self._tokens for n in range(1, len(token))}
        self._tails = {token[-n:] for token in self._tokens for n in range(1, len(token))}
        self._any_found = _any_of(self._found)
        self._rules: dict[frozenset[str], tuple[frozenset[str], re.Pattern[str]]] = {}

    def possible_in(self, texts: Iterable[str]) -> bool:
        """Whether a text holds anything that a control token could be made of."""
        return any(self._any_found.search(text) for text in texts)

    def stand_ins(self, texts: Collection[str]) -> dict[str, str]:
        """For each character to replace, one that none of the texts uses.

        Raises:
            InvalidRequestError: the texts leave too few of Unicode's private-use characters.
        """
        originals = sorted({text[0] for text in self._found})
        together = "\0".join(texts)
        lowered = together.lower()
        free = (chr(c) for c in _PRIVATE_USE if chr(c) not in together and f"\\u{c:04x}" not in lowered)
        chosen = dict(zip(originals, free, strict=False))
        if len(chosen) < len(originals):
            raise InvalidRequestError("The messages use too many private-use characters of Unicode.", param="messages")
        return chosen

    def disguise(self, value: Any, stand_ins: dict[str, str], constants: frozenset[str]) -> Any:
        """A copy of plain data (dicts with their keys, lists, strings) with stand-ins for signs.

        Args:
            value: the data.
            stand_ins: from `stand_ins`.
            constants: the strings that the template itself names, such as "</think>". It may look for them, so their
                signs stay, unless these could be part of a control token.
        """
        kept, pattern = self._rule(constants)

        def replaced(match: re.Match[str]) -> str:
            text = match.group()
            return text if text in kept else stand_ins[text[0]] + text[1:]

        return _mapped(value, lambda text: pattern.sub(replaced, text))

    def _rule(self, constants: frozenset[str]) -> tuple[frozenset[str], re.Pattern[str]]:
        if constants not in self._rules:
            kept = frozenset(text for text in constants if self._harmless(text))
            self._rules[constants] = kept, _any_of([*kept, *self._found])
        return self._rules[constants]

    def _harmless(self, constant: str) -> bool:
        """Whether the signs in a constant can be no part of a control token, inside it or across its ends."""
        if self._signs.isdisjoint(constant) or any(token in constant or constant in token for token in self._tokens):
            return False
        ends = range(1, len(constant) + 1)
        return not any(constant[-n:] in self._heads or constant[:n] in self._tails for n in ends)


def undisguised(text: str, stand_ins: dict[str, str]) -> str:
    """The text with its signs again, also where a template has escaped what is not ASCII."""
    originals = {stand_in: sign for sign, stand_in in stand_ins.items()}
    originals |= {_escaped(stand_in): _escaped(sign) for sign, stand_in in stand_ins.items()}
    return _any_of(originals).sub(lambda match: originals[match.group()], text)


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


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the texts, the longest first; nothing if there are none."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1]


def _is_sign(char: str) -> bool:
    """A letter or white space at the end of a control token is too common in text to be replaced."""
    return not char.isalnum() and not char.isspace()
