"""An export on its way to a hub on this machine: what arrives, in which order, and what every refusal says."""

import errno
import shutil

import pytest

from tests.loopback import hub as hub  # a fixture
from windlass.commands.models import export as room
from windlass.errors import Unavailable, UserError
from windlass.hub.push import push

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own call
NAME = "org/tuned"
FILES = {
    "README.md": b"---\nlibrary_name: peft\n---\n# tuned\n",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"w" * 3000,
}


@pytest.fixture
def exported(tmp_path, hub, monkeypatch):
    directory = tmp_path / "export"
    directory.mkdir()
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return directory


def held(hub, name=NAME):
    repository = hub.repositories[name]
    return repository.commits[repository.revisions["main"]]


def refused(hub, *args, **more):
    with pytest.raises(UserError) as caught:
        push(*args, **more)
    assert hub.token not in str(caught.value) and "hf_" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("private", [False, True])
def test_a_push_makes_the_repository_and_one_commit_at_its_end(hub, exported, private):
    address = push(exported, NAME, "step 5", private=private)
    assert held(hub) == FILES and hub.repositories[NAME].private == private
    assert address == f"{hub.endpoint}/{NAME}/commit/{hub.repositories[NAME].revisions['main']}"
    asked = [
        answer.path.rpartition("/")[0].split("/")[-1] for answer in hub.answers if answer.method in ("POST", "PUT")
    ]
    assert asked[0] == "repos" and asked[-2:] == ["upload", "commit"], "large files before the commit"


def test_a_second_push_leaves_no_weights_of_the_first_and_keeps_other_files(hub, exported):
    stale = {"model-00001-of-00002.safetensors": b"s", "model.safetensors.index.json": b"{}", "config.json": b"{}"}
    hub.add(NAME, {**stale, "LICENSE": b"free"})
    push(exported, NAME, "step 6")
    assert held(hub) == {**FILES, "LICENSE": b"free"}
    number = len(hub.repositories[NAME].commits)
    assert number == 2, "one commit"


def test_files_that_a_user_put_into_the_default_place_are_not_pushed(hub, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "export").mkdir(exist_ok=True)
    (copied / "export" / "notes.txt").write_text("private")
    done = room.export(copied, push=NAME)
    assert done.kept == ("notes.txt",)
    assert {*held(hub), "notes.txt"} == {path.name for path in done.directory.iterdir()} != set(held(hub))


def test_private_is_not_said_of_a_public_repository(hub, exported):
    hub.add(NAME, {"config.json": b"{}"})
    error = refused(hub, exported, NAME, "x", private=True)
    assert "which is public" in error.given and held(hub) == {"config.json": b"{}"}


@pytest.mark.parametrize(
    ("token", "status"), [("hf_invalid", 401), ("hf_reader", 403)], ids=["no account", "an account that may not write"]
)
def test_a_token_that_may_not_write_is_named(hub, exported, monkeypatch, token, status):
    monkeypatch.setenv("HF_TOKEN", token)
    error = refused(hub, exported, NAME, "x")
    assert f"does not let this token write ({status})" in error.given and error.code == 2
    assert f"hf upload {NAME} {exported}" in error.change and NAME not in hub.repositories


@pytest.mark.parametrize("at", ["/preupload/", "/info/lfs/", "/commit/"])
@pytest.mark.parametrize(
    ("status", "said", "code"),
    [(403, "does not let this token write (403)", 2), (409, "a conflict (409)", 2), (500, "it answered 500", 74)],
)
def test_a_push_that_is_refused_half_way_changes_nothing(hub, exported, at, status, said, code):
    hub.add(NAME, {"config.json": b"old"})
    hub.refused_writes[at] = status
    error = refused(hub, exported, NAME, "x")
    assert said in error.given and error.code == code and error.retry == (code == 74)
    assert held(hub) == {"config.json": b"old"}


def test_a_store_that_takes_no_large_file_is_named(hub, exported):
    hub.refused_uploads = True
    error = refused(hub, exported, NAME, "x")
    assert isinstance(error, Unavailable) and "it answered 507" in error.given and held(hub) == {}


def test_a_hub_that_is_away_is_an_outage(hub, exported):
    hub.stop()
    error = refused(hub, exported, NAME, "x")
    assert isinstance(error, Unavailable) and "does not take it" in error.given and "hf upload" in error.change


def test_a_file_that_cannot_be_read_is_named(hub, exported, monkeypatch):
    file = str(exported / "README.md")

    def fails(_path):
        raise OSError(errno.EIO, "Input/output error", file)

    monkeypatch.setattr("huggingface_hub.lfs.getsize", fails)
    error = refused(hub, exported, NAME, "x")
    assert f"{file}: Input/output error" in error.given and error.code == 2 and held(hub) == {}


def test_what_can_be_refused_is_refused_before_anything_is_asked(hub, exported, monkeypatch):
    assert "a hub name is `org/name`" in refused(hub, exported, "tuned", "x").rule
    monkeypatch.delenv("HF_TOKEN")
    assert "without a token" in refused(hub, exported, NAME, "x").given
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in refused(hub, exported, NAME, "x").change
    assert hub.answers == []


def test_an_export_is_pushed_once_it_has_compared_equal(hub, run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="without a token"):
        room.export(run, tmp_path / "a", push=NAME)
    with pytest.raises(UserError, match="--private without --push"):
        room.export(run, tmp_path / "a", private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(room, "LOGIT_TOLERANCE", -1.0)
    with pytest.raises(UserError, match="nothing was exported"):
        room.export(run, tmp_path / "a", push=NAME)
    assert hub.answers == [] and not (tmp_path / "a").exists()
    monkeypatch.setattr(room, "LOGIT_TOLERANCE", 1e-5)
    done = room.export(run, tmp_path / "a", push=NAME)
    assert held(hub) == {path.name: path.read_bytes() for path in done.directory.iterdir()}
    assert done.pushed.startswith(f"{hub.endpoint}/{NAME}/commit/")
