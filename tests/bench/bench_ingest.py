"""How fast and in how much memory `specmodel ingest` reads long logs. A table, no pass or fail.

python tests/bench/bench_ingest.py                    64 MB of each kind of log
python tests/bench/bench_ingest.py --megabytes 1000   a gigabyte
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "engines"
PROGRAM = """
import argparse, sys
from specmodel.engines import command
parser = argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args(sys.argv[1:])))
"""
VLLM_ACCESS = b'(APIServer pid=4101) INFO:     10.0.0.6:50294 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
TRTLLM_OTHER = (
    b"[05/20/2026-14:03:07] [TRT-LLM] [I] [_torch][RANK 0] Run generation only CUDA graph warmup for batch size\n"
)
LLAMA_OTHER = b"1.03.101.552 I slot print_timing: id  0 | task 0 | n_gen = 63, tg = 92.41 t/s, tg_3s = 93.02 t/s\n"
ACCESS = b'[2026-08-19 09:15:57] INFO:     10.0.0.6:50294 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'


def kinds() -> dict[str, tuple[bytes, bytes]]:
    """A head that stands once and a body that is repeated, for each kind of log."""
    sglang = (DATA / "sglang_v0518_eagle3_tp8_clean.log").read_bytes()
    lines = sglang.splitlines(keepends=True)
    start = b"".join(line for line in lines if b"Decode" not in line and b"Prefill" not in line)
    decode = b"".join(line for line in lines if b"Decode batch" in line)
    vllm = (DATA / "vllm_v1_eagle3.log").read_bytes()
    iterations = [line for line in vllm.splitlines(keepends=True) if b"Iteration(" in line]
    llama_start, _, requests = (DATA / "llamacpp_server_new.log").read_bytes().partition(b"launch_slot_")
    trtllm = (DATA / "trtllm_iter.log").read_bytes().splitlines(keepends=True)
    return {
        "sglang, whole log over and over": (b"", sglang),
        "sglang, decode lines only": (start, decode),
        "sglang, one decode line in ten": (start, b"".join(line + 9 * ACCESS for line in lines if b"Decode" in line)),
        "vllm, whole log over and over": (b"", vllm),
        "vllm, one iteration in ten lines": (vllm, b"".join(line + 9 * VLLM_ACCESS for line in iterations)),
        "trtllm, iteration lines only": (b"", (DATA / "trtllm_iter.log").read_bytes()),
        "trtllm, one iteration in ten lines": (b"", b"".join(line + 9 * TRTLLM_OTHER for line in trtllm)),
        "vllm, iteration lines only": (vllm, b"".join(iterations)),
        "llama.cpp, requests only": (llama_start, b"launch_slot_" + requests),
        "llama.cpp, a request in a hundred": (b"", (DATA / "llamacpp_server_new.log").read_bytes() + 500 * LLAMA_OTHER),
        "NCCL debug lines over and over": (b"", (DATA / "nccl_debug_info.log").read_bytes()),
        "sglang in Docker's records": (b"", b"".join(_docker(line) for line in lines)),
        "sglang in journald's records": (b"", b"".join(_journald(line) for line in lines)),
        "sglang in Docker's records, escapes": (b"", b"".join(_docker(b"\x1b[0m" + line) for line in lines)),
        "sglang behind a container's prefix": (b"", b"".join(b"sglang-1  | " + line for line in lines)),
        "no engine's words": (start, ACCESS),
    }


def _docker(line: bytes) -> bytes:
    record = {"log": line.decode("utf-8", "replace"), "stream": "stderr", "time": "2026-08-19T09:14:02.123456789Z"}
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _journald(line: bytes) -> bytes:
    record = {"__REALTIME_TIMESTAMP": "1755594842123456", "PRIORITY": "6", "_PID": "4101", "_TRANSPORT": "stdout"}
    return json.dumps(record | {"MESSAGE": line.decode("utf-8", "replace").rstrip()}).encode() + b"\n"


def measure(path: Path) -> tuple[float, float, float]:
    """Wall time and CPU time in ms, and peak memory in MB, of one run."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    wall_ms = 1e3 * (time.perf_counter() - began)
    return wall_ms, 1e3 * (usage.ru_utime + usage.ru_stime), usage.ru_maxrss / 1024


def main() -> None:
    """Write each log, read it, print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--only", help="kinds whose name holds this")
    args = parser.parse_args()
    sys.stdout.write(f"{'log':36}{'MB':>7}{'MB/s wall':>11}{'MB/s CPU':>10}{'peak MB':>9}\n")
    for name, (head, body) in kinds().items():
        if args.only and args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "long.log"
            with path.open("wb") as log:
                log.write(head)
                chunk = body * max(1, 2**20 // len(body))
                for _ in range(int(args.megabytes * 1e6 / len(chunk)) + 1):
                    log.write(chunk)
            size = path.stat().st_size / 1e6
            wall_ms, cpu_ms, peak = measure(path)
        sys.stdout.write(f"{name:36}{size:7.0f}{1e3 * size / wall_ms:11.1f}{1e3 * size / cpu_ms:10.1f}{peak:9.0f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
