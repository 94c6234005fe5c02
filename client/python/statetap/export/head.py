"""The parts of a base model that trainers load: embeddings, head, final norm and a config, in a folder of their own.

nested: config and tensor names as the checkpoint has them (speculators, Model-Optimizer, TorchSpec). flat: the text model's config at the top level as
`deepseek_v3`, names without a prefix (SpecForge). Either way one safetensors file with an index.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from statetap.checkpoint import EMBEDDINGS, HEAD, NORM, Checkpoint
from statetap.files import Bf16, write_json, write_safetensors

_FLAT_NAMES = {EMBEDDINGS: "model.embed_tokens.weight", HEAD: "lm_head.weight", NORM: "model.norm.weight"}


def write_head(model: Checkpoint, out: Path, flat: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty; give a new folder")
    tensors = {_FLAT_NAMES[suffix] if flat else str(model.name_of(suffix)): Bf16(model.bits(suffix)) for suffix in (EMBEDDINGS, HEAD, NORM)}
    write_safetensors(out / "model.safetensors", tensors)
    size = sum(tensor.bits.nbytes for tensor in tensors.values())
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(tensors, "model.safetensors")})
    write_json(out / "config.json", _flattened(model) if flat else _without_quantization(model.config))


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """These tensors are bf16."""
    return {name: _without_quantization(value) if name == "text_config" else value for name, value in config.items() if name != "quantization_config"}


def _flattened(model: Checkpoint) -> dict[str, Any]:
    text = _without_quantization(model.text)
    text.pop("auto_map", None)
    return {**text, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
