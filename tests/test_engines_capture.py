"""What closes the path of the drafter's graphs: captured or not, on how many ranks, for which sizes, memory left."""

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given

HEAD = "[2026-02-20 11:05:{s:02d} TP{r}] Capture draft cuda graph "
BEGIN = HEAD + "begin. This can take up to several minutes. avail mem={m:.2f} GB"
END = HEAD + "end. Time elapsed: {t:.2f} s. mem usage=0.24 GB. avail mem={m:.2f} GB."


def grep(cut):
    """The one-line check on eight ranks, `grep "draft cuda graph"`, its last line cut to `cut` characters."""
    lines = [BEGIN.format(s=8, r=rank, m=8.67 + 0.01 * rank) for rank in range(8)]
    lines += [END.format(s=12, r=rank, t=3.6, m=8.43 + 0.01 * rank) for rank in range(8)]
    last = lines.pop()
    return "\n".join([*lines, last[: cut if cut else len(last)]])


def facts(tmp_path, text):
    log = tmp_path / "grep.txt"
    log.write_text(text)
    calibration, readings = ingest([str(log)], Given(), "check")
    return {row.about: row for row in calibration.evidence}, readings[0]


FULL = len(END.format(s=12, r=7, t=3.6, m=8.5))
AFTER_END = FULL - len(END.format(s=12, r=7, t=3.6, m=8.5).split(" end")[1])


@pytest.mark.parametrize("cut", range(AFTER_END - 4, FULL + 1))
def test_eight_ranks_with_the_last_line_cut_anywhere_after_its_kind_is_known(cut, tmp_path):
    found, _ = facts(tmp_path, grep(cut))
    assert found["draft_cuda_graph"].value is True
    assert found["draft_cuda_graph"].ranks == 8
    assert found["free_memory_bytes"].value == round(8.43 * 2**30)
    cut_before_end = cut < AFTER_END
    assert ("the last line is cut" in found["draft_cuda_graph"].note) is cut_before_end
    # The cut line's own memory counts only once it is whole.
    assert found["free_memory_bytes"].ranks == (8 if cut >= FULL - 1 else 7)


def test_a_last_line_of_which_nothing_is_known_leaves_seven_ranks(tmp_path):
    found, _ = facts(tmp_path, grep(30))
    assert found["draft_cuda_graph"].ranks == 7
    assert "begun on 8 ranks, ended on 7" in found["draft_cuda_graph"].note


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("Capture target verify CUDA graph end. elapsed=8.71 s, mem usage=1.86 GB, avail mem=20.88 GB.", "target"),
        ("Capture target decode CUDA graph end. elapsed=8.71 s, mem usage=1.86 GB, avail mem=20.88 GB.", "target"),
        ("Capture cuda graph end. Time elapsed: 5.93 s. mem usage=0.71 GB. avail mem=20.88 GB.", "target"),
        ("Capture draft decode CUDA graph end. elapsed=2.95 s, mem usage=0.31 GB, avail mem=20.88 GB.", "draft"),
        ("Capture draft cuda graph end. Time elapsed: 3.61 s. mem usage=0.24 GB. avail mem=20.88 GB.", "draft"),
    ],
)
@pytest.mark.parametrize(
    "prefix", ["[2026-02-20 11:05:08 DP{r} TP{r} EP{r}] ", "pod-0 | [2026-02-20 11:05:08.123 TP{r}] "]
)
def test_spellings_of_every_version_and_ranks_once_each(line, part, prefix, tmp_path):
    text = "".join(f"{prefix.format(r=rank)}{line}\n" for rank in (0, 1, 2, 1, 0))
    found, _ = facts(tmp_path, text)
    assert found[f"{part}_cuda_graph"].ranks == 3
    assert found["free_memory_bytes"].value == round(20.88 * 2**30)


def test_a_failed_capture_is_no_capture(tmp_path):
    found, _ = facts(tmp_path, "[2026-02-20 11:05:08 TP0] Capture cuda graph failed: out of memory\n")
    assert found["target_cuda_graph"].value is False


def test_a_drafter_without_a_capture_line_ran_eagerly(tmp_path):
    args = (
        "[2026-02-20 11:05:00] server_args=ServerArgs(model_path='m', tp_size=1, speculative_algorithm='EAGLE3', "
        "speculative_num_steps={k}, speculative_eagle_topk=1, disable_cuda_graph={off})\n"
    )
    capture = (
        "[2026-02-20 11:05:08 TP0] Capture cuda graph end. Time elapsed: 5.93 s. mem usage=0.71 GB. avail mem=2 GB.\n"
    )
    line = (
        "[2026-02-20 11:06:00 TP0] Decode batch, #running-req: 1, #token: 99, token usage: 0.01, accept len: 2.00, "
        "cuda graph: True, gen throughput (token/s): 200.00, #queue-req: 0\n"
    )
    found, _ = facts(tmp_path, args.format(k=3, off=False) + capture + 3 * line)
    assert found["draft_cuda_graph"].value is False
    found, _ = facts(tmp_path, args.format(k=1, off=False) + capture + 3 * line)
    assert "draft_cuda_graph" not in found  # one step has no draft graph to capture
    found, _ = facts(tmp_path, args.format(k=3, off=True) + 3 * line.replace("True", "False"))
    assert found["draft_cuda_graph"].value is False
    assert found["target_cuda_graph"].value is False
    assert found["decode_with_cuda_graph"].value is False


def test_sizes_and_settings_in_force(tmp_path):
    text = (
        "[2026-02-20 11:05:00] server_args=ServerArgs(model_path='m', tp_size=8, disable_custom_all_reduce=True, "
        "speculative_algorithm='EAGLE3', speculative_num_steps=3, speculative_eagle_topk=1, "
        "speculative_num_draft_tokens=4)\n"
        "[2026-02-20 11:05:01 TP0] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, "
        "bs=[1, 2, 4], avail mem=9 GB\n"
        "[2026-02-20 11:05:02 TP0] Capture target verify CUDA graph end. elapsed=1 s, mem usage=1 GB, avail mem=8 GB.\n"
        "node:1:2 [0] NCCL INFO NCCL_PROTO set by environment to LL\n"
        "node:1:2 [0] NCCL INFO NCCL_NVLS_ENABLE set by environment to 0\n"
        "[2026-02-20 11:06:00 TP0] Decode batch, #running-req: 1, #token: 99, token usage: 0.01, accept len: 2.00, "
        "cuda graph: True, gen throughput (token/s): 200.00, #queue-req: 0\n"
    )
    log = tmp_path / "s.log"
    log.write_text(text + text.splitlines(keepends=True)[-1] * 3)
    calibration, _ = ingest([str(log)], Given(), "check")
    assert tuple(calibration.model.cuda_graph_sizes) == (1, 2, 4)
    values = {row.value for row in calibration.evidence}
    assert {"NCCL_PROTO=LL", "NCCL_NVLS_ENABLE=0"} <= values
    assert any(str(value).startswith("NCCL: the custom") for value in values)
    # What the engine sets itself is no setting of the user's, so it does not name the communication setting.
    setting = calibration.comm["ll-disable-custom-all-reduce"]
    assert setting.env == {"NCCL_PROTO": "LL"}
    assert setting.flags == ("--disable-custom-all-reduce",)
    assert calibration.measurements.cycles[0].comm == "ll-disable-custom-all-reduce"
