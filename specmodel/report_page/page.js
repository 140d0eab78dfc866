"use strict";
// Looks up what the model computed, and shows it: nothing here predicts anything.
(() => {
  const source = document.getElementById("report-data").textContent;
  const report = JSON.parse(source);
  const byId = (id) => document.getElementById(id);

  const download = byId("download");
  const blob = new Blob([source], { type: "application/json" });
  download.href = URL.createObjectURL(blob);
  download.download = `${report.name}-report.json`;
  download.hidden = false;

  const launch = byId("launch-line");
  const copy = document.querySelector(".copy");
  if (launch && copy && navigator.clipboard) {
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(launch.textContent);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(launch);
        copy.textContent = "Selected: copy it by hand";
      }
      setTimeout(() => { copy.textContent = "Copy"; }, 2500);
    });
  }

  const picker = document.querySelector(".picker");
  const show = (batch) => {
    for (const panel of document.querySelectorAll(".panel")) panel.hidden = panel.dataset.batch !== batch;
  };
  if (picker) {
    picker.hidden = false;
    show(picker.querySelector("input:checked").value);
    picker.addEventListener("change", (event) => show(event.target.value));
  }

  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });

  const grid = report.whatif;
  if (!grid) return;
  byId("scriptless").hidden = true;
  const axes = ["batch", "acceptance", "verify", "draft"];
  const sliders = axes.map((name) => byId(`slider-${name}`));
  const rows = [...byId("whatif-rows").rows];

  const rate = (x) => (x >= 999.95 ? Math.round(x).toLocaleString("en-US") : x.toFixed(x >= 9.995 ? 1 : 2));
  const factor = (x) => (x < 9.995 ? `${x.toFixed(2)}x` : x < 99.95 ? `${x.toFixed(1)}x` : ">100x");
  const change = (x) => `${x < -0.0005 ? "-" : "+"}${(100 * Math.abs(x)).toFixed(1)}\u00a0%`;

  const draw = (row, value, low, high, from, to) => {
    const place = (x) => `${Math.min(Math.max(((x - from) / (to - from)) * 100, 0), 100)}%`;
    const [line, left, right] = row.querySelectorAll(".whisker");
    line.setAttribute("x1", place(low));
    line.setAttribute("x2", place(high));
    for (const [end, x] of [[left, low], [right, high]]) {
      end.setAttribute("x1", place(x));
      end.setAttribute("x2", place(x));
      end.setAttribute("visibility", x < from || x > to ? "hidden" : "visible");
    }
    row.querySelector("circle").setAttribute("cx", place(value));
  };

  const update = () => {
    const at = sliders.map((slider) => Number(slider.value));
    axes.forEach((name, i) => {
      byId(`value-${name}`).textContent = grid.words[name][at[i]];
      sliders[i].setAttribute("aria-valuetext", grid.words[name][at[i]]);
    });
    const point = at.reduce((sum, index, i) => sum * grid[axes[i]].length + index, 0);
    const count = grid.shapes.length;
    const start = point * count;
    const best = grid.best[point];
    byId("whatif-steps").textContent = grid.names[best];
    const far = grid.extrapolated[at[0]][best];
    const ends = `${rate(grid.low[start + best])} to ${rate(grid.high[start + best])}`;
    byId("whatif-rate").textContent = `${far ? ends : rate(grid.tok_s[start + best])} tok/s`;
    byId("whatif-rate-detail").textContent = far ? "90 % interval" : `90 % interval ${ends}`;
    byId("whatif-speedup").textContent = far ? "not known" : factor(grid.speedup[point]);
    byId("whatif-gain").textContent = far ? "not known" : change(grid.gain[point]);
    const values = grid.tok_s.slice(start, start + count);
    const reach = [...grid.low.slice(start, start + count), ...grid.high.slice(start, start + count)];
    const from = Math.max(Math.min(...reach, ...values), 0.6 * Math.min(...values)) * 0.98;
    const to = Math.min(Math.max(...reach, ...values), 1.35 * Math.max(...values)) * 1.02;
    rows.forEach((row, i) => {
      draw(row, values[i], grid.low[start + i], grid.high[start + i], from, to);
      row.classList.toggle("best", i === best);
      row.lastElementChild.textContent = rate(values[i]);
    });
    const notes = [];
    if (grid.outside[at[0]]) notes.push("This batch was not measured: the interval is wide for that reason.");
    if (far) notes.push("This is extrapolated and no recommendation.");
    byId("whatif-note").textContent = notes.join(" ");
  };

  for (const slider of sliders) slider.addEventListener("input", update);
  byId("reset").addEventListener("click", () => {
    sliders.forEach((slider, i) => { slider.value = grid.start[i]; });
    update();
  });
  update();
})();
