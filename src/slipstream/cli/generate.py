"""`slipstream generate`: answers to one prompt or to a file of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.flags import ENGINE_NAMES, SAMPLING_NAMES
from slipstream.cli.options import takes_flags
from slipstream.cli.prompts import Ask, choose
from slipstream.cli.session import open_llm, sampling_params
from slipstream.cli.settings import Settings
from slipstream.cli.wrap import shown_on_stdout
from slipstream.core.errors import ConfigError
from slipstream.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from slipstream.core.request import RequestUpdate
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

GROUP = 64
"""Lines of a prompt file that are worked on together; each group is printed when it is done."""


@takes_flags((*ENGINE_NAMES, *SAMPLING_NAMES))
def generate(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] PROMPT", help="A model, if not the default, and a prompt.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; then MODEL is the only argument.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="JSON lines with `prompt` or `turns`; all are answered.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a prompt: text, token_ids, finish_reason, usage.")
    ] = False,
    *,
    settings: Settings,
) -> None:
    """Answer a prompt.

    The prompt is a user's turn in the model's chat template, if the model has one; --raw continues the text as it is.
    The same holds for the lines of a --prompt-file; the `turns` of a line are one conversation, in which each turn is
    answered before the next is asked.
    """
    model, asks = choose(arguments or [], prompt, prompt_file)
    if model is not None:
        settings.name_model(model)
    with open_llm(settings.engine) as llm:
        params = sampling_params(llm, settings.sampling)
        with_template = not raw and llm.loaded.inputs.template is not None
        _check_turns(asks, with_template, params)
        _check_reports(params, as_json)
        if prompt_file is None and not as_json and params.n == 1:
            _stream(llm, asks[0], params, with_template)
            return
        for first in range(0, len(asks), GROUP):
            for done in _answer(llm, asks[first : first + GROUP], params, with_template):
                _show(done, as_json)


def _check_turns(asks: Sequence[Ask], with_template: bool, params: SamplingParams) -> None:
    for ask in asks:
        if len(ask.turns) > 1 and not with_template:
            raise ConfigError(f"{ask.source} has several turns, which need a chat template (and no --raw)")
        if len(ask.turns) > 1 and params.n > 1:
            raise ConfigError(f"{ask.source} has several turns, which cannot go on from {params.n} answers", param="n")


def _check_reports(params: SamplingParams, as_json: bool) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not as_json:
            raise ConfigError(f"{name} are shown in JSON only; add --json", param=name)


def _stream(llm: LLM, ask: Ask, params: SamplingParams, with_template: bool) -> None:
    started = False
    show = shown_on_stdout()

    def on_update(update: RequestUpdate) -> None:
        nonlocal started
        started = True
        for delta in update.deltas:
            show(delta.text)

    try:
        if with_template:
            llm.chat([{"role": "user", "content": ask.turns[0]}], params, on_update=on_update)
        else:
            llm.generate(ask.turns[0], params, on_update=on_update)
    finally:
        if started:
            sys.stdout.write("\n")
            sys.stdout.flush()


@dataclass
class Answered:
    """A conversation and the output of each of its turns so far."""

    ask: Ask
    outputs: list[RequestOutput] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """The conversation up to its next turn."""
        messages = []
        for turn, output in zip(self.ask.turns, self.outputs, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": output.outputs[0].text})
        messages.append({"role": "user", "content": self.ask.turns[len(self.outputs)]})
        return messages


def _answer(llm: LLM, asks: Sequence[Ask], params: SamplingParams, with_template: bool) -> list[Answered]:
    """All conversations, side by side: a round for each turn."""
    all_of_them = [Answered(ask) for ask in asks]
    if not with_template:
        outputs = llm.generate([ask.turns[0] for ask in asks], params)
        for answered, output in zip(all_of_them, outputs, strict=True):
            answered.outputs.append(output)
        return all_of_them
    while going := [answered for answered in all_of_them if len(answered.outputs) < len(answered.ask.turns)]:
        outputs = llm.chat([answered.messages() for answered in going], params)
        for answered, output in zip(going, outputs, strict=True):
            answered.outputs.append(output)
    return all_of_them


def _show(done: Answered, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(done), ensure_ascii=False), flush=True)
        return
    for output in done.outputs:
        for choice in output.outputs:
            print(f"[{choice.index}] {choice.text}" if len(output.outputs) > 1 else choice.text, flush=True)


def to_json(done: Answered) -> dict[str, Any]:
    """What --json prints of a prompt.

    Of a conversation that is its last answer, all of them as `turns`, and the usage of all turns together.
    """
    last = done.outputs[-1]
    result = {
        **_choice(last.outputs[0]),
        "usage": _usage(done.outputs),
        "seed": last.seed,
        "prompt_token_ids": last.prompt_token_ids,
    }
    if len(last.outputs) > 1:
        result["choices"] = [{"index": choice.index, **_choice(choice)} for choice in last.outputs]
    if last.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if entry is None else _logprobs(entry) for entry in last.prompt_logprobs]
    if len(done.ask.turns) > 1:
        result["turns"] = [output.outputs[0].text for output in done.outputs]
        result["turns_token_ids"] = [output.outputs[0].token_ids for output in done.outputs]
    return result


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    if choice.stop_reason is not None:
        shown["stop_reason"] = choice.stop_reason
    if choice.logprobs is not None:
        shown["logprobs"] = [_logprobs(entry) for entry in choice.logprobs]
    return shown


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    """The token, and the most likely ones besides it."""
    own, *others = (
        {"token_id": token, "token": found.decoded_token, "logprob": found.logprob, "rank": found.rank}
        for token, found in entry.items()
    )
    return {**own, "alternatives": others}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for choice in _choices(outputs))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def _choices(outputs: Sequence[RequestOutput]) -> Iterator[CompletionOutput]:
    for output in outputs:
        yield from output.outputs
