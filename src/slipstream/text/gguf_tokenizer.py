"""Rebuilding a `tokenizers.Tokenizer` from the metadata of a GGUF file.

The result equals transformers' own reading of the same file (`AutoTokenizer.from_pretrained(..., gguf_file=...)`)
with two intended exceptions: control tokens keep their spelling even if it is outside the byte alphabet (transformers
leaves out e.g. DeepSeek's), and user text can never be merged into a control or byte token. With
`as_transformers=False` it follows the model's own tokenizer.json as far as that is known; transformers does not apply
all of it (see `pre_tokenizers.PreTokenizer`): for "smollm" it does not cut off digits, so that a run of white space
before a digit is split differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import LoadError
from slipstream.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    import tokenizers

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
_PREFIX = "tokenizer.ggml."
_SPACE = "▁"
_GEMMA = ("gemma", "gemma2", "gemma3")
_MODELS = ("gpt2", "llama")


@cache
def byte_alphabet() -> dict[str, int]:
    """The character that stands for each of the 256 byte values in a byte-level vocabulary (from GPT-2)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(value): value for value in shown}
    hidden = (value for value in range(256) if value not in set(shown))
    alphabet.update((chr(256 + index), value) for index, value in enumerate(hidden))
    return alphabet


def build_tokenizer(metadata: Mapping[str, Any], *, as_transformers: bool = True) -> tokenizers.Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's key-value pairs as plain Python values.
        as_transformers: split text as transformers does when it reads a GGUF file, see above.

    Returns:
        A tokenizer without post-processor: it adds no BOS or EOS. Ids equal positions in `tokenizer.ggml.tokens`.

    Raises:
        LoadError: a key is missing or damaged, or the kind of tokenizer or of pre-tokenizer is not known.
    """
    tokens = _tokens(metadata)
    model = metadata.get(_PREFIX + "model")
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, as_transformers)
    elif model == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise LoadError(f"The GGUF file has a tokenizer of kind {model!r}; known kinds are {', '.join(_MODELS)}.")
    _add_marked_tokens(backend, metadata, tokens)
    return backend


def adds_bos(metadata: Mapping[str, Any], *, as_transformers: bool = True) -> bool:
    """Whether a text starts with BOS; where the file does not say, SentencePiece models do."""
    flag = metadata.get(_PREFIX + "add_bos_token")
    if flag is not None:
        return bool(flag)
    if metadata.get(_PREFIX + "model") == "llama":
        return True
    return not as_transformers and _rule(metadata).adds_bos


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(_PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise LoadError("The GGUF file has no vocabulary (tokenizer.ggml.tokens).")
    for key in ("token_type", "scores"):
        values = metadata.get(_PREFIX + key)
        if values is not None and len(values) != len(tokens):
            raise LoadError(
                f"The GGUF file's vocabulary has {len(tokens)} tokens but tokenizer.ggml.{key} has {len(values)}."
            )
    return tokens


def _rule(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get(_PREFIX + "pre")
    known = f"known ones are {', '.join(sorted(PRE_TOKENIZERS))}"
    if name is None:
        raise LoadError(
            f"The GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so its text would be split wrongly; "
            f"convert the model again with a present converter ({known})."
        )
    if name not in PRE_TOKENIZERS:
        raise LoadError(f"The GGUF file names the pre-tokenizer {name!r}; {known}.")
    return PRE_TOKENIZERS[name]


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = metadata.get(_PREFIX + "merges")
    if not isinstance(lines, list):
        raise LoadError("The GGUF file has no merges (tokenizer.ggml.merges).")
    merges = [tuple(line.split(" ")) for line in lines]
    if any(len(pair) != 2 for pair in merges):
        raise LoadError("The GGUF file has a damaged merge (tokenizer.ggml.merges): each must be two tokens.")
    return merges


def _new_backend(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models

    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises bare Exception, e.g. for a merge that is not in the vocabulary
        raise LoadError(f"The GGUF file's vocabulary and merges do not fit together: {error}.") from error


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], as_transformers: bool) -> tokenizers.Tokenizer:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    rule = _rule(metadata)
    vocab = {token: index for index, token in enumerate(tokens)}
    whole_words = rule.whole_words and not as_transformers
    backend = _new_backend(vocab, _merges(metadata), ignore_merges=whole_words)
    # transformers has no entry for "smollm" and splits it as GPT-2; the other names it lacks it would split wrongly
    # in worse ways, so those are always split as their models do.
    digits = rule.digits and not (as_transformers and metadata[_PREFIX + "pre"] == "smollm")
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.splits))
    backend.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if rule.nfc and not as_transformers:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: spaces are written as "▁", and what is not in the vocabulary becomes byte tokens."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    architecture = metadata.get("general.architecture")
    add_space = bool(metadata.get(_PREFIX + "add_space_prefix", architecture not in _GEMMA))
    if architecture in _GEMMA:
        # Gemma files spell runs of spaces with real spaces, while text reaches the merges with "▁".
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    if isinstance(metadata.get(_PREFIX + "merges"), list):
        merges = _merges(metadata)
    else:
        merges = _merges_from_scores(metadata, tokens, vocab, by_position=architecture in _GEMMA)
    backend = _new_backend(vocab, merges, fuse_unk=True, byte_fallback=True)
    if architecture == "phi3" and add_space:
        # Phi-3 adds the space also in front of text that begins with one.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if add_space else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    decoder: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        decoder.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _merges_from_scores(
    metadata: Mapping[str, Any], tokens: list[str], vocab: dict[str, int], *, by_position: bool
) -> list[tuple[str, str]]:
    """The merges a scored vocabulary implies: every way to make a token of two others, best score first.

    Equal scores are ordered by the longer left part, as transformers does. Control, unknown and byte tokens are left
    out (SentencePiece never makes them from text). `by_position` orders by place in the vocabulary instead.
    """
    scores = metadata.get(_PREFIX + "scores")
    if not by_position and scores is None:
        raise LoadError("The GGUF file has neither merges nor scores for its vocabulary (tokenizer.ggml.scores).")
    types = metadata.get(_PREFIX + "token_type") or [1] * len(tokens)
    closed = {token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, BYTE)}
    found: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if token in closed:
            continue
        score = -index if by_position else scores[index]  # type: ignore[index]
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab and left not in closed and right not in closed:
                found.append((score, at, len(token) - at, left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_marked_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Makes control tokens special, and user-defined ones (like <think>) always matched as a whole."""
    from tokenizers import AddedToken

    types = metadata.get(_PREFIX + "token_type") or ()
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED) or not token or backend.token_to_id(token) is None:
            # Gemma's respelled runs of spaces are reached by merges; adding them would make new ids.
            continue
        if kind != USER_DEFINED:
            special.append(AddedToken(token, normalized=False, special=True))
        else:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
