"""Finding stop strings in streamed text without sending any part of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from slipstream.core.errors import InvalidRequestError

_CHARACTER_BITS = 21


class StopTable:
    """The Aho-Corasick automaton of several stop strings. It is not changed once made, so all who watch share it.

    Nodes are numbered from 0, the root. `edges` has a child under its parent's number and the character between them
    in one integer; `depth` is the length of the prefix that a node stands for.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise InvalidRequestError("A stop string must be a text of at least one character.", param="stop")
        self.edges: dict[int, int] = {}
        self.depth = [0]
        self.match: list[str | None] = [None]
        parents = [(0, 0)]  # of each node: its parent, and the character's code
        for stop in stops:
            node = 0
            for char in stop:
                edge = node << _CHARACTER_BITS | ord(char)
                following = self.edges.get(edge)
                if following is None:
                    following = self.edges[edge] = len(self.depth)
                    parents.append((node, ord(char)))
                    self.depth.append(self.depth[node] + 1)
                    self.match.append(None)
                node = following
            self.match[node] = stop
        self.fail = [0] * len(parents)
        for node in sorted(range(1, len(parents)), key=self.depth.__getitem__):
            parent, code = parents[node]
            if parent:
                self.fail[node] = self.step(self.fail[parent], code)
            # A node's own stop is longer than any that ends inside it, so it is only filled in where missing.
            if self.match[node] is None:
                self.match[node] = self.match[self.fail[node]]

    def step(self, state: int, code: int) -> int:
        """The state after a character's code."""
        edges, fail = self.edges, self.fail
        while (following := edges.get(state << _CHARACTER_BITS | code)) is None:
            if not state:
                return 0
            state = fail[state]
        return following


@lru_cache(maxsize=16)
def stop_table(stops: tuple[str, ...]) -> StopTable:
    """The table of `stops`, made once for all the choices and prompts of a request. Errors are StopStrings'."""
    return StopTable(stops)


class StopStrings:
    """Watches a stream of text for the first of several stop strings.

    The match that completes first wins, as if the text were read one character at a time; of several that
    complete at the same character the longest wins. So the result does not depend on how the text is cut.
    Text is held back only as long as it may still be the beginning of a stop string.

    Every character is looked at once, whatever the number of stops. The table for that is shared (`stop_table`).

    Args:
        stops: the stop strings, none of them empty. No stops at all is fine: everything passes through.
        include: whether the stop string itself is part of the text that is sent.

    Raises:
        InvalidRequestError: a stop string is empty or not a string (`param` is "stop").
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._table = stop_table(tuple(stops))
        self.matched: str | None = None
        self._include = include
        self._held = ""
        self._state = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
            (text that may be sent now, the stop string that was matched or None). After a match nothing more is
            sent: later pushes return ("", the matched stop).
        """
        if self.matched is not None:
            return "", self.matched
        table, state = self._table, self._state
        for index, char in enumerate(text):
            state = table.step(state, ord(char))
            stop = table.match[state]
            if stop is not None:
                self.matched = stop
                whole = self._held + text[: index + 1]
                self._held, self._state = "", 0
                return (whole if self._include else whole[: len(whole) - len(stop)]), stop
        self._state = state
        whole = self._held + text
        keep = len(whole) - table.depth[state]
        self._held = whole[keep:]
        return whole[:keep], None

    def finish(self) -> str:
        """Returns the text still held back; the stream has ended, so it was no stop string."""
        rest, self._held, self._state = self._held, "", 0
        return rest
