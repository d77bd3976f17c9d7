"""The engine: requests in, one step at a time, updates out. Synchronous, and used by one thread."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slipstream.cache.manager import CacheManager
from slipstream.core.batch import StepBatch
from slipstream.core.errors import EngineDeadError, RequestFailedError, SlipstreamError
from slipstream.core.outputs import Logprob, TokenLogprobs
from slipstream.core.request import ChoiceDelta, Request, RequestUpdate
from slipstream.engine.cost_model import CostModel
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Scheduler, Work
from slipstream.engine.sequence import Sequence, State
from slipstream.engine.stats import EngineSnapshot, EngineStats
from slipstream.sampling.batch import Draws, Sampler, SamplingBatch
from slipstream.sampling.state import SequenceSampler
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.tokenizer import Tokenizer

_RUNNING = State.RUNNING


@dataclass(slots=True)
class _Active:
    """A request in the engine and its choices."""

    request: Request
    sequences: list[Sequence]
    scored: bool = False


class Engine:
    """Continuous batching over one runner.

    `eos_ids` end a choice unless `ignore_eos`. `tokenizer` None: no text is made (stop strings cannot be used then).
    `sampler` None: tokens are drawn by the op in PyTorch.
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        costs: CostModel,
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None,
        max_model_len: int,
        max_sequences: int,
        max_rows: int,
        max_step_ms: float,
        row_tile: int,
        sampler: Sampler | None = None,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.stats = EngineStats()
        self.scheduler = Scheduler(
            cache,
            costs,
            max_sequences=max_sequences,
            max_rows=max_rows,
            max_step_ms=max_step_ms,
            row_tile=row_tile,
        )
        self.batch = StepBatch(
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_pages=cache.pages_for(max_model_len),
            page_size=cache.page_size,
        )
        self.sampling = SamplingBatch(vocab_size, sampler)
        self.before_launch: Callable[[], None] | None = None
        """Called when all is ready for the device: what it does or wakes up runs while the device works."""
        self._active: dict[str, _Active] = {}
        self._order = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    def snapshot(self) -> EngineSnapshot:
        """Counts and gauges. May be called from any thread: what it reads is at worst one step old."""
        cache = self.cache
        return EngineSnapshot(
            self.stats,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_used=cache.num_in_use,
            pages_total=cache.pool.capacity,
        )

    def add(self, request: Request) -> None:
        """Queue a request. It must have been checked (see `slipstream.engine.inputs`)."""
        if request.id in self._active:
            raise RequestFailedError(f"request id {request.id!r} is already in use", param="request_id")
        active = _Active(request, [])
        for index in range(request.params.n):
            active.sequences.append(self._sequence(request, index, active.sequences[0] if index else None))
        self._active[request.id] = active
        for sequence in active.sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Drop a request whatever it is doing; its pages are free at once. -> its last update, or None if unknown."""
        active = self._active.get(request_id)
        if active is None:
            return None
        update = RequestUpdate(active.request, finished=True)
        for sequence in active.sequences:
            if sequence.state is not State.FINISHED:
                self.scheduler.finish(sequence)
                update.deltas.append(ChoiceDelta(sequence.index, finish_reason="abort"))
        self._forget(active, "abort")
        return update

    def step(self) -> list[RequestUpdate]:
        """Run one step. -> an update for every request that it changed.

        If the model or the device fails, the requests in the step get an EngineDeadError and give back their pages.
        """
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan:
            if self._active:
                # Going round and round would hang everyone; a failure reaches them.
                raise RuntimeError("no waiting or running request can be given rows: the page pool is too small")
            return []
        shape = self.scheduler.shape_of(plan)
        self._fill(plan)
        if self.before_launch is not None:
            self.before_launch()
        try:
            handle = self.runner.launch(self.batch, self.sampling)
            result = self.runner.collect(handle)
        except Exception as error:
            self.stats.failed_steps += 1
            dead = EngineDeadError(f"a step of the engine failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            return self._fail(plan, dead)
        updates = self._absorb(plan, result)
        self.scheduler.costs.observe(shape, handle.device_s * 1e3)
        self.stats.preemptions = self.scheduler.num_preemptions
        took = time.perf_counter() - started
        self.stats.observe_step(self.batch.num_rows, took, took - handle.device_s)
        return updates

    def fail_all(self, error: SlipstreamError) -> list[RequestUpdate]:
        """End every request with `error` and start over with an empty cache. -> their last updates.

        It relies on nothing that the failure may have left half done.
        """
        updates = [RequestUpdate(active.request, finished=True, error=error) for active in self._active.values()]
        for active in list(self._active.values()):
            for sequence in active.sequences:
                sequence.state = State.FINISHED
            self._forget(active, "error")
        self.scheduler.waiting.clear()
        self.scheduler.running.clear()
        self.cache.reset()
        return updates

    def _sequence(self, request: Request, index: int, leader: Sequence | None) -> Sequence:
        params = request.params
        return Sequence(
            request,
            index,
            order=next(self._order),
            sampler=SequenceSampler(
                params,
                prompt_ids=request.prompt_ids,
                vocab_size=self.vocab_size,
                eos_ids=sorted(self.eos_ids),
                bad_word_ids=request.bad_word_ids,
                choice_index=index,
                seed=request.seed,
                sibling=None if leader is None else leader.sampler,
            ),
            detokenizer=None
            if self.tokenizer is None
            else Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens),
            leader=leader,
        )

    def _fill(self, plan: list[Work]) -> None:
        """Write the plan's rows, and the sampling state of the rows that want logits, in the same order."""
        batch, sampling = self.batch, self.sampling
        batch.clear()
        sampling.clear()
        for work in plan:
            sequence, rows = work.sequence, work.rows
            request, tokens = sequence.request, sequence.tokens
            if request.metrics.first_scheduled_time is None:
                now = request.metrics.first_scheduled_time = time.monotonic()
                self.stats.queue.observe(now - request.metrics.arrival_time)
            start = sequence.computed
            end = start + rows
            number = batch.add_sequence(sequence.pages.table, end)
            samples = end == len(tokens) and request.max_tokens > 0
            wants: bool | list[bool] = samples
            if rows > 1:
                wants = [False] * rows
                wants[-1] = samples
            if sequence.prompt_logprobs is not None and sequence.wants_scores:
                wants = wants if isinstance(wants, list) else [wants]
                for token_at in self._scored(sequence, start, end):
                    wants[token_at - 1 - start] = True
                    sequence.sampler.write_score_row(sampling, tokens[token_at])
            batch.add_rows(number, tokens[start:end], start, wants_logits=wants)
            if samples:
                sequence.sampler.write_row(sampling, (), end)

    @staticmethod
    def _scored(sequence: Sequence, start: int, end: int) -> range:
        """Indices of prompt tokens whose logprob rows [start, end) give and which is still owed."""
        if sequence.prompt_logprobs is None:
            return range(0)
        return range(max(start + 1, len(sequence.prompt_logprobs)), min(end + 1, sequence.prompt_len))

    def _absorb(self, plan: list[Work], result: Draws) -> list[RequestUpdate]:
        updates: dict[str, RequestUpdate] = {}
        row = 0
        now = time.monotonic()
        for work in plan:
            sequence = work.sequence
            request = sequence.request
            start = sequence.computed
            end = start + work.rows
            first = row
            if end == len(sequence.tokens) and request.max_tokens > 0:
                row += 1
            if sequence.prompt_logprobs is not None and sequence.wants_scores:
                row += len(self._scored(sequence, start, end))
            if sequence.state is not _RUNNING:
                continue
            update = updates.get(request.id)
            if update is None:
                update = updates[request.id] = RequestUpdate(request)
            try:
                self._advance(sequence, work.rows, result, first, update, now)
            except SlipstreamError as error:
                self._fail_request(sequence, update, error)
            except Exception as error:
                failed = RequestFailedError(f"the request failed: {type(error).__name__}: {error}")
                failed.__cause__ = error
                self._fail_request(sequence, update, failed)
        return [self._finish_update(update) for update in updates.values()]

    def _advance(
        self, sequence: Sequence, rows: int, result: Draws, row: int, update: RequestUpdate, now: float
    ) -> None:
        """Take a step's results for one sequence; its rows that wanted logits begin at `row`."""
        request = sequence.request
        start, end = sequence.computed, sequence.computed + rows
        if sequence.prompt_logprobs is not None and sequence.wants_scores:
            for token_at in self._scored(sequence, start, end):
                if not math.isfinite(result.logprobs[row]):
                    raise RequestFailedError("the model gave no finite logits for the prompt")
                logprobs = self._logprobs(result, row, sequence.tokens[token_at], request.params.prompt_logprobs or 0)
                sequence.prompt_logprobs.append(logprobs)
                row += 1
        tokens = sequence.tokens
        if start < sequence.prompt_len <= end and not sequence.num_output:
            self.stats.prompt_tokens += sequence.prompt_len
            self.stats.cached_prompt_tokens += sequence.num_cached_tokens or 0
        sequence.computed = end
        cache = self.cache
        cache.commit(sequence.pages, tokens, end)
        if cache.window:
            cache.free_behind_window(sequence.pages, end)
        if end != len(tokens):
            return
        if request.max_tokens == 0:
            self._end(sequence, ChoiceDelta(sequence.index, self._echo(sequence), finish_reason="length"), update)
            return
        token = int(result.tokens[row])
        if token < 0:
            raise sequence.no_token_error()
        self._accept(sequence, token, result, row, update, now)

    def _accept(
        self, sequence: Sequence, token: int, result: Draws, row: int, update: RequestUpdate, now: float
    ) -> None:
        """Add a sampled token to a sequence, with its text, and see whether it ends it."""
        request, stats = sequence.request, self.stats
        params, metrics = request.params, request.metrics
        delta = ChoiceDelta(sequence.index, "", [token])
        sequence.tokens.append(token)
        sequence.sampler.commit((token,))
        if params.logprobs is not None:
            delta.logprobs = [self._logprobs(result, row, token, params.logprobs)]
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            stats.time_to_first_token.observe(now - metrics.arrival_time)
        if sequence.last_token_time is None:
            delta.text = self._echo(sequence)
        else:
            stats.inter_token.observe(now - sequence.last_token_time)
        sequence.last_token_time = metrics.last_token_time = now
        stats.output_tokens += 1

        finish, stop_reason = self._ended_by(sequence, token)
        text = self._text(sequence, token, hidden=finish == "stop" and not params.include_stop_str_in_output)
        if sequence.stop_strings is not None and sequence.num_output > params.min_tokens:
            text, matched = sequence.stop_strings.push(text)
            if matched is not None:
                finish, stop_reason = "stop", matched
        delta.text += text
        if finish is None:
            update.deltas.append(delta)
            return
        delta.finish_reason, delta.stop_reason = finish, stop_reason
        if not isinstance(delta.stop_reason, str):
            delta.text += self._rest_of_text(sequence, delta)
        self._end(sequence, delta, update)

    def _ended_by(self, sequence: Sequence, token: int) -> tuple[str | None, int | str | None]:
        """Finish and stop reason if the token that was just added ends the sequence."""
        request = sequence.request
        params, num_output = request.params, len(sequence.tokens) - sequence.prompt_len
        if num_output >= params.min_tokens:
            if token in self.eos_ids and not params.ignore_eos:
                return "stop", None
            if token in sequence.sampler.stop_token_ids:
                return "stop", token
        return ("length" if num_output >= request.max_tokens else None), None

    @staticmethod
    def _text(sequence: Sequence, token: int, *, hidden: bool) -> str:
        """The text that a token completes; a token that only ends the answer is `hidden`."""
        return "" if sequence.detokenizer is None or hidden else sequence.detokenizer.push((token,))

    @staticmethod
    def _rest_of_text(sequence: Sequence, delta: ChoiceDelta) -> str:
        """Text that was held back for more bytes or for a stop string that did not come; a stop may still be in it."""
        text = "" if sequence.detokenizer is None else sequence.detokenizer.finish()
        if sequence.stop_strings is None:
            return text
        if text and sequence.num_output > sequence.request.params.min_tokens:
            text, matched = sequence.stop_strings.push(text)
            if matched is not None:
                delta.finish_reason, delta.stop_reason = "stop", matched
                return text
            return text + sequence.stop_strings.finish()
        return sequence.stop_strings.finish() + text

    @staticmethod
    def _echo(sequence: Sequence) -> str:
        request = sequence.request
        return (request.prompt or "") if request.params.echo else ""

    def _end(self, sequence: Sequence, delta: ChoiceDelta, update: RequestUpdate) -> None:
        update.deltas.append(delta)
        self.scheduler.finish(sequence)

    def _logprobs(self, result: Draws, row: int, token: int, top: int) -> TokenLogprobs:
        """The token's own logprob first, then the `top` most likely ones."""
        found = {token: Logprob(float(result.logprobs[row]), int(result.ranks[row]), self._text_of(token))}
        for rank in range(min(top, result.top_ids.shape[1])):
            other = int(result.top_ids[row, rank])
            if other not in found:
                found[other] = Logprob(float(result.top_logprobs[row, rank]), rank + 1, self._text_of(other))
        return found

    def _text_of(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def _finish_update(self, update: RequestUpdate) -> RequestUpdate:
        active = self._active.get(update.request.id)
        if active is None:
            return update
        first = active.sequences[0]
        update.num_cached_tokens = first.num_cached_tokens or 0
        if first.prompt_logprobs is not None and not active.scored and not first.wants_scores:
            active.scored = True
            update.prompt_logprobs = first.prompt_logprobs
        if update.deltas and all(sequence.state is State.FINISHED for sequence in active.sequences):
            update.finished = True
            self._forget(active, update.deltas[-1].finish_reason or "stop")
        return update

    def _fail_request(self, sequence: Sequence, update: RequestUpdate, error: SlipstreamError) -> None:
        active = self._active.get(sequence.request.id)
        if active is None:
            return
        for other in active.sequences:
            self.scheduler.finish(other)
        update.error, update.finished = error, True
        self._forget(active, "error")

    def _fail(self, plan: list[Work], error: SlipstreamError) -> list[RequestUpdate]:
        updates: dict[str, RequestUpdate] = {}
        for work in plan:
            request = work.sequence.request
            if request.id not in updates:
                updates[request.id] = RequestUpdate(request)
                self._fail_request(work.sequence, updates[request.id], error)
        return list(updates.values())

    def _forget(self, active: _Active, reason: str) -> None:
        active.request.metrics.finished_time = time.monotonic()
        self._active.pop(active.request.id, None)
        self.stats.observe_finished(active.request, reason, sum(s.num_output for s in active.sequences))
