"""Parts of documents and of rows: the same samples however large a part is."""

import numpy as np
import pytest

from windlass.data.tokenize.flags import INNER
from windlass.data.tokens.token_parts import pack_samples, targets_of_samples, token_parts

EOS = 9
BYTES_V = np.arange(10)
ROWS = [[1, 2, 3], [9, 4, 9, 9], [5, 9], [6, 7]]


def documents():
    return (np.array(row, "<i4").tobytes() for row in ROWS)


@pytest.mark.parametrize("size", [1, 6, 100])
def test_documents_end_by_eos(size):
    parts = list(
        token_parts(iter([np.array(row, "<i4").tobytes() for row in ([1, 2], [3], [4, 5])]), EOS, BYTES_V, size, False)
    )
    assert np.concatenate([part.ids for part in parts]).tolist() == [1, 2, EOS, 3, EOS, 4, 5, EOS]
    assert np.concatenate([part.sizes for part in parts]).tolist() == [12, 12, 18]
    assert len(parts) == {1: 3, 6: 2, 100: 1}.get(size) or size == 6


@pytest.mark.parametrize("size", [1, 6, 100])
def test_rows_keep_the_eos_inside_them(size):
    parts = list(token_parts(documents(), EOS, BYTES_V, size, True))
    ids = np.concatenate([part.ids for part in parts])
    assert ids.tolist() == [1, 2, 3, EOS, 9 | INNER, 4, 9 | INNER, 9 | INNER, EOS, 5, 9 | INNER, EOS, 6, 7, EOS]
    assert targets_of_samples(ids, EOS).tolist() == [2, 3, 4, 9, 9, 9, 7]
    assert np.concatenate([part.sizes for part in parts]).tolist() == [5, 22, 9, 7]
    packed = list(pack_samples((part.ids for part in parts), EOS, 4))
    assert np.concatenate([ids for ids, _ in packed]).tolist() == [
        [1, 2, 3, 9, 9], [9, 4, 9, 9, 9], [5, 9, 9, 9, 9], [6, 7, 9, 9, 9],
    ]  # fmt: skip
    assert np.concatenate([labels for _, labels in packed]).tolist() == [
        [1, 2, 3, -100, -100], [9, 4, 9, 9, -100], [5, 9, -100, -100, -100], [6, 7, -100, -100, -100],
    ]  # fmt: skip
