"""How text is split before byte-level merges, by the name a GGUF file gives in `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json files; the names, and which name has which pattern, are those
of llama.cpp (src/llama-vocab.cpp). A name is listed only if its pattern is known for certain: a wrong split gives
wrong tokens without any sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass

# "'s" and its like, in any case.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# What most patterns end with: punctuation with its newlines, newlines, other white space.
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Words split where lower case is followed by upper case: upper part, then lower part, either may be missing.
_WORD_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_WORD_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _WORD_LOWER + "|" + _WORD_UPPER + r"|\p{N}" + _TAIL_SLASH
_GPT4O = f"{_WORD_LOWER}{_CONTRACTIONS}?|{_WORD_UPPER}{_CONTRACTIONS}?" + r"|\p{N}{1,3}" + _TAIL_SLASH
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """The rule of one name.

    `splits` are patterns applied one after the other (none: GPT-2's own pattern). The other fields are what the
    models' own tokenizers do besides, and what transformers leaves out when it reads a GGUF file: `digits` cuts every
    digit off by itself first, `whole_words` takes a word that is a token as a whole without merging, `nfc` composes
    characters first, `adds_bos` starts every text with BOS where the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False


_GPT2_RULE = PreTokenizer()
_DIGITS_RULE = PreTokenizer(digits=True)
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2_RULE = PreTokenizer((_QWEN2,), nfc=True)
_DEEPSEEK3_RULE = PreTokenizer(_DEEPSEEK3)
_GPT4O_RULE = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt2": _GPT2_RULE,
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "command-r": PreTokenizer(digits=True, nfc=True),
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "lfm2": _LLAMA3_RULE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "megrez": PreTokenizer((_QWEN2,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "deepseek-v3": _DEEPSEEK3_RULE,
    "hunyuan-dense": _DEEPSEEK3_RULE,
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
    "minimax-m2": _GPT4O_RULE,
}
