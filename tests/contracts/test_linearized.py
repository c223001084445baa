"""Every layer is a linear map with its gates frozen: matrix @ input + bias is the layer's own output."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from examples import matrices, multiplied, own_output, relative
from exhaustive import ALL, half
from loud import TrueFloat64, doubled
from torch import nn
from ssmscope.core.linearized import LinearizedLayer, Path
from ssmscope.core.mixers import adapter_for, is_bidirectional, mixers
from ssmscope.core.trace import LayerTrace

LENGTH = 9


def runs(module: nn.Module, length: int = LENGTH) -> Iterator[tuple[nn.Module, torch.Tensor, torch.Tensor, LayerTrace]]:
    """Each mixer in float64 with a random input, its own output, and its terms."""
    module = doubled(module)
    torch.manual_seed(1)
    for mixer in mixers(module):
        modules = 1 + len(getattr(mixer, "before", ()))  # a GroupMamba's reads the inputs of its group
        u = torch.randn(2, length, modules * module.config.hidden_size, dtype=torch.float64)
        with torch.no_grad(), TrueFloat64():
            own = own_output(mixer, u)
            layer = adapter_for(mixer).compute_terms(mixer, u)
        yield mixer, u, own, layer


def blocks(module: nn.Module) -> Iterator[tuple[torch.Tensor, LinearizedLayer]]:
    """Every mixer's own output and its block."""
    for mixer, _, own, layer in runs(module):
        with torch.no_grad(), TrueFloat64():
            block = adapter_for(mixer).linearized(mixer, layer)
        with torch.no_grad():
            yield own, block


def both(path: Path, level: str, skip: bool = True) -> torch.Tensor:
    """Return `multiplied`, after checking that the first and every third channel of a head have these matrices."""
    found = multiplied(path, level, skip)
    some = found.unflatten(1, path.recurrence.shape[2:4])[:, :, ::3].flatten(1, 2)
    torch.testing.assert_close(some, matrices(path, level, skip, every=3), rtol=1e-9, atol=1e-12)
    return found


def centred(path: Path, source: torch.Tensor) -> torch.Tensor:
    if not path.output_map.centred:
        return source
    by_head = source.unflatten(-1, path.recurrence.shape[2:4])
    return (by_head - by_head.mean(-1, keepdim=True)).flatten(-2)


def times(matrix: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bcts,bsc->btc", matrix, source)


def by_matrices(block: LinearizedLayer) -> torch.Tensor:
    """The layer's output by the block-level matrices of its channels, and its bias."""
    total = block.bias
    for path in block.paths:
        source = centred(path, path.input_map.enter(block.u, False))
        total = total + path.output_map.project(times(both(path, "block"), source))
        both(path, "block", skip=False)
    return total


def test_the_map_of_its_own_input_is_the_layers_output(module):
    for own, block in blocks(module):
        assert relative(block.matvec(block.u) + block.bias, own) < 1e-9


def test_block_level_matrices_give_the_layers_output(module):
    for own, block in blocks(module):
        assert relative(by_matrices(block), own) < 1e-9


def test_ssm_level_matrices_give_the_layers_output(module):
    for own, block in blocks(module):
        total = torch.zeros_like(own) if block.rest is None else block.rest
        for path in block.paths:
            values = path.input_map.values(path.input_map.source, biased=True)
            y = times(both(path, "ssm"), values)
            if (sink := path.sink("ssm")) is not None:
                y = y + sink.flatten(2)
            total = total + path.finish(y)
        assert relative(total, own) < 1e-9


def test_the_source_is_what_enters(module):
    for _, block in blocks(module):
        for path in block.paths:
            assert relative(path.input_map.enter(block.u, True), path.input_map.source) < 1e-12
            if path.filter is None:
                values = path.input_map.values(path.input_map.source, biased=True)
                assert relative(values, path.recurrence.x.flatten(2)) < 1e-12


def test_the_transposed_map_is_the_maps_transpose(module):
    for own, block in blocks(module):
        v, w = torch.randn_like(block.u), torch.randn_like(own)
        forward, backward = (w * block.matvec(v)).sum(), (block.vecmat(w) * v).sum()
        assert abs(forward - backward) < 1e-9 * abs(forward)


def test_the_map_is_linear_and_causal(module):
    for _, block in blocks(module):
        v, w = torch.randn_like(block.u), torch.randn_like(block.u)
        assert relative(block.matvec(2 * v - w), 2 * block.matvec(v) - block.matvec(w)) < 1e-9
        later = v.clone()
        later[:, 6:] = 0
        found, plain = block.matvec(later)[:, :6], block.matvec(v)[:, :6]
        assert torch.allclose(found, plain, rtol=1e-9, atol=1e-12) != is_bidirectional(module)


def test_the_mean_is_that_of_the_channels(module, request):
    for _, block in blocks(module) if ALL else islice(blocks(module), 1):
        heads, _ = block.channels
        for level in half(("ssm", "block"), request.node.name):
            each = []
            for path in block.paths:
                found = multiplied(path, level)
                if level == "block" and path.output_map.scale is not None:
                    behind = torch.as_tensor(path.output_map.scale, dtype=torch.float64).expand(2, LENGTH)
                    found = found * behind[:, None, :, None]
                each.append(found)
            total = sum(each)
            by_head = total.unflatten(1, (heads, -1)).mean(2)
            close = dict(rtol=1e-9, atol=1e-12)
            mean, absolute = block.attention(level), block.attention(level, absolute=True)
            torch.testing.assert_close(mean, total.mean(1, keepdim=True), **close)
            torch.testing.assert_close(block.attention(level, groups=heads), by_head, **close)
            expected = total.abs() if block.joined else sum(one.abs() for one in each)
            torch.testing.assert_close(absolute, expected.mean(1, keepdim=True), **close)
            rows = [0, LENGTH - 1]
            torch.testing.assert_close(block.attention(level, rows=rows), mean[:, :, rows], **close)
            torch.testing.assert_close(block.attention(level, rows=rows, absolute=True), absolute[:, :, rows], **close)
            if all(path.recurrence.order is None for path in block.paths):
                torch.testing.assert_close(block.pooled_attention(level, LENGTH), mean, **close)


def test_the_sink_is_what_comes_from_the_states_before(module):
    """The block's bias with these states and without them differ by the sink, projected."""
    for _, block in blocks(module):
        heads, _ = block.channels
        nothing = torch.zeros_like(block.u)
        for level in ("ssm", "block"):
            each = [path.sink(level).flatten(2) for path in block.paths if path.initial is not None]
            if not each:
                assert block.sink(level) is None and block.sink(level, absolute=True) is None
                continue
            by_head = sum(each).unflatten(2, (heads, -1)).mean(3).mT
            sizes = sum(each).abs() if block.joined else sum(one.abs() for one in each)
            close = dict(rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(block.sink(level), sum(each).mean(2)[:, None], **close)
            torch.testing.assert_close(block.sink(level, groups=heads), by_head, **close)
            torch.testing.assert_close(block.sink(level, absolute=True), sizes.mean(2)[:, None], **close)
        for path in (each for each in block.paths if each.initial is not None):
            within = replace(path, output_map=replace(path.output_map, scale=None))
            of_states = path.forward(nothing, True) - replace(path, initial=None).forward(nothing, True)
            if not path.output_map.centred:
                assert relative(path.output_map.project(within.sink("block").flatten(2)), of_states) < 1e-9


def test_parts_sum_to_the_whole(module):
    for _, block in blocks(module):
        if block.parts:
            each = [block.attention(part=part) for part in block.parts]
            torch.testing.assert_close(sum(each), block.attention(), rtol=1e-9, atol=1e-12)


def test_contributions_sum_to_what_the_gradient_sees(module):
    for own, block in blocks(module):
        gradient = torch.randn_like(own)
        weighed = block.contributions(gradient)
        channels = block.channels[0] * block.channels[1]
        found = weighed.attention().sum((1, 2, 3)) * channels
        linear = block.matvec(block.u)
        if any(path.input_map.enter(torch.zeros_like(block.u), True).any() for path in block.paths):
            constant = sum(
                path.finish(
                    path.read(
                        path.input_map.values(path.input_map.enter(torch.zeros_like(block.u), True), False), False
                    )
                )
                for path in block.paths
            )
            linear = linear + constant
        torch.testing.assert_close(found, (gradient * linear).sum((1, 2)), rtol=1e-8, atol=1e-8)


def test_one_text_of_a_batch(module):
    """A padded text's map is that of the text alone."""
    module = module.double()
    (mixer, *_), width = mixers(module), module.config.hidden_size
    u = torch.randn(2, LENGTH, width, dtype=torch.float64)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 7:] = False
    with torch.no_grad(), TrueFloat64():
        together = adapter_for(mixer).linearized(mixer, adapter_for(mixer).compute_terms(mixer, u, mask)).of_text(1, 7)
        alone = adapter_for(mixer).linearized(mixer, adapter_for(mixer).compute_terms(mixer, u[1:, :7]))
    for level in ("ssm", "block"):
        torch.testing.assert_close(together.attention(level), alone.attention(level), rtol=1e-9, atol=1e-12)
        sinks = together.sink(level), alone.sink(level)
        assert (sinks[0] is None) == (sinks[1] is None)
        if sinks[0] is not None:
            torch.testing.assert_close(sinks[0], sinks[1], rtol=1e-9, atol=1e-12)
