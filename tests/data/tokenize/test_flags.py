"""One number per token: masks and counts travel with their ids."""

import numpy as np
import pytest

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.packing import pack, pack_best_fit
from windlass.data.tokenize.flags import ID_BITS, count_unwritten, flagged, labelled, percent_of


def test_fields_that_are_not_written_are_counted_and_leave_ids_as_they_are():
    ids, is_learned = np.array([5, 3, (1 << 24) - 1, 5], np.int32), np.array([False, True, True, True])
    marked = flagged(ids, is_learned, 5, [["thinking", "tool_calls"], [], ["thinking"]])
    assert (marked & ID_BITS).tolist() == ids.tolist() and (marked == 5).tolist() == [False, False, False, True]
    assert +count_unwritten(marked) == {"thinking": 2, "tool_calls": 1}
    assert labelled(marked, marked)[1].tolist() == [NOT_COUNTED, 3, (1 << 24) - 1, 5]


@pytest.mark.parametrize("way", [pack, pack_best_fit])
def test_masks_travel_through_packing_with_their_ids(way):
    eos, draw = 5, np.random.default_rng(0)
    documents = [(draw.integers(0, 9, n), draw.random(n) < 0.5) for n in draw.integers(2, 40, 60)]
    for ids, _ in documents:
        ids[-1] = eos
    marked = [flagged(ids.astype(np.int32), np.append(is_learned[:-1], True), eos) for ids, is_learned in documents]
    assert all((one == eos).sum() == 1 and one[-1] == eos for one in marked), "inner EOS are no ends"
    samples = [labelled(*packed) for packed in way(iter(marked), eos, 16)]
    ids_NL, labels_NL = (np.concatenate(column) for column in zip(*samples))
    assert ids_NL.dtype == labels_NL.dtype == np.int32 and ids_NL.max() == 8
    counted = labels_NL != NOT_COUNTED
    assert (labels_NL[counted] == ids_NL[counted]).all()
    if way is pack:
        stream = np.concatenate([ids_NL[0, :1], ids_NL[:, 1:].ravel()])
        wanted = np.concatenate([ids for ids, _ in documents])
        assert stream[1 : 1 + len(wanted)].tolist() == wanted.tolist()
        learned = np.concatenate([np.append(is_learned[:-1], True) for _, is_learned in documents])
        assert counted[:, 1:].ravel()[: len(wanted)].tolist() == learned.tolist()


def test_weights_travel_through_packing_with_their_targets():
    """Beside documents without weights; of each label the weight of its id, whatever document it is in."""
    eos, draw = 5, np.random.default_rng(1)
    documents = []
    for number, n in enumerate(draw.integers(2, 17, 80)):
        ids = draw.integers(6, 9000, n).astype(np.int32)
        ids[-1] = eos
        percent = draw.integers(1, 101, n).astype(np.uint8) if number % 3 else None
        documents.append((ids, percent))
    marked = [flagged(ids, np.ones(len(ids), bool), eos, percent_N=percent) for ids, percent in documents]
    assert all((one == eos).sum() == 1 and one[-1] == eos for one in marked)
    assert {one.dtype for one in marked} == {np.dtype(np.int32), np.dtype(np.int64)}
    found = []
    for input_ids, labels in pack_best_fit(iter(marked), eos, 16):
        percent_NL = percent_of(input_ids)
        ids_NL, labels_NL = labelled(input_ids, labels)
        assert ids_NL.dtype == labels_NL.dtype == np.int32 and percent_NL.dtype == np.uint8
        for row in zip(ids_NL, labels_NL, percent_NL):
            ids, labels_L, percent_L = row
            assert int(ids[0]) == eos
            ends = np.flatnonzero((ids == eos) & (labels_L != NOT_COUNTED)) + 1
            found += list(
                zip(np.split(ids[1 : ends[-1]], ends[:-1] - 1), np.split(percent_L[1 : ends[-1]], ends[:-1] - 1))
            )
    wanted = [(ids.tolist(), [100] + ([100] * (len(ids) - 1) if p is None else p[1:].tolist())) for ids, p in documents]
    assert sorted((ids.tolist(), percent.tolist()) for ids, percent in found) == sorted(wanted)
    assert percent_of(np.zeros((1, 3), np.int32)) is None
