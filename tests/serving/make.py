"""Demands made by hand, and a machine on which they are easy to price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arborsim.core.tiers import BELOW_DDR, MEMORIES
from arborsim.machine.program import (
    ATTENDED_UNITS,
    FIXED,
    LEG_COLUMNS,
    LINEAR,
    PIECE_COLUMNS,
    DemandInfo,
    Leg,
    Op,
    SearchDemand,
)
from tests.simulator.bench import GEOMETRY, KV

NUMBERS = tuple(map(MEMORIES.index, BELOW_DDR))
UNITS = ATTENDED_UNITS * GEOMETRY.layers  # of a token in one group
Rows = list[tuple[int, ...]]


def piece(iterations: int, **columns: int) -> list[int]:
    """A row of `SearchDemand.pieces`; what is not named is 0, one sequence decodes."""
    values = {"iterations": iterations, "sequences": 1, **columns}
    assert set(values) <= set(PIECE_COLUMNS)
    return [values.get(name, 0) for name in PIECE_COLUMNS]


def demand(
    ops: Rows, pieces: list[list[int]], legs: Sequence[tuple[int, ...]] = (), **info: Any
) -> SearchDemand:
    """A demand of the toy model."""
    facts = {
        "trace": "t", "episode": 0, "policy": "p", "budget": "1", "recall": "stage",
        "geometry": GEOMETRY.name, "kv_bytes_per_token": KV, **info,
    }  # fmt: skip
    padded = [(*op, 0, 0, 0)[:4] for op in ops]
    return SearchDemand(
        DemandInfo(**facts),
        np.array(padded, dtype=np.int64).reshape(-1, 4),
        np.array(pieces, dtype=np.int64).reshape(-1, len(PIECE_COLUMNS)),
        np.array(legs, dtype=np.int64).reshape(-1, len(LEG_COLUMNS)),
    )


def chain(prompt: int, generated: int, **info: Any) -> SearchDemand:
    """A prompt, and tokens that all stay in HBM."""
    first = (prompt + 1) * KV
    row = piece(
        generated, read_bytes=first, read_bytes_growth=KV, hbm_bytes=first, hbm_bytes_growth=KV,
        attended=UNITS * (prompt + 1), attended_growth=UNITS,
    )  # fmt: skip
    return demand([(Op.LEVEL, prompt * KV), (Op.PREFILL, prompt), (Op.DECODE, 0)], [row], **info)


def with_prefix(source: SearchDemand, tokens: int, key: str = "system") -> SearchDemand:
    """The first tokens of the prompt are shared under a key."""
    ops, pieces = source.ops.copy(), source.pieces.copy()
    ops[ops[:, 0] == Op.LEVEL, 2] = tokens * KV
    named = replace(source, ops=ops, pieces=pieces)
    named.column("prefix_bytes")[:] = tokens * KV
    return replace(named, info=replace(named.info, prefix=key, prefix_tokens=tokens))


def with_blocks(
    source: SearchDemand, blocks: Sequence[int], block_tokens: int, key: str = "log"
) -> SearchDemand:
    """The prompt is made of blocks, the last of which may be shorter."""
    tokens = min(len(blocks) * block_tokens, source.prompt_tokens)
    made = with_prefix(source, tokens, key) if tokens else source
    info = replace(made.info, prefix_blocks=tuple(blocks), prefix_block_tokens=block_tokens)
    return replace(made, info=info)


def random_demand(rng: np.random.Generator, key: str = "") -> SearchDemand:
    """Every kind of phase, in an order that a search could have."""
    shared = int(rng.integers(1, rng.choice([6, 24]))) if key else 0
    prompt = shared + int(rng.integers(1, 12))
    tokens, extra, ddr = prompt, 0, 0
    prefix = shared * KV
    ops: Rows = [(Op.LEVEL, tokens * KV, prefix, 0), (Op.PREFILL, prompt)]
    pieces: list[list[int]] = []
    legs: Rows = []
    chains = 0
    recall = str(rng.choice(["stage", "stream", "near", "ondemand"]))
    below = dict.fromkeys(NUMBERS, 0)  # tokens in memories below DDR
    for _ in range(int(rng.integers(1, 9))):
        what = int(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 8]))
        if what == 1:
            examined = int(rng.integers(1, 50))
            ops += [(Op.DECIDE, examined), (Op.TURN, examined % 4 + 1)]
        elif what == 2:
            ops.append((Op.RECOMPUTE, int(rng.integers(1, 9)), tokens))
        elif what == 3:
            ops.append((Op.COPY, int(rng.integers(1, 500))))
        elif what == 4 and tokens > shared + 2:
            moved = int(rng.integers(1, tokens - shared))
            tokens, ddr = tokens - moved, ddr + moved
            ops.append((Op.LEVEL, tokens * KV, prefix, ddr * KV))
            ops += [(Op.HOLD, moved * KV), (Op.SEND, chains)]
            legs.append((chains, 0, moved * KV, 0, -moved * KV))
            if rng.random() < 0.5:
                legs.append((chains, 1, moved * KV, moved * KV, 0))
                extra += moved
            chains += 1
        elif what == 5 and ddr:
            moved = int(rng.integers(1, ddr + 1))
            tokens, ddr = tokens + moved, ddr - moved
            ops.append((Op.LEVEL, tokens * KV, prefix, ddr * KV))
            ops.append((Op.SEND, chains))
            legs.append((chains, 1, moved * KV, 0, 0))
            ops.append((Op.WAIT, int(rng.choice([chains, -1]))))
            chains += 1
        elif what == 7 and tokens > shared + 2:
            memory, moved = int(rng.choice(NUMBERS)), int(rng.integers(1, tokens - shared))
            tokens, below[memory] = tokens - moved, below[memory] + moved
            ops += [
                (Op.LEVEL, tokens * KV, prefix, ddr * KV),
                (Op.STORE, memory, below[memory] * KV),
            ]
            ops += [(Op.HOLD, moved * KV), (Op.SEND, chains)]
            legs.append((chains, *Leg(False, moved * KV, 0, -moved * KV, memory).row))
            chains += 1
        elif what == 8 and any(below.values()):
            memory = int(rng.choice([number for number in NUMBERS if below[number]]))
            moved = int(rng.integers(1, below[memory] + 1))
            tokens, below[memory] = tokens + moved, below[memory] - moved
            ops += [
                (Op.LEVEL, tokens * KV, prefix, ddr * KV),
                (Op.STORE, memory, below[memory] * KV),
            ]
            ops += [(Op.SEND, chains), (Op.WAIT, int(rng.choice([chains, -1])))]
            legs.append((chains, *Leg(True, moved * KV, 0, 0, memory).row))
            chains += 1
        elif what == 6 and extra:
            ops += [(Op.BEGUN, chains - 1), (Op.HOLD, -extra * KV)]
            extra = 0
        steps, width = int(rng.integers(1, 30)), int(rng.integers(1, 4))
        grows = int(rng.integers(0, width + 1))
        first = (tokens + grows) * KV
        away = ddr * KV if rng.random() < 0.7 else 0
        row = piece(
            steps, sequences=width, read_bytes=first, read_bytes_growth=grows * KV,
            hbm_bytes=first, hbm_bytes_growth=grows * KV, prefix_bytes=prefix,
            attended=UNITS * tokens * width,
            attended_growth=UNITS * width * int(rng.integers(0, 2)),
            quantised_bytes=int(rng.integers(0, 2)) * 80, decided=int(rng.integers(0, 2)),
            examined=tokens, examined_growth=1, rows=UNITS * tokens, rows_growth=UNITS,
            streamed_bytes=away if recall in ("stream", "ondemand") else 0,
            remote_bytes=away if recall in ("near", "ondemand") else 0,
        )  # fmt: skip
        ops.append((Op.DECODE, len(pieces)))
        pieces.append(row)
        tokens += steps * grows
    fused = bool(rng.random() < 0.7)
    if fused:
        for row in pieces:
            for name in ("rows", "rows_growth"):
                row[PIECE_COLUMNS.index(name)] = 0
    assert len(FIXED) + 2 * len(LINEAR) + 1 == len(PIECE_COLUMNS)
    return demand(
        ops, pieces, legs, recall=recall, fused=fused, prefix=key, prefix_tokens=shared,
    )  # fmt: skip
