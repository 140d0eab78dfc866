"""Options of the command line: what each accepts, and that what it does not accept is named with what is allowed."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.commands import options
from specmodel.errors import UsageError
from specmodel.model import FittedModel


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return sm.fit(
        sm.from_dict(
            {
                "schema": "specmodel.calibration/1",
                "name": "x",
                "comm": {"a,b": {}, "ring": {}},
                "measurements": {
                    "cycles": [
                        {"num_steps": 0, "tok_s": 100.0, "batch": 2},
                        {"num_steps": 2, "tok_s": 130.0, "batch": 2, "comm": "ring"},
                        {"num_steps": 2, "tok_s": 500.0, "batch": 16.5, "comm": "a,b"},
                    ]
                },
            }
        )
    )


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (options.step_list, "3", (3,)),
        (options.step_list, "0-3", (0, 1, 2, 3)),
        (options.step_list, "5,1, 3 - 4,4", (1, 3, 4, 5)),
        (options.batch_shares, "1,4,8", {1.0: None, 4.0: None, 8.0: None}),
        (options.batch_shares, "16.5", {16.5: None}),
        (options.batch_shares, "1=0.25,8=0.75", {1.0: 0.25, 8.0: 0.75}),
        (options.workload_shares, "chat", {"chat": 1.0}),
        (options.workload_shares, "chat=0.7,code=0.3", {"chat": 0.7, "code": 0.3}),
        (options.workload_shares, "a=b=2", {"a=b": 2.0}),
        (options.tree_list, "5x4x8", ((5, 4, 8),)),
        (options.tree_list, "5x4x8, 3x1x4,5x4x8", ((5, 4, 8), (3, 1, 4))),
        (options.positive_number, "2.5", 2.5),
        (options.whole_number(0, 10), "10", 10),
    ],
)
def test_accepted(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


REFUSED: tuple[tuple[Callable[[str], Any], str], ...] = (
    *((options.step_list, text) for text in ("", "-1", "3-1", "1.5", "a", "1,,2", "0-501", "1-2-3", "9" * 30)),
    *(
        (options.batch_shares, text)
        for text in ("", "0", "0.5", "x", "nan", "inf", "1,1", "1,4=0.5", "1=0", "1=-1", "1=x")
    ),
    *((options.workload_shares, text) for text in ("", "a,", "a,a", "=1", "a=0", "a=nan", "a=x", "a=")),
    *(
        (options.tree_list, text)
        for text in ("", "5x4", "5-4-8", "0x4x8", "5x0x8", "5x4x1", "3x1x8", "600x2x8", "5x4x8,")
    ),
    *((options.positive_number, text) for text in ("0", "-1", "nan", "inf", "x", "")),
    *((options.whole_number(0, 10), text) for text in ("-1", "11", "1.0", "1e1", "x", "", "9" * 40)),
)


@pytest.mark.parametrize(("read", "text"), REFUSED)
def test_refused_with_the_value_in_the_message(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read(text)
    assert len(str(error.value)) > 10
    assert text.split(",")[-1].strip() in str(error.value)


@given(st.sets(st.integers(0, options.MOST_STEPS), min_size=1, max_size=20))
def test_any_set_of_steps_can_be_written(steps: set[int]) -> None:
    assert options.step_list(",".join(map(str, steps))) == tuple(sorted(steps))


@given(st.text(max_size=20))
def test_no_text_is_read_by_accident_or_raises_anything_else(text: str) -> None:
    for read in (options.step_list, options.batch_shares, options.workload_shares, options.tree_list):
        try:
            value = read(text)
        except argparse.ArgumentTypeError:
            continue
        assert len(value) >= 1


@pytest.mark.parametrize("name", ["a.png", "a.svg", "A.PDF"])
def test_a_figure_can_be_any_of_three_kinds(tmp_path: Path, name: str) -> None:
    assert options.figure_path(str(tmp_path / name)) == tmp_path / name
    assert not (tmp_path / name).exists()


def test_a_figure_that_could_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for bad in ("a.gif", "png", str(tmp_path / "folder.png"), str(tmp_path / "none" / "a.png")):
        with pytest.raises(argparse.ArgumentTypeError):
            options.figure_path(bad)
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(argparse.ArgumentTypeError, match="written"):
            options.figure_path(str(tmp_path / "a.png"))
        tmp_path.chmod(0o700)


def test_communication_settings_by_name(model: FittedModel) -> None:
    assert options.comm_names(None, model) is None
    assert options.comm_names(["ring,default"], model) == ("ring", "default")
    assert options.comm_names(["a,b", "ring", "ring"], model) == ("a,b", "ring")
    with pytest.raises(UsageError, match="use one of: default, a,b, ring"):
        options.comm_names(["ring,tree"], model)


def test_batches_are_every_measured_one_unless_they_are_given(model: FittedModel) -> None:
    assert options.batches(None, model) == (2.0, 16.5)
    assert options.batches({1.0: None}, model) == (1.0,)
    assert options.distribution(None, "tok_s", model) is None
    assert options.distribution({1.0: None, 2.0: None}, "tok_s", model) is None
    assert options.distribution({1.0: 0.2, 2.0: 0.8}, "tok_s", model) == {1.0: 0.2, 2.0: 0.8}
    assert options.distribution(None, "goodput", model) == {2.0: 1.0, 16.5: 1.0}
    empty = sm.fit(sm.from_dict({"schema": "specmodel.calibration/1", "name": "x"}))
    assert options.batches(None, empty) == (1.0,)


def test_goodput_needs_its_limit() -> None:
    options.require_limit("goodput", 10.0)
    options.require_limit("tok_s", None)
    with pytest.raises(UsageError, match="--max-tpot-ms"):
        options.require_limit("goodput", None)
