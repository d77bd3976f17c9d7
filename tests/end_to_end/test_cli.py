"""The command as a user runs it, with the default model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from doubles.native_programs import libraries, why_missing
from slipstream.kernels.cpu.library import ISAS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_model_path")]

MODEL = "smollm2-135m-instruct"
COMMAND = [sys.executable, "-m", "slipstream"]

needs_library = pytest.mark.skipif(not libraries(), reason=why_missing())


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}
    if "SLIPSTREAM_CACHE_DIR" in os.environ:
        clean["SLIPSTREAM_CACHE_DIR"] = os.environ["SLIPSTREAM_CACHE_DIR"]
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=300, env=clean | environment
    )


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_generate_json_is_what_scripts_rely_on():
    flags = ["--max-tokens", "6", "--temperature", "0", "--json", "--logprobs", "1"]
    found = json.loads(check(run("generate", "--model", MODEL, "--prompt", "What is 2+2?", *flags)))
    assert len(found["token_ids"]) == 6 == found["usage"]["completion_tokens"]
    assert found["finish_reason"] == "length"
    assert found["text"]
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert isinstance(found["seed"], int)
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert all(entry["rank"] == 1 for entry in found["logprobs"])
    # The same request, streamed as text, from the default model and with its settings from the environment.
    streamed = run("generate", "What is 2+2?", SLIPSTREAM_MAX_TOKENS="6", SLIPSTREAM_TEMPERATURE="0")
    assert check(streamed) == found["text"] + "\n"
    assert streamed.stderr == ""


def test_raw_prompts_are_continued():
    flags = ["--raw", "--json", "--max-tokens", "3", "--temperature", "0"]
    found = json.loads(check(run("generate", "The capital of France is", *flags)))
    assert found["usage"]["prompt_tokens"] == 5
    assert "Paris" in found["text"]


def test_a_prompt_file_with_turns_equals_its_prompts_alone(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["Name a colour.", "Another one."]}, {"prompt": "Name a colour."}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = check(run("generate", "--prompt-file", str(file), "--json", "--max-tokens", "5", "--temperature", "0"))
    conversation, single = map(json.loads, out.splitlines())
    assert len(conversation["turns"]) == 2
    assert conversation["turns"][0] == single["text"]
    assert conversation["text"] == conversation["turns"][1]
    assert conversation["usage"]["completion_tokens"] == sum(map(len, conversation["turns_token_ids"]))


def test_chat_by_pipe():
    done = run("chat", "--max-tokens", "8", "--temperature", "0", stdin="hi\n/clear\nhi\n")
    first, second = check(done).splitlines()
    assert first == second != ""
    assert "tokens/s" in done.stderr
    assert "context" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "x", "--model", "/no/such.gguf"], 1, "/no/such.gguf"),
        (["generate", "x", "--max-tokens", "-1"], 2, "--max-tokens must be"),
        (["generate", "x", "--max-model-len", "999999"], 2, "--max-model-len 999999 is more than"),
        (["generate", "word " * 300, "--max-model-len", "100"], 2, "context"),
        (["generate", "x", "--page-size", "33"], 2, "--page-size must be"),
        (["generate", "x", "--cache-memory", "1kB"], 2, "--cache-memory"),
        (["generate", "x", "--stop-token-ids", "999999"], 2, "--stop-token-ids must be"),
    ],
)
def test_errors(arguments, code, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_a_running_answer():
    arguments = ["generate", "Count to a thousand.", "--ignore-eos", "--temperature", "0"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_models_info():
    found = json.loads(check(run("models", "info", "--json")))
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["chat_template"] is True
    assert found["vocab_size"] == 49152
    assert found["context_length"] == 8192
    assert sum(found["bytes_per_format"].values()) == found["bytes"]
    assert "LlamaForCausalLM" in check(run("models", "info", MODEL))


def test_models_fetch_prints_the_path(default_model_path):
    assert check(run("models", "fetch")) == f"{default_model_path}\n"


def test_doctor():
    flags = ["doctor", "--json", "--threads", "1", "--page-size", "16"]
    found = json.loads(check(run(*flags, "--numerics", "reference")))
    assert found["threads"] == {"count": 1, "why": "as set"}
    assert found["numerics"].startswith("reference: ")
    assert found["ops"]["paged_attention"] != "reference"
    model = found["model"]
    assert model["loaded_bytes"] == 4 * 134_515_008
    assert model["page_bytes"] == 30 * 2 * 3 * 64 * 16 * 4
    assert "paged_attention" in check(run("doctor"))


@needs_library
def test_doctor_shows_the_native_step_by_default():
    found = json.loads(check(run("doctor", "--json", "--page-size", "16")))
    assert found["numerics"].startswith("native: ")
    assert found["ops"]["paged_attention"] == "attend"
    assert found["ops"]["moe"] == "not in this model"
    model = found["model"]
    assert model["loaded_as"] == "packed"
    assert model["loaded_bytes"] < 100 * 2**20
    assert model["page_bytes"] == 30 * 2 * 3 * 64 * 16 * 2


@pytest.mark.parametrize("numerics", ["auto", "reference"])
def test_doctor_checks_invariance(numerics):
    found = json.loads(check(run("doctor", "--invariance", "--json", "--numerics", numerics)))
    assert found["invariance"]["ok"] is True
    assert found["invariance"]["differences"] == []
    assert len(found["invariance"]["ways"]) >= 3


@needs_library
def test_the_instruction_set_changes_no_bit():
    flags = ["--max-tokens", "12", "--seed", "3", "--json", "--logprobs", "2", "--numerics", "native"]
    answers = []
    for library in libraries():
        chosen = ISAS[library.isa]
        done = run("generate", "Tell me about the sea.", *flags, SLIPSTREAM_NATIVE_ISA=chosen)
        found = json.loads(check(done))
        answers.append((found["token_ids"], found["logprobs"], found["text"]))
    assert answers == answers[:1] * len(answers)


def test_bench_latency(tmp_path):
    file = tmp_path / "latency.json"
    shape = ["--input-len", "16", "--output-len", "4", "--batch-size", "2", "--repeats", "2"]
    out = check(run("bench", "latency", "--model", MODEL, *shape, "--json", str(file)))
    assert "decode, tokens/s" in out
    found = json.loads(file.read_text())
    for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "ttft_ms", "inter_token_ms"):
        assert set(found[name]) == {"median", "min", "max", "p95"}
        assert 0 < found[name]["min"] <= found[name]["median"] <= found[name]["p95"] <= found[name]["max"]
    share = found["bandwidth_share"]
    assert {"median", "min", "max", "p95", "probed_gb_per_s"} <= set(share)
    assert share["probed_gb_per_s"]["min"] > 0
    assert share["runs_used"] + share["runs_dropped"] == 2
    assert isinstance(found["disturbed"], bool)
    assert {"model", "numerics", "threads", "cpu", "torch", "command", "date"} <= set(found["conditions"])
    to_stdout = run("bench", "latency", *shape, "--warmup", "0", "--json", "-")
    assert set(json.loads(check(to_stdout))) == set(found)
    assert "decode, tokens/s" in to_stdout.stderr
