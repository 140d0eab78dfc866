"""The rates of accelerators by their datasheets: for plans, and for the least time that reading weights takes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gpu", "datasheet", "known_gpu"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The rates of a GPU by its datasheet: dense bf16, without sparsity."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_ms: float
    flops_per_ms: float


def _gpu(name: str, memory_gib: float, bandwidth_gb: float, tflops: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=int(memory_gib * _GIB),
        bandwidth_bytes_per_ms=bandwidth_gb * 1e6,
        flops_per_ms=tflops * 1e9,
    )


# NVIDIA's datasheets; the first name that occurs in a device's name is taken.
_GPUS = (
    _gpu("B300", 268, 8000, 2250),
    _gpu("B200", 179, 8000, 2250),
    _gpu("GH200", 95, 4000, 989),
    _gpu("H200", 140, 4800, 989),
    _gpu("H100 PCIe", 79, 2000, 756),
    _gpu("H100", 79, 3350, 989),
    _gpu("A100-SXM4-80GB", 79, 2039, 312),
    _gpu("A100 80GB PCIe", 79, 1935, 312),
    _gpu("A100", 39, 1555, 312),
    _gpu("RTX PRO 6000", 95, 1792, 252),
    _gpu("RTX 5090", 31, 1792, 210),
    _gpu("RTX 4090", 23, 1008, 165),
    _gpu("RTX 3090", 23, 936, 71),
    _gpu("L40S", 44, 864, 362),
    _gpu("L40", 44, 864, 181),
    _gpu("A10", 22, 600, 125),
    _gpu("L4", 22, 300, 121),
)
_UNKNOWN = _gpu("unknown", 24, 1000, 150)


def known_gpu(name: str, memory_bytes: int | None = None) -> Gpu:
    """Return the rates of the GPU called `name`, or cautious ones if it is not known; `memory_bytes` if read off it."""
    found = datasheet(name) or _UNKNOWN
    return Gpu(
        name=name,
        memory_bytes=found.memory_bytes if memory_bytes is None else memory_bytes,
        bandwidth_bytes_per_ms=found.bandwidth_bytes_per_ms,
        flops_per_ms=found.flops_per_ms,
    )


def datasheet(name: str) -> Gpu | None:
    """The rates of the first GPU whose name occurs in `name`; None where none does."""
    return next((gpu for gpu in _GPUS if gpu.name in name), None)
