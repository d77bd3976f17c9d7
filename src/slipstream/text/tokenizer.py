"""Text to token ids and back, with user text kept apart from control tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import InvalidRequestError, LoadError
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.gguf_tokenizer import adds_bos, build_tokenizer
from slipstream.text.look_alikes import LookAlikes
from slipstream.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    import tokenizers

# Control tokens that end a turn of a chat. Files often name only the token that ends a document.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>")


class Tokenizer:
    """A tokenizer that never turns text into control tokens unless told to.

    Control tokens are the special ones (`<|im_start|>`). Added tokens that are not special (Qwen's `<think>`) are
    matched in all text, as the model expects. Safe to use from several threads: no call changes shared state.

    Args:
        backend: the library's tokenizer.
        vocab_size: the number of ids; None: one more than the highest.
        bos_id: the token a text begins with, None if there is none.
        eos_ids: tokens after which the model has nothing more to say, the main one first.
        add_bos: whether `encode` puts BOS in front of a text.
        chat_template: the Jinja source that came with the model, None if none did.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int | None = None,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self.control_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self.control_ids: frozenset[int] = frozenset(self.control_tokens.values())
        self.vocab_size = vocab_size if vocab_size is not None else _count_ids(backend)
        self.bos_id = bos_id
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self.add_bos = add_bos and bos_id is not None
        self.chat_template = chat_template
        self.bytes_table = TokenBytes(backend)
        # Two tokenizers instead of one switched back and forth: other threads may be encoding.
        self._with_control = backend
        self._plain = _twin(backend)
        self._plain.encode_special_tokens = True
        unknown = getattr(backend.model, "unk_token", None)
        self._never_from_text = self.control_ids - {self.control_tokens.get(unknown or "", -1)}

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any], *, as_transformers: bool = True) -> Tokenizer:
        """From a GGUF file's key-value pairs; see `gguf_tokenizer.build_tokenizer` for `as_transformers` and errors."""
        backend = build_tokenizer(metadata, as_transformers=as_transformers)
        size = len(metadata["tokenizer.ggml.tokens"])
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        eos = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        for token_id in (bos, *eos):
            if token_id is not None and not 0 <= token_id < size:
                raise LoadError(f"The GGUF file names the special token {token_id}, but its vocabulary has {size}.")
        return cls(
            backend,
            vocab_size=size,
            bos_id=bos,
            eos_ids=[i for i in eos if i is not None] + _ends_of_turn(backend),
            add_bos=adds_bos(metadata, as_transformers=as_transformers),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a folder in Hugging Face's layout.

        tokenizer.json is required; BOS, EOS and the chat template come from tokenizer_config.json,
        special_tokens_map.json, generation_config.json, config.json and chat_template.jinja, where they exist.

        Raises:
            LoadError: tokenizer.json is missing, or a file is damaged.
        """
        from slipstream.text.folder import read_folder

        return cls(**read_folder(Path(path), _END_OF_TURN))

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_control: bool = False,
        continues: bool = False,
        param: str = "prompt",
    ) -> list[int]:
        """Turns text into ids.

        Args:
            text: any text that can be written as UTF-8.
            add_special_tokens: put BOS in front if the model wants it and the text does not begin with it.
            parse_control: turn control tokens spelled out in the text into their ids. Only for text that the server
                or a template wrote; user text is never to be encoded so.
            continues: the text stands after other text; a SentencePiece model then puts no space in front.
            param: the request's field to name in an error.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, or a control token that is one character.
        """
        _refuse_surrogates(text, param)
        if parse_control:
            backend = self._with_control
        else:
            backend = self._plain_continued if continues else self._plain
        ids = _ids(backend, text)
        if not parse_control and not self._never_from_text.isdisjoint(ids):
            ids = self._encode_apart(text, backend, param)
        if add_special_tokens and self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)  # type: ignore[arg-type]
        return ids

    def _encode_apart(self, text: str, backend: tokenizers.Tokenizer, param: str) -> list[int]:
        """Encodes text whose merges lead to a control token, by cutting every look-alike after its first character."""
        starts = sorted(i + 1 for token in self.control_tokens for i in _occurrences(text, token))
        ids: list[int] = []
        for begin, end in zip([0, *starts], [*starts, len(text)], strict=True):
            ids += _ids(backend, text[begin:end])
            backend = self._plain_continued
        if not self._never_from_text.isdisjoint(ids):
            raise InvalidRequestError("The text has a character that is a control token of the model.", param=param)
        return ids

    def control_spans(self, text: str, *, param: str = "prompt") -> list[tuple[int, int, int]]:
        """The control tokens spelled out in a text: (start, end, id), in order, with white space that they take up."""
        _refuse_surrogates(text, param)
        (encoding,) = self._with_control.encode_batch([text], add_special_tokens=False)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [(start, end, token) for token, (start, end) in spans if token in self._never_from_text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids: exactly what a `Detokenizer` gives for them piece by piece."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def backend_decode(self, ids: Sequence[int]) -> str:
        """The library's own decoding, control tokens included."""
        return str(self._with_control.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; control tokens give their spelling, ids outside the vocabulary b""."""
        return self.bytes_table(token_id)

    def name_of(self, token_id: int) -> str:
        """A token as the vocabulary spells it, for people to read."""
        name = self._with_control.id_to_token(token_id) if token_id >= 0 else None
        return str(name) if name is not None else f"<no token {token_id}>"

    def text_of(self, token_id: int | None) -> str:
        """A token's spelling for a chat template; empty for None."""
        return "" if token_id is None else self.name_of(token_id)

    @cached_property
    def look_alikes(self) -> LookAlikes:
        """Finds the control tokens' spellings in user text."""
        return LookAlikes(self.control_tokens)

    @cached_property
    def _plain_continued(self) -> tokenizers.Tokenizer:
        """For text that is not the beginning: "▁" is put in front of the beginning only, where a model does that."""
        step = self._plain.pre_tokenizer
        state = step.__getstate__() if step is not None else b""
        if b'"prepend_scheme":"first"' not in state:
            return self._plain
        twin = _twin(self._plain)
        changed = twin.pre_tokenizer
        changed.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
        twin.pre_tokenizer = changed
        twin.encode_special_tokens = True
        return twin


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of a text. As a batch, since the library lets other threads run only then; a long text takes 30 ms."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _refuse_surrogates(text: str, param: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text has an unpaired surrogate at position {error.start}, so it is not valid Unicode.", param=param
        ) from None


def _count_ids(backend: tokenizers.Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _ends_of_turn(backend: tokenizers.Tokenizer) -> list[int]:
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return [special[text] for text in _END_OF_TURN if text in special]


def _occurrences(text: str, token: str) -> list[int]:
    found, at = [], text.find(token)
    while at >= 0:
        found.append(at)
        at = text.find(token, at + 1)
    return found


def _twin(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second tokenizer that shares the model (vocabulary and merges) but none of the settings."""
    from tokenizers import Tokenizer as Backend

    twin = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        step = getattr(backend, part)
        if step is not None:
            # Steps are handed on as live references; a copy keeps a later change of one from reaching the other.
            setattr(twin, part, copy.deepcopy(step))
    added = backend.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (twin.add_special_tokens if token.special else twin.add_tokens)([token])
    if twin.get_added_tokens_decoder().keys() != added.keys():
        # Ids with gaps cannot be given again by adding; the long way keeps them.
        return Backend.from_str(backend.to_str())
    return twin
