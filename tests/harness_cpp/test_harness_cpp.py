"""The plain C++ of the harness (statistics, dispositions, JSON, jobs, where ranks meet), compiled and run here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "specmodel" / "harness" / "src"


@pytest.mark.slow
def test_plain_cpp_passes_its_own_tests(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler, "a C++20 compiler is needed (Debian: g++)"
    program = tmp_path / "harness-tests"
    files = [HERE / "harness_tests.cpp", SOURCES / "job.cpp", SOURCES / "group.cpp"]
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-pthread"]
    built = subprocess.run([compiler, *flags, *map(str, files), "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    closing = re.search(r"(\d+) passed, 0 failed", ran.stdout)
    assert closing
    assert int(closing.group(1)) > 200
