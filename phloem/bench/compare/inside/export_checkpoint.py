"""Runs inside the transformers environment: a GGUF file as a folder of bf16 weights."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main(source: Path, folder: Path) -> None:
    """Write the folder; it appears under its name only once it is whole."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    save_file: Any = importlib.import_module("safetensors.torch").save_file
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    (partial / "config.json").write_text(json.dumps(config, indent=1, default=str))
    tied = bool(config.get("tie_word_embeddings"))
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    partial.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
