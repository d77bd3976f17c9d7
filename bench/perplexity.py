"""Perplexity of the native numerics beside float32 and llama.cpp: `python bench/perplexity.py`. Under five minutes.

The text is the beginning of Newton's Opticks (bench/texts), 20,480 tokens in windows of 512; all positions of a window
but the first are scored. The same token ids go to all, through `prompt_logprobs` of the public API and through
`llama_decode` with all logits. A ratio of perplexities comes with a bootstrap 95 % interval over windows.

Results go to bench/results/perplexity.json.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conditions import RESULTS, conditions, finish
from peer_engines.comparison import say
from peer_engines.requantize import made
from peer_engines.subjects import PEERS

from slipstream import LLM, SamplingParams
from slipstream.core.config import cache_dir
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import allowed_cpus
from slipstream.loading import catalog

TEXT = Path(__file__).parent / "texts" / "opticks.txt"
RESULT = RESULTS / "perplexity.json"
WINDOW = 512

Windows = Sequence[Sequence[int]]


def of_slipstream(path: Path, windows: Windows, **settings: Any) -> list[list[float]]:
    """Log-probabilities of the scored tokens of each window."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    found = []
    with LLM(str(path), prefix_caching=False, **settings) as llm:
        for window in windows:
            logprobs = llm.generate(list(window), params)[0].prompt_logprobs
            assert logprobs is not None
            scored = zip(window[1:], logprobs[1:], strict=True)
            found.append([entry[token].logprob for token, entry in scored if entry is not None])
            assert len(found[-1]) == len(window) - 1
    return found


def of_llama_cpp(kind: str, model: Path, windows: Windows, threads: int) -> list[list[float]]:
    """The same from llama.cpp on the file of a format."""
    subject = next(peer for peer in PEERS if peer.name == f"llama.cpp {kind}")
    worker = subject.start(model, threads)
    try:
        worker.wait_loaded()
        return [worker.call("score", window=list(window))["logprobs"] for window in windows]
    finally:
        worker.close()


def perplexity(logprobs: Sequence[Sequence[float]]) -> float:
    values = [value for window in logprobs for value in window]
    return math.exp(-math.fsum(values) / len(values))


def over(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], draws: int = 2000) -> dict[str, float]:
    """Perplexity of the first over that of the second; the interval is from drawing windows, which are equally long."""
    gaps = [(math.fsum(theirs) - math.fsum(ours)) / len(ours) for ours, theirs in zip(first, second, strict=True)]
    chooser = random.Random(0)
    means = sorted(math.fsum(chooser.choices(gaps, k=len(gaps))) / len(gaps) for _ in range(draws))
    return {
        "ratio": math.exp(math.fsum(gaps) / len(gaps)),
        "low": math.exp(means[int(draws * 0.025)]),
        "high": math.exp(means[int(draws * 0.975)]),
    }


def measure(kind: str, model: Path, windows: Windows, threads: int) -> dict[str, Any]:
    """Of one format: perplexities by engine, and what the native one's are over the others."""
    path = made(model, cache_dir() / "peers" / "models", kind)
    say(f"{kind}: native")
    native = of_slipstream(path, windows, numerics="native", threads=threads)
    say(f"{kind}: llama.cpp")
    others = {"llama.cpp": of_llama_cpp(kind, model, windows, threads)}
    found: dict[str, Any] = {"perplexity": {"native": perplexity(native)}}
    if path == model:
        say(f"{kind}: native with an 8-bit cache")
        others["native, 8-bit cache"] = of_slipstream(
            path, windows, numerics="native", kv_cache_dtype="int8", threads=threads
        )
        say(f"{kind}: float32")
        others["float32"] = of_slipstream(path, windows, numerics="reference", dtype="float32", threads=threads)
    found["perplexity"] |= {name: perplexity(logprobs) for name, logprobs in others.items()}
    found["native_over"] = {name: over(native, logprobs) for name, logprobs in others.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--threads", type=int, default=allowed_cpus())
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    load = ForeignLoad()
    model = catalog.resolve(None, fetch_missing=True)
    with LLM(str(model)) as llm:
        ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    count = min(options.tokens, len(ids)) // WINDOW
    if count < 2:
        parser.error(f"--tokens must be {2 * WINDOW} or more")
    windows = [ids[number * WINDOW : (number + 1) * WINDOW] for number in range(count)]
    files = {kind: measure(kind, model, windows, options.threads) for kind in ("Q4_1", "Q4_0", "Q8_0")}
    result = {
        "what": "perplexity of English text; native_over: of the native numerics over another's, on the same file",
        **conditions(load, options.threads),
        "text": TEXT.name,
        "window": WINDOW,
        "windows": count,
        "scored_tokens": count * (WINDOW - 1),
        "files": files,
    }
    for kind, found in files.items():
        for name, value in found["perplexity"].items():
            ratio = found["native_over"].get(name)
            told = (
                ""
                if ratio is None
                else f", native over it {ratio['ratio']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})"
            )
            print(f"{kind} {name}: {value:.3f}{told}")
    return finish(result, options.json)


if __name__ == "__main__":
    sys.exit(main())
