"""What a turn of a subject measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Lengths in tokens, and the number of pairs for each peer.

    A turn decodes `output_len` tokens after a prompt of `short_len` and after one of `input_len`; the latter's first
    token gives the prefill. llama.cpp prefills `long_len` too in `long_pairs` of its pairs, and transformers, which
    takes longest, has `slow_pairs` pairs.
    """

    short_len: int = 16
    input_len: int = 512
    output_len: int = 128
    long_len: int = 4096
    long_pairs: int = 5
    slow_pairs: int = 5
    pairs: int = 13

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(prompt, output) of the pieces that decode."""
        return [(self.short_len, self.output_len), (self.input_len, self.output_len)]

    @property
    def decodes(self) -> list[str]:
        """Names of the measures of decoding, in the order of `shapes`."""
        return [f"decode{first}" for first, _ in self.shapes]

    @property
    def prefills(self) -> list[str]:
        """Names of the measures of prefill."""
        return [f"prefill{length}" for length in (self.input_len, self.long_len)]

    @property
    def tokens(self) -> dict[str, int]:
        """Name of each measure -> tokens that its seconds are for: those after the first, or the prompt's."""
        lengths = (self.output_len - 1, self.output_len - 1, self.input_len, self.long_len)
        return dict(zip([*self.decodes, *self.prefills], lengths, strict=True))


def spread_over(number: int, some: int, rounds: int) -> bool:
    """Whether round `number` is one of `some`, the first included, that are spread evenly over all `rounds`."""
    return -(-(number + 1) * some // rounds) > -(-number * some // rounds) if some < rounds else True
