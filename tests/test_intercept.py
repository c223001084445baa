"""A model in memory is shared: threads, nested runs, other people's forward passes, errors, modes."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from examples import EXAMPLES, TEXTS, random_example
from exhaustive import few
from loud import loud
from refusals import refuses
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.core.cuts import cut_edges
from ssmscope.core.edits import Edit, edited
from ssmscope.core.intercept import Switch
from ssmscope.core.mixers import fast_scan
from ssmscope.core.model import Model
from ssmscope.errors import InputError

THREADS, RUNS = 8, 6


def mamba(**options) -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=50, hidden_size=12, num_hidden_layers=2, state_size=4, **options)
    return loud(MambaForCausalLM(config))


def example(name: str) -> nn.Module:
    return loud(random_example(name))


def nothing_left(module: nn.Module) -> bool:
    return not any(
        "forward" in part.__dict__ or part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )


def same(one, two) -> bool:
    return torch.equal(one.logits, two.logits) and torch.equal(one.retention.nan_to_num(), two.retention.nan_to_num())


@pytest.mark.parametrize("name", few(EXAMPLES, "mamba2", "groupmamba", "rwkv"))
def test_threads_trace_one_model_as_one_does(name):
    module = example(name)
    model = Model(module)
    batches = [model.encode(ids=TEXTS[:2]), model.encode(ids=[[5, 17, 3, 9, 9, 1]])]
    expected = [model.trace(batch) for batch in batches]
    ids = batches[1].input_ids
    with torch.no_grad():
        plain = module(ids).logits
    stop, wrong = threading.Event(), []

    def other_people() -> int:
        runs = 0
        while not stop.is_set():
            with torch.no_grad():
                found = module(ids).logits
            if not torch.equal(found, plain):
                wrong.append((found - plain).abs().max())
            runs += 1
        return runs

    def trace(number: int) -> None:
        for run in range(RUNS):
            at = (number + run) % 2
            if not same(model.trace(batches[at]), expected[at]):
                wrong.append((number, run))

    with ThreadPoolExecutor(THREADS + 1) as pool:
        others = pool.submit(other_people)
        for one in [pool.submit(trace, number) for number in range(THREADS)]:
            one.result()
        stop.set()
        assert others.result() > 0
    assert not wrong
    assert nothing_left(module)


def test_each_thread_has_its_own_edits():
    """Edits enter by blocks, mixers and scans, next to runs without edits and other people's runs."""
    model = Model(example("mamba2"))
    batch = model.encode(ids=[[5, 17, 3, 9, 9, 1, 4, 60]])

    def halved(value, site):
        return tuple(each / 2 for each in value) if isinstance(value, tuple) else value / 2

    edits = [()]
    edits += [(Edit(place, place, halved),) for place in ("residual", "input", "convolution", "output")]
    edits += [cut_edges([2], [7], level=level) for level in ("ssm", "block")]
    expected = [model.run(batch, edits=each).logits for each in edits]
    assert len({each.sum().item() for each in expected}) == len(edits)
    ids = batch.input_ids
    with torch.no_grad():
        plain = model.module(ids).logits

    def run(number: int) -> list[int]:
        wrong = []
        for at in (number + np.arange(RUNS)) % len(edits):
            with edited(model, edits[at]):
                found = model.run(batch).logits
            if not torch.equal(found, expected[at]):
                wrong.append(int(at))
            with torch.no_grad():
                if not torch.equal(model.module(ids).logits, plain):
                    wrong.append(-1)
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        assert not [wrong for found in pool.map(run, range(THREADS)) for wrong in found]
    assert nothing_left(model.module)


def test_nothing_is_left_after_an_error():
    module = mamba().eval()

    def fail(*_):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"), fast_scan(module, visit=fail):
        module(torch.tensor([[1, 2]]))
    assert nothing_left(module) and module.config.use_cache is True


def test_a_forward_pass_put_on_a_layer_is_called_and_stays():
    model = Model(mamba().eval())
    expected = model.trace(ids=[5, 17, 3])
    mixer = model.mixers[1]
    own, calls = mixer.forward, []

    def counting(*args, **kwargs):
        calls.append(args[0].shape)
        return own(*args, **kwargs)

    mixer.forward = counting
    found = model.trace(ids=[5, 17, 3])
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.retention, expected.retention)
    assert len(calls) == 1 and mixer.forward is counting
    mixer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.5
    refuses("layer 1 that computes something other than the layer", model.trace, ids=[5, 17, 3])


def test_hooks_of_accelerate_run_and_stay():
    hooks = pytest.importorskip("accelerate.hooks")

    class Counting(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

        def post_forward(self, module, output):
            return output + 1

    model = Model(mamba().eval())
    with torch.no_grad():
        before = model.logits(model.encode(ids=[5, 17, 3]))
    hook = Counting()
    hooks.add_hook_to_module(model.mixers[0], hook)
    standing = model.mixers[0].__dict__["forward"]
    batch = model.encode(ids=[5, 17, 3])
    with torch.no_grad():
        own = model.module(batch.input_ids).logits
        found = model.logits(batch)
    torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)
    assert (own - before).abs().max() > 0.01 and hook.calls == 2
    assert model.mixers[0].__dict__["forward"] is standing


def test_offloaded_weights_are_refused():
    accelerate = pytest.importorskip("accelerate")
    module = accelerate.cpu_offload(mamba().eval(), execution_device=torch.device("cpu"))
    refuses("the weights of .* are not in memory", Model, module)


def test_a_copy_made_while_a_run_goes_on_is_a_model_of_its_own():
    module = mamba().eval()
    ids = torch.tensor([[5, 17, 3]])
    with torch.no_grad():
        expected = module(ids).logits
        with fast_scan(module):
            taken = copy.deepcopy(module)
        taken.get_input_embeddings().weight.mul_(2)
        torch.testing.assert_close(module(ids).logits, expected)
        fresh = copy.deepcopy(module)
        fresh.get_input_embeddings().weight.mul_(2)
        torch.testing.assert_close(taken(ids).logits, fresh(ids).logits)
        assert (taken(ids).logits - expected).abs().max() > 0.01
    switches = [part.__dict__["forward"] for part in taken.modules() if "forward" in part.__dict__]
    assert all(isinstance(each, Switch) and each.module in list(taken.modules()) for each in switches)


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    module = mamba()
    module.backbone.norm_f = nn.Sequential(module.backbone.norm_f, nn.Dropout(0.5))
    return module


def test_a_model_in_training_is_run_in_evaluation_and_stays_in_training():
    module = with_dropout().train()
    module.backbone.layers[0].eval()
    modes = [part.training for part in module.modules()]
    model = ssmscope.load(module)
    first, second = model.trace(ids=[5, 17, 3]), model.trace(ids=[5, 17, 3])
    assert same(first, second) and [part.training for part in module.modules()] == modes
    ssmscope.explain(model, model.encode(ids=[5, 17, 3]), methods="gradxinput", target=1)
    first.layers[0], first.linearized[1]
    assert [part.training for part in module.modules()] == modes
    torch.testing.assert_close(first.logits, Model(module.eval()).trace(ids=[5, 17, 3]).logits)


def test_a_random_gate_is_not_drawn_where_a_trace_is_read():
    model = Model(example("baleen-b-mamba2").train())
    trace = model.trace(ids=[5, 17, 3, 8])
    torch.testing.assert_close(trace.layers[1].retention(), trace.retention[1])


def test_a_write_that_leaves_no_trace_is_seen():
    model = Model(mamba().eval())
    before = model.fingerprint
    version = model.module.lm_head.weight._version
    model.module.lm_head.weight.data.neg_()
    model.module.lm_head.weight.data.mul_(1)
    assert model.fingerprint != before
    model.module.lm_head.weight.data.neg_()
    assert model.fingerprint == before and version == model.module.lm_head.weight._version


@pytest.mark.parametrize("name", ["mamba", "groupmamba"])
def test_a_trace_refuses_to_mix_two_models(name):
    model = Model(example(name))
    trace = model.trace(ids=[5, 17, 3, 8])
    torch.testing.assert_close(trace.layers[1].retention(), trace.retention[1])
    weight = model.module.backbone.layers[1].mixer.dt_proj.weight.data
    weight.mul_(3)
    for layers in (trace.layers, trace.linearized):
        with pytest.raises(InputError, match="the weights of layer 1 .* have changed since this trace was taken") as no:
            layers[1]
        assert "\n" not in str(no.value)
    trace.layers[0]
    weight.div_(3)
    again = model.trace(ids=[5, 17, 3, 8])
    torch.testing.assert_close(again.layers[1].retention(), again.retention[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_damaged_weights_are_refused(value):
    module = mamba().eval()
    module.backbone.layers[1].mixer.A_log.data[3, 2] = value
    damaged = r"is damaged: 1 of the .* numbers of backbone\.layers\.1\.mixer\.A_log are not finite"
    refuses(damaged, Model, module)


def test_weights_damaged_later_are_refused_too():
    model = Model(mamba().eval())
    model.module.backbone.layers[1].mixer.D.data[3] = float("inf")
    refuses("are not finite", model.trace, ids=[5, 17, 3])


class Capped(Mamba2ForCausalLM):
    """Head followed by a multiplier, a bias and a cap, as hybrids have them."""

    def forward(self, *args, **kwargs):
        run = super().forward(*args, **kwargs)
        run.logits = 30 * torch.tanh((0.02 * run.logits + torch.linspace(-1, 1, run.logits.shape[-1])) / 30)
        return run


@pytest.fixture(scope="module")
def capped() -> Model:
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, state_size=6, num_heads=6, head_dim=8, n_groups=2)
    return Model(loud(Capped(Mamba2Config(**sizes, chunk_size=8))).eval())


def test_logits_are_the_models_own(capped):
    batch = capped.encode(ids=[[5, 17, 3, 9], [4, 4]])
    with torch.no_grad():
        own = capped.module(batch.input_ids).logits
        last = torch.stack([own[0, 3], own[1, 1]])
        torch.testing.assert_close(capped.logits(batch)[0], own[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(capped.trace(batch).logits, last, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(capped.run(batch, last_only=True).logits, last, atol=1e-5, rtol=1e-4)
        with capped.running(mask=batch.mask):
            found = capped.forward_embeddings(capped.embed(batch), batch.mask)
        torch.testing.assert_close(found, last, atol=1e-5, rtol=1e-4)
        hidden = capped.module.backbone(batch.input_ids).last_hidden_state
    from ssmscope.probes.long_rows import head_logits

    torch.testing.assert_close(head_logits(capped, hidden), own, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(head_logits(capped, hidden[0, 2]), own[0, 2], atol=1e-5, rtol=1e-4)


class Mixing(nn.Module):
    """Positions mixed by something that has no state of its own: the mean of all so far."""

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)


class LocalAttention(Mixing):
    """The same under the name that hybrids give it, at a tenth of the strength."""

    def forward(self, x):
        return 1e-5 * super().forward(x)


@pytest.mark.parametrize("kind", [Mixing, LocalAttention])
def test_states_are_refused_where_more_looks_back(kind):
    module = mamba().eval()
    model = Model(module)
    first = model.run(model.encode(ids=[5, 17, 3]))
    model.run(model.encode(ids=[9, 9]), first.states)
    extra = kind()
    block = module.backbone.layers[1]
    block.extra = extra
    own = type(block).forward
    block.forward = lambda hidden, *args, **kwargs: own(block, hidden + extra(hidden), *args, **kwargs)
    hybrid = Model(module, name="hybrid")
    states = hybrid.run(hybrid.encode(ids=[5, 17, 3])).states
    refuses("hybrid cannot continue from its states", hybrid.run, hybrid.encode(ids=[9, 9]), states)
