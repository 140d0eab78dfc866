"""Figures: what the artists show is what was predicted and measured; files are whole, of the right kind, repeatable."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import specmodel as sm
from specmodel.cli import main
from specmodel.decide import Optimum
from specmodel.model import FittedModel
from specmodel.plot import draw_optimum, figure_of_optima, measured_points, save

ROOT = Path(__file__).parents[1]
SEED = ROOT / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return sm.fit(sm.load(SEED))


@pytest.fixture(scope="module")
def optimum(model: FittedModel) -> Optimum:
    return sm.optimize(model)


@pytest.fixture
def ax() -> Any:
    figure = Figure()
    FigureCanvasAgg(figure)
    return figure.subplots()


def test_the_line_is_what_was_predicted_and_the_band_its_interval(ax: Any, optimum: Optimum) -> None:
    artists = draw_optimum(ax, optimum)
    assert set(artists["line"]) == {"default", "ring-ll-sys"}
    for comm, line in artists["line"].items():
        chains = [c for c in optimum.table if c.comm == comm]
        assert list(line.get_xdata()) == [c.num_steps for c in chains]
        assert list(line.get_ydata()) == [c.tok_s for c in chains]
        edges = artists["band"][comm].get_paths()[0].vertices
        for c in chains:
            at = edges[np.isclose(edges[:, 0], c.num_steps), 1]
            assert (at.min(), at.max()) == pytest.approx(c.tok_s_interval)
    assert (list(artists["best"].get_xdata()), list(artists["best"].get_ydata())) == ([2], [optimum.best.tok_s])
    assert artists["plain"].get_ydata()[0] == optimum.plain.tok_s


def test_the_points_are_what_was_measured(ax: Any, model: FittedModel, optimum: Optimum) -> None:
    points = measured_points(model, optimum)
    speeds = {(p.num_steps, p.comm): p for p in points if not p.bound}
    assert set(speeds) == {(0, "default"), (0, "ring-ll-sys"), (2, "ring-ll-sys"), (5, "default")}
    assert speeds[2, "ring-ll-sys"].tok_s == 94.0
    assert speeds[0, "default"].tok_s_interval == pytest.approx((88.0, 90.0), rel=0.01)
    # 27 ms a cycle at the acceptance that was fitted
    assert speeds[5, "default"].tok_s == pytest.approx(1000.0 * 1.867 / 27.0, rel=0.01)
    bounds = [p for p in points if p.bound]
    assert [p.num_steps for p in bounds] == [1, *range(3, 11)]
    artists = draw_optimum(ax, optimum, points)
    assert len(artists["measured"]) == 4
    drawn = artists["bounds"].get_offsets()
    assert [tuple(map(float, xy)) for xy in drawn] == [(p.num_steps, 94.0) for p in bounds]


def test_of_another_workload_only_plain_decoding_is_shown(model: FittedModel) -> None:
    faulty = sm.optimize(model, workload="wiring-fault")
    assert {p.num_steps for p in measured_points(model, faulty, "wiring-fault")} == {0}
    shares = {"wiring-fault": 0.5, "default": 0.5}
    mixed = sm.optimize(model, workload=shares)
    assert {p.num_steps for p in measured_points(model, mixed, shares)} == {0}


def test_trees_stand_beside_the_chains(ax: Any, model: FittedModel) -> None:
    optimum = sm.optimize(model, comm="default", trees=[(5, 4, 8), (3, 2, 6)])
    artists = draw_optimum(ax, optimum)
    assert len(artists["trees"]) == 2
    assert list(artists["line"]["default"].get_xdata()) == list(range(11))
    texts = {text.get_text() for text in ax.texts}
    assert {"tree 5x4x8", "tree 3x2x6"} <= texts


def test_axes_are_labelled_with_units_and_lines_by_name(ax: Any, optimum: Optimum) -> None:
    draw_optimum(ax, optimum)
    assert "tok/s" in ax.get_ylabel()
    assert "num_steps" in ax.get_xlabel()
    assert {"default", "ring-ll-sys", "plain"} <= {text.get_text() for text in ax.texts}
    assert ax.get_legend() is None
    places = sorted(text.xy[1] for text in ax.texts if text.get_text() in ("default", "ring-ll-sys", "plain"))
    low, high = ax.get_ylim()
    assert min(np.diff(places)) > 0.05 * (high - low)


def test_a_wide_band_does_not_hide_the_line(ax: Any) -> None:
    document = {
        "schema": "specmodel.calibration/1",
        "name": "x",
        "measurements": {"cycles": [{"num_steps": 0, "tok_s": 100.0}, {"num_steps": 2, "tok_s": 130.0}]},
    }
    optimum = sm.optimize(sm.fit(sm.from_dict(document)), max_steps=30)
    draw_optimum(ax, optimum)
    low, high = ax.get_ylim()
    values = [c.tok_s for c in optimum.table]
    assert low <= min(values)
    assert max(values) <= high <= 1.5 * max(values)
    assert any(text.get_text() == "extrapolated" for text in ax.texts)


def test_one_panel_a_batch() -> None:
    model = sm.fit(sm.load(ROOT / "calibrations" / "field" / "vllm_recipes_qwen38_2p4t_nvfp4.yaml"))
    optima = [sm.optimize(model, batch=b) for b in model.measured.batches]
    assert len(optima) == 4
    figure = figure_of_optima(model, optima)
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert len(shown) == 4
    titles = [ax.get_title(loc="left") for ax in shown]
    assert all(title.startswith(f"batch {o.batch:g}: ") for title, o in zip(titles, optima, strict=True))


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_a_figure_is_of_its_kind_and_the_same_each_time(
    tmp_path: Path, optimum: Optimum, model: FittedModel, name: str, start: bytes
) -> None:
    files = [tmp_path / kind / name for kind in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        save(figure_of_optima(model, [optimum]), file)
        assert os.listdir(file.parent) == [name]
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(start)
    assert first == second


def test_a_figure_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, optimum: Optimum, model: FittedModel
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"before")

    class Broken(Figure):
        def savefig(self, fname: Any, **more: Any) -> None:
            Path(fname).write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(Broken(), file)
    assert file.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.png"]


def test_the_command_line_writes_the_figure_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tok s.svg"
    assert main(["optimize", str(SEED), "--plot", str(file)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert f"wrote {file}" in " ".join(said.out.split())
    assert "ring-ll-sys" in file.read_text(encoding="utf-8")


def test_no_state_of_pyplot_is_touched(optimum: Optimum, model: FittedModel, tmp_path: Path) -> None:
    import sys

    save(figure_of_optima(model, [optimum]), tmp_path / "a.png")
    assert "matplotlib.pyplot" not in sys.modules
