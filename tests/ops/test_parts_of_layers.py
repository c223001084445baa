"""Parts of recurrences and layers: some positions of an order, one text of a batch, groups of heads."""

from dataclasses import replace

import pytest
import torch
from refusals import refuses
from torch import Tensor
from ssmscope import ops
from ssmscope.core import paths
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path

BATCH, LENGTH, HEADS, WIDTH, STATE = 3, 9, 4, 2, 3


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def recurrence(g: torch.Generator) -> ops.Recurrence:
    b, c = (normal(g, BATCH, LENGTH, 2, STATE) for _ in range(2))
    log_a = -normal(g, BATCH, LENGTH, HEADS, 1).abs()
    return ops.Recurrence(normal(g, BATCH, LENGTH, HEADS, WIDTH), b, c, log_a=log_a, D=normal(g, HEADS, WIDTH))


def path(g: torch.Generator, name: str = "") -> Path:
    """Return a path in which every part that can depend on the text differs between texts."""
    channels = HEADS * WIDTH
    source = normal(g, BATCH, LENGTH, channels)
    return Path(
        recurrence=recurrence(g),
        input_map=InputMap(
            source=source, enter=lambda u, biased: u, kernel=normal(g, channels, 3), bias=normal(g, channels),
            tail=normal(g, BATCH, 2, channels), taps=torch.rand(BATCH, LENGTH, 3, generator=g) > 0.3,
            activation=normal(g, BATCH, LENGTH, channels),
        ),
        output_map=OutputMap(
            project=lambda y: y, gate=normal(g, BATCH, LENGTH, channels), scale=normal(g, BATCH, LENGTH)
        ),
        name=name,
        filter=normal(g, 2),
        filter_tail=normal(g, BATCH, 1, channels),
        initial=normal(g, BATCH, HEADS, WIDTH, STATE),
        weight=normal(g, BATCH, LENGTH, channels),
    )  # fmt: skip


@pytest.mark.parametrize("start, stop", [(0, 5), (3, 9), (2, 7), (4, None)])
@pytest.mark.parametrize("order", [list(range(LENGTH))[::-1], [4, 7, 0, 8, 2, 6, 1, 3, 5]], ids=["backwards", "mixed"])
def test_between_keeps_the_order_of_the_positions_that_stay(order, start, stop):
    r = replace(recurrence(torch.Generator().manual_seed(0)), order=torch.tensor(order))
    part = r.between(start, stop)
    last = LENGTH if stop is None else stop
    stays = [t for t in order if start <= t < last]
    assert part.order.tolist() == [t - start for t in stays]
    H = torch.zeros(BATCH, HEADS, WIDTH, STATE, dtype=torch.float64)
    y = torch.zeros(BATCH, last - start, HEADS, WIDTH, dtype=torch.float64)
    for t in stays:
        b, c = (term[:, t].repeat_interleave(HEADS // 2, dim=1) for term in (r.b, r.c))
        H = r.log_a[:, t, :, :, None].exp() * H + r.x[:, t, :, :, None] * b[:, :, None, :]
        y[:, t - start] = (H * c[:, :, None, :]).sum(-1) + r.D * r.x[:, t]
    found = ops.scan(part)
    torch.testing.assert_close(found.y, y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.state, H, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row, length", [(0, LENGTH), (1, 6), (2, 4)])
def test_the_path_of_a_text_has_nothing_of_another_text(row, length):
    whole = path(torch.Generator().manual_seed(1))
    own = whole.of_text(row, length)
    for level in ("ssm", "block"):
        sink = whole.sink(level)[row : row + 1, :length]
        torch.testing.assert_close(own.sink(level), sink, rtol=1e-9, atol=1e-12)
        for options in ({}, {"groups": HEADS}, {"absolute": True}, {"skip": False}):
            map_ = whole.attention(level, **options)[row : row + 1, :, :length, :length]
            torch.testing.assert_close(own.attention(level, **options), map_, rtol=1e-9, atol=1e-12)
    for biased in (False, True):  # tails, the state before the first position, taps, filter, gate and weight
        y, expected = (p.finish(p.read(p.input_map.values(p.input_map.source, biased), biased)) for p in (own, whole))
        torch.testing.assert_close(y, expected[row : row + 1, :length], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("level", ["ssm", "block"])
def test_what_is_read_of_the_first_states_by_two_paths(level, joined):
    """Their sum; of absolute values that of the sum, or where each has its own channels the sum of theirs."""
    g = torch.Generator().manual_seed(3)
    both = path(g, "first"), path(g, "second")
    bare = replace(both[0], initial=None)
    each = [p.sink(level) for p in both]
    for found, p in zip(each, both):
        y = ops.scan_reference(replace(p.recurrence, x=0 * p.recurrence.x), p.initial).y
        factor = p.weight if level == "ssm" else p.weight * p.output_map.gate * p.output_map.scale.unsqueeze(-1)
        torch.testing.assert_close(found, y * factor.view_as(y), rtol=1e-10, atol=1e-12)
    layer = LinearizedLayer(u=normal(g, BATCH, LENGTH, HEADS * WIDTH), paths=(*both, bare), joined=joined)
    absolute = sum(each).abs() if joined else sum(one.abs() for one in each)
    for groups in (1, 2):
        for options, total in (({}, sum(each)), ({"absolute": True}, absolute)):
            expected = total.unflatten(2, (groups, -1)).mean((3, 4)).mT
            torch.testing.assert_close(layer.sink(level, groups=groups, **options), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.sink(level, part="second"), each[1].mean((2, 3))[:, None], rtol=1e-10, atol=1e-12)
    assert replace(layer, paths=(bare,)).sink(level) is None


def test_parts_and_levels_of_a_layer():
    g = torch.Generator().manual_seed(4)
    one, two = path(g, "one"), path(g, "two")
    layer = LinearizedLayer(u=normal(g, BATCH, LENGTH, HEADS * WIDTH), paths=(two, one, replace(one, weight=None)))
    assert layer.parts == ("two", "one") and replace(layer, paths=(one, one)).parts == ()
    assert layer.chosen("ssm", None) == layer.paths and layer.chosen("block", "one") == layer.paths[1:]
    assert layer.channels == (HEADS, WIDTH)
    own = layer.of_text(1, 6)
    assert torch.equal(own.u, layer.u[1:2, :6]) and own.channels == layer.channels and own.parts == layer.parts
    refuses("no part 'tow'; the parts of this layer are 'two', 'one'", layer.chosen, "ssm", "tow")
    refuses("none: the layer is one", replace(layer, paths=(one,)).chosen, "ssm", "two")
    refuses("unknown level 'blocks'; allowed are 'ssm' and 'block'", layer.chosen, "blocks", None)


def test_what_the_output_gate_sees():
    """Less its mean over a head or all channels where the norm is centred, times the norm's factor, plus its shift."""
    g = torch.Generator().manual_seed(5)
    p, y = path(g), normal(g, BATCH, LENGTH, HEADS * WIDTH)
    factor, shift = normal(g, BATCH, LENGTH, HEADS * WIDTH), normal(g, HEADS * WIDTH)
    middle = (y.unflatten(2, (HEADS, WIDTH)) - y.unflatten(2, (HEADS, WIDTH)).mean(-1, keepdim=True)).flatten(2)
    for centred, own in ((None, y), (WIDTH, middle), (HEADS * WIDTH, y - y.mean(-1, keepdim=True))):
        for options, expected in (
            ({}, own),
            ({"factor": factor}, own * factor),
            ({"shift": shift}, own + shift),
            ({"factor": factor, "shift": shift}, own * factor + shift),
        ):
            output_map = replace(p.output_map, centred=centred, **options)
            torch.testing.assert_close(replace(p, output_map=output_map).shown(y), expected)
        gate = replace(p.output_map, centred=centred)
        torch.testing.assert_close(replace(p, output_map=gate).finish(y), own * gate.gate)


@pytest.mark.parametrize("cells", [2, 4])
@pytest.mark.parametrize("level", ["ssm", "block"])
def test_pooled_maps_made_of_some_heads_at_a_time(level, cells, monkeypatch):
    p = path(torch.Generator().manual_seed(6))
    for groups in (1, 2, HEADS):
        exact = p.attention(level, groups=groups, skip=True)
        edge = [i * LENGTH // cells for i in range(cells + 1)]
        past = torch.ones(LENGTH, LENGTH).tril()
        for numbers in (2**24, 1):
            monkeypatch.setattr(paths, "MAX_TAP_NUMBERS", numbers)
            found = p.pooled_attention(level, cells, groups=groups)
            for t in range(cells):
                for s in range(t + 1):
                    cell = (..., slice(edge[t], edge[t + 1]), slice(edge[s], edge[s + 1]))
                    mean = exact[cell].sum((-2, -1)) / past[cell].sum()
                    torch.testing.assert_close(found[..., t, s], mean, rtol=1e-9, atol=1e-12)


def by_columns(p: Path, level: str, skip: bool) -> Tensor:
    """Return every channel's matrix, (batch, channels, length, length), from the output of a 1 at one position."""
    columns = []
    if not skip:
        p = replace(p, recurrence=replace(p.recurrence, D=None))
    for s in range(LENGTH):
        one = torch.zeros_like(p.input_map.source)
        one[:, s] = 1
        y = p.read(one if level == "ssm" else p.input_map.values(one, False), False)
        columns.append(y if level == "ssm" else p.finish(y) * p.output_map.scale.unsqueeze(-1))
    return torch.stack(columns, dim=-1).transpose(1, 2)


@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("level", ["ssm", "block"])
def test_absolute_maps_of_joined_paths_are_of_their_sum_in_every_group(level, skip, groups):
    """Channels of opposite sign on two paths cancel before the absolute value; every group has its own heads."""
    g = torch.Generator().manual_seed(2)
    paths = (path(g, "first"), path(g, "second"))
    layer = LinearizedLayer(u=normal(g, BATCH, LENGTH, HEADS * WIDTH), paths=paths)
    total = sum(by_columns(p, level, skip) for p in paths).abs()
    expected = total.unflatten(1, (groups, -1)).mean(2)
    found = layer.attention(level, groups=groups, absolute=True, skip=skip)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    rows = [7, 0, 3]
    chosen = layer.attention(level, groups=groups, absolute=True, skip=skip, rows=rows)
    torch.testing.assert_close(chosen, expected[:, :, rows], rtol=1e-9, atol=1e-12)
    apart = replace(layer, joined=False).attention(level, groups=groups, absolute=True, skip=skip)
    each = sum(by_columns(p, level, skip).abs() for p in paths).unflatten(1, (groups, -1)).mean(2)
    torch.testing.assert_close(apart, each, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("groups", [0, 3, 5])
@pytest.mark.parametrize("joined", [False, True])
def test_groups_that_do_not_divide_the_heads_of_a_layer(joined, groups):
    g = torch.Generator().manual_seed(2)
    paths = (path(g, "first"), path(g, "second"))
    layer = LinearizedLayer(u=normal(g, BATCH, LENGTH, HEADS * WIDTH), paths=paths, joined=joined)
    for part in (None, "second"):
        for absolute in (False, True):
            with pytest.raises(ValueError, match=f"{groups} groups do not divide 4 heads"):
                layer.attention(groups=groups, absolute=absolute, part=part)
