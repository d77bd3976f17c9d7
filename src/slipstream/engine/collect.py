"""Putting the updates of a request together into a RequestOutput."""

from __future__ import annotations

from dataclasses import replace

from slipstream.core.outputs import CompletionOutput, RequestOutput
from slipstream.core.request import ChoiceDelta, Request, RequestUpdate


class OutputCollector:
    """All of a request so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output = RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            outputs=[CompletionOutput(index) for index in range(request.params.n)],
            finished=False,
            seed=request.seed,
            metrics=request.metrics,
        )

    def add(self, update: RequestUpdate) -> RequestOutput:
        """Take an update in. -> the output, which later updates change. Raises the update's error."""
        output = self.output
        for delta in update.deltas:
            self._extend(output.outputs[delta.index], delta)
        if update.prompt_logprobs is not None:
            output.prompt_logprobs = update.prompt_logprobs
        output.num_cached_tokens = max(output.num_cached_tokens, update.num_cached_tokens)
        output.finished = update.finished
        if update.error is not None:
            raise update.error
        return output

    def snapshot(self) -> RequestOutput:
        """A copy that later updates do not change."""
        outputs = [
            replace(
                choice,
                token_ids=list(choice.token_ids),
                logprobs=None if choice.logprobs is None else list(choice.logprobs),
            )
            for choice in self.output.outputs
        ]
        return replace(self.output, outputs=outputs, metrics=replace(self.output.metrics))

    @staticmethod
    def _extend(choice: CompletionOutput, delta: ChoiceDelta) -> None:
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = []
            choice.logprobs += delta.logprobs
            added = sum(entry[token].logprob for entry, token in zip(delta.logprobs, delta.token_ids, strict=True))
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + added
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
