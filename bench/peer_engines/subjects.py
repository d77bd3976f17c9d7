"""What is compared: engines, the formats they run the model in, and how each is started."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from peer_engines import environments
from peer_engines.requantize import made
from peer_engines.worker import PeerError, Worker
from slipstream.core.config import cache_dir


@dataclass(frozen=True)
class Subject:
    """An engine with the model in one format. `file`: which form of the model it is given, see `requantize.made`.

    `against` names the Slipstream that a peer takes turns with: the one with the same file, or with the default one.
    """

    name: str
    engine: str
    module: str
    format: str
    file: str
    dtype: str | None = None
    against: str = ""

    def start(self, model: Path, threads: int) -> Worker:
        """Start its process on the GGUF file `model`, without waiting for it. Raises PeerError if not installed."""
        interpreter = Path(sys.executable)
        if self.engine != "slipstream":
            interpreter = environments.python(self.engine)
            if environments.record(self.engine) is None:
                raise PeerError(f"{self.engine} is not installed; run `bench/peers.py install {self.engine}`")
        path = made(model, cache_dir() / "peers" / "models", self.file)
        arguments = [str(path), str(threads), *([self.dtype] if self.dtype else [])]
        log = cache_dir() / "peers" / "logs" / f"{self.name.replace(' ', '-')}.log"
        return Worker(self.name, [str(interpreter), "-m", f"peer_engines.{self.module}", *arguments], log)


def _slipstream(kind: str) -> Subject:
    return Subject(f"slipstream {kind}", "slipstream", "slipstream_worker", kind, kind)


def _llama_cpp(kind: str) -> Subject:
    return Subject(f"llama.cpp {kind}", "llama.cpp", "llama_cpp_worker", kind, kind, against=f"slipstream {kind}")


def _from_folder(engine: str, module: str, dtype: str) -> Subject:
    return Subject(f"{engine} {dtype}", engine, module, dtype, "folder", dtype=dtype, against="slipstream Q4_1")


FORMATS = ("Q4_0", "Q4_1", "Q8_0")
SLIPSTREAM = tuple(_slipstream(kind) for kind in FORMATS)
PEERS = (
    *(_llama_cpp(kind) for kind in FORMATS),
    _from_folder("vllm", "vllm_worker", "bfloat16"),
    _from_folder("transformers", "transformers_worker", "bfloat16"),
    _from_folder("transformers", "transformers_worker", "float32"),
)


def chosen(names: str | None) -> list[Subject]:
    """The peers of a comma-separated list of engines or subjects, all without one. Raises ValueError for others."""
    if names is None:
        return list(PEERS)
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if not any(name in (peer.name, peer.engine) for peer in PEERS)]
    if unknown:
        known = ", ".join(dict.fromkeys([*(p.engine for p in PEERS), *(p.name for p in PEERS)]))
        raise ValueError(f"--peers: {unknown[0]!r} is not known; known are {known}")
    return [peer for peer in PEERS if peer.name in wanted or peer.engine in wanted]
