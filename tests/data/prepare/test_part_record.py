"""Which parts are joined, and what each refusal says."""

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.data.conftest import data_config, make_text, write_corpus
from tests.data.prepare.test_prepare import content, quietly
from windlass.data.prepare.part import prepare_part, prepare_tokenizer
from windlass.data.prepare.part_record import Part
from windlass.data.prepare.prepare import prepare
from windlass.errors import UserError


@pytest.fixture
def config(tmp_path, small):
    write_corpus(tmp_path / "corpus", 12)
    shutil.copytree(small[1].tokenizer_directory, tmp_path / "tokenizer")
    return data_config(tmp_path, tokenizer={"from": str(tmp_path / "tokenizer")})


def make(config, number, of):
    prepare_part(config, {}, Part(number, of), log=lambda line: None)


def refused(act):
    with pytest.raises(UserError) as caught:
        act()
    return str(caught.value)


def join(config):
    return prepare(config, {}, log=lambda line: None, is_join=True)


def joined(config):
    """What a refused join says; it leaves the parts as they are."""
    place = config.directory.replace("/data", "/.data.parts")
    before = content(Path(place))
    message = refused(lambda: join(config))
    assert content(Path(place)) == before
    return message


@pytest.mark.parametrize("text", ["", "3", "a/b", "-1/3", "1/3/", "1.0/3", "0/3 "])
def test_a_part_is_a_number_of_a_number(text):
    assert refused(lambda: Part.of_text(text)).startswith(
        f"--part {text}\n  rule:   a part is I/N: number I, from 0, of N"
    )


def test_a_part_out_of_range_is_refused():
    assert Part.of_text("2/3") == (2, 3) and str(Part(2, 3)) == "2/3"
    rule = "rule:   3 parts are numbered from 0 to 2\n  change: give one of these numbers"
    assert refused(lambda: Part.of_text("3/3")) == f"--part 3/3\n  {rule}"
    assert "there is at least one part" in refused(lambda: Part.of_text("0/0"))


def test_a_join_without_parts_is_refused_and_finds_what_is_joined(config, tmp_path):
    assert joined(config) == (
        f"{tmp_path}/.data.parts holds no part\n"
        "  rule:   `--join` takes N parts, 0/N to N-1/N, each once and finished\n"
        "  change: make all parts first: windlass prepare RECIPE --part 0/N and so on; where machines share no file system, copy "
        "the directory of each part from the one that made it; or prepare without --join"
    )
    make(config, 0, 1)
    assert join(config) == join(config) == quietly(config)


def test_parts_that_are_missing_are_named(config, tmp_path):
    make(config, 1, 3)
    assert joined(config).startswith(f"parts 0/3, 2/3 of {tmp_path}/data are missing\n")
    make(config, 0, 3)
    message = joined(config)
    assert message.startswith(f"part 2/3 of {tmp_path}/data is missing\n")
    assert message.endswith(
        "change: make what is missing: windlass prepare RECIPE --part 2/3; where machines share no file system, copy "
        f"the directory of each part from the one that made it, to {tmp_path}/.data.parts"
    )


def test_a_part_that_is_not_finished_is_named(config, tmp_path):
    make(config, 0, 2)
    (tmp_path / ".data.parts" / "part-1-of-2").mkdir()  # killed before it has written anything
    given = f"part 1/2 of {tmp_path}/data is not finished\n"
    assert joined(config).startswith(given)
    make(config, 1, 2)
    path = tmp_path / ".data.parts" / "part-1-of-2" / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_whole": False}))
    message = joined(config)
    assert message.startswith(given)
    assert message.endswith("change: wait for it, or let it go on: windlass prepare RECIPE --part 1/2")


def test_a_part_that_is_there_twice_is_refused(config, tmp_path):
    make(config, 0, 2), make(config, 1, 2)
    parts = tmp_path / ".data.parts"
    shutil.copytree(parts / "part-1-of-2", parts / "part-1-of-2.copied")
    message = joined(config)
    assert message.startswith(f"part 1/2 is there twice: part-1-of-2 and part-1-of-2.copied in {parts}\n")
    assert message.endswith("change: delete one of the two directories")


def test_parts_of_another_number_are_refused(config, tmp_path):
    """As parts that were made on machines with disks of their own, and copied into one directory."""
    parts = tmp_path / ".data.parts"
    make(config, 0, 1)
    (parts / "part-0-of-1").rename(tmp_path / "elsewhere")
    make(config, 0, 2)
    (tmp_path / "elsewhere").rename(parts / "part-0-of-1")
    message = joined(config)
    given = "holds parts of 1 and of 2 (of 1: part-0-of-1; of 2: part-0-of-2)"
    assert message.startswith(f"{tmp_path}/.data.parts {given}\n")
    assert message.endswith("change: delete the directories of the parts that are not wanted")


def test_a_part_whose_number_is_none_of_them_is_refused(config, tmp_path):
    (tmp_path / ".data.parts" / "part-4-of-2").mkdir(parents=True)
    assert joined(config).startswith(f"{tmp_path}/.data.parts/part-4-of-2 is number 4 of 2 parts\n")


def edit_record(tmp_path, **changes):
    path = tmp_path / ".data.parts" / "part-1-of-2" / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def changed(config, **settings):
    return config.model_copy(update=settings)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (
            lambda root, config: changed(config, sequence_length=40),
            "with another recipe, which differs in data.sequence_length",
        ),
        (
            lambda root, config: (root / "corpus" / "a" / "001.txt").write_text(make_text(9, 1)) and config,
            "from other files of sources.0",
        ),
        (lambda root, config: edit_record(root, version="0.0.9") or config, "by windlass 0.0.9; this is 0.1.0"),
        (
            lambda root, config: add_special(root) or config,
            "with another tokenizer, or by another version of the algorithm",
        ),
    ],
    ids=["recipe", "sources", "version", "tokenizer"],
)
def test_a_part_of_something_else_is_refused_and_made_again(config, tmp_path, change, given):
    make(config, 0, 2), make(config, 1, 2)
    config = change(tmp_path, config)
    found = re.fullmatch(rf"part ([01])/2 was made {re.escape(given)}\n(.*)", joined(config), re.DOTALL)
    assert found[2] == (
        "  rule:   all parts are made of one recipe and of the same sources, by the version that joins them\n"
        f"  change: make it again: windlass prepare RECIPE --part {found[1]}/2; or put back what it was made with"
    )
    make(config, 0, 2), make(config, 1, 2)
    one = quietly(changed(config, directory=str(tmp_path / "one")))
    assert content(join(config).directory) == content(one.directory)


def add_special(root):
    path = root / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added": 1}))


def test_parts_of_two_dates_are_refused(config, tmp_path):
    make(config, 0, 2), make(config, 1, 2)
    edit_record(tmp_path, work="0" * 32, date="2026-11-24")
    assert joined(config).startswith(
        "part 1/2 was made with the date 2026-11-24 in the chat template, which is None here\n"
    )


def test_parts_that_other_tokenizers_encoded_are_refused(config, tmp_path):
    make(config, 0, 2), make(config, 1, 2)
    edit_record(tmp_path, tokenizer="0" * 32)
    message = joined(config)
    assert message.startswith("parts 0/2 and 1/2 were encoded by other tokenizers\n")
    assert message.endswith("make one tokenizer (windlass prepare RECIPE --tokenizer-only), then all parts again")


def test_a_part_without_a_tokenizer_says_the_command(config, tmp_path):
    config = changed(config, tokenizer=data_config(tmp_path).tokenizer)
    wanted = (
        "--part with data.tokenizer.train: 300, and no tokenizer of these sources is made\n"
        "  rule:   all parts are encoded by one tokenizer, which is trained on the text of all\n"
        "  change: make it first, where the parts find it: windlass prepare RECIPE --tokenizer-only"
    )
    assert refused(lambda: make(config, 0, 2)) == wanted
    assert not (tmp_path / ".data.parts").exists()
    prepare_tokenizer(config, {}, log=lambda line: None)
    (tmp_path / "corpus" / "new.txt").write_text("another text")
    assert refused(lambda: make(config, 0, 2)) == wanted, "it is one of other sources"


def test_a_first_epoch_in_written_order_has_no_parts(config):
    written = data_config(Path(config.directory).parent, order={"first_epoch": "written"})
    for act in (lambda: make(written, 0, 2), lambda: join(written), lambda: prepare_tokenizer(written, {})):
        assert refused(act).startswith("data.order.first_epoch: written, and a preparation in parts\n")


def test_a_part_that_is_made_is_not_made_again_and_a_prepared_recipe_has_none(config, tmp_path):
    make(config, 0, 1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / ".data.parts").rglob("*")}
    lines = []
    prepare_part(config, {}, Part(0, 1), log=lines.append)
    assert lines == [f"part 0/1 of {tmp_path}/data is made already: skipped"]
    assert before == {path: path.stat().st_mtime_ns for path in before}
    join(config)
    lines.clear()
    prepare_part(config, {}, Part(0, 2), log=lines.append)
    prepare_tokenizer(config, {}, log=lines.append)
    assert lines == [f"{tmp_path}/data is prepared already and unchanged: skipped"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".data.lock", "corpus", "data", "tokenizer"]


def test_parts_whose_languages_were_found_by_two_versions_are_refused(tmp_path, config):
    (tmp_path / "english").mkdir()
    for number in range(12):
        text = f"The ship hauls its anchor up before the tide turns, and all {number} hands are on deck."
        (tmp_path / "english" / f"{number}.txt").write_text(text)
    source = config.sources[0].model_dump() | {"path": str(tmp_path / "english"), "filters": {"language": "en"}}
    config = config.changed(sources=[source], validation="none")
    for number in range(2):
        make(config, number, 2)
    edit_record(tmp_path, version="0.1.0 with py3langid 0.3.0")
    assert f"by windlass 0.1.0 with py3langid 0.3.0; this is 0.1.0 with py3langid {version('py3langid')}" in joined(
        config
    )
