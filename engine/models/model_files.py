"""Finds a model by name: an included model, a local folder, or a repository on the Hugging Face Hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from saccade.engine.errors import ModelFilesError, UnknownModelError

_HERE = Path(__file__).parent
_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_SYNONYMS = "synonyms.json"
_HUB_FILES = [_CONFIG, "model*.safetensors", _WEIGHTS[1], "tokenizer.json", _SYNONYMS, "moondream.py"]


@dataclass(slots=True, frozen=True)
class ModelEntry:
    """An included model: its name, its folder and a one-line description."""

    name: str
    folder: Path
    about: str


EMBEDDED = (
    ModelEntry(
        "nano", _HERE / "nano", "3 M parameters, 31 classes, boxes and points; runs on a CPU, needs no download"
    ),
)


def find(name: str) -> Path:
    """Return the folder of a model.

    `name` is the name of an included model, a folder path, or a Hugging Face Hub ID such as `owner/model`. A model on
    the Hub is downloaded on first use into the cache of the Hugging Face client. `owner/model@revision` selects a
    branch, tag or commit.

    Raises:
        UnknownModelError: if the model does not exist.
    """
    for entry in EMBEDDED:
        if name == entry.name:
            return entry.folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / _CONFIG).is_file():
            raise UnknownModelError(f"{folder} is not a model folder: it has no {_CONFIG}")
        if not any((folder / file).is_file() for file in _WEIGHTS):
            raise UnknownModelError(f"{folder} is not a model folder: it has no {_WEIGHTS[0]}")
        return folder

    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name)
    names = ", ".join(entry.name for entry in EMBEDDED)
    raise UnknownModelError(
        f"unknown model '{name}': use one of {names}, a model folder, or a Hugging Face Hub ID such as owner/model"
    )


def find_refiner(name: str) -> Path:
    """Return the path of a mask refiner, a network that refines segmentation masks.

    `name` is a path, or a Hugging Face Hub ID such as `moondream/SegHeadRefiner`. A file on the Hub is downloaded on
    first use.

    Raises:
        UnknownModelError: if the file or repository does not exist.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return fetch_file(name, "model.pt")
    raise UnknownModelError(f"unknown refiner '{name}': use a file or a Hugging Face Hub ID (owner/name)")


def read_synonyms(folder: Path) -> dict[str, list[str]]:
    """Return the synonyms of a model: a dictionary from a phrase to the classes that it stands for.

    The result is empty if the folder has no synonyms.json.

    Raises:
        ModelFilesError: if the file is invalid.
    """
    path = folder / _SYNONYMS
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(phrase): [str(name) for name in names] for phrase, names in values.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelFilesError(
            f"{path}: expected a JSON object that maps phrases to lists of class names ({error})"
        ) from error


def read_names(name: str) -> tuple[list[str], dict[str, list[str]]] | None:
    """Return the classes and synonyms of a model without loading its weights.

    Return None if the model has an open vocabulary or is not installed.

    Raises:
        ModelFilesError: if a file of the model is invalid.
    """
    folder = next((entry.folder for entry in EMBEDDED if entry.name == name), Path(name).expanduser())
    path = folder / _CONFIG
    if not path.is_file():
        return None
    try:
        classes = json.loads(path.read_text(encoding="utf-8")).get("classes")
        return None if classes is None else ([str(name) for name in classes], read_synonyms(folder))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{path}: {error}") from error


def weights_bytes(folder: Path) -> int:
    """Return the total size of the weight files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


def fetch_file(repository: str, name: str) -> Path:
    """Return the local path of a file in a Hugging Face Hub repository. The file is downloaded on first use.

    Raises:
        UnknownModelError: if the hub cannot be reached or the file does not exist.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name))
    except Exception as error:  # see `_download`
        raise UnknownModelError(f"cannot download {repository}/{name} from Hugging Face ({_reason(error)})") from error


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises many types of errors
        message = f"'{name}' is not a folder, and cannot be downloaded from the Hugging Face Hub ({_reason(error)})"
        raise UnknownModelError(message) from error


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
