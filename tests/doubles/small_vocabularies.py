"""Texts and small vocabularies for the tests of tokenizers."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck
from hypothesis import strategies as st

from slipstream.text.gguf_tokenizer import byte_alphabet

ALPHABET = {value: char for char, value in byte_alphabet().items()}
ASSIGNED = st.characters(exclude_categories=("Cs", "Cn"))
# fmt: off
PIECES = st.sampled_from([
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<|", "<file_sep>", " ", "  ", "   ", "\n",
    "\n\n", "\t", "\r\n", "\xa0", "\u3000", "\u200b", "1", "23", "4567", "3.14", "½", "²", "٣", "a", "Hello",
    " world", "It's", "don't", "I'LL", "中文", "日本語", "한국어", "العربية", "हिन्दी", "ไทย", "Ελλάδα", "Привет", "é",
    "e\u0301", "Ａ", "😀", "👨‍👩‍👧", "🇩🇪", "❤️", "=>", "def f(x):\n    return x", "http://a.b/c?d=1", ".", "...", "(",
    "__", "\x00", "\x7f",
])
# fmt: on
TEXTS = st.one_of(
    st.lists(PIECES, max_size=12).map("".join),
    st.text(alphabet=ASSIGNED, max_size=30),
    st.lists(st.one_of(PIECES, st.text(alphabet=ASSIGNED, max_size=5)), max_size=8).map("".join),
)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
SPM_TEXTS = st.text(alphabet="helo wabc1<s/>é中\n😀", max_size=14)


def byte_metadata(pre: str | None = "qwen2", *words: str, marked: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    """A byte-level vocabulary: 256 bytes, one merge after the other for each word, and marked tokens."""
    tokens = [ALPHABET[value] for value in range(256)]
    merges: list[str] = []
    for word in words:
        spelled = [ALPHABET[value] for value in word.encode()]
        for at in range(1, len(spelled)):
            left, right = "".join(spelled[:at]), spelled[at]
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    types = [1] * len(tokens) + [kind for _, kind in marked]
    tokens += [token for token, _ in marked]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata |= {"tokenizer.ggml.merges": merges, "general.architecture": "qwen2"}
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata


def spm_metadata(architecture: str = "llama", **extra: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with bytes, letters, words and scores that decide between ways to merge."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["▁", "▁▁", "he", "ll", "hell", "▁hell", "▁he", "lo", "o", "h", "e", "l", "▁hello", "wo", "▁wo", "w", "s>"]
    words += ["<", "s", ">", "/", "<s", "</", "é", "中", "1", "▁1", "abc", "ab", "bc", "a", "b", "c"]
    tokens += words
    types += [1] * len(words)
    scores = [0.0] * 259 + [-float((7 * i) % 11) for i in range(len(words))]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata |= {"tokenizer.ggml.scores": scores, "general.architecture": architecture}
    metadata |= {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
