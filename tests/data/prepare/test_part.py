"""Parts that are joined are one machine's preparation, to the byte, whatever their number; a part that is killed goes on."""

import json
import os
import shutil

import pytest

from tests.data.conftest import data_config, write_corpus
from tests.data.killing import killing
from tests.data.prepare.conftest import cut_small, write_rows
from tests.data.prepare.test_prepare import content, quietly
from tests.data.tokenize.test_chat_template import PLAIN, chat_rows, template_of
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.data.config import SourceConfig
from windlass.data.prepare import part as room
from windlass.data.prepare.part_record import Part
from windlass.data.prepare.prepare import prepare
from windlass.data.sources.bad_rows import TooManyBadRows
from windlass.data.tokenize import pool, resume
from windlass.errors import UserError


def make_part(config, number, of, sets=None, lines=None):
    room.prepare_part(config, sets or {}, Part(number, of), log=(lines if lines is not None else []).append)


def join(config, sets=None, lines=None):
    return prepare(config, sets or {}, log=(lines if lines is not None else []).append, is_join=True)


def check_parts(root, config, counts=(1, 2, 3, 7), sets=None):
    """Of `config(directory)`: one machine's, and that of the parts. Returns the lines that each part logged."""
    whole, said = quietly(config("whole"), sets), []
    for of in counts:
        of_parts = config(f"parts-{of}")
        if of_parts.tokenizer.train is not None:
            room.prepare_tokenizer(of_parts, sets or {}, log=lambda line: None)
        for number in reversed(range(of)):
            make_part(of_parts, number, of, sets, lines := [])
            said.append(lines)
        joined = join(of_parts, sets)
        assert joined.fingerprint == whole.fingerprint and joined.sets == whole.sets
        assert content(joined.directory) == content(whole.directory)
        left = [name for name in os.listdir(root) if name.startswith(f".parts-{of}")]
        assert left == [f".parts-{of}.lock"]
        assert join(of_parts, sets) == joined, "once more: found"
    return said


def texts(root, sources, **settings):
    return lambda name: data_config(root, sources=sources, directory=str(root / name), **settings)


@pytest.mark.parametrize(
    ("counts", "settings"),
    [
        ((1, 2, 3, 7), {}),
        ((3,), {"packing": "best-fit", "validation": {"bytes": 4000}}),
        ((2,), {"validation": "none", "compression": "zstd"}),
    ],
    ids=["concatenate", "best-fit", "none"],
)
def test_parts_of_text_are_one_machines_shards(tmp_path, sources, small_chunks, counts, settings):
    small_chunks()
    said = iter(check_parts(tmp_path, texts(tmp_path, sources, **settings), counts))
    found = [[int(next(said)[-2].split()[4]) for _ in range(of)] for of in counts]
    assert sum(found[0]) > 60 and {sum(chunks) for chunks in found} == {sum(found[0])}
    assert all(max(chunks) - min(chunks) <= 1 for chunks in found)


def test_parts_of_a_mixture_with_a_named_tokenizer_and_sets_of_their_own(tmp_path, sources, small_chunks, small):
    mixed = [{**source, "weight": number} for number, source in enumerate(sources, 1)]
    write_rows(tmp_path / "held.jsonl", 30, 5)
    write_corpus(tmp_path / "extra", 10, seed=4)
    settings = {"validation": {"path": str(tmp_path / "held.jsonl")}}
    small_chunks()
    tokenizer = {"from": str(small[1].tokenizer_directory)}
    sets = {"extra": SourceConfig(path=str(tmp_path / "extra"))}
    check_parts(tmp_path, texts(tmp_path, mixed, tokenizer=tokenizer, **settings), (3,), sets)
    check_parts(tmp_path / "share", texts(tmp_path / "share", mixed, tokenizer=tokenizer, validation=0.2), (7,))


def test_parts_of_conversations(tmp_path, planted, small_chunks):
    never = "{{ raise_exception('no') if 'never' in messages[0].content }}{% for m"
    template_of(planted, PLAIN.replace("{% for m", never))
    answer = {"role": "assistant", "content": "y"}
    refused = {"messages": [{"role": "user", "content": "never"}, answer]}
    rows = [refused, *chat_rows(), refused, {"messages": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "a.jsonl"), "format": "chat", "bad_rows": {"at_most": 3}}
    given = {"from": str(planted.directory / "tokenizer")}
    small_chunks()
    check_parts(tmp_path, texts(tmp_path, [source], tokenizer=given, sequence_length=256))


def test_filters_of_parts_count_what_one_machine_counts(tmp_path, sources, small_chunks):
    filtered = [{**source, "filters": {"min_words": 9, "max_chars": 4000}} for source in sources]
    small_chunks()
    check_parts(tmp_path, texts(tmp_path, filtered), (3,))
    counts = json.loads((tmp_path / "parts-3" / "prepared.json").read_text())["filtered"]
    assert list(counts) == ["sources.0", "sources.1", "sources.2"] and all(one["min_words"] for one in counts.values())


def test_what_needs_the_whole_is_left_to_join(tmp_path, sources, small_chunks):
    """A limit by count and by tokens, beside a source without; and duplicates."""
    limited = [{**sources[0], "documents": 50}, sources[1], {**sources[2], "tokens": 900}]
    small_chunks()
    said = check_parts(tmp_path, texts(tmp_path, limited), (1, 3))
    left = "left to `--join`, which reads it from front to back"
    assert [line for line in said[0] if "left to" in line] == [
        f"train, source 0: {left}", f"train, source 2: {left}", f"validation, source 0: {left}",
    ]  # fmt: skip
    (tmp_path / "twice").mkdir()
    twice = texts(tmp_path / "twice", [*sources[:1], *sources], deduplicate=True)
    said = check_parts(tmp_path / "twice", twice, (2,))
    near = texts(tmp_path / "twice", [*sources[:1], *sources], deduplicate={"similarity": 0.9})
    shutil.rmtree(tmp_path / "twice" / "parts-2")
    shutil.rmtree(tmp_path / "twice" / "whole")
    said += check_parts(tmp_path / "twice", near, (2,))
    found = json.loads((tmp_path / "twice" / "parts-2" / "prepared.json").read_text())
    assert found["duplicates"]["sources.1"] >= 60 and found["near_pairs"][0]["similarity"] == 1
    for lines in said:
        assert lines[-2] == "data.deduplicate: a text may have come before in any part: `--join` encodes all"


def test_no_part_reads_more_than_its_chunks_after_the_first_step(tmp_path, sources, small_chunks, monkeypatch):
    small_chunks()
    config = texts(tmp_path, sources, validation={"bytes": 4000})("parts")
    room.prepare_tokenizer(config, {}, log=lambda line: None)

    def never(*_):
        pytest.fail("counted again")

    monkeypatch.setattr("windlass.data.prepare.chunk_tasks.CountChunk.__call__", never)
    monkeypatch.setattr("windlass.data.prepare.hold_out.border_of", never)
    batches, encoded = pool.piece_batches, []
    monkeypatch.setattr(pool, "piece_batches", lambda texts, *more: batches(encoded.append(len(texts)) or texts, *more))
    for number in range(3):
        make_part(config, number, 3)
    encoded.append(None)
    assert join(config).bad_rows["sources.2"] and encoded[-1] is None, "join encodes nothing"


def test_bad_rows_are_refused_before_a_part_encodes_and_allowed_without_doing_it_again(
    tmp_path, sources, small_chunks, small
):
    small_chunks()
    tokenizer = {"from": str(small[1].tokenizer_directory)}
    sources[2]["bad_rows"] = {"at_most": 2}
    config = texts(tmp_path, sources, tokenizer=tokenizer)
    with pytest.raises(TooManyBadRows, match="5 of 305 rows"):
        make_part(config("data"), 0, 2)
    assert not list((tmp_path / ".data.parts").rglob("chunk-*"))
    sources[2]["bad_rows"] = {"at_most": 9}
    for number in range(2):
        make_part(config("data"), number, 2)
    sources[2]["bad_rows"] = {"at_most": 3}
    with pytest.raises(TooManyBadRows):
        join(config("data"))
    sources[2]["bad_rows"] = {"at_most": 5}
    assert join(config("data")).bad_rows == quietly(config("whole")).bad_rows


def test_rows_that_are_not_local_are_fetched_by_the_first_step_alone(tmp_path, small, small_chunks, monkeypatch):
    write_rows(tmp_path / "a.jsonl", 40, 3)
    sources, tokenizer = [{"path": f"file://{tmp_path}/a.jsonl"}], {"from": str(small[1].tokenizer_directory)}
    config = texts(tmp_path, sources, tokenizer=tokenizer)
    with pytest.raises(UserError) as caught:
        make_part(config("parts"), 0, 2)
    assert caught.value.given == "--part with sources.0 not on this host, and not fetched"
    assert caught.value.change.endswith("where the parts find them: windlass prepare RECIPE --tokenizer-only")
    room.prepare_tokenizer(config("parts"), {}, log=lambda line: None)
    with monkeypatch.context() as patched:
        patched.setattr("windlass.data.sources.fetch.url_rows", lambda *_: pytest.fail("fetched again"))
        for number in range(2):
            make_part(config("parts"), number, 2)
        joined = join(config("parts"))
    assert content(joined.directory) == content(quietly(config("whole")).directory)


def test_parts_are_joined_into_a_store_and_may_come_from_machines_with_disks_of_their_own(
    tmp_path, sources, small_chunks, small
):
    """Each machine has a cache of its own; what they share is the store alone."""
    small_chunks()
    tokenizer = {"from": str(small[1].tokenizer_directory)}

    def at(machine, name="parts"):
        url, cache = f"file://{tmp_path}/store/{name}", {"directory": str(tmp_path / machine / "cache")}
        return data_config(tmp_path, sources=sources, tokenizer=tokenizer, directory=url, cache=cache)

    for number in range(2):
        make_part(at(f"machine-{number}"), number, 2)
    places = [next((tmp_path / f"machine-{number}").glob(".cache.prepare-*.parts")) for number in range(2)]
    assert [place.name for place in places] == [places[0].name] * 2 and not (tmp_path / "store").exists()
    with pytest.raises(UserError) as caught:
        join(at("machine-0"))
    assert caught.value.given.startswith("part 1/2 of ") and caught.value.change.endswith(f", to {places[0]}")
    assert not (tmp_path / "store").exists()
    (places[1] / "part-1-of-2").rename(places[0] / "part-1-of-2")
    joined = join(at("machine-0"))
    quietly(at("machine-0", "whole"))
    assert content(tmp_path / "store" / "parts") == content(tmp_path / "store" / "whole") != {}
    assert not places[0].exists()
    lines = []
    assert join(at("machine-1"), lines=lines).fingerprint == joined.fingerprint
    assert "is prepared already and unchanged: skipped" in lines[-1]


# ---- kills

KILLED = """
from pathlib import Path
from tests.data.prepare.test_part import config_of_rows, cut_smallest, join, make_part, quietly
CHANGES = {"os.rename", "os.mkdir", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.truncate"}  # of replace and unlink too
cut_smallest(setattr)
def run(root, number):
    def hear(event, arguments):  # of Python itself, before each such call
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            count()
    fsync = os.fsync
    os.fsync = lambda file: (count(), fsync(file))[1]  # no event of Python's
    sys.addaudithook(hear)
    config, number = config_of_rows(Path(root)), int(number)
    {-2: quietly, -1: join}.get(number, lambda config: make_part(config, number, 2))(config)
"""


@pytest.fixture(scope="module")
def killed_at():
    """(root, number, event) -> makes part `number`, joins where it is -1, or prepares where it is -2, in a process that dies at
    the event-th call that changes the disk or opens a file to write. Returns how many calls were left, or None."""
    with killing(KILLED, {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}) as ask:  # an import changes nothing
        yield ask


def cut_smallest(set_attribute):
    cut_small(set_attribute)
    set_attribute(resume, "PART_TOKENS", 60)
    set_attribute(pool, "BATCH_CHARS", 60)


def config_of_rows(root):
    sources = [{"path": str(root / "a.jsonl")}]
    return data_config(root, sources=sources, tokenizer={"from": str(root / "tokenizer")})


@pytest.fixture
def rows(tmp_path, small, monkeypatch):
    """(root of a source, the shards of one machine); chunks and what is written of them at once are small."""
    root = tmp_path / "rows"
    root.mkdir()
    write_rows(root / "a.jsonl", 30, 3)
    os.utime(root / "a.jsonl", (1, 1))  # so old that its hash is kept, whenever this runs
    shutil.copytree(small[1].tokenizer_directory, root / "tokenizer")
    whole = content(quietly(config_of_rows(root)).directory)
    shutil.rmtree(root / "data")
    (root / ".data.lock").unlink()
    cut_smallest(monkeypatch.setattr)
    return root, whole


def check_kills(killed_at, rows, tmp_path, number, events):
    """Whatever the moment: the part made again, the other one and the join give one machine's shards; so does `prepare` again."""
    root, whole = rows
    config, saved = config_of_rows(root), tmp_path / "saved"
    for other in (0, 1) if number == -1 else ():
        make_part(config, other, 2)
    root.rename(saved)

    def killed(event):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(saved, root)
        return killed_at(root, number, event)

    last = -killed(0)
    assert last > 20
    for event in events(last):
        assert killed(event) is None
        if (root / "data").exists():
            assert content(root / "data") == whole
        for one in (0, 1) if number >= 0 else ():
            make_part(config, one, 2)
        assert content((quietly if number == -2 else join)(config).directory) == whole
        assert sorted(os.listdir(root)) == [".data.lock", "a.jsonl", "data", "tokenizer"]


def few(last):
    return 2, last // 2, last


def test_a_part_that_is_killed_goes_on(killed_at, rows, tmp_path):
    check_kills(killed_at, rows, tmp_path, 1, few)


def test_a_join_that_is_killed_goes_on(killed_at, rows, tmp_path):
    check_kills(killed_at, rows, tmp_path, -1, few)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, -1, -2], ids=["part", "join", "prepare"])
def test_kills_at_every_change_of_the_disk(killed_at, rows, tmp_path, number, request):
    """Or at as many, spread evenly, as `--kills` says."""
    most, made = request.config.getoption("--kills"), []

    def spread(last):
        made.extend(sorted({1 + at * last // most for at in range(most)}) if most else range(1, last + 1))
        return made

    check_kills(killed_at, rows, tmp_path, number, spread)
    print(f"{len(made)} kills, the last at call {made[-1]}")


def test_a_part_of_another_number_is_refused_while_parts_are_there(tmp_path, sources, small_chunks, small):
    """As one task of an array that is submitted again alone: SLURM then counts one."""
    small_chunks()
    config = texts(tmp_path, sources, tokenizer={"from": str(small[1].tokenizer_directory)})("data")
    make_part(config, 0, 2)
    with pytest.raises(UserError) as caught:
        make_part(config, 0, 1)
    place = tmp_path / ".data.parts"
    assert caught.value.given == f"--part 0/1, and {place}/part-0-of-2 is part 0/2"
    assert caught.value.change.startswith("give the part that is to be made again, as --part I/2; or delete")
    assert sorted(path.name for path in place.glob("part-*")) == ["part-0-of-2"]
    lines = []
    quietly(config, lines=lines)
    assert f"{place} is not checked: `windlass prepare RECIPE --join` joins what parts have encoded" in lines


def test_parts_behind_a_link_are_joined_and_deleted_there(tmp_path, sources, small_chunks, small):
    small_chunks()
    (tmp_path / "large").mkdir()
    (tmp_path / ".data.parts").symlink_to(tmp_path / "large")
    config = texts(tmp_path, sources, tokenizer={"from": str(small[1].tokenizer_directory)})
    for number in range(2):
        make_part(config("data"), number, 2)
    assert content(join(config("data")).directory) == content(quietly(config("whole")).directory)
    assert not (tmp_path / "large").exists() and not os.path.lexists(tmp_path / ".data.parts")
    assert not os.path.lexists(tmp_path / ".data.preparing")
