"""The start of a pool that all sequences read, by flash-attn; the rest by the other kernels."""

import importlib.util
import inspect
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim_torch.cache import pieces as tables
from arborsim_torch.cache import prefix
from arborsim_torch.cache.prefix import SharedPrefix
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.kernels import fused, packages
from arborsim_torch.kernels.fused import Choice, choose_decode
from arborsim_torch.kernels.piece import Piece
from arborsim_torch.kernels.pieces import attend_pieces
from arborsim_torch.tiers.codec import Fp8, Plain

from . import flash_attention
from .oracle_attention import assert_near, literal, numbers
from .pretended.arming import pretend
from .tiny import tiny_model

SCALE, CAPACITY, DIM = 0.3, 48, 16


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attention)
    # Not the package's: rounding would hide errors.
    monkeypatch.setattr(flash_attention, "TYPES", (torch.float32, torch.bfloat16))


def test_the_stand_in_has_the_published_signature():
    assert str(inspect.signature(flash_attention.flash_attn_with_kvcache)) == (
        flash_attention.PUBLISHED
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_package_has_the_published_signature(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn")
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    real = inspect.signature(importlib.import_module("flash_attn").flash_attn_with_kvcache)
    ours = inspect.signature(flash_attention.flash_attn_with_kvcache)
    assert {n: p.default for n, p in real.parameters.items()} == {
        n: p.default for n, p in ours.parameters.items()
    }


def plain_piece(seed, dtype=torch.float32):
    """Slots of a pool as it stores them: keys and values of each head one after the other."""
    keys, values = numbers(seed, 2, 2, CAPACITY, DIM, dtype=dtype)
    return Piece(keys, values, Plain(dtype), None, None, None, CAPACITY)


def as_prefix(read, piece):
    """A piece of which bool ``[seqs, slots]`` is read, as tables make it of a pool."""
    shared = SharedPrefix(torch.device("cpu"))
    slot = np.flatnonzero(read.any(0))
    shared.reset(slot, read[:, slot], len(read))
    mask = torch.from_numpy(read)[:, None]
    assert shared.length == (CAPACITY if read.all() else int(np.argmin(read.all(0))))
    return shared.of(Piece(**{**vars(piece), "mask": mask}))


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("rest", ["none", "branches", "gaps"])
def test_prefix_rest_and_other_pieces_are_attention_over_all(seqs, rest, other):
    rng = np.random.default_rng(seqs)
    read = np.ones((seqs, CAPACITY), dtype=bool)
    if rest != "none":
        read[:, 20:] = rng.random((seqs, CAPACITY - 20)) < 0.4
        read[:, 20 if rest == "gaps" else 40] = False
    piece = as_prefix(read, plain_piece(1))
    before = flash_attention.calls[0]
    q, pieces, masks = numbers(0, seqs, 6, DIM), [piece], [read]
    keys, values = [piece.keys], [piece.values]
    if other:  # in 8 bits
        exact = numbers(5, 2, 2, 9, DIM)
        data, scale = Fp8().encode(exact[None])
        assert scale is not None
        decoded = Fp8().decode(data, scale, torch.float32)[0]
        pieces.append(Piece(data[0, 0], data[0, 1], Fp8(), scale[0, 0, ..., 0],
                            scale[0, 1, ..., 0], None, 9))  # fmt: skip
        keys.append(decoded[0])
        values.append(decoded[1])
        masks.append(np.ones((seqs, 9), dtype=bool))
    mask = torch.from_numpy(np.concatenate(masks, axis=1))[:, None, None].expand(-1, 2, 1, -1)
    wanted = literal(q[:, :, None], torch.cat(keys, 1), torch.cat(values, 1), SCALE, mask)
    out, lse, mass = attend_pieces(q, pieces, SCALE)
    assert mass is None
    assert flash_attention.calls[0] == before + 1
    assert_near(out, wanted[0][:, :, 0], atol=1e-5)
    assert_near(lse, wanted[1][:, :, 0], atol=1e-5)
    # flash-attn gives no weights: where these are wanted, it has no part.
    again, _, mass = attend_pieces(q, pieces, SCALE, mass=True)
    assert flash_attention.calls[0] == before + 1
    assert mass is not None
    assert_near(again, wanted[0][:, :, 0], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_prefix_follows_every_change(data):
    """Against the sets of slots themselves."""
    slots, seqs = 24, data.draw(st.integers(1, 3))
    rows = seqs + data.draw(st.integers(0, 1))  # the last may be padding, which reads nothing
    read = {}
    shared = SharedPrefix(torch.device("cpu"))
    shared.reset(np.empty(0, dtype=np.int64), np.zeros((rows, 0), dtype=bool), seqs)
    for _ in range(data.draw(st.integers(1, 8))):
        left = data.draw(st.lists(st.sampled_from(sorted(read)), unique=True)) if read else []
        free = [slot for slot in range(slots) if slot not in read or slot in left]
        come = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        paths = np.zeros((rows, len(come)), dtype=bool)
        for column in range(len(come)):
            reader = data.draw(st.integers(-1, seqs - 1))
            paths[:seqs] |= (np.arange(len(come)) == column) & (
                (np.arange(seqs)[:, None] == reader) | (reader < 0)
            )
        shared.change(np.array(left, dtype=np.int64), np.array(come, dtype=np.int64), paths)
        for slot in left:
            del read[slot]
        read |= dict(zip(come, paths.T, strict=True))
        length = next(s for s in range(slots + 1) if s not in read or not read[s][:seqs].all())
        assert shared.length == length
        known = shared.of(plain_piece(1)).prefix
        assert known is not None
        assert known.length.tolist() == [length]
        beyond = sorted(slot for slot in read if slot >= length)
        if not beyond:
            assert known.rest is None
            continue
        assert known.rest is not None
        assert known.rest.index is not None
        assert known.rest.mask is not None
        index, mask = known.rest.index.tolist(), known.rest.mask[:, 0].numpy()
        assert index == beyond + [-1] * (known.rest.room - len(beyond))
        np.testing.assert_array_equal(
            mask[:, : len(beyond)], np.stack([read[s] for s in beyond], 1)
        )


@pytest.mark.parametrize(
    ("dtype", "dim", "installed", "wanted"),
    [
        (torch.bfloat16, 128, ("triton", "flash-attn"), "flash-attn"),
        (torch.bfloat16, 128, ("triton", "flash-attn", "flash-attn-3"), "flash-attn-3"),
        (torch.bfloat16, 128, ("triton", "flash-attn-4"), "triton"),
        (torch.bfloat16, 128, ("triton",), "triton"),
        (torch.bfloat16, 100, ("triton", "flash-attn"), "triton"),
        (torch.float32, 128, ("triton", "flash-attn"), "triton"),
        (torch.bfloat16, 128, ("flash-attn",), "torch"),
        (torch.float64, 128, ("triton", "flash-attn"), "torch"),
    ],
)
def test_what_decode_steps_read_prefixes_with(monkeypatch, dtype, dim, installed, wanted):
    monkeypatch.setattr(fused, "_importable", installed.__contains__)
    monkeypatch.setattr(packages, "why_not", refusing_all_but(*installed))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert choose_decode(torch.device("cuda"), dtype, dim).name == wanted
    assert choose_decode(torch.device("cpu"), dtype, dim).name == "torch"


def refusing_all_but(*names):
    """`packages.why_not` where these work, as far as they offer what is asked for."""

    def why_not(name, what, *_):
        return "" if name in names and getattr(packages.PACKAGES[name], what) else "not installed"

    return why_not


@contextmanager
def installed(monkeypatch, found):
    """A package decodes, or none; short prefixes count as long."""
    choice = Choice(found or "triton", "a test wants it")
    with monkeypatch.context() as patch:
        patch.setattr(prefix, "_LEAST", 8)
        patch.setattr(tables, "choose_decode", lambda *_: choice)
        patch.setattr(packages, "why_not", refusing_all_but())  # for prompts
        yield


def decoded(device):
    """Logits of a tree: a prompt, three branches, one of them given up, two children."""
    model = tiny_model().to(device)
    decoder, found = TreeDecoder(model), []
    decoder.prefill(list(range(1, 41)))

    def steps(count, leaves):
        for i in range(count):
            found.append(decoder.step([3 + i + leaf for leaf in leaves]).float().cpu())

    for node in (1, 2, 3):
        decoder.open(node, 0)
    decoder.activate([1, 2, 3])
    steps(5, (1, 2, 3))
    decoder.drop(2)
    for node in (4, 5):
        decoder.open(node, 3)
    decoder.activate([4, 5])
    steps(5, (4, 5))
    decoder.activate([4])
    steps(4, (4,))
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("name", packages.DECODERS)
def test_a_trees_steps_read_their_prefix_with_flash_attn(monkeypatch, name):
    """On the pretended device, graphs included: as without, and without waits of its own."""
    outputs, waits, count = [], [], []
    for module in ("flash_attn", "flash_attn_interface"):
        used = module == packages.PACKAGES[name].module
        monkeypatch.setitem(sys.modules, module, flash_attention if used else None)
    for found in ("", name):
        before = flash_attention.calls[0]
        with installed(monkeypatch, found), pretend() as gpu:
            outputs.append(decoded("cuda"))
            waits.append(gpu.waits.total())
        count.append(flash_attention.calls[0] - before)
    assert count[0] == 0
    assert count[1] > 0
    assert waits[0] == waits[1]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
