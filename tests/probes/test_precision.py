"""Rounded states against slow loops with tensors of the real dtypes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from planned import tiny_model
import ssmscope
from ssmscope import ops
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.edits import edited
from ssmscope.core.model import Model
from ssmscope.probes.loss.measure import documents, shared_windows
from ssmscope.probes.precision.measure import arm, bin_masks, repeated, token_scores
from ssmscope.probes.precision.result import Arm, Precision
from ssmscope.probes.precision.rounding import DTYPES, ZERO, Rounding, carried, rounded, state_rounded

H = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 40.0]).view(3, 1, 1)
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("per", ["tensor", "head", "row"])
@pytest.mark.parametrize("format", ["bfloat16", "float16", "e4m3", "e5m2", "int8", "int4"])
def test_a_rounded_state_is_what_the_dtype_holds(format: str, per: str) -> None:
    found = rounded(H, Rounding(format, per))
    for b, h, p, n in np.ndindex(*H.shape):
        x, most = H[b, h, p, n], {"tensor": H[b], "head": H[b, h], "row": H[b, h, p]}[per].abs().max()
        if format in ("bfloat16", "float16"):
            expected = torch.empty(1, dtype=DTYPES[format]).fill_(x.item())[0].float()
        elif format in DTYPES:
            scale = most / torch.finfo(DTYPES[format]).max
            expected = (x / scale).to(DTYPES[format]).float() * scale
        else:
            scale = most / {"int8": 127, "int4": 7}[format]
            expected = round((x / scale).item()) * scale  # Python's round takes ties to even.
        assert found[b, h, p, n] == expected


@pytest.mark.parametrize("format", ["bfloat16", "e4m3", "e5m2", "int8", "int4"])
def test_stochastic_rounding_keeps_the_mean(format: str) -> None:
    how, generator = Rounding(format, "head", seed=0), torch.Generator().manual_seed(0)
    x = torch.tensor([-1.0, -0.3017, -0.01, 0.0, 0.1234, 0.77, 1.0]).expand(4000, 1, 1, 7)
    drawn = rounded(x, how, generator).view(4000, 7)
    values = [sorted(set(column.tolist())) for column in drawn.T]
    assert max(map(len, values)) == 2 and values[3] == [0.0] and len(values[0]) == len(values[6]) == 1
    for column, exact, own in zip(drawn.T, x[0].flatten(), values):
        assert own[0] <= exact <= own[-1]
        assert abs(column.mean() - exact) <= 5 * (own[-1] - own[0]) / math.sqrt(4000) / 2 + 1e-7
    assert any(len(own) == 2 for own in values)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gated-deltanet", "diff-mamba"])
@pytest.mark.parametrize("every", [1, 5])
def test_a_carried_state_is_kept_in_the_dtype(name: str, every: int) -> None:
    """Bit for bit as a loop that keeps a tensor of the dtype between pieces."""
    layer = Model(loud(random_example(name))).trace(ids=IDS).layers[1]
    recurrences = layer.recurrences
    initial = layer.initial or (None,) * len(recurrences)
    found = carried(recurrences, initial, Rounding("bfloat16", every=every))
    for r, own, start in zip(recurrences, found, initial):
        kept, outputs = start, []
        for at in range(0, 12, every):
            scan = ops.scan(r.between(at, at + every), None if kept is None else kept.float())
            outputs.append(scan.y)
            kept = scan.state.to(torch.bfloat16)
        assert torch.equal(own, torch.cat(outputs, 1)) and not torch.equal(own, ops.scan(r, start).y)
    whole = carried(recurrences, initial, Rounding("int4", every=12))
    assert all(torch.allclose(y, ops.scan(r, s).y) for y, r, s in zip(whole, recurrences, initial))


def test_recurrences_that_join_are_rounded_as_one_memory() -> None:
    """Two writes a token into one memory are those of a recurrence of their sum, where b is shared."""
    one = Model(loud(random_example("mamba2"))).trace(ids=IDS).layers[0].recurrence
    first, second = replace(one, x=0.25 * one.x, D=None), replace(one, x=0.75 * one.x, D=None, joins=True)
    how = Rounding("int4")
    joint = carried([first, second], (None, None), how)
    assert torch.allclose(sum(joint), carried([replace(one, D=None)], (None,), how)[0], rtol=1e-4, atol=1e-4)


def test_a_model_runs_with_rounded_states_of_some_heads() -> None:
    model = Model(loud(random_example("mamba2")))
    batch = model.encode(ids=IDS)
    states, steps = None, []
    for at in range(12):
        run = model.run(model.encode(ids=[row[at : at + 1] for row in IDS]), states)
        steps.append(run.logits)
        ssm = run.states[1].ssm[0].clone()
        ssm[:, [2]] = rounded(ssm, Rounding("int4"))[:, [2]]
        states = (run.states[0], replace(run.states[1], ssm=(ssm,)))
    with edited(model, state_rounded(Rounding("int4"), (1,), (2,))):
        found = model.logits(batch)
    assert torch.allclose(found, torch.cat(steps, 1), rtol=1e-4, atol=1e-4)
    assert (found - model.logits(batch)).abs().max() > 1e-2


def test_scores_of_tokens_and_repeated_pairs() -> None:
    windows = np.array([[1, 2, 3, 1, 2, 9, 1, 2, 3]])
    assert repeated(windows).tolist() == [[0, 0, 0, 3, 0, 0, 3, 6]]
    bins = bin_masks(windows)
    assert [*bins] == ["1–16"] and bins["1–16"].tolist() == [[False] * 3 + [True, False, False, True, True]]
    model = Model(loud(random_example("mamba2")))
    ids = np.array(IDS)
    losses, hits = token_scores(model, ids)
    log_p = model.logits(model.encode(ids=ids[:, :-1].tolist())).double().log_softmax(-1)
    expected = -log_p.gather(2, torch.from_numpy(ids[:, 1:, None]))[..., 0]
    assert np.allclose(losses, expected.numpy(), rtol=1e-5)
    assert (hits == (log_p.argmax(-1).numpy() == ids[:, 1:])).all()
    masks = [np.array([[True] * 2 + [False] * 9, [False] * 11])]
    other = np.stack([losses + np.arange(22).reshape(2, 11) / 8, 1 - hits])
    found = arm(Rounding("int8", every=3), np.stack([losses, hits]), other, masks, 0)
    assert found.change.value == pytest.approx(21 / 16) and found.size.value == pytest.approx(21 / 16)
    assert found.less.value == pytest.approx(1 - 2 * hits.mean()) and found.label == "int8 per head, every 3 tokens"
    assert found.by_distance[0].value == pytest.approx(np.mean(1 - 2 * hits[0, :2]))


def test_a_state_set_to_zero_is_the_control() -> None:
    """Each token then reads what it wrote itself alone; texts that hardly use the state are told of."""
    model = Model(loud(random_example("mamba2")))
    one, two = [3, 5, 8, 13, 21], [9, 5, 2, 13, 21]
    trace = model.trace(ids=[one, two]).layers[0]
    (kept,) = carried(trace.recurrences, [None], Rounding(ZERO))
    alone = [ops.scan(trace.recurrences[0].between(at, at + 1), None).y for at in range(5)]
    torch.testing.assert_close(kept, torch.cat(alone, dim=1))

    def arm_of(name: str, bits: int, value: float, half: float) -> Arm:
        found = Estimate(value, value - half, value + half)
        return Arm(name, bits, 1, False, found, Estimate(abs(value), 0, 1), found, found, ())

    def said(zero: Arm, value: float = 2e-5) -> str:
        arms = (arm_of("int4 per head", 4, value, 1e-5), zero)
        return Precision({"model": "m"}, 1.0, 0.5, arms, (), (), np.empty((0, 0)), "", (0,)).headline

    hardly = "the state is hardly used on these texts: +0.002000 [0.001000, 0.003000] nats a token"
    assert hardly in said(arm_of(ZERO, 0, 2e-3, 1e-3))
    used = said(arm_of(ZERO, 0, 0.5, 0.1))
    assert "kept in int4 per head (+0.000020 [0.000010, 0.000030]" in used and "+0.500000 [0.400000, 0.600000]" in used
    assert "hardly" not in said(arm_of(ZERO, 0, 5e-3, 6e-3))  # It may cost more than the margin.
    assert "(+0.0020 [0.0020, 0.0020]" in said(arm_of(ZERO, 0, 0.5, 0.1), 2e-3)


def test_the_verb(analyze, refusal, tmp_path: Path) -> None:
    name, text = tiny_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("a good film with bad acting , but great music .\n" * 9)
    given = ("precision", name, "--data", text, "--length", "40", "--limit", "2")
    answer = analyze(
        *given, "--state", "float16,int4", "--per", "row,head", "--heads", "int4", "--out", tmp_path / "out"
    )
    told = " ".join(answer.out.split())
    assert "with the state set to zero" in told and "int4 per head" in told and "at 1–16" in told
    result = ssmscope.Result.load(tmp_path / "out" / "precision.json")
    assert result == ssmscope.Result.from_dict(json.loads(result.to_json()))
    assert [each.name for each in result.arms] == ["float16", "int4 per row", "int4 per head", "set to zero"]
    sizes = [each.size.value for each in result.arms]
    assert result.to_frame()["size"].tolist() == sizes and sizes[0] < sizes[1]
    model = ssmscope.load(name)
    windows, _ = shared_windows([model], documents(text, None)[0], 40)
    windows = (
        windows[:2] if len(windows) < 3 else windows[np.sort(np.random.default_rng(0).permutation(len(windows))[:2])]
    )
    losses, _ = token_scores(model, windows)
    one, _ = token_scores(model, windows, state_rounded(Rounding("int4", "row"), (0,), (5,)))
    assert result.heads.shape == (1, 16) and result.heads_in == "int4 per row" and len(result.tables()) == 2
    assert result.heads[0, 5] == pytest.approx(np.abs(one - losses).mean()) and (result.heads > 0).any()
    assert "unknown among state: 'int9'" in refusal(*given, "--state", "int9")
    assert "allowed are numbers below the 40 tokens" in refusal(*given, "--every", "40")
