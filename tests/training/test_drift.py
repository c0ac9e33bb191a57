"""Which stream a resumed run must find again. (Settings and length: tests/test_config.py, tests/training/test_restore.py.)"""

from tests import tiny
from windlass.training.drift import begun, newest_trainer_state, stream_to_keep


def test_the_stream_is_kept_unless_drift_of_the_data_is_accepted(tmp_path):
    trainer_state = {"data": {"stream": "abc"}}
    assert stream_to_keep(trainer_state, tiny.recipe(tmp_path)) == "abc"
    assert stream_to_keep(trainer_state, tiny.recipe(tmp_path, run={"accept_drift": ["data"]})) is None
    other = tiny.recipe(tmp_path, run={"accept_drift": ["data.shuffle_window"]})
    assert stream_to_keep(trainer_state, other) == "abc", "one setting of the data is not the data"


def test_a_new_run_has_begun_nothing_and_a_finished_one_its_last_step(tmp_path, run):
    assert begun(tiny.recipe(tmp_path)) is None
    assert begun(tiny.recipe(tmp_path, run={"directory": str(run)}))["step"] == tiny.STEPS
    assert begun(tiny.recipe(tmp_path, run={"start_from": str(run)})) is None, "weights alone begin anew"
    assert newest_trainer_state(run)["samples_consumed"] == 8 * tiny.STEPS
