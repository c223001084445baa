"""Options of our hybrids' softmax attention: what is allowed, to its bounds, and which keys a query reads."""

import math
import re
from typing import Any

import pytest
import torch
from refusals import refusal
from ssmscope.errors import InputError
from ssmscope.layers.linear_attention import GLAConfig, GLAModel
from ssmscope.layers.mamba2attn import Mamba2AttnConfig
from ssmscope.layers.rotary_attention import score_mask

WIDTH = 80
KNOWN_OPTIONS = "layers, num_heads, num_kv_heads, qkv_bias, window_size, rope_theta, head_dim, rotary_dim, qk_norm"


def of_gla(*attention: dict[str, Any], **fields: Any) -> GLAConfig:
    sizes = {"hidden_size": WIDTH, "vocab_size": 16, "num_hidden_layers": 3, "num_heads": 4, "key_size": 8}
    return GLAConfig(**{**sizes, "value_size": 12, **fields}, attention=list(attention))


@pytest.mark.parametrize("options", [
    {"num_heads": 1}, {"num_heads": 40}, {"num_heads": 5}, {"num_heads": 4, "num_kv_heads": 1},
    {"num_heads": 4, "num_kv_heads": 2}, {"num_heads": 4, "num_kv_heads": 4},
    {"num_heads": 4, "num_kv_heads": None},
    {"num_heads": 4, "window_size": 1}, {"num_heads": 4, "window_size": None}, {"num_heads": 4, "rope_theta": 1},
    {"num_heads": 4, "rope_theta": 0.25, "qkv_bias": True},
], ids=str)  # fmt: skip
def test_options_of_a_linear_attention_that_are_allowed(options: dict[str, Any]) -> None:
    given = [{"layers": [0, 2], **options}, {"layers": [1], "num_heads": options["num_heads"]}]
    config = of_gla(*given)
    assert config.attention == given and config.num_attention_heads == options["num_heads"]
    plain = of_gla()
    assert plain.attention == () and not hasattr(plain, "num_attention_heads") and "attention" not in plain.to_dict()


def unfit(heads: Any, keys: Any, window: Any = None) -> str:
    return (
        f"attention has {heads!r} heads, {keys!r} of keys and a window of {window!r}: give numbers that share the "
        f"width, {WIDTH}, in pairs"
    )


def turning(count: Any) -> str:
    return f"attention turns {count!r} dimensions of a head's 10: give an even number"


THETA = "attention has qkv_bias, true or false, and rope_theta, a positive number"


@pytest.mark.parametrize(("options", "said"), [
    ({"num_heads": 3}, unfit(3, 3)), ({"num_heads": 16}, unfit(16, 16)), ({"num_heads": 80}, unfit(80, 80)),
    ({"num_heads": 0}, unfit(0, 0)), ({"num_heads": -4}, unfit(-4, -4)), ({"num_heads": 4.0}, unfit(4.0, 4.0)),
    ({"num_heads": True}, unfit(True, True)), ({"num_heads": 4, "num_kv_heads": 3}, unfit(4, 3)),
    ({"num_heads": 4, "num_kv_heads": 8}, unfit(4, 8)), ({"num_heads": 4, "num_kv_heads": -1}, unfit(4, -1)),
    ({"num_heads": 4, "window_size": -1}, unfit(4, 4, -1)),
    ({"num_heads": 4, "window_size": 2.0}, unfit(4, 4, 2.0)),
    *(({"num_heads": 4, "rope_theta": value}, THETA) for value in (0, -1.5, math.inf, True, "10")),
    ({"num_heads": 4, "qkv_bias": 1}, THETA),
    ({"num_heads": 4, "head_dim": 0}, unfit(4, 4)), ({"num_heads": 4, "head_dim": 6.0}, unfit(4, 4)),
    *(({"num_heads": 4, "head_dim": 10, "rotary_dim": n}, turning(n)) for n in (3, 12, -2, 4.0)),
    ({"num_heads": 4, "qk_norm": True}, "attention has qk_norm True: give shared or per head"),
    ({}, f"attention has no layers or num_heads; give {KNOWN_OPTIONS}"),
    ({"num_heads": 4, "z": 1, "a": 2}, f"attention has a; give {KNOWN_OPTIONS}"),
], ids=str)  # fmt: skip
def test_options_of_a_linear_attention_that_are_refused(options: dict[str, Any], said: str) -> None:
    assert refusal(of_gla, {"layers": [1], **options}) == said


def test_layers_of_several_options_are_apart_and_have_alike_heads() -> None:
    given = [{"layers": [0], "num_heads": 4}, {"layers": [2], "num_heads": 4, "window_size": 2}]
    assert of_gla(*given).attention == given
    for layers in ([2, 0], [1, 3], [-1, 2], [1, 1], [1, True], [1.0], 2, ["1"]):
        assert refusal(of_gla, given[0], {"layers": layers, "num_heads": 4}) == (
            f"attention has the layers {layers}: give a list, each once, from 0 to 2"
        )
    sizes = {"hidden_size": WIDTH, "vocab_size": 16, "num_hidden_layers": 3, "num_heads": 4}
    for attention in (given[0], [3], ["layers"], [given[0], 1]):
        said = refusal(GLAConfig, **sizes, attention=attention) or ""
        assert "must be a list of options, each for some layers" in said
    assert refusal(of_gla, given[0], {"layers": [2], "num_heads": 5}) == (
        "attention has layers of several num_heads: give one for all"
    )


def test_windows_of_several_layers_are_each_their_own() -> None:
    """A change of the first token reaches the last one through no window that ends before it."""
    torch.manual_seed(0)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 2, 3, 4, 5]])
    for windows, reached in (((2, 2), 3), ((2, 3), 4), ((3, None), 5), ((2, None), 5)):
        entries = [{"layers": [at], "num_heads": 4, "window_size": window} for at, window in enumerate(windows)]
        model = GLAModel(of_gla(*entries, num_hidden_layers=2)).double().eval()
        with torch.no_grad():
            one, other = model(ids).last_hidden_state
        assert ((one - other).norm(dim=-1) > 1e-9).tolist() == [at < reached for at in range(5)]


def test_positions_of_attention_may_be_given() -> None:
    torch.manual_seed(0)
    model = GLAModel(of_gla({"layers": [1], "num_heads": 4})).double().eval()
    ids, steps = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]), torch.arange(5).expand(2, -1)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        torch.testing.assert_close(model(ids, position_ids=steps + 7).last_hidden_state, plain)
        stretched = model(ids, position_ids=torch.stack([steps[0], 3 * steps[1]])).last_hidden_state
    torch.testing.assert_close(stretched[0], plain[0])
    assert not torch.allclose(stretched[1], plain[1], rtol=1e-3)


def test_keys_that_a_query_reads() -> None:
    x, mask = torch.zeros(2, 4, 3), torch.tensor([[False, True, True, True], [True, True, True, False]])
    for window in (None, 1, 2, 4):
        found = score_mask(x, mask, window)
        assert found.shape == (2, 1, 4, 4) and found.dtype == x.dtype
        for row in range(2):
            for query in range(4):
                for key in range(4):
                    reads = key <= query and bool(mask[row, key]) and (window is None or query - key < window)
                    assert found[row, 0, query, key] == (0 if reads else torch.finfo(x.dtype).min)
    assert torch.equal(score_mask(x, None), score_mask(x, torch.ones(2, 4, dtype=torch.bool)))


def of_mamba2(**fields: Any) -> Mamba2AttnConfig:
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 8}
    return Mamba2AttnConfig(**{**sizes, "attn_layer_idx": [1], **fields})


@pytest.mark.parametrize("options", [
    {}, {"num_heads": 1}, {"num_heads": 24}, {"num_heads": 5, "head_dim": 1}, {"num_heads_kv": 1},
    {"num_heads_kv": 2}, {"num_heads_kv": 4}, {"d_conv": 0}, {"d_conv": 1}, {"rotary_emb_dim": 6},
    {"rotary_emb_dim": 8, "head_dim": 8},
    {"rotary_emb_base": 1}, {"softmax_scale": 0.25}, {"rotary_emb_base": None, "softmax_scale": None},
    {"qkv_proj_bias": False, "out_proj_bias": True, "rotary_emb_interleaved": True},
], ids=str)  # fmt: skip
def test_options_of_mamba_ssms_attention_that_are_allowed(options: dict[str, Any]) -> None:
    given = {"causal": True, "num_heads": 4, **options}
    config = of_mamba2(attn_cfg=given, d_intermediate=0)
    assert config.attn_cfg == given and config.num_attention_heads == given["num_heads"]
    assert config.attn_layer_idx == [1] and config.d_intermediate == 0 and config.use_cache is False


OPTIONS = (
    "num_heads, num_heads_kv, head_dim, qkv_proj_bias, out_proj_bias, softmax_scale, causal, d_conv, rotary_emb_dim, "
    "rotary_emb_base, rotary_emb_interleaved, mlp_dim"
)


@pytest.mark.parametrize(("options", "said"), [
    *(
        ({name: value}, f"{name} {value!r}: give an integer, 1 or more")
        for name in ("num_heads", "num_heads_kv", "head_dim") for value in (0, -1, 2.0, True)
    ),
    *(
        ({name: value}, f"{name} {value!r}: give an integer, 0 or more")
        for name in ("d_conv", "rotary_emb_dim") for value in (-1, 2.0, True, None)
    ),
    *(
        ({name: value}, f"{name} {value!r}: give true or false")
        for name in ("qkv_proj_bias", "out_proj_bias", "rotary_emb_interleaved") for value in (0, None)
    ),
    *(
        ({name: value}, f"{name} {value!r}: give a positive number")
        for name in ("rotary_emb_base", "softmax_scale") for value in (0, -0.5, math.inf, True, "1")
    ),
    ({"num_heads_kv": 3}, "4 heads, which 3 heads of keys or a width of 24 do not fit"),
    ({"num_heads_kv": 8}, "4 heads, which 8 heads of keys or a width of 24 do not fit"),
    ({"num_heads": 5}, "5 heads, which 5 heads of keys or a width of 24 do not fit"),
    ({"num_heads": 5, "num_heads_kv": 2, "head_dim": 4}, "5 heads, which 2 heads of keys or a width of 24 do not fit"),
    ({"rotary_emb_dim": 3}, "rotary_emb_dim 3: give an even number of a head's dimensions"),
    ({"rotary_emb_dim": 8}, "rotary_emb_dim 8: give an even number of a head's dimensions"),
    ({"rotary_emb_dim": 6, "head_dim": 4}, "rotary_emb_dim 6: give an even number of a head's dimensions"),
    ({"z": 1, "b": 1}, f"b, which is unknown; its options are {OPTIONS}"),
    ({"mlp_dim": 1}, "mlp_dim: a feed-forward part within attention cannot be read"),
], ids=str)  # fmt: skip
def test_options_of_mamba_ssms_attention_that_are_refused(options: dict[str, Any], said: str) -> None:
    assert refusal(of_mamba2, attn_cfg={"causal": True, "num_heads": 4, **options}) == f"attn_cfg has {said}"
    of_mamba2(attn_layer_idx=[], attn_cfg=options)  # where no layer has attention they are not read


def test_layers_and_widths_of_mamba_ssms_attention() -> None:
    options = {"causal": True, "num_heads": 4}
    for layers in ([0], [2], (0, 2)):
        assert of_mamba2(attn_layer_idx=layers, attn_cfg=options).attn_layer_idx == list(layers)
    for outside in (-1, 3, True, 1.0):
        said = f"attn_layer_idx has {outside!r}: give layers, from 0 to 2"
        assert refusal(of_mamba2, attn_layer_idx=[1, outside], attn_cfg=options) == said
    for width in (-1, 1.0, True):
        with pytest.raises(InputError, match=re.escape(f"d_intermediate {width!r} must be an integer, 0 or more")):
            of_mamba2(attn_cfg=options, d_intermediate=width)
    assert of_mamba2(attn_cfg=options, d_intermediate=1).d_intermediate == 1
    assert refusal(of_mamba2, attn_cfg=None) == f"attn_cfg has no num_heads; its options are {OPTIONS}"
