"""An amount held out for validation, and none: whole documents by the order of their hashes, and the end of one."""

import json

import pytest
import xxhash
from tokenizers import Tokenizer

from tests.data.conftest import data_config, make_text, write_corpus
from tests.data.prepare.test_prepare import documents_of, quietly
from windlass.data.config import SourceConfig
from windlass.data.prepare.hold_out import border_of, border_of_share
from windlass.data.sources.scan import scan
from windlass.data.sources.select import Selection, Split, select
from windlass.data.sources.source_files import source_of_files
from windlass.errors import UserError


def by_hash(texts):
    return sorted(texts, key=lambda text: xxhash.xxh64_intdigest(text.encode()))


def size(texts):
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("wanted", [1, 400, 5000])
def test_bytes_are_the_documents_of_the_lowest_hashes_and_the_end_of_the_next(tmp_path, corpus, wanted):
    prepared = quietly(data_config(tmp_path, validation={"bytes": wanted}))
    train, held = documents_of(prepared, "train"), documents_of(prepared, "validation")
    lowest, count = by_hash(corpus), 0
    while size(lowest[: count + 1]) <= wanted:
        count += 1
    whole, cut = lowest[:count], lowest[count]
    ends = [text for text in held if text not in whole]
    begins = [text for text in train if text not in corpus]
    assert [text for text in held if text in whole] == [text for text in corpus if text in whole]
    if size(whole) == wanted:
        assert not ends and not begins
    else:
        assert len(ends) == len(begins) == 1 and begins[0] + ends[0] == cut
    assert sorted(text for text in train if text not in begins) == sorted(lowest[count + bool(ends) :])
    assert size(held) <= wanted + 3, "what is left of a character"
    assert size(held) >= wanted or begins[0].endswith("\n"), "what is left of a line stays"
    assert prepared.sets["train"].bytes + prepared.sets["validation"].bytes == size(corpus)


def test_one_text_file_gives_its_last_lines(tmp_path):
    lines = "".join(f"{number} anchor and rope\n" for number in range(400))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "only.txt").write_text(lines)
    log = []
    prepared = quietly(data_config(tmp_path, validation={"bytes": 1000}), lines=log)
    (begin,), (end,) = (documents_of(prepared, name) for name in ("train", "validation"))
    assert begin + end == lines and begin.endswith("rope\n") and 1000 - 20 < len(end) <= 1000
    assert "validation: 1000 B of text held out: the last 1000 B of one document" in log


@pytest.mark.parametrize("texts", [1, 2])
def test_a_share_of_so_few_texts_that_a_side_has_none_is_a_share_of_their_bytes(tmp_path, texts):
    lines = ["".join(f"{number} rope and anchor {text}\n" for number in range(400)) for text in range(texts)]
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(lines):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    assert min(xxhash.xxh64_intdigest(text.encode()) for text in lines) > 0.1 * 2**64, "by hash all are trained on"
    log = []
    prepared = quietly(data_config(tmp_path, validation=0.1), lines=log)
    train, (end,) = (documents_of(prepared, name) for name in ("train", "validation"))
    (cut,) = [text for text in lines if text.endswith(end)]
    assert sorted(train) == sorted([cut[: -len(end)], *(text for text in lines if text != cut)])
    tenth = size(lines) // 10
    assert tenth - 30 < len(end) <= tenth and cut[-len(end) - 1] == "\n"
    of = "1 document" if texts == 1 else "2 documents"
    said = f"validation: 0.1 of {of} leaves none to validate on: 0.1 of their bytes are held out instead"
    assert said in log
    again = []
    quietly(data_config(tmp_path, validation=0.1), lines=again)
    assert any("unchanged: skipped" in line for line in again)


def test_a_share_that_would_hold_everything_out_gives_the_begin_to_training(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "only.txt").write_text(text := "".join(f"{n} anchor and rope\n" for n in range(400)))
    share = xxhash.xxh64_intdigest(text.encode()) / 2**64 + 1e-6
    log = []
    prepared = quietly(data_config(tmp_path, validation=share), lines=log)
    (begin,), (end,) = (documents_of(prepared, name) for name in ("train", "validation"))
    assert begin + end == text and any("leaves none to train on" in line for line in log)
    assert share * size([text]) - 30 < len(end) <= share * size([text])


def test_copies_of_a_single_text_share_what_is_held_out(tmp_path):
    (tmp_path / "corpus").mkdir()
    text = "".join(f"{n} rope and anchor\n" for n in range(400))
    for number in range(4):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    log = []
    prepared = quietly(data_config(tmp_path, validation=0.1), lines=log)
    held = documents_of(prepared, "validation")
    assert len(held) == 4 and 0.1 * size([text]) - 30 < len(held[0]) <= 0.1 * size([text])
    assert any("of each of 4 copies of one" in line for line in log)


def test_a_row_of_a_chat_is_not_cut_for_a_share(tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "say", "completion": "wind " * 50}))
    config = SourceConfig(path=str(tmp_path / "chat.jsonl"), format="chat")
    assert (
        border_of_share(0.1, pytest.fail, Selection([source_of_files(config, scan(config, print))], 0, 1 << 64)).cut
        is None
    )


def test_a_share_of_enough_texts_is_by_hash_and_reads_until_both_sides_have_one(tmp_path, corpus):
    log = []
    prepared = quietly(data_config(tmp_path, validation=0.3), lines=log)
    low = [text for text in corpus if xxhash.xxh64_intdigest(text.encode()) < int(0.3 * 2**64)]
    assert documents_of(prepared, "validation") == low and not any("instead" in line for line in log)
    read = []

    class Counted(Selection):
        def documents_of(self, number):
            for document in super().documents_of(number):
                read.append(document)
                yield document

    source = source_of_files(
        SourceConfig(path=str(tmp_path / "corpus")), scan(SourceConfig(path=str(tmp_path / "corpus")), print)
    )
    assert border_of_share(0.3, print, Counted([source], 0, 1 << 64)).cut is None
    sides = [text in low for text in corpus]
    assert len(read) == max(sides.index(True), sides.index(False)) + 1


def test_a_cut_keeps_characters_whole():
    for number in range(1, 12):
        begin, end = Split(0, number).parts("naïve 北京")
        assert begin + end == "naïve 北京" and number <= len(end.encode()) <= number + 2
    assert Split(0, 4).parts("ab\ncd\nef\n") == ("ab\ncd\n", "ef\n")
    assert Split(0, 3).parts("ab\ncd\nef\n") == ("ab\ncd\n", "ef\n"), "a line that begins just there"
    assert Split(0, 2).parts("ab\ncd\nef\n") == ("ab\ncd\ne", "f\n"), "no other line begins there"


def test_copies_of_a_text_stay_together(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(30):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(make_text(40, number % 6))
    prepared = quietly(data_config(tmp_path, validation={"bytes": 300}))
    train, held = documents_of(prepared, "train"), documents_of(prepared, "validation")
    assert len(held) == 5 * len(set(held)) and not set(held) & set(train)


def test_tokens_are_counted_by_the_tokenizer(tmp_path, corpus):
    first = quietly(data_config(tmp_path, validation="none"))
    tokenizer = {"from": str(first.tokenizer_directory)}
    wanted = sum(first.sets[name].tokens for name in first.sets) // 4
    config = data_config(tmp_path, tokenizer=tokenizer, directory=str(tmp_path / "two"), validation={"tokens": wanted})
    held = quietly(config).sets["validation"]
    opened = Tokenizer.from_file(str(first.tokenizer_directory / "tokenizer.json"))
    assert held.tokens == pytest.approx(wanted, rel=0.15)
    assert held.tokens == pytest.approx(
        held.bytes / size(corpus) * sum(len(opened.encode(t).ids) for t in corpus), rel=0.15
    )


def test_none_holds_nothing_out(tmp_path, corpus):
    prepared = quietly(data_config(tmp_path, validation="none"))
    assert set(prepared.sets) == {"train"} and documents_of(prepared, "train") == corpus and not prepared.baselines
    assert sorted(path.name for path in prepared.directory.iterdir() if path.is_dir()) == ["tokenizer", "train"]
    lines = []
    quietly(data_config(tmp_path, validation="none"), lines=lines)
    assert any("unchanged: skipped" in line for line in lines)


def test_rows_are_held_out_whole(tmp_path):
    rows = [{"prompt": f"say {number}", "completion": "wind " * number} for number in range(1, 9)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = SourceConfig(path=str(tmp_path / "chat.jsonl"), format="chat")
    source = source_of_files(config, scan(config, print))
    amount = data_config(tmp_path, validation={"bytes": 100}).validation
    selections = select([source], lambda whole: border_of(amount, [], print, whole), {})
    sides = [list(selections[name].texts()) for name in ("train", "validation")]
    lowest = by_hash(sides[0] + sides[1])
    assert by_hash(sides[1]) == lowest[: len(sides[1])] and size(sides[1]) >= 100 > size(by_hash(sides[1])[:-1])
    assert len(sides[0]) + len(sides[1]) == 8


def test_an_amount_that_leaves_nothing_is_refused(tmp_path):
    texts = write_corpus(tmp_path / "corpus")
    with pytest.raises(UserError) as caught:
        quietly(data_config(tmp_path, validation={"bytes": 10**6}))
    assert caught.value.given.startswith("data.validation: {bytes: 1000000}, which is 976.6 KiB of ")
    config = SourceConfig(path=str(tmp_path / "corpus"))
    whole = Selection([source_of_files(config, scan(config, print))._replace(format="chat")], 0, 1 << 64)
    with pytest.raises(UserError, match="more than that is there"):
        border_of(data_config(tmp_path, validation={"bytes": size(texts) - 1}).validation, [], print, whole)
    with pytest.raises(UserError, match="a tokenizer without a tokenizer"):
        tokens = data_config(tmp_path, tokenizer={"from": "x"}, validation={"tokens": 9}).validation
        border_of(tokens, [], print, whole)


def test_a_share_that_leaves_nothing_is_refused_in_the_recipes_own_words(tmp_path):
    (tmp_path / "one.txt").write_text("x")
    config = SourceConfig(path=str(tmp_path / "one.txt"))
    with pytest.raises(UserError) as caught:
        border_of_share(0.05, print, Selection([source_of_files(config, scan(config, print))], 0, 1 << 64))
    assert caught.value.given == "data.validation: 0.05, which is 1 B of 1 B of text"


@pytest.mark.parametrize("validation", [{"bytes": 20}, {"tokens": 20}, 0.1, "none"], ids=str)
@pytest.mark.parametrize(
    ("at_most", "said"),
    [(0, "rows.jsonl are bad (4 missing key)"), (4, "the source of train holds no text")],
)
def test_of_no_readable_document_nothing_is_held_out_and_the_reason_is_the_same(tmp_path, validation, at_most, said):
    """An amount was an IndexError here, a bug of ours to whoever restarts the run."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "only.txt").write_text("rope and anchor\n" * 40)
    tokenizer = {"from": str(quietly(data_config(tmp_path, validation="none")).tokenizer_directory)}
    rows = [json.dumps({"question": f"q{number}", "answer": "a"}) for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    source = {"path": str(tmp_path / "rows.jsonl"), "bad_rows": {"at_most": at_most}}
    directory = tmp_path / "two"
    config = data_config(
        tmp_path, sources=[source], tokenizer=tokenizer, directory=str(directory), validation=validation
    )
    with pytest.raises(UserError) as caught:
        quietly(config)
    assert said in caught.value.given and not directory.exists() and not (tmp_path / ".two.preparing").exists()


def test_an_amount_of_tokens_below_a_byte_is_a_byte(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(9):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number}")
    first = quietly(data_config(tmp_path, validation="none", sequence_length=8))
    tokenizer = {"from": str(first.tokenizer_directory)}
    changes = {"tokenizer": tokenizer, "directory": str(tmp_path / "two"), "sequence_length": 8}
    assert quietly(data_config(tmp_path, validation={"tokens": 1}, **changes)).sets["validation"].bytes == 1
