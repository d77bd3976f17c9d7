"""Token ids to text as they come, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.text.tokenizer import Tokenizer

# A run of tokens that never completes a character is given out after this many, so that the window stays short.
_LONGEST_WINDOW = 32


class Detokenizer:
    """Turns a stream of token ids into text, the same text for every way of cutting the stream.

    Bytes of an unfinished character are held back; bytes that can no longer become one are given out as U+FFFD, one
    for each maximal ill-formed part, as `bytes.decode("utf-8", errors="replace")` does. Ids outside the vocabulary
    decode to nothing. The work per token does not depend on how many came before.

    Args:
        tokenizer: whose vocabulary the ids are from.
        skip_special_tokens: leave control tokens out of the text.
        prefix_ids: tokens the text continues. They yield no text themselves, but a SentencePiece model's leading
            space is then kept instead of stripped, and a character begun in them is completed.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prefix_ids: Sequence[int] = ()
    ) -> None:
        self._skipped: frozenset[int] = tokenizer.control_ids if skip_special_tokens else frozenset()
        self._stream = _ByteStream(tokenizer) if tokenizer.bytes_table.independent else _WindowStream(tokenizer)
        if prefix_ids:
            self.push(prefix_ids)

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they complete."""
        skipped = self._skipped
        return self._stream.push([token for token in ids if token not in skipped])

    def finish(self) -> str:
        """Returns what was held back: an unfinished character becomes U+FFFD."""
        return self._stream.finish()


class _ByteStream:
    """Vocabularies whose tokens are byte strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = tokenizer.bytes_table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = self._table.strip_left

    def push(self, ids: list[int]) -> str:
        table = self._table
        return self._stripped(self._decoder.decode(b"".join([table(token) for token in ids])))

    def finish(self) -> str:
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class _WindowStream:
    """All other vocabularies: the library decodes a short window, from the last tokens known to be complete.

    The text of the newest tokens is what a decode of the window has more than a decode of its older part.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.backend_decode
        self._window: list[int] = []
        self._done = 0

    def push(self, ids: list[int]) -> str:
        # One at a time: the same windows, and so the same text, however the ids are cut.
        return "".join([self._push_one(token) for token in ids])

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        new = self._new_text()
        waiting = not new or new.endswith("\N{REPLACEMENT CHARACTER}")
        if waiting and len(self._window) - self._done < _LONGEST_WINDOW:
            return ""
        self._window = self._window[self._done :]
        self._done = len(self._window)
        return new

    def finish(self) -> str:
        new = self._new_text() if len(self._window) > self._done else ""
        self._done = len(self._window)
        return new

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._done])
        return self._decode(self._window)[len(before) :]
