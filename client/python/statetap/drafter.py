"""An EAGLE-3 drafter as published: loaded from a folder, run on stored features. Needs torch.

Row p of draft step j (from 1) has the embedding of token p+j and predicts token p+j+1. In step 1 its feature is fc of the taps of token p, later the
drafter's own state of the step before; keys of step 1 are seen causally, those of later steps by their own row alone, as in training and serving.
"""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from statetap.checkpoint import EMBEDDINGS, Checkpoint, read_header, read_tensor
from statetap.errors import missing_package
from statetap.files import round_to_bf16

try:
    import torch
    from torch import nn
except ImportError:
    raise missing_package("torch", "torch", "statetap.drafter") from None


def named_taps(config: Mapping[str, Any]) -> "list[int] | None":
    """The boundaries that a config.json names, as vLLM, speculators and SGLang since May 2026 count them; older SGLang adds one."""
    name = "eagle_aux_hidden_state_layer_ids"
    taps: "list[int] | None" = config.get(name) or config.get("eagle_config", {}).get(name)
    return taps


@dataclass(frozen=True)
class DrafterConfig:
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    num_taps: int
    eps: float
    rope: Mapping[str, Any]  # rope_theta, rope_type and what belongs to it
    norm_before_fc: bool = False  # one RMSNorm over the taps side by side
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # the state that goes on is the normed one

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Of config.json: speculators', or a flat Llama config with or without eagle_config."""
        layer = config.get("transformer_layer_config", config)
        rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
        rope.setdefault("rope_theta", layer.get("rope_theta", 10000.0))
        hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
        taps = named_taps(config) or [0, 0, 0]
        return cls(
            hidden=hidden, intermediate=layer["intermediate_size"], num_heads=heads, num_kv_heads=layer.get("num_key_value_heads", heads),
            head_dim=layer.get("head_dim") or hidden // heads, vocab=layer["vocab_size"],
            draft_vocab=config.get("draft_vocab_size") or layer["vocab_size"], num_taps=len(taps), eps=layer.get("rms_norm_eps", 1e-6), rope=rope,
            norm_before_fc=config.get("norm_before_fc", False), norm_before_residual=config.get("norm_before_residual", False),
            norm_output=config.get("norm_output", False),
        )  # fmt: skip


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Drafter(nn.Module):
    """Parameters are named as speculators and vLLM name them (layers.0.…), in fp32."""

    d2t: torch.Tensor
    embeddings: torch.Tensor
    frequencies: torch.Tensor

    def __init__(self, config: DrafterConfig, embeddings: torch.Tensor) -> None:
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(c.num_taps * c.hidden, c.hidden, bias=False)
        self.input_norm = _Norm(c.num_taps * c.hidden, c.eps) if c.norm_before_fc else None
        layer = nn.Module()
        layer.hidden_norm, layer.input_layernorm, layer.post_attention_layernorm = (_Norm(c.hidden, c.eps) for _ in range(3))
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        for name, rows in (("q_proj", c.num_heads), ("k_proj", c.num_kv_heads), ("v_proj", c.num_kv_heads)):
            setattr(layer.self_attn, name, nn.Linear(2 * c.hidden, rows * c.head_dim, bias=False))
        layer.self_attn.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden, bias=False)
        for name, sizes in (("gate_proj", (c.hidden, c.intermediate)), ("up_proj", (c.hidden, c.intermediate)), ("down_proj", (c.intermediate, c.hidden))):
            setattr(layer.mlp, name, nn.Linear(*sizes, bias=False))
        self.layers = nn.ModuleList([layer])
        self.norm = _Norm(c.hidden, c.eps)
        self.lm_head = nn.Linear(c.hidden, c.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab, dtype=torch.int64))
        self.register_buffer("embeddings", embeddings.float(), persistent=False)  # the target's, not trained
        frequencies, self._rope_scale = _rope(c)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, taps: torch.Tensor, ids: torch.Tensor, steps: int, documents: "torch.Tensor | None" = None) -> "list[torch.Tensor]":
        """taps [S, taps, hidden], ids [S]: one sample, or several one after another, `documents` [S] ascending saying which one a token is of.
        Logits over the draft vocabulary by step: of step j [S - j, draft_vocab], of no worth where token p + j + 1 is another sample's."""
        layer: Any = self.layers[0]
        rows = len(ids) - 1
        place = torch.arange(rows, device=ids.device)
        unseen = place > place[:, None]
        if documents is not None:
            of = documents[:rows].contiguous()
            unseen |= of != of[:, None]
            place = place - torch.searchsorted(of, of)
        feature = taps[:rows].float().flatten(1)
        state = self.fc(self.input_norm(feature) if self.input_norm is not None else feature)
        tokens = torch.cat([ids, ids.new_zeros(steps)])
        keys: "list[torch.Tensor]" = []
        values: "list[torch.Tensor]" = []
        logits = []
        for step in range(1, steps + 1):
            embedded = self.embeddings[tokens[step : step + rows]]
            normed = layer.hidden_norm(state)
            both = torch.cat([layer.input_layernorm(embedded), normed], -1)
            query, key, value = self._project(both, place + step)
            keys.append(key)
            values.append(value)
            x = (normed if self.config.norm_before_residual else state) + layer.self_attn.o_proj(self._attend(query, keys, values, unseen))
            inner = layer.post_attention_layernorm(x)
            x = x + layer.mlp.down_proj(nn.functional.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner))
            out = self.norm(x)
            state = out if self.config.norm_output else x
            logits.append(self.lm_head(out)[: len(ids) - step])
        return logits

    def _project(self, x: torch.Tensor, positions: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        layer: Any = self.layers[0]
        attention, c = layer.self_attn, self.config
        query, key, value = (project(x).view(len(x), -1, c.head_dim).transpose(0, 1) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        angles = positions[:, None] * self.frequencies
        cos, sin = (torch.cat([f(angles)] * 2, -1) * self._rope_scale for f in (torch.cos, torch.sin))

        def turn(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat([-second, first], -1) * sin

        repeat = c.num_heads // c.num_kv_heads
        return turn(query), turn(key).repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)

    def _attend(self, query: torch.Tensor, keys: "list[torch.Tensor]", values: "list[torch.Tensor]", unseen: torch.Tensor) -> torch.Tensor:
        """[heads, S, head_dim] each; `unseen` [S, S] of the keys of step 1."""
        rows, scale = query.shape[1], self.config.head_dim**-0.5
        scores = [(query @ keys[0].transpose(1, 2)).masked_fill(unseen, -torch.inf), *((query * key).sum(-1, keepdim=True) for key in keys[1:])]
        weights = (torch.cat(scores, -1) * scale).softmax(-1)
        out: torch.Tensor = weights[..., :rows] @ values[0]
        for i, value in enumerate(values[1:]):
            out = out + weights[..., rows + i, None] * value
        return out.transpose(0, 1).flatten(1)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        ids: torch.Tensor = draft_ids + self.d2t[draft_ids]
        return ids


def _rope(c: DrafterConfig) -> "tuple[torch.Tensor, float]":
    """Angles a position, and what cosines and sines are multiplied by."""
    kind = c.rope.get("rope_type", c.rope.get("type", "default"))
    plain = 1.0 / c.rope["rope_theta"] ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / c.rope["factor"], 1.0
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r}: default, linear and yarn are known")
    factor, original = c.rope["factor"], c.rope["original_max_position_embeddings"]

    def turning(times: float) -> float:
        return c.head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(c.rope["rope_theta"]))

    low = max(math.floor(turning(c.rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(turning(c.rope.get("beta_slow", 1))), c.head_dim - 1)
    ramp = ((torch.arange(c.head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "mscale" in c.rope and "mscale_all_dim" in c.rope:
        scale = mscale(c.rope["mscale"]) / mscale(c.rope["mscale_all_dim"])
    else:
        scale = c.rope.get("attention_factor") or mscale(1.0)
    return plain / factor * ramp + plain * (1 - ramp), scale


def load(folder: "str | Path", model: "Checkpoint | None" = None) -> Drafter:
    """A drafter's folder: config.json and safetensors (or .bin) files in the naming of SafeAILab, SpecForge and SGLang (midlayer.…), of vLLM exports or of speculators
    (layers.0.…). `model` gives the embeddings where the drafter has none. ValueError names what does not fit."""
    folder = Path(folder)
    raw = json.loads((folder / "config.json").read_text())
    tensors = _tensors(folder)
    try:
        config = DrafterConfig.read({**raw, "norm_before_fc": "input_norm.weight" in tensors})
    except KeyError as error:
        raise ValueError(f"{folder}/config.json has no {error.args[0]}, which a Llama layer's config has") from None
    config = DrafterConfig(**{**config.__dict__, "num_taps": tensors["fc.weight"].shape[1] // config.hidden, "draft_vocab": tensors["lm_head.weight"].shape[0]})
    embeddings = tensors.pop("embed_tokens.weight", None)
    if embeddings is None:
        if model is None:
            raise ValueError(f"{folder} has no embeddings of its own: name the base model's folder with --model")
        embeddings = _float(np.array(model.bits(EMBEDDINGS)), "BF16")
    drafter = Drafter(config, embeddings)
    tensors.pop("t2d", None)
    tensors.setdefault("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
    missing, unexpected = drafter.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        raise ValueError(f"{folder}: missing {list(missing)[:5]}, unknown {list(unexpected)[:5]}")
    return drafter.eval()


def save(drafter: Drafter, folder: "str | Path", tap_boundaries: "list[int]", t2d: torch.Tensor) -> None:
    """In the published naming (midlayer.…), bf16, without embeddings, as SGLang and vLLM open it."""
    from statetap.files import Bf16, write_json, write_safetensors

    folder, c = Path(folder), drafter.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors: "dict[str, Any]" = {"d2t": drafter.d2t.cpu().numpy(), "t2d": t2d.cpu().numpy()}
    for name, tensor in drafter.state_dict().items():
        if name != "d2t":
            tensors[name.replace("layers.0.", "midlayer.")] = Bf16(round_to_bf16(tensor.detach().float().cpu().numpy()))
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab,
        "draft_vocab_size": c.draft_vocab, "rms_norm_eps": c.eps, "rope_theta": c.rope["rope_theta"], "rope_scaling": None, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": tap_boundaries, "use_aux_hidden_state": True},
    })  # fmt: skip


def _tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """By the names of layers.0.…, whichever way they are published."""
    places = {name: path for path in sorted(folder.glob("*.safetensors")) for name in read_header(path)[0] if name != "__metadata__"}
    held: "dict[str, torch.Tensor]" = {}
    for path in () if places else sorted(folder.glob("*.bin")):  # SafeAILab's
        held |= torch.load(path, map_location="cpu", weights_only=True)
    names = {name: name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in (*places, *held)}
    _refuse_unknown(folder, set(names.values()))
    found = {names[name]: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in held.items()}
    for name, path in places.items():
        values, dtype = read_tensor(path, name)
        found[names[name]] = _float(np.array(values), dtype)
    return found


def _refuse_unknown(folder: Path, names: "set[str]") -> None:
    if not names:
        raise FileNotFoundError(f"{folder} has neither a safetensors nor a .bin file")
    missing = [name for name in ("fc.weight", "lm_head.weight") if name not in names]
    if missing:
        raise ValueError(f"{folder} has no {missing[0]}: it is no EAGLE-3 drafter")
    if any("kv_a_proj" in name for name in names):
        raise ValueError(f"{folder} is a drafter with MLA attention; drafters with Llama attention are read")
    norms = sorted(name for name in names if name.startswith("fc_norm."))
    if norms:
        raise ValueError(f"{folder} norms each tap on its own ({norms[0]}), which is not read")


def _float(values: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "BF16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(values)
