"""Log-probabilities in the shapes of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from slipstream.core.outputs import Logprob, TokenLogprobs
from slipstream.text.tokenizer import Tokenizer


class TokenNames:
    """How tokens are written in an answer.

    A token that is not whole characters is written `bytes:\\xf0\\x9f`, as OpenAI does, so that two of them differ.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    @property
    def strip_left(self) -> int:
        """Spaces that are taken away from the beginning of a text."""
        return 0 if self._tokenizer is None else self._tokenizer.bytes_table.strip_left

    def bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def hidden(self, token: int) -> bool:
        """Whether the token is left out of text when control tokens are."""
        return self._tokenizer is not None and token in self._tokenizer.control_ids


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames, top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice: each token with its bytes and the `top` most likely ones."""
    content = []
    for entry in entries:
        token, chosen = next(iter(entry.items()))
        content.append(
            {
                **_chat_token(token, chosen, names),
                "top_logprobs": [_chat_token(other, found, names) for other, found in most_likely(entry, top)],
            }
        )
    return {"content": content, "refusal": None}


def reported(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    """The chosen token of an entry, which comes first, and the `top` most likely ones.

    An entry has more than a field may show where another field asked for more.
    """
    chosen = next(iter(entry))
    return {token: found for token, found in entry.items() if token == chosen or (found.rank or 0) <= top}


def most_likely(entry: TokenLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """The `top` most likely tokens of an entry, most likely first."""
    ranked = [(token, found) for token, found in entry.items() if (found.rank or 0) <= top]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def _chat_token(token: int, found: Logprob, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": found.logprob, "bytes": list(names.bytes(token))}


class CompletionLogprobs:
    """`logprobs` of a completions choice, which needs each token's place in the text.

    `top` alternatives are shown per token.
    """

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names = names
        self._top = top
        self._places = _Places(names.strip_left)

    def add(
        self, tokens: Iterable[int], entries: Iterable[TokenLogprobs | None], *, skip_special_tokens: bool = False
    ) -> dict[str, Any]:
        """The lists for tokens that follow those added before. The first token of a prompt has no entry."""
        shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, entry in zip(tokens, entries, strict=True):
            name = self._names.name
            hidden = skip_special_tokens and self._names.hidden(token)
            shown["text_offset"].append(self._places.add(b"" if hidden else self._names.bytes(token)))
            shown["tokens"].append(name(token))
            shown["token_logprobs"].append(None if entry is None else entry[token].logprob)
            tops = None
            if entry is not None:
                tops = {name(other): found.logprob for other, found in reported(entry, self._top).items()}
            shown["top_logprobs"].append(tops)
        return shown

    def end_of_prompt(self) -> None:
        """The output's text begins anew: bytes that the prompt leaves open are not completed by it."""
        self._places.end_of_text()


class _Places:
    """Where tokens begin in the text that their bytes make up.

    `strip_left` is the number of spaces that a detokenizer takes away from a text's beginning.
    """

    def __init__(self, strip_left: int) -> None:
        self._strip_left = self._strip = strip_left
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, token: bytes) -> int:
        """The place of the character that the token's first byte is part of, in characters from the beginning."""
        open_bytes = self._decoder.getstate()[0]
        place = self._length
        self._take(self._decoder.decode(token[:1]))
        if open_bytes and token and not self._goes_on(open_bytes, token[0]):
            place += 1  # the open bytes have become a U+FFFD of their own
        self._take(self._decoder.decode(token[1:]))
        return place

    def end_of_text(self) -> None:
        self._take(self._decoder.decode(b"", final=True))
        self._strip = self._strip_left

    @staticmethod
    def _goes_on(open_bytes: bytes, byte: int) -> bool:
        """Whether the byte belongs to the character that the open bytes begin."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(open_bytes + bytes([byte]))
        return len(text) + bool(decoder.getstate()[0]) == 1

    def _take(self, text: str) -> None:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        self._length += len(text)


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], top: int) -> list[dict[str, Any] | None]:
    """vLLM's shape: per token a mapping from ids to log-probability, rank and text; the first is null.

    Each has the prompt's token and the `top` most likely ones.
    """
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": found.logprob, "rank": found.rank, "decoded_token": found.decoded_token}
            for token, found in reported(entry, top).items()
        }
        for entry in entries
    ]
