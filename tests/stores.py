"""Fixtures: an S3-compatible server for the whole session, and a fresh place in it for a test."""

import secrets

import pytest

from scripts.s3_server import s3_server

BUCKET = "windlass"
NEEDS = "needs s3fs and nanio (the dev extra)"


@pytest.fixture(scope="session")
def s3_session(tmp_path_factory):
    """(environment, the folder whose files are the bucket's objects)"""
    for package in ("s3fs", "nanio"):
        pytest.importorskip(package, reason=NEEDS)
    directory = tmp_path_factory.mktemp("s3")
    with s3_server(directory, bucket=BUCKET) as (environment, _):
        yield environment, directory / BUCKET


@pytest.fixture
def s3_place(s3_session, monkeypatch):
    """(URL, the folder whose files are its objects): empty, with credentials in the environment."""
    environment, directory = s3_session
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    prefix = secrets.token_hex(4)
    return f"s3://{BUCKET}/{prefix}", directory / prefix
