from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import slipstream
from slipstream.cli.flags import (
    BY_NAME,
    ENGINE,
    ENGINE_NAMES,
    FLAGS,
    SAMPLING,
    SAMPLING_NAMES,
    default_of,
    markdown,
    parse,
)
from slipstream.cli.settings import resolve
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.core.sampling_params import SamplingParams

PACKAGE = Path(slipstream.__file__).parent
NAMES = (*ENGINE_NAMES, *SAMPLING_NAMES)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for flag in FLAGS:
        monkeypatch.delenv(flag.env, raising=False)


def test_every_setting_has_a_flag():
    assert {f.name for f in fields(EngineConfig)} == {flag.name for flag in FLAGS if flag.group == ENGINE}
    own = {flag.name for flag in FLAGS if flag.group == SAMPLING}
    assert {f.name for f in fields(SamplingParams)} == own | {"seed"}


def test_no_spelling_and_no_environment_twin_is_used_twice():
    spellings = [s for f in FLAGS for s in (f.option, f.off_option, *f.aliases, *f.off_aliases)]
    assert len(set(spellings)) == len(spellings)
    assert all(re.fullmatch(r"--[a-z]+(-[a-z]+)*", s) for s in spellings)
    assert len({f.env for f in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("model", "m", "m"),
        ("threads", "3", 3),
        ("threads", 3, 3),
        ("temperature", "0.5", 0.5),
        ("temperature", 0, 0.0),
        ("cache_memory", "2GiB", 2 * 2**30),
        ("cache_memory", 4096, 4096),
        ("prefix_caching", "off", False),
        ("prefix_caching", "TRUE", True),
        ("prefix_caching", False, False),
        ("stop", "a,b", ["a,b"]),
        ("stop", ["a", "b"], ["a", "b"]),
        ("stop_token_ids", "1,2", [1, 2]),
        ("stop_token_ids", ["1,2", "3"], [1, 2, 3]),
        ("stop_token_ids", [1, 2], [1, 2]),
        ("stop_token_ids", 4, [4]),
        ("logit_bias", ["1=-5", "2=0.5"], {1: -5.0, 2: 0.5}),
        ("logit_bias", "1=-5,2=0.5", {1: -5.0, 2: 0.5}),
        ("logit_bias", {1: -5}, {1: -5.0}),
    ],
)
def test_values_from_text_and_yaml(name, raw, value):
    found = parse(BY_NAME[name], raw, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("model", 3),
        ("threads", "two"),
        ("threads", True),
        ("threads", 2.5),
        ("temperature", "warm"),
        ("temperature", False),
        ("cache_memory", "much"),
        ("cache_memory", [1]),
        ("prefix_caching", "maybe"),
        ("prefix_caching", 1),
        ("stop", [1]),
        ("stop_token_ids", "a"),
        ("stop_token_ids", [True]),
        ("logit_bias", "1"),
        ("logit_bias", "1:2"),
    ],
)
def test_a_wrong_value_is_refused_and_its_place_named(name, raw):
    with pytest.raises(ConfigError, match=r"^here: ") as caught:
        parse(BY_NAME[name], raw, "here")
    assert caught.value.param == name


def test_flag_wins_over_environment_over_file_over_default(tmp_path, monkeypatch):
    file = tmp_path / "s.yaml"
    file.write_text("threads: 1\nmax-num-seqs: 10\npage_size: 64\ntemperature: 0.25\n")
    monkeypatch.setenv("SLIPSTREAM_THREADS", "2")
    monkeypatch.setenv("SLIPSTREAM_MAX_NUM_SEQS", "20")
    settings = resolve(NAMES, {"threads": "3", "config": str(file)})
    assert settings.engine == {"threads": 3, "max_num_seqs": 20, "page_size": 64}
    assert settings.sampling == {"temperature": 0.25}
    assert settings.flags == {"threads"}


def test_the_file_may_be_named_by_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "s.yaml"
    file.write_text("threads: 1\n")
    monkeypatch.setenv("SLIPSTREAM_CONFIG", str(file))
    assert resolve(NAMES, {}).engine == {"threads": 1}


def test_the_file_takes_other_spellings(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("context-length: 100\ndisable_radix_cache: true\nstop: [a, b]\nlogit_bias: {5: 1}\nseed:\n")
    settings = resolve(NAMES, {"config": str(file)})
    assert settings.engine == {"max_model_len": 100, "prefix_caching": False}
    assert settings.sampling == {"stop": ["a", "b"], "logit_bias": {5: 1.0}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red", "unknown setting 'colour'"),
        ("threads: 1\nthread-count: 2", "unknown setting 'thread-count'"),
        ("context-length: 1\nmax_model_len: 2", "gives max_model_len twice"),
        ("threads: many", "threads: 'many' is not a whole number"),
        ("config: x.yaml", "unknown setting 'config'"),
        ("- a", "must hold settings"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(NAMES, {"config": str(file)})


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(NAMES, {"config": str(tmp_path / "none.yaml")})


def test_the_seed_is_the_requests_where_requests_are_made():
    assert resolve(NAMES, {"seed": "5"}).sampling == {"seed": 5}
    assert resolve(ENGINE_NAMES, {"seed": "5"}).engine == {"seed": 5}


def test_a_setting_of_another_command_in_the_file_is_left_alone(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("temperature: 0.5\nthreads: 2\n")
    settings = resolve(ENGINE_NAMES, {"config": str(file)})
    assert (settings.engine, settings.sampling) == ({"threads": 2}, {})


def test_defaults_are_those_of_the_dataclasses():
    assert default_of(BY_NAME["page_size"]) == EngineConfig().page_size
    assert default_of(BY_NAME["top_p"]) == SamplingParams().top_p


def test_the_documented_table_is_up_to_date():
    documented = PACKAGE.parents[1] / "docs" / "flags.md"
    assert documented.read_text(encoding="utf-8") == markdown(), "run python -m slipstream.cli.flags > docs/flags.md"


def test_the_environment_is_read_in_one_place():
    pattern = re.compile(r"\benviron\b|\bgetenv\b")
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(pattern.search(line) for line in path.read_text(encoding="utf-8").splitlines() if "os." in line)
    }
    assert readers == {"core/config.py"}
