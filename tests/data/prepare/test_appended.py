"""A source appended to a mixture: what was prepared of the others stays, and the result is the one made anew."""

import json
import shutil

import pytest

from tests.data.conftest import data_config, make_text, write_corpus
from tests.data.prepare.test_prepare import content, quietly

TEMPLATE = """{% for m in messages %}{% if m['content'] == 'refuse' %}{{ raise_exception('no') }}{% endif %}
{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with the corpora a, b and c, a tokenizer, and a mixture of a and b prepared in `data`."""
    root = tmp_path_factory.mktemp("appended")
    for number, name in enumerate("abc"):
        write_corpus(root / name, seed=number)
    bad = "\n".join([json.dumps({"text": make_text(50, 1)}), "{", json.dumps({"text": make_text(60, 2)})])
    (root / "a" / "rows").mkdir()
    (root / "rows.jsonl").write_text(bad)
    quietly(data_config(root, sources=[{"path": str(root / "a")}], directory=str(root / "first")))
    path = root / "first" / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    quietly(of(root, "ab"))
    return root


def of(root, names, directory="data", **changes):
    sources = [{"path": str(root / name), "weight": 1 + number} for number, name in enumerate(names)]
    sources[0] = {"path": str(root / "rows.jsonl"), "weight": 1, "bad_rows": {"at_most": 1}}
    given = {"sources": sources, "tokenizer": {"from": str(root / "first" / "tokenizer")}}
    return data_config(root, directory=str(root / directory), **(given | changes))


def prepared(root, config):
    """A copy of what was prepared of a and b, prepared for `config` -> (files, whether shards were kept)."""
    shutil.rmtree(root / "copy", ignore_errors=True)
    shutil.copytree(root / "data", root / "copy")
    before = {path.stat().st_ino for path in (root / "copy" / "train").glob("shard.*")}
    lines = []
    quietly(config.changed(directory=str(root / "copy")), lines=lines)
    kept = {path.stat().st_ino for path in (root / "copy" / "train").glob("shard.*")} & before
    assert bool(kept) == any("are kept" in line for line in lines)
    return content(root / "copy"), len(kept)


def anew(root, config):
    shutil.rmtree(root / "anew", ignore_errors=True)
    quietly(config.changed(directory=str(root / "anew")))
    return content(root / "anew")


@pytest.mark.parametrize("changes", [{}, {"validation": "none"}, {"compression": "zstd", "packing": "best-fit"}])
def test_what_was_appended_is_encoded_and_the_rest_is_linked(made, changes):
    if changes:
        shutil.rmtree(made / "data")
        quietly(of(made, "ab", **changes))
    num_shards = len(list((made / "data" / "train").glob("shard.*")))
    found, num_kept = prepared(made, of(made, "abc", **changes))
    assert found == anew(made, of(made, "abc", **changes)) and num_kept == num_shards > 3


def test_filters_count_what_they_removed_of_kept_sources(made):
    filters = {"min_words": 9, "decontaminate": {"path": [str(made / "listed.txt")], "n": 5}}
    (made / "listed.txt").write_text(make_text(50, 1))
    sources = [{"path": str(made / name), "weight": 1, "filters": filters} for name in "abc"]
    shutil.rmtree(made / "data")
    quietly(of(made, "ab", sources=sources[:2]))
    found, num_kept = prepared(made, of(made, "abc", sources=sources))
    assert num_kept and found == anew(made, of(made, "abc", sources=sources))
    assert json.loads((made / "copy" / "prepared.json").read_text())["filtered"]["sources.0"]["min_words"]


@pytest.fixture
def plain(made):
    shutil.rmtree(made / "data")
    quietly(of(made, "ab"))


def test_several_are_appended_at_once(made, plain):
    found, num_kept = prepared(made, of(made, "abcc"))
    assert found == anew(made, of(made, "abcc")) and num_kept


def test_rows_that_the_template_refused_stay_counted(made):
    for name in "xyz":
        rows = [
            [{"role": "user", "content": word}, {"role": "assistant", "content": name}]
            for word in ("refuse", *"abcdefg")
        ]
        (made / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    sources = [
        {"path": str(made / f"{name}.jsonl"), "format": "chat", "weight": 1, "bad_rows": {"at_most": 1}}
        for name in "xyz"
    ]
    shutil.rmtree(made / "data")
    quietly(of(made, "ab", sources=sources[:2], validation="none"))
    config = of(made, "abc", sources=sources, validation="none")
    found, num_kept = prepared(made, config)
    assert num_kept and found == anew(made, config)
    bad_rows = json.loads((made / "copy" / "prepared.json").read_text())["bad_rows"]
    assert list(bad_rows) == ["sources.0", "sources.1", "sources.2"] and bad_rows["sources.0"] == bad_rows["sources.2"]


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        ("acb", {}),  # put between the others
        ("ab", {"sequence_length": 34}),
        ("abc", {"sequence_length": 34}),
        ("abc", {"shard_bytes": 9 << 10}),
        ("abc", {"deduplicate": True}),
        ("abc", {"deduplicate": {"similarity": 0.8}}),
        ("abc", {"validation": {"bytes": 2000}}),  # dealt out among all sources
        ("abc", {"tokenizer": {"train": 300}}),
    ],
)
def test_what_depends_on_more_is_made_anew(made, plain, names, changes):
    if changes.keys() & {"deduplicate", "validation", "tokenizer"}:
        shutil.rmtree(made / "data")
        quietly(of(made, "ab", **changes))
    found, num_kept = prepared(made, of(made, names, **changes))
    assert num_kept == 0 and found == anew(made, of(made, names, **changes))


def test_a_source_that_changed_is_made_anew(made, plain):
    path = made / "b" / "b" / "000.txt"
    before = path.read_text()
    path.write_text(before + " more")
    found, num_kept = prepared(made, of(made, "abc"))
    assert num_kept == 0 and found == anew(made, of(made, "abc"))
    path.write_text(before)


def test_a_chat_behind_texts_is_stored_in_other_columns(made, plain):
    row = {"messages": [{"role": "user", "content": "Haul?"}, {"role": "assistant", "content": "Haul."}]}
    (made / "chats.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    given = of(made, "abc")
    chats = given.sources[2].changed(path=str(made / "chats.jsonl"), format="chat")
    config = given.changed(sources=[*given.sources[:2], chats], validation={"path": str(made / "c")})
    shutil.rmtree(made / "data")
    quietly(of(made, "ab", validation={"path": str(made / "c")}))
    found, num_kept = prepared(made, config)
    assert num_kept == 0 and found == anew(made, config)


@pytest.mark.parametrize("damage", ["flipped", "shortened"])
def test_a_damaged_shard_is_not_kept(made, plain, damage):
    path = made / "data" / "train" / "shard.00001.mds"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data if damage == "flipped" else data[:-1])
    found, num_kept = prepared(made, of(made, "abc"))
    assert num_kept == 0 and found == anew(made, of(made, "abc"))


def test_a_tokenizer_that_rewrites_text_has_everything_counted_anew(made):
    """Its tokens' bytes are not those of the text, and what they lack is counted as they are encoded."""
    shutil.copytree(made / "first" / "tokenizer", made / "rewriting")
    path = made / "rewriting" / "tokenizer.json"
    normalizer = {"type": "Replace", "pattern": {"String": "Q"}, "content": ""}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    for name, number in (("p", 20), ("q", 20), ("r", 1)):
        (made / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": f"Q {make_text(40, n)}"}) for n in range(number))
        )
    sources = [{"path": str(made / f"{name}.jsonl"), "weight": 1} for name in "pqr"]
    given = {"tokenizer": {"from": str(made / "rewriting")}, "validation": "none"}
    shutil.rmtree(made / "data")
    quietly(of(made, "ab", sources=sources[:2], **given))
    found, num_kept = prepared(made, of(made, "abc", sources=sources, **given))
    assert num_kept == 0 and found == anew(made, of(made, "abc", sources=sources, **given))


def test_one_source_alone_is_no_mixture_that_can_be_appended_to(made):
    shutil.rmtree(made / "data")
    quietly(of(made, "a", sources=[{"path": str(made / "a")}]))
    sources = [{"path": str(made / name), "weight": 1} for name in "ab"]
    found, num_kept = prepared(made, of(made, "ab", sources=sources))
    assert num_kept == 0 and found == anew(made, of(made, "ab", sources=sources))
