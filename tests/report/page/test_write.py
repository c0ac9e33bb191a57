"""report.html: one file, nothing from outside, whatever the run contains; and in a real browser where there is one."""

import base64
import hashlib
import html.parser
import json
import math
import re
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.page.write import open_run, page_text, run_names, write_comparison, write_page, write_report

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
    opening = {"derived": {"parameters": "1.05 M", EVIL: EVIL}, "provenance": {"git": {"commit": "abc"}}}
    log.write("start", 0, {**opening, "baselines": BASELINES})
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
    path = write_report(run)
    assert path == run / "report.html" and [p.name for p in run.glob(".*")] == []
    return path.read_text()


def test_nothing_is_loaded_from_outside_and_nothing_of_the_run_becomes_markup(text):
    page = Page(text)
    assert (
        page.loads == [] and page.handlers == [] and "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    )
    assert [kind for kind, _ in page.scripts] == ["application/json", None]


def test_the_content_policy_names_exactly_the_script_of_the_page_and_lets_it_ask_nobody(text):
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', text).group(1)
    scripts = [body for kind, body in Page(text).scripts if kind is None]
    hashes = ["sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in scripts]
    assert re.findall(r"'(sha256-[^']*)'", policy) == hashes
    assert "connect-src" not in policy
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("script-src")[1]


def test_hostile_text_is_shown_as_text(text):
    words = Page(text).text
    assert "\x00" not in text  # no HTML file may hold one
    assert words.count("document.title='broken out'") >= 6  # sample, prompt, settings, set, facts, incident


def data_of(text):
    (raw,) = [body for kind, body in Page(text).scripts if kind == "application/json"]
    assert "<" not in raw and "NaN" not in raw
    return json.loads(raw)


def test_the_figures_are_json_with_gaps_and_the_values_that_count(text):
    (drawn,) = data_of(text)["runs"]
    assert drawn["grid"]["step"] == list(range(1, 41))
    loss = drawn["series"]["loss"]
    assert loss["y"][6] is None and loss["gaps"] == [6] and loss["y"][39] == 4.0
    assert [kind for _, kind, *_ in drawn["marks"]] == ["resumed", "not finite", "end", "validation", "validation"]


def test_the_page_reports_figures_settings_derived_values_and_what_happened(text):
    words = " ".join(Page(text).text.split())
    for logged in (
        "mine", "finished", "at step 40", "4.0000", "8.00 at step 0", "perplexity 54.6", "1.700 bits per byte",
        "14.6 k", "7.3 k per device", "41.2%", "3.0 GiB", "2 sessions", "goodput", "run: note:", "starts", "step 30",
        "loss 4.4, bits 2", "incident",
    ):  # fmt: skip
        assert logged in words, logged


def test_a_run_that_only_started_and_one_without_settings_have_a_page(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})
    words = Page(write_report(tmp_path).read_text()).text
    assert "no end yet" in words and "still running, or killed" in words


def test_baselines_come_from_the_run_itself(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("start", 0, {"baselines": {"gzip": {"bits_per_byte": 2.0}}})
    log.write("validation", 0, {"name": "code", "loss": 8.0, "perplexity": 2981.0, "bits_per_byte": 3.1})

    bars = re.findall(r'<th scope="row">([^<]*)</th><td class="bar">', write_report(tmp_path).read_text())
    assert bars == ["gzip", "code, step 0"]


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


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "long"
    directory.mkdir()
    with open(directory / "events.jsonl", "w") as file:
        start = {
            "kind": "start",
            "time": 0.0,
            "step": 0,
            "packages": {f"package{index}": "1.0" for index in range(500)},
        }
        file.write(json.dumps(start) + "\n")
        for step in range(1, 20_001):
            fields = {
                "loss": 1.0 / step,
                "gradient_norm": 1.0 + step % 7,
                "learning_rate": 1e-3,
                "tokens_per_s": 1.0 + step % 3,
            }
            file.write(json.dumps({"kind": "step", "time": step * 0.5, "step": step, **fields}) + "\n")
        for step in range(100):
            file.write(
                json.dumps({"kind": "sample", "time": 0.0, "step": step, "prompt": "p", "text": "x" * 3000}) + "\n"
            )
            file.write(json.dumps({"kind": "checkpoint", "time": 0.0, "step": step, "stall_s": 0.1, "bytes": 1}) + "\n")
    (directory / "resolved.yaml").write_text("".join(f"key{index}: value\n" for index in range(1000)))
    return directory


def test_a_long_run_makes_a_bounded_page(long_run):
    text = page_text(long_run)
    assert len(text.encode()) < 600_000
    (drawn,) = data_of(text)["runs"]
    assert len(drawn["grid"]["step"]) <= 2000 and drawn["series"]["loss"]["high"][0] == 1.0


def test_an_empty_page_is_small(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})
    assert len(page_text(tmp_path).encode()) < 100_000


def sizes(text):
    """(buckets, samples, settings, packages, notes): what a page holds."""
    words = Page(text).text
    held = ("xxx" in words, "key999: value" in words, "package499" in words, "of waiting" in words)
    return len(data_of(text)["runs"][0]["grid"]["step"]), *held


def test_a_page_that_must_be_smaller_gives_up_one_thing_after_the_other(long_run):
    """Allowed one byte less than it has, page after page, until nothing more can go."""
    found, most = [], None
    with pytest.raises(UserError, match="everything left out"):
        while True:
            text = page_text(long_run, at_most_bytes=most)
            assert most is None or len(text.encode()) <= most
            found.append(sizes(text))
            most = len(text.encode()) - 1
    rest = (True, True, True, True)
    assert [held for buckets, *held in found] == [
        *[list(rest)] * 5, [False, *rest[1:]], [False, False, *rest[2:]], [False] * 3 + [True], [False] * 4
    ]  # fmt: skip
    buckets = [one[0] for one in found]
    assert (
        buckets == sorted(buckets, reverse=True)
        and buckets[0] > 1000
        and [one <= 120 for one in buckets[4:]] == [True] * 5
    )
    assert "left out: samples, settings, packages, notes" in text


def test_a_size_that_no_page_has_is_refused_with_the_least(long_run):
    with pytest.raises(UserError, match="at_most_bytes=1,000 for the page") as raised:
        page_text(long_run, at_most_bytes=1000)
    least = int(re.search(r"allow ([\d,]+) bytes", raised.value.change).group(1).replace(",", ""))
    assert len(page_text(long_run, at_most_bytes=least).encode()) == least


def test_a_comparison_has_all_runs_and_the_settings_that_differ(run, long_run, tmp_path):
    text = write_comparison([run, long_run], tmp_path / "both.html").read_text()
    data = data_of(text)
    assert [drawn["name"] for drawn in data["runs"]] == ["mine", "long"]
    words = " ".join(Page(text).text.split())
    assert (
        "Settings that differ" in words
        and "resolved.yamlcannot be read" in words
        and "key7value" in words
        and "2 runs" in words
    )
    assert [kind for kind, _ in Page(text).scripts] == ["application/json", None]


def test_runs_of_one_name_are_named_by_their_paths(tmp_path):
    for name in ("a/run", "b/run"):
        EventLog(tmp_path / name / "events.jsonl").write("start", 0, {})
    assert run_names([open_run(tmp_path / name) for name in ("a/run", "b/run")]) == ["a/run", "b/run"]


def test_a_page_that_cannot_be_written_is_refused_in_words(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError) as caught:
        write_page("x", tmp_path / "report.html")
    assert caught.value.given == f"{tmp_path}/report.html is a directory"
    assert caught.value.change == "name a file: `windlass report RUN --output FILE`"
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        write_page("x", Path(__file__) / "report.html")
