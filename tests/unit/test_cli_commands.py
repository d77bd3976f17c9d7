"""The commands with a stand-in for the model."""

from __future__ import annotations

import io
import json

import pytest

from doubles.echo_llm import EchoLLM
from slipstream.cli import session
from slipstream.cli.flags import FLAGS
from slipstream.cli.main import main
from slipstream.core.errors import EngineDeadError, LoadError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in (*(flag.env for flag in FLAGS), "SLIPSTREAM_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def llm(monkeypatch):
    """The stand-in that the next command will load; its settings are known afterwards."""
    made = EchoLLM()

    def make(settings, progress):
        progress("loading", 1, 2)
        made.settings = dict(settings)
        return made

    monkeypatch.setattr(session, "make_llm", make)
    return made


def test_generate_streams_the_answer_through_the_template(llm, capsys):
    assert main(["generate", "hello there"]) == 0
    assert capsys.readouterr().out == "HELLO THERE\n"
    asked, params = llm.asked[0]
    assert asked == [{"role": "user", "content": "hello there"}]
    assert (params.temperature, params.top_k) == (0.5, 7)  # as the model publishes them
    assert llm.settings == {}
    assert llm.shut_down


def test_raw_continues_the_text(llm, capsys):
    assert main(["generate", "--raw", "hello"]) == 0
    assert llm.asked[0][0] == "hello"
    assert capsys.readouterr().out == "HELLO\n"


def test_without_a_template_text_is_continued(llm):
    llm.loaded.inputs.template = None
    assert main(["generate", "hello"]) == 0
    assert llm.asked[0][0] == "hello"


@pytest.mark.parametrize(
    ("arguments", "model", "prompt"),
    [
        (["P"], None, "P"),
        (["M", "P"], "M", "P"),
        (["M", "--prompt", "P"], "M", "P"),
        (["--model", "M", "P"], "M", "P"),
        (["--model", "M", "--prompt", "P"], "M", "P"),
        (["--model-path", "M", "-p", "P"], "M", "P"),
    ],
)
def test_which_argument_is_the_model_and_which_the_prompt(llm, arguments, model, prompt):
    assert main(["generate", *arguments]) == 0
    assert llm.settings.get("model") == model
    assert llm.asked[0][0][-1]["content"] == prompt


def test_a_model_by_position_wins_over_the_environment(llm, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_MODEL", "E")
    assert main(["generate", "M", "P"]) == 0
    assert llm.settings["model"] == "M"


def test_flags_reach_the_engine_and_the_request(llm):
    flags = "--max-running-requests 3 --disable-radix-cache --cache-memory 1MiB --max-new-tokens 9 --random-seed 4"
    more = "--temperature 0 --stop a --stop b --stop-token-ids 1,2 --logit-bias 3=-1.5 --ignore-eos --min-p 0.1"
    assert main(["generate", "x", *flags.split(), *more.split()]) == 0
    assert llm.settings == {"max_num_seqs": 3, "prefix_caching": False, "cache_memory": 2**20}
    params = llm.asked[0][1]
    assert (params.max_tokens, params.seed, params.temperature, params.min_p) == (9, 4, 0.0, 0.1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("a", "b"), (1, 2), True)
    assert params.logit_bias == {3: -1.5}


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("--prefix-caching", True),
        ("--no-prefix-caching", False),
        ("--enable-prefix-caching", True),
        ("--no-enable-prefix-caching", False),
        ("--disable-radix-cache", False),
    ],
)
def test_spellings_of_prefix_caching(llm, spelling, value):
    assert main(["generate", "x", spelling]) == 0
    assert llm.settings == {"prefix_caching": value}


def test_json_is_one_object_with_the_fields_that_scripts_use(llm, capsys):
    arguments = "--model M --prompt P --max-tokens 5 --temperature 0 --json"
    assert main(["generate", *arguments.split()]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "P",
        "token_ids": [0],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "total_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "seed": 99,
        "prompt_token_ids": [0],
    }


def test_json_with_logprobs_and_several_choices(llm, capsys):
    assert main(["generate", "a b", "--json", "--logprobs", "1", "--n", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    token = {"token_id": 5, "token": "x", "logprob": -0.5, "rank": 2}
    other = {"token_id": 6, "token": "y", "logprob": -0.25, "rank": 1}
    assert found["logprobs"] == [{**token, "alternatives": [other]}] * 2
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["usage"]["completion_tokens"] == 4


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"turns": ["two", "three four"], "id": 7}\n', encoding="utf-8")
    return file


def test_a_prompt_file_gives_a_json_line_each(llm, prompts, capsys):
    assert main(["generate", "--prompt-file", str(prompts), "--json"]) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["text"] == "ONE"
    assert "turns" not in one
    assert two["text"] == "THREE FOUR"
    assert two["turns"] == ["TWO", "THREE FOUR"]
    assert two["turns_token_ids"] == [[0], [0, 1]]
    assert two["token_ids"] == [0, 1]
    assert two["usage"]["completion_tokens"] == 3
    assert llm.asked[-1][0] == [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "TWO"},
        {"role": "user", "content": "three four"},
    ]


def test_a_prompt_file_as_text(llm, prompts, capsys):
    assert main(["generate", "M", "--prompt-file", str(prompts)]) == 0
    assert capsys.readouterr().out == "ONE\nTWO\nTHREE FOUR\n"
    assert llm.settings == {"model": "M"}


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": "a", "turns": ["b"]}', '{"turns": []}', '{"turns": [1]}', '{"prompt": ""}']
)
def test_a_wrong_line_of_a_prompt_file_is_named(llm, tmp_path, capsys, line):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["generate", "--prompt-file", str(file)]) == 2
    assert "p.jsonl line 2" in capsys.readouterr().err
    assert not llm.asked


def test_several_turns_need_a_template(llm, prompts, capsys):
    assert main(["generate", "--raw", "--prompt-file", str(prompts)]) == 2
    assert "line 3 has several turns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "there is no prompt"),
        (["generate", "a", "b", "c"], "one argument too many"),
        (["generate", "--prompt", "a", "b", "c"], "one argument too many"),
        (["generate", "--model", "M", "N", "P"], "the model is given twice"),
        (["generate", "x", "--prompt", "a", "--prompt-file", "b"], "exclude each other"),
        (["generate", "--prompt-file", "/nowhere.jsonl"], "cannot be read"),
        (["generate", "x", "--temperature", "warm"], "--temperature: 'warm' is not a number"),
        (["generate", "x", "--temperature", "-1"], "temperature must be a finite number of 0 or more"),
        (["generate", "x", "--colour", "red"], "No such option"),
        (["generate", "x", "--context-length", "5", "--max-model-len", "6"], "are the same setting"),
        (["generate", "word " * 51], "the prompt has 51 tokens"),
        (["bench", "latency", "--output-len", "1"], "--output-len must be 2 or more"),
        (["bench", "latency", "--repeats", "0"], "--repeats must be 1 or more"),
        (["bench", "latency", "--prefix-caching"], "No such option"),
        (["nonsense"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(llm, capsys, arguments, message):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("error", [LoadError("no such model"), EngineDeadError("it died"), RuntimeError("oops")])
def test_other_errors_are_one_sentence_and_exit_code_1(monkeypatch, capsys, error):
    def make(settings, progress):
        raise error

    monkeypatch.setattr(session, "make_llm", make)
    assert main(["generate", "x"]) == 1
    shown = capsys.readouterr().err
    assert str(error) in shown
    assert shown.count("\n") == 1
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")
    with pytest.raises(type(error)):
        main(["generate", "x"])


def test_ctrl_c_ends_generate_with_130(llm, capsys):
    llm.interrupt_at = 1
    assert main(["generate", "a b c"]) == 130
    assert capsys.readouterr().out == "A\n"
    assert llm.shut_down


def talk(monkeypatch, *lines: str, flags: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return main(["chat", *flags])


def test_chat_keeps_the_conversation(llm, monkeypatch, capsys):
    assert talk(monkeypatch, "hi", "", "how are you", flags=("--system", "Be brief.", "--temperature", "0")) == 0
    shown = capsys.readouterr()
    assert shown.out == "HI\nHOW ARE YOU\n"
    assert llm.asked[1][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "HI"},
        {"role": "user", "content": "how are you"},
    ]
    assert llm.asked[1][1].temperature == 0
    assert "echo" in shown.err
    assert "50 words" in shown.err
    assert "3 tokens · 10.0 tokens/s · first after 250 ms" in shown.err
    assert llm.shut_down


def test_chat_commands(llm, monkeypatch, capsys):
    assert talk(monkeypatch, "/help", "hi", "/clear", "one", "/system Rhyme.", "two", "/what", "/exit", "three") == 0
    shown = capsys.readouterr()
    assert shown.out == "HI\nONE\nTWO\n"
    assert llm.asked[1][0] == [{"role": "user", "content": "one"}]
    assert llm.asked[2][0] == [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "two"}]
    assert "Ctrl-C stops an answer" in shown.err
    assert "there is no command /what" in shown.err


def test_ctrl_c_stops_one_answer_of_a_chat(llm, monkeypatch, capsys):
    llm.interrupt_at = 1
    assert talk(monkeypatch, "one two", "x") == 0
    shown = capsys.readouterr()
    assert shown.out == "ONE\nX\n"
    assert "stopped" in shown.err
    assert llm.asked[1][0][1] == {"role": "assistant", "content": "ONE"}


def test_a_turn_that_is_too_long_leaves_no_trace_in_a_chat(llm, monkeypatch, capsys):
    assert talk(monkeypatch, "word " * 51, "hi") == 0
    assert "the prompt has 51 tokens" in capsys.readouterr().err
    assert llm.asked[1][0] == [{"role": "user", "content": "hi"}]


def test_chat_needs_a_template(llm, monkeypatch, capsys):
    llm.loaded.inputs.template = None
    assert talk(monkeypatch, "hi") == 2
    assert "no chat template" in capsys.readouterr().err


def test_version(capsys):
    assert main(["version"]) == 0
    first = capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("slipstream ")


@pytest.mark.parametrize("group", ["models", "bench"])
def test_a_group_without_a_command_shows_its_help(capsys, group):
    assert main([group]) == 2
    shown = capsys.readouterr()
    assert "Usage" in shown.out + shown.err
    assert "error" not in shown.err


def test_models_list_as_json(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    assert main(["models", "list", "--json"]) == 0
    (model,) = [row for row in json.loads(capsys.readouterr().out) if row["default"]]
    assert model["path"] is None
    assert model["bytes"] > 10**7
    assert main(["models", "info", model["name"]]) == 1
    assert "models fetch" in capsys.readouterr().err
