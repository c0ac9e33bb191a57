"""What can be said of the first epoch, and what is refused because it would do nothing."""

import pytest
from pydantic import ValidationError

from tests.data.conftest import data_config
from windlass.data.prepare.manifest import settings_of
from windlass.data.stream.config import OrderConfig


def refused(tmp_path, **settings):
    with pytest.raises(ValidationError) as caught:
        data_config(tmp_path, **settings)
    return str(caught.value)


def test_what_needs_written_order_is_refused_without_it():
    for setting in ({"held_out_of": 10}, {"deadline_s": 10.0}):
        with pytest.raises(ValidationError, match=f"{next(iter(setting))}: 10` is for training that begins before"):
            OrderConfig.model_validate(setting)
        OrderConfig.model_validate({**setting, "first_epoch": "written"})
    assert OrderConfig.model_validate(OrderConfig().model_dump()) == OrderConfig()


def test_settings_of_the_source_and_of_the_order_fit_together(tmp_path):
    written = {"first_epoch": "written"}
    own = {"path": "v.txt"}
    found = refused(tmp_path, validation=own, order={**written, "held_out_of": 10})
    assert "`order.held_out_of: 10` has no effect with a `validation` of its own" in found
    growing = [{"path": "some", "grows_until": "_SUCCESS"}]
    assert "`grows_until` of some has no effect on `order.first_epoch: shuffled`" in refused(tmp_path, sources=growing)
    for path in ("s3://bucket/some", "some/*.txt", ["a", "b"]):
        found = refused(tmp_path, sources=[{"path": path, "grows_until": "_SUCCESS"}], order=written)
        assert "`grows_until` is for `path`, one local directory" in found
    found = refused(tmp_path, sources=[{"path": "some", "grows_until": "a/b"}], order=written)
    assert "`grows_until: a/b` is no file's name" in found


def test_training_may_begin_before_all_is_prepared_in_a_local_directory_without_a_mixture(tmp_path):
    written = {"first_epoch": "written"}
    assert not data_config(tmp_path).may_grow and data_config(tmp_path, order=written).may_grow
    cache = {"directory": str(tmp_path / "cache"), "limit_mib": 10}
    assert not data_config(tmp_path, order=written, directory="s3://bucket/data", cache=cache).may_grow
    mixed = [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]
    assert not data_config(tmp_path, order=written, sources=mixed).may_grow


def test_the_order_decides_nothing_of_what_lies_on_disk_but_what_is_held_out(tmp_path):
    written = {"first_epoch": "written", "deadline_s": 7.0}
    plain, in_order = settings_of(data_config(tmp_path), {}), settings_of(data_config(tmp_path, order=written), {})
    held_out = settings_of(data_config(tmp_path, order={**written, "held_out_of": 9}), {})
    assert plain == in_order and held_out == {**plain, "held_out_of": 9}
    assert plain["sources"][0]["grows_until"] is None
