"""The package as a whole: its public names, its size, what an import costs, what a wheel holds."""

import ast
import dataclasses
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tarfile
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import specmodel

ROOT = Path(__file__).parent.parent
PACKAGE = Path(specmodel.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "specmodel.") if "__main__" not in m.name)

MAX_LINES = 450
UNITS = re.compile(r"(^|_)(ms|tok_s|bytes|tokens|mhz|watts|celsius|bytes_per_ms|flops_per_ms)(_interval|_at_most)?$")
# Names of quantities that have a dimension, whatever module they stand in.
DIMENSIONAL = re.compile(
    r"(^|_)(time|times|duration|latency|period|elapsed|wait|timeout|bandwidth|throughput|speed|clock|memory)$"
)
OTHER_TIMES = re.compile(r"_(s|us|ns|sec|secs|second|seconds|msec|usec|minutes)$")
OTHER_SIZES = re.compile(r"_(kb|mb|gb|kib|mib|gib)$")

# Fields of what users read and write that carry a number without a dimension.
DIMENSIONLESS = {
    *("num_gpus", "nodes", "tensor_parallel", "data_parallel", "expert_parallel", "ranks"),
    *("hidden_size", "num_layers", "num_experts", "experts_per_token", "cuda_graph_sizes"),
    *("batch", "num_steps", "topk", "samples", "drafts", "prompts", "tokens", "weight", "sd"),
    *("acceptance_length", "accepted_per_position", "drafted_per_position", "accepted_by_rank"),
    *("survival", "conditional", "speedup", "interval", "probability_best", "expected_regret"),
    *("batch_from", "batch_to", "means", "sds", "degrees", "weights", "value", "low", "high", "informed"),
    *("stopping_gain", "workload_gain", "effort"),  # fractions of tok/s; a multiple of one table point
}


def dataclasses_of(names: list[str]) -> Iterator[tuple[str, type]]:
    for name in names:
        for cls in vars(importlib.import_module(name)).values():
            if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == name:
                yield f"{name}.{cls.__name__}", cls


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names() -> None:
    assert dir(specmodel) == [
        "Calibration",
        "CalibrationError",
        "Diagnosis",
        "FittedModel",
        "Optimum",
        "Prediction",
        "SpecModelError",
        "UsageError",
        "__version__",
        "cross_validate",
        "diagnose",
        "dump",
        "dumps",
        "fit",
        "from_dict",
        "json_schema",
        "load",
        "loads",
        "optimize",
        "report",
        "schedule",
        "simulate",
        "sweep",
        "validate",
        "whatif",
    ]


@pytest.mark.parametrize("name", sorted(specmodel.__all__))
def test_public_name_resolves_and_is_explained(name: str) -> None:
    assert getattr(specmodel, name).__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'specmodel' has no attribute 'optimise'"):
        specmodel.optimise  # noqa: B018


def test_one_version() -> None:
    version = specmodel.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert importlib.metadata.version("specmodel") == version
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("module", ["specmodel", "specmodel.cli"])
def test_import_needs_only_the_standard_library(module: str) -> None:
    loaded = fresh(f"import sys, {module}; print(*sorted(sys.modules))").split()
    ours = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    # A virtual environment may load hooks of its own before any import.
    ours -= {name.partition(".")[0] for name in fresh("import sys; print(*sys.modules)").split()}
    assert ours == {"specmodel"}


def test_no_module_imports_what_is_slow_and_seldom_needed() -> None:
    heavy = ("matplotlib", "sympy", "scipy.stats", "scipy.optimize", "dask", "IPython")
    listed = ", ".join(["sys", *MODULES])
    loaded = fresh(f"import {listed}; print(*sorted(sys.modules))").split()
    assert [name for name in loaded if name in heavy] == []


def test_data_are_frozen_slotted_and_explained() -> None:
    found = [(name, cls) for name, cls in dataclasses_of(MODULES) if not cls.__name__.startswith("_")]
    assert len(found) > 30
    wrong = [f"{name} says nothing of what it is" for name, cls in found if not cls.__doc__]
    wrong += [f"{name} takes any attribute" for name, cls in found if "__slots__" not in vars(cls)]
    # Readers of engine output count while they read.
    data = [(name, cls) for name, cls in found if not name.startswith("specmodel.engines.")]
    wrong += [f"{name} can change" for name, cls in data if not vars(cls)["__dataclass_params__"].frozen]
    assert not wrong, "\n".join(wrong)


def test_dimensional_fields_end_in_their_unit() -> None:
    wrong = [
        f"{name}.{field.name}"
        for name, cls in dataclasses_of(MODULES)
        for field in dataclasses.fields(cls)
        if not UNITS.search(field.name)
        and any(words.search(field.name) for words in (DIMENSIONAL, OTHER_TIMES, OTHER_SIZES))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["specmodel.calibration", "specmodel.prediction", "specmodel.optimum"])
def test_every_number_that_users_meet_has_a_unit_or_none_to_have(module: str) -> None:
    numbers = [
        f"{name}.{field}"
        for name, cls in dataclasses_of([module])
        for field, hint in typing.get_type_hints(cls).items()
        if is_number(hint) and not cls.__name__.startswith("_")
    ]
    assert len(numbers) > 10
    wrong = [n for n in numbers if n.rpartition(".")[2] not in DIMENSIONLESS and not UNITS.search(n.rpartition(".")[2])]
    assert not wrong, "\n".join(wrong)


def is_number(hint: object) -> bool:
    """Whether a field of this type holds a number, several or none."""
    if typing.get_origin(hint) is np.ndarray:
        return typing.get_args(typing.get_args(hint)[1])[0] is np.float64
    if hint in (int, float):
        return True
    parts = [part for part in typing.get_args(hint) if part not in (type(None), ...)]
    return bool(parts) and typing.get_origin(hint) is not typing.Literal and all(map(is_number, parts))


def test_the_only_unit_of_time_is_the_millisecond() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""
            name = node.arg if isinstance(node, ast.arg) else name
            if OTHER_TIMES.search(name) and not UNITS.search(name):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_every_module_can_be_read_in_one_sitting() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_faults_are_raised_not_asserted_and_never_swallowed_whole() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            caught = node.type if isinstance(node, ast.ExceptHandler) else None
            names = [n.id for n in ast.walk(caught) if isinstance(n, ast.Name)] if caught is not None else []
            bare = isinstance(node, ast.ExceptHandler) and caught is None
            if isinstance(node, ast.Assert) or bare or {"Exception", "BaseException"} & set(names):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_no_test_passes_or_fails_by_a_clock() -> None:
    """How long something takes depends on the machine: `tests/bench/` prints it. Waiting for an event may give up."""
    clocks = {f"{name}{unit}" for name in ("perf_counter", "process_time", "monotonic", "time") for unit in ("", "_ns")}
    wrong = []
    for path in sorted((ROOT / "tests").glob("*.py")):
        tree = ast.parse(path.read_text())
        waiting = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "wait_for"]
        allowed = {id(node) for function in waiting for node in ast.walk(function)}
        for node in ast.walk(tree):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
            if named and node.attr in clocks and id(node) not in allowed:  # type: ignore[attr-defined]
                wrong.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive that the checkout makes."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"specmodel", f"specmodel-{specmodel.__version__}.dist-info"}
    assert "specmodel/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    here = {f"specmodel/{p.relative_to(PACKAGE)}" for p in PACKAGE.rglob("*") if p.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    assert here <= names
    assert {name for name in names if name.endswith(".py")} == {n for n in here if n.endswith(".py")}
    assert [name for name in here if name.startswith("specmodel/harness/shapes/")]
    assert [name for name in here if name.startswith("specmodel/harness/src/") and name.endswith(".cu")]


def test_source_archive_can_be_tested(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ["pyproject.toml", "README.md", ".ci/run", "LICENSE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"]
    wanted += ["docs/conf.py", "docs/schema/calibration-1.json", "tests/test_package.py", "calibrations/README.md"]
    assert [name for name in wanted if name not in names] == []
    assert [name for name in names if re.search(r"(^|/)(\.venv|_build|__pycache__|\.git)(/|$)", name)] == []
