"""Communication settings, and the clean environment that a measuring process starts with.

NCCL reads most of its variables once per process, so every setting gets processes of its own; they inherit nothing but
what is listed here, and no variable that is not known by name reaches them or an output.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specmodel.errors import CalibrationError, UsageError

__all__ = [
    "KNOWN_NCCL",
    "CommPlan",
    "child_environment",
    "parse_settings",
    "recorded_environment",
    "requests_nvls",
    "setting_text",
]

# NCCL's documented variables that change how a collective on one host runs, or which library path it takes.
KNOWN_NCCL = frozenset(
    f"NCCL_{name}"
    for name in (
        "ALGO",
        "ALLOC_P2P_NET_LL_BUFFERS",
        "BUFFSIZE",
        "CGA_CLUSTER_SIZE",
        "COLLNET_ENABLE",
        "COMM_BLOCKING",
        "CROSS_NIC",
        "CTA_POLICY",
        "CUMEM_ENABLE",
        "CUMEM_HOST_ENABLE",
        "GRAPH_MIXING_SUPPORT",
        "GRAPH_REGISTER",
        "GRAPH_STREAM_ORDERING",
        "IB_DISABLE",
        "IGNORE_CPU_AFFINITY",
        "LAUNCH_MODE",
        "LL128_BUFFSIZE",
        "LL128_NTHREADS",
        "LL_BUFFSIZE",
        "LOCAL_REGISTER",
        "MAX_CTAS",
        "MAX_NCHANNELS",
        "MAX_NRINGS",
        "MIN_CTAS",
        "MIN_NCHANNELS",
        "MIN_NRINGS",
        "NCHANNELS_PER_NET_PEER",
        "NET",
        "NET_PLUGIN",
        "NTHREADS",
        "NVB_DISABLE",
        "NVLS_ENABLE",
        "NVLS_NCHANNELS",
        "P2P_DIRECT_DISABLE",
        "P2P_DISABLE",
        "P2P_LEVEL",
        "P2P_NVL_CHUNKSIZE",
        "P2P_PCI_CHUNKSIZE",
        "PROTO",
        "PXN_DISABLE",
        "RUNTIME_CONNECT",
        "SHM_DISABLE",
        "SHM_USE_CUDA_MEMCPY",
        "SOCKET_IFNAME",
        "THREAD_THRESHOLDS",
        "TUNER_PLUGIN",
        "WIN_ENABLE",
        "WORK_FIFO_BYTES",
    )
)
_OTHER_ALLOWED = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "OMP_NUM_THREADS")
# What a process needs to start at all, and a lent machine's own safety switches; values are never written out.
_INHERITED = (
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_VISIBLE_DEVICES",
    "NVSHMEM_DISABLE_NVLS",
    "PATH",
    "TMPDIR",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)
# A value is written to files that people share: words, numbers and lists of them, never a path or a secret.
_VALUE = re.compile(r"^[A-Za-z0-9_^=:;,.+-]{0,80}$")
_RECORDED_VARIABLE = re.compile(r"^(NCCL_[A-Z0-9_]+|CUDA_MODULE_LOADING|CUDA_DEVICE_MAX_CONNECTIONS|OMP_NUM_THREADS)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommPlan:
    """One communication setting: its name, the variables it sets and the engine flags it stands for.

    `last` is for one that may hang: it is measured when all others are done.
    """

    name: str
    env: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    last: bool = False


def requests_nvls(env: Mapping[str, str]) -> bool:
    """Whether `env` asks for NVLink multicast (NVLS): enables it, sizes it, or names one of its algorithms."""
    enabled = env.get("NCCL_NVLS_ENABLE", "0") != "0"
    listed = env.get("NCCL_ALGO", "")
    named = "nvls" in listed.lower() and not listed.startswith("^")
    return enabled or named or "NCCL_NVLS_NCHANNELS" in env


def parse_settings(document: object, *, source: str, allow_nvls: bool = False) -> tuple[CommPlan, ...]:
    """Read named communication settings.

    Parameters
    ----------
    document
        A mapping of name to `{env, flags, last}`, or a document with such a mapping under `comm` (a calibration).
    source
        What the document was read from, for messages.
    allow_nvls
        Accept settings that ask for NVLink multicast.

    Returns
    -------
    tuple of CommPlan
        `default` is always among them, first.

    Raises
    ------
    CalibrationError
        A setting is malformed, sets a variable that is not known, or gives a value that is not plain text.
    UsageError
        A setting asks for NVLS and `allow_nvls` is false.
    """
    if isinstance(document, Mapping) and isinstance(document.get("comm"), Mapping):
        document = document["comm"]
    if not isinstance(document, Mapping) or not document:
        raise CalibrationError(f"{source}: give named settings, for example 'ring-ll: {{env: {{NCCL_PROTO: LL}}}}'")
    settings = {str(name): _setting(source, str(name), body) for name, body in document.items()}
    settings = {"default": CommPlan(name="default"), **settings}
    for setting in settings.values():
        if requests_nvls(setting.env) and not allow_nvls:
            raise UsageError(
                f"{source}: {setting.name} asks for NVLink multicast (NVLS), which can take a shared host's GPUs "
                "out of service; remove it, or pass --allow-nvls on a machine of your own"
            )
    return tuple(settings.values())


def _setting(source: str, name: str, body: object) -> CommPlan:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise CalibrationError(f"{source}: setting name {name!r}: letters, digits, '.', '_' and '-' are allowed")
    body = {} if body is None else body
    if not isinstance(body, Mapping) or set(body) - {"env", "flags", "last"}:
        raise CalibrationError(f"{source}: {name}: a setting holds env, flags and last")
    env = {} if body.get("env") is None else body["env"]
    flags = () if body.get("flags") is None else body["flags"]
    if not isinstance(env, Mapping) or isinstance(flags, str) or not all(isinstance(flag, str) for flag in flags):
        raise CalibrationError(f"{source}: {name}: env is a mapping of variables, flags a list of texts")
    if not isinstance(body.get("last", False), bool):
        raise CalibrationError(f"{source}: {name}.last: true or false")
    checked: dict[str, str] = {}
    for key, value in env.items():
        checked[str(key)] = _variable(f"{source}: {name}.env", str(key), value)
    return CommPlan(name=name, env=checked, flags=tuple(flags), last=body.get("last", False))


def _variable(where: str, key: str, value: Any) -> str:
    if key not in KNOWN_NCCL and key not in _OTHER_ALLOWED:
        close = difflib.get_close_matches(key, sorted(KNOWN_NCCL), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise CalibrationError(f"{where}.{key}: not a variable that may be set here{hint}")
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not _VALUE.fullmatch(str(value)):
        raise CalibrationError(f"{where}.{key}: {value!r} is not a plain value; quote it, for example \"LL\" or '1'")
    return str(value)


def child_environment(
    parent: Mapping[str, str], setting: CommPlan, *, empty_config: str, allow_nvls: bool, debug_file: str | None = None
) -> dict[str, str]:
    """Build the whole environment of a measuring process.

    Parameters
    ----------
    parent
        The runner's own environment; only what a process needs to start is taken from it.
    setting
        The communication setting that the process measures.
    empty_config
        An empty file that NCCL reads instead of the user's `~/.nccl.conf`.
    allow_nvls
        Leave NVLink multicast to NCCL; otherwise it is switched off.
    debug_file
        Where NCCL writes what it chose, in an untimed run; None switches its log off.
    """
    env = {key: parent[key] for key in _INHERITED if key in parent}
    env["CUDA_MODULE_LOADING"] = "EAGER"
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbers mean the GPUs that nvidia-smi means: those that were checked
    if not allow_nvls:
        env["NCCL_NVLS_ENABLE"] = "0"
    env.update(setting.env)
    if parent.get("NCCL_NVLS_ENABLE") == "0":  # a machine's own safety switch outranks everything
        env["NCCL_NVLS_ENABLE"] = "0"
    env["NCCL_CONF_FILE"] = empty_config
    if debug_file is not None:
        env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,ENV,TUNING", NCCL_DEBUG_FILE=debug_file)
    return env


def recorded_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a process's environment that may be written to a file: known names, plain values."""
    return {
        key: value
        for key, value in sorted(env.items())
        if _RECORDED_VARIABLE.fullmatch(key)
        and (key in KNOWN_NCCL or key in _OTHER_ALLOWED)
        and _VALUE.fullmatch(value)
    }


def setting_text(setting: CommPlan) -> str:
    """Describe a setting in one line, for progress and reports."""
    values = " ".join(f"{key}={value}" for key, value in sorted(setting.env.items()))
    return f"{setting.name} ({values})" if values else setting.name
