"""The delta rule, which removes the keys that it writes, and the generalised one: scan, matrices and survival."""

import pytest
import torch
from examples import relative
from refusals import refuses
from ssmscope import ops
from ssmscope.ops import delta_rule, survival

CLOSE = dict(rtol=1e-10, atol=1e-11)


def recurrence(
    length: int = 37, decays: int = 4, groups: int = 3, removals: tuple[int, ...] | None = (), scale: float = 0.3
) -> tuple[ops.DeltaRecurrence, torch.Tensor]:
    """Return a random recurrence of 3 heads, width 5, state 4, and a state to start from; with one removal a position,
    or so many, or, where it is None, of the keys that are written, of length 1."""
    torch.manual_seed(length)
    b, c = torch.randn(2, 2, length, groups, 4, dtype=torch.float64).unbind()
    keys = torch.randn(2, 2, length, 3, *(removals or ()), 4, dtype=torch.float64)
    e, r = torch.nn.functional.normalize(keys, dim=-1).unbind()
    log_a, beta = -scale * torch.rand(2, length, 3, decays).double(), torch.rand(2, length, 3).double()
    x, H = torch.randn(2, length, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    terms = dict(log_a=log_a, D=torch.randn(3).double(), beta=beta)
    if removals is None:
        return ops.DeltaRecurrence(x, torch.nn.functional.normalize(b, dim=-1), c, **terms), H
    return ops.DeltaRecurrence(x, b, c, **terms, e=e, r=r), H


def in_words(r: ops.DeltaRecurrence, H: torch.Tensor, text: int, head: int) -> torch.Tensor:
    """y of one text and head: look up under e, decay, take away along r, remove again, write under b, read."""
    rows, (b, c) = [], r.by_head()
    for t in range(r.x.shape[1]):
        at = text, t, head
        (e, along), *more = r.removals()
        H = H * r.log_a[at].exp() - r.beta[at] * torch.outer(H @ e[at], along[at])
        for e, along in more:
            H = H - r.beta[at] * torch.outer(H @ e[at], along[at])
        H = H + r.beta[at] * torch.outer(r.x[at], b[at])
        rows.append(H @ c[at] + r.D[head] * r.x[at])
    return torch.stack(rows)


@pytest.mark.parametrize(("length", "decays", "groups", "removals"), [
    *[(1, 4, 3, ()), (32, 1, 1, ()), (37, 4, 3, ()), (100, 4, 1, ()), (1, 1, 3, (2,)), (37, 4, 1, (3,))],
    *(
        (length, decays, groups, None)
        for length in (1, 5, 31, 32, 33, 100)
        for decays in (1, 4)
        for groups in (1, 3)
    ),
])  # fmt: skip
def test_the_scan_is_the_rule_in_words(length, decays, groups, removals, monkeypatch):
    r, H = recurrence(length, decays, groups, removals)
    slow = ops.scan_reference(r, H)
    for text, head in ((0, 0), (1, 2)):
        assert relative(slow.y[text, :, head], in_words(r, H[text, head], text, head)) < 1e-12
    monkeypatch.setattr(delta_rule, "STEPS_PER_SEGMENT", 45)
    for one, other in zip(ops.scan(r, H, retention=True), slow):
        torch.testing.assert_close(one, other, **CLOSE)
    torch.testing.assert_close(ops.states(r, [length - 1, length // 2], H)[:, 0], slow.state, **CLOSE)
    assert ops.scan(r).retention is None
    b, _ = r.by_head()
    plain, same = (
        ops.DeltaRecurrence(r.x, r.b, r.c, log_a=r.log_a, beta=r.beta, D=r.D, **keys)
        for keys in ({}, {"e": b * r.log_a.exp(), "r": b})
    )
    if length < 50:  # states of longer runs grow: these keys are not of length 1
        for one, other in zip(ops.scan(same, H, retention=True), ops.scan_reference(plain, H)):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)
    joined = ops.scan(r.between(13, None), ops.scan(r.between(0, 13), H).state)
    torch.testing.assert_close(joined.y, slow.y[:, 13:], **CLOSE)


@pytest.mark.parametrize(("decays", "removals"), [(4, ()), (4, (2,)), (1, None), (4, None)])
def test_gradients_are_the_references(decays, removals):
    r, H = recurrence(40, decays, removals=removals)
    names = ("x", "b", "c", "log_a", "beta", "D", *(() if removals is None else ("e", "r")))
    terms = [*(getattr(r, n).requires_grad_() for n in names), H]
    H.requires_grad_()
    found, wanted = (
        torch.autograd.grad(run(r, H).y.sin().sum() + run(r, H).state.sin().sum(), terms)
        for run in (ops.scan, ops.scan_reference)
    )
    for a, b in zip(found, wanted):
        assert relative(a, b) < 1e-9


@pytest.mark.parametrize(("decays", "removals"), [(1, ()), (4, ()), (1, (2,)), (4, (3,))])
def test_matrices_are_the_references(decays, removals):
    r, _ = recurrence(21, decays, removals=removals)
    expected = ops.attention_reference(r)
    torch.testing.assert_close(ops.attention(r, groups=3), expected, **CLOSE)
    torch.testing.assert_close(ops.attention(r, groups=3, rows=[20, 3]), expected[:, :, [20, 3]], **CLOSE)
    cells = ops.pooled_attention(r, 5, groups=3)
    edge = [i * 21 // 5 for i in range(6)]
    past = torch.ones(21, 21).tril()
    for t in range(5):
        for s in range(t + 1):
            cell = (..., slice(edge[t], edge[t + 1]), slice(edge[s], edge[s + 1]))
            torch.testing.assert_close(cells[..., t, s], expected[cell].sum((-2, -1)) / past[cell].sum(), **CLOSE)


@pytest.mark.parametrize(("decays", "removals"), [(1, ()), (4, ()), (4, (3,)), (1, None), (4, None)])
def test_what_survives_is_what_a_run_that_writes_once_leaves(decays, removals, monkeypatch):
    r, H = recurrence(40, decays, removals=removals)
    left = survival.remaining_reference(r)
    torch.testing.assert_close(survival.remaining_norms(r), left.norm(dim=(-2, -1)), **CLOSE)
    inner, rest = survival.left_towards_state(r, H)
    state = ops.scan_reference(r, H).state
    torch.testing.assert_close(inner, (left * state[:, None]).sum((-2, -1)), **CLOSE)
    torch.testing.assert_close(inner.sum(1) + rest, state.square().sum((-2, -1)), **CLOSE)
    keys = []
    for steps in (128, 7):
        monkeypatch.setattr(delta_rule, "STEPS_PER_CHUNK", steps)
        keys.append(torch.cat([k for _, k in reversed([*survival._keys_left(r)])], 1))
    torch.testing.assert_close(*keys, **CLOSE)
    lives = survival.half_lives([r.between(0, 40)], per_head=True)
    masses = (
        survival.remaining_norms(r.between(0, 12))[0, 11],
        (r.written.norm(dim=-1) * r.by_head()[0].norm(dim=-1))[0, 11],
    )
    torch.testing.assert_close(*masses, **CLOSE)  # nothing has come after
    each = [survival.remaining_norms(r.between(0, t + 1))[1] for t in range(40)]  # after every token
    for s in (3, 20):
        for head in range(3):
            norms = [after[s, head].item() for after in each[s:]]
            halved = [lag for lag, norm in enumerate(norms) if norm <= norms[0] / 2]
            assert lives[1, s, head] == (halved[0] if halved else torch.inf)


def test_one_key_alone_or_of_another_shape_is_refused():
    r, _ = recurrence()
    given = dict(x=r.x, b=r.b, c=r.c, log_a=r.log_a, beta=r.beta)
    for keys in ({"e": r.e}, {"e": r.e, "r": r.r[:, 1:]}, {"e": r.e, "r": r.r.unsqueeze(3)}):
        with pytest.raises(ValueError, match="has both keys, e and r, of shape"):
            ops.DeltaRecurrence(**given, **keys)


@pytest.mark.parametrize("decays", [1, 4])
def test_strong_decays_overflow_nowhere(decays):
    exact, H = recurrence(70, decays, removals=None, scale=400.0)
    r, H = exact.to(torch.float32), H.float()
    terms = [t.requires_grad_() for t in (r.x, r.b, r.c, r.log_a, r.beta)]
    y = ops.scan(r, H).y
    torch.testing.assert_close(y, ops.scan_reference(r, H).y, rtol=1e-4, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.square().sum(), terms))


def test_small_writes_and_decays_keep_their_digits():
    r, _ = recurrence(removals=None)
    faint = ops.DeltaRecurrence(x=r.x, b=r.b, c=r.c, log_a=r.log_a * 1e-20, beta=r.beta * 1e-20)
    expected = 1e-20 * (r.beta / 4 - r.log_a.mean(-1))
    torch.testing.assert_close(ops.write(faint, per_head=True), expected, rtol=1e-10, atol=0.0)
    refuses("a delta rule's transition", r.log_decay)
