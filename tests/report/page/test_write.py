"""report.html: one file, nothing from outside, whatever the run contains; and in a real browser where there is one."""

import base64
import hashlib
import html.parser
import json
import math
import re
import shutil
import subprocess

import pytest

from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.page.write import write_report

EVIL = "</script><script>document.title='broken out'</script><img src=x onerror=alert(1)>\u2028 é \x00"
BASELINES = {"bigram": {"loss": 4.4, "bits_per_byte": 2.05}, EVIL: {"loss": 4.0, "bits_per_byte": 2.0}}


class Page(html.parser.HTMLParser):
    """Collects scripts, the text of each element kind, and every attribute that could load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.words, self.loads, self.handlers = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.loads += [values[key] for key in ("src", "href", "data", "action") if key in values]
        self.handlers += [key for key in values if key.startswith("on")]
        if tag == "script":
            self.scripts.append([values.get("type"), ""])
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += data
        elif "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that diverged once, was killed and resumed, and whose every text is hostile."""
    directory = tmp_path_factory.mktemp("runs") / "mine"
    log = EventLog(directory / "events.jsonl")
    log.write("start", 0, {"derived": {"parameters": "1.05 M", EVIL: EVIL}, "provenance": {"git": {"commit": "abc"}}})
    log.write("validation", 0, {"name": EVIL, "loss": 8.0, "perplexity": 2981.0, "bits_per_byte": 3.1})
    log.write("sample", 0, {"prompt": "class " + EVIL, "text": EVIL})
    for step in range(1, 41):
        if step == 31:
            log.write("incident", 36, {"what": EVIL})
            log.write("resume", 30, {"derived": {"starts": "step 30", "bigram": {"loss": 4.4, "bits": 2}}, EVIL: EVIL})
        log.write("step", step, {
            "loss": math.nan if step == 7 else 8.0 - step / 10, "gradient_norm": 1.0, "learning_rate": 1e-3,
            "tokens": step * 2048, "tokens_per_s": 14_600.0, "tokens_per_s_per_gpu": 7300.0, "mfu": 0.412,
            "memory_bytes": 3 << 30, "data_wait_s": 0.001, "step_s": 0.14, "warm_up": step in (1, 31),
            "ledger": {"training": step * 0.14, "evaluate": 1.0},
        })  # fmt: skip
    log.write("validation", 40, {"name": EVIL, "loss": 4.0, "perplexity": 54.6, "bits_per_byte": 1.7})
    log.write("end", 40, {"reason": "finished", "tokens": 81_920})
    (directory / "resolved.yaml").write_text(f"run:\n  note: {EVIL}\n")
    return directory


@pytest.fixture(scope="module")
def text(run):
    path = write_report(run, BASELINES)
    assert path == run / "report.html" and [p.name for p in run.glob(".*")] == []
    return path.read_text()


def test_nothing_is_loaded_from_outside_and_nothing_of_the_run_becomes_markup(text):
    page = Page(text)
    assert (
        page.loads == [] and page.handlers == [] and "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    )
    assert [kind for kind, _ in page.scripts] == ["application/json", None, None]


def test_the_content_policy_names_exactly_the_two_scripts_of_the_page(text):
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', text).group(1)
    scripts = [body for kind, body in Page(text).scripts if kind is None]
    hashes = ["sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in scripts]
    assert re.findall(r"'(sha256-[^']*)'", policy) == hashes
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("script-src")[1]


def test_hostile_text_is_shown_as_text(text):
    words = Page(text).text
    assert "\x00" not in text  # no HTML file may hold one
    assert words.count("document.title='broken out'") >= 6  # sample, prompt, settings, set, facts, incident


def test_the_figures_are_json_with_gaps_and_the_values_that_count(text):
    (raw,) = [body for kind, body in Page(text).scripts if kind == "application/json"]
    figures = json.loads(raw)
    loss = figures["loss"]["data"][0]
    assert loss["x"] == list(range(1, 41)) and loss["y"][6] is None and loss["y"][39] == 4.0
    assert "<" not in raw and "NaN" not in raw


def test_the_page_tells_figures_settings_derived_values_and_what_happened(text):
    words = " ".join(Page(text).text.split())
    for told in (
        "mine", "finished", "at step 40", "4.0000", "8.00 at step 0", "perplexity 54.6", "1.700 bits per byte",
        "14.6 k", "7.3 k per device", "41.2%", "3.0 GiB", "2 sessions", "run: note:", "starts", "step 30",
        "loss 4.4, bits 2", "incident",
    ):  # fmt: skip
        assert told in words, told


def test_every_chart_has_its_place(text):
    (raw,) = [body for kind, body in Page(text).scripts if kind == "application/json"]
    assert {f'id="plot-{name}"' in text for name in json.loads(raw)} == {True}


def test_a_run_that_only_started_and_one_without_settings_have_a_page(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})
    words = Page(write_report(tmp_path).read_text()).text
    assert "no end yet" in words and "still running, or killed" in words


def test_baselines_come_from_the_run_itself_where_none_are_given(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("start", 0, {"baselines": {"gzip": {"bits_per_byte": 2.0}}})
    log.write("validation", 0, {"name": "code", "loss": 8.0, "perplexity": 2981.0, "bits_per_byte": 3.1})

    def bars(**given):
        (raw,) = [body for kind, body in Page(write_report(tmp_path, **given).read_text()).scripts if kind]
        return json.loads(raw).get("bits", {"data": [{"y": []}]})["data"][0]["y"]

    assert bars() == ["code, step 0", "gzip"]
    assert bars(baselines={"xz": {"bits_per_byte": 1.0}}) == ["code, step 0", "xz"]
    assert bars(baselines={}) == []


def test_a_torn_last_line_does_not_stop_the_report(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("start", 0, {})
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"kind": "st')
    assert write_report(tmp_path).is_file()


def test_a_directory_without_events_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"events\.jsonl"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_run_makes_a_bounded_page(tmp_path):
    lines = [
        {"kind": "step", "time": 0.0, "step": step, "loss": 1.0 / step, "learning_rate": 1e-3, "tokens_per_s": 1.0}
        for step in range(1, 50_001)
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (raw,) = [body for kind, body in Page(write_report(tmp_path).read_text()).scripts if kind == "application/json"]
    figures = json.loads(raw)
    assert all(len(trace["x"]) <= 2000 for figure in figures.values() for trace in figure["data"])


def test_in_a_real_browser_every_chart_is_drawn_and_nothing_breaks_out(run, text, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    flags += ["--disable-component-update", "--no-first-run", f"--user-data-dir={tmp_path}", "--enable-logging=stderr"]
    command = [browser, *flags, "--virtual-time-budget=4000", "--dump-dom", f"file://{run}/report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"<title>([^<]*)</title>", done.stdout).group(1) == "mine - windlass"
    assert "CONSOLE" not in done.stderr, done.stderr
    drawn = re.findall(r'<div class="plot[^"]*js-plotly-plot[^"]*" id="plot-(\w+)"', done.stdout)
    assert set(drawn) == {
        "loss", "bits", "throughput", "learning_rate", "gradient_norm", "memory", "data_wait", "ledger",
    }  # fmt: skip
    assert done.stdout.count('class="scatterlayer') >= 6
