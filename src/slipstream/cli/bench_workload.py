"""The prompts of `bench throughput` and `bench serve`: random ones of given lengths, or the lines of a file."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.prompts import read_prompt_file
from slipstream.core.errors import ConfigError

INPUT_LEN = 128

NumPrompts = Annotated[int, typer.Option("--num-prompts", help="Requests; a file of fewer prompts is repeated.")]
InputLen = Annotated[int | None, typer.Option("--input-len", help=f"Tokens of each prompt (default: {INPUT_LEN}).")]
OutputLen = Annotated[int, typer.Option("--output-len", help="Tokens to generate for each, at most.")]
RangeRatio = Annotated[
    float, typer.Option("--range-ratio", metavar="R", help="Draw both lengths from 1-R to 1+R times those given.")
]
Dataset = Annotated[
    Path | None,
    typer.Option("--dataset", metavar="FILE", help="JSONL with `prompt` or `turns`, of which the first is asked."),
]


@dataclass(frozen=True)
class Workload:
    """How many requests of which lengths, in tokens. `texts` are a file's prompts; without them prompts are random."""

    num_prompts: int
    input_len: int | None
    output_len: int
    range_ratio: float = 0.0
    texts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("num_prompts", self.num_prompts), ("output_len", self.output_len)):
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more", param=name)
        if self.input_len is not None and self.input_len < 1:
            raise ConfigError("--input-len must be 1 or more", param="input_len")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError("--range-ratio must be 0 or more and less than 1", param="range_ratio")

    def lengths(self, chooser: random.Random) -> list[tuple[int, int]]:
        """Input and output tokens of each request."""
        wanted = self.input_len or INPUT_LEN
        return [
            (_around(wanted, self.range_ratio, chooser), _around(self.output_len, self.range_ratio, chooser))
            for _ in range(self.num_prompts)
        ]

    def repeated_texts(self) -> list[str]:
        """A file's prompts, one for each request."""
        assert self.texts is not None
        return [self.texts[i % len(self.texts)] for i in range(self.num_prompts)]

    def conditions(self) -> dict[str, object]:
        """What one has to know to repeat it, besides the seed and the file's name."""
        fixed: dict[str, object] = {"num_prompts": self.num_prompts, "output_len": self.output_len}
        if self.texts is not None:
            return {**fixed, "dataset_prompts": len(self.texts)}
        return {**fixed, "input_len": self.input_len or INPUT_LEN, "range_ratio": self.range_ratio}

    def describe(self) -> str:
        """In a few words."""
        if self.texts is not None:
            return f"{self.num_prompts} prompts of a file, {self.output_len} out each"
        about = "about " if self.range_ratio else ""
        return f"{self.num_prompts} x ({about}{self.input_len or INPUT_LEN} in, {about}{self.output_len} out)"


def make_workload(
    num_prompts: int, input_len: int | None, output_len: int, range_ratio: float, dataset: Path | None
) -> Workload:
    """The workload that the options name. Raises ConfigError."""
    if dataset is None:
        return Workload(num_prompts, input_len, output_len, range_ratio)
    if input_len is not None or range_ratio:
        raise ConfigError("--dataset excludes --input-len and --range-ratio: its prompts have lengths", param="dataset")
    try:
        asks = read_prompt_file(dataset)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--prompt-file", "--dataset"), param="dataset") from None
    return Workload(num_prompts, None, output_len, texts=tuple(ask.turns[0] for ask in asks))


def random_words(count: int, chooser: random.Random) -> str:
    """Text of `count` words, each of which is one token for most tokenizers."""
    return " ".join(chooser.choices(_WORDS, k=count))


def _around(wanted: int, ratio: float, chooser: random.Random) -> int:
    return chooser.randint(max(1, math.floor(wanted * (1 - ratio))), math.ceil(wanted * (1 + ratio)))


_COMMON = """
about after again air all also always and another any are around away back because been before began being below
between big both boy but call came can change city close come could country day did different does done door down
each early earth end enough even every example eye face family far father feet few find first five food for form
found four from game gave get girl give good great ground group grow had hand hard has have head hear help her here
high him his home horse house how idea into its just keep kind know land large last late learn leave left letter
life light like line list little live long look made make man many mean men mile mother mountain move much music
must name near need never new next night now number off often old once one only open or other our out over own page
paper part people place plant play point put read real right river room run said same saw say school sea second see
seem sentence set she should show side sing small some song soon sound spell start state stay still stop story study
such sun take talk tell than that the their them then there these they thing think this those thought three through
time together too took top tree try turn two under until use very walk want war was watch water way well went were
what when where which while white who why will with without wood word work world would write year you young your
"""
_WORDS = _COMMON.split()
