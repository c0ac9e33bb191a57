"""Faults planted one at a time: each is found under its own name with its place, and clean data has none."""

from dataclasses import replace

import pytest

from tests.data.planted import LENGTH, TURN, Planted, text, texts
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.lint import BEFORE_TRAINING, FULL, Limits, lint

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT = {"sources": [{"path": "here", "format": "chat"}], "validation": {"path": "text"}}


@pytest.fixture
def planted(small, tmp_path):
    planted = Planted(small, tmp_path / "data")
    planted.set_config(chat_template=TEMPLATE)
    return planted


def codes(prepared, **options):
    return {finding.code for finding in lint(prepared, **options).findings}


@pytest.mark.parametrize("best_fit", [False, True])
@pytest.mark.parametrize("limits", [FULL, BEFORE_TRAINING, Limits(0, 24, 1000)])
def test_clean_data_has_no_findings(planted, best_fit, limits):
    short = [text(number, 1 + number % 6) for number in range(60)]  # that fit a sequence
    prepared = planted.prepared(short if best_fit else texts(), best_fit=best_fit)
    assert lint(prepared, limits, is_isolated=True).findings == []


def masked(planted, share_of_samples=1.0):
    def edit(ids_NL, labels_NL):
        labels_NL[: round(share_of_samples * len(labels_NL))] = NOT_COUNTED

    return edit


def set_label(row, at, value):
    def edit(ids_NL, labels_NL):
        labels_NL[row, at] = value

    return edit


def set_id(row, at, value):
    def edit(ids_NL, labels_NL):
        ids_NL[row, at] = labels_NL[row, at] = value

    return edit


def shift_labels(ids_NL, labels_NL):
    """As a writer does who shifts already."""
    labels_NL[:-1, :-1] = ids_NL[:-1, 1:]


def answers_only(planted):
    """Each document's second half counts."""

    def edit(ids_NL, labels_NL):
        labels_NL[:, ::2] = NOT_COUNTED

    return edit


def joined(documents):
    """One EOS in three is missing."""
    return [ids[:-1] if number % 3 == 0 else ids for number, ids in enumerate(documents)]


def plant(planted, fault):
    """(the preparation with `fault`, options of lint)."""
    ids = [planted.ids(one) for one in texts()]
    match fault:
        case "an id beyond the vocabulary":
            return planted.prepared(texts(), edit=set_id(3, 5, planted.vocab_size)), {}
        case "a negative id":
            return planted.prepared(texts(), edit=set_id(3, 5, -7)), {}
        case "labels that are shifted":
            return planted.prepared(texts(), edit=shift_labels), {}
        case "a mask of nothing":
            return planted.prepared(texts(), edit=masked(planted)), {}
        case "a sample without targets":
            return planted.prepared(texts(), edit=masked(planted, 0.1)), {}
        case "chat with a mask of everything":
            return planted.prepared(texts(), settings=CHAT), {}
        case "chat with a mask of nothing":
            return planted.prepared(texts(), edit=masked(planted), settings=CHAT), {}
        case "a template that changes answers":
            planted.set_config(
                chat_template=TEMPLATE.replace("m.content", "m.content | replace('rope', 'line') | upper")
            )
            sources = [{"path": "here"}, {"path": "there", "format": "chat"}]
            return planted.prepared(texts(), settings={"sources": sources}), {}
        case "a hole in the mask of text":
            return planted.prepared(texts(), edit=set_label(2, 9, NOT_COUNTED)), {}
        case "another EOS under isolation":
            prepared = planted.prepared(texts())
            return replace(prepared, eos_id=planted.turn), {"is_isolated": True}
        case "another EOS in prepared.json":
            return replace(planted.prepared(texts()), eos_id=planted.turn), {}
        case "documents without EOS":
            return planted.prepared(joined(ids), documents=30), {}
        case "no EOS at all, in a large set":
            return planted.prepared([d[:-1] for d in ids], documents=30), {"limits": Limits(0, 60, 0)}
        case "another token where EOS belongs":
            return planted.prepared([[*d[:-1], planted.turn] for d in ids], documents=30), {}
        case "EOS twice":
            return planted.prepared([[*d, planted.eos] for d in ids]), {}
        case "an empty document":
            return planted.prepared([*ids, [planted.eos]]), {}
        case "a document of white space":
            return planted.prepared([*texts(), "  \n\n \t"]), {}
        case "BOS twice":
            return planted.prepared([*ids, [planted.bos, planted.bos, *planted.ids(text(77))]]), {}
        case "a copy":
            return planted.prepared([*texts(), text(4)]), {}
        case "many short copies":
            return planted.prepared([*texts(), "yes", "yes", "yes", "no", "no"]), {}
        case "a copy in another case":
            return planted.prepared([*texts(), text(4).upper().replace(" ", "  ")]), {}
        case "validation in train but for its case":
            return planted.prepared(texts(), validation=[*texts(1000, 5), text(4).upper()]), {}
        case "text of UTF-16":
            return planted.prepared([*texts(), "\0".join(text(77))]), {}
        case "validation in train":
            return planted.prepared(texts(), validation=[*texts(1000, 5), text(4)]), {}
        case "one token over and over":
            return planted.prepared([*ids, [ids[0][0]] * 300 + [planted.eos]]), {}
        case "text decoded wrongly":
            broken = "Ein Ã¼berlanger Satz Ã¼ber KÃ¤se, der schÃ¶n wÃ¤re, " + text(77)
            return planted.prepared([*texts(), broken]), {}
        case "replacement characters":
            return planted.prepared([*texts(), "na\ufffdve caf\ufffd cr\ufffdme " + text(77)]), {}
        case "a special token in words":
            return planted.prepared([*texts(), text(77) + TURN + text(78)]), {}
        case "documents longer than a sequence":
            return planted.prepared(texts(), best_fit=True), {}
        case "a byte order mark":
            return planted.prepared([*texts(), "\ufeff" + text(77)]), {}
        case "documents alike but for the last token":
            return planted.prepared([*ids, *([*ids[3][:-2], token, planted.eos] for token in range(70, 73))]), {}
        case "ids shifted by one, but for EOS":
            return planted.prepared([[number + 1 for number in one[:-1]] + [planted.eos] for one in ids]), {}
        case "a third of the documents by another tokenizer":
            others = [[number % 250 + 40 for number in one[:-1]] + [planted.eos] for one in ids[:10]]
            return planted.prepared([*others, *ids[10:]]), {}
        case "sequences half empty":
            return planted.prepared([ids[n][:19] + [planted.eos] for n in range(30)], best_fit=True), {}
    raise AssertionError(fault)


FAULTS = [
    ("an id beyond the vocabulary", {"ids-out-of-vocabulary"}),
    ("a negative id", {"ids-out-of-vocabulary"}),
    ("labels that are shifted", {"labels-are-other-ids"}),
    ("a mask of nothing", {"mask-empty"}),
    ("a sample without targets", {"mask-empty"}),
    ("chat with a mask of everything", {"mask-full", "documents-cut"}),
    ("chat with a mask of nothing", {"mask-empty", "documents-cut"}),
    ("a template that changes answers", {"template-round-trip"}),
    ("a hole in the mask of text", {"mask-holes"}),
    ("another EOS under isolation", {"leak-across-documents", "eos-of-another"}),
    ("another EOS in prepared.json", {"eos-of-another"}),
    ("documents without EOS", {"eos-missing"}),
    ("no EOS at all, in a large set", {"eos-missing"}),
    ("another token where EOS belongs", {"eos-of-another"}),
    ("EOS twice", {"eos-doubled"}),
    ("an empty document", {"empty-documents"}),
    ("a document of white space", {"empty-documents"}),
    ("BOS twice", {"bos-doubled"}),
    ("a copy", {"duplicate-documents"}),
    ("many short copies", {"duplicate-documents"}),
    ("a copy in another case", {"near-duplicates"}),
    ("validation in train", {"validation-in-train"}),
    ("validation in train but for its case", {"near-duplicates"}),
    ("text of UTF-16", {"damaged-text"}),
    ("one token over and over", {"repeated-token"}),
    ("text decoded wrongly", {"damaged-text"}),
    ("replacement characters", {"damaged-text"}),
    ("a special token in words", {"special-token-as-text"}),
    ("documents longer than a sequence", {"documents-cut"}),
    ("a byte order mark", {"damaged-text"}),
    ("documents alike but for the last token", {"near-duplicates"}),
    ("ids shifted by one, but for EOS", {"ids-of-another-tokenizer"}),
    ("a third of the documents by another tokenizer", {"ids-of-another-tokenizer", "damaged-text"}),
    ("sequences half empty", {"mostly-padding"}),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_a_planted_fault_is_found_and_nothing_else(planted, fault, expected):
    prepared, options = plant(planted, fault)
    assert codes(prepared, **options) == expected


def test_a_finding_says_what_where_and_what_to_change(planted):
    prepared, _ = plant(planted, "an id beyond the vocabulary")
    (finding,) = lint(prepared).findings
    assert finding.severity == "error" and finding.where == "train: shard.00000.mds, sample 3"
    assert finding.what == f"id {planted.vocab_size}, of {planted.vocab_size} tokens"
    assert finding.change.startswith("the shards belong to another tokenizer")
    assert finding.line.startswith("error ids-out-of-vocabulary: id ")


def test_errors_come_first_and_copies_are_counted(planted):
    prepared = planted.prepared([*texts(), text(4), text(5), text(6)], edit=set_id(3, 5, -7))
    findings = lint(prepared).findings
    assert [finding.code for finding in findings] == ["ids-out-of-vocabulary", "duplicate-documents"]
    assert findings[1].times == 3 and "2 more of the kind" in findings[1].what


def test_what_was_looked_at_is_reported(planted):
    prepared = planted.prepared(texts())
    train = lint(prepared, Limits(0, 160, 10**9)).coverage[0]
    assert train.name == "train" and train.samples == 160 and train.of_samples == prepared.sets["train"].samples
    assert 0 < train.documents < 30 and 0 < train.text_tokens <= 160 * LENGTH
    whole = lint(prepared).coverage[0]
    assert whole.samples == whole.of_samples and whole.documents == 30


def test_a_mixed_set_may_mask_and_may_not(planted):
    sources = [{"path": "a"}, {"path": "b", "format": "chat"}]
    assert codes(planted.prepared(texts(), edit=answers_only(planted), settings={"sources": sources})) == set()


def test_further_sets_are_looked_at_with_their_own_format(planted):
    prepared = planted.prepared(
        texts(), validation=texts(1000, 5), settings={"validation": {"path": "v", "format": "chat"}}
    )
    assert [(f.code, f.where) for f in lint(prepared).findings] == [("mask-full", "validation")]
