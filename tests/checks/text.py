"""The text of an answer: streamed pieces join to the whole, no half characters, stop strings cut at the right place."""

from __future__ import annotations

import hypothesis.strategies as st

from doubles.engines import Driver, check_idle, make_engine, make_inputs
from doubles.scripted_model import ScriptedModel
from doubles.small_vocabularies import byte_metadata
from slipstream.core.outputs import CompletionOutput
from slipstream.core.sampling_params import SamplingParams
from slipstream.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_gguf_metadata(
    byte_metadata("qwen2", "hello", " world", "é", "日本", "😀", marked=(("<|end|>", 3), ("<|other|>", 3)))
)
VOCAB = TOKENIZER.vocab_size
EOS = TOKENIZER.encode("<|end|>", parse_control=True)[0]
OTHER = TOKENIZER.encode("<|other|>", parse_control=True)[0]

texts = st.lists(st.sampled_from(["hello", " world", "é", "日本", "😀", "a", "b", "ab", " ", "\n", "Ω"]), max_size=10)
scripts = st.lists(
    st.one_of(
        texts.map("".join).map(TOKENIZER.encode),
        st.lists(st.integers(0, 255), max_size=5),
        st.sampled_from([[OTHER], [EOS]]),
    ),
    min_size=1,
    max_size=6,
).map(lambda parts: [token for part in parts for token in part] or [0])
stops = st.lists(st.sampled_from(["ab", "b", "lo w", "日", "😀a", "\n", "world hello", "éa"]), max_size=3)


def answer(script: list[int], params: SamplingParams) -> tuple[CompletionOutput, str, list[str]]:
    """The scripted answer: whole, its streamed pieces joined, and the pieces."""
    prompt = [1, 2, 3]
    model = ScriptedModel(script, start=len(prompt), vocab=VOCAB)
    engine = make_engine(model, eos_ids={EOS}, tokenizer=TOKENIZER)
    driver = Driver(engine)
    request = make_inputs(model, tokenizer=TOKENIZER).request(prompt, params, request_id="r")
    pieces: list[str] = []
    driver.add(request)
    while engine.has_work:
        before = len(driver.streamed.get(("r", 0), ""))
        driver.step()
        pieces.append(driver.streamed.get(("r", 0), "")[before:])
    assert driver.errors == {}
    check_idle(engine)
    return driver.output("r").outputs[0], driver.streamed[("r", 0)], pieces


def text_of(tokens: list[int], skip: bool) -> bytes:
    """The bytes of tokens, read from the vocabulary one by one."""
    kept = [t for t in tokens if not (skip and t in TOKENIZER.control_ids)]
    return b"".join(TOKENIZER.token_bytes(t) for t in kept)


def expected(script: list[int], params: SamplingParams) -> tuple[list[int], str, str | None, int | str | None]:
    """Tokens, text, finish and stop reason by looking at the whole script, token by token."""
    tokens: list[int] = []
    for token in script + [script[-1]] * (params.max_tokens or 0):
        tokens.append(token)
        ends_quietly = token == EOS or token in params.stop_token_ids
        shown = tokens[:-1] if ends_quietly and not params.include_stop_str_in_output else tokens
        data = text_of(shown, params.skip_special_tokens)
        last = ends_quietly or len(tokens) == params.max_tokens
        text = data.decode("utf-8", "replace") if last else data.decode("utf-8", "ignore")
        if not last:
            text = complete_part(data)
        matches = [(text.find(s) + len(s), -len(s), s) for s in params.stop if s in text]
        if matches:
            end, _, stop = min(matches)
            return tokens, text[: end if params.include_stop_str_in_output else end - len(stop)], "stop", stop
        if token == EOS:
            return tokens, text, "stop", None
        if token in params.stop_token_ids:
            return tokens, text, "stop", token
        if len(tokens) == params.max_tokens:
            return tokens, text, "length", None
    raise AssertionError("a script never ends")


def complete_part(data: bytes) -> str:
    """The text of bytes without an unfinished character at their end."""
    for cut in range(4):
        kept = data[: len(data) - cut]
        rest = data[len(data) - cut :]
        text = kept.decode("utf-8", "replace")
        if (kept + rest).decode("utf-8", "replace").startswith(text) and (rest == b"" or is_unfinished(rest)):
            return text
    return data.decode("utf-8", "replace")


def is_unfinished(rest: bytes) -> bool:
    """Whether bytes could become one character with more bytes."""
    need = 2 if 0xC2 <= rest[0] <= 0xDF else 3 if 0xE0 <= rest[0] <= 0xEF else 4 if 0xF0 <= rest[0] <= 0xF4 else 0
    if not 0 < len(rest) < need:
        return False
    tails = (b"\x80", b"\xbf", b"\x90", b"\xa0", b"\x9f", b"\x8f")
    fills = [t + b"\x80\x80" for t in tails] if len(rest) == 1 else [b"\x80\x80"]
    for fill in fills:
        try:
            (rest + fill[: need - len(rest)]).decode("utf-8")
        except UnicodeDecodeError:
            continue
        return True
    return False


cases = st.fixed_dictionaries(
    {
        "script": scripts,
        "stop": stops,
        "include": st.booleans(),
        "skip": st.booleans(),
        "stop_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "max_tokens": st.integers(1, 30),
    }
)


def check_streamed_text(
    script: list[int], stop: list[str], include: bool, skip: bool, stop_ids: list[int], max_tokens: int
) -> None:
    """Pieces join to the whole text, which ends at the first stop string, token or limit."""
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    choice, streamed, pieces = answer(script, params)
    tokens, text, finish, reason = expected(script, params)
    assert choice.token_ids == tokens
    assert choice.text == text
    assert streamed == text
    assert (choice.finish_reason, choice.stop_reason) == (finish, reason)
    for piece in pieces[:-1]:
        # Nothing is sent that may still belong to a stop string, so no prefix of the stream contains a whole one.
        assert all(s not in piece for s in stop) or include


def check_text_is_prompt() -> None:
    """Text leaves as soon as it is certain, and not before."""
    script = TOKENIZER.encode("hello world a")
    _, _, pieces = answer([*script, EOS], SamplingParams(temperature=0, max_tokens=40, stop=["wonder"]))
    assert pieces[0] == "hello"
    assert "".join(pieces) == "hello world a"


def check_echo() -> None:
    """With `echo` every choice's text begins with the prompt, also one given as ids."""
    model = ScriptedModel(TOKENIZER.encode(" world"), start=1, vocab=VOCAB)
    engine = make_engine(model, eos_ids={EOS}, tokenizer=TOKENIZER)
    driver = Driver(engine)
    params = SamplingParams(temperature=0, max_tokens=1, echo=True, n=2)
    inputs = make_inputs(model, tokenizer=TOKENIZER)
    driver.run([inputs.request("hello", params, request_id="text")])
    driver.run([inputs.request(TOKENIZER.encode("hello"), params, request_id="ids")])
    for name in ("text", "ids"):
        assert [choice.text for choice in driver.output(name).outputs] == ["hello world", "hello world"]


def check_min_tokens_before_stop_strings() -> None:
    """Stop strings count only after `min_tokens`."""
    script = TOKENIZER.encode("abababab")
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=4, stop=["ab"])
    choice, streamed, _ = answer(script, params)
    assert len(choice.token_ids) > 4
    assert choice.finish_reason == "stop"
    assert choice.text == streamed


def check_min_tokens_before_end_tokens() -> None:
    """A model that wants to end at once ends right after `min_tokens`, by its own token or by the caller's."""
    wish = TOKENIZER.encode("a")[0]
    for least in range(4):
        for end, stop_ids in ((EOS, ()), (wish, (wish,))):
            params = SamplingParams(temperature=0, max_tokens=8, min_tokens=least, stop_token_ids=stop_ids)
            choice, _, _ = answer([end] * 9, params)
            assert choice.token_ids.index(end) == least
            assert len(choice.token_ids) == least + 1


SCENARIOS = [
    check_text_is_prompt,
    check_echo,
    check_min_tokens_before_stop_strings,
    check_min_tokens_before_end_tokens,
]
