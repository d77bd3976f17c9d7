"""`slipstream bench throughput`: many requests at once in this process, and how fast all of them are done."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.cli.bench_latency import probes_differ, token_times
from slipstream.cli.bench_report import (
    JsonFile,
    bench_console,
    engine_conditions,
    host_conditions,
    load_of_others,
    show_figures,
    show_load_of_others,
    write_json,
)
from slipstream.cli.bench_workload import (
    Dataset,
    InputLen,
    NumPrompts,
    OutputLen,
    RangeRatio,
    Workload,
    make_workload,
)
from slipstream.cli.flags import ENGINE_NAMES
from slipstream.cli.options import takes_flags
from slipstream.cli.percentiles import COLUMNS, distribution
from slipstream.cli.session import open_llm
from slipstream.cli.settings import Settings
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import RequestUpdate
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.engine.llm import LLM

OnUpdate = Callable[[RequestUpdate], None]


@takes_flags(ENGINE_NAMES)
def throughput(
    num_prompts: NumPrompts = 100,
    input_len: InputLen = None,
    output_len: OutputLen = 64,
    range_ratio: RangeRatio = 0.0,
    dataset: Dataset = None,
    json_file: JsonFile = None,
    *,
    settings: Settings,
) -> None:
    """Submit all prompts at once, without a server, and time until all are answered.

    Prompts are random tokens, chosen by --seed (0 if it is not given), or those of --dataset.
    Generation is greedy and goes on after the model's end of text. Times to the first token
    count from the moment when all were submitted, so they include waiting.
    """
    workload = make_workload(num_prompts, input_len, output_len, range_ratio, dataset)
    seed = settings.engine.setdefault("seed", 0)
    with open_llm(settings.engine) as llm:
        result = {
            **measure_throughput(llm, workload, seed),
            "conditions": {
                **engine_conditions(llm),
                **workload.conditions(),
                "dataset": None if dataset is None else dataset.name,
                "seed": seed,
                "prefix_caching": llm.loaded.config.prefix_caching,
                "max_num_seqs": llm.loaded.config.max_num_seqs,
                "max_num_batched_tokens": llm.loaded.config.max_num_batched_tokens,
                "max_step_ms": llm.loaded.config.max_step_ms,
                **host_conditions(),
            },
        }
    _show(result, workload, bench_console(json_file))
    write_json(result, json_file)


def measure_throughput(llm: LLM, workload: Workload, seed: int) -> dict[str, Any]:
    """Run the workload once, with a memory probe before and after it."""
    from slipstream.devices.bandwidth import ReadProbe
    from slipstream.devices.foreign_load import ForeignLoad

    submit = submission(llm, workload, seed)
    outputs: list[RequestOutput] = []
    probe = llm.run_in_engine(ReadProbe)
    preemptions = llm.loaded.engine.stats.preemptions
    load = ForeignLoad()
    before = llm.run_in_engine(probe.measure)
    begin = time.perf_counter()
    times = token_times(lambda on_update: outputs.extend(submit(on_update)))
    seconds = time.perf_counter() - begin
    after = llm.run_in_engine(probe.measure)
    return {
        **Throughput(times, outputs, seconds).summary(),
        "preemptions": llm.loaded.engine.stats.preemptions - preemptions,
        "bandwidth": {
            "before_gb_per_s": before / 1e9,
            "after_gb_per_s": after / 1e9,
            "differ": probes_differ((before, after)),
        },
        **load_of_others(load),
    }


def submission(llm: LLM, workload: Workload, seed: int) -> Callable[[OnUpdate], list[RequestOutput]]:
    """What submits the whole workload and waits for it. Prompts of a file go through the model's chat template."""

    def params(output_len: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)

    if workload.texts is None:
        chooser = random.Random(seed)
        vocab: int = llm.loaded.model.vocab_size
        lengths = workload.lengths(chooser)
        ids = [[chooser.randrange(vocab) for _ in range(input_len)] for input_len, _ in lengths]
        each = [params(output_len) for _, output_len in lengths]
        return lambda on_update: llm.generate(ids, each, on_update=on_update)
    texts, same = workload.repeated_texts(), params(workload.output_len)
    if llm.loaded.inputs.template is None:
        return lambda on_update: llm.generate(texts, same, on_update=on_update)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return lambda on_update: llm.chat(conversations, same, on_update=on_update)


@dataclass
class Throughput:
    """One run. `times` holds for each request when each of its tokens came, in seconds since all were submitted."""

    times: Sequence[Sequence[float]]
    outputs: Sequence[RequestOutput]
    seconds: float

    def summary(self) -> dict[str, Any]:
        """Counts, rates over the whole run, and percentiles over all requests and tokens."""
        prompt = sum(len(output.prompt_token_ids) for output in self.outputs)
        generated = sum(len(choice.token_ids) for output in self.outputs for choice in output.outputs)
        cached = [output.num_cached_tokens for output in self.outputs]
        gaps = [b - a for times in self.times for a, b in itertools.pairwise(times)]
        return {
            "seconds": self.seconds,
            "requests": len(self.outputs),
            "prompt_tokens": prompt,
            "output_tokens": generated,
            "requests_per_s": len(self.outputs) / self.seconds,
            "prompt_tokens_per_s": prompt / self.seconds,
            "output_tokens_per_s": generated / self.seconds,
            "total_tokens_per_s": (prompt + generated) / self.seconds,
            "ttft_ms": distribution((times[0] for times in self.times), scale=1e3),
            "inter_token_ms": distribution(gaps, scale=1e3),
            "prefix_hits": {
                "requests": sum(count > 0 for count in cached),
                "tokens": sum(cached),
                "share": sum(cached) / prompt,
            },
        }


def _show(result: dict[str, Any], workload: Workload, console: Console) -> None:
    from slipstream.cli.console import facts

    conditions, hits, probes = result["conditions"], result["prefix_hits"], result["bandwidth"]
    console.print(
        f"{workload.describe()}, {conditions['cpu']}, {conditions['threads']} threads, {conditions['dtype']}",
        style="dim",
    )
    console.print(
        facts(
            [
                ("time", f"{result['seconds']:.2f} s"),
                ("requests/s", f"{result['requests_per_s']:.2f}"),
                ("output tokens/s", f"{result['output_tokens_per_s']:.1f}"),
                ("prompt tokens/s", f"{result['prompt_tokens_per_s']:.1f}"),
                ("total tokens/s", f"{result['total_tokens_per_s']:.1f}"),
                ("from the prefix cache", f"{hits['share']:.1%} of the prompts' tokens, {hits['requests']} requests"),
                ("preemptions", str(result["preemptions"])),
                (
                    "probed bandwidth",
                    f"{probes['before_gb_per_s']:.1f} GB/s before, {probes['after_gb_per_s']:.1f} GB/s after",
                ),
            ]
        )
    )
    rows = [
        ("time to first token, ms", result["ttft_ms"], 1.0),
        ("between tokens, ms", result["inter_token_ms"], 1.0),
    ]
    show_figures(console, COLUMNS, rows)
    if probes["differ"]:
        console.print("the probes before and after the run differ by more than 15 %", style="yellow")
    show_load_of_others(console, result)
