"""Builds the measuring binary on first use, into the user's cache directory.

A built binary is kept under a name made from the sources, the compilers and the architecture, so that any change of
them builds anew and nothing is ever rebuilt for nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specmodel.errors import SpecModelError

__all__ = ["Toolchain", "build", "cache_dir", "find_nccl", "find_toolchain", "source_hash"]

_SOURCE_DIR = Path(__file__).parent
_SOURCE_SUFFIXES = (".cu", ".cuh", ".cpp", ".hpp", ".h", ".txt", ".cmake")
_BINARY = "specmodel-harness"
_OLDEST_NVCC = (12, 8)
_TOOL_TIMEOUT_MS = 60_000
_BUILD_TIMEOUT_MS = 1_800_000
_LOG_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What the binary is built with."""

    cmake: str
    ninja: str
    nvcc: str
    nvcc_version: str
    host_compiler: str
    hints: tuple[str, ...]


def cache_dir(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Return specmodel's folder in the user's cache directory, by the convention of the platform."""
    home = Path.home()
    if platform == "win32":
        base = Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = home / ".cache"
    return Path(environment.get("XDG_CACHE_HOME") or base) / "specmodel"


def _sources(folder: Path = _SOURCE_DIR) -> list[Path]:
    return sorted(
        path
        for path in (folder / "CMakeLists.txt", *(folder / "src").rglob("*"))
        if path.is_file() and path.suffix in _SOURCE_SUFFIXES
    )


def source_hash(folder: Path = _SOURCE_DIR) -> str:
    """Fingerprint (sha256) the CUDA sources and their build file, names and contents."""
    digest = hashlib.sha256()
    for path in _sources(folder):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def _wheel_roots() -> Iterator[Path]:
    """Yield the folders of NVIDIA's wheels (site-packages/nvidia/*)."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(path for path in Path(location).iterdir() if path.is_dir())


def _hints() -> tuple[str, ...]:
    wanted = ("include/cublasLt.h", "bin/nvcc", "include/cuda_runtime.h")
    return tuple(str(root) for root in _wheel_roots() if any((root / name).exists() for name in wanted))


def find_nccl() -> str | None:
    """Return the NCCL library of NVIDIA's wheels, or None: then the system's is loaded by name."""
    for root in _wheel_roots():
        library = root / "lib" / "libnccl.so.2"
        if library.exists():
            return str(library)
    return None


def _tool(name: str) -> str | None:
    """Find a program: beside this Python (where wheels put it), else on the path."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which(name, path=scripts) or shutil.which(name)


def _nvcc(hints: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the compiler to use and the hints that go with it.

    A compiler and the headers of another version do not build: a toolkit that the environment names is used alone,
    and the compiler of the wheels comes before the one on the path.
    """
    named = [Path(os.environ[key]) / "bin" for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    for folder in named:
        if found := shutil.which("nvcc", path=str(folder)):
            return found, ()
    for hint in hints:
        if found := shutil.which("nvcc", path=str(Path(hint) / "bin")):
            return found, hints
    return _tool("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin"), hints


def _first_line(command: list[str], pattern: str) -> str | None:
    try:
        answer = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_MS / 1000, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(pattern, answer.stdout)
    return found.group(1) if found else None


def find_toolchain() -> Toolchain:
    """Find what the binary is built with: a system CUDA, or NVIDIA's wheels (extra `harness`).

    Raises
    ------
    SpecModelError
        nvcc, cmake, ninja or a C++ compiler is missing, or nvcc is too old; the message says what to install.
    """
    remedy = "; install a CUDA toolkit, or NVIDIA's wheels with pip install 'specmodel[harness]'"
    nvcc, hints = _nvcc(_hints())
    if nvcc is None:
        raise SpecModelError(f"nvcc was not found, and the measuring binary is built with it{remedy}")
    version = _first_line([nvcc, "--version"], r"V(\d+\.\d+\.\d+)") or _first_line([nvcc, "--version"], r"(\d+\.\d+)")
    if version is None or tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_NVCC:
        oldest = ".".join(map(str, _OLDEST_NVCC))
        raise SpecModelError(f"nvcc is {version or 'of an unknown version'}, {oldest} or newer is needed{remedy}")
    cmake, ninja = _tool("cmake"), _tool("ninja")
    for name, path in (("cmake", cmake), ("ninja", ninja)):
        if path is None:
            raise SpecModelError(f"{name} was not found; pip install 'specmodel[harness]' brings it")
    compiler = os.environ.get("CXX") or "c++"
    compiler_version = _first_line([compiler, "--version"], r"^(.+)")
    if compiler_version is None:
        raise SpecModelError(f"no C++ compiler ('{compiler}'); install one, or name it in CXX")
    return Toolchain(
        cmake=str(cmake),
        ninja=str(ninja),
        nvcc=nvcc,
        nvcc_version=version,
        host_compiler=compiler_version.strip(),
        hints=hints,
    )


def build(
    toolchain: Toolchain, *, architecture: str | None, cache: Path | None = None, say: Callable[[str], None] = print
) -> Path:
    """Build the measuring binary, or return the one that is there.

    Parameters
    ----------
    toolchain
        See `find_toolchain`.
    architecture
        Compute capability without its dot (`90`), or None for the build's own default.
    cache
        Where binaries are kept; the user's cache directory by default.
    say
        Told what happens.

    Raises
    ------
    SpecModelError
        It does not build; the message holds the end of the log and where the whole log is.
    """
    parts = (
        source_hash(),
        toolchain.nvcc_version,
        toolchain.host_compiler,
        architecture or "default",
        *toolchain.hints,
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = (cache or cache_dir()) / "harness" / key
    if (folder / _BINARY).is_file():
        return folder / _BINARY
    folder.parent.mkdir(parents=True, exist_ok=True)
    say(f"building the measuring binary (nvcc {toolchain.nvcc_version}, once per version of the sources)")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder.parent) as name:
        work = Path(name)
        configure = [
            toolchain.cmake,
            "-S",
            str(_SOURCE_DIR),
            "-B",
            str(work / "build"),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}",
            f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc}",
        ]
        if toolchain.hints:
            configure.append(f"-DSPECMODEL_CUDA_HINTS={';'.join(toolchain.hints)}")
        if architecture:
            configure.append(f"-DCMAKE_CUDA_ARCHITECTURES={architecture}")
        log = folder.parent / f"{key}.log"
        with log.open("w", encoding="utf-8") as stream:
            for command in (configure, [toolchain.cmake, "--build", str(work / "build"), "--target", _BINARY]):
                _logged(command, stream, log)
        # Another process may have built the same meanwhile: whoever is first wins, both are the same.
        (work / "ready").mkdir()
        shutil.copy2(work / "build" / _BINARY, work / "ready" / _BINARY)
        try:
            os.replace(work / "ready", folder)
        except OSError:
            if not (folder / _BINARY).is_file():
                raise
    return folder / _BINARY


def _logged(command: list[str], stream: IO[str], log: Path) -> None:
    try:
        done = subprocess.run(  # noqa: S603
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=_BUILD_TIMEOUT_MS / 1000,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SpecModelError(f"building the measuring binary took too long; its log is {log}") from error
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_LINES:])
        raise SpecModelError(f"the measuring binary does not build; the whole log is {log}; its end:\n{tail}")
