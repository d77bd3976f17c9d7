"""Finding stop strings in streamed text without sending any part of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream.core.errors import InvalidRequestError


class StopStrings:
    """Watches a stream of text for the first of several stop strings.

    The match that completes first wins, as if the text were read one character at a time; of several that
    complete at the same character the longest wins. So the result does not depend on how the text is cut.
    Text is held back only as long as it may still be the beginning of a stop string.

    The scan is an Aho-Corasick automaton: every character is looked at once, whatever the number of stops.

    Args:
        stops: the stop strings, none of them empty. No stops at all is fine: everything passes through.
        include: whether the stop string itself is part of the text that is sent.

    Raises:
        InvalidRequestError: a stop string is empty or not a string (`param` is "stop").
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise InvalidRequestError("A stop string must be a text of at least one character.", param="stop")
        self.matched: str | None = None
        self._include = include
        self._held = ""
        self._state = 0
        self._build(stops)

    def _build(self, stops: Sequence[str]) -> None:
        """Nodes are numbered from 0, the root. `_depth` is the length of the prefix a node stands for."""
        children: list[dict[str, int]] = [{}]
        depth = [0]
        match: list[str | None] = [None]
        for stop in stops:
            node = 0
            for char in stop:
                following = children[node].get(char)
                if following is None:
                    following = children[node][char] = len(children)
                    children.append({})
                    depth.append(depth[node] + 1)
                    match.append(None)
                node = following
            match[node] = stop
        fail = [0] * len(children)
        queue = deque(children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in children[node].items():
                back = fail[node]
                while back and char not in children[back]:
                    back = fail[back]
                fail[child] = children[back].get(char, 0)
                # A node's own stop is longer than any that ends inside it, so it is only filled in where missing.
                if match[child] is None:
                    match[child] = match[fail[child]]
                queue.append(child)
        self._children, self._depth, self._match, self._fail = children, depth, match, fail

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
            (text that may be sent now, the stop string that was matched or None). After a match nothing more is
            sent: later pushes return ("", the matched stop).
        """
        if self.matched is not None:
            return "", self.matched
        children, fail, state = self._children, self._fail, self._state
        for index, char in enumerate(text):
            while state and char not in children[state]:
                state = fail[state]
            state = children[state].get(char, 0)
            stop = self._match[state]
            if stop is not None:
                self.matched = stop
                whole = self._held + text[: index + 1]
                self._held, self._state = "", 0
                return (whole if self._include else whole[: len(whole) - len(stop)]), stop
        self._state = state
        whole = self._held + text
        keep = len(whole) - self._depth[state]
        self._held = whole[keep:]
        return whole[:keep], None

    def finish(self) -> str:
        """Returns the text still held back; the stream has ended, so it was no stop string."""
        rest, self._held, self._state = self._held, "", 0
        return rest
