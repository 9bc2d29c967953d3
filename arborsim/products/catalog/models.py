"""`arborsim models`: list the models, or explain the bytes of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from arborsim.products.declare import Option, Positive
from arborsim.products.options import Json, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from arborsim.core.geometry import Geometry
    from arborsim.machine.machine import KvRoom
    from arborsim.machine.profile import HardwareProfile


def models(
    name: Annotated[str, Option(complete="model")] = "",
    *,
    gpu: Annotated[str, Option(complete="gpu")] = "h100",
    kv_dtype: Annotated[str, Option(shown="the model's")] = "",
    weights: Annotated[str, Option(shown="the model's")] = "",
    prefill_tokens: Positive = 8192,
    json: Json = False,
) -> None:
    """List the models, or explain one: bytes of a token, weights, and what a GPU has room for.

    Parameters
    ----------
    name
        One model, in detail: a name or a config.json.
    gpu
        GPU to count tokens on: a name or TOML file.
    kv_dtype
        Type of the cache: fp8, bf16, ...
    weights
        Type of the weights: fp8, int4, ...
    prefill_tokens
        Prompt tokens of the largest pass: its workspace.
    json
        Print JSON instead of tables.
    """
    from arborsim.machine.config import with_types
    from arborsim.machine.lookup import geometry_names, load_geometry, load_profile
    from arborsim.machine.machine import kv_room
    from arborsim.report.table import terminal

    profile, console = load_profile(gpu), terminal()
    found = [load_geometry(one) for one in ([name] if name else geometry_names())]
    found = [with_types(each, weights, kv_dtype) for each in found]
    rooms = [(each, kv_room(profile, each, pass_tokens=prefill_tokens)) for each in found]
    if json:
        documents = [_document(geometry, profile, pool) for geometry, pool in rooms]
        print_json(documents[0] if name else documents)
    elif name:
        _explain(console, *rooms[0], profile, prefill_tokens)
    else:
        _list(console, rooms, profile, prefill_tokens)


def _document(geometry: Geometry, profile: HardwareProfile, pool: KvRoom) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(geometry),
        "active_parameters": geometry.active_parameters,
        "weight_bytes": geometry.weight_bytes,
        "expert_bytes": geometry.expert_bytes,
        "kv_bytes_per_token": geometry.kv_bytes_per_token,
        "kv_bytes_per_token_beyond_the_window": geometry.full_bytes_per_token,
        "gpu": profile.name,
        "pool": {
            **asdict(pool),
            "pool_bytes": pool.pool_bytes,
            "tokens": None if pool.unbounded else pool.tokens,
        },
    }


def _list(
    console: Console, rooms: list[tuple[Geometry, KvRoom]], profile: HardwareProfile, together: int
) -> None:
    from arborsim.report.table import print_list

    rows = []
    for each, pool in rooms:
        sizes = f"{each.parameters / 1e9:.2f}", f"{each.weight_bytes / 1e9:.2f}", str(each.layers)
        cache = f"{each.kv_bytes_per_token:,}", _form(each), _tokens(pool)
        rows.append([each.name, *sizes, *cache])
    heads = ["model", "weights\n1e9", "their\nGB", "layers", "KV B/\ntoken", "cache"]
    heads.append(f"tokens\non {profile.name}")
    print_list(console, heads, rows)
    for note in (
        "",
        f"tokens: of one sequence, in {1 - profile.reserve_share:.0%} of the memory less weights, "
        f"context and the workspace of a pass over {together:,} prompt tokens; 0: does not fit.",
        "`arborsim models NAME` explains one, `--gpu` counts on another; NAME can also be the "
        "path of a config.json.",
    ):
        console.print(note, style="dim", markup=False)


def _form(geometry: Geometry) -> str:
    if geometry.latent_dim:
        return "latent"
    if geometry.window_layers:
        return f"window {geometry.window:,} in {geometry.window_layers}"
    return f"{geometry.kv_heads} of {geometry.heads} heads"


def _tokens(pool: KvRoom) -> str:
    return "any number" if pool.unbounded else f"{pool.tokens:,}"


def _explain(
    console: Console, geometry: Geometry, pool: KvRoom, profile: HardwareProfile, together: int
) -> None:
    from rich.text import Text

    from arborsim.report.table import grid

    console.print(Text(geometry.name, style="bold"))
    for text in (*_weights(geometry), *_per_token(geometry), ""):
        console.print(Text(text))
    console.print(Text(f"Room for the cache on {profile.name}", style="bold"))
    share = profile.reserve_share
    workspace = (
        f"activations of one layer in a pass over {together:,} prompt tokens (--prefill-tokens); "
        "`arborsim plan` takes the longest pass of its mix"
    )
    context = (
        "of driver and libraries: 0.15 GiB (BLIS, read 2026-11); `arborsim plan` does not take it "
        "off"
    )
    parts = (
        ("memory", pool.hbm_bytes, ""),
        ("- reserve", pool.reserve_bytes, f"{share:.0%}: {profile.source('reserve_share')}"),
        ("- weights", pool.weight_bytes, ""),
        ("- workspace", pool.activation_bytes, workspace),
        ("- context", pool.context_bytes, context),
        ("= pool", pool.pool_bytes, "" if pool.pool_bytes > 0 else "the model does not fit"),
    )
    rows = [[name, f"{size / 1e9:,.2f} GB", why] for name, size, why in parts]
    rows.append(["tokens", _tokens(pool), "of one sequence"])
    console.print(grid(rows, right={1}, dim={2}))


def _weights(geometry: Geometry) -> list[str]:
    """How many weights there are, and the bytes of each kind."""
    g, width = geometry, geometry.weight_bytes_per_element
    active = (
        f"; a token uses {g.active_parameters / 1e9:.2f}e9 of them "
        f"({g.experts_per_token} of {g.experts} experts)"
        if g.experts
        else ""
    )
    if not g.expert_type:
        return [f"{g.parameters:,} weights x {width} B = {g.weight_bytes / 1e9:.2f} GB{active}"]
    parts = []
    if g.experts:
        parts.append((g.expert_parameters, g.expert_bytes, "in experts", g.expert_type))
    if g.weights:
        where = "in other matrices of the layers" if g.experts else "in matrices of the layers"
        parts.append((g.layer_matrices, g.layer_matrix_bytes, where, g.weights))
    rest = g.parameters - sum(count for count, *_ in parts)
    size = g.weight_bytes - sum(size for _, size, *_ in parts)
    return [
        f"{g.parameters:,} weights, {g.weight_bytes / 1e9:.2f} GB{active}:",
        *(
            f"  {count:,} {where} x {_bits(kind)} = {size / 1e9:.2f} GB"
            for count, size, where, kind in parts
        ),
        f"  {rest:,} not quantised x {width} B = {size / 1e9:.2f} GB",
    ]


def _bits(kind: str) -> str:
    from arborsim.core.geometry import WEIGHT_BITS

    return f"{WEIGHT_BITS[kind]:.4g} bits ({kind}, scales included)"


def _per_token(geometry: Geometry) -> list[str]:
    """How the bytes of a token are computed."""
    g, width = geometry, geometry.kv_bytes_per_element
    if g.latent_dim:
        shape = f"({g.latent_dim} latent + {g.rope_dim} rotary)"
    else:
        shape = f"2 (K, V) x {g.kv_heads} KV heads x {g.head_dim}"
    if not g.window_layers:
        return [f"{g.layers} layers x {shape} x {width} B = {g.kv_bytes_per_token:,} B per token"]
    return [
        f"{shape} x {width} B = {g.layer_bytes_per_token:,} B per token and layer",
        f"{g.full_layers} layers keep every token: {g.full_bytes_per_token:,} B per token",
        f"{g.window_layers} layers keep the newest {g.window:,}: {g.window_bytes_per_token:,} B "
        f"per token of these, {g.window_bytes_per_token * g.window / 1e6:,.1f} MB per sequence",
    ]
