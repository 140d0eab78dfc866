import json
import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmodel.errors import CalibrationError, SpecModelError, UsageError
from specmodel.harness import build as building
from specmodel.harness.environment import (
    KNOWN_NCCL,
    CommPlan,
    child_environment,
    parse_settings,
    recorded_environment,
    requests_nvls,
)
from specmodel.harness.gpus import check_gpus, local_cpus, parse_gpus, read_gpus
from specmodel.harness.group import parse_progress, read_records
from specmodel.harness.nccl_log import NcclChoice, parse_nccl_log
from specmodel.harness.pooling import kept_samples, median_interval, pool, quantile

DATA = Path(__file__).parent / "data" / "harness"


def test_nccl_log_of_eight_ranks():
    log = parse_nccl_log((DATA / "nccl_debug_8_ranks.log").read_text())
    assert log.version == "2.30.7"
    assert log.channels == 24
    assert log.environment == {"NCCL_ALGO": "Ring,Tree", "NCCL_P2P_LEVEL": "NVL"}
    assert set(log.choices) == {16384, 65536, 1048576, 67108864}
    assert log.choices[16384] == NcclChoice(algorithm="Tree", protocol="LL", channels=2)
    assert log.choices[1048576] == NcclChoice(algorithm="Ring", protocol="LL128", channels=24)
    # The last lines state one decision in the words of older releases: numbers, and an estimate in microseconds.
    assert log.choices[65536] == NcclChoice(algorithm="Ring", protocol="LL", channels=4, estimate_ms=0.01925)


def test_nccl_log_takes_all_reduces_only():
    lines = [
        "h:1:1 [0] NCCL INFO Broadcast: 128 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}",
        "h:1:1 [0] NCCL INFO ReduceScatter: 256 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}",
        "h:1:1 [0] NCCL INFO AllGather: 512 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}",
        "h:1:1 [0] NCCL INFO AllReduce: 1024 Bytes -> Algo TREE proto SIMPLE channel{Lo..Hi}={0..7}",
    ]
    log = parse_nccl_log("\n".join(lines))
    assert log.choices == {1024: NcclChoice(algorithm="Tree", protocol="Simple", channels=8)}


def test_nccl_warnings_keep_words_and_lose_addresses():
    text = "node7:9:9 [0] init.cc:12 NCCL WARN Cuda failure 'out of memory' in /home/me/x.cc at 10.0.0.7:1234"
    (warning,) = parse_nccl_log(text).warnings
    assert "out of memory" in warning
    assert not [word for word in ("/home", "10.0.0.7", "node7") if word in warning]


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    parse_nccl_log(text)
    parse_gpus(text)
    parse_progress(text)


def test_gpu_facts():
    text = (
        "0, NVIDIA H200, 580.159.04, 143771, 143000, Disabled, 00000000:04:00.0, 9.0, GPU-12ab\n"
        "1, NVIDIA H200, 580.159.04, 143771, 100000, [N/A], 00000000:05:00.0, 9.0, GPU-12CD\n"
        "2, NVIDIA A100-SXM4-80GB, 550.1, 81920, [Not Supported], Enabled, 00000000:0A:00.0, 8.0, GPU-34ef\n"
        "No devices were found\n"
    )
    gpus = parse_gpus(text)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[0].memory_bytes == 143771 * 2**20
    assert [gpu.busy for gpu in gpus] == [False, True, False]
    assert [gpu.mig for gpu in gpus] == [False, False, True]
    assert [gpu.architecture for gpu in gpus] == ["90", "90", "80"]
    assert check_gpus(gpus, 1, allow_busy=False) == gpus[:1]
    assert check_gpus(gpus, 2, allow_busy=True) == gpus[:2]
    for count, world, named in ((0, 1, "no NVIDIA GPU"), (1, 2, "1 found"), (2, 2, "in use"), (3, 3, "differ")):
        with pytest.raises(SpecModelError, match=named):
            check_gpus(gpus[:count], world, allow_busy=False)
    with pytest.raises(SpecModelError, match="MIG"):
        check_gpus(gpus[2:], 1, allow_busy=False)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        (" 2,0", [2, 0]),
        ("GPU-34", [2]),
        ("gpu-12c,0", [1, 0]),
        ("GPU-12,0", []),  # fits two
        ("1,7,0", [1]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("MIG-34ef", []),
    ],
)
def test_the_gpus_that_are_checked_are_those_that_are_measured(named, expected, tmp_path, monkeypatch):
    lines = (
        f"{i}, NVIDIA H200, 580, 143771, 143000, Disabled, 00000000:0{i}:00.0, 9.0, {uuid}\n"
        for i, uuid in enumerate(["GPU-12ab", "GPU-12cd", "GPU-34ef"])
    )
    program(tmp_path, "nvidia-smi", f"cat <<'END'\n{''.join(lines)}END")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert [gpu.index for gpu in read_gpus()] == expected
    env = child_environment(os.environ, CommPlan(name="default"), empty_config="c", allow_nvls=False)
    assert (env.get("CUDA_VISIBLE_DEVICES"), env["CUDA_DEVICE_ORDER"]) == (named, "PCI_BUS_ID")


def test_processors_near_a_gpu(tmp_path):
    gpu = parse_gpus("0, NVIDIA H200, 580, 143771, 143000, Disabled, 00000000:4A:00.0, 9.0, GPU-1")[0]
    folder = tmp_path / "0000:4a:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-3,8,10-11\n")
    assert local_cpus(gpu, devices=tmp_path) == {0, 1, 2, 3, 8, 10, 11}
    assert local_cpus(gpu, devices=tmp_path / "none") == frozenset()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("progress 3 40 verify/n5 ok 4.51 900", (3, 40, "verify/n5", "ok", 4.51)),
        ("progress 3 40 verify/n5 timeout - -", (3, 40, "verify/n5", "timeout", None)),
        ("progress 3 40 verify/n5 not_run", (3, 40, "verify/n5", "not_run", None)),
    ],
)
def test_progress(line, expected):
    found = parse_progress(line)
    assert found is not None
    assert (found.done, found.total, found.key, found.disposition, found.median_ms) == expected


@pytest.mark.parametrize("line", ["", "note hello", "progress", "progress a b c d e", "progress 1 2 key"])
def test_other_lines_are_no_progress(line):
    assert parse_progress(line) is None


@pytest.mark.parametrize("cut", range(0, 160, 7))
def test_a_file_cut_anywhere_gives_its_whole_records(cut, tmp_path):
    lines = [json.dumps({"record": "point", "key": f"k{n}", "time_ms": 1.5}) for n in range(3)]
    text = "\n".join(lines) + "\n"
    path = tmp_path / "records.jsonl"
    path.write_text(text[:cut])
    whole = [line for line in lines if line in text[:cut]]
    assert read_records(path) == [json.loads(line) for line in whole]


# Settings and environments


def test_settings_come_bare_or_inside_a_calibration():
    settings = {"ring-ll": {"env": {"NCCL_PROTO": "LL", "NCCL_MIN_CTAS": 4}, "flags": ["--x"], "last": True}}
    for document in (settings, {"schema": "specmodel.calibration/1", "name": "a", "comm": settings}):
        default, ring = parse_settings(document, source="s.yaml")
        assert default == CommPlan(name="default")
        assert ring.env == {"NCCL_PROTO": "LL", "NCCL_MIN_CTAS": "4"}
        assert (ring.flags, ring.last) == (("--x",), True)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ([], "named settings"),
        ({}, "named settings"),
        ({"a b": {}}, "a b"),
        ({"a": []}, "env, flags and last"),
        ({"a": {"environment": {}}}, "env, flags and last"),
        ({"a": {"env": []}}, "a.*env"),
        ({"a": {"env": {"NCCL_PROT": "LL"}}}, "NCCL_PROTO"),
        ({"a": {"env": {"LD_PRELOAD": "x.so"}}}, "LD_PRELOAD"),
        ({"a": {"env": {"NCCL_PROTO": None}}}, "None"),
        ({"a": {"env": {"NCCL_PROTO": True}}}, "True"),
        ({"a": {"env": {"NCCL_PROTO": "LL $(x)"}}}, "plain value"),
        ({"a": {"env": {"NCCL_NET_PLUGIN": "/home/me/lib.so"}}}, "plain value"),
        ({"a": {"flags": "--x"}}, "flags"),
        ({"a": {"last": 1}}, "last"),
    ],
)
def test_malformed_settings(document, named):
    with pytest.raises(CalibrationError, match=named):
        parse_settings(document, source="s.yaml")


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_NVLS_ENABLE": "1"},
        {"NCCL_NVLS_ENABLE": "2"},
        {"NCCL_ALGO": "NVLS"},
        {"NCCL_ALGO": "Ring,nvlstree"},
        {"NCCL_ALGO": "allreduce:nvls"},
        {"NCCL_NVLS_NCHANNELS": "4"},
    ],
)
def test_multicast_is_refused_unless_allowed(env):
    assert requests_nvls(env)
    with pytest.raises(UsageError, match="--allow-nvls"):
        parse_settings({"a": {"env": env}}, source="s.yaml")
    assert parse_settings({"a": {"env": env}}, source="s.yaml", allow_nvls=True)[1].env == env


@pytest.mark.parametrize("env", [{}, {"NCCL_NVLS_ENABLE": "0"}, {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "^NVLS,NVLSTree"}])
def test_what_does_not_ask_for_multicast(env):
    assert not requests_nvls(env)


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(KNOWN_NCCL)), st.from_regex(r"[A-Z_]{1,20}", fullmatch=True)),
        st.text(alphabet="abcXYZ019_-/. ", max_size=10),
    )
)
def test_a_child_inherits_nothing_but_what_is_listed(parent):
    setting = CommPlan(name="ring", env={"NCCL_PROTO": "LL"})
    env = child_environment(parent, setting, empty_config="empty.conf", allow_nvls=False)
    own = {"CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "NCCL_CONF_FILE", "NCCL_NVLS_ENABLE", "NCCL_PROTO"}
    inherited = set(env) - own
    assert all(env[name] == parent[name] for name in inherited)
    assert not [name for name in inherited if name.startswith("NCCL_")]
    assert inherited <= {
        "CUDA_VISIBLE_DEVICES",
        "LD_LIBRARY_PATH",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_VISIBLE_DEVICES",
        "NVSHMEM_DISABLE_NVLS",
        "PATH",
        "TMPDIR",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    }
    assert env["NCCL_NVLS_ENABLE"] == "0"
    assert "NCCL_DEBUG" not in env


def test_the_safety_switches_of_a_machine_survive():
    parent = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0"}
    env = child_environment(parent, CommPlan(name="default"), empty_config="c", allow_nvls=True)
    assert {key: env.get(key) for key in parent} == {**parent, "NCCL_NVLS_ENABLE": "0"}


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=100)))
def test_what_is_recorded_is_known_and_plain(env):
    for key, value in recorded_environment(env).items():
        assert key in KNOWN_NCCL or key.startswith(("CUDA_", "OMP_"))
        assert "/" not in value


def test_paths_and_secrets_are_not_recorded():
    env = {"NCCL_CONF_FILE": "/x", "NCCL_DEBUG_FILE": "/y", "NCCL_PROTO": "LL", "HF_TOKEN": "t", "NCCL_NET": "a/b"}
    assert recorded_environment(env) == {"NCCL_PROTO": "LL"}


# Pooling


def test_median_interval_covers_the_median_about_as_often_as_it_says():
    rng = random.Random(7)
    for count in (10, 30, 200):
        hits = 0
        for _ in range(1000):
            low, high = median_interval([rng.expovariate(1.0) for _ in range(count)])
            hits += low <= 0.6931471805599453 <= high
        assert 0.935 <= hits / 1000 <= 0.99


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=60))
def test_interval_and_quantiles_lie_within_the_samples(values):
    low, high = median_interval(values)
    assert min(values) <= low <= quantile(values, 0.5) <= high <= max(values)
    assert quantile(values, 0.1) <= quantile(values, 0.9)


def point(samples, disposition="ok", kind="draft", clocks=None):
    taken = {"gpu_ms": samples}
    if clocks is not None:
        taken["sm_clock_mhz"] = clocks
    return {"kind": kind, "disposition": disposition, "samples": taken}


def test_the_slowest_rank_counts_and_slow_clocks_do_not():
    record = point([[1.0, 2.0, 3.0], [2.0, 1.0, 9.0]], clocks=[[1980, 1980, 1980], [1980, 1980, 1500]])
    assert kept_samples(record, "gpu_ms") == [2.0, 2.0]
    assert kept_samples(record, "host_ms") == []


def test_the_spread_between_runs_bounds_what_is_known():
    tight = [[1.0 + 1e-5 * ((7 * n) % 50 - 24.5) for n in range(50)]]
    alone = pool([point(tight)])
    shifted = pool([point([[value * scale for value in tight[0]]]) for scale in (1.0, 1.01, 0.99)])
    assert alone.between_runs_ms is None
    assert alone.median_ms == pytest.approx(1.0)
    assert shifted.median_ms == pytest.approx(1.0)
    error = shifted.sd_ms / shifted.effective_samples**0.5
    assert error == pytest.approx(0.01 / 3**0.5, rel=0.05)
    assert shifted.samples == 150
    assert alone.effective_samples > 4 * shifted.effective_samples


def test_identical_samples_have_no_spread():
    pooled = pool([point([[2.0] * 40])])
    assert (pooled.median_ms, pooled.sd_ms, pooled.effective_samples, pooled.disposition) == (2.0, 0.0, 40, "ok")


@pytest.mark.parametrize(
    ("dispositions", "expected", "runs"),
    [
        (["ok", "ok"], "ok", 2),
        (["noisy", "ok"], "ok", 2),
        (["ok", "throttled"], "ok", 1),
        (["throttled", "throttled"], "throttled", 2),
        (["ok", "wrong"], "wrong", 0),
        (["impossible", "ok"], "impossible", 0),
        (["timeout"], "timeout", 0),
        ([], "not_measured", 0),
    ],
)
def test_runs_that_disagree_about_how_they_went(dispositions, expected, runs):
    pooled = pool([point([[1.0, 1.0001] * 20], disposition) for disposition in dispositions])
    assert (pooled.disposition, pooled.runs) == (expected, runs)


def test_a_median_that_is_not_known_is_noisy():
    values = [1.0 + 0.1 * (n % 7) for n in range(30)]
    assert pool([point([values])]).disposition == "noisy"


# Building


def test_cache_folders_follow_the_platform(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert building.cache_dir({}, "linux") == Path("/home/me/.cache/specmodel")
    assert building.cache_dir({"XDG_CACHE_HOME": "/c"}, "linux") == Path("/c/specmodel")
    assert building.cache_dir({}, "darwin") == Path("/home/me/Library/Caches/specmodel")
    assert building.cache_dir({"LOCALAPPDATA": "/l"}, "win32") == Path("/l/specmodel")


def test_the_source_hash_follows_names_and_contents(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("a")
    (tmp_path / "src" / "a.cu").write_text("x\n")
    hashes = [building.source_hash(tmp_path)]
    (tmp_path / "src" / "notes.md").write_text("not compiled")
    assert building.source_hash(tmp_path) == hashes[0]
    (tmp_path / "src" / "a.cu").write_bytes(b"x\r\n")
    assert building.source_hash(tmp_path) == hashes[0]
    (tmp_path / "src" / "a.cu").write_text("y\n")
    hashes.append(building.source_hash(tmp_path))
    (tmp_path / "src" / "a.cu").rename(tmp_path / "src" / "b.cu")
    hashes.append(building.source_hash(tmp_path))
    assert len(set(hashes)) == 3


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put made-up programs on the path instead of the real ones."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(building.sysconfig, "get_path", lambda _: str(folder))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(building, "_hints", tuple)
    for name in ("cmake", "ninja"):
        program(folder, name, "exit 0")
    program(folder, "c++", "echo 'c++ 12.2.0'")
    program(folder, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    return folder


def test_a_toolchain_is_found(tools):
    chain = building.find_toolchain()
    assert (chain.nvcc_version, chain.host_compiler) == ("13.0.88", "c++ 12.2.0")
    assert chain.cmake == str(tools / "cmake")


def test_an_old_compiler_is_refused_with_what_to_do(tools):
    program(tools, "nvcc", "echo 'release 12.4, V12.4.131'")
    with pytest.raises(SpecModelError, match=r"12\.4\.131.*12\.8.*specmodel\[harness\]"):
        building.find_toolchain()


def test_the_compiler_and_its_headers_are_of_one_version(tools, tmp_path, monkeypatch):
    """A toolkit that the environment names is used alone; the wheels' compiler comes before the one on the path."""
    wheels, toolkit = tmp_path / "cu13", tmp_path / "toolkit"
    for root in (wheels, toolkit):
        (root / "bin").mkdir(parents=True)
        program(root / "bin", "nvcc", "echo 'release 13.5, V13.5.10'")
    monkeypatch.setattr(building, "_hints", lambda: (str(wheels),))
    found = building.find_toolchain()
    assert (found.nvcc, found.hints) == (str(wheels / "bin" / "nvcc"), (str(wheels),))
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    found = building.find_toolchain()
    assert (found.nvcc, found.hints) == (str(toolkit / "bin" / "nvcc"), ())


def test_a_missing_compiler_is_one_sentence(monkeypatch, tools):
    monkeypatch.setattr(building, "_nvcc", lambda hints: (None, hints))
    with pytest.raises(SpecModelError, match=r"nvcc was not found.*specmodel\[harness\]"):
        building.find_toolchain()


BUILDS = 'case "$1" in -S) ;; --build) echo built >> "%s"; printf binary > "$2/specmodel-harness";; esac'


def test_a_binary_is_built_once_for_each_toolchain_and_architecture(tools, tmp_path):
    log = tmp_path / "log"
    program(tools, "cmake", f'[ "$1" = -S ] && mkdir -p "$4"; {BUILDS % log}')
    chain, cache, said = building.find_toolchain(), tmp_path / "cache", []
    first = building.build(chain, architecture="90", cache=cache, say=said.append)
    again = building.build(chain, architecture="90", cache=cache, say=said.append)
    other = building.build(chain, architecture="80", cache=cache, say=said.append)
    assert first == again != other
    assert first.read_text() == "binary"
    assert log.read_text().count("built") == 2
    assert len(said) == 2
    assert [path.name for path in cache.rglob("build-*")] == []


def test_a_failed_build_leaves_its_log_and_nothing_else(tools, tmp_path):
    program(tools, "cmake", "echo 'error: no such kernel'; exit 1")
    cache = tmp_path / "cache"
    with pytest.raises(SpecModelError, match="no such kernel"):
        building.build(building.find_toolchain(), architecture="90", cache=cache)
    assert [path.suffix for path in (cache / "harness").iterdir()] == [".log"]


@pytest.mark.slow
def test_the_sources_compile_where_there_is_a_compiler(tmp_path):
    """The real sources build with the real compiler, and the program says its version; or what is missing is named."""
    if shutil.which("nvcc") is None:
        with pytest.raises(SpecModelError, match="nvcc was not found"):
            building.find_toolchain()
        return
    chain = building.find_toolchain()
    roots = [*map(Path, chain.hints), Path("/usr"), *Path("/usr/local").glob("cuda*")]
    if not any(root.joinpath("include", "cublasLt.h").exists() for root in roots):
        with pytest.raises(SpecModelError, match="cuBLASLt was not found"):
            building.build(chain, architecture="90", cache=tmp_path, say=lambda _: None)
        return
    binary = building.build(chain, architecture="90", cache=tmp_path, say=lambda _: None)
    answer = subprocess.run([str(binary), "version"], check=True, capture_output=True, text=True)
    assert json.loads(answer.stdout)["protocol"] == "specmodel.harness-points/1"
