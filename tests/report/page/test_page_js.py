"""page.js in a real browser: every chart is drawn, read out and exported; nothing is requested; a phone needs no bar."""

import html
import json
import math
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from windlass.report.events import EventLog
from windlass.report.page.serve import Live, open_server
from windlass.report.page.write import open_run, page_text, render_page

CHARTS = ["loss", "source_losses", "learning_rate", "gradient_norm", "throughput", "mfu", "memory", "data_wait"]
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"\s+content="[^"]*">')
PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const found = {};
  try {
    %s
  } catch (error) { found.error = String(error); }
  parent.document.getElementById("found").textContent = JSON.stringify(found);
}, 500));
</script>
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three sessions, NaN in two places, two validation sets, two sources."""
    directory = tmp_path_factory.mktemp("runs") / "mine"
    log = EventLog(directory / "events.jsonl")
    log.write("start", 0, {"baselines": {"bigram": {"loss": 4.4, "bits_per_byte": 2.05}}})
    for step in range(1, 201):
        if step in (61, 121, 181):
            log.write("resume", step - 1, {})
        log.write("step", step, {
            "loss": math.nan if step in (7, 150) else 8.0 - step / 50, "source_losses": {"a": 5.0, "b": 6.0},
            "gradient_norm": 100.0 if step < 3 else 1.0, "learning_rate": 1e-3, "tokens": step * 2048, "mfu": 0.4,
            "tokens_per_s": 14_600.0, "tokens_per_s_per_gpu": 7300.0, "memory_bytes": 3 << 30, "data_wait_s": 0.001,
            "step_s": 0.14, "warm_up": False, "ledger": {"training": step * 0.14},
        })  # fmt: skip
        if step % 50 == 0:
            for name in (
                "web",
                "a name that is very long, and longer than a phone is wide, so that it must be wrapped",
            ):
                log.write("validation", step, {"name": name, "loss": 7.0 - step / 50, "bits_per_byte": 1.7})
    log.write("end", 200, {"reason": "finished", "tokens": 409_600})
    (directory / "resolved.yaml").write_text("key: " + "x" * 500 + "\n")
    return directory


@pytest.fixture
def browse(tmp_path):
    """browse(page or address, *flags) -> (the page's DOM, stderr) in headless Chromium; skips where there is none."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    always = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    always += ["--disable-component-update", "--no-first-run", f"--user-data-dir={tmp_path}/chromium"]

    def browse(text, *flags):
        page, address = tmp_path / "page.html", text
        if not text.startswith("http://"):
            page.write_text(text, "utf-8")
            address = f"file://{page}"
        command = [browser, *always, "--enable-logging=stderr", *flags, "--virtual-time-budget=6000", "--dump-dom"]
        done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, done.stderr

    return browse


AXE = Path(__file__).parents[3] / "build" / "axe" / "package" / "axe.min.js"
AUDIT = """<script>%s</script><script>
addEventListener("load", () => setTimeout(() => axe.run(document).then((found) => {
  const faults = found.violations.map((fault) => [fault.id, fault.nodes.map((node) => node.html.slice(0, 120))]);
  const result = { faults, undecided: found.incomplete.map((one) => one.id), passed: found.passes.length };
  document.body.append(Object.assign(document.createElement("pre"), { id: "audit", textContent: JSON.stringify(result) }));
}), 500));
</script>"""


@pytest.mark.long
@pytest.mark.parametrize("scheme", [[], ["--blink-settings=preferredColorScheme=0"]], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_axe_finds_no_fault(browse, run, scheme, width):
    if not AXE.exists():
        pytest.skip("needs axe-core: sh scripts/test_programs.sh")
    page = POLICY.sub("", page_text(run)).replace("</body>", AUDIT % AXE.read_text() + "</body>")
    dom, _ = browse(page, f"--window-size={width},1000", *scheme)
    found = json.loads(html.unescape(re.search(r'<pre id="audit">(.*?)</pre>', dom, re.S)[1]))
    assert found["faults"] == [] and found["undecided"] == [] and found["passed"] > 30


@pytest.fixture
def probe(browse, run):
    """probe(script, width=1200) -> what the script puts into `found`, inside the page or `text`, `width` pixels wide."""

    def probe(script, width=1200, text=None, flags=()):
        inner = POLICY.sub("", text or page_text(run)).replace("</body>", PROBE % script + "</body>")
        outer = f'<p id="found"></p><iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(inner)}"></iframe>'
        dom, _ = browse(f"<!doctype html><meta charset=utf-8>{outer}", "--window-size=1300,1000", *flags)
        return json.loads(html.unescape(re.search(r'<p id="found">(.*?)</p>', dom, re.S)[1]))

    return probe


def test_the_page_as_it_is_written_draws_without_a_complaint(browse, run):
    dom, said = browse(page_text(run))
    assert "CONSOLE" not in said, said
    canvases = [dict(re.findall(r'([\w-]+)="([^"]*)"', tag)) for tag in re.findall(r"<canvas[^>]*>", dom)]
    assert [canvas["id"] for canvas in canvases] == [f"plot-{key}" for key in CHARTS]
    assert all(canvas["role"] == "img" and canvas["tabindex"] == "0" for canvas in canvases)
    begins = "Loss in nats per target token against steps. training: 7.98 at step 1, 4 at step 200; web: 6 at step 50"
    assert canvases[0]["aria-label"].startswith(begins)


LINES = 1_000_000


@pytest.fixture(scope="module")
def a_million_lines(tmp_path_factory):
    """The page of a run that logged a million steps, lost a thousand of them twice, and has a spike and a gap in its
    loss; no chart is drawn from more than 2,000 buckets."""
    directory = tmp_path_factory.mktemp("long") / "mine"
    directory.mkdir()
    with open(directory / "events.jsonl", "w", encoding="utf-8") as file:
        file.write('{"kind": "start", "time": 1700000000, "step": 0}\n')
        step = 0
        for number in range(1, LINES + 1):
            if number in (LINES // 3, LINES // 2):
                step -= 1000
                file.write(f'{{"kind": "resume", "time": 1700000000, "step": {step}}}\n')
            step += 1
            loss = (
                "null"
                if 700_000 <= step < 702_000
                else "99.5"
                if step == 123_456
                else f"{3 + 5000 / (step + 1000):.6f}"
            )
            lost = ', "non_finite": {"loss": "nan"}' if loss == "null" else ""
            file.write(
                f'{{"kind": "step", "time": {1700000000 + number}, "step": {step}, "loss": {loss}, "gradient_norm": 1.5, '
                f'"learning_rate": 0.001, "tokens": {step * 2048}, "tokens_per_s": 8063.75, "tokens_per_s_per_gpu": 4031.87, '
                f'"mfu": null, "memory_bytes": 572682240, "data_wait_s": 0.0001, "step_s": 0.25, "warm_up": false{lost}}}\n'
            )
    return page_text(directory)


@pytest.mark.long
def test_a_million_lines_are_drawn_without_a_complaint(browse, a_million_lines):
    assert len(a_million_lines.encode()) < 1_000_000
    dom, said = browse(a_million_lines)
    assert "CONSOLE" not in said, said
    canvases = [dict(re.findall(r'([\w-]+)="([^"]*)"', tag)) for tag in re.findall(r"<canvas[^>]*>", dom)]
    drawn = [
        "plot-loss",
        "plot-learning_rate",
        "plot-gradient_norm",
        "plot-throughput",
        "plot-memory",
        "plot-data_wait",
    ]
    assert [canvas["id"] for canvas in canvases] == drawn
    label = "training: 7.0358 at step 512, 3.005 at step 998000"  # 512 steps are a bucket
    assert label in canvases[0]["aria-label"]


@pytest.mark.long
def test_of_a_million_lines_nothing_is_requested_and_the_spike_and_the_gap_are_there(probe, a_million_lines):
    found = probe("""
      updateAll(); found.asked = performance.getEntriesByType("resource").map((one) => one.name);
      found.csv = csv(data.charts[0]); found.marks = data.runs[0].marks.map(([step, kind]) => [step, kind]);
      const c = document.getElementById("plot-loss"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
      found.ink = 0; for (let i = 3; i < d.length; i += 4) found.ink += d[i] > 0;
    """, text=a_million_lines)  # fmt: skip
    assert found["asked"] == [] and found["ink"] > 500
    rows = [line.split(",") for line in found["csv"].split("\r\n")[1:-1]]
    assert 1000 <= len(rows) <= 2100 and max(float(row[-1]) for row in rows if row[-1]) == 99.5
    assert "" in {row[5] for row in rows}, "what was not finite is a gap"
    assert sorted(found["marks"]) == [[332_332, "resumed"], [497_999, "resumed"], [700_000, "not finite"]]


@pytest.mark.parametrize("scheme", [[], ["--blink-settings=preferredColorScheme=0"]], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_spike_of_one_step_among_thousands_is_a_line_and_usual_noise_is_not(probe, tmp_path, width, scheme):
    directory = tmp_path / "long"
    directory.mkdir()
    with open(directory / "events.jsonl", "w", encoding="utf-8") as file:
        file.write('{"kind": "start", "time": 1700000000, "step": 0}\n')
        for step in range(1, 20_001):
            loss = 50 if step == 7777 else 2 + 0.1 * (step * 7 % 13) / 13
            file.write(
                f'{{"kind": "step", "time": {1700000000 + step}, "step": {step}, "loss": {loss}, "tokens": {step * 64}}}\n'
            )
    found = probe("""
      const held = drawn.get("loss"), { toX, toY } = held.seen, scale = window.devicePixelRatio || 1, c = held.canvas;
      const solid = (x) => { // rows between losses 10 and 45 in which a pixel near x is opaque
        const from = Math.round(toY(45) * scale), to = Math.round(toY(10) * scale), d = c.getContext("2d");
        const p = d.getImageData(Math.round((x - 3) * scale), from, Math.round(7 * scale), to - from), rows = new Set();
        for (let i = 0; i < p.width * p.height; i++) if (p.data[4 * i + 3] > 150) rows.add(Math.floor(i / p.width));
        return rows.size / p.height; };
      const curve = held.seen.curves[0], at = curve.high.findIndex((y) => y === 50);
      found.spike = solid(toX(curve.x[at])); found.beside = solid(toX(curve.x[at]) + (at > curve.x.length / 2 ? -40 : 40));
      found.buckets = curve.x.length;
    """, width, page_text(directory), scheme)  # fmt: skip
    assert found.get("error") is None and found["buckets"] <= 2000
    assert found["spike"] == 1.0, "opaque from its bucket's lowest value to the spike"
    assert found["beside"] < 0.1


def test_it_requests_nothing(probe):
    found = probe("updateAll(); found.asked = performance.getEntriesByType('resource').map((one) => one.name);")
    assert found == {"asked": []}


def test_every_chart_has_ink_in_both_colour_schemes_and_on_every_axis(probe):
    found = probe("""
      const inks = (key) => { const c = document.getElementById("plot-" + key);
        const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; };
      for (const axis of ["step", "tokens", "time"]) {
        document.querySelector(`input[value=${axis}]`).click();
        found[axis] = data.charts.map((chart) => [chart.key, inks(chart.key)]);
      }
      found.log = data.charts.filter((chart) => chart.log).map((chart) => chart.key);
    """)
    for axis in ("step", "tokens", "time"):
        assert [key for key, _ in found[axis]] == CHARTS
        assert all(ink > 500 for _, ink in found[axis]), found[axis]
    assert found["log"] == ["gradient_norm"], "its largest is 100 times its smallest"


@pytest.mark.parametrize("width", [320, 390, 700, 1200])
def test_no_width_needs_a_horizontal_bar(probe, width):
    found = probe("""
      found.wide = document.documentElement.scrollWidth; found.room = document.documentElement.clientWidth;
      found.out = [...document.querySelectorAll("main *")].filter((one) => one.getBoundingClientRect().right > found.room + 1
        && !one.closest(".scroll, pre, .unseen, table")).map((one) => one.tagName + "." + one.className).slice(0, 5);
    """, width)  # fmt: skip
    assert found["wide"] <= found["room"] and found["out"] == [], found


def test_keys_read_values_out_and_a_legend_hides_a_curve(probe):
    found = probe("""
      const canvas = document.getElementById("plot-loss");
      const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
      const said = () => document.getElementById("say").textContent;
      press("Home"); found.first = said(); press("ArrowRight"); found.second = said(); press("End"); found.last = said();
      for (let i = 0; i < 7; i++) press(i ? "ArrowRight" : "Home"); found.nan = said();
      const key = () => [...document.querySelectorAll(".keys button")].find((one) => one.textContent === "training");
      const before = canvas.toDataURL(); key().click(); found.changed = before !== canvas.toDataURL();
      found.pressed = key().getAttribute("aria-pressed");
    """)
    assert found["first"].startswith("step 1; training 7.98") and found["second"].startswith("step 2; training 7.96")
    assert found["last"].startswith("step 200; training 4") and "web 3" in found["last"]
    assert found["nan"].startswith("step 7; training not finite"), found
    assert found["changed"] and found["pressed"] == "false"


def test_a_mark_of_what_is_not_finite_is_on_its_own_chart_alone(probe):
    found = probe("""
      const red = (name) => { // in the rows above the plot, where the marks' triangles are
        const canvas = document.getElementById("plot-" + name), ratio = canvas.width / canvas.clientWidth;
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, Math.round(12 * ratio)).data;
        let count = 0;
        for (let at = 0; at < pixels.length; at += 4)
          count += pixels[at + 3] > 0 && pixels[at] > pixels[at + 1] + 90 && pixels[at] > pixels[at + 2] + 90;
        return count;
      };
      for (const name of ["loss", "gradient_norm", "learning_rate", "throughput"]) found[name] = red(name);
    """)
    assert found["loss"] > 20, found
    assert found["gradient_norm"] == found["learning_rate"] == found["throughput"] == 0, found


def test_lines_beyond_the_eight_colours_are_dashed_and_no_tick_is_half_a_step(probe):
    found = probe("""
      const chart = data.charts[0], lines = Array.from({ length: 20 }, (_, at) => chart.lines[at % 3]);
      found.looks = curvesOf({ ...chart, lines }).map((curve) => curve.colour + curve.dash);
      found.dashed = curvesOf(chart).filter((curve) => curve.dash.length).length;
      found.ticks = [steps(0, 6, 15, 1), steps(1, 2, 3, 1), steps(0, 400, 15, 1).slice(0, 3), steps(0, 1, 4)];
    """)
    assert len(set(found["looks"])) == 20 and found["dashed"] == 0
    assert found["ticks"] == [[0, 1, 2, 3, 4, 5, 6], [1, 2], [0, 50, 100], [0, 0.5, 1]]


def test_exports_hold_every_point(probe):
    found = probe("""
      const chart = data.charts[0];
      found.csv = csv(chart); const made = picture(chart); found.size = [made.width, made.height];
      document.querySelector("#charts details").open = true; fillTable(chart);
      found.rows = document.querySelectorAll("#charts details table tr").length;
    """)
    lines = found["csv"].split("\r\n")
    assert lines[0] == "run,curve,step,tokens,seconds,value,lowest,highest" and lines[-1] == ""
    training = [line.split(",") for line in lines if line.startswith("mine,training,")]
    assert [int(line[2]) for line in training] == list(range(1, 201))
    assert training[0][3] == "2048" and float(training[0][5]) == 7.98 and training[6][5] == ""
    assert found["size"] == [2000, 1000] and found["rows"] == 21


def test_of_several_runs_each_key_shows_its_line_and_the_parts_of_memory_have_colours_of_their_own(probe, tmp_path):
    for name in ("one", "two"):
        log = EventLog(tmp_path / name / "events.jsonl")
        log.write("start", 0, {})
        for step in (1, 2, 3):
            parts = dict.fromkeys(("gradients", "parameters", "process", "states"), step << 30)
            log.write("step", step, {"loss": 3.0, "memory_bytes": 1 << 30, "memory_parts": parts})
        log.write("validation", 3, {"name": "validation", "loss": 3.5})
        (tmp_path / name / "resolved.yaml").write_text(f"parallel: {{a_key_of_usual_length: {name}}}\n")
    text = render_page([open_run(tmp_path / name) for name in ("one", "two")])
    found = probe("""
      const holes = (canvas) => { const d = canvas.getContext("2d").getImageData(0, 10, canvas.width, 1).data;
        let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] === 0; return n; };
      for (const chart of data.charts)
        found[chart.key] = parts(chart).curves.map((one) => [one.name, one.colour, one.dash.length]);
      found.holes = [...document.querySelectorAll("#charts .chart:first-child .keys canvas")].map(holes);
      found.lines = [...document.querySelectorAll("#part-runs th[scope=row]")].map((one) => one.getClientRects().length
        && Math.round(one.clientHeight / parseFloat(getComputedStyle(one).lineHeight)));
    """, 1200, text)  # fmt: skip
    assert found["loss"] == [
        ["one: training", "--c0", 0], ["one: validation", "--c0", 2], ["two: training", "--c1", 0], ["two: validation", "--c1", 2]
    ]  # fmt: skip
    assert [number > 0 for number in found["holes"]] == [False, True, False, True], "a key is dashed as its curve is"
    assert [(colour, dash) for _, colour, dash in found["memory_parts"]] == [
        (f"--c{line}", dash) for dash in (0, 2) for line in range(4)
    ]
    assert found["lines"] == [1, 1, 1], "no name of a run or a setting is broken"


def test_a_served_page_follows_a_run_without_being_loaded_again(browse, tmp_path):
    """The run goes on when the page asks for the first time what is new."""
    log = EventLog(tmp_path / "mine" / "events.jsonl")
    log.write("start", 0, {})
    log.write("step", 1, {"loss": 4.0})

    class Growing(Live):
        pages = 0

        def page(self):
            self.pages += 1
            return super().page()

        def news(self, have):
            log.write("step", 2, {"loss": 3.25, "learning_rate": 0.5})
            return super().news(have)

    live = Growing([tmp_path / "mine"])
    server, address = open_server(live)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        dom, said = browse(address)
    finally:
        server.shutdown()
        server.server_close()
    assert live.pages == 1 and "CONSOLE" not in said, said
    assert "3.2500" in re.search(r'id="part-tiles".*?</section>', dom, re.S)[0]
    assert 'id="plot-learning_rate"' in dom, "a chart that the page did not have"
