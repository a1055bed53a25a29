"""EAGLE-3 heads in plain torch: trained on given texts of a small model, and written as their checkpoints are."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 1000,
    "draft_vocab_size": 700,
    "hidden_size": 144,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
"""config.json of a head for conftest.SMALL."""
_LAYERS = HEAD["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
_NUM_PASSES = 2


class Head(nn.Module):
    """A head for one text at a time, or several equally long ones; all its tensors are named as in checkpoints."""

    def __init__(self, config: dict[str, Any], embedding: Tensor, model: Any = None) -> None:
        super().__init__()
        self._model = [model]  # none of its parts
        self.config = config
        hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        size, columns = config["head_dim"], config["intermediate_size"]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps=config["rms_norm_eps"])

        self.fc = linear(len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) * hidden, hidden)
        layer = self.midlayer = nn.Module()
        layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm = norm(), norm(), norm()
        attention = layer.self_attn = nn.Module()
        attention.q_proj, attention.o_proj = linear(2 * hidden, heads * size), linear(heads * size, hidden)
        attention.k_proj, attention.v_proj = linear(2 * hidden, kv_heads * size), linear(2 * hidden, kv_heads * size)
        mlp = layer.mlp = nn.Module()
        mlp.gate_proj, mlp.up_proj = linear(hidden, columns), linear(hidden, columns)
        mlp.down_proj = linear(columns, hidden)
        self.norm = norm()
        self.lm_head = linear(hidden, config["draft_vocab_size"])
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.embedding = embedding

    def choose_vocabulary(self, ids: Sequence[int]) -> None:
        """The head may predict these and as many others as there is room for."""
        vocab_size, size = self.config["vocab_size"], self.config["draft_vocab_size"]
        others = [token for token in range(vocab_size) if token not in set(ids)]
        chosen = torch.tensor(sorted([*set(ids), *others][:size]))
        self.d2t.copy_(chosen - torch.arange(size))

    def one_pass(self, hidden: Tensor, ids: Tensor, before: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[..., num_tokens, hidden_size], before the last norm. `before`: keys and values of the passes before, each of
        which a token sees one of, of the first all up to that; those of this pass are appended."""
        layer, shape = self.midlayer, (*hidden.shape[:-1], -1, self.config["head_dim"])
        both = torch.cat((layer.input_layernorm(self.embedding[ids]), layer.hidden_norm(hidden)), dim=-1)
        attention = layer.self_attn
        qkv = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (it(both).view(shape).transpose(-2, -3) for it in qkv)
        group, theta = q.shape[-3] // k.shape[-3], self.config["rope_theta"]
        before.append((_rotated(k, theta).repeat_interleave(group, -3), v.repeat_interleave(group, -3)))
        q, num, p = _rotated(q, theta), q.shape[-2], len(before)
        place = torch.arange(num)
        behind = place[:, None] - place
        scores = [
            (q @ keys.transpose(-1, -2) / math.sqrt(shape[-1])).masked_fill(
                ~((behind >= p - 1) if index == 0 else (behind == p - 1 - index)), -math.inf
            )
            for index, (keys, _) in enumerate(before)
        ]
        weights = torch.cat(scores, dim=-1).softmax(-1).nan_to_num()  # of the first tokens later passes have none
        seen = weights @ torch.cat([values for _, values in before], dim=-2)
        hidden = hidden + attention.o_proj(seen.transpose(-2, -3).flatten(-2))
        normed, mlp = layer.post_attention_layernorm(hidden), layer.mlp
        return hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))

    def states_of(self, ids: list[int]) -> Tensor:
        """[len(ids), columns]: the model's, in the order of `fc`'s columns."""
        with torch.no_grad():
            found = self._model[0](torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in _LAYERS], dim=1)

    def drafts(self, states: Tensor, ids: list[int], count: int) -> list[int]:
        """What it predicts after `ids` [n], of whose first n - 1 it has the `states`."""
        hidden, drafts = self.fc(states), list[int]()
        for _ in range(count):
            output = self.one_pass(hidden, torch.tensor([*ids, *drafts][1:]), [])
            best = int(self.lm_head(self.norm(output[-1])).argmax())
            drafts.append(best + int(self.d2t[best]))
            hidden = torch.cat((hidden, output[-1:]))
        return drafts


def _rotated(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def train(model_path: Path, texts: list[list[int]], num_steps: int) -> Head:
    """A head that has seen `texts`, padded with token 0, and drafts several tokens of them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    head = Head(HEAD, model.model.embed_tokens.weight.detach(), model)
    head.choose_vocabulary([token for text in texts for token in text])
    index_of = torch.full((HEAD["vocab_size"],), -100)
    index_of[head.d2t + torch.arange(len(head.d2t))] = torch.arange(len(head.d2t))
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    is_text = torch.arange(longest) < torch.tensor([[len(text)] for text in texts])
    with torch.no_grad():
        found = model(ids, output_hidden_states=True).hidden_states
    states = torch.cat([found[layer] for layer in _LAYERS], dim=-1)[:, :-2]
    following = ids[:, 1:-1]
    labels = index_of[ids[:, 2:]].masked_fill(~is_text[:, 2:], -100)
    optimizer = torch.optim.AdamW(head.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        hidden, before, loss = head.fc(states), list[tuple[Tensor, Tensor]](), torch.zeros(())
        for passes in range(_NUM_PASSES):
            output = head.one_pass(hidden, following, before)
            own = labels.clone()
            own[:, :passes] = -100
            loss = loss + F.cross_entropy(head.lm_head(head.norm(output)).flatten(0, 1), own.flatten())
            hidden = torch.cat((torch.zeros_like(output[:, :1]), output[:, :-1]), dim=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return head.requires_grad_(False)


def write(head: Head, path: Path) -> None:
    """Writes a head's checkpoint, with the tensors that are not read."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(head.config))
    in_drafts = torch.zeros(head.config["vocab_size"], dtype=torch.bool)
    in_drafts[head.d2t + torch.arange(len(head.d2t))] = True
    save_file({**head.state_dict(), "t2d": in_drafts}, path / "model.safetensors")
