"""What one sequence's sampling depends on besides logits: its parameters, its seed and the tokens so far.

A row that verifies a draft is written with the state it would have had if the drafted tokens before it had been
generated one by one, so every rule holds at every drafted position.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from slipstream.core.sampling_params import SamplingParams
from slipstream.ops.sample import LARGEST, Real, Whole
from slipstream.sampling.batch import GREEDY_REALS, NO_WHOLES, IntArray, MaskArray, SamplingBatch
from slipstream.sampling.noise import choice_key, row_key

SMALLEST = float(np.finfo(np.float32).tiny)


def bad_word_ids(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Token sequences to ban for `words`, as vLLM finds them. `encode` must add no special tokens.

    Each word is taken at the beginning of a text and, behind a space, in the middle. The second counts only if it is
    as long and begins with another token: otherwise the space is a token of its own and the first one covers it.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = list(encode(word.lstrip()))
        spaced = list(encode(" " + word.lstrip()))
        if bare:
            sequences.append(bare)
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return sequences


class _Counts:
    """Distinct tokens as [N, 3] of (token, times in output, in prompt)."""

    def __init__(self, prompt_ids: Iterable[int], vocab_size: int) -> None:
        distinct = sorted({token for token in prompt_ids if 0 <= token < vocab_size})
        self.place = {token: place for place, token in enumerate(distinct)}
        self._array = np.zeros((len(distinct) + 64, 3), np.int64)
        self._array[: len(distinct), 0] = distinct
        self._array[: len(distinct), 2] = 1

    @property
    def entries(self) -> IntArray:
        return self._array[: len(self.place)]

    def add(self, token: int) -> None:
        place = self.place.setdefault(token, len(self.place))
        if place == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[place, 0] = token
        self._array[place, 1] += 1


class _BadWords:
    """The last tokens that are banned now, by the tokens before them.

    A trie of the words without their last tokens, read backwards: looking up takes as many steps as there are latest
    tokens that end the beginning of some word, however many words there are.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._ends: list[list[int]] = [[]]
        self.reach = 0
        """Latest tokens to look at, at most."""
        for word in words:
            node = 0
            for token in reversed(word[:-1]):
                following = self._children[node].get(token)
                if following is None:
                    following = self._children[node][token] = len(self._children)
                    self._children.append({})
                    self._ends.append([])
                node = following
            self._ends[node].append(word[-1])
            self.reach = max(self.reach, len(word) - 1)

    def banned_after(self, tokens: Iterable[int]) -> list[int]:
        """Last tokens of the words whose other tokens `tokens` begins with; it gives the latest token first."""
        banned = list(self._ends[0])
        node = 0
        for token in tokens:
            following = self._children[node].get(token)
            if following is None:
                break
            node = following
            banned += self._ends[node]
        return banned


class SequenceSampler:
    """Writes the sampling rows of one sequence (one choice of a request).

    `prompt_ids` is the prompt; `eos_ids` are the model's end tokens; `bad_word_ids` come from the function of that
    name; `seed` is the caller's or the one drawn for the request. `sibling` is another choice of the same request,
    whose tables are used in place of new ones. Token ids of `params` must be valid for the model
    (`SamplingParams.validate_for_model`).
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        bad_word_ids: Iterable[Sequence[int]] = (),
        choice_index: int = 0,
        seed: int,
        sibling: SequenceSampler | None = None,
    ) -> None:
        self.params = params
        self._vocab_size = vocab_size
        self.prompt_length = len(prompt_ids)
        self.output_length = 0
        self._choice = choice_key(seed, choice_index)
        self._num_top = params.logprobs or 0
        self._reals = _real_columns(params)
        self._wholes = np.array(NO_WHOLES, np.int64)
        self._wholes[Whole.TOP_K] = params.top_k
        self._wholes[Whole.WANTS_LOGPROBS] = params.logprobs is not None

        neutral = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
        counted = () if params.repetition_penalty == 1.0 else prompt_ids
        self._counts = None if neutral else _Counts(counted, vocab_size)
        if sibling is None:
            self._make_tables(eos_ids, bad_word_ids)
        else:
            self._share_tables(sibling)
        self._tail: deque[int] = deque(maxlen=0 if self._bad_words is None else self._bad_words.reach)
        self._has_lists = bool(
            self._counts or len(self._ends) or self._bad_words or self._allowed is not None or len(self._bias_at)
        )

    def _make_tables(self, eos_ids: Iterable[int], bad_word_ids: Iterable[Sequence[int]]) -> None:
        """What is looked up for every token and never changed."""
        params = self.params
        self.stop_token_ids = frozenset(params.stop_token_ids)
        ends = self.stop_token_ids.union(() if params.ignore_eos else eos_ids) if params.min_tokens else frozenset()
        self._ends = np.array(sorted(token for token in ends if 0 <= token < self._vocab_size), np.int64)
        words = list(bad_word_ids)
        self._bad_words = _BadWords(words) if words else None
        self._allowed = (
            None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids, np.int64))
        )
        bias = params.logit_bias or {}
        self._bias_at = np.array(list(bias), np.int64)
        self._bias_value = np.array(list(bias.values()), np.float32)

    def _share_tables(self, sibling: SequenceSampler) -> None:
        self.stop_token_ids = sibling.stop_token_ids
        self._ends = sibling._ends
        self._bad_words = sibling._bad_words
        self._allowed = sibling._allowed
        self._bias_at, self._bias_value = sibling._bias_at, sibling._bias_value

    def write_row(
        self, batch: SamplingBatch, drafted: Sequence[int], position: int, grammar_mask: MaskArray | None = None
    ) -> int:
        """Add the row that samples the token at absolute index `position` after the output so far plus `drafted`.

        `grammar_mask` is as `SamplingBatch.set_grammar` takes it. Returns the row's index in the batch.
        """
        length = self.output_length + len(drafted)
        assert position == self.prompt_length + length, "a row's position must follow its drafted tokens"
        key = (0, 0) if self.params.greedy else row_key(self._choice, position)
        row = batch.add_row(self._reals, self._wholes, key=key, num_top=self._num_top)
        if grammar_mask is not None:
            batch.set_grammar(row, grammar_mask)
        if not self._has_lists:
            return row
        if self._allowed is not None:
            batch.allow_only(row, self._allowed)
        if len(self._ends) and length < self.params.min_tokens:
            batch.ban(row, self._ends)
        if self._bad_words is not None:
            batch.ban(row, self._ends_of_bad_words(self._bad_words, drafted))
        if len(self._bias_at):
            batch.add_bias(row, self._bias_at, self._bias_value)
        if self._counts is not None:
            self._write_counts(batch, row, self._counts, drafted)
        return row

    def write_score_row(self, batch: SamplingBatch, token: int) -> int:
        """Add a row that reports log-probability and rank of `token`, with `prompt_logprobs` alternatives."""
        row = batch.add_row(num_top=self.params.prompt_logprobs or 0)
        batch.score(row, token)
        return row

    def commit(self, tokens: Sequence[int]) -> None:
        """Count `tokens` as generated."""
        self.output_length += len(tokens)
        if self._counts is not None:
            for token in tokens:
                self._counts.add(token)
        if self._bad_words is not None:
            self._tail.extend(tokens)

    def exhausted_by(self) -> tuple[str, ...]:
        """The parameters that together leave no token for the next place; () if they leave one."""
        everything = range(self._vocab_size)
        left = set(everything if self._allowed is None else self._allowed.tolist())
        names = [] if self._allowed is None else ["allowed_token_ids"]
        if len(self._ends) and self.output_length < self.params.min_tokens:
            left -= set(self._ends.tolist())
            names.append("min_tokens")
        if self._bad_words is not None:
            left -= set(self._ends_of_bad_words(self._bad_words, ()))
            names.append("bad_words")
        return () if left else tuple(names)

    def _ends_of_bad_words(self, words: _BadWords, drafted: Sequence[int]) -> list[int]:
        """Last tokens of the words whose other tokens are the latest ones of the output."""
        return words.banned_after(itertools.chain(reversed(drafted), reversed(self._tail)))

    @staticmethod
    def _write_counts(batch: SamplingBatch, row: int, counts: _Counts, drafted: Sequence[int]) -> None:
        entries = batch.add_penalised(row, counts.entries)
        new: dict[int, int] = {}
        for token in drafted:
            place = counts.place.get(token)
            if place is None:
                new[token] = new.get(token, 0) + 1
            else:
                entries[place, 1] += 1
        if new:
            batch.add_penalised(row, np.array([(token, count, 0) for token, count in new.items()], np.int64))


def _real_columns(params: SamplingParams) -> np.ndarray:
    """`params` as a row of `Real` columns, held to what float32 can represent."""
    reals = np.array(GREEDY_REALS, np.float32)
    reals[Real.TEMPERATURE] = min(params.temperature, LARGEST)
    reals[Real.TOP_P] = params.top_p
    reals[Real.MIN_P] = params.min_p
    reals[Real.TYPICAL_P] = params.typical_p
    reals[Real.REPETITION] = min(max(params.repetition_penalty, SMALLEST), LARGEST)
    reals[Real.FREQUENCY] = params.frequency_penalty
    reals[Real.PRESENCE] = params.presence_penalty
    return reals
