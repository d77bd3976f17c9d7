"""The comparison with other engines: its statistics, the files it makes, its processes, its table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from scipy.stats import bootstrap

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from pairs import Pair, interval, ratio
from peer_engines import comparison as comparison_module
from peer_engines.batches import Batches, BatchPlan, batch_table, prompts
from peer_engines.comparison import Comparison, equal_tokens
from peer_engines.environments import requirements_without
from peer_engines.merge import merged
from peer_engines.plan import Plan, spread_over
from peer_engines.report import flags, rows, table
from peer_engines.requantize import made, requantize
from peer_engines.subjects import PEERS, SLIPSTREAM, Subject, chosen
from peer_engines.worker import PeerError, Worker

BENCH = Path(__file__).parents[2] / "bench"
EVEN = (40e9, 40e9, 40e9)


# Pairs


@pytest.mark.parametrize("seed", range(3))
def test_interval_is_scipys(seed: int) -> None:
    chooser = random.Random(seed)
    ratios = [chooser.lognormvariate(0, 0.2) for _ in range(41)]
    found = interval(ratios, draws=4000)
    expected = bootstrap((ratios,), np.median, n_resamples=4000, method="percentile", rng=seed).confidence_interval
    assert found["median"] == statistics.median(ratios)
    assert found["low"] == pytest.approx(expected.low, rel=0.03)
    assert found["high"] == pytest.approx(expected.high, rel=0.03)


def test_interval_says_the_same_each_time_and_has_no_width_for_equal_ratios() -> None:
    ratios = [1.0, 1.2, 0.9, 1.4, 1.1]
    assert interval(ratios) == interval(ratios)
    assert interval([2.0] * 5) == {"median": 2.0, "low": 2.0, "high": 2.0, "pairs": 5}


@pytest.mark.parametrize(("probes", "disturbed"), [(EVEN, False), ((40, 45.9, 40), False), ((40, 40, 46.1), True)])
def test_a_pair_is_disturbed_by_over_15_percent(probes: tuple[float, ...], disturbed: bool) -> None:
    assert Pair(1, 1, probes).disturbed is disturbed


def test_disturbed_pairs_are_dropped_and_counted() -> None:
    steady = [Pair(first, 1.0, EVEN) for first in (2.0, 2.1, 2.2)]
    assert ratio([*steady, Pair(900.0, 1.0, (40, 80, 40))]) == {**interval([2.0, 2.1, 2.2]), "dropped": 1}
    nothing = ratio([Pair(1.0, 1.0, (1, 2))])
    assert nothing == {"median": None, "low": None, "high": None, "pairs": 0, "dropped": 1}


# Files


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """A GGUF file with a tensor of each kind that the default model has, and metadata of all kinds."""
    draw = np.random.default_rng(0).standard_normal
    path = tmp_path / "Small.Q4_1.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_file_type(3)
    writer.add_block_count(2)
    writer.add_rope_freq_base(1e5)
    writer.add_add_bos_token(False)
    writer.add_token_list(["a", "<b>", "\u00e9"])
    writer.add_token_types([1, 3, 1])
    writer.add_key_value("general.languages", ["en"], GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
    writer.add_tensor("output_norm.weight", draw(64).astype(np.float32))
    for name, shape, kind in (("token_embd.weight", (3, 64), "Q8_0"), ("blk.0.attn_q.weight", (32, 64), "Q4_1")):
        dtype = GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(draw(shape).astype(np.float32), dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(reader: GGUFReader) -> dict[str, Any]:
    return {name: (field.types, field.contents()) for name, field in reader.fields.items()}


@pytest.mark.parametrize(("kind", "file_type"), [("Q4_0", 2), ("Q8_0", 7)])
def test_requantized_file(small_file: Path, tmp_path: Path, kind: str, file_type: int) -> None:
    requantize(small_file, tmp_path / "other.gguf", kind)
    before, after = GGUFReader(small_file), GGUFReader(tmp_path / "other.gguf")
    expected = contents(before)
    expected["general.file_type"] = ([GGUFValueType.UINT32], file_type)
    assert contents(after) == expected
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (new.name, new.shape.tolist()) == (old.name, old.shape.tolist())
        if old.name == "blk.0.attn_q.weight":
            wanted = GGMLQuantizationType[kind]
            assert new.tensor_type == wanted
            values = gguf.dequantize(old.data, GGMLQuantizationType.Q4_1)
            np.testing.assert_array_equal(new.data, gguf.quantize(values, wanted))
            step = np.abs(values).max() / (8 if kind == "Q4_0" else 127)
            assert np.abs(gguf.dequantize(new.data, wanted) - values).max() <= step
        else:
            assert new.tensor_type == old.tensor_type
            np.testing.assert_array_equal(new.data, old.data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Small.Q4_1.gguf", "other.gguf"]


def test_files_are_made_once(small_file: Path, tmp_path: Path) -> None:
    assert made(small_file, tmp_path / "cache", "Q4_1") == small_file
    first = made(small_file, tmp_path / "cache", "Q8_0")
    assert first == tmp_path / "cache" / "Small.Q8_0.gguf"
    written = first.stat().st_mtime_ns
    assert made(small_file, tmp_path / "cache", "Q8_0").stat().st_mtime_ns == written


def test_requirements_lose_extras_and_what_is_left_out() -> None:
    metadata = (
        "Metadata-Version: 2.4\nName: some-engine\n"
        "Requires-Dist: torch==2.13.0\nRequires-Dist: torchaudio; python_version > '3'\n"
        "Requires-Dist: numpy<3,>=2\nRequires-Dist: torch_c_dlpack_ext\n"
        "Requires-Dist: pandas; extra == 'bench'\nRequires-Dist: six; python_version > '3.1'\n\nText\n"
    )
    kept = requirements_without(metadata, frozenset({"torch", "torchaudio"}))
    assert kept == ["numpy<3,>=2", "torch_c_dlpack_ext", "six; python_version > '3.1'"]


# Processes

STAND_IN = """
import sys, time
from peer_engines.worker_loop import Stopwatch, serve
name, pace = sys.argv[1], float(sys.argv[2])
class StandIn:
    made = 0
    def describe(self, shapes):
        return {"version": name, "bytes_per_step": [1e6] * len(shapes)}
    def encode(self, text):
        return {"tokens": list(range(len(text)))}
    def score(self, prompt, tokens):
        return {"logprob": -1.0}
    def generate(self, prompt, count):
        self.made += 1
        if name == "faulty" and self.made > 2:
            raise RuntimeError("out of memory")
        print("a library's own words")
        watch, tokens = Stopwatch(), []
        for i in range(count):
            time.sleep(pace)
            watch.note()
            tokens.append(i)
        return {"tokens": tokens, "times": watch.times}
    def batch(self, prompts, count):
        begin = time.perf_counter()
        time.sleep(pace * count)
        return {"seconds": time.perf_counter() - begin, "tokens": len(prompts) * count}
    def tick(self, seconds):
        time.sleep(seconds)
        return {"done": True}
def load():
    if name == "broken":
        raise OSError("no such model")
    return StandIn()
serve(load)
"""


@dataclasses.dataclass(frozen=True)
class StandIn(Subject):
    """A subject that sleeps between tokens in place of computing them."""

    pace: float = 0.001
    folder: Path = Path()

    def start(self, model: Path, threads: int) -> Worker:
        script = self.folder / "stand_in.py"
        script.write_text(STAND_IN)
        log = self.folder / f"{self.name}.log"
        return Worker(self.name, [sys.executable, str(script), self.name, str(self.pace)], log)


def state(worker: Worker) -> str:
    """What the system says of the process: T is stopped."""
    return Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def stand_in(folder: Path, name: str, pace: float = 0.001, against: str = "") -> StandIn:
    return StandIn(name, name, "", "none", "", against=against, pace=pace, folder=folder)


def test_a_stopped_worker_stands_still(tmp_path: Path) -> None:
    worker = stand_in(tmp_path, "some").start(Path(), 1)
    try:
        assert worker.wait_loaded() >= 0
        worker.pause()
        deadline = time.monotonic() + 5
        while state(worker) != "T":
            assert time.monotonic() < deadline
        worker.resume()
        assert worker.call("tick", seconds=0.01) == {"done": True}
        assert worker.call("generate", prompt=[1], count=2)["tokens"] == [0, 1]
        assert "a library's own words" in worker.log.read_text()
    finally:
        worker.pause()
        worker.close()
    assert worker._process.returncode == 0


def test_a_worker_that_fails_or_is_late_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = stand_in(tmp_path, "broken").start(Path(), 1)
    with pytest.raises(PeerError, match="broken: OSError: no such model"):
        worker.wait_loaded()
    worker.close()
    worker = stand_in(tmp_path, "slow").start(Path(), 1)
    worker.wait_loaded()
    monkeypatch.setattr("peer_engines.worker.PIECE_SECONDS", 0.1)
    monkeypatch.setattr("peer_engines.worker.CLOSE_SECONDS", 0.1)
    with pytest.raises(PeerError, match="slow: no answer in 0 seconds"):
        worker.call("tick", seconds=60)
    begin = time.monotonic()
    worker.close()
    assert time.monotonic() - begin < 10


def test_a_worker_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    worker = Worker("gone", [sys.executable, "-c", "import sys; sys.exit('killed for memory')"], tmp_path / "log")
    with pytest.raises(PeerError, match="gone: the process ended; killed for memory"):
        worker.wait_loaded()
    with pytest.raises(PeerError, match=r"gone: .*killed for memory"):
        worker.call("tick", seconds=0)
    worker.close()


HARNESS = """
import sys, time
from pathlib import Path
from peer_engines.worker import Worker
worker = Worker("some", [sys.executable, sys.argv[1], "some", "0"], Path(sys.argv[2]))
worker.wait_loaded()
worker.pause()
print(worker._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end it")
def test_a_stopped_worker_ends_with_its_harness(tmp_path: Path) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(script), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(BENCH)},
    )
    assert harness.stdout is not None
    process = Path("/proc", harness.stdout.readline().strip(), "stat")
    assert process.exists()
    harness.kill()
    harness.communicate()
    deadline = time.monotonic() + 10
    while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


SMALL = Plan(short_len=2, input_len=4, output_len=6, long_len=8, long_pairs=1, pairs=2)


def test_subjects_take_turns_and_a_failing_one_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [stand_in(tmp_path, f"slipstream {kind}", pace=0.002) for kind in ("Q4_0", "Q4_1", "Q8_0")]
    monkeypatch.setattr(comparison_module, "SLIPSTREAM", ours)
    peers = [
        stand_in(tmp_path, "good", pace=0.008, against="slipstream Q4_1"),
        stand_in(tmp_path, "broken", against="slipstream Q4_1"),
        stand_in(tmp_path, "faulty", against="slipstream Q4_1"),
        dataclasses.replace(stand_in(tmp_path, "llama", 0.004, against="slipstream Q4_0"), engine="llama.cpp"),
    ]
    comparison = Comparison(tmp_path / "some.gguf", peers, SMALL, threads=1)
    try:
        comparison.start()
        comparison.measure()
    finally:
        comparison.close()
    assert list(comparison.ours) == ["slipstream Q4_0", "slipstream Q4_1"]  # nothing is set against the third
    assert len(comparison.prompt) == 8
    assert [(pair["peer"], pair["against"]) for pair in comparison.pairs] == [
        ("llama", "slipstream Q4_0"),
        ("good", "slipstream Q4_1"),
    ] * 2
    errors = [entry.error for entry in comparison.peers]
    assert errors == [None, "broken: OSError: no such model", "faulty: RuntimeError: out of memory", None]
    assert comparison.peers[0].equal_tokens == 16
    subjects = [entry.report() for entry in comparison.entries]
    found = {row["name"]: row for row in rows(subjects, comparison.pairs, SMALL)}
    assert list(found) == ["slipstream Q4_0", "llama", "slipstream Q4_1", "good", "broken", "faulty"]
    for pair in comparison.pairs:
        assert pair["slipstream"]["decode2"] >= 5 * 0.002
        assert pair["slipstream"]["decode4"] >= 5 * 0.002
        assert pair["other"]["decode4"] >= 5 * (0.008 if pair["peer"] == "good" else 0.004)
    assert [sorted(pair["other"]) == sorted(pair["slipstream"]) for pair in comparison.pairs] == [True] * 4
    assert ["prefill8" in pair["other"] for pair in comparison.pairs] == [True, False, False, False]
    assert found["slipstream Q4_1"]["decode4_tokens_per_s"]["median"] <= 1 / 0.002
    assert "decode4_ratio" not in found["slipstream Q4_1"]
    assert found["good"]["decode4_ratio"]["pairs"] + found["good"]["decode4_ratio"]["dropped"] == 2
    assert "prefill8_ratio" not in found["good"]
    assert found["llama"]["prefill8_ratio"]["pairs"] + found["llama"]["prefill8_ratio"]["dropped"] == 1
    assert found["broken"]["error"] == errors[1]
    assert "ttft_ms" not in found["faulty"]


def test_batches_take_turns(tmp_path: Path) -> None:
    ours = [stand_in(tmp_path, name, pace=0.001) for name in ("a", "b")]
    plan = BatchPlan(sizes=(2, 3), input_len=4, output_len=5, rounds=2)
    batches = Batches(tmp_path / "some.gguf", ours, stand_in(tmp_path, "peer", pace=0.003), plan, threads=1)
    try:
        batches.run()
    finally:
        batches.close()
    assert [one["requests"] for one in batches.rounds] == [2, 3, 2, 3]
    for one in batches.rounds:
        assert list(one["seconds"]) == ["a", "peer", "b"]
        assert set(one["tokens"].values()) == {one["requests"] * 5}
        assert len(one["probes"]) == 4
        assert one["seconds"]["peer"] >= 5 * 0.003
    found = batches.rows()
    assert [(row["requests"], row["name"]) for row in found] == [
        (n, name) for n in (2, 3) for name in ("a", "b", "peer")
    ]
    assert all("ratio" in row for row in found if row["name"] != "peer")
    lines = batch_table({"rows": found, "quick": False, "disturbed": False}).splitlines()
    assert len(lines) == 2 + 6
    assert {line.count("|") for line in lines} == {5}


def test_batch_ratios_take_the_probes_beside_them(tmp_path: Path) -> None:
    ours = [stand_in(tmp_path, name) for name in ("a", "b")]
    batches = Batches(tmp_path, ours, stand_in(tmp_path, "peer"), BatchPlan(sizes=(1,)), threads=1)
    tokens, seconds = dict.fromkeys(("a", "peer", "b"), 100), {"a": 1.0, "peer": 2.0, "b": 4.0}
    batches.rounds = [{"requests": 1, "seconds": seconds, "tokens": tokens, "probes": [40, 40, 40, 80]}]
    first, second, peer = batches.rows()
    assert (first["tokens_per_s"]["median"], first["ratio"]["median"], first["ratio"]["dropped"]) == (100, 2.0, 0)
    assert (second["ratio"]["median"], second["ratio"]["dropped"]) == (None, 1)
    assert peer["tokens_per_s"]["median"] == 50


@pytest.mark.parametrize("size", [1, 8, 32])
def test_batch_prompts_are_fixed_and_distinct(size: int) -> None:
    found = prompts(size, 32)
    assert found == prompts(size, 32)
    assert [len(set(prompt)) for prompt in found] == [32] * size
    assert len({tuple(prompt) for prompt in found}) == size


@pytest.mark.parametrize(("some", "rounds"), [(0, 3), (1, 1), (1, 9), (5, 13), (9, 4), (13, 13)])
def test_some_pairs_are_spread_over_the_rounds(some: int, rounds: int) -> None:
    chosen_rounds = [number for number in range(rounds) if spread_over(number, some, rounds)]
    assert len(chosen_rounds) == min(some, rounds)
    gaps = [later - earlier for earlier, later in itertools.pairwise(chosen_rounds)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert not chosen_rounds or chosen_rounds[0] == 0


# Report


def subject(
    name: str, *, equal: int = 16, logprob: float | None = -1.0, error: str | None = None, against: str = "ours"
) -> dict[str, Any]:
    described = {} if logprob is None else {"version": "1.0", "bytes_per_step": [4e8, 5e8]}
    return {
        "name": name,
        "engine": name,
        "format": "Q4_0",
        "against": against,
        "description": described,
        "equal_tokens": equal,
        "logprob": logprob,
        "error": error,
    }


def result() -> dict[str, Any]:
    plan = Plan(output_len=65, pairs=3)
    absent = subject("absent", logprob=None, error="no | wheel")
    subjects = [subject("ours", against=""), subject("nimble", equal=3), absent]

    def piece(seconds: float, *, long: bool) -> dict[str, float]:
        found = {"decode16": seconds, "decode512": 2 * seconds, "prefill512": seconds / 2, "ttft": seconds / 10}
        return found | ({"prefill4096": seconds * 8} if long else {})

    pairs = [
        {
            "peer": "nimble",
            "against": "ours",
            "slipstream": piece(seconds, long=long),
            "other": piece(1.0, long=long),
            "probes": [40e9, between, 40e9],
        }
        for seconds, long, between in ((2.0, True, 40e9), (2.0, False, 40e9), (9.0, False, 20e9))
    ]
    return {
        "command": "python bench/peers.py run",
        "date": "2026-01-02T03:04:05+00:00",
        "model": "Some.Q4_1.gguf",
        "cpu": "Some CPU",
        "threads": 2,
        "plan": dataclasses.asdict(plan),
        "quick": False,
        "foreign_load": 0.02,
        "disturbed": False,
        "rows": rows(subjects, pairs, plan),
        "subjects": subjects,
        "pairs": pairs,
    }


def test_rows_hold_speeds_and_shares() -> None:
    ours, quick, _ = result()["rows"]
    assert ours["decode16_tokens_per_s"]["median"] == 32
    assert quick["decode16_tokens_per_s"]["median"] == 64
    assert quick["decode512_tokens_per_s"]["median"] == 32
    assert quick["prefill512_tokens_per_s"]["median"] == 1024
    assert quick["prefill4096_tokens_per_s"]["median"] == 512
    assert quick["ttft_ms"]["median"] == 100
    assert quick["decode16_bandwidth_share"]["median"] == pytest.approx(4e8 * 64 / 40e9)
    assert quick["decode512_bandwidth_share"]["median"] == pytest.approx(5e8 * 32 / 40e9)
    half = {"median": 0.5, "low": 0.5, "high": 0.5}
    for name in ("decode16", "decode512", "prefill512"):
        assert quick[f"{name}_ratio"] == {**half, "pairs": 2, "dropped": 1}
    assert quick["prefill4096_ratio"] == {**half, "pairs": 1, "dropped": 0}


def test_table() -> None:
    text = table(json.loads(json.dumps(result())))
    lines = text.splitlines()
    columns = lines[0].count("|")
    assert [line.replace("\\|", "").count("|") for line in lines[:5]] == [columns] * 5
    assert lines[2] == "| ours | Q4_0 | 32.0 / 16.0 | 32% (32 to 32) / 20% (20 to 20) | 512 / 256 |  |  |"
    half = "0.50 (0.50 to 0.50)"
    assert lines[3] == (
        "| nimble (other tokens) | Q4_0 | 64.0 / 32.0 | 64% (64 to 64) / 40% (40 to 40) | 1024 / 512 "
        f"| {half} / {half}, 1 dropped | {half} / {half}, 1 dropped |"
    )
    assert lines[4] == "| absent | Q4_0 | not measured: no \\| wheel | - | - | - | - |"
    assert "decode after 16 / 512, tok/s" in lines[0]
    assert "prefill of 512 / 4,096, tok/s" in lines[0]
    assert "Some.Q4_1.gguf (Q4_1) and the same rounded again, one stream" in text
    assert "Some CPU, 2 threads, 2026-01-02" in text
    assert "Versions: ours 1.0, nimble 1.0." in text
    assert "`python bench/peers.py run`" in text
    assert "Not valid" not in text
    assert "quick run" not in text


def test_a_part_can_be_measured_anew() -> None:
    text = json.dumps(result())
    for stand_in, name in (("ours", "slipstream Q4_0"), ("nimble", "llama.cpp Q4_0"), ("absent", "vllm bfloat16")):
        text = text.replace(f'"{stand_in}"', f'"{name}"')
    old, new = json.loads(text), json.loads(text)
    ours, _, absent = old["subjects"]
    new["command"] = "python bench/peers.py run --peers vllm --merge"
    new["subjects"], new["pairs"] = [ours, {**absent, "error": "still absent"}], []
    found = merged(old, new)
    assert [(row["name"], row["error"]) for row in found["rows"]] == [
        ("slipstream Q4_0", None),
        ("llama.cpp Q4_0", None),
        ("vllm bfloat16", "still absent"),
    ]
    assert found["pairs"] == old["pairs"]
    assert [(part["command"], part["peers"]) for part in found["parts"]] == [(old["command"], ["llama.cpp Q4_0"])]
    assert table(found).count(f"`{old['command']}`") == 1
    again = merged(found, {**old, "subjects": old["subjects"][:2], "command": "the last"})
    assert [(part["command"], part["peers"]) for part in again["parts"]] == [(new["command"], ["vllm bfloat16"])]
    assert merged(again, old)["parts"] == []
    with pytest.raises(ValueError, match="cpu"):
        merged(old, {**new, "cpu": "Another"})
    with pytest.raises(ValueError, match="other lengths"):
        merged(old, {**new, "plan": {**new["plan"], "input_len": 7}})


def test_table_says_what_a_run_is_not() -> None:
    text = table({**result(), "quick": True, "disturbed": True, "foreign_load": 0.4})
    assert "Not valid: other processes" in text
    assert "used 40% of the CPUs" in text
    assert "A quick run" in text
    assert "is not known" in table({**result(), "foreign_load": None})


def test_first_tokens_are_judged() -> None:
    ours = subject("ours", against="")
    assert equal_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert flags(subject("x", equal=8), ours) == []
    assert flags(subject("x", equal=7), ours) == ["other tokens"]
    assert flags(subject("x", logprob=-2.9), ours) == []
    assert flags(subject("x", equal=0, logprob=-3.1), ours) == ["other tokens", "unlikely tokens"]


def test_peers_are_chosen_by_engine_or_name() -> None:
    assert chosen(None) == list(PEERS)
    assert [peer.name for peer in chosen("vllm bfloat16,llama.cpp")] == [
        "llama.cpp Q4_0",
        "llama.cpp Q4_1",
        "llama.cpp Q8_0",
        "vllm bfloat16",
    ]
    for peer in PEERS:
        twin = next(ours for ours in SLIPSTREAM if ours.name == peer.against)
        assert twin.file == (peer.file if peer.engine == "llama.cpp" else "Q4_1")
    with pytest.raises(ValueError, match=r"--peers: 'ollama' is not known; known are llama\.cpp, vllm, transformers"):
        chosen("llama.cpp,ollama")
