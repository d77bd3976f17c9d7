"""Does the engine give the tokens that transformers gives? Greedy outputs of a model, checked teacher-forced.

The engine answers 30 prompts greedily (`--numerics reference`, float32). transformers, in float32 from the same file,
then sees each prompt and answer, and its best token at every position must be the engine's. Where the engine's token is
another one but less than 1e-3 below the best logit, float32 rounding decides: a tie, set aside and counted.

    python bench/parity.py --output bench/results/parity_smollm2.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf  # noqa: F401  (what transformers dequantises with; absent, its error would be obscure)
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import slipstream
from slipstream import LLM, SamplingParams
from slipstream.devices.host import cpu_name
from slipstream.loading import catalog

PROMPTS = Path(__file__).parent / "prompts" / "spec_bench_30.jsonl"
TIE = 1e-3
"""Logits closer than this are a tie."""


@dataclass
class Answer:
    """A prompt through the chat template, what the engine answered, and the log-probability of each token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Counts:
    """What the comparison found. `positions` = equal + ties + mismatches."""

    prompts: int = 0
    prompt_tokens: int = 0
    positions: int = 0
    equal: int = 0
    ties: int = 0
    mismatches: int = 0
    largest_logprob_difference: float = 0.0
    smallest_gap_of_best_two: float = float("inf")


def read_prompts(path: Path = PROMPTS) -> list[str]:
    """The first turn of each line."""
    return [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()]


def engine_answers(model: Path, prompts: list[str], count: int, threads: int | None) -> list[Answer]:
    """Greedy answers of exactly `count` tokens, all in one batch."""
    settings = {"max_model_len": 2048, "max_step_ms": 2000.0, "threads": threads}
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
    with LLM(str(model), numerics="reference", dtype="float32", **settings) as llm:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], greedy)
    answers = []
    for output in outputs:
        choice = output.outputs[0]
        chosen = [entry[token].logprob for entry, token in zip(choice.logprobs or [], choice.token_ids, strict=True)]
        answers.append(Answer(output.prompt_token_ids, choice.token_ids, chosen))
    return answers


def transformers_model(path: Path) -> nn.Module:
    """The same file in transformers' own reading, float32.

    `from_pretrained(gguf_file=...)` wants the accelerate package only to place tensors; this is the same conversion.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise RuntimeError(f"transformers did not read the whole file: missing {missing}, unexpected {unexpected}")
    if missing and not config.tie_word_embeddings:
        raise RuntimeError("the file has no output matrix, and the config does not tie it to the embeddings")
    return model


@torch.no_grad()
def compare(answers: list[Answer], model: nn.Module) -> Counts:
    """Count where transformers' best token is the engine's."""
    counts = Counts(prompts=len(answers))
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.tokens[:-1]])
        logits = model(input_ids=ids, logits_to_keep=len(answer.tokens)).logits[0]
        ours = torch.tensor(answer.tokens)[:, None]
        best = logits.topk(2, dim=-1).values
        lost = best[:, 0] - logits.gather(-1, ours)[:, 0]
        equal = logits.argmax(-1) == ours[:, 0]
        theirs = logits.log_softmax(-1).gather(-1, ours)[:, 0]
        difference = (theirs - torch.tensor(answer.logprobs)).abs().max()
        counts.prompt_tokens += len(answer.prompt)
        counts.positions += len(answer.tokens)
        counts.equal += int(equal.sum())
        counts.ties += int((~equal & (lost < TIE)).sum())
        counts.mismatches += int((~equal & (lost >= TIE)).sum())
        counts.largest_logprob_difference = max(counts.largest_logprob_difference, float(difference))
        gap = float((best[:, 0] - best[:, 1]).min())
        counts.smallest_gap_of_best_two = min(counts.smallest_gap_of_best_two, gap)
    return counts


def measure(model: Path, *, tokens: int = 64, prompts: Path = PROMPTS, threads: int | None = None) -> Counts:
    """Run the engine, then transformers, on one model file. `threads` None: all cores; the tokens are the same."""
    return compare(engine_answers(model, read_prompts(prompts), tokens, threads), transformers_model(model))


def report(counts: Counts, model: Path, tokens: int, seconds: float) -> dict[str, Any]:
    """The counts with what is needed to repeat them."""
    return {
        "what": "greedy tokens of the engine (reference numerics, float32) against transformers' best token, "
        f"teacher-forced; a token less than {TIE} below the best logit is a tie",
        "command": shlex.join(["python", *sys.argv]),
        "model": model.name,
        "tokens_per_prompt": tokens,
        "counts": asdict(counts),
        "seconds": round(seconds, 1),
        "versions": {
            "slipstream": slipstream.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file; without it the default model")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens per prompt")
    parser.add_argument("--threads", type=int, help="without it all cores; one is quicker where others use the cores")
    parser.add_argument("--output", type=Path, help="where to write the summary")
    options = parser.parse_args()
    model = options.model or catalog.resolve(None, fetch_missing=True)
    begin = time.perf_counter()
    counts = measure(model, tokens=options.tokens, prompts=options.prompts, threads=options.threads)
    summary = json.dumps(report(counts, model, options.tokens, time.perf_counter() - begin), indent=2)
    print(summary)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(summary + "\n", encoding="utf-8")
    return 1 if counts.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
