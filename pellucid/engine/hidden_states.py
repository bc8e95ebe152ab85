"""Hidden states of prompt tokens, in memory and as a self-describing file. Made by `LLM.hidden_states`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.core import CheckpointError

if TYPE_CHECKING:
    import torch

FORMAT = "pellucid-hidden-states-1"


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of every prompt token: `rows` [prompt tokens, len(layers) * hidden_size].

    `layers` are 0-based; a row holds the outputs of those layers (the residual after the layer), side by side.
    """

    prompt_token_ids: tuple[int, ...]
    layers: tuple[int, ...]
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class HiddenStatesHeader:
    """What a reader must know before it trains on the rows. Ids of layers mean nothing without `convention`.

    `gathered`: rows are whole, not one tensor-parallel rank's share.
    """

    model_sha256: str
    layers: tuple[int, ...]
    dtype: str
    convention: str = "output_of_layer, 0-based"
    gathered: bool = True


def save_hidden_states(path: str | Path, states: Sequence[HiddenStates], model_sha256: str) -> None:
    """One safetensors file: `<i>.token_ids` int64 [n] and `<i>.rows` [n, width], and the header in its metadata."""
    import torch
    from safetensors.torch import save_file

    header = HiddenStatesHeader(model_sha256, states[0].layers, str(states[0].rows.dtype).removeprefix("torch."))
    tensors = {}
    for index, state in enumerate(states):
        tensors[f"{index}.token_ids"] = torch.tensor(state.prompt_token_ids, dtype=torch.int64)
        tensors[f"{index}.rows"] = state.rows.contiguous()
    metadata = {"format": FORMAT, "header": json.dumps(asdict(header))}
    save_file(tensors, str(path), metadata=metadata)


def load_hidden_states(path: str | Path) -> tuple[HiddenStatesHeader, list[HiddenStates]]:
    """What `save_hidden_states` wrote.

    Raises:
        CheckpointError: another kind of file, or rows that do not match their tokens.
    """
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{path}: not a file of hidden states ({FORMAT}); make one with save_hidden_states")
        fields = json.loads(metadata["header"])
        header = HiddenStatesHeader(**{**fields, "layers": tuple(fields["layers"])})
        states = []
        for index in range(len(file.keys()) // 2):
            token_ids = tuple(file.get_tensor(f"{index}.token_ids").tolist())
            rows = file.get_tensor(f"{index}.rows")
            if rows.shape[0] != len(token_ids):
                raise CheckpointError(f"{path}: {rows.shape[0]} rows for {len(token_ids)} tokens in prompt {index}")
            states.append(HiddenStates(token_ids, header.layers, rows))
    return header, states
