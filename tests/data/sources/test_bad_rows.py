"""Bad rows: each has a name and a kind, all are found before anything is encoded, and the recipe says how many may go."""

import json
import pickle
import shutil
from functools import partial

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.conftest import data_config, make_text, refusal
from tests.data.prepare.test_build import Killed, without_journal
from tests.data.prepare.test_prepare import content, documents_of, quietly
from tests.data.tokenize.test_chat_template import PLAIN, chat_rows, template_of
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.commands.data_inspect import describe_set
from windlass.data.config import SourceConfig
from windlass.data.lint.statistics import survey_set
from windlass.data.prepare.fingerprint import settings_of
from windlass.data.prepare.manifest import load_prepared, open_prepared
from windlass.data.prepare.prepare import planned
from windlass.data.sources import bad_rows as room
from windlass.data.sources.bad_rows import BadRow, BadRows, TooManyBadRows, judge
from windlass.data.sources.config import BadRowsConfig
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import source_of_files
from windlass.errors import UserError
from windlass.settings import as_yaml

GOOD = [f"document {number} {make_text(20, number)}" for number in range(40)]
BAD = {
    b'{"text": "never ends': "not JSON",
    b'["text"]': "wrong type",
    b'{"txt": "x"}': "missing key",
    b'{"text": null}': "null",
    b'{"text": 7}': "wrong type",
    b'{"text": "\\ud83d"}': "lone surrogate",
    b'{"text": "caf\xe9"}': "not UTF-8",
}
KINDS = {"wrong type": 2} | dict.fromkeys(("not JSON", "missing key", "null", "lone surrogate", "not UTF-8"), 1)


def lines_of(texts, bad):
    """JSON lines: the bad ones behind the first text."""
    good = [json.dumps({"text": text}).encode() for text in texts]
    return b"\n".join([good[0], *bad, *good[1:]]) + b"\n"


def config_of(root, at_most=0, name="data", **changes):
    bad_rows = {"at_most": at_most, "report": str(root / "bad.jsonl")}
    source = {"path": str(root / "a.jsonl"), "bad_rows": bad_rows}
    return data_config(root, **{"sources": [source], "directory": str(root / name), **changes})


def refused(config, lines=None):
    with pytest.raises(TooManyBadRows) as caught:
        quietly(config, lines=lines)
    return caught.value


def test_every_kind_is_left_out_counted_reported_and_printed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, BAD))
    lines = []
    prepared = quietly(config_of(tmp_path, len(BAD)), lines=lines)
    assert sorted(documents_of(prepared, "train") + documents_of(prepared, "validation")) == sorted(GOOD)
    assert prepared.bad_rows == load_prepared(prepared.directory).bad_rows == {"sources.0": KINDS}
    report = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in report] == list(BAD.values())
    assert [entry["row"].split()[0] for entry in report] == [f"{tmp_path}/a.jsonl:{number}" for number in range(2, 9)]
    assert [line for line in lines if line.startswith("bad row: ")] == [f"bad row: {entry['row']}" for entry in report]
    logged = "2 wrong type, 1 lone surrogate, 1 missing key, 1 not JSON, 1 not UTF-8, 1 null"
    assert f"7 of 47 rows of {tmp_path}/a.jsonl are bad ({logged}), and left out (bad_rows.at_most: 7)" in lines
    for name in ("train", "validation"):
        out = list(describe_set(prepared, survey_set(prepared, name, 99)))
        assert f"  bad rows    7 of sources.0 are left out: {logged}" in out


def test_what_is_left_are_the_shards_of_the_good_rows_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, BAD))
    found = quietly(config_of(tmp_path, len(BAD)))
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, []))
    alone = quietly(config_of(tmp_path, len(BAD), "alone"))
    for name in ("train", "validation", "tokenizer"):
        assert content(found.directory / name) == content(alone.directory / name)
    assert alone.bad_rows == {} and (tmp_path / "bad.jsonl").read_text() == ""


def test_one_too_many_is_refused_with_all_of_them_named_before_anything_is_encoded(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, BAD))
    monkeypatch.setattr("windlass.data.prepare.build.set_tokenizer", None)
    lines = []
    error = refused(config_of(tmp_path, len(BAD) - 1), lines)
    assert sum(line.startswith("bad row: ") for line in lines) == len(BAD)
    assert error.given.startswith(f"7 of 47 rows of {tmp_path}/a.jsonl are bad (2 wrong type, ")
    assert f"{tmp_path}/a.jsonl:2 is not JSON" in error.given and error.given.endswith("; ...")
    assert error.rule == "a source leaves out at most `bad_rows.at_most` of its rows, 6 here"
    assert error.change.endswith("or leave them out: `bad_rows: {at_most: 7}` of the source")
    assert not (tmp_path / "data").exists() and len((tmp_path / "bad.jsonl").read_text().splitlines()) == 7


def test_one_bad_row_is_refused_in_its_own_words(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, [b'{"text": null}']))
    error = refused(config_of(tmp_path), lines := [])
    assert error.given == f"{tmp_path}/a.jsonl:2 has nothing under `text`"
    assert error.change == "give one that holds text; or leave it out: `bad_rows: {at_most: 1}` of the source"
    assert not any(line.startswith("bad row") for line in lines), "the error says it"


@pytest.mark.parametrize(("at_most", "is_enough"), [(0.15, True), (0.14, False), (7, True), (6, False)])
def test_a_decimal_is_a_share_of_the_rows_of_the_source(tmp_path, at_most, is_enough):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, BAD))  # 7 of 47: 0.149
    config = SourceConfig(path=str(tmp_path / "a.jsonl"))
    found = BadRows("sources.0", "a", BadRowsConfig(at_most=at_most))
    source = source_of_files(config, scan(config, print))._replace(bad_rows=found)
    assert list(source.documents()) == list(source.documents()) == GOOD, "each pass begins at the first row"
    assert (found.num, found.num_rows, found.is_too_many) == (7, 47, not is_enough)


@pytest.mark.parametrize("at_most", [-1, 0.0, 1.0, 1.5, -0.1, True, "1", "5%", None, float("nan")])
def test_what_is_neither_a_count_nor_a_share_is_refused(at_most):
    assert (
        f"at_most={as_yaml(at_most)}: the limit is a count (a whole number, 0 or more) or a share (a decimal between 0 and 1); "
        "set at_most=10 for ten rows, or at_most=0.01 for one row in a hundred"
    ) in refusal(BadRowsConfig, {"at_most": at_most})
    assert [BadRowsConfig(at_most=one).at_most for one in (0, 3, 0.25)] == [0, 3, 0.25]


def test_a_report_is_a_local_file_in_a_directory_that_is_there(tmp_path):
    assert "report=s3://a/b: the report is a local file; give a local file as report" in refusal(
        BadRowsConfig, {"report": "s3://a/b"}
    )
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, []))
    source = {"path": str(tmp_path / "a.jsonl"), "bad_rows": {"report": str(tmp_path / "none" / "bad.jsonl")}}
    with pytest.raises(UserError, match=r"`bad_rows.report: .*none/bad.jsonl` cannot be written: No such file"):
        quietly(data_config(tmp_path, sources=[source]))
    source["path"] = str(tmp_path)
    source["bad_rows"]["report"] = str(tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match=r"bad_rows.report .*/bad.jsonl is inside the source"):
        quietly(data_config(tmp_path, sources=[source], directory=f"{tmp_path}-data"))


def test_the_first_hundred_are_named_and_the_rest_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, [b'{"text": null}'] * 120 + [b"{"] * 3))
    lines = []
    error = refused(config_of(tmp_path, 0.4), lines)
    named = [line for line in lines if line.startswith("bad row")]
    assert named[:100] == [f"bad row: {tmp_path}/a.jsonl:{number} has nothing under `text`" for number in range(2, 102)]
    assert named[100:] == ["bad rows: the first 100 of a source are named; `bad_rows: {report: FILE}` lists all"]
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 123
    assert error.given.startswith(f"123 of 163 rows of {tmp_path}/a.jsonl are bad (120 null, 3 not JSON): ")
    assert error.given.count("has nothing under `text`") == 2 and error.given.count("is not JSON") == 1, "both kinds"


def test_bad_rows_at_the_front_are_within_a_share_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "HOPELESS", 5)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": null}\n' * 9 + lines_of(GOOD, []))
    assert quietly(config_of(tmp_path, 0.5)).bad_rows == {"sources.0": {"null": 9}}


def test_a_share_is_the_decimal_that_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of((GOOD * 2)[:71], [b'{"text": null}'] * 29))
    assert quietly(config_of(tmp_path, 0.29)).bad_rows == {"sources.0": {"null": 29}}, "29 % of 100, and not 28.999..."


@pytest.mark.parametrize("report", ["a.jsonl", "recipe.yaml", "k/rep.jsonl", "link.jsonl"])
def test_a_report_is_written_over_no_file_but_a_report(tmp_path, report):
    (tmp_path / "k").mkdir()
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, BAD))
    (tmp_path / "k" / "more.jsonl").write_bytes(lines_of(GOOD, []))
    (tmp_path / "recipe.yaml").write_text("run: {}\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    before = {path: path.read_bytes() for path in (tmp_path / "a.jsonl", tmp_path / "recipe.yaml")}
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "bad_rows": {"at_most": 9, "report": str(tmp_path / report)}},
        {"path": str(tmp_path / "k" / "*.jsonl")},
    ]
    with pytest.raises(UserError) as caught:
        quietly(data_config(tmp_path, sources=sources))
    error = caught.value
    if report == "recipe.yaml":
        assert error.given == f"`bad_rows.report: {tmp_path}/recipe.yaml` exists and is not a report of bad rows"
    else:
        assert error.given.startswith(f"`bad_rows.report: {tmp_path / report}` is a file of the source {tmp_path}/")
    assert {path: path.read_bytes() for path in before} == before and not (tmp_path / "data").exists()
    assert not (tmp_path / "k" / "rep.jsonl").exists()


def test_a_source_of_bad_rows_alone_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "HOPELESS", 5)
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "x"}\n' * 60)
    error = refused(config_of(tmp_path, 3))
    assert "5 of 5 rows" in error.given and "where the first 5 are all bad, no more are read" in error.rule
    assert error.change == "set `text` of the source to one of its keys: body"


def test_a_file_that_cannot_be_unpacked_is_no_bad_row(tmp_path):
    import gzip

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(GOOD, []))[:-30])
    source = {"path": str(tmp_path / "a.jsonl.gz"), "bad_rows": {"at_most": 0.99}}
    with pytest.raises(UserError, match="cannot be unpacked as gzip"):
        quietly(data_config(tmp_path, sources=[source]))


def test_rows_of_parquet(tmp_path):
    data = pyarrow.array([b"good", b"caf\xe9", None, b"better"], pyarrow.binary())
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 4, data.buffers())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    config = SourceConfig(path=str(tmp_path / "a.parquet"))
    found = BadRows("sources.0", "a", BadRowsConfig(at_most=2))
    assert list(source_of_files(config, scan(config, print))._replace(bad_rows=found).documents()) == ["good", "better"]
    assert [row.given for row in found.named] == [
        f"{tmp_path}/a.parquet, row 2, holds text that is not UTF-8: byte 0xe9",
        f"{tmp_path}/a.parquet, row 3, has nothing under `text`",
    ]


def test_a_row_is_the_same_wherever_it_goes():
    row = BadRow("null", "here", "rule", "change")
    assert pickle.loads(pickle.dumps(row)) == row != BadRow("null", "there", "rule", "change")
    assert len({row, BadRow("null", "here", "rule", "change")}) == 1


CHATS = {
    "special token": {
        "messages": [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "y"}]
    },
    "empty answer": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]},
    "null": {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "y"}]},
    "wrong type": {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "y"}]},
    "without an answer": {"messages": [{"role": "user", "content": "x"}]},
    "missing key": {"conversation": []},
    "unknown key": {"messages": [{"role": "user", "content": "x", "mood": "y"}, {"role": "assistant", "content": "y"}]},
    "wrong tools": {"messages": [{"role": "assistant", "content": "y"}], "tools": [{"label": "f"}]},
    "of two shapes": {"messages": [{"role": "assistant", "content": "y"}], "prompt": "x"},
}


def refusing(planted):
    """A template that refuses a conversation that begins with "never"."""
    refuse = "{{ raise_exception('no') if 'never' in messages[0].content }}{% for m"
    template_of(planted, PLAIN.replace("{% for m", refuse))


def chats_of(planted, tmp_path, at_most, name="data"):
    source = {"path": str(tmp_path / "a.jsonl"), "format": "chat", "bad_rows": {"at_most": at_most}}
    given = {"from": str(planted.directory / "tokenizer")}
    return data_config(tmp_path, sources=[source], tokenizer=given, sequence_length=256, directory=str(tmp_path / name))


def test_conversations_are_all_judged_before_one_is_encoded(planted, tmp_path, monkeypatch):
    template_of(planted, PLAIN)
    rows = [*chat_rows(), *CHATS.values()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    config = partial(chats_of, planted, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("windlass.data.prepare.write_set.encode_rows", None)
        lines = []
        assert refused(config(len(CHATS) - 1), lines).given.startswith(f"{len(CHATS)} of {len(rows)} rows")
    at = len(chat_rows()) + 1
    assert f"bad row: {tmp_path}/a.jsonl:{at} holds <|im_end|> in the words of the user" in lines
    prepared = quietly(config(len(CHATS)))
    assert prepared.bad_rows == {"sources.0": dict.fromkeys(CHATS, 1)}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows()))
    alone = quietly(config(0, "alone"))
    assert content(alone.directory / "train") == content(prepared.directory / "train")


def test_rows_that_the_template_refuses_are_left_out_and_named_again_after_a_kill(planted, tmp_path):
    refusing(planted)
    never = {"messages": [{"role": "user", "content": "never 1"}, {"role": "assistant", "content": "y"}]}
    rows = [*chat_rows(), never, {"messages": [{**never["messages"][0], "content": "never 2"}, never["messages"][1]]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    config = partial(chats_of, planted, tmp_path)
    for _ in range(2):  # the second time the ids are there, and the rows are named all the same
        lines = []
        error = refused(config(0), lines)
        assert error.given.startswith(
            f"2 of {len(rows)} rows of {tmp_path}/a.jsonl are bad (2 refused by the chat template): "
        )
        named = [line for line in lines if line.endswith("refuses it: no")]
        assert [line.partition(" ('never")[0] for line in named] == [
            f"bad row: {tmp_path}/a.jsonl:{at}" for at in (len(rows) - 1, len(rows))
        ]
    prepared = quietly(config(2))
    assert prepared.bad_rows == {"sources.0": {"refused by the chat template": 2}}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows()))
    assert content(quietly(config(0, "alone")).directory / "train") == content(prepared.directory / "train")


def numbered(count, refused, is_pair=False):
    """Rows, each with its number; those in `refused` the template refuses."""
    for number in range(count):
        asked = {"role": "user", "content": f"{'never' if number in refused else 'ask'} {number}"}
        answers = [{"role": "assistant", "content": f"{word} {number}"} for word in ("yes", "no")]
        if is_pair:
            yield {"prompt": [asked], "chosen": answers[:1], "rejected": answers[1:]}
        else:
            yield {"messages": [asked, answers[0]]}


def written(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join("\n" + json.dumps(row) + "\n" for row in rows))  # with blank lines
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("form", ["chat", "preference", "url", "deduplicated"])
def test_rows_that_the_template_refuses_are_named_by_file_and_row(planted, tmp_path, form):
    refusing(planted)
    is_pair = form == "preference"
    rows = [row for number, row in enumerate(numbered(40, {3, 11, 25, 38}, is_pair)) if number != 7]
    null, files = dict.fromkeys(rows[0]), [tmp_path / name for name in ("a.jsonl", "b.parquet", "c.json")]
    paths = [written(*pair) for pair in zip(files, ([null, *rows[:15]], rows[15:30], [rows[-1], *rows[30:]]))]
    paths = [f"file://{path}" for path in paths] if form == "url" else paths
    bad_rows, report = {"at_most": 9}, tmp_path / "bad.jsonl"
    sources = [
        {"path": path, "format": "preference" if is_pair else "chat", "bad_rows": held}
        for path, held in ((paths[:2], bad_rows | {"report": str(report)}), (paths[2], bad_rows))
    ]
    made = {"tokenizer": {"from": str(planted.directory / "tokenizer")}, "deduplicate": form == "deduplicated"}
    sizes = {"sequence_length": 256, "validation": 0.3, "directory": str(tmp_path / "data")}
    lines = []
    quietly(data_config(tmp_path, sources=sources, **made, **sizes), lines=lines)

    # of JSON lines each second line is blank, and the first row is null; number 7 is missing
    places = {3: f"{paths[0]}:10", 11: f"{paths[0]}:24", 25: f"{paths[1]}, row 10", 38: f"{paths[2]}, row 9"}
    named = [f"{place} ('never {number}'){' chosen' if is_pair else ''}" for number, place in places.items()]
    said = [line.removeprefix("bad row: ") for line in lines if "refuses it" in line]
    assert sorted(line.partition(": the")[0] for line in said) == named
    reported = [json.loads(line)["row"] for line in report.read_text().splitlines()]
    assert sorted(reported[1:]) == sorted(line for line in said if "c.json" not in line)


def test_the_limit_is_part_of_the_settings_and_not_of_the_stream(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, []))
    plain, given, other = (planned(config_of(tmp_path, at_most), {}) for at_most in (0, 3, 0.5))
    assert settings_of(plain.config, {})["sources"][0]["bad_rows"] == {"at_most": 0}
    assert settings_of(given.config, {})["sources"][0]["bad_rows"] == {"at_most": 3}, "where a report is does not count"
    assert len({plain.fingerprint, given.fingerprint, other.fingerprint}) == 3
    assert len({plain.stream, given.stream, other.stream}) == 1 and plain.work == given.work == other.work
    quietly(given.config)
    with pytest.raises(UserError, match="was prepared with sources"):
        open_prepared(plain.config, {})


def test_what_was_fetched_stays_where_rows_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, BAD))
    url = f"file://{tmp_path}/a.jsonl"
    monkeypatch.setattr("windlass.data.sources.fetch.CHUNK_BYTES", 500)

    def config(at_most, name="data"):
        source = {"path": url, "bad_rows": {"at_most": at_most}, "rows": "1:30", "documents": 20}
        return data_config(tmp_path, sources=[source], directory=str(tmp_path / name))

    assert "7 of 27 rows" in refused(config(2)).given
    lines = []
    prepared = quietly(config(7), lines=lines)
    assert f"{url}: all 27 rows were fetched before" in lines
    assert prepared.bad_rows == {"sources.0": KINDS}
    assert sorted(documents_of(prepared, "train") + documents_of(prepared, "validation")) == sorted(GOOD[1:21])
    assert not (tmp_path / ".data.work").exists()
    monkeypatch.setattr(room, "HOPELESS", 4)
    monkeypatch.setattr("windlass.data.sources.fetch.CHUNK_BYTES", 1)  # each row is kept as it comes
    refused(config(1, "again"))
    chunks = [path.name.split("-") for path in (tmp_path / ".again.work").rglob("*.zst")]
    assert sum(int(rows) for _, rows, *_ in chunks) == 4, "a fetch of bad rows alone ends"


def test_parts_that_were_encoded_stay_where_more_rows_are_allowed(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD, BAD))

    def dies(line):
        if line.startswith("validation: "):
            raise Killed

    from windlass.data.prepare.prepare import prepare

    with pytest.raises(Killed):
        prepare(config_of(tmp_path, 7), {}, log=dies)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / ".data.work").rglob("shards/*")}
    assert before, "ids are deleted where their shards are there"
    monkeypatch.setattr("windlass.data.prepare.directory.shutil.rmtree", lambda *_, **__: None)  # work stays to be seen
    quietly(config_of(tmp_path, 8))
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / ".data.work").rglob("shards/*")}
    assert before.items() <= after.items(), "read again, and not made again"
    monkeypatch.undo()
    shutil.rmtree(tmp_path / ".data.work")


def test_a_source_that_grows_leaves_out_as_many_and_goes_on_where_more_are_allowed(planted, tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.data.sources.fetch.CHUNK_BYTES", 500)
    (tmp_path / "in").mkdir()
    for number in range(6):
        texts = GOOD[number * 6 : number * 6 + 6]
        (tmp_path / "in" / f"{number}.jsonl").write_bytes(lines_of(texts, [b"{"] if number in (2, 4) else []))
    (tmp_path / "in" / "_SUCCESS").touch()
    (tmp_path / "v.txt").write_text(make_text(200, 99))

    def config(at_most, name="data"):
        source = {"path": str(tmp_path / "in"), "grows_until": "_SUCCESS", "bad_rows": {"at_most": at_most}}
        return data_config(
            tmp_path,
            sources=[source],
            tokenizer={"from": str(planted.directory / "tokenizer")},
            validation={"path": str(tmp_path / "v.txt")},
            order={"first_epoch": "written"},
            directory=str(tmp_path / name),
            shard_bytes=4096,
        )

    with pytest.raises(UserError, match="a share of all its rows") as caught:
        quietly(config(0.5))
    assert caught.value.change == "give a number of rows"
    error = refused(config(1))
    assert error.given.startswith("2 of ") and f"{tmp_path}/in/4.jsonl:2 is not JSON" in error.given
    lines = []
    found = quietly(config(2), lines=lines)
    assert any("rows were fetched before" in line for line in lines) and found.bad_rows == {
        "sources.0": {"not JSON": 2}
    }
    assert without_journal(found.directory) == without_journal(quietly(config(2, "fresh")).directory)
    assert documents_of(found, "train") == GOOD[:36]


def test_sources_are_judged_together():
    def of(name, num, at_most):
        found = BadRows(name, name, BadRowsConfig(at_most=at_most))
        list(found.without([BadRow("null", f"{name}:{number}", "rule", "change") for number in range(num)]))
        return found

    lines = []
    judge([of("a", 2, 2), of("b", 0, 0)], lines.append)
    assert lines[-1] == "2 of 2 rows of a are bad (2 null), and left out (bad_rows.at_most: 2)"
    with pytest.raises(TooManyBadRows) as caught:
        judge([of("a", 2, 2), of("b", 3, 1), of("c", 4, 0)], lines.append)
    assert (
        caught.value.given == "3 of 3 rows of b are bad (3 null); 4 of 4 rows of c are bad (4 null): b:0; c:0; b:1; ..."
    )
    assert caught.value.rule.endswith("of its rows, 1, 0 here") and "{at_most: 4}" in caught.value.change
