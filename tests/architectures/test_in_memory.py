"""Models in memory: taken out of their wrappers, used as they are, and never changed."""

import copy

import pytest
import torch
from loud import loud
from refusals import refuses
from torch import nn
from transformers import Mamba2Config, MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.core.intercept import observe
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

SIZES = dict(vocab_size=48, hidden_size=16, num_hidden_layers=2, expand=2, state_size=4)
IDS = [5, 1, 17, 3, 9]


def language_model() -> MambaForCausalLM:
    torch.manual_seed(0)
    return loud(MambaForCausalLM(MambaConfig(**SIZES, time_step_rank=3)))


def classifier() -> SSMForSequenceClassification:
    torch.manual_seed(0)
    backbone = Mamba2Config(**SIZES, num_heads=4, head_dim=8, n_groups=1)
    return loud(SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=3)))


def logits(model: ssmscope.Model) -> torch.Tensor:
    return model.logits(model.encode(ids=IDS))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: torch.compile(nn.DataParallel(m))])
@pytest.mark.parametrize("make", [language_model, classifier])
def test_wrappers_are_taken_off(wrap, make):
    module = make()
    model = ssmscope.load(wrap(module))
    assert model.module is module and model.is_classifier == (make is classifier)
    assert torch.equal(logits(model), logits(ssmscope.load(make())))


def test_adapters_stay_active():
    """The logits are those of the wrapped model, which are not those of its base."""
    peft = pytest.importorskip("peft")
    base = language_model()
    without = logits(ssmscope.load(copy.deepcopy(base)))
    lora = peft.LoraConfig(r=2, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, lora).eval()
    with torch.no_grad():
        own = wrapped(torch.tensor([IDS]), use_cache=False).logits
    for given in (wrapped, nn.DataParallel(wrapped)):
        found = logits(ssmscope.load(given))
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-3)
        assert (found - without).abs().max() > 0.1
    assert any("lora" in name for name, _ in ssmscope.load(wrapped).module.named_parameters())


class Own(nn.Module):
    """A backbone within a module that has no forward pass."""

    def __init__(self):
        super().__init__()
        self.backbone = language_model().backbone
        self.config = self.backbone.config


@pytest.mark.parametrize("given, words", [
    (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
    (lambda: nn.DataParallel(nn.Linear(2, 2)), "Linear within the DataParallel .* is not a transformers model"),
    (Own, "Own cannot be run on token ids"),
    (lambda: language_model().backbone.layers[0].mixer, "MambaMixer is not a transformers model"),
    (lambda: language_model().to("meta"), "not in memory .*meta device"),
    (lambda: 5, "int was given as a model; give"),
    (lambda: None, "NoneType was given as a model; give"),
    (lambda: ["demo/sst2-mamba2"], "list was given as a model"),
])  # fmt: skip
def test_what_is_no_model(given, words):
    refuses(words, ssmscope.load, given())


def test_offloaded_weights_are_refused():
    accelerate = pytest.importorskip("accelerate")
    module = accelerate.cpu_offload(language_model(), execution_device=torch.device("cpu"))
    refuses("without offloading", ssmscope.load, module)


def test_another_dtype_is_that_of_a_copy():
    module = classifier()
    before = {name: (t, t.data_ptr(), t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
    own = logits(ssmscope.load(module))
    model = ssmscope.load(module, dtype="float64")
    assert model.module is not module and {p.dtype for p in model.module.parameters()} == {torch.float64}
    copied = ssmscope.load(language_model(), dtype="float64").module
    assert copied.lm_head.weight is copied.backbone.embeddings.weight
    torch.testing.assert_close(logits(model).float(), own, rtol=1e-4, atol=1e-3)
    for name, now in module.state_dict(keep_vars=True).items():
        then, address, value = before[name]
        assert now is then and now.data_ptr() == address and now.dtype == torch.float32 and torch.equal(now, value)


@pytest.mark.parametrize("given", [{}, {"dtype": "float32"}, {"dtype": torch.float32, "device": "cpu"}])
def test_the_module_itself_where_nothing_else_is_asked_for(given):
    module = language_model()
    assert ssmscope.load(module, **given).module is module


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_or_not_any_more(value):
    module = classifier()
    model = ssmscope.load(module)
    with torch.no_grad():
        module.backbone.layers[1].mixer.D[2] = value
    for ask in (lambda: ssmscope.load(module), lambda: model.fingerprint):
        refuses(r"1 of the 4 numbers of backbone.layers.1.mixer.D are not finite", ask)


def test_large_weights_are_finite():
    """Their sum overflows."""
    module = language_model()
    with torch.no_grad():
        module.backbone.layers[0].mixer.in_proj.weight.fill_(3e38)
    assert ssmscope.load(module).module is module


@pytest.mark.parametrize(("name", "value"), [
    *(("device", value) for value in ("meta", "warp", "", "cpu:x", 5.5, [], "cuda:4096")),
    *(("dtype", value) for value in ("int8", torch.int64, torch.complex64, 5, "")),
])  # fmt: skip
def test_devices_and_dtypes_that_cannot_be_used(name, value):
    said = "device .* cannot be used" if name == "device" else "dtype .* is unknown"
    refuses(said, ssmscope.load, language_model(), **{name: value})


class Flat(nn.Module):
    """A language model of one's own whose head reads the tokens of all texts in one row, and may be given them by
    name."""

    def __init__(self, whole: nn.Module, by_name: bool):
        super().__init__()
        self.backbone, self.head, self.by_name = whole.base_model, whole.get_output_embeddings(), by_name

    def forward(self, input_ids):
        hidden = self.backbone(input_ids).last_hidden_state.flatten(0, 1)
        flat = self.head(input=hidden) if self.by_name else self.head(hidden)
        return flat.view(*input_ids.shape, -1)


@pytest.mark.parametrize("by_name", [False, True])
def test_last_logits_of_a_head_that_reads_all_texts_in_one_row(by_name):
    texts = [IDS, [7, 2], [11, 4, 8]]
    model = ssmscope.load(Flat(language_model(), by_name))
    with torch.no_grad():
        alone = torch.stack([model.module(input_ids=torch.tensor([text])).logits[0, -1] for text in texts])
    torch.testing.assert_close(model.run(model.encode(ids=texts), last_only=True).logits, alone)


def test_a_head_reads_the_last_position_of_each_text_alone():
    model = ssmscope.load(language_model())
    batch, seen = model.encode(ids=[IDS, [7, 2], [11, 4, 8]]), []
    head = model.module.get_output_embeddings()
    with observe(after=[(head, lambda part, output: seen.append(output.shape))]):
        found = model.run(batch, last_only=True).logits
    assert seen == [(3, 1, SIZES["vocab_size"])]
    torch.testing.assert_close(found, model.logits(batch)[range(3), [4, 1, 2]])
