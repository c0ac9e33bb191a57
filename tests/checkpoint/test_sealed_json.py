import json

import pytest

from windlass.checkpoint import sealed_json as sealed
from windlass.checkpoint.sealed_json import check_file_name, digest, parse_strict, seal, unseal
from windlass.errors import BadCheckpoint

BODY = {"step": 3, "metric": 2.5, "name": "ä", "list": [1, None, {"a": True}]}


def test_a_sealed_body_comes_back_and_is_plain_json():
    data = seal(BODY)
    assert unseal(data, "x") == BODY
    assert json.loads(data)["hash"] == digest(
        seal(BODY).replace(b'"hash":"%s",' % json.loads(data)["hash"].encode(), b"")
    )


def test_every_single_bit_flip_is_refused_and_the_file_is_named():
    data = seal(BODY)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadCheckpoint, match="trainer_state"):
            unseal(bytes(flipped), "trainer_state.json")


def test_blanks_reordered_keys_and_a_missing_hash_are_refused():
    data = seal(BODY)
    for other in (data + b" ", data.replace(b",", b", ", 1), b" " + data, data.strip()):
        with pytest.raises(BadCheckpoint, match="x is not as it was written"):
            unseal(other, "x")
    for other in (b"{}\n", b'{"hash":null}\n'):
        with pytest.raises(BadCheckpoint, match="hash differs"):
            unseal(other, "x")


def test_a_file_whose_last_byte_is_cut_off_is_not_said_to_have_another_hash():
    data = seal(BODY)
    with pytest.raises(BadCheckpoint) as caught:
        unseal(data[:-1], "x")
    size = len(data)
    where = f"{size - 1} bytes, written with {size}; the first that differs is byte {size - 1}"
    assert caught.value.given == f"x is not as it was written: {where}"


def test_json_that_is_read_but_too_deep_to_be_written_again_is_refused():
    for depth in range(900, 1000):
        with pytest.raises(BadCheckpoint):
            unseal(b'{"x":' + b"[" * depth + b"]" * depth + b"}", "x")


@pytest.mark.parametrize(
    "text, why",
    [
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "Infinity is no JSON number"),
        ('{"a": 1e999}', "overflows"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        ('{"x": {"a": 1, "a": 1}}', "'a' occurs twice"),
        ("[1]", "holds a list"),
        ("[" * 100_000, "cannot be read"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"a": 1', "cannot be read"),
        ("", "cannot be read"),
        ("\xff", "holds a|cannot be read"),
    ],
)
def test_hostile_json_is_refused_with_the_reason(text, why):
    with pytest.raises(BadCheckpoint, match=f"index.json.*({why})"):
        parse_strict(text.encode("latin-1"), "index.json")


def test_a_huge_file_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(sealed, "MAX_SEALED_BYTES", 1 << 20)
    with pytest.raises(BadCheckpoint, match=r"MANIFEST has 1.1 MiB"):
        parse_strict(b" " * 1_150_000, "MANIFEST")


def test_not_a_number_cannot_be_sealed():
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal({"loss": float("nan")})


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "/etc/passwd",
        "a/../b",
        "a//b",
        "",
        ".",
        "..",
        ".hidden",
        "a/.git",
        "a\\b",
        "a\x00b",
        "a\n",
        "x" * 600,
        "a/",
        "-f",
    ],
)
def test_paths_that_could_leave_the_directory_are_refused(name):
    with pytest.raises(BadCheckpoint, match="MANIFEST names the file"):
        check_file_name(name, "MANIFEST")


@pytest.mark.parametrize(
    "name", ["rank-00000.bin", "tokenizer/tokenizer.json", "a.b-c_d+e=f@g", "special_tokens_map.json"]
)
def test_ordinary_names_pass(name):
    assert check_file_name(name, "MANIFEST") == name
