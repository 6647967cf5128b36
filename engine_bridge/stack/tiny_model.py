"""Writes a Qwen3 model of two small layers with random weights. Runs in the engine's environment.

usage: python tiny_model.py OUTPUT_FOLDER
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 151936, 64, 2, 2, 1, 32, 128
BOS, EOS = 151643, 151645

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": BOS,
}
GENERATION = {"bos_token_id": BOS, "eos_token_id": [EOS, BOS], "pad_token_id": BOS, "do_sample": False}


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight; vectors are norms, matrices are `[out, in]`."""
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        named |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{at}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return named


def write_weights(path: Path) -> None:
    """One safetensors file of bfloat16: a length, a JSON header, the raw values."""
    random = np.random.default_rng(0)
    header: dict[str, dict[str, object]] = {}
    blobs: list[bytes] = []
    offset = 0
    for name, shape in shapes().items():
        is_norm = len(shape) == 1
        values = np.ones(shape) if is_norm else random.standard_normal(shape) * 0.02
        blob = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        file.writelines(blobs)


def main(folder: Path) -> None:
    write_weights(folder / "model.safetensors")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=1))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
