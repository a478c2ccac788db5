"""The Hugging Face Hub: a run's final model with its card, put into a repository of yours.

rollkeel train RECIPE --push-to-hub me/mine
rollkeel push RUN me/mine
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from rollkeel.errors import BadInput, RollkeelError, RunStopped
from rollkeel.record.runfolder import RunFolder
from rollkeel.report.card import write_card


def reached(repo: str) -> str:
    """`OWNER/NAME` of a repository that this machine's token may write; asked before a run, so that it does not train in vain.

    A name without an owner is yours. Raises `BadInput` for a name that cannot be, without a token, for a token that only reads, and for an owner
    that is neither you nor an organisation of yours; `RunStopped` where the Hub does not answer.
    """
    with _one_line(repo, ""):
        validate_repo_id(repo)
        who = _api().whoami()
    me, mine = who["name"], [each["name"] for each in who.get("orgs", [])]
    owner, _, name = repo.rpartition("/")
    if owner not in ("", me, *mine):
        orgs = f", nor an organisation of yours ({', '.join(mine)})" if mine else ""
        raise BadInput(f"push {repo}: {owner} is not you ({me}){orgs}; name a repository of your own: {me}/{name}")
    if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise BadInput(
            f"push {repo}: the token of {me} may only read; make one that may write, and give it as HF_TOKEN"
        )
    return f"{owner or me}/{name}"


def push(run: str | Path, repo: str, *, public: bool = False) -> str:
    """Upload `RUN/model` with its card, in one commit, and return its address. A new repository is private unless `public`.

    Other files of an old repository stay. Raises as `reached` does; what was trained stays where it is.
    """
    folder = RunFolder.open(run, lock=False)
    if not (folder.model / "config.json").is_file() and not (folder.model / "adapter_config.json").is_file():
        raise BadInput(f"push {run}: {folder.model} holds no model; finish the run with: rollkeel train --resume {run}")
    write_card(folder)
    if not sys.stderr.isatty():
        disable_progress_bars()
    repo = reached(repo)
    with _one_line(repo, f"; the model is whole in {folder.model}, push it again with: rollkeel push {run} {repo}"):
        api = _api()
        api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder.model, commit_message=f"Model of {folder.path.resolve().name}"
        )
    return f"{api.endpoint}/{repo}"


def _api() -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


@contextlib.contextmanager
def _one_line(repo: str, kept: str) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise BadInput(f"push {repo}: not a name of a repository: {_first(error)}") from None
    except LocalTokenNotFoundError:
        raise BadInput(f"push {repo}: no token; log in with `hf auth login`, or set HF_TOKEN{kept}") from None
    except OfflineModeIsEnabled:
        raise BadInput(f"push {repo}: HF_HUB_OFFLINE is set; unset it{kept}") from None
    except HfHubHTTPError as error:
        why = (
            f"push {repo}: the Hub answered {error.response.status_code}: {error.server_message or _first(error)}{kept}"
        )
        raise (BadInput if error.response.status_code in (400, 401, 403, 404) else RunStopped)(why) from None
    except RollkeelError:
        raise
    except Exception as error:  # of the network, of its client, of the disk
        raise RunStopped(
            f"push {repo}: {_api().endpoint} cannot be reached: {_first(error) or type(error).__name__}{kept}"
        ) from None


def _first(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
