"""An exported directory as a repository of the hub: made where there is none, and one commit on its main branch.

A commit is the whole of what is pushed: the files of the directory are uploaded first, and the repository changes only with the
commit at the end, so a push that dies leaves it as it was. The commit takes away weights and configs that the directory has not:
a model in another number of files, or an adapter that is now a whole model, would else be read as a mixture of both.

The token is huggingface_hub's: HF_TOKEN, or `hf auth login`. It is in no message.
"""

from pathlib import Path
from typing import Final

from windlass.errors import UserError
from windlass.hub.config import NAME
from windlass.hub.errors import not_pushed

REPLACED: Final = ["*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json"]


def check_push(name: str) -> None:
    """Raises UserError for a name that the hub does not take, and without a token: before a long export, for nothing is asked."""
    from huggingface_hub import constants, get_token

    if not NAME.fullmatch(name):
        raise UserError(
            f"--push {name}", "a hub name is `org/name`, as in the address of its page", "give owner and name"
        )
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push {name} with HF_HUB_OFFLINE", "a push needs the hub", "unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise UserError(
            f"--push {name} without a token",
            "the hub identifies an account that may write by its token",
            "set HF_TOKEN to a token that may write, or run `hf auth login`",
        )


def push(directory: Path, name: str, message: str, *, private: bool = False, files: list[str] | None = None) -> str:
    """Uploads all files of `directory`, or `files` alone -> the address of the commit. `private`: a repository that is made now
    is, and one that is there must be. Raises UserError, Unavailable where the hub does not answer."""
    from httpx2 import TransportError
    from huggingface_hub import HfApi

    check_push(name)
    hub = HfApi(library_name="windlass")
    try:
        hub.create_repo(name, private=private or None, exist_ok=True)
        if private and not hub.model_info(name).private:
            raise UserError(
                f"--private with {name}, which is public",
                "everybody can read what is pushed there",
                "make it private on its page, or push to another name",
            )
        done = hub.upload_folder(
            repo_id=name, folder_path=directory, commit_message=message, allow_patterns=files, delete_patterns=REPLACED
        )
    except (TransportError, OSError, ValueError, RuntimeError) as error:
        raise not_pushed(error, name, directory) from None
    return str(done.commit_url)
