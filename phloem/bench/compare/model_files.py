"""The model in the two forms that servers want: a bf16 folder and a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phloem.core.errors import ConfigError
from phloem.engine.models import resolve_model

__all__ = ["ModelFiles", "find_model"]

MakeFolder = Callable[[Path, Path], None]  # (GGUF file, folder to make)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """One checkpoint. `folder` is Hugging Face's form in bf16, `gguf` the quantised file."""

    folder: Path
    gguf: Path | None = None

    @property
    def label(self) -> str:
        return self.folder.name if self.gguf is None else self.gguf.name


def find_model(name: str, cache: Path, make_folder: MakeFolder) -> ModelFiles:
    """From what a user types to both forms.

    A GGUF file is dequantised once into a folder under `cache`, so that engines which cannot read
    its blocks hold the same weights. Raises ConfigError for a model that is not there.
    """
    model = resolve_model(name)
    if not model.is_gguf:
        return ModelFiles(folder=model.path.resolve())
    size = model.path.stat().st_size
    folder = cache / f"{model.path.stem}-{size}-bf16"
    if not (folder / "config.json").is_file():
        make_folder(model.path, folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model.path} could not be dequantised into {folder}")
    return ModelFiles(folder=folder, gguf=model.path)
