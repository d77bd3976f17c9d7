"""The client of the serving bench, against a small server on a clock that only the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import threading
from collections import Counter

import jsonschema
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slipstream.cli.main import main
from slipstream.cli.serve_client import Arrivals, Client
from slipstream.cli.serve_stream import AnswerStream
from slipstream.cli.serve_summary import parse_goals, summarise
from slipstream.core.errors import ConfigError, SlipstreamError

DONE = b"data: [DONE]\n\n"


class Clock:
    """A clock that stands still until it is moved. `read` is set at each reading; `sleep` moves it at once."""

    def __init__(self) -> None:
        self.now = 100.0
        self.read = asyncio.Event()

    def __call__(self) -> float:
        self.read.set()
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece, reason=None, **fields):
    return event(choices=[{"index": 0, "text": piece, "finish_reason": reason}], **fields)


def delta(reason=None, **fields):
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


def usage(prompt, completion, **fields):
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **fields})


def streamed(*pieces, sent=0.0):
    """The answer to a stream of (moment, bytes)."""
    stream = AnswerStream(sent)
    for moment, data in pieces:
        stream.feed(data, moment)
    return stream.finish(99.0)


# One answer, from known arrivals.


def test_times_of_an_answer():
    answer = streamed(
        (1.0, text("a")), (1.5, text(" b")), (2.5, text(" c", "length")), (2.6, usage(7, 3)), (2.6, DONE), sent=0.25
    )
    assert answer.failure is None
    assert (answer.ttft, answer.e2e, answer.tpot) == (0.75, 2.25, 0.75)
    assert answer.inter_token() == answer.gaps == [0.5, 1.0]
    assert (answer.prompt_tokens, answer.tokens) == (7, 3)


def test_a_chat_counts_from_its_first_content():
    answer = streamed(
        (0.1, delta(role="assistant", content="")),
        (1.0, delta(content="a")),
        (1.5, delta(reasoning_content="b")),
        (2.0, delta(tool_calls=[{"index": 0}])),
        (3.0, delta("stop")),
        (3.0, usage(4, 3)),
    )
    assert answer.failure is None
    assert answer.times == [1.0, 1.5, 2.0]


def test_a_token_without_text_counts_and_the_closing_event_does_not():
    assert streamed((1.0, text("")), (2.0, text("b")), (3.0, text("", "stop"))).times == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_bytes_may_be_cut_anywhere(size, newline):
    data = b": a comment\n\n" + text("é") + text("b") + usage(2, 2) + b"data: [DONE]"
    data = data.replace(b"\n", newline)
    stream = AnswerStream(0.0)
    for begin in range(0, len(data), size):
        stream.feed(data[begin : begin + size], 1.0 + begin)
    answer = stream.finish(5000.0)
    assert answer.failure is None
    assert (len(answer.times), answer.tokens) == (2, 2)
    # A piece counts from the bytes that end its line.
    end = data.index(b"\n", data.index(b"choices"))
    assert answer.times[0] == 1.0 + end - end % size


def test_tokens_of_a_chunk_share_its_gap():
    evenly = streamed((1.0, text("ab")), (2.0, text("cd")), (4.0, text("ef")), (4.0, usage(1, 6)), (4.0, DONE))
    assert evenly.inter_token() == [0.5, 1.0]
    assert evenly.tpot == pytest.approx(3 / 5)
    counted = streamed(
        (1.0, text("a", usage={"completion_tokens": 1})),
        (2.0, text("bcd", usage={"completion_tokens": 4})),
        (4.0, text("e", "stop", usage={"completion_tokens": 5})),
    )
    assert counted.inter_token() == [pytest.approx(1 / 3)] * 3 + [2.0]
    assert counted.tokens == 5


def test_usage_in_the_last_piece_alone_says_nothing_of_that_piece():
    answer = streamed((1.0, text("ab")), (3.0, text("cd", "stop", usage={"prompt_tokens": 1, "completion_tokens": 4})))
    assert answer.inter_token() == [1.0]
    assert answer.tokens == 4


def test_without_usage_chunks_are_counted():
    answers = [streamed((1.0, text("a")), (2.0, text("b", "stop"))), streamed((1.0, text("a")), (1.0, usage(5, 4)))]
    answers[1].failure = None
    found = summarise(answers, 2.0, {})
    assert (found["without_usage"], found["output_tokens"], found["prompt_tokens"]) == (1, 6, None)
    assert found["total_tokens_per_s"] is None


@pytest.mark.parametrize(
    ("pieces", "failure", "detail"),
    [
        ([], "no output in the stream", ""),
        ([usage(3, 0), DONE], "no output in the stream", ""),
        ([text("a")], "the stream broke off", ""),
        ([text("a"), event(error={"message": "it died"}), DONE], "an error in the stream", "it died"),
        ([event(error="it died")], "an error in the stream", "it died"),
        ([b"data: {oops\n\n"], "an event that cannot be read", "malformed"),
    ],
)
def test_streams_that_fail(pieces, failure, detail):
    answer = streamed(*((1.0, piece) for piece in pieces))
    assert answer.failure == failure
    assert detail in answer.detail


# When requests are sent.


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_mean_and_the_spread_of_their_process(burstiness):
    times = Arrivals(rate=20.0, burstiness=burstiness).times(20_000, random.Random(5))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.03)
    assert statistics.variance(gaps) == pytest.approx(1 / 20**2 / burstiness, rel=0.1)
    assert Arrivals(rate=20.0, burstiness=burstiness).times(20_000, random.Random(5)) == times
    assert Arrivals().times(3, random.Random(5)) == [0.0] * 3


# The client and a server.


class Scripted:
    """A server. `answer` handles a completion; `asked` keeps what came."""

    def __init__(self, answer=None) -> None:
        self.answer = answer or self.two_tokens
        self.asked = []
        self.in_flight = self.peak = 0
        self.models = {"object": "list", "data": [{"id": "first"}, {"id": "second"}]}
        self.version = {"version": "1.2.3"}

    def app(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self._handle)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_get("/{path:v1/models|version}", self._info)
        return app

    async def _info(self, request):
        value = self.version if request.path == "/version" else self.models
        return web.json_response(value) if value is not None else web.Response(status=404)

    async def _handle(self, request):
        body = await request.json()
        self.asked.append((request.path, request.headers, body))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            return await self.answer(request, body)
        finally:
            self.in_flight -= 1

    async def two_tokens(self, request, body):
        return await stream(request, text("a"), text("b", "length"), usage(4, 2), DONE)


async def stream(request, *pieces):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    return response


def flown(scripted, count=1, arrivals=None, clock=None, endpoint="/v1/completions", **settings):
    """What came of `count` requests."""

    async def run():
        made = Clock() if clock is None else clock
        async with TestServer(scripted.app()) as server:
            url = str(server.make_url("/"))
            async with Client(url, endpoint, clock=made, sleep=made.sleep, **settings) as client:
                return await client.fly([b"{}"] * count, arrivals or Arrivals(), random.Random(1))

    return asyncio.run(run())


def test_times_come_from_when_the_chunks_arrive():
    clock = Clock()

    async def answer(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        for seconds, data in (
            (0.5, text("a")),
            (0.1, text("b")),
            (0.3, text("c", "length")),
            (2.0, usage(4, 3) + DONE),
        ):
            clock.now += seconds
            clock.read.clear()
            await response.write(data)
            await clock.read.wait()
        return response

    flight = flown(Scripted(answer), clock=clock)
    (found,) = flight.answers
    assert found.ttft == pytest.approx(0.5)
    assert found.inter_token() == pytest.approx([0.1, 0.3])
    assert found.e2e == pytest.approx(0.9)
    assert found.tpot == pytest.approx(0.2)
    assert flight.seconds == pytest.approx(2.9)


def test_requests_are_sent_when_they_are_due():
    arrivals = Arrivals(rate=2.0)
    flight = flown(Scripted(), 6, arrivals)
    due = arrivals.times(6, random.Random(1))
    assert len({answer.sent for answer in flight.answers}) > 1
    for answer, moment in zip(flight.answers, due, strict=True):
        assert answer.sent >= 100.0 + moment - 1e-9
    assert flight.answers[0].sent < 100.0 + due[-1]


def test_the_limit_of_requests_in_flight_is_kept_and_reached():
    barrier = asyncio.Barrier(3)

    async def answer(request, body):
        await barrier.wait()
        return await scripted.two_tokens(request, body)

    scripted = Scripted(answer)
    flight = flown(scripted, 9, Arrivals(limit=3))
    assert (scripted.peak, flight.peak) == (3, 3)
    assert len(flight.answers) == 9
    assert all(answer.failure is None for answer in flight.answers)


def test_a_request_that_is_held_back_is_timed_from_when_it_is_sent():
    clock = Clock()

    async def answer(request, body):
        clock.now += 1.0
        return await Scripted().two_tokens(request, body)

    flight = flown(Scripted(answer), 3, Arrivals(limit=1), clock=clock)
    assert [found.ttft for found in flight.answers] == [1.0, 1.0, 1.0]
    assert flight.seconds == 3.0


def test_without_a_limit_all_are_in_flight():
    barrier = asyncio.Barrier(120)  # more than aiohttp's default number of connections

    async def answer(request, body):
        await barrier.wait()
        return await scripted.two_tokens(request, body)

    scripted = Scripted(answer)
    assert flown(scripted, 120).peak == 120


def test_failures_are_counted_by_reason_and_rejections_apart():
    turn = iter(range(100))

    async def answer(request, body):
        number = next(turn)
        if number < 2:
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        if number == 2:
            return web.json_response({"detail": "max_tokens is too large"}, status=400)
        if number == 3:
            response = await stream(request, text("a"))
            request.transport.abort()
            return response
        return await scripted.two_tokens(request, body)

    scripted = Scripted(answer)
    flight = flown(scripted, 6, Arrivals(limit=1))
    found = summarise(flight.answers, 2.0, {})
    assert (found["requests"], found["completed"], found["rejected"], found["failed"]) == (6, 2, 2, 2)
    assert Counter({row["reason"]: row["count"] for row in found["failures"]}) == {
        "HTTP 503": 2,
        "HTTP 400": 1,
        "the connection broke off": 1,
    }
    assert [row["first"] for row in found["failures"][:2]] == ["the queue is full", "max_tokens is too large"]
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (1.0, 2.0)


def test_a_request_that_takes_too_long_fails():
    async def answer(request, body):
        await asyncio.sleep(30)

    async def run():
        async with (
            TestServer(Scripted(answer).app()) as server,
            Client(str(server.make_url("/")), "/v1/completions", timeout=0.05) as client,
        ):
            return await client.ask(b"{}")

    assert asyncio.run(run()).failure == "timeout"


def test_a_server_that_is_not_there():
    async def run():
        async with Client("http://127.0.0.1:9", "/v1/completions") as client:
            assert (await client.ask(b"{}")).failure == "no connection"
            await client.describe()

    with pytest.raises(SlipstreamError, match=r"http://127\.0\.0\.1:9/v1/models cannot be reached"):
        asyncio.run(run())


# Goals.


def test_goodput_counts_requests_that_keep_every_limit():
    quick = streamed((0.1, text("a")), (0.2, text("b")), (0.3, text("c", "stop")))
    slow_start = streamed((0.6, text("a")), (0.7, text("b", "stop")))
    pause = streamed((0.1, text("a")), (0.15, text("b")), (0.35, text("c", "stop")))
    failed = streamed((0.1, text("a")))
    answers = [quick, slow_start, pause, failed]
    found = summarise(answers, 2.0, parse_goals(["ttft:500", "itl:150"]))["goodput"]
    assert found == {"goals_ms": {"ttft": 500, "itl": 150}, "requests_per_s": 0.5, "share": 0.25}
    # The mean over a request hides its pause.
    assert summarise(answers, 2.0, parse_goals(["tpot:150"]))["goodput"]["share"] == 0.75
    assert summarise(answers, 2.0, parse_goals(["e2el:320"]))["goodput"]["share"] == 0.25
    assert summarise(answers, 2.0, {})["goodput"] is None


@pytest.mark.parametrize("wrong", [["ttft"], ["ttft:"], ["ttft:0"], ["ttft:nan"], ["speed:5"], ["itl:1", "itl:2"]])
def test_goals_that_cannot_be_read(wrong):
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goals(wrong)


# The command.


@pytest.fixture
def served():
    """Runs a scripted server in a thread of its own. -> its address."""
    with contextlib.ExitStack() as stack:

        def start(scripted):
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever)
            thread.start()
            server = TestServer(scripted.app())
            asyncio.run_coroutine_threadsafe(server.start_server(), loop).result(10)

            def stop():
                asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
                loop.call_soon_threadsafe(loop.stop)
                thread.join(10)
                loop.close()

            stack.callback(stop)
            return str(server.make_url("/"))

        yield start


FIGURES = {
    "type": "object",
    "required": ["mean", "p50", "p95", "p99"],
    "additionalProperties": {"type": ["number", "null"]},
}
COUNT, RATE = {"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0}
ROW = {
    "request_rate": {"type": ["number", "null"]},
    "burstiness": RATE,
    "max_concurrency": {"type": ["integer", "null"]},
    "peak_concurrency": COUNT,
    "mean_concurrency": RATE,
    "seconds": RATE,
    "requests": COUNT,
    "completed": COUNT,
    "rejected": COUNT,
    "failed": COUNT,
    "failures": {"type": "array", "items": {"type": "object", "required": ["reason", "count", "first"]}},
    "requests_per_s": RATE,
    "prompt_tokens": {"type": ["integer", "null"]},
    "cached_prompt_tokens": {"type": ["integer", "null"]},
    "output_tokens": COUNT,
    "output_tokens_per_s": RATE,
    "total_tokens_per_s": {"type": ["number", "null"]},
    "without_usage": COUNT,
    "tokens_per_chunk": {"type": ["number", "null"]},
    **dict.fromkeys(["ttft_ms", "itl_ms", "chunk_gap_ms", "tpot_ms", "e2el_ms"], FIGURES),
    "goodput": {"type": ["object", "null"]},
}
CONDITIONS = [
    *("model", "server", "endpoint", "base_url", "num_prompts", "request", "warmup", "seed", "timeout_s"),
    *("aiohttp", "python", "cpu", "slipstream", "command", "date"),
]
RESULT = {
    "type": "object",
    "required": ["rows", "conditions"],
    "additionalProperties": False,
    "properties": {
        "rows": {
            "type": "array",
            "items": {"type": "object", "required": list(ROW), "additionalProperties": False, "properties": ROW},
        },
        "conditions": {"type": "object", "required": CONDITIONS},
    },
}


def bench(*arguments):
    return main(["bench", "serve", *arguments])


def test_a_sweep_gives_a_row_for_each_pair(served, capsys, tmp_path):
    scripted, file = Scripted(), tmp_path / "result.json"
    loads = ["--request-rate", "inf", "--request-rate", "5000", "--max-concurrency", "1", "--max-concurrency", "2"]
    shape = ["--num-prompts", "3", "--input-len", "5", "--output-len", "2", "--warmup", "2"]
    url = served(scripted)
    assert bench("--base-url", url, *loads, *shape, "--goodput", "ttft:60000", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    jsonschema.validate(found, RESULT)
    pairs = [(row["request_rate"], row["max_concurrency"]) for row in found["rows"]]
    assert pairs == [(None, 1), (None, 2), (5000.0, 1), (5000.0, 2)]
    for row in found["rows"]:
        assert (row["completed"], row["output_tokens"], row["prompt_tokens"]) == (3, 6, 12)
        assert row["goodput"]["share"] == 1.0
        assert 0 < row["ttft_ms"]["p50"] <= row["e2el_ms"]["p99"]
    conditions = found["conditions"]
    assert conditions["server"] == {"version": {"version": "1.2.3"}, "models": scripted.models}
    assert (conditions["model"], conditions["input_len"]) == ("first", 5)
    shown = capsys.readouterr().out
    assert "all at once, at most 2 in flight: 3 of 3 answered" in " ".join(shown.split())
    assert "time to first token, ms" in shown
    assert "3.00 good" not in shown
    bodies = [body for _, _, body in scripted.asked]
    assert len(bodies) == 4 * (3 + 2)
    # No prompt comes twice, so nothing can be taken from a cache.
    assert len({body["prompt"] for body in bodies}) == len(bodies)
    assert all(len(body["prompt"].split()) == 5 for body in bodies)
    assert bodies[0]["stream_options"] == {"include_usage": True}
    assert (bodies[0]["max_tokens"], bodies[0]["temperature"]) == (2, 0.0)
    assert "ignore_eos" not in bodies[0]


def test_a_chat_of_a_file_with_every_option(served, capsys, monkeypatch, tmp_path):
    async def answer(request, body):
        return await stream(request, delta(content="ab"), delta("stop", content="cd"), usage(4, 4), DONE)

    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    scripted = Scripted(answer)
    scripted.version = None
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n{"prompt": "three"}\n')
    arguments = ["--endpoint", "/v1/chat/completions", "--dataset", str(file), "--num-prompts", "3", "--warmup", "0"]
    arguments += ["--model", "second", "--ignore-eos", "--temperature", "0.5", "--extra-body", '{"top_k": 3}']
    assert bench("--base-url", served(scripted), *arguments, "--max-concurrency", "1", "--json", "-") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    jsonschema.validate(found, RESULT)
    assert found["conditions"]["server"]["version"] is None
    assert found["rows"][0]["tokens_per_chunk"] == 2.0
    assert "between chunks of 2.0 tokens, ms" in shown.err
    paths, headers, bodies = zip(*scripted.asked, strict=True)
    assert set(paths) == {"/v1/chat/completions"}
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": t}] for t in ("one", "three", "one")]
    assert bodies[0] | {"model": "second", "ignore_eos": True, "temperature": 0.5, "top_k": 3} == bodies[0]
    assert headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in shown.out + shown.err


def test_a_server_without_usage_is_told(served, capsys):
    async def answer(request, body):
        return await stream(request, text("a"), text("b", "stop"), DONE)

    url = served(Scripted(answer))
    assert bench("--base-url", url, "--num-prompts", "2") == 0
    assert "counted no tokens for 2 requests: their chunks were counted" in " ".join(capsys.readouterr().out.split())


def test_nothing_answered_is_a_failure(served, capsys):
    async def answer(request, body):
        return web.json_response({"error": {"message": "[full]"}}, status=503)

    assert bench("--base-url", served(Scripted(answer)), "--num-prompts", "2") == 1
    shown = capsys.readouterr()
    assert "2 x HTTP 503: [full]" in shown.out
    assert "no request was answered (HTTP 503)" in shown.err


def test_a_server_without_models_needs_a_name(served, capsys):
    scripted = Scripted()
    scripted.models = {"data": []}
    assert bench("--base-url", served(scripted)) == 1
    assert "give --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "localhost:8000"], "--base-url must begin with http:// or https://"),
        (["--request-rate", "0"], "--request-rate must be greater than 0"),
        (["--request-rate", "nan"], "--request-rate must be greater than 0"),
        (["--burstiness", "0"], "--burstiness must be greater than 0"),
        (["--timeout", "0"], "--timeout must be greater than 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be 1 or more"),
        (["--warmup", "-1"], "--warmup must be 0 or more"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--extra-body", '{"stream": false}'], "stream must stay true"),
        (["--goodput", "speed:1"], "--goodput: 'speed:1' is not a limit"),
        (["--num-prompts", "0"], "--num-prompts must be 1 or more"),
    ],
)
def test_bad_input_is_one_sentence(capsys, arguments, message):
    assert bench(*arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_a_missing_aiohttp_is_named():
    program = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from slipstream.cli.main import main\n"
        "sys.exit(main(['bench', 'serve']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "slipstream-llm[bench]"' in done.stderr


@pytest.mark.parametrize("command", ["serve", "throughput"])
def test_help_imports_nothing_heavy(command):
    program = (
        "import sys\nfrom slipstream.cli.main import main\n"
        f"main(['bench', '{command}', '--help'])\n"
        "print([n for n in ('torch', 'numpy', 'tokenizers', 'aiohttp') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "--num-prompts" in done.stdout
