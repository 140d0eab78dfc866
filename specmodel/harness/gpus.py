"""What GPUs are here, by nvidia-smi: names, memory, whether somebody else is using them.

Read only: nothing about a GPU is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from specmodel.errors import SpecModelError

__all__ = ["GpuFacts", "check_gpus", "local_cpus", "parse_gpus", "read_gpus", "visible"]

_FIELDS = "index,name,driver_version,memory.total,memory.free,mig.mode.current,pci.bus_id,compute_cap,uuid"
_QUERY_TIMEOUT_MS = 30_000
_MIB = 1 << 20
_BUSY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU as nvidia-smi describes it."""

    index: int
    name: str
    driver: str
    memory_bytes: int
    free_bytes: int
    mig: bool
    bus_id: str
    architecture: str
    uuid: str

    @property
    def busy(self) -> bool:
        """Whether somebody else holds more than a gigabyte of its memory."""
        return self.memory_bytes - self.free_bytes > _BUSY_BYTES


def parse_gpus(text: str) -> tuple[GpuFacts, ...]:
    """Parse `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` for the fields that `read_gpus` asks for.

    Fields that a driver does not know (`[N/A]`, `[Not Supported]`) are taken as absent: no MIG, no memory used.
    """
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS.split(",")) or not cells[0].isdigit():
            continue
        total = _mib(cells[3])
        found.append(
            GpuFacts(
                index=int(cells[0]),
                name=cells[1],
                driver=cells[2],
                memory_bytes=total or 0,
                free_bytes=_mib(cells[4]) or total or 0,
                mig=cells[5].lower() == "enabled",
                bus_id=cells[6].lower(),
                architecture=cells[7].replace(".", ""),
                uuid=cells[8].lower(),
            )
        )
    return tuple(found)


def _mib(cell: str) -> int | None:
    return int(float(cell)) * _MIB if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def visible(gpus: tuple[GpuFacts, ...], named: str | None) -> tuple[GpuFacts, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES (`named`) leaves, in its order: rank r measures number r of them.

    It holds indices or the beginnings of UUIDs; as CUDA does, the first that fits no GPU, or not one alone, ends the
    list, and one that is named twice leaves none.
    """
    if named is None:
        return gpus
    found: list[GpuFacts] = []
    for entry in (part.strip().lower() for part in named.split(",")):
        fits = [gpu for gpu in gpus if entry == str(gpu.index) or (entry[:4] == "gpu-" and gpu.uuid.startswith(entry))]
        if len(fits) != 1:
            break
        if fits[0] in found:
            return ()
        found += fits
    return tuple(found)


def read_gpus() -> tuple[GpuFacts, ...]:
    """Ask nvidia-smi for the GPUs that a program here sees; empty if there is no nvidia-smi or it finds none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_MS / 1000, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    gpus = parse_gpus(answer.stdout) if answer.returncode == 0 else ()
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_gpus(gpus: tuple[GpuFacts, ...], world: int, *, allow_busy: bool) -> tuple[GpuFacts, ...]:
    """Return the first `world` GPUs, if they may be measured.

    Raises
    ------
    SpecModelError
        There are too few, they differ, MIG is on, or somebody else uses one and `allow_busy` is false.
    """
    if not gpus:
        raise SpecModelError(
            "no NVIDIA GPU was found here (nvidia-smi lists none that is visible); measuring needs one"
        )
    if len(gpus) < world:
        raise SpecModelError(f"--tensor-parallel {world} needs {world} GPUs; {len(gpus)} found")
    chosen = gpus[:world]
    if len({gpu.name for gpu in chosen}) > 1:
        raise SpecModelError(f"the first {world} GPUs differ: {', '.join(gpu.name for gpu in chosen)}")
    if any(gpu.mig for gpu in chosen):
        raise SpecModelError("MIG is on: a slice of a GPU cannot be measured as one; nothing was changed")
    busy = [str(gpu.index) for gpu in chosen if gpu.busy]
    if busy and not allow_busy:
        raise SpecModelError(f"GPU {', '.join(busy)} is in use by somebody else; wait, or pass --allow-busy")
    return chosen


def local_cpus(gpu: GpuFacts, *, devices: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """Return the processors of the GPU's NUMA node; empty where the system does not tell."""
    domain, _, rest = gpu.bus_id.partition(":")
    try:
        text = (devices / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return frozenset()
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        if low.isdigit() and (high.isdigit() or not high):
            cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)
