"""`windlass doctor`: one finding per planted fault, none on a good machine, and a page that lists them all."""

import json
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE
from typer.testing import CliRunner

from tests.doctor.test_gpus import one_host
from windlass.cli.main import app
from windlass.commands import doctor as command
from windlass.commands.doctor import doctor, seen
from windlass.data.tokenize.tokenizer import open_tokenizer, save_trained, train_tokenizer, vocab_size_of
from windlass.doctor.diagnosis import Diagnosis
from windlass.doctor.host import HostLimits
from windlass.errors import EXIT_USER_ERROR
from windlass.supervise.kernel_log import DriverFault
from windlass.units import GIB

ROOT = Path(__file__).parent.parent.parent
RECIPE = {
    "run": {"directory": "run", "steps": 4, "tokens_per_step": 64},
    "model": {"family": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "head_dim": 8,
              "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "vocab_size": 300},
    "data": {"sources": [{"path": "texts.jsonl"}], "tokenizer": {"train": 300}, "directory": "data", "sequence_length": 32},
}  # fmt: skip


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A good machine: a directory for a root, 64 GiB of shared memory, nothing in the environment."""
    limits = HostLimits(shared=64 * GIB, files=1 << 20, locked=-1, processes=-1)
    monkeypatch.setattr(command, "read_limits", lambda: limits)
    monkeypatch.setattr(command, "read_load", lambda: 0.0)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*arguments, **settings):
    return [found.name for found in doctor(*arguments, **settings)]


def write(folder, **changes):
    recipe = {**RECIPE, **changes}
    (file := folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(file)


def test_nothing_is_wrong_with_a_good_machine_and_a_good_recipe(machine):
    assert names(None, root=machine) == []
    assert names(write(machine), ranks=2, root=machine) == []
    assert sorted(path.name for path in machine.iterdir()) == ["recipe.yaml"], "it leaves nothing behind"


def test_busy_cores_are_a_finding(machine, monkeypatch):
    monkeypatch.setattr(command, "read_load", lambda: 2.5)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert names(None, root=machine) == ["busy-cores"]


def test_the_network_is_looked_at_where_hosts_meet(machine, monkeypatch):
    monkeypatch.setattr(command, "addresses_of", lambda _name: ["127.0.1.1"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = names(None, endpoint=f"127.0.0.1:{server.getsockname()[1]}", root=machine)
    assert "name-is-loopback" in found and "endpoint-unreachable" not in found
    assert command.addresses_of("x") and names(None, root=machine) == []


def test_mistakes_of_a_recipe_are_findings_one_by_one(machine):
    all_three = write(machine, optim={"lerning_rate": 1}, parallel={"tp": 3, "zero": 7})
    assert names(all_three, root=machine) == ["recipe"] * 3, "a key, a value, and a layout that the model cannot have"
    assert names(write(machine, parallel={"tp": 3}), root=machine) == ["recipe"]
    assert names(write(machine, parallel={"context": 2}), ranks=2, root=machine) == []
    assert names(write(machine, parallel={"context": 2}), ranks=3, root=machine) == ["recipe"]
    assert names(str(machine / "absent.yaml"), root=machine) == ["recipe"]


def test_a_tokenizer_without_an_end_or_larger_than_the_model_is_a_finding(machine):
    (folder := machine / "tokenizer").mkdir()
    Tokenizer(BPE({chr(97 + i): i for i in range(26)}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    data = {**RECIPE["data"], "tokenizer": {"from": str(folder)}}
    (found,) = doctor(write(machine, data=data), root=machine)
    assert found.name == "recipe" and "end" in found.rule + found.found
    save_trained(train_tokenizer(["wind rope anchor"], 300), machine / "trained")
    data["tokenizer"] = {"from": str(machine / "trained")}
    entries = vocab_size_of(open_tokenizer(machine / "trained")[0])
    assert names(write(machine, data=data, model={**RECIPE["model"], "vocab_size": entries}), root=machine) == []
    (found,) = doctor(write(machine, data=data, model={**RECIPE["model"], "vocab_size": entries - 1}), root=machine)
    assert found.name == "recipe" and f"{entries}" in found.found


def test_the_run_directory_is_probed(machine, monkeypatch):
    real = command.probe
    monkeypatch.setattr(
        command, "probe", lambda path: real(path, 1 << 20)._replace(free=0, bytes_per_s=1.0, has_locks=False)
    )
    assert names(write(machine), root=machine) == ["disk-full-soon", "disk-slow", "no-locks"]

    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(command, "probe", refuse)
    assert names(write(machine), root=machine) == ["directory-closed"]


def test_where_data_and_copies_of_checkpoints_go_is_tried(machine, monkeypatch):
    monkeypatch.setattr(command, "STORE_S", 0.5)  # the whole of what is tried again

    def said(**changes):
        return [(one.name, one.found) for one in doctor(write(machine, **changes), root=machine)]

    data, remote = RECIPE["data"], {"remote": f"file://{machine}/copies"}
    afar = {**data, "cache": {"directory": "cache"}}
    assert said(checkpoint=remote, data={**afar, "directory": f"file://{machine}/shards"}) == []
    assert [path.name for path in machine.glob("*/*")] == [], "the probes are gone"
    (machine / "a-file").write_text("")
    ((name, found),) = said(data={**data, "directory": str(machine / "a-file/data")})
    assert name == "place-closed" and found.startswith(f"data.directory: {machine}/a-file/data cannot be made")
    for key, changes in {
        "checkpoint.remote": {"checkpoint": {"remote": f"file://{machine}/a-file/copies"}},
        "data.directory": {"data": {**afar, "directory": f"file://{machine}/a-file/data"}},
    }.items():
        ((name, found),) = said(**changes)
        assert name == "place-closed" and found.startswith(f"{key}: file://{machine}/a-file/")
    ((name, found),) = said(data={**afar, "directory": "http://127.0.0.1:9/data"})
    assert (name, found.split(" ")[0]) == ("place-closed", "data.directory:")
    (machine / "a-file").unlink()
    (place := machine / "a-file/data").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    ((name, found),) = said(data={**data, "directory": str(place)})
    assert name == "place-closed" and "cannot be written" in found
    (place / "prepared.json").write_text("{}")
    assert said(data={**data, "directory": str(place)}) == [], "prepared data may be read only"


def test_a_host_with_a_gpu(machine, monkeypatch):
    (machine / "dev").mkdir()
    (machine / "dev/nvidiactl").touch()
    monkeypatch.setattr(command, "_cuda_of_torch", lambda: "14.0")
    monkeypatch.setattr(command, "read_faults", lambda: [DriverFault(1.0, "Xid", "0000:03:00", 79, "")])
    answers = one_host(nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=4_194_305)])
    monkeypatch.setitem(sys.modules, "pynvml", answers)
    assert names(None, root=machine) == ["driver-too-old", "gpu-in-use", "driver-fault"]

    def silent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    answers.nvmlInit = silent
    monkeypatch.setattr(command, "read_faults", lambda: None)
    assert names(None, root=machine) == ["driver-silent"]


def test_the_first_line_is_what_this_machine_has(machine, monkeypatch):
    import torch

    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(command, "_cuda_of_torch", lambda: None)
    assert seen(machine) == f"seen: no NVIDIA GPU; torch {torch.__version__}, built without CUDA; 2 cores"
    (machine / "dev").mkdir()
    (machine / "dev/nvidiactl").touch()
    monkeypatch.setattr(command, "_cuda_of_torch", lambda: "12.8")
    found = [SimpleNamespace(name="NVIDIA H200")] * 2
    monkeypatch.setattr(command, "_ask_driver", lambda: (None, found, []))
    assert seen(machine) == f"seen: 2 x NVIDIA H200; torch {torch.__version__}, built for CUDA 12.8; 2 cores"


def test_the_page_lists_every_finding_of_the_code():
    page = (ROOT / "docs/howto/doctor.md").read_text()
    listed = {
        name
        for row in page.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])
    }
    sources = [*(ROOT / "src/windlass/doctor").glob("*.py"), Path(command.__file__)]
    made = {name for file in sources for name in re.findall(r'Diagnosis\(\s*"([a-z0-9-]+)"', file.read_text())}
    assert listed == made and len(made) >= 24


def test_a_finding_is_readable_and_json(machine):
    (found,) = doctor(str(machine / "absent.yaml"), root=machine)
    assert re.fullmatch(r"recipe: .+\n  rule: .+\n  fix:  .+", found.text())
    assert list(json.loads(json.dumps(found._asdict()))) == ["name", "found", "rule", "fix"]


def test_the_command_prints_findings_and_ends_with_2_or_says_that_there_are_none(monkeypatch):
    found = [Diagnosis("no-locks", "/runs: flock fails", "a rule", "a fix")]
    monkeypatch.setattr(command, "doctor", lambda *_arguments: iter(found))
    monkeypatch.setattr(command, "seen", lambda: "seen: a machine")
    run = CliRunner()
    bad, as_json = run.invoke(app, ["doctor"]), run.invoke(app, ["doctor", "--json"])
    assert bad.exit_code == as_json.exit_code == EXIT_USER_ERROR
    assert bad.output == "seen: a machine\nno-locks: /runs: flock fails\n  rule: a rule\n  fix:  a fix\n"
    assert json.loads(as_json.output) == {
        "name": "no-locks",
        "found": "/runs: flock fails",
        "rule": "a rule",
        "fix": "a fix",
    }
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run.invoke(app, ["doctor"]).output == "", "one process of a host speaks"
    monkeypatch.setenv("LOCAL_RANK", "0")
    found.clear()
    good = run.invoke(app, ["doctor"])
    assert (good.exit_code, good.output) == (0, "seen: a machine\nnothing wrong was found\n")
