"""What every room's config stands on."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from windlass.settings import Settings


class Example(Settings):
    number: int = 1
    share: Annotated[float, Field(gt=0)] | None = None
    """a docstring"""
    word: str | list[str] = ""
    zero: Literal[0, 1] = 0
    flag: bool = False
    maybe: bool | None = None
    other: int = Field(3, alias="async")


@pytest.mark.parametrize("key", ["number", "share", "word", "zero", "async"])
def test_true_is_no_number(key):
    with pytest.raises(ValidationError, match="True is neither"):
        Example.model_validate({key: True})


def test_flags_are_flags():
    assert Example(flag=True, maybe=False) == Example.model_validate({"flag": True, "maybe": False})


def test_frozen_strict_about_keys_finite_and_documented():
    with pytest.raises(ValidationError, match="frozen"):
        Example().number = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        Example.model_validate({"nmber": 3})
    with pytest.raises(ValidationError, match="finite"):
        Example(share=float("inf"))
    assert Example.model_fields["share"].description == "a docstring"
    assert Example(other=4).other == Example.model_validate({"async": 4}).other == 4


def test_a_changed_copy_is_validated_and_the_first_stays():
    first = Example(number=2, other=5)
    assert first.changed(number=7) == Example(number=7, other=5) and first.number == 2
    with pytest.raises(ValidationError, match="number"):
        first.changed(number="many")
    with pytest.raises(ValidationError, match="numbr"):
        first.changed(numbr=1)
