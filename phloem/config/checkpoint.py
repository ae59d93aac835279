"""Which kind of checkpoint a path is, and its ModelConfig."""

from __future__ import annotations

import enum
from pathlib import Path

from phloem.config.gguf import four_bit_type, model_config_from_gguf, read_gguf
from phloem.config.hf import read_hf_config
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError

__all__ = ["CheckpointKind", "checkpoint_kind", "four_bit_blocks", "read_model_config"]


class CheckpointKind(enum.Enum):
    """The two formats that load."""

    HF = "hf"  # a folder with config.json and *.safetensors
    GGUF = "gguf"  # one file


def checkpoint_kind(path: Path) -> CheckpointKind:
    """HF for a folder, GGUF for a `.gguf` file; ConfigError for anything else."""
    if path.is_dir():
        return CheckpointKind.HF
    if path.is_file() and path.suffix.lower() == ".gguf":
        return CheckpointKind.GGUF
    if path.exists():
        raise ConfigError(f"{path} is neither a Hugging Face folder nor a .gguf file")
    raise ConfigError(f"no model at {path}: give a Hugging Face folder or a .gguf file")


def read_model_config(path: Path) -> ModelConfig:
    """The configuration of the checkpoint at `path`, without reading its weights."""
    if checkpoint_kind(path) is CheckpointKind.HF:
        return read_hf_config(path)
    return model_config_from_gguf(read_gguf(path))


def four_bit_blocks(path: Path) -> str | None:
    """The type of the checkpoint's 4-bit blocks that `--quantization q4` takes, if it has some."""
    if checkpoint_kind(path) is CheckpointKind.HF:
        return None
    return four_bit_type(read_gguf(path))
