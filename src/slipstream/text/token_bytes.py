"""What each token id contributes to the decoded text, as bytes.

Two kinds of vocabulary decode token by token: byte-level ones (GPT-2's alphabet of 256 characters) and SentencePiece
ones ("▁" for a space, `<0xNN>` for a byte). For all others text depends on neighbouring tokens, and only the
`tokenizers` library knows how.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from slipstream.text.gguf_tokenizer import byte_alphabet

if TYPE_CHECKING:
    import tokenizers


class TokenBytes:
    """The bytes of every token, worked out when first asked for.

    Attributes:
        independent: whether decoded text is the concatenation of the tokens' bytes.
        strip_left: how many leading spaces of a whole text the decoder takes away (Llama's puts one in front).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        steps = _decoder_steps(backend.decoder)
        kinds = {step["type"] for step in steps}
        self.strip_left = 0
        self._byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        sentencepiece = "Replace" in kinds and all(_is_sentencepiece_step(step) for step in steps)
        self.independent = self._byte_level or sentencepiece
        self._byte_tokens = "ByteFallback" in kinds
        if sentencepiece:
            self.strip_left = sum(step["start"] for step in steps if step["type"] == "Strip")

    def __call__(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def _work_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            return self._from_byte_level(token_id, token)
        if not self.independent:
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()
        if self._byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode()

    def _from_byte_level(self, token_id: int, token: str) -> bytes:
        """Added tokens stand for their own spelling, all others for the bytes their characters name."""
        if token_id in self._added:
            return token.encode()
        alphabet = byte_alphabet()
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode()


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": "▁"} and step["content"] == " ")
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["stop"] == 0)
    return step["type"] in ("ByteFallback", "Fuse")
