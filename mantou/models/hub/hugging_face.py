"""Models from the Hugging Face hub, into its own shared cache. Knows no converted folders and no registry.

Data files only are fetched (see `folders.MODEL_FILES`), so no code of a repo ever reaches the disk. Downloads go on
where they stopped; tokens, proxies and the offline switch are those of huggingface_hub (HF_TOKEN, HF_HUB_OFFLINE, ...).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from mantou.errors import DownloadError, ModelError, ModelNotFound
from mantou.models.hub.folders import MODEL_FILES, OTHER_FILES, POOLING_FILES, missing_file
from mantou.models.hub.store import disk_error
from mantou.progress import Task


def hub_cache_dir() -> Path:
    """Where huggingface_hub keeps its models (HF_HUB_CACHE, or `hub` below HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def download(repo_id: str, revision: str | None, task: Task, hub_dir: Path | None = None) -> Path:
    """The snapshot folder of a repo, fetched or completed. `hub_dir` None means the user's own cache.

    Raises ModelNotFound if there is no such repo or revision, ModelError if the repo holds no safetensors model,
    and DownloadError for everything that a token, a network or a disk can do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        XetDownloadError,
    )

    task.stage("download")
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=hub_dir,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=list(OTHER_FILES),
            library_name="mantou",
            tqdm_class=_reporting_bar(task),
        )
        if (Path(folder) / "modules.json").is_file():  # of the same commit, whatever the branch is by now
            snapshot_download(
                repo_id,
                revision=Path(folder).name,
                cache_dir=hub_dir,
                allow_patterns=list(POOLING_FILES),
                library_name="mantou",
                tqdm_class=_reporting_bar(task),
            )
    except HFValidationError as error:
        raise ModelNotFound(f"{repo_id!r} is not a repo id: {error}") from error
    except HfHubHTTPError as error:
        raise _refused(repo_id, revision, error) from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"The Hugging Face hub cannot be reached and {repo_id} is not on this machine; check the network, the "
            "proxy and HF_HUB_OFFLINE, or serve a local model (mantou ls)."
        ) from error
    except OSError as error:
        raise disk_error(hub_dir or hub_cache_dir(), error) from error
    except (_transport_error(), XetDownloadError) as error:
        raise DownloadError(
            f"The download of {repo_id} broke off ({error}); run the same command again, it goes on where it stopped."
        ) from error
    missing = missing_file(Path(folder))
    if missing is not None:
        raise ModelError(f"{repo_id} has no {missing}; choose a repo with MLX or safetensors weights.")
    return Path(folder)


def _transport_error() -> type[Exception]:
    """The base class of the HTTP library that huggingface_hub uses."""
    from huggingface_hub import errors

    return errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]  the library's name differs by hub version


def _refused(repo_id: str, revision: str | None, error: Any) -> DownloadError | ModelNotFound:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(f"{repo_id} has no revision {revision}; leave it out for the newest state.")
    if isinstance(error, GatedRepoError):
        return DownloadError(
            f"{repo_id} is gated: accept its terms on its page at the hub, then set HF_TOKEN or run `hf auth login`."
        )
    if status == 401 or isinstance(error, RepositoryNotFoundError):
        # The hub answers 401 for a repo that does not exist as well as for a private one.
        return ModelNotFound(
            f"There is no repo {repo_id}, or it is private; check the name, or set HF_TOKEN to one that may read it."
        )
    if status == 403:
        return DownloadError(
            f"Your token may not read {repo_id}; set HF_TOKEN to one with read access to it."
        )
    if status == 429:
        return DownloadError("The Hugging Face hub limits your requests; wait a few minutes or set HF_TOKEN.")
    return DownloadError(f"The Hugging Face hub answered {status} for {repo_id}; try again later.")


def _reporting_bar(task: Task) -> type[Any]:
    """A tqdm class that draws nothing and tells `task`.

    A snapshot has a bar of files and, by hub version, one or two bars of bytes (received, written): the bar that is
    further on is what the task shows.
    """
    from tqdm.std import tqdm

    lock = threading.Lock()
    told = 0

    class ReportingBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False})
            if self.unit != "B":
                task.file(None, files=self.total)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal told
            done = super().update(n)
            if self.unit != "B":
                task.file(None, finished=int(n or 0))
                return done
            with lock:
                news, told = max(0, int(self.n) - told), max(told, int(self.n))
            task.advance(news, total_bytes=int(self.total) if self.total else None)
            return done

        def display(self, *args: Any, **kwargs: Any) -> None:
            return None

        def close(self) -> None:
            self.disable = True

    return ReportingBar
