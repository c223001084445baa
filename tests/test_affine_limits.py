"""Linear maps, convolutions and norms that are almost what they say, and how far from it they may be."""

import pytest
import torch
from linear_layers import EXACT, Bent, Scaled, conv, linear
from refusals import refusal, refuses
from torch import Tensor, nn
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm
from ssmscope.core import affine


def test_a_constant_with_some_zeros_is_kept():
    """The constant is a linear layer's, a convolution's or a norm's, also of a norm that has none of its own."""
    layer, convolution, norm = linear(), conv(3, True), nn.LayerNorm(6)
    with torch.no_grad():
        for module in (layer, convolution, norm):
            module.bias.copy_(torch.arange(-1.0, module.bias.numel() - 1))
    for module in (layer, convolution, norm):
        module.register_forward_hook(lambda module, args, y: 2 * y)
    found = affine.offset(layer), affine.depthwise(convolution, 6, 4)[1], affine.norm_terms(norm, nn.LayerNorm).bias
    for constant, module in zip(found, (layer, convolution, norm)):
        torch.testing.assert_close(constant, 2 * module.bias, rtol=1e-6, atol=1e-6)
    own = nn.RMSNorm(7)
    own.register_forward_hook(lambda module, args, y: y + (torch.arange(7) == 3))
    torch.testing.assert_close(affine.norm_terms(own, nn.RMSNorm).bias, torch.eye(7)[3])
    assert affine.norm_terms(nn.RMSNorm(7), nn.RMSNorm).bias is None


def test_a_bend_at_zero_is_seen_without_a_bias():
    module = linear(Bent, bias=False)
    refuses("no linear map of its input", affine.offset, module)


@pytest.mark.parametrize("read", [affine.offset, affine.linear_map, affine.matrix])
def test_a_constant_that_differs_between_positions_or_rows_is_seen(read):
    by_place, by_row = lambda y: torch.arange(y.shape[1])[:, None], lambda y: torch.arange(len(y))[:, None, None]
    for more in (by_place, by_row):
        module = linear()
        module.register_forward_hook(lambda module, args, y, more=more: y + more(y))
        refuses("no linear map of every position", read, module)


def test_a_layer_declares_both_its_widths():
    class Half(nn.Module):
        in_features = 5

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert affine.is_linear(linear()) and not affine.is_linear(Half()) and not affine.is_linear(nn.Identity())
    refuses("give it in_features", affine.offset, Half())


def test_a_plain_module_is_one_of_the_kinds_without_hooks_or_another_forward():
    class Called(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    own = linear()
    own.forward = own.forward.__get__(own)
    hooked = linear()
    hooked.register_forward_pre_hook(lambda module, args: None)
    assert affine.is_plain(linear(), nn.Linear) and affine.is_plain(linear(), (nn.Conv1d, nn.Linear))
    assert not affine.is_plain(linear(), (nn.Conv1d, nn.LayerNorm)) and not affine.is_plain(linear(Called), nn.Linear)
    assert not affine.is_plain(linear(Scaled), nn.Linear) and not affine.is_plain(hooked, nn.Linear)
    own.forward = lambda x: x
    assert not affine.is_plain(own, nn.Linear)


def test_rounding_that_is_allowed_in_every_precision():
    """Four units of the last place in half precision; 64 in single, or what lowered products leave."""
    half, single, double = (torch.finfo(dtype).eps for dtype in (torch.float16, torch.float32, torch.float64))
    expected = {
        torch.float16: 4 * half,
        torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
        torch.float64: 64 * double,
    }
    for dtype, allowed in expected.items():
        assert affine.rounding(torch.ones(1, dtype=dtype)) == allowed
    before = torch.get_float32_matmul_precision()
    try:
        for precision, allowed in (("highest", 64 * single), ("high", 4 / 1024), ("medium", 4 / 128)):
            torch.set_float32_matmul_precision(precision)
            assert affine.rounding(torch.ones(1)) == allowed
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_distance_is_that_of_the_largest_number():
    found, expected = torch.tensor([3.0, -4.0, 1.0]), torch.tensor([3.5, -8.0, 1.0])
    assert affine._apart(found, expected) == affine._apart(expected, found) == 0.5
    assert affine._apart(0 * found, 0 * found) == 0.0 and affine._apart(0 * found, found) == 1.0
    assert affine._apart(found.half(), expected.half()) == 0.5


@pytest.mark.parametrize("padding", [1, 2])
def test_a_convolution_of_any_padding_is_read(padding):
    module = conv(padding, True)
    module.register_forward_hook(lambda module, args, y: 2 * y)
    weight, bias = affine.depthwise(module, 6, 4)
    torch.testing.assert_close(weight, 2 * module.weight, **EXACT)
    torch.testing.assert_close(bias, 2 * module.bias, **EXACT)


@pytest.mark.parametrize("change", [
    lambda y: y[..., :-1],  # neither as long on both sides
    lambda y: y[..., :2],  # shorter than its taps
    lambda y: torch.cat([y, y], dim=1),
    lambda y: torch.cat([y, y], dim=0),
    lambda y: y[:, :5],
], ids=["odd", "short", "more channels", "more rows", "fewer channels"])  # fmt: skip
def test_what_has_another_shape_is_no_convolution_of_every_channel(change):
    module = conv(2, False)
    module.register_forward_hook(lambda module, args, y: change(y))
    refuses("is no convolution of every channel, and cannot be read", affine.depthwise, module, 6, 4)


def test_a_convolution_that_is_hooked_agrees_with_its_weight_in_any_form():
    for options in (dict(groups=2, padding=2), dict(stride=2, dilation=2), dict(padding=1, bias=False)):
        module = nn.Conv1d(4, 8, 3, **options)
        handle = module.register_forward_hook(lambda *_: None)
        assert affine.agrees_with_weight(module)
        handle.remove()
        module.register_forward_hook(lambda module, args, y: y + (torch.arange(y.shape[-1]) == y.shape[-1] - 1))
        assert not affine.agrees_with_weight(module)


def test_a_weight_that_is_elsewhere_or_packed():
    """Nothing is computed with a weight that is on no device, and packed numbers say nothing by themselves."""
    meta, packed = linear().to("meta"), linear(Scaled)
    meta.register_forward_hook(lambda *_: None)
    assert affine.agrees_with_weight(meta)
    packed.weight = nn.Parameter(torch.ones(7, 5, dtype=torch.int8), requires_grad=False)
    assert not affine.agrees_with_weight(packed)
    del packed.weight
    packed.weight = "elsewhere"
    assert not affine.agrees_with_weight(packed)


class GroupNorm(nn.Module):
    """Root mean square over each of so many groups."""

    def __init__(self, groups: int, **named: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.groups = nn.Parameter(torch.arange(1.0, 9.0)), 1e-2, groups
        for name, value in named.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        by_group = x.unflatten(-1, (self.groups, -1))
        return self.weight * (by_group * torch.rsqrt(by_group.square().mean(-1, keepdim=True) + 1e-2)).flatten(-2)


@pytest.mark.parametrize("named", [{"n_groups": 2}, {"group_size": 4}], ids=str)
def test_a_norm_of_groups_says_how_many_they_are_or_how_large(named):
    module, bare = GroupNorm(2, **named), GroupNorm(2)
    assert affine.norm_terms(module, GroupNorm).weight is module.weight
    for each in (module, bare):
        each.register_forward_hook(lambda module, args, y: 3 * y)
    found = affine.norm_terms(module, GroupNorm)
    torch.testing.assert_close(found.weight, 3 * module.weight, rtol=1e-5, atol=1e-6)
    assert found.eps == 1e-2 and found.bias is None
    refuses("is no GroupNorm", affine.norm_terms, bare, GroupNorm)


def test_a_norm_without_an_epsilon_has_that_of_its_dtype():
    module = nn.RMSNorm(7)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    module.register_forward_hook(lambda module, args, y: 2 * y)
    found = affine.norm_terms(module, nn.RMSNorm)
    torch.testing.assert_close(found.weight, 2 * module.weight, rtol=1e-5, atol=1e-6)
    assert found.eps is None


def test_a_norm_that_cannot_be_tried_is_described_by_its_class_unless_that_was_changed():
    class Gated(nn.RMSNorm):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return super().forward(x) * gate

    plain, hooked, other = Gated(7, eps=1e-3), Gated(7, eps=1e-3), Gated(7, eps=1e-3)
    hooked.register_forward_hook(lambda *_: None)
    other.forward = lambda x, gate: x
    for module in (plain, hooked):
        assert affine.norm_terms(module, Gated) == (module.weight, None, 1e-3)
    for module, kind in ((other, Gated), (hooked, nn.LayerNorm)):
        refuses("cannot be read by calling it", affine.norm_terms, module, kind)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 6])
def test_a_causal_convolution_is_its_sum_over_taps(length, tail, masked, bias):
    g = torch.Generator().manual_seed(0)
    source, kernel = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((2, length, 5), (5, 3)))
    before = torch.randn(2, 2, 5, generator=g, dtype=torch.float64) if tail else None
    read = torch.rand(2, length, 3, generator=g) > 0.4 if masked else None
    constant = torch.randn(5, generator=g, dtype=torch.float64) if bias else None
    whole = torch.cat([torch.zeros(2, 2, 5).double() if before is None else before, source], dim=1)
    expected = torch.zeros(2, length, 5, dtype=torch.float64)
    for t in range(length):
        for j in range(3):
            term = kernel[:, j] * whole[:, t + 2 - j]
            expected[:, t] += term if read is None else term * read[:, t, j, None]
    expected = expected if constant is None else expected + constant
    torch.testing.assert_close(affine.convolved(source, kernel, before, read, constant), expected, **EXACT)


def test_a_causal_convolution_has_the_precision_of_its_input():
    source, kernel = torch.ones(1, 3, 2, dtype=torch.bfloat16), torch.full((2, 2), 0.5)
    found = affine.convolved(source, kernel, None, None)
    assert found.dtype is torch.bfloat16 and found[0, :, 1].tolist() == [0.5, 1.0, 1.0]


def test_only_a_real_change_of_numbers_is_a_disagreement():
    """Relative to the largest number: by a thousandth, or with `rounding` some units of single precision."""
    expected = torch.tensor([100.0, -200.0, 3.0], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    for rounding, allowed in ((False, 200 * 4 * eps**0.5), (True, 200 * 16 * eps)):
        for at in range(3):
            near, far = expected.clone(), expected.clone()
            near[at] += 0.99 * allowed
            far[at] -= 1.01 * allowed
            assert affine.agree(near, expected, rounding=rounding) and not affine.agree(
                far, expected, rounding=rounding
            )
    assert affine.agree(expected[:0], expected[:0]) and affine.agree(0 * expected, 0 * expected)
    assert not affine.agree(torch.full((3,), torch.nan), expected)
    half = torch.tensor([1.0, -256.0, 3.0], dtype=torch.bfloat16)  # of whose own units 16 are allowed: an eighth
    assert affine.agree(half * torch.tensor([1.0, 1.12, 1.0]).bfloat16(), half)
    assert not affine.agree(half * torch.tensor([1.0, 1.14, 1.0]).bfloat16(), half)


class Saying(nn.Linear):
    error: Exception | None = None

    def forward(self, x: Tensor):
        if self.error is None:
            return super().forward(x), x
        raise self.error


def test_what_a_module_says_as_it_fails():
    module = linear(Saying)
    what = f"the layer, a Saying of {Saying.__module__}"
    errors = ValueError(), ValueError(" \n\n late\nmore"), RuntimeError("x" * 200)
    for error, said in zip(errors, ("ValueError", "late", "x" * 120)):
        module.error = error
        advice = "put a layer of torch in its place, dequantised if it is quantised"
        assert refusal(affine.offset, module) == f"{what}, cannot be read by calling it ({said}): {advice}"
    module.error = None
    assert refusal(affine.offset, module) == f"{what}, returns no tensor, and cannot be read: {advice}"
    module.register_forward_hook(lambda *given: None)
    assert refusal(affine.offset, module).endswith(": remove the hook or forward pass that was put on it")
    module.base_layer = nn.Linear(2, 2)
    assert refusal(affine.offset, module).endswith(": merge its PEFT adapter (peft's merge_and_unload())")


def test_what_is_drawn_while_a_layer_is_tried_leaves_the_generator_as_it_was():
    """This holds even if a part of the layer is not in training mode."""

    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0 * torch.rand(1).item()

    module = linear(Drawing)
    module.part = nn.Identity().eval()
    before = torch.random.get_rng_state()
    affine.matrix(module)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_norm_that_computes_in_single_precision_may_be_off_by_its_rounding():
    module = Mamba2RMSNorm(7, eps=1e-3).double()
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    module.register_forward_hook(lambda module, args, y: (2 * y.float()).double())
    torch.testing.assert_close(affine.norm_terms(module, Mamba2RMSNorm).weight, 2 * module.weight, rtol=1e-5, atol=1e-6)
    module.register_forward_hook(lambda module, args, y: y[..., :3])
    assert "is no norm of its input" in refusal(affine.norm_terms, module, Mamba2RMSNorm)


def test_weights_that_are_on_no_device_are_fetched_to_the_cpu():
    for module in (nn.Linear(2, 2, device="meta"), linear(), nn.Identity()):
        assert affine._device(module) == torch.device("cpu")


def test_an_error_names_the_layer_and_three_parts():
    mixer = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    parts = dict(mixer.named_children())
    for part in parts.values():
        part.register_full_backward_hook(lambda *_: None)
    assert affine.changed_parts(mixer) == parts
    said = "hooks, or a forward pass, put on"
    assert affine.described(mixer, {}) == f"Sequential: {said} it"
    mixer.layer_idx = 0
    assert affine.described(mixer, dict([*parts.items()][:3])) == f"Sequential of layer 0: {said} 0, 1, 2"
    del mixer.layer_idx
    mixer.layer_id = 4
    assert affine.described(mixer, parts) == f"Sequential of layer 4: {said} 0, 1, 2 and 2 others"


def test_adapters_and_parametrised_weights_have_no_stored_form():
    plain = nn.Sequential(linear())
    assert affine.stored_weights(plain).keys() == {"0.weight", "0.bias"}
    nn.utils.parametrizations.weight_norm(plain[0])
    refuses(r"Sequential has PEFT adapters or parametrised weights \(0\.parametrizations", affine.stored_weights, plain)


def test_two_runs_that_differ_are_the_same_outcome_only_if_no_hook_makes_them_differ():
    """Hooks of the forward pass are skipped to find out; those of the backward pass cannot be."""
    u, mixer, hooked, backward = torch.randn(1, 3, 5), nn.Identity(), linear().float(), linear().float()
    plain = linear().float()
    hooked.register_forward_hook(lambda module, args, y: 2 * y)
    backward.register_full_backward_hook(lambda *_: None)

    def same(theirs: nn.Module, parts: dict[str, nn.Module]) -> bool:
        return affine.same_outcome(mixer, parts, lambda v: 3 * theirs(v), lambda v: plain(v), u, None)

    assert same(plain, {"part": plain})  # no hook makes them differ: it is how they were read
    assert not same(hooked, {"part": hooked}) and not same(plain, {"part": plain, "other": backward})
    assert affine.same_outcome(mixer, {"part": backward}, lambda v: plain(v), lambda v: plain(v), u, None)
