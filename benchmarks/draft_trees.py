"""A measurement of drafts in several branches: tokens a step by trees of an EAGLE-3 head's drafts and by its chains.

    python -m benchmarks.draft_trees [--steps 160] [--train 384] [--held-out 12]

The head is trained here, on the default model's own answers to prompts of some topics, and measured on answers to those
of others: greedy ones, and sampled ones by the engine's rule, argmax(logit / T + noise). What a step would accept at
each token is computed offline from the head's own scores, and answers are walked through from four starts. A tree has
the nodes of the largest product of the head's probabilities at temperature T (1 for greedy answers): each level makes
the ten likeliest children of the ten likeliest nodes of the level before. Coupled drafts are of the head's logit / T +
noise, the noise being the sampler's own at the draft's position. The first tables are of a head after an eighth of the
training. Chains and trees verify as many tokens; a level of either is one pass of the head. The second table of a head
divides by the time of a step, which is 1 + PASS a level + TOKEN a verified draft, at the best numbers of levels, up to
seven, and of drafts: shares of Qwen3-8B's step at 1 and 16 rows. A tree's mask and choice and the KV that it moves cost
nothing here.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from benchmarks.report import circumstances, describe_circumstances, table
from cluster.engine.messages import SamplingParams
from cluster.text.tokenizer import Tokenizer
from tests import eagle3
from tests.conftest import SMOLLM2
from tests.local_group import Limits, LocalGroup
from worker import torch_sampling

_TOPICS = (
    "the moon;bread;a bicycle;rain;the heart;a river;wolves;chess;a bank;glass;winter;the sun;a guitar;salt;trains;a "
    "garden;the brain;coffee;bridges;an island;maps;honey;a computer;volcanoes;money;a library;birds;sleep;cotton;the "
    "sea;a clock;photographs;iron;a market;horses;electricity;rice;languages;a lighthouse;trees;a hospital;numbers;"
    "football;paint;tea;dogs;a school;stars;wind;cheese;a castle;fish;whales;the desert;a piano;soap;bees;a telescope"
)
_NUM_HELD_OUT = 8  # topics, the last ones
_TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Write a Python function that prints three sentences about {}.",
    "Write a letter to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.",
    "Summarise the history of {} in a few sentences.",
)
_TEMPERATURES = (0.0, 0.7, 1.0)
_COUNTS = (1, 3, 7, 15, 31)
_MORE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 11, 15, 23, 31)
_DEPTH, _BEAM, _NUM_PASSES, _BATCH, _NUM_TOKENS = 7, 10, 3, 8, 128
# Qwen3-8B on one H200: 4.194 ms a step of 1 row and 4.769 of 16, and 0.19 ms a pass of a head, which is reckoned.
_COSTS = {"1 row": (0.19 / 4.194, 0.0383 / 4.194), "16 rows": (0.19 / 4.769, 16 * 0.0383 / 4.769)}
_PADDING = -1

Text = tuple[list[int], int, float, int]
"""Token ids, how many are the prompt's, temperature and seed."""


def _answers(group: LocalGroup, prompts: list[list[int]], temperatures: list[float]) -> list[Text]:
    requests = [
        (prompt, SamplingParams(max_tokens=_NUM_TOKENS, temperature=temperature, seed=index))
        for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    tokens = group.generate(requests, Limits(num_pages=1024), at_once=True).tokens
    return [
        ([*prompt, *answer], len(prompt), sampling.temperature, index)
        for index, ((prompt, sampling), answer) in enumerate(zip(requests, tokens, strict=True))
    ]


class _Trainer:
    """A head, and the model whose distributions it learns."""

    def __init__(self, texts: list[Text], num_steps: int) -> None:
        torch.manual_seed(0)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32
        )
        config, own = dict(eagle3.HEAD), self._model.config
        sizes = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
        config |= {name: getattr(own, name) for name in (*sizes, "rms_norm_eps")}
        config |= {"head_dim": 64, "rope_theta": 100_000.0, "draft_vocab_size": 6144}
        self._layers = 2, own.num_hidden_layers // 2, own.num_hidden_layers - 3
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": self._layers}
        embedding: Tensor = self._model.model.embed_tokens.weight.detach()
        self.head = eagle3.Head(config, embedding)
        self.head.choose_vocabulary([token for ids, *_ in texts for token in ids])
        self.ids: Tensor = cast("Tensor", self.head.d2t) + torch.arange(config["draft_vocab_size"])
        self.head.lm_head.weight.data.copy_(embedding[self.ids])
        self._optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-3, weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, 1e-3, num_steps, pct_start=0.05)
        with torch.autocast("cpu", torch.bfloat16):
            known = [self.known(torch.tensor([ids])) for ids, *_ in texts]
        self._texts = [(text, *(it[0].bfloat16() for it in pair)) for text, pair in zip(texts, known, strict=True)]

    def known(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """States that the head reads, and those that the LM head does, of ids [num_texts, num_tokens]."""
        with torch.no_grad():
            found = self._model.model(ids, output_hidden_states=True).hidden_states
        return torch.cat([found[layer] for layer in self._layers], dim=-1), found[-1]

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            chosen = [self._texts[i] for i in torch.randint(len(self._texts), (_BATCH,)).tolist()]
            ids, states, last = (
                torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True)
                for part in zip(*((torch.tensor(text[0]), *pair) for text, *pair in chosen), strict=True)
            )
            place, ends = torch.arange(2, ids.shape[1]), torch.tensor([[text[1], len(text[0])] for text, *_ in chosen])
            is_answer = (place >= ends[:, :1]) & (place < ends[:, 1:])
            with torch.autocast("cpu", torch.bfloat16):
                wanted = (last[:, 1:-1] @ self.head.embedding[self.ids].T).float().softmax(-1)[is_answer]
                hidden, before, loss = self.head.fc(states[:, :-2]), list[tuple[Tensor, Tensor]](), torch.zeros(())
                for _ in range(_NUM_PASSES):
                    output = self.head.one_pass(hidden, ids[:, 1:-1], before)
                    predicted = self.head.lm_head(self.head.norm(output)[is_answer])
                    loss = loss + F.cross_entropy(predicted.float(), wanted)
                    hidden = F.pad(output, (0, 0, 1, -1))
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self._optimizer.step()
            self._schedule.step()


class _Drafts:
    """A head's drafts of one text. At place i of all tensors a pass reads token i + 1 and predicts token i + 2, so that
    a level's predictions stand one place behind those of the level before."""

    def __init__(self, trainer: _Trainer, text: Text, *, is_coupled: bool) -> None:
        ids, self._num_prompt, temperature, seed = text
        self._head, self._ids = trainer.head, trainer.ids
        self._num_ids, padded = len(ids), torch.tensor([*ids, *[_PADDING] * max(_COUNTS)])
        self._following, self._wanted = padded[1:-1].clamp(min=0), padded[2:]
        self._hidden = self._head.fc(trainer.known(padded[None, :-2].clamp(min=0))[0][0])
        self._scale, self._noise = 1 / (temperature or 1.0), torch.zeros(())
        if is_coupled:
            hashes = torch_sampling._id_hashes(0, self._head.config["vocab_size"])[self._ids]
            keys = [torch_sampling._row_key(seed, position) for position in range(2, len(padded))]
            self._noise = torch.stack([torch_sampling._gumbel(hashes, key).float() for key in keys])

    def _scores(self, output: Tensor) -> Tensor:
        logits: Tensor = self._head.lm_head(self._head.norm(output))
        return logits * self._scale + self._noise

    def chain(self) -> Tensor:
        """[num_tokens]: how many of a chain's drafts from each place are right."""
        hidden, before = self._hidden, list[tuple[Tensor, Tensor]]()
        right, is_right = torch.zeros(len(hidden), dtype=torch.int64), torch.ones(len(hidden), dtype=torch.bool)
        for level in range(max(_COUNTS)):
            output = self._head.one_pass(hidden, self._following, before)
            found = self._ids[self._scores(output).argmax(-1)] == self._wanted
            is_right &= F.pad(found[level:], (0, level))
            right += is_right
            hidden = F.pad(output, (0, 0, 1, -1))
        return right

    def tree(self) -> dict[tuple[int, int], Tensor]:
        """[num_tokens] by depth and number of nodes: how many drafts of the best tree's right branch it has."""
        num = len(self._hidden)
        hidden, ids, before = self._hidden[None], self._following[None], list[tuple[Tensor, Tensor]]()
        totals, is_right = torch.zeros(num, 1), torch.ones(num, 1, dtype=torch.bool)
        nodes, rights, found = list[Tensor](), list[Tensor](), dict[tuple[int, int], Tensor]()
        for level in range(_DEPTH):
            output = self._head.one_pass(hidden, ids, before)
            best = self._scores(output).log_softmax(-1).topk(_BEAM)
            likely, children = (F.pad(it[:, level:], (0, 0, 0, level)).transpose(0, 1) for it in best)
            children, wanted = self._ids[children], F.pad(self._wanted[level:], (0, level), value=_PADDING)
            values = totals[..., None] + likely
            found_right = is_right[..., None] & (children == wanted[:, None, None])
            nodes.append(values.flatten(1))
            rights.append(values.masked_fill(~found_right, -torch.inf).flatten(1).amax(1))
            for count in _MORE_COUNTS:
                ranked = torch.cat(nodes, dim=1).topk(min(count, len(nodes) * nodes[0].shape[1])).values[:, -1]
                found[level + 1, count] = (torch.stack(rights) >= ranked).sum(0)
            totals, kept = nodes[-1].topk(_BEAM)
            is_right = found_right.flatten(1).gather(1, kept)
            ids = F.pad(children.flatten(1).gather(1, kept).T, (level + 1, 0))[:, :num]
            parents = F.pad((kept // _BEAM).T, (level, 0))[:, :num]  # at the places of this level
            hidden = F.pad(output.gather(0, parents[..., None].expand(-1, -1, output.shape[-1])), (0, 0, 1, -1))
            for index, pair in enumerate(before):
                own = F.pad(parents, (0, level - index))[:, level - index :][:, None, :, None]
                size = _BEAM, *pair[0].shape[1:]
                keys, values = (it.expand(len(output), -1, -1, -1).gather(0, own.expand(size)) for it in pair)
                before[index] = keys, values
        return found

    def walked(self, accepted: Tensor) -> Tensor:
        """[2]: tokens and steps, where a step at token m brings `accepted[m - 2]` drafts and one more token."""
        total, right = torch.zeros(2), accepted.tolist()
        for start in range(self._num_prompt + 1, min(self._num_prompt + 5, self._num_ids)):
            at, steps = start, 0
            while at < self._num_ids:
                at, steps = at + right[at - 2] + 1, steps + 1
            total += torch.tensor([min(at, self._num_ids) - start, steps])
        return total


Found = dict[tuple[int, int], float]
"""Tokens a step by levels and number of drafts."""


def _measure(trainer: _Trainer, texts: list[Text], temperature: float, *, is_coupled: bool) -> tuple[Found, Found]:
    """Figures of chains, and of trees."""
    sums: list[dict[tuple[int, int], Tensor]] = [defaultdict(lambda: torch.zeros(2)) for _ in range(2)]
    for text in texts:
        if text[2] == temperature and len(text[0]) > text[1] + 1:
            drafts = _Drafts(trainer, text, is_coupled=is_coupled)
            right = drafts.chain()
            for count in _MORE_COUNTS:
                sums[0][count, count] += drafts.walked(right.clamp(max=count))
            for key, accepted in drafts.tree().items():
                sums[1][key] += drafts.walked(accepted)
    chain, tree = ({key: float(it[0] / it[1]) for key, it in of_kind.items()} for of_kind in sums)
    return chain, tree


def _print_figures(trainer: _Trainer, texts: list[Text]) -> None:
    rows, timed = list[list[str]](), list[list[str]]()
    cases = [(it, is_coupled) for it in _TEMPERATURES for is_coupled in (False, True) if it or not is_coupled]
    for temperature, is_coupled in cases:
        named = [str(temperature), "coupled" if is_coupled else "greedy"]
        chain, tree = _measure(trainer, texts, temperature, is_coupled=is_coupled)
        limits = [min(count, _DEPTH) for count in _COUNTS]
        trees = [tree[limit, count] for limit, count in zip(limits, _COUNTS, strict=True)]
        chains = [chain[limit, limit] for limit in limits]
        for kind, values in (
            ("chain, unlimited", [chain[count, count] for count in _COUNTS]),
            ("chain", chains),
            ("tree", trees),
            ("tree / chain", [one / other for one, other in zip(trees, chains, strict=True)]),
        ):
            rows.append([*named, kind, *(f"{value:.3f}" for value in values)])
        for name, (per_pass, per_token) in _COSTS.items():
            best = [
                max((it / (1 + per_pass * key[0] + per_token * key[1]), *key) for key, it in found.items())
                for found in (
                    {(0, 0): 1.0} | {key: it for key, it in of.items() if key[0] <= _DEPTH} for of in (chain, tree)
                )
            ]
            shapes = [f"{speed:.3f} ({levels}, {count})" for speed, levels, count in best]
            timed.append([*named, name, *shapes, f"{best[1][0] / best[0][0]:.3f}"])
    print("tokens a step by verified drafts, in at most as many levels and 7")
    print(table(["T", "drafts", "", *map(str, _COUNTS)], rows))
    print("tokens in the time of a step without drafts, at the best (levels, drafts)")
    print(table(["T", "drafts", "at", "chain", "tree", "tree / chain"], timed), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160, help="of training, each of 8 answers")
    parser.add_argument("--train", type=int, default=384, help="answers to train with")
    parser.add_argument("--held-out", type=int, default=12, help="answers of each temperature to measure")
    parser.add_argument("--answers", type=Path, help="file of all answers; made, or read where it is there")
    args = parser.parse_args()
    torch.set_num_threads(1)  # two wait for each other beside other work
    if args.answers and args.answers.exists():
        held_out, texts = json.loads(args.answers.read_text())
    else:
        tokenizer = Tokenizer.load(SMOLLM2)
        assert tokenizer.template is not None, "the model has no chat template"
        topics = _TOPICS.split(";")
        kinds = topics[:-_NUM_HELD_OUT], topics[-_NUM_HELD_OUT:]
        asked = [[task.format(topic) for topic in kind for task in _TASKS] for kind in kinds]
        rendered = [[tokenizer.template.render([{"role": "user", "content": it}]) for it in kind] for kind in asked]
        known, unknown = (
            [tokenizer.encode(text, add_special_tokens=False) for text in texts[:count]]
            for texts, count in zip(rendered, (args.train, args.held_out), strict=True)
        )
        group = LocalGroup(SMOLLM2, 1, 1024)
        held_out = [text for it in _TEMPERATURES for text in _answers(group, unknown, [it] * len(unknown))]
        texts = _answers(group, known, [_TEMPERATURES[i % 3] for i in range(len(known))])
        group.close()
        if args.answers:
            args.answers.write_text(json.dumps([held_out, texts]))
    counts = [sum(len(text[0]) - text[1] for text in part) for part in (texts, held_out)]
    print(f"{describe_circumstances(circumstances())}; {SMOLLM2.name}")
    print(f"{len(texts)} answers of {counts[0]} tokens to train with, {len(held_out)} of {counts[1]} held out")
    trainer, done = _Trainer(texts, args.steps), 0
    for num_steps in (args.steps // 8, args.steps):
        trainer.train(num_steps - done)
        done = num_steps
        print(f"\nafter {done} steps of training")
        with torch.no_grad():
            _print_figures(trainer, held_out)


if __name__ == "__main__":
    main()
