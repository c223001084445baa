"""Weights of quantised layers, computed from the codes and scales that are stored for them.

A layer is several tensors, its `Parts`: codes of a few bits, a scale for each row, group or block of the weight, and
sometimes the code of zero. Each method says, by its settings and the shape of the codes, which parts there are and of
which shapes and dtypes (`check_parts`); nothing is computed from others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

Parts = Mapping[str, Tensor]
"""Tensors of a layer by the ends of their names."""
Options = Mapping[str, Any]
"""Object quantization_config of a config.json, or one of its groups."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WORDS, INDICES = (torch.int32,), (torch.int32, torch.int64)


class Misfit(ValueError):
    """Part or setting of a layer that does not fit the others."""


class Form(NamedTuple):
    """Allowed shapes and dtypes of a part, and whether a layer may lack it."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


def check_parts(parts: Parts, forms: Mapping[str, Form]) -> None:
    """Raise Misfit for a part that is missing, has no place, or is of another shape or dtype."""
    for end, part in parts.items():
        if end not in forms:
            raise Misfit(f"{end} has no place beside {', '.join(sorted(parts.keys() & forms.keys()))}")
        if part.dtype not in forms[end].dtypes or tuple(part.shape) not in forms[end].shapes:
            wanted = " or ".join(map(_shown, dict.fromkeys(forms[end].shapes)))
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in forms[end].dtypes)
            own = f"{_shown(tuple(part.shape))} {str(part.dtype).removeprefix('torch.')}"
            raise Misfit(f"{end} is {own}, and must be {wanted} {kinds} by its codes and the configuration")
    for end, form in forms.items():
        if end not in parts and not form.optional:
            raise Misfit(f"{end} is missing")


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a single number"


def _matrix(parts: Parts, end: str) -> tuple[int, int]:
    shape = tuple(parts[end].shape)
    if len(shape) != 2 or 0 in shape:
        raise Misfit(f"{end} is {_shown(shape)}, and must be a matrix")
    return shape[0], shape[1]


def _whole(options: Options, name: str, allowed: Callable[[int], bool], advice: str) -> int:
    """Return a whole number of the settings. Raises Misfit for one that is missing or not allowed."""
    value = options.get(name)
    if type(value) is not int or not allowed(value):
        raise Misfit(f"{name} is {value!r:.40}; allowed is {advice}")
    return value


def _bits(options: Options, name: str, allowed: tuple[int, ...]) -> int:
    return _whole(options, name, lambda bits: bits in allowed, f"one of {', '.join(map(str, allowed))}")


def _flag(options: Options, name: str, default: bool | None) -> bool | None:
    value = options.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise Misfit(f"{name} is {value!r:.40}; allowed is true or false")
    return value


def first_fitting(parts: Parts, choices: Iterable[Options], weight: Callable[[Parts, Options], Tensor]) -> Tensor:
    """Return a layer's weight by the first of several settings that its parts fit. Raises the first one's Misfit."""
    errors: list[Misfit] = []
    for options in choices:
        try:
            return weight(parts, options)
        except Misfit as error:
            errors.append(error)
    raise errors[0]


# ---- bitsandbytes


def weight_of_8_bits(codes: Tensor, largest: Tensor) -> Tensor:
    """Compute W = c ⊙ s / 127 from codes c (outputs, inputs) and the largest number s of each row."""
    return codes.float() * largest.float().unsqueeze(-1) / 127


def weight_of_4_bits(parts: Parts) -> Tensor:
    """Compute W = table[c] · s with a scale s for each block of numbers, which may be a code with a scale itself, and
    an offset (QLoRA, Dettmers et al. 2023, Sec. 3). Raises Misfit as `check_parts`."""
    state, kinds = _state(parts)
    shape, number = torch.Size(state["shape"]), math.prod(state["shape"])
    size = _whole(state, "blocksize", _is_power_of_2, "a power of 2")
    blocks, nested, outer = -(-number // size), "nested_blocksize" in state, 1
    offset: Any = state.get("nested_offset")
    # Once a layer has run on a CPU, bitsandbytes keeps the scales of each row in a column.
    columns = (shape[-1] // size, shape[0]) if len(shape) == 2 and shape[-1] % size == 0 else (blocks,)
    codes = parts.get("weight", torch.empty(0))
    if codes.numel() * codes.itemsize != -(-number // 2):
        said = f"weight has {codes.numel() * codes.itemsize:,} bytes"
        raise Misfit(f"{said}, and its state is of {number:,} numbers of 4 bits")
    forms = {
        "weight": Form((tuple(codes.shape),), (torch.uint8, *FLOATS[:3])),
        "weight.absmax": Form(((blocks,), columns), (torch.uint8,) if nested else FLOATS),
        "weight.quant_map": Form(((16,),), FLOATS),
        **{end: Form((tuple(parts[end].shape),), (torch.uint8,)) for end in kinds},
    }
    if nested:
        outer = _whole(state, "nested_blocksize", _is_power_of_2, "a power of 2")
        forms["weight.nested_absmax"] = Form(((-(-blocks // outer),),), FLOATS)
        forms["weight.nested_quant_map"] = Form(((256,),), FLOATS)
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
            raise Misfit(f"nested_offset is {offset!r:.40}; allowed is a number")
    check_parts(parts, forms)
    scale = parts["weight.absmax"]
    scale = scale.T.flatten() if scale.ndim == 2 else scale
    if nested:
        scales = parts["weight.nested_absmax"].repeat_interleave(min(outer, blocks))[:blocks]
        scale = parts["weight.nested_quant_map"][scale.long()] * scales + offset
    bytes_ = codes.flatten().view(torch.uint8)
    numbers = parts["weight.quant_map"][torch.stack([bytes_ >> 4, bytes_ & 15], -1).flatten().long()].float()
    found = numbers[:number] * scale.float().repeat_interleave(min(size, number))[:number]
    return found.view(shape).to(getattr(torch, state["dtype"])).float()


def _state(parts: Parts) -> tuple[Options, list[str]]:
    """Return the state of a layer of 4 bits, an object in JSON, and the ends of the names that it may have."""
    kinds = [end for end in STATES if end in parts]
    if len(kinds) != 1:
        raise Misfit(f"{STATES[0] if not kinds else kinds[1]} {'is missing' if not kinds else 'is a second state'}")
    try:
        state = json.loads(bytes(parts[kinds[0]].flatten().tolist()))
        known = {key: state[key] for key in ("shape", "dtype", "quant_type", "blocksize")}
    except (LookupError, RecursionError, TypeError, ValueError):
        raise Misfit(f"{kinds[0]} is no state of a layer") from None
    shape = known["shape"]
    whole = isinstance(shape, list) and all(type(each) is int and each > 0 for each in shape)
    if not whole or not shape or known["dtype"] not in ("float32", "float16", "bfloat16"):
        raise Misfit(f"{kinds[0]} has the shape {shape!r:.40} and the dtype {known['dtype']!r:.40}")
    if not kinds[0].endswith(f"__{known['quant_type']}"):
        raise Misfit(f"{kinds[0]} is of quant_type {known['quant_type']!r:.40}")
    return state, kinds


def _is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def bitsandbytes(parts: Parts, options: Options) -> Tensor:
    """Return the weight of a layer of 4 or 8 bits."""
    if "SCB" not in parts:
        return weight_of_4_bits(parts)
    outputs, inputs = _matrix(parts, "weight") if "weight" in parts else (0, 0)
    forms = {
        "weight": Form(((outputs, inputs),), (torch.int8,)),
        "SCB": Form(((outputs,),), FLOATS),
        "weight_format": Form(((), (1,)), (torch.uint8, torch.int8, *INDICES), optional=True),
    }
    check_parts(parts, forms)
    if int(parts.get("weight_format", torch.tensor(0))) != 0:
        raise Misfit("weight_format is not 0: codes of 8 bits are stored in a GPU's order")
    return weight_of_8_bits(parts["weight"], parts["SCB"])


STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


# ---- GPTQ and AWQ


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words of 32 bits: (…, words) int32 -> (…, 32 · words / bits), each from its lowest bit on."""
    single = (words.unsqueeze(-1) >> torch.arange(32)) & 1
    grouped = rearrange(single.to(torch.uint8), "... words bits -> ... (words bits)")
    grouped = grouped[..., : grouped.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
    return (grouped << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.int32)


def _group_size(options: Options, inputs: int, parts: Parts, names: tuple[str, ...] = ("group_size",)) -> int:
    """Return the number of inputs in a group; where the settings have none, by the number of rows of scales."""
    name = next((name for name in names if options.get(name) is not None), None)
    if name is not None:
        size = _whole(options, name, lambda size: size == -1 or 0 < size <= inputs, f"−1 or 1 to {inputs}")
        return inputs if size == -1 else size
    groups = _matrix(parts, "scales")[0] if "scales" in parts else 1
    if inputs % groups:
        raise Misfit(f"{groups} groups share {inputs} inputs, and no group_size says how")
    return inputs // groups


def _groups(parts: Parts, end: str, inputs: int, size: int) -> Tensor:
    """Return the group of each input, in order without an index. Raises Misfit for an index whose groups are not of
    this size."""
    in_order = torch.arange(inputs) // size
    if end not in parts:
        return in_order
    found = parts[end].long()
    if not torch.equal(found.sort().values, in_order):
        raise Misfit(f"{end} does not put {size} inputs into each of {int(in_order[-1]) + 1} groups")
    return found


def gptq(parts: Parts, options: Options) -> Tensor:
    """Compute W = s_g (c − z_g), g the group of an input, from codes packed along the inputs. The first version of the
    format, which files without a checkpoint_format are of, stores z − 1 (Frantar et al. 2023; files of AutoGPTQ and
    GPTQModel). A layer may have one of the settings under `dynamic`."""
    dynamic = options.get("dynamic") or {}
    own = [each for each in dynamic.values() if isinstance(each, Mapping)] if isinstance(dynamic, Mapping) else []
    return first_fitting(parts, [options, *({**options, **each} for each in own)], _gptq)


def _gptq(parts: Parts, options: Options) -> Tensor:
    bits = _bits(options, "bits", (2, 3, 4, 8))
    rows, outputs = _matrix(parts, "qweight")
    inputs = rows * 32 // bits
    if rows * 32 % bits:
        raise Misfit(f"qweight has {rows} rows, which hold no whole number of codes of {bits} bits")
    size = _group_size(options, inputs, parts)
    count = -(-inputs // size)
    optional = not _flag(options, "desc_act", False) and inputs % size == 0
    forms = {
        "qweight": Form(((rows, outputs),), WORDS),
        "qzeros": Form(((count, -(-outputs * bits // 32)),), WORDS),
        "scales": Form(((count, outputs),), FLOATS),
        "g_idx": Form(((inputs,),), INDICES, optional),
    }
    check_parts(parts, forms)
    group = _groups(parts, "g_idx", inputs, size)
    zeros = _codes(parts["qzeros"], bits)[:, :outputs] + (options.get("checkpoint_format") != "gptq_v2")
    if _flag(options, "sym", None) and bool((zeros != 2 ** (bits - 1)).any()):
        raise Misfit(f"qzeros are not {2 ** (bits - 1)}, the middle of the codes, as sym says")
    codes = _codes(parts["qweight"].T, bits)  # (outputs, inputs)
    return (codes - zeros[group].T) * parts["scales"].float()[group].T


AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of its eight numbers of 4 bits."""


def awq(parts: Parts, options: Options) -> Tensor:
    """Compute W = s_g (c − z_g) from codes packed along the outputs (Lin et al. 2024; AutoAWQ's form `gemm`)."""
    inputs, words = _matrix(parts, "qweight")
    size = _group_size(options, inputs, parts, ("group_size", "q_group_size"))
    if inputs % size:
        raise Misfit(f"group_size is {size}, and a layer has {inputs} inputs")
    count = inputs // size
    forms = {
        "qweight": Form(((inputs, words),), WORDS),
        "qzeros": Form(((count, words),), WORDS),
        "scales": Form(((count, 8 * words),), FLOATS),
    }
    check_parts(parts, forms)
    codes, zeros = (
        _codes(parts[name], 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2) for name in ("qweight", "qzeros")
    )
    group = torch.arange(inputs) // size
    return ((codes - zeros[group]) * parts["scales"].float()[group]).T.contiguous()


# ---- scales of rows and blocks: fp8 and compressed-tensors

SINGLE = ((), (1,), (1, 1))
"""Shapes of a single scale."""
OF_INPUT = ("input_scale", "input_zero_point", "activation_scale")
"""Parts about a layer's input, which are not read."""


def _block(value: Any, name: str) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    whole = isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 and n % 8 == 0 for n in value)
    if not whole:
        raise Misfit(f"{name} is {value!r:.40}; allowed are two numbers of rows and columns, multiples of 8")
    return value[0], value[1]


def _grid(codes: Tensor, block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of codes (…, outputs, inputs), one for each block; the last may be cut."""
    return (*codes.shape[:-2], *(-(-size // each) for size, each in zip(codes.shape[-2:], block)))


def _spread(scale: Tensor, codes: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the scale of each code, from those of blocks, of rows, (outputs, 1) or (outputs,), or a single one."""
    if scale.numel() == 1:
        return scale.reshape(())
    scale = scale.unsqueeze(-1) if scale.ndim == 1 else scale
    for axis, size in zip((-2, -1), block):
        count = codes.shape[axis]
        scale = scale.repeat_interleave(min(size, count), axis).narrow(axis, 0, count)
    return scale


def _codes_of(parts: Parts, end: str) -> Tensor:
    codes = parts.get(end)
    if codes is None:
        raise Misfit(f"{end} is missing")
    if codes.ndim not in (2, 3) or 0 in codes.shape:
        raise Misfit(f"{end} is {_shown(tuple(codes.shape))}, and must be a matrix")
    return codes


def fp8(parts: Parts, options: Options) -> Tensor:
    """Compute W = c · s from floats of 8 bits and the scale of each block, 128 × 128 unless the settings say another
    size, or a single scale."""
    codes, given = _codes_of(parts, "weight"), options.get("weight_block_size", [128, 128])
    block = None if given is None else _block(given, "weight_block_size")
    single = SINGLE if block is None or "weight_block_size" not in options else ()
    shapes = single if block is None else (*single, _grid(codes, block))
    forms = {
        "weight": Form((tuple(codes.shape),), (torch.float8_e4m3fn,)),
        "weight_scale_inv": Form(shapes, (*FLOATS, torch.float8_e8m0fnu)),
    }
    check_parts({end: part for end, part in parts.items() if end not in OF_INPUT}, forms)
    return codes.float() * _spread(parts["weight_scale_inv"].float(), codes, block or (1, 1))


def compressed(parts: Parts, options: Options) -> Tensor:
    """Compute W = s (c − z) from integers or floats of 8 bits, or from codes of 1, 2, 4 or 8 bits packed with half
    their range added, by the settings in one of the `config_groups`."""
    groups = options.get("config_groups")
    named = [*groups.values()] if isinstance(groups, Mapping) else []
    weights = [each.get("weights") for each in named if isinstance(each, Mapping)]
    given = [each for each in weights if isinstance(each, Mapping)]
    if len(weights) < len(named) or not given:
        raise Misfit(f"config_groups is {groups!r:.40}; allowed is an object of groups with settings of weights")
    own = {end: part for end, part in parts.items() if end not in OF_INPUT}
    return first_fitting(own, given, _packed if "weight_packed" in parts else _scaled)


def _block_of(options: Options, outputs: int, inputs: int) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, by the settings of a group; None for the whole weight."""
    size, strategy = options.get("group_size"), options.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "group":
        allowed = f"a divisor of the {inputs} inputs"
        return 1, _whole(options, "group_size", lambda size: size > 0 and inputs % size == 0, allowed)
    if strategy == "block":
        return _block(options.get("block_structure"), "block_structure")
    if strategy not in ("tensor", "channel"):
        raise Misfit(f"strategy is {strategy!r:.40}; allowed is tensor, channel, group or block")
    return None if strategy == "tensor" else (1, inputs)


def _scale_shapes(codes: Tensor, block: tuple[int, int] | None) -> tuple[tuple[int, ...], ...]:
    if block is None:
        return SINGLE
    rows = _grid(codes, block)
    return (rows, rows[:-1]) if block == (1, codes.shape[-1]) else (rows,)


def _zero(parts: Parts, options: Options, shapes: tuple[tuple[int, ...], ...]) -> Form:
    symmetric = _flag(options, "symmetric", True)
    if symmetric and bool(parts.get("weight_zero_point", torch.zeros(1)).float().count_nonzero()):
        raise Misfit("weight_zero_point is not 0, and the configuration says symmetric")
    return Form(shapes, (torch.int8, torch.uint8), bool(symmetric))


def _scaled(parts: Parts, options: Options) -> Tensor:
    codes, kind = _codes_of(parts, "weight"), options.get("type", "int")
    _bits(options, "num_bits", tuple(range(1, 9)) if kind == "int" else (8,))
    if kind not in ("int", "float"):
        raise Misfit(f"type is {kind!r:.40}; allowed is int or float")
    block = _block_of(options, *codes.shape[-2:])
    shapes = _scale_shapes(codes, block)
    zero = _zero(parts, options, shapes)
    forms = {
        "weight": Form((tuple(codes.shape),), (torch.int8,) if kind == "int" else (torch.float8_e4m3fn,)),
        "weight_scale": Form(shapes, FLOATS),
        "weight_zero_point": zero._replace(dtypes=(*zero.dtypes, torch.float8_e4m3fn)),
    }
    check_parts(parts, forms)
    shift = parts.get("weight_zero_point", torch.zeros(())).float()
    scale, shift = (_spread(each, codes, block or (1, 1)) for each in (parts["weight_scale"].float(), shift))
    return (codes.float() - shift) * scale


def _packed(parts: Parts, options: Options) -> Tensor:
    bits, (outputs, words) = _bits(options, "num_bits", (1, 2, 4, 8)), _matrix(parts, "weight_packed")
    declared = parts.get("weight_shape", torch.zeros(0, dtype=torch.int64))
    check_parts({"weight_shape": declared}, {"weight_shape": Form(((2,),), INDICES)})
    inputs = int(declared[1])
    if options.get("type", "int") != "int" or not 0 < inputs <= words * 32 // bits:
        raise Misfit(f"weight_shape says {inputs} inputs, and weight_packed has {words} words of {bits} bits a code")
    block = _block_of(options, outputs, inputs)
    if block is not None and block[0] != 1:
        raise Misfit("strategy is block; packed integers have scales of groups, rows or the weight")
    flat = torch.empty(outputs, inputs, device="meta")
    shapes, ordered = _scale_shapes(flat, block), options.get("actorder") in ("group", True)
    size = inputs if block is None else block[1]
    zero = _zero(parts, options, shapes)
    if parts.get("weight_zero_point", declared).dtype == torch.int32:  # It is packed along the outputs.
        zero = Form(((-(-outputs * bits // 32), inputs // size),), WORDS, zero.optional)
    forms = {
        "weight_packed": Form(((outputs, -(-inputs * bits // 32)),), WORDS),
        "weight_scale": Form(shapes, FLOATS),
        "weight_zero_point": zero,
        "weight_shape": Form(((2,),), INDICES),
        "weight_g_idx": Form(((inputs,),), INDICES, not ordered),
    }
    check_parts(parts, forms)
    if int(declared[0]) != outputs:
        raise Misfit(f"weight_shape says {int(declared[0])} outputs, and weight_packed has {outputs}")
    indexed = ordered or bool((parts.get("weight_g_idx", torch.tensor(-1)) != -1).any())
    group = _groups(parts if indexed else {}, "weight_g_idx", inputs, size)
    codes = (_codes(parts["weight_packed"], bits)[:, :inputs] - 2 ** (bits - 1)).float()
    shift = parts.get("weight_zero_point", torch.zeros(1, 1))
    if shift.dtype == torch.int32:
        shift = _codes(shift.T, bits).T[:outputs] - 2 ** (bits - 1)
    scale, shift = (each.float().reshape(-1, inputs // size if each.numel() > 1 else 1) for each in
                    (parts["weight_scale"], shift))  # fmt: skip
    scale, shift = (each[:, group] if each.shape[1] > 1 else each for each in (scale, shift))
    return (codes - shift) * scale
