"""The tiny model's file is what it says: readable weights of the shapes its configuration implies."""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

from engine_bridge.stack import tiny_model


def test_every_weight_can_be_read_and_none_is_degenerate(tmp_path: Path) -> None:
    tiny_model.main(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    with safe_open(path, framework="numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == tiny_model.shapes()
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    assert sum("q_proj" in name for name in shapes) == config["num_hidden_layers"]
    values = (np.frombuffer(raw[start:], "<u2").astype("<u4") << 16).view("<f4")
    assert len(values) == sum(int(np.prod(shape)) for shape in shapes.values())
    assert np.isfinite(values).all()
    assert 0.015 < float(values[:100_000].std()) < 0.025
