import json
import subprocess

import pytest

from windlass.checkpoint import provenance
from windlass.checkpoint.provenance import collect_provenance, git_state, redact


@pytest.fixture
def repository(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=e@x")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    git("init", "-q", "-b", "work")
    git("remote", "add", "origin", "https://user:hunter2@example.org/x.git")
    (tmp_path / "model.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-qm", "one")
    return tmp_path


def test_commit_branch_diff_and_untracked_names_of_the_users_code(repository):
    (repository / "model.py").write_text("x = 2\n")
    (repository / "notes ä.txt").write_text("not in git")
    found = git_state(repository)
    assert len(found["commit"]) == 40 and found["branch"] == "work"
    assert "-x = 1\n+x = 2\n" in found["diff"] and not found["diff_is_cut"]
    assert found["untracked"] == ["notes ä.txt"] and found["num_untracked"] == 1


def test_a_large_diff_is_cut_and_says_so(repository, monkeypatch):
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 1000)
    (repository / "model.py").write_text("ä" * 5000)
    found = git_state(repository)
    assert len(found["diff"].encode()) <= 1000 and found["diff_is_cut"]


def test_no_repository_and_no_git_are_no_error(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    monkeypatch.setattr(provenance, "GIT", ("no-such-program-here",))
    assert git_state(tmp_path) is None


def test_a_repository_cannot_make_us_run_its_programs(repository):
    """Settings of a repository can name programs that git starts; none of them must run."""
    trap = repository / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    trap.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.x.textconv"):
        subprocess.run(["git", "-C", str(repository), "config", key, str(trap)], check=True)
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "model.py").write_text("x = 3\n")
    assert "+x = 3" in git_state(repository)["diff"]
    assert not (repository / "ran").exists()


def test_no_secret_is_written(repository, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter3")
    argv = ["train", "r.yaml", "hub.token=hunter4", "--api-key", "hunter5", "--password=hunter6", "run.seed=3"]
    text = json.dumps(collect_provenance(argv, ["node-0", "node-1"], repository))
    assert "hunter" not in text and "run.seed=3" in text and '"hosts": ["node-0", "node-1"]' in text


def test_no_secret_of_a_url_is_written_of_the_arguments_or_the_diff(repository):
    (repository / "model.py").write_text("URL = 'https://me:hunter7@host/x?sig=hunter8'\n")
    found = collect_provenance(["train", "data.sources=[{path: https://h/x?sig=hunter9}]"], [], repository)
    assert found["argv"] == ["train", "data.sources=[{path: https://h/x?***}]"]
    assert "+URL = 'https://***@host/x?***'" in found["git"]["diff"] and "hunter" not in json.dumps(found)


def test_only_the_values_of_secret_arguments_are_hidden():
    argv = [
        "train",
        "--token",
        "abc",
        "--tokens",
        "--steps",
        "5",
        "run.tokens_per_step=1024",
        "data.tokenizer.train=4096",
    ]
    assert redact(argv)[:3] == ["train", "--token", "[hidden]"]
    assert redact(argv)[3:] == argv[3:]


def test_python_platform_and_packages_are_there():
    found = collect_provenance([], [])
    assert "torch" in found["packages"] and found["python"] and found["platform"]


def test_a_rank_whose_record_is_not_written_reads_nothing(monkeypatch):
    monkeypatch.setattr(provenance, "packages", None)
    assert collect_provenance([], [], is_written=False) == {}
