"""What this machine lets the process use: CPUs and memory, with affinity and cgroup limits counted in."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cgroup_cpus() -> float | None:
    """CPUs' worth of time that the cgroup allows, or None without a limit."""
    limit = _read(_CGROUP / "cpu.max")
    if limit is not None:
        quota, _, period = limit.partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _read(_CGROUP / "cpu/cpu.cfs_quota_us")
    period_us = _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota_us is None or period_us is None or int(quota_us) <= 0:
        return None
    return int(quota_us) / int(period_us)


def allowed_cpus() -> int:
    """CPUs that the process may keep busy: the smaller of its affinity and its cgroup's quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus()
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def available_memory() -> int:
    """Bytes that can still be used without swapping: the machine's, or what is left of the cgroup's limit."""
    available = 0
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if not available:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(_CGROUP / limit_file), _read(_CGROUP / used_file)
        if limit and used and limit != "max":
            available = min(available, max(0, int(limit) - int(used)))
    return available


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    statm = _read(Path("/proc/self/statm"))
    return 0 if statm is None else int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_name() -> str:
    """The processor's own name."""
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
