"""Complex recurrences of one's own, against loops over the tokens."""

from dataclasses import replace

import pytest
import torch
from refusals import refuses
from torch import nn
import ssmscope
from ssmscope import ops

IDS = [4, 9, 8, 1, 2, 6, 11, 3, 7, 5]


class Turning(nn.Module):
    """Decays and angles of the token: two states of each channel, and 3 of complex inputs."""

    def __init__(self, width: int = 6, reverse: bool = False):
        super().__init__()
        self.rate, self.write, self.read = (nn.Linear(width, 4 * width) for _ in range(3))
        self.enter, self.leave = nn.Linear(width, 6), nn.Linear(6, width)
        self.reverse = reverse

    def parts(self, u):
        rate, b, c = (torch.view_as_complex(f(u).unflatten(-1, (-1, 2, 2))) for f in (self.rate, self.write, self.read))
        return (
            torch.complex(-rate.real.abs() / 4, 3 * rate.imag),
            b,
            c,
            torch.view_as_complex(self.enter(u).unflatten(-1, (3, 2))),
        )

    def forward(self, u):
        log_a, b, c, x = self.parts(u)
        h, few, found = 0, 0, [None] * u.shape[1]
        for t in reversed(range(u.shape[1])) if self.reverse else range(u.shape[1]):
            h = log_a[:, t].exp() * h + b[:, t] * u[:, t, :, None]
            few = log_a[:, t, :3, 0].exp() * few + b[:, t, :3, 0] * x[:, t]
            found[t] = (c[:, t] * h).sum(-1).real + self.leave(torch.view_as_real(c[:, t, :3, 0] * few).flatten(1))
        return torch.stack(found, 1)


class Backwards(Turning):
    def __init__(self, width: int = 6):
        super().__init__(width, reverse=True)


class Network(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(20, 6), layer, nn.Linear(6, 20)

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(x + self.layer(x))


def terms(layer, u):
    log_a, b, c, x = layer.parts(u)
    order = torch.arange(u.shape[1]).flip(0) if layer.reverse else None
    one = (slice(None), slice(None), slice(3), slice(1))
    return [
        ssmscope.Recurrence(x=u.unsqueeze(-1), b=b, c=c, log_a=log_a, order=order),
        ssmscope.Recurrence(x=x.unsqueeze(-1), b=b[one], c=c[one], log_a=log_a[one], order=order),
    ]


def output(layer, u, ys):
    return ys[0] + layer.leave(torch.view_as_real(ys[1]).flatten(2))


ssmscope.adapt(Turning, terms=terms, output=output)
ssmscope.adapt(Backwards, terms=terms, output=output, both_ways=True)


@pytest.mark.parametrize("kind", [Turning, Backwards])
def test_implicit_attention_is_that_of_a_loop(kind):
    """Re(c_t a_t … a_{s+1} b_s) of every pair, in the order of the positions."""
    torch.manual_seed(0)
    model = ssmscope.load(Network(kind()).double().eval())
    trace = model.trace([IDS])
    log_a, b, c, _ = model.mixers[0].parts(trace.layers[0].u)
    found = ops.attention_reference(trace.layers[0].recurrences[0])[0]
    order = list(range(len(IDS)))[:: -1 if kind is Backwards else 1]
    expected = torch.zeros_like(found)
    for late, t in enumerate(order):
        for early, s in enumerate(order[: late + 1]):
            decay = log_a[0, order[early + 1 : late + 1]].sum(0).exp()
            expected[:, t, s] = (c[0, t] * decay * b[0, s]).sum(-1).real
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    kept = torch.cat([log_a.real.exp().mean((2, 3)), log_a[:, :, :3, :1].real.exp().mean((2, 3))]).mean(0).float()
    torch.testing.assert_close(trace.retention[0, 0], kept, rtol=1e-6, atol=0)


def test_texts_go_on_from_states_in_any_batch():
    torch.manual_seed(1)
    model = ssmscope.load(network := Network(Turning()).eval())
    ids = IDS[:3]
    for _ in range(5):
        ids = [*ids, int(network(torch.tensor([ids]))[0, -1].argmax())]
    assert model.generate(ids=[IDS[:3], IDS], max_new_tokens=5).ids[0] == tuple(ids[-5:])


def test_what_has_no_real_form_is_refused():
    class Several(Turning):
        pass

    def wrong(layer, u):
        first, second = terms(layer, u)
        return [first, replace(second, x=torch.complex(first.x, first.x), b=first.b, c=first.c, log_a=first.log_a)]

    ssmscope.adapt(Several, terms=wrong, output=output)
    refuses("each head has one state and no D: give several states as heads", ssmscope.load, Network(Several()).eval())
