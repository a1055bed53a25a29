"""Layers for multi-token prediction as transformers computes them: trained on given texts, and written beside the model
that they are of, as published checkpoints have them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.helpers.families import Case

_NAMES = {"layers.0.mtp_block.": "", "layers.0.post_norm.": "shared_head.norm.", "layers.0.": ""}
_QWEN = {
    "layers.0.mtp_block.": "layers.0.",
    "layers.0.post_norm.": "norm.",
    "layers.0.eh_proj.": "fc.",
    "layers.0.enorm.": "pre_fc_norm_embedding.",
    "layers.0.hnorm.": "pre_fc_norm_hidden.",
}


class Head:
    """The MTP layer of a model, and the model's states, which it reads."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        self._case = case
        if is_qwen := "mtp." in case.model.unread:
            case.hf.config.num_mtp_layers, case.hf.config.mtp_layer_types = 1, ["full_attention"]
        self._names = _QWEN if is_qwen else _NAMES
        self._prefix = "mtp." if is_qwen else case.model.layer_prefix(case.model.num_hidden_layers)
        # Its embedding and LM head are the model's.
        self.model = MtpModel(case.hf, 1)
        for parameter in self.model.layers.parameters():
            torch.nn.init.normal_(parameter, std=0.08) if parameter.dim() > 1 else None

    def states_of(self, ids: list[int]) -> Tensor:
        """[len(ids), hidden_size], behind the last norm."""
        with torch.no_grad():
            return self._case.hf.model(torch.tensor([ids])).last_hidden_state[0]

    def one_pass(self, states: Tensor, ids: Tensor) -> Tensor:
        """[num_texts, num_tokens, hidden_size], normed, of the states and of the tokens that follow."""
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        return self.model.forward_layer(0, states, positions, None, input_ids=ids)

    def drafts(self, states: Tensor, ids: list[int], count: int) -> list[int]:
        """What it predicts after `ids` [n], of whose first n - 1 it has the `states`."""
        drafts = list[int]()
        with torch.no_grad():
            for _ in range(count):
                output = self.one_pass(states.unsqueeze(0), torch.tensor([[*ids, *drafts][1:]]))[0, -1:]
                drafts.append(int(self._case.hf.lm_head(output).argmax()))
                states = torch.cat((states, output))
        return drafts

    def train(self, texts: list[list[int]], num_steps: int) -> None:
        """Has it see `texts`, padded with token 0."""
        hf, longest = self._case.hf, max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        is_text = torch.arange(longest) < torch.tensor([[len(text)] for text in texts])
        with torch.no_grad():
            states = hf.model(ids).last_hidden_state[:, :-2]
        labels = ids.masked_fill(~is_text, -100)[:, 2:]
        parameters = list(self.model.layers.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=6e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        for _ in range(num_steps):
            logits = hf.lm_head(self.one_pass(states, ids[:, 1:-1]))
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            schedule.step()

    def tensors(self) -> dict[str, Tensor]:
        """All of them by their names in a checkpoint, whose experts have tensors of their own."""
        prefix, found = self._prefix, dict[str, Tensor]()
        for name, tensor in self.model.layers.state_dict(prefix="layers.").items():
            begin = next(begin for begin in self._names if name.startswith(begin))
            own = prefix + self._names[begin] + name.removeprefix(begin)
            for i, expert in enumerate(tensor) if ".experts." in name else ():
                if name.endswith("gate_up_proj"):
                    gate, up = expert.chunk(2)
                    parts = {"gate_proj": gate, "up_proj": up}
                else:
                    parts = {"down_proj": expert}
                stem = own.rpartition(".")[0]
                found |= {f"{stem}.{i}.{part}.weight": it.clone() for part, it in parts.items()}
            if ".experts." not in name:
                found[own] = tensor.clone()
        shared = {"embed_tokens": self._case.hf.get_input_embeddings(), "shared_head.head": self._case.hf.lm_head}
        return found | {f"{prefix}{name}.weight": it.weight.detach().clone() for name, it in shared.items()}

    def write(self, path: Path) -> None:
        """Writes it beside the files of the model at `path`."""
        save_file(self.tensors(), path / "mtp.safetensors")
