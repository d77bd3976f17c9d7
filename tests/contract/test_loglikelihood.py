"""Log-likelihoods through /v1/completions, asked for and read as lm-evaluation-harness 0.4.13 does.

That is its model `local-completions`; bench/evals.py runs the harness itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.contract_model import NAMES
from doubles.hash_model import WindowedReference
from doubles.served import Serving

BENCH = Path(__file__).parents[2] / "bench"
FILES = ("continuations", "beginnings")
Document = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""


def body_for(documents: Sequence[Document], model: str) -> dict[str, Any]:
    """The harness's request. It asks for one token more than it wants, and leaves that out when it reads the answer."""
    return {
        "model": model,
        "prompt": [context + continuation for context, continuation in documents],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def read(answer: dict[str, Any], documents: Sequence[Document], generated: int = 1) -> list[tuple[float, bool]]:
    """(log-likelihood, is greedy) of each continuation, by the harness's rules."""
    choices = sorted(answer["choices"], key=itemgetter("index"))
    assert len(choices) == len(documents)
    found = []
    for choice, (context, continuation) in zip(choices, documents, strict=True):
        lists = choice["logprobs"]
        total = len(context) + len(continuation)
        assert {len(values) for values in lists.values()} == {total + generated}
        logprobs = lists["token_logprobs"][len(context) : total]
        tops = lists["top_logprobs"][len(context) : total]
        greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), greedy))
    return found


def ask(http: httpx.Client, documents: Sequence[Document], **changes: Any) -> list[tuple[float, bool]]:
    body = body_for(documents, NAMES[0]) | changes
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return read(response.json(), documents, generated=body["max_tokens"])


def computed(reference: WindowedReference, document: Document) -> tuple[float, bool]:
    """The same without server, engine, cache or batch."""
    context, continuation = document
    total, greedy = 0.0, True
    for index, token in enumerate(continuation):
        logits = reference.logits(context + continuation[:index]).double()
        total += float(logits.log_softmax(-1)[token])
        greedy &= int(logits.argmax()) == token
    return total, greedy


def most_likely(reference: WindowedReference, context: list[int], count: int) -> list[int]:
    ids = list(context)
    for _ in range(count):
        ids.append(int(reference.logits(ids).argmax()))
    return ids[len(context) :]


TOKENS = st.integers(0, 263)
"""Bytes, which are not all characters, and words."""
DOCUMENTS = st.lists(
    st.tuples(
        st.lists(TOKENS, min_size=1, max_size=40),
        st.one_of(st.lists(TOKENS, min_size=1, max_size=12), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(drawn=DOCUMENTS, kept=st.sampled_from((0, 1)))
def test_token_ids_get_the_models_own_log_likelihoods(
    http: httpx.Client, server: Serving, drawn: list[tuple[list[int], list[int] | int]], kept: int
) -> None:
    """`max_tokens` 0 scores the prompt alone. A number for a continuation: so many of the most likely tokens."""
    reference = WindowedReference(server.model)
    documents = [
        (context, most_likely(reference, context, wanted) if isinstance(wanted, int) else wanted)
        for context, wanted in drawn
    ]
    found = ask(http, documents, max_tokens=kept)
    for document, (_, wanted), (logprob, greedy) in zip(documents, drawn, found, strict=True):
        expected, expected_greedy = computed(reference, document)
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert greedy == expected_greedy
        assert greedy or not isinstance(wanted, int)


def test_text_gets_the_log_likelihoods_of_its_tokens(http: httpx.Client) -> None:
    texts = ["How are the others doing?", "1, 2, 3"]
    bodies = [{"prompt": text, "add_special_tokens": False} for text in texts]
    ids = [http.post("/tokenize", json=body).raise_for_status().json()["tokens"] for body in bodies]
    assert len(ids[0]) < len(texts[0])
    documents = [(found[:4], found[4:]) for found in ids]
    whole = ask(http, documents)
    assert ask(http, documents, prompt=texts, add_special_tokens=False) == whole
    assert ask(http, documents[:1], prompt=texts[0], add_special_tokens=False) == whole[:1]


def test_a_repeated_document_gets_the_same_bits(http: httpx.Client) -> None:
    documents = [(list(range(90)), list(range(20, 30))), ([7], [8, 9])]
    alone = [ask(http, [document])[0] for document in documents]
    assert ask(http, [*documents, *documents]) == alone * 2


@pytest.fixture
def evals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import evals

    yield evals
    for name in ("evals", "parity"):
        sys.modules.pop(name, None)


def test_the_bench_tells_right_answers_from_wrong_ones(evals: Any) -> None:
    logits = torch.zeros(3, 300)
    logits[0, 98], logits[1, 99], logits[2, 100] = 4.0, 3.0, 2.0

    def model(input_ids: torch.Tensor, logits_to_keep: int) -> Any:
        assert input_ids.tolist() == [[97, 98, 99]]  # the last token has nothing to predict
        assert logits_to_keep == 3
        return SimpleNamespace(logits=logits[None])

    class Letters:
        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(input_ids=list(text.encode()))

    right = float(logits.double().log_softmax(-1)[[0, 1, 2], [98, 99, 100]].sum())

    def counts(logprob: float, greedy: bool) -> Any:
        sample = {
            "arguments": {"gen_args_0": {"arg_0": "a", "arg_1": "bcd"}},
            "resps": [[[str(logprob), str(greedy)]]],
        }
        return evals.compare([sample], model, Letters())

    assert counts(right, True).equal
    assert counts(right, True).tokens == 3
    assert not counts(right, False).equal
    assert not counts(right + 0.002, True).equal
    logits[1, 5] = 2.9995
    assert counts(float(logits.double().log_softmax(-1)[[0, 1, 2], [98, 99, 100]].sum()), False).ties == 1


def test_the_bench_cuts_documents_as_the_harness_does(evals: Any) -> None:
    class Words:
        bos_token_id = -1

        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            assert not add_special_tokens
            return SimpleNamespace(input_ids=list(text))

    assert evals.split(Words(), "ab  ", "c") == (["a", "b"], [" ", " ", "c"])
    assert evals.split(Words(), "", "c") == ([-1], ["c"])


@pytest.mark.slow
def test_log_likelihoods_equal_transformers(
    evals: Any, default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("SLIPSTREAM_NUMERICS", "reference")  # only those are transformers'

    tokenizer = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    lines = {name: (BENCH / "eval_tasks" / f"{name}.jsonl").read_text("utf-8").splitlines() for name in FILES}
    rows = [json.loads(line) for line in [*lines["continuations"][:16], *lines["beginnings"]]]
    documents = [evals.split(tokenizer, row["context"], row["continuation"]) for row in rows]
    torch.set_num_threads(1)
    with evals.server(default_model_path, 1, tmp_path / "log") as url:
        answers = []
        for begin in range(0, len(documents), 6):
            part = documents[begin : begin + 6]
            response = httpx.post(f"{url}/v1/completions", json=body_for(part, "served"), timeout=300)
            answers += read(response.raise_for_status().json(), part)
    model = evals.transformers_model(default_model_path)
    seen = set()
    for document, (logprob, greedy) in zip(documents, answers, strict=True):
        expected, expected_greedy, gap = evals.score(model, *document)
        assert logprob == pytest.approx(expected, abs=evals.LIMIT)
        if gap >= evals.LIMIT:
            assert greedy == expected_greedy
            seen.add(greedy)
    assert seen == {True, False}
