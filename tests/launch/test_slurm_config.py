"""What a site's jobs may ask for, and what a batch script could not hold."""

import pytest
from pydantic import ValidationError

from windlass.errors import UserError
from windlass.launch.slurm_config import SlurmConfig, seconds


@pytest.mark.parametrize(
    ("time", "means"),
    [("90", 5400), ("1:30", 90), ("4:00:05", 14405), ("1-12", 129600), ("1-02:30", 95400), ("2-00:00:07", 172807)],
)
def test_slurms_times(time, means):
    assert seconds(time) == means and SlurmConfig(time=time, grace_s=1).time == time


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"time": "5", "grace_s": 300}, "launch.slurm.time=5 with launch.slurm.grace_s=300"),
        ({"setup": ["module load a\nrm b"]}, "one line of a script"),
        ({"partition": "a\n#SBATCH --nodes=9"}, "one line of a script"),
        ({"options": ["-p cpu"]}, "`-p cpu` among the options"),
        ({"prepare_options": ["cpu"]}, "`cpu` among the options"),
        ({"options": ["--signal=TERM@5"]}, "the script sets --signal itself"),
        *(
            ({"prepare_options": [f"--{option}"]}, f"launch.slurm.prepare_options: `--{option}`")
            for option in ("array=0-3", "output=/dev/null", "nodes=4", "dependency=afterany:7")
        ),
        ({"environment": {"A B": "c"}}, "launch.slurm.environment: `A B`"),
    ],
)
def test_what_a_script_could_not_hold(wrong, says):
    with pytest.raises(UserError) as caught:
        SlurmConfig(**wrong)
    assert says in str(caught.value)


@pytest.mark.parametrize("time", [3600, "an hour", "1:2:3:4"])
def test_a_time_is_in_quotes(time):
    with pytest.raises(ValidationError) as caught:
        SlurmConfig(time=time)
    assert (
        f'time={time}: this is not a time limit in quotes, and YAML reads 1:00:00 as 3600; write time: "1:00:00" in a recipe, '
        "and 'time=\"1:00:00\"' on a command line"
    ) in str(caught.value)
