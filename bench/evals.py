"""lm-evaluation-harness, unchanged, against `slipstream serve`: are its log-likelihoods those of transformers?

The harness scores the documents in bench/eval_tasks through /v1/completions, in several ways to send them. transformers
then computes each continuation's log-likelihood in float32 from the same GGUF file. A continuation is greedy if each of
its tokens is the best one; where the best two logits are less than 1e-3 apart, rounding decides, and that is not
compared.

    python bench/evals.py install                # the harness, in an environment of its own
    python bench/evals.py run --output bench/results/evals.json
    python bench/evals.py tokenizer FOLDER       # the model's tokenizer in Hugging Face's layout, for other tools
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from parity import transformers_model
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slipstream.core.config import cache_dir
from slipstream.devices.host import cpu_name
from slipstream.loading import catalog
from slipstream.loading.gguf import GGUFFile
from slipstream.text.gguf_tokenizer import build_tokenizer
from slipstream.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
TASKS = HERE / "eval_tasks"
CONSTRAINTS = HERE.parent / "constraints.txt"
PACKAGES = {
    # transformers without torch: the harness takes its tokenizers only.
    "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.24.0"),
    "guidellm": ("torch==2.13.0", "guidellm==0.8.1"),
}
LIMIT = 1e-3
"""Log-likelihoods may differ by so much; logits closer than this are a tie."""


@dataclass(frozen=True)
class Way:
    """A way to send the documents: arguments of the harness's model, and how many go into one request."""

    name: str
    arguments: dict[str, Any]
    batch: int
    tasks: tuple[str, ...] = ("slipstream_continuations", "slipstream_choices", "slipstream_beginnings")


@dataclass
class Counts:
    """What a comparison found. `ties`: is_greedy not compared; `wrong_greedy`: it differs."""

    requests: int = 0
    tokens: int = 0
    greedy: int = 0
    ties: int = 0
    wrong_greedy: int = 0
    largest_difference: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.wrong_greedy and self.largest_difference < LIMIT


def folder(tool: str) -> Path:
    """Where a tool's environment is."""
    return cache_dir() / "tools" / tool


def install(tool: str) -> None:
    """Make a tool's environment anew. Raises CalledProcessError if pip fails."""
    target = folder(tool)
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
    pip = [str(target / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
    subprocess.run([*pip, *PACKAGES[tool]], check=True)
    size = sum(path.lstat().st_size for path in target.rglob("*"))
    print(f"{tool}: {size / 1e6:.0f} MB in {time.perf_counter() - begin:.0f} s, {target}")


def write_tokenizer(model: Path, target: Path) -> None:
    """Write a GGUF file's tokenizer as tokenizer.json and tokenizer_config.json."""
    metadata = GGUFFile(model).metadata
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    target.mkdir(parents=True, exist_ok=True)
    build_tokenizer(metadata).save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.text_of(tokenizer.bos_id) or None,
        "eos_token": tokenizer.text_of(next(iter(tokenizer.eos_ids), None)) or None,
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
    }
    kept = {name: value for name, value in settings.items() if value is not None}
    (target / "tokenizer_config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def server(model: Path, threads: int | None, log: Path) -> Iterator[str]:
    """`slipstream serve` on a free port. -> its URL. Raises RuntimeError if it ends before it is ready."""
    command = [sys.executable, "-m", "slipstream", "serve", str(model), "--port", "0", "--served-model-name", "served"]
    command += ["--threads", str(threads)] if threads else []
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://[\d.]+:\d+(?=/v1)", line):
                yield found[0]
                return
        raise RuntimeError(f"the server did not start:\n{log.read_text()}")
    finally:
        process.terminate()
        process.wait(30)


def harness(url: str, way: Way, output: Path) -> tuple[str, list[dict[str, Any]]]:
    """Run the harness. -> (its command, its samples). Raises RuntimeError with its last lines if it fails."""
    arguments = {"model": "served", "base_url": f"{url}/v1/completions", "max_length": 2048, **way.arguments}
    command = [str(folder("lm-eval") / "bin" / "lm_eval"), "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--batch_size", str(way.batch), "--tasks", ",".join(way.tasks)]
    command += ["--include_path", ".", "--log_samples", "--output_path", str(output)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output / "hf")}
    ran = subprocess.run(command, cwd=TASKS, env=os.environ | offline, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the harness failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    files = sorted(output.rglob("samples_*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    shown = shlex.join(["lm_eval", *command[1:]]).replace(url, "URL").replace(str(output.parent), "FOLDER")
    return shown, samples


def requests_of(samples: list[dict[str, Any]]) -> Iterator[tuple[str, str, float, bool]]:
    """(context, continuation, log-likelihood, is greedy) of each request that the harness sent."""
    for sample in samples:
        sent = [sample["arguments"][name] for name in sorted(sample["arguments"], key=_number)]
        for arguments, (answer,) in zip(sent, sample["resps"], strict=True):
            logprob, greedy = answer
            yield arguments["arg_0"], arguments["arg_1"], float(logprob), str(greedy) == "True"


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


@torch.no_grad()
def score(model: nn.Module, context: list[int], continuation: list[int]) -> tuple[float, bool, float]:
    """-> (log-likelihood, whether each token is the best one, the smallest gap between the best two logits)"""
    logits = model(input_ids=torch.tensor([context + continuation[:-1]]), logits_to_keep=len(continuation)).logits[0]
    target = torch.tensor(continuation)[:, None]
    best = logits.topk(2, dim=-1).values
    logprob = float(logits.double().log_softmax(-1).gather(-1, target).sum())
    return logprob, bool((logits.argmax(-1) == target[:, 0]).all()), float((best[:, 0] - best[:, 1]).min())


def split(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and a continuation, as the harness cuts them: spaces at a context's end go to the continuation,
    and where there is no context, BOS stands for it."""
    if not context:
        return [tokenizer.bos_token_id], tokenizer(continuation, add_special_tokens=False).input_ids
    kept = tokenizer(context.rstrip(), add_special_tokens=False).input_ids
    whole = tokenizer(context + continuation, add_special_tokens=False).input_ids
    return whole[: len(kept)], whole[len(kept) :]


def compare(samples: list[dict[str, Any]], model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Counts:
    """Each of the harness's answers beside transformers' own."""
    counts = Counts()
    for context, continuation, found, greedy in requests_of(samples):
        before, after = split(tokenizer, context, continuation)
        expected, expected_greedy, gap = score(model, before, after)
        counts.requests += 1
        counts.tokens += len(after)
        counts.greedy += expected_greedy
        if gap < LIMIT:
            counts.ties += 1
        else:
            counts.wrong_greedy += greedy != expected_greedy
        counts.largest_difference = max(counts.largest_difference, abs(found - expected))
    return counts


def ways(tokenizer: Path, bos: int) -> list[Way]:
    """Token ids or text, one request after the other or several at once, with the server's tokenizer or a local one."""
    remote = {"tokenizer_backend": "remote", "custom_prefix_token_id": bos}
    local = {"tokenizer_backend": "huggingface", "tokenizer": str(tokenizer)}
    return [
        Way("the server's tokenizer, token ids, 8 prompts a request", remote, 8),
        Way("a local tokenizer, token ids, 4 prompts a request, 4 requests at once", {**local, "num_concurrent": 4}, 4),
        Way("a local tokenizer, text, 1 prompt a request", {**local, "tokenized_requests": False}, 1, Way.tasks[:2]),
    ]


def run(model: Path, threads: int | None) -> dict[str, Any]:
    """All ways, each compared."""
    reference = transformers_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    runs = []
    with tempfile.TemporaryDirectory() as work:
        write_tokenizer(model, Path(work) / "tokenizer")
        with server(model, threads, Path(work) / "server.log") as url:
            for number, way in enumerate(ways(Path(work) / "tokenizer", tokenizer.bos_token_id)):
                command, samples = harness(url, way, Path(work) / f"run{number}")
                counts = compare(samples, reference, tokenizer)
                runs.append({"way": way.name, "command": command, "equal": counts.equal, **asdict(counts)})
                print(f"{way.name}: {counts}", file=sys.stderr)
    return {
        "what": f"log-likelihoods that lm-evaluation-harness reads from the server, against transformers in float32; "
        f"equal: none differs by {LIMIT} or more, and is_greedy is the same",
        "command": shlex.join(["python", *sys.argv]),
        "model": model.name,
        "runs": runs,
        "versions": {
            "lm_eval": PACKAGES["lm-eval"][0].partition("==")[2],
            **{name: version(name) for name in ("slipstream-llm", "torch", "transformers")},
            "python": platform.python_version(),
        },
        "cpu": cpu_name(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="do", required=True)
    one = commands.add_parser("install", help="make environments anew")
    one.add_argument("tools", nargs="*", help=f"of {', '.join(PACKAGES)}; without names lm-eval")
    two = commands.add_parser("run", help="evaluate and compare")
    two.add_argument("--threads", type=int, help="of the server; one is quicker where others use the cores")
    two.add_argument("--output", type=Path, help="where to write the result")
    three = commands.add_parser("tokenizer", help="write the model's tokenizer for tools that want a local one")
    three.add_argument("folder", type=Path)
    for command in (two, three):
        command.add_argument("--model", type=Path, help="a GGUF file; without it the default model")
    options = parser.parse_args()
    if options.do == "install":
        for tool in options.tools:
            if tool not in PACKAGES:
                parser.error(f"tools: {tool!r} is not one of {', '.join(PACKAGES)}")
        for tool in options.tools or ["lm-eval"]:
            install(tool)
        return 0
    model = options.model or catalog.resolve(None, fetch_missing=True)
    if options.do == "tokenizer":
        write_tokenizer(model, options.folder)
        return 0
    if not folder("lm-eval").exists():
        parser.error("the harness is missing: python bench/evals.py install")
    if options.threads:
        torch.set_num_threads(options.threads)
    result = run(model, options.threads)
    summary = json.dumps(result, indent=2)
    print(summary)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(summary + "\n", encoding="utf-8")
    return 0 if all(entry["equal"] for entry in result["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
