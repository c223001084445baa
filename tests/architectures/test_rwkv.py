"""RWKV-4: the blocks against the paper's sums, keys of any size, and transformers' rescaling around them."""

import pytest
import torch
from examples import own_output, relative
from loud import TrueFloat64, loud
from refusals import refuses
from transformers import RwkvConfig, RwkvForCausalLM
from ssmscope import ops
from ssmscope.core.mixers import fast_scan, mixers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.layers import rwkv
from ssmscope.loading.load import load

SIZES = dict(vocab_size=50, hidden_size=12, num_hidden_layers=2, rescale_every=0, use_cache=False)


def made(**options) -> RwkvForCausalLM:
    torch.manual_seed(0)
    model = RwkvForCausalLM(RwkvConfig(**{**SIZES, **options}))
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return loud(model)


def block_and_input(number: int = 0, length: int = 17, **options):
    """A block of a random model in float64, and an input."""
    block = mixers(made(**options).double())[number]
    torch.manual_seed(1)
    return block, torch.randn(2, length, SIZES["hidden_size"]).double()


def wkv_by_sums(k, v, w, u) -> torch.Tensor:
    """Eq. 16 of the paper, one channel and token at a time, over (length, channels)."""
    rows = []
    for t in range(len(k)):
        weights = [k[s] - (t - s - 1) * w for s in range(t)]
        weights.append(k[t] + u)
        weights = torch.stack(weights).softmax(0)
        rows.append((weights * v[: t + 1]).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("number", [0, 1])
def test_blocks_of_other_sizes_are_the_librarys(number):
    block, u = block_and_input(number, attention_hidden_size=20, intermediate_size=7)
    with torch.no_grad(), TrueFloat64():
        assert relative(rwkv.output(block, rwkv.compute_terms(block, u)), own_output(block, u)) < 1e-11


@pytest.mark.parametrize("size", [1.0, 60.0, 3000.0])
def test_keys_of_any_size_are_averaged_exactly(size):
    """In float32 e^88 is infinite and e^−104 is zero: neither must be met on the way."""
    block, u = block_and_input(length=40)
    block = block.float()
    with torch.no_grad():
        block.attention.key.weight.mul_(size / 10)
        layer = rwkv.compute_terms(block, u.float())
        (scanned,) = layer.scan()
        p = torch.cat([torch.zeros(2, 1, 12), scanned.y.squeeze(-1)[:, :-1]], 1)
        wkv = torch.lerp(layer.recurrence.x.squeeze(-1), p, layer.extras["bonus"].sigmoid())
        a = block.attention
        h = layer.conv_input
        k = a.key(h * a.time_mix_key + a.time_shift(h) * (1 - a.time_mix_key))
        assert k.abs().max() > 0.8 * size
        for row in range(2):
            v = layer.recurrence.x[row, ..., 0].double()
            exact = wkv_by_sums(k[row].double(), v, a.time_decay.double().exp(), a.time_first.double())
            assert relative(wkv[row].double(), exact) < 2e-5
            own = block(u[row : row + 1].float())[0]
            assert relative(rwkv.output(block, layer)[row], own[0]) < 2e-4


def test_gradients_are_the_models_own_for_large_keys():
    model = made().train()
    with torch.no_grad():
        for block in model.rwkv.blocks:
            block.attention.key.weight.mul_(6.0)
    ids = torch.tensor([[5, 17, 3, 9, 22, 1, 4, 5, 5, 30], [7, 8, 9, 2, 2, 2, 2, 11, 40, 1]])
    own = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    with fast_scan(model):
        ours = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    assert all(relative(a, b) < 1e-4 for a, b in zip(ours, own) if b.abs().max() > 1e-6)
    assert own[[n for n, _ in model.named_parameters()].index("rwkv.blocks.1.attention.time_decay")].abs().max() > 0


def test_retention_is_the_share_of_the_mean_that_a_token_leaves():
    block, u = block_and_input()
    with torch.no_grad():
        layer = rwkv.compute_terms(block, u)
        a, h = block.attention, layer.conv_input
        k = a.key(h * a.time_mix_key + a.time_shift(h) * (1 - a.time_mix_key))
    w = block.attention.time_decay.exp()
    age = torch.arange(17)[:, None] - torch.arange(17)
    past = (age >= 0)[:, :, None]
    weight = (k.unsqueeze(1) - age.clamp(min=0)[:, :, None] * w).exp() * past  # (batch, t, s, channel)
    share = k.exp() / weight.sum(2)
    retained = layer.recurrence.log_decay().exp().squeeze(-1)
    torch.testing.assert_close(retained, 1 - share)
    torch.testing.assert_close(layer.recurrence.b.squeeze(-1), share)
    torch.testing.assert_close(layer.retention(), (1 - share).mean(-1))
    assert (retained[:, 0] == 0).all() and retained[:, 1:].std() > 0.1
    torch.testing.assert_close(layer.extras["decay"], (-w).exp().detach())
    mean = torch.einsum("btsc,bsc->btc", weight, layer.recurrence.x.squeeze(-1)) / weight.sum(2)
    torch.testing.assert_close(ops.scan(layer.recurrence).y.squeeze(-1), mean)


def test_rescaling_leaves_no_mark(tmp_path):
    """transformers halves the stream after every block here, and divides the last block's weights by 8, in place."""
    module = made(num_hidden_layers=4, rescale_every=1, layer_norm_epsilon=1e-10)
    stored = {name: t.clone() for name, t in module.state_dict().items()}
    module.save_pretrained(tmp_path / "before")
    model = Model(module)
    batch, fingerprint = model.encode(ids=[5, 17, 3, 9]), model.fingerprint
    first = model.logits(batch)
    assert model.fingerprint == fingerprint
    module.save_pretrained(tmp_path / "after")
    for where in ("before", "after"):
        torch.testing.assert_close(load(tmp_path / where).logits(batch), first)
    with torch.no_grad():
        own = module(batch.input_ids).logits
    name = "rwkv.blocks.3.attention.output.weight"
    torch.testing.assert_close(module.state_dict()[name], stored[name] / 8)  # transformers did
    assert relative(first, own) < 1e-4  # the last norm has its own ε
    torch.testing.assert_close(model.logits(batch), first)
    assert model.fingerprint == fingerprint
    torch.testing.assert_close(module.state_dict()[name], stored[name] / 8)  # and we do not touch them
    with torch.no_grad():
        assert torch.equal(module(batch.input_ids).logits, own)


def test_what_transformers_rescales_is_undone_in_maps_and_traces_too():
    module = made(num_hidden_layers=4, rescale_every=1, layer_norm_epsilon=1e-10)
    model = Model(module)
    batch = model.encode(ids=[5, 17, 3, 9])
    before = model.trace(batch)
    layers = [layer.matvec(layer.u) + layer.bias for layer in before.linearized]
    with torch.no_grad():
        module(batch.input_ids)  # rescales
    assert module.rwkv.layers_are_rescaled
    after = model.trace(batch)
    for one, two, old in zip(layers, after.linearized, before.linearized):
        torch.testing.assert_close(two.matvec(two.u) + two.bias, one)
        torch.testing.assert_close(old.matvec(old.u) + old.bias, one)  # a trace from before is still that of its run


def test_weights_kept_after_an_evaluation_in_training_are_the_trained_ones():
    module = made(num_hidden_layers=4, rescale_every=2)
    stored = {name: t.clone() for name, t in module.state_dict().items()}
    ids = torch.tensor([[5, 17, 3]])
    with torch.no_grad(), fast_scan(module):
        for mode in (True, False, True, False):
            module.train(mode)(ids)
        assert all(torch.equal(t, stored[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_float16_is_refused_where_it_overflows(every):
    with pytest.raises(InputError, match="an RWKV of 4 layers overflows in float16: use bfloat16 or float32"):
        Model(made(num_hidden_layers=4, rescale_every=every).half()).trace(ids=[5, 17, 3])
    for allowed in (0, 4, 5):
        with rwkv.reading(made(num_hidden_layers=4, rescale_every=allowed).half()):
            pass


def test_half_precision_stays_near():
    model = made()
    batch = Model(model).encode(ids=[3, 9, 17, 4])
    whole = Model(model).logits(batch)
    half = Model(model.bfloat16()).logits(batch)
    assert half.dtype == torch.bfloat16 and relative(half.float(), whole) < 0.1


@pytest.mark.parametrize("part", ["attention.output", "feed_forward.value"])
def test_weights_that_are_rescaled_are_no_others_function(part):
    """transformers would divide what a parametrised weight is made of, which changes it by another factor."""
    model = made(num_hidden_layers=4, rescale_every=2)
    torch.nn.utils.parametrizations.weight_norm(model.rwkv.blocks[3].get_submodule(part))
    refuses("powers of two, but not what a PEFT adapter or hook adds", lambda: Model(model).trace(ids=[5, 17, 3]))
    model.rwkv.config.rescale_every = 0
    assert (
        relative(Model(model).logits(Model(model).encode(ids=[5, 17, 3])), model(torch.tensor([[5, 17, 3]])).logits)
        < 1e-5
    )


@pytest.mark.parametrize("every", [1, 2])
def test_hooks_on_what_is_rescaled_are_refused(every):
    model = made(num_hidden_layers=3, rescale_every=every)
    hook = model.rwkv.blocks[0].feed_forward.value.register_forward_hook(lambda module, args, y: 1.5 * y)
    with (
        pytest.raises(InputError, match="powers of two, but not what a PEFT adapter or hook adds"),
        rwkv.reading(model),
    ):
        pass
    model.rwkv.config.rescale_every = 3
    with rwkv.reading(model):
        hook.remove()


def test_weights_that_are_rescaled_meanwhile_are_noticed():
    models = torch.nn.ModuleList([made(), made()])
    said = "another thread ran this model for the first time meanwhile, which rescaled its weights; run it again"
    with pytest.raises(InputError, match=said), rwkv.reading(models):
        models[1].rwkv.layers_are_rescaled = True


def test_a_block_alone_has_its_stored_weights():
    model = made(num_hidden_layers=4, rescale_every=1)
    stored = {name: t.clone() for name, t in model.state_dict().items()}
    block, at = model.rwkv.blocks[2], "rwkv.blocks.2."
    with torch.no_grad():
        model(torch.tensor([[5, 17, 3]]))
    assert torch.equal(block.attention.output.weight, stored[f"{at}attention.output.weight"] / 4)
    for part, prefix in ((model, ""), (model.rwkv, "rwkv."), (block, at)):
        for name, weight in rwkv.stored(part).items():
            assert torch.equal(weight, stored[prefix + name]), name


def test_a_call_with_a_cache_takes_the_models_own_path():
    model = made()
    ids = torch.tensor([[5, 17, 3, 9]])
    with torch.no_grad(), fast_scan(model):
        whole = model(ids).logits
        for more in ({"use_cache": True}, {}):
            state = model(ids[:, :2], use_cache=True).state
            again = model(ids[:, 2:], state=state, **more).logits
            assert relative(again, whole[:, 2:]) < 1e-5


def test_hidden_states_and_tuples_are_the_models_own():
    model = made(num_hidden_layers=3).double()
    ids = torch.tensor([[5, 17, 3, 9], [4, 6, 2, 8]])
    for configured in (False, True):
        model.rwkv.config.output_hidden_states = configured
        for wanted in (None, False, True):
            own = model.rwkv(ids, output_hidden_states=wanted)
            with torch.no_grad(), fast_scan(model):
                found = model.rwkv(ids, output_hidden_states=wanted)
                named = model.rwkv(ids, output_hidden_states=wanted, return_dict=True)
                pair = model.rwkv(ids, output_hidden_states=wanted, return_dict=False)
            assert (found.hidden_states is None) == (own.hidden_states is None) == (len(pair) == 1)
            for one, other in zip(found.hidden_states or (), own.hidden_states or (), strict=True):
                assert relative(one, other) < 1e-6
            assert torch.equal(named.last_hidden_state, found.last_hidden_state) and isinstance(pair, tuple)
            assert torch.equal(pair[0], found.last_hidden_state) and not isinstance(found, tuple)


def test_a_mask_is_given_by_place_or_by_name():
    ids, mask = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 0, 0]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    language = made()
    with torch.no_grad(), fast_scan(language):
        by_place, by_name = language(ids, mask).logits, language(ids, attention_mask=mask).logits
        alone = language(torch.tensor([[5, 6, 7]])).logits[0]
    for found in (by_place, by_name):
        torch.testing.assert_close(found[0, 2:], alone)
        torch.testing.assert_close(found[1, :3], alone)
