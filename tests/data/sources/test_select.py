"""Which documents a set holds: by hash, without what came before, and never an empty set."""

import numpy as np
import pytest

from tests.data.conftest import data_config, make_text
from windlass.data.config import SourceConfig
from windlass.data.prepare.prepare import prepare
from windlass.data.sources.scan import scan
from windlass.data.sources.select import amount_of, check_not_empty, exact_copies, select
from windlass.data.sources.source_files import source_of_files
from windlass.errors import UserError


def source(tmp_path, name, texts, **settings):
    path = tmp_path / name
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number:02}.txt").write_text(text)
    config = SourceConfig(path=str(path), **settings)
    return source_of_files(config, scan(config, print))


def test_duplicates_are_what_came_before_in_this_source_or_an_earlier_one(tmp_path):
    one = source(tmp_path, "one", ["a", "b", "a", "", "c"])
    two = source(tmp_path, "two", ["d", "b", "d", "e", "A"])
    found = exact_copies([one, two])
    assert [flags.tolist() for flags in found.flags] == [
        [False, False, True, False],
        [False, True, True, False, False],
    ]
    assert found.counts == [1, 2]


def test_nothing_to_compare_is_nothing_dropped(tmp_path):
    assert [flags.tolist() for flags in exact_copies([source(tmp_path, "one", [""])]).flags] == [[]]


def test_both_sides_of_a_share_lose_their_duplicates(tmp_path):
    texts = [f"document {number % 30}" for number in range(60)]
    one = [source(tmp_path, "one", texts)]
    selections = select(one, 0.3, {}, exact_copies(one))
    sides = [list(selections[name].texts()) for name in ("train", "validation")]
    assert exact_copies(one).counts == [30] and sorted(sides[0] + sides[1]) == sorted(set(texts)) and all(sides)


def test_an_empty_set_is_refused_by_name(tmp_path):
    one, none = source(tmp_path, "one", ["a"]), source(tmp_path, "none", [""])
    with pytest.raises(UserError, match="the source of extra holds no text"):
        selections = select([one], one, {"extra": none})
        check_not_empty({name: [amount_of(found.documents())] for name, found in selections.items()}, None)


def test_a_preparation_reports_what_it_dropped_and_stops_at_its_limits(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(60):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(make_text(60, number % 40))
    lines = []
    clean = prepare(data_config(tmp_path, deduplicate=True), {}, log=lines.append)
    assert "deduplicate: 20 documents are left out, whose text came before" in lines
    assert sum(info.documents for info in clean.sets.values()) == 40
    few = data_config(tmp_path, sources=[{"path": str(tmp_path / "corpus"), "documents": 12}], validation=0.3)
    assert sum(info.documents for info in prepare(few, {}, log=lines.append).sets.values()) == 12
    limit = clean.sets["train"].tokens // 3
    short = data_config(tmp_path, sources=[{"path": str(tmp_path / "corpus"), "tokens": limit}])
    info = prepare(short, {}, log=lines.append).sets["train"]
    assert limit <= info.tokens < limit + info.tokens / info.documents * 3 and info.bytes_add_up
    assert 0 < info.documents < clean.sets["train"].documents


def test_a_source_of_a_mixture_without_training_text_is_named(tmp_path):
    for name, text in (("one", "a text of some words " * 9), ("two", "")):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(text and f"{number} {text}")
    sources = [{"path": str(tmp_path / name), "weight": 1} for name in ("one", "two")]
    with pytest.raises(UserError) as caught:
        prepare(data_config(tmp_path, sources=sources), {}, log=lambda line: None)
    assert caught.value.given == "data.sources[1] is mixed with others, and has no text for training"
    assert not np.any([path.name.startswith(".data.") and path.is_dir() for path in tmp_path.iterdir()])
