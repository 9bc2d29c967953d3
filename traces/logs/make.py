"""Write the sample logs of this folder: made up, one of each format that `arborsim import` reads.

``python traces/logs/make.py [FOLDER]`` writes the same bytes every time.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

#: Requests of each log, in conversations whose prompts grow.
REQUESTS, CONVERSATIONS = 40, 8
Turn = tuple[float, int, list[int], int]


def requests(block_tokens: int, most_blocks: int, seed: int) -> list[Turn]:
    """Second, conversation, ids of the prompt's whole blocks and tokens behind them, of each."""
    rng = random.Random(seed)
    history: dict[int, list[int]] = {}
    made, at, fresh = [], 0.0, 1
    for _ in range(REQUESTS):
        at += round(rng.expovariate(0.5), 3)
        chat = rng.randrange(CONVERSATIONS)
        blocks = history.setdefault(chat, [0])  # all begin with the same one
        more = rng.randint(1, most_blocks)
        blocks.extend(range(fresh, fresh + more))
        fresh += more + 1
        made.append((round(at, 3), chat, list(blocks), rng.randrange(1, block_tokens)))
    return made


def mooncake() -> str:
    rng = random.Random(1)
    lines: list[dict[str, Any]] = []
    for number, (at, _, blocks, rest) in enumerate(requests(512, 3, 0)):
        ids = [*blocks, 100_000 + number]
        lines.append({
            "timestamp": round(1000 * at), "input_length": 512 * len(blocks) + rest,
            "output_length": rng.randint(20, 200), "hash_ids": ids,
        })  # fmt: skip
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def bailian() -> str:
    rng = random.Random(2)
    last: dict[int, tuple[int, int]] = {}  # chat -> number of its last request, and turn
    lines: list[dict[str, Any]] = []
    for number, (at, chat, blocks, rest) in enumerate(requests(16, 12, 3)):
        parent, turn = last.get(chat, (-1, 0))
        last[chat] = number, turn + 1
        lines.append({
            "chat_id": number, "parent_chat_id": parent, "timestamp": at, "turn": turn + 1,
            "type": "text", "input_length": 16 * len(blocks) + rest,
            "output_length": rng.randint(20, 200), "hash_ids": [*blocks, 100_000 + number],
        })  # fmt: skip
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def azure() -> str:
    rng = random.Random(4)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at, _, blocks, rest in requests(128, 4, 5):
        moment = f"2023-11-16 18:{int(at) // 60:02}:{at % 60:010.7f}"
        lines.append(f"{moment},{128 * len(blocks) + rest},{rng.randint(20, 200)}")
    return "\n".join(lines) + "\n"


def tot() -> str:
    """Problems of the tree-of-thoughts program: three steps, of which the best two go on."""
    rng = random.Random(6)
    problems = []
    for index in range(6):
        numbers = " ".join(str(rng.randint(1, 13)) for _ in range(4))
        states, steps = [""], []
        for step in range(3):
            proposals = [
                f"{state}{rng.randint(1, 13)} + {rng.randint(1, 13)} = {rng.randint(2, 26)} "
                f"(left: {' '.join(str(rng.randint(1, 13)) for _ in range(3 - step))})\n"
                for state in states
                for _ in range(4)
            ]
            values = [rng.choice([0.003, 1.002, 20.001, 60.0]) for _ in proposals]
            best = sorted(range(len(proposals)), key=lambda i: -values[i])[:2]
            chosen = [proposals[i] for i in best]
            steps.append({"step": step, "x": numbers, "ys": states, "new_ys": proposals,
                          "values": values, "select_new_ys": chosen})  # fmt: skip
            states = chosen
        infos = [{"r": rng.randrange(2)} for _ in states]
        problems.append({"idx": index, "ys": states, "infos": infos, "steps": steps})
    return json.dumps(problems, indent=1) + "\n"


def tot_dfs() -> str:
    """Problems of the tree-of-thoughts program, depth first: small crosswords of three words."""
    rng = random.Random(8)
    problems = []
    for _ in range(4):
        visits: list[dict[str, Any]] = []
        waiting: list[list[str]] = [[]]
        while waiting and len(visits) < 24:
            actions = waiting.pop()
            if actions:
                count = {"sure": rng.randrange(3), "maybe": rng.randrange(3),
                         "impossible": int(rng.random() < 0.4)}  # fmt: skip
                right = rng.randrange(11) / 10
                visits.append({
                    "total_step": len(visits), "env_step": len(actions), "actions": actions,
                    "info": {"r_letter": right, "r_word": right}, "count": count,
                })  # fmt: skip
            if not actions or (not visits[-1]["count"]["impossible"] and len(actions) < 6):
                word = f"h{len(actions) + 1}. "
                waiting += [
                    [*actions, word + "".join(rng.choices("aeinorst", k=5))]
                    for _ in range(rng.randint(1, 3))
                ]
        problems.append(visits)
    return json.dumps(problems, indent=1) + "\n"


def tot_samples() -> str:
    """Problems that the tree-of-thoughts program only sampled answers to."""
    rng = random.Random(9)
    problems = []
    for index in range(6):
        ys = [
            f"Steps:\n{rng.randint(1, 13)} + {rng.randint(1, 13)} = {rng.randint(2, 26)}\n"
            f"Answer: {rng.randint(1, 30)}"
            for _ in range(8)
        ]
        infos = [{"r": int(rng.random() < 0.2)} for _ in ys]
        problems.append({"idx": index, "ys": ys, "infos": infos})
    return json.dumps(problems, indent=1) + "\n"


def tree() -> str:
    """Nested trees with a value per thought, an object a line."""
    rng = random.Random(10)

    def node(depth: int) -> dict[str, Any]:
        below = rng.randint(1, 3) if depth < 3 else 0
        return {"text": " ".join(rng.choices(["so", "then", "x", "is", "7"], k=12)),
                "mc_value": rng.randrange(9) / 8,
                "children": [node(depth + 1) for _ in range(below)]}  # fmt: skip

    lines = [{"question": f"problem {index}", "steps": node(0)} for index in range(4)]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def deft() -> str:
    """Trees of 15 thoughts."""
    rng = random.Random(7)
    trees = []
    for index in range(4):
        data: dict[str, Any] = {}
        for node in range(16):
            tokens, end = rng.randint(20, 60), 0
            if node:
                above = data[str(rng.randrange(max(0, node - 5), node))]
                above["children"].append(node)
                end = above["end"] + tokens
            data[str(node)] = {"id": node, "value": tokens, "start": end - tokens + 1,
                               "end": end, "children": []}  # fmt: skip
        trees.append({"incompleted": False, "prompt": f"sort list {index}", "data": data})
    return json.dumps(trees, indent=1) + "\n"


LOGS = {
    "mooncake.jsonl": mooncake, "bailian.jsonl": bailian, "azure.csv": azure, "tot.json": tot,
    "tot-dfs.json": tot_dfs, "tot-samples.json": tot_samples, "tree.jsonl": tree,
    "deft.json": deft,
}  # fmt: skip


def main(folder: Path) -> None:
    for name, text in LOGS.items():
        (folder / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
