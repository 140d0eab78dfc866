"""What may leave a log: an allow-list of facts, and a last sweep over every string for what looks like a secret.

Readers take numbers, model names without their folders, flags that they know and NCCL variables that tune; nothing else
of a line is kept. The sweep is the second line of defence: notes and names pass through it before they are written.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["TUNING_VARIABLES", "clean", "gpu_name", "model_name", "sweep", "tuning_variable", "version_of"]

_TUNING_NAMES = """
    ALGO PROTO MIN_NCHANNELS MAX_NCHANNELS MIN_CTAS MAX_CTAS NTHREADS LL128_NTHREADS BUFFSIZE LL_BUFFSIZE
    LL128_BUFFSIZE NVLS_ENABLE NVLS_NCHANNELS NVLS_CHUNKSIZE CUMEM_ENABLE CUMEM_HOST_ENABLE P2P_LEVEL P2P_DISABLE
    P2P_USE_CUDA_MEMCPY P2P_NET_CHUNKSIZE SHM_DISABLE SHM_USE_CUDA_MEMCPY GRAPH_REGISTER LOCAL_REGISTER WIN_ENABLE
    SYM_CTAS CTA_POLICY MNNVL_ENABLE RUNTIME_CONNECT GRAPH_MIXING_SUPPORT COLLNET_ENABLE NET_GDR_LEVEL NET_GDR_READ
    IB_DISABLE IB_GDR_LEVEL IB_QPS_PER_CONNECTION IB_SPLIT_DATA_ON_QPS IB_TC IB_SL IB_AR_THRESHOLD PXN_DISABLE
    CROSS_NIC LAUNCH_ORDER_IMPLICIT LAUNCH_MODE MAX_P2P_NCHANNELS MIN_P2P_NCHANNELS NCHANNELS_PER_NET_PEER
    SINGLE_RING_THRESHOLD THREAD_THRESHOLDS DMABUF_ENABLE
"""
TUNING_VARIABLES = frozenset(f"NCCL_{name}" for name in _TUNING_NAMES.split())
"""NCCL variables whose value is a number or a word of NCCL's own; the others may hold hosts, interfaces and paths."""

_TUNING_WORDS = """
    RING TREE COLLNETDIRECT COLLNET_DIRECT COLLNETCHAIN COLLNET_CHAIN COLLNET NVLS NVLSTREE NVLS_TREE PAT LL LL128
    SIMPLE LOC NVL PIX PXB PXN P2C PHB NODE SYS TRUE FALSE GROUP PARALLEL DEFAULT EFFICIENCY ZERO ALLREDUCE ALLGATHER
    REDUCESCATTER REDUCE BROADCAST SENDRECV ALL
"""
_TUNING_WORD = "|".join(sorted(_TUNING_WORDS.split(), key=len, reverse=True))
_TUNING_VALUE = re.compile(
    rf"(?:[_^:,;=+-]|\b(?:{_TUNING_WORD}|0x[0-9a-f]{{1,16}}|[0-9]{{1,12}})\b){{1,60}}", re.IGNORECASE
)
"""Numbers and the words of NCCL's own, with what stands between them: nothing that names a machine or a person."""
_GPU_WORD = re.compile(r"[A-Z0-9(][\w()+/.-]{0,23}|\dg\.\d+gb")
_VERSION = re.compile(r"v?(\d[\w.+-]{0,39})")
_ADDRESS = re.compile(r"[1-9]\d{1,2}(?:\.\d{1,3}){3}")

MAX_TEXT = 2000
_PLAIN = re.compile(r"[A-Za-z_ ]{0,40}")
_SECRET = re.compile(
    "|".join(
        (
            r"-----BEGIN [A-Z ]+-----(?s:.*)",
            r"\b(?:hf|sk|pk|rk|ghp|gho|ghs|github_pat|glpat|xox[abprs]|nvapi|gsk|AKIA|ASIA|AIza|ya29|npm|pypi)"
            r"[-_.]?[A-Za-z0-9_.-]{10,}",
            r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*",
            r"\b(?i:bearer|basic)\s+[A-Za-z0-9+/=._-]{8,}",
            r"(?i:[\w.-]{0,40}(?:api[_-]?key|passw(?:or)?d|passphrase|secret|token|credential|authorization)s?)"
            r"\b['\"]?\s*[=:]\s*['\"]?[^\s'\",;)]+",
            r"\b[a-z][a-z0-9+.-]{0,20}://\S+",
            r"\b[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)*",
            r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])(?::\d+)?",
            r"(?<![\w.])(?:/|~/|[A-Za-z]:\\)[^\s'\",;)]+",
            r"\b[0-9a-f]{32,}\b",
            r"(?<![A-Za-z0-9+/])(?=[a-z0-9+/]*[A-Z])(?=[A-Z0-9+/]*[a-z])(?=[A-Za-z+/]*[0-9])[A-Za-z0-9+/]{32,}={0,2}",
        )
    )
)


def tuning_variable(name: str, value: str) -> bool:
    """Whether a variable of the environment may be kept: one that tunes NCCL, with a value that cannot name a host."""
    return name in TUNING_VARIABLES and _TUNING_VALUE.fullmatch(value) is not None


def model_name(path: str) -> str | None:
    """Return the name of a model without its folders and owner; Hugging Face cache folders are understood."""
    if len(path) > MAX_TEXT:
        return None
    parts = [part for part in re.split(r"[/\\]+", path.strip().strip("'\"")) if part not in ("", ".", "..", "~")]
    for part in parts:
        if part.startswith("models--"):
            return clean(part.split("--")[-1]) or None
    name = clean(parts[-1]) if parts else ""
    if not name or name in ("None", "null") or not re.fullmatch(r"[\w.+ ()=-]{1,120}", name):
        return None
    return name


def gpu_name(text: str) -> str | None:
    """Return the name of a GPU, as far as its words are such as products have; None where no word is."""
    words = []
    for word in text.split()[:8]:
        if _GPU_WORD.fullmatch(word) is None:
            break
        words.append(word)
    return clean(" ".join(words)) or None


def version_of(text: str) -> str | None:
    """Return a version without its leading v; None for what is none, an address of a host among it."""
    found = _VERSION.fullmatch(text)
    return found[1] if found is not None and _ADDRESS.fullmatch(found[1]) is None else None


def clean(text: str) -> str:
    """Return the text with everything that looks like a secret, an address or a path replaced by a mark."""
    if _PLAIN.fullmatch(text):
        return text
    return _SECRET.sub("[redacted]", text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ...")


def sweep(value: Any) -> Any:
    """Return the same mappings and lists with every string cleaned, keys of mappings included.

    Of versions, which look like addresses, readers have checked the form.
    """
    if isinstance(value, dict):
        return {
            clean(key) if isinstance(key, str) else key: item if key == "engine_version" else sweep(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [sweep(item) for item in value]
    return clean(value) if isinstance(value, str) else value
