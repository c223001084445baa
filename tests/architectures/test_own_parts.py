"""Parts of a user's own model: the embedding that reads the ids, the head, and the arguments it takes."""

import hashlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refuses
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, MambaModel
import ssmscope
from ssmscope.loading.in_memory import OwnModel, cast, converted, own_model, readable

WIDTH, VOCABULARY = 8, 6
"""Fewer tokens than a trial has, and fewer than the width."""
IDS = torch.tensor([[1, 5, 3], [4, 2, 0]])


def backbone(**options: Any) -> MambaModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=1, state_size=2, time_step_rank=2)
    return MambaModel(MambaConfig(**sizes, **options)).eval()


class Own(nn.Module):
    def __init__(self, outputs: int = 3, **options: Any):
        super().__init__()
        self.encoder, self.head = backbone(**options), nn.Linear(WIDTH, outputs)

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.encoder(input_ids)[0][:, -1])


class LabelsFirst(Own):
    def forward(self, labels=None, input_ids=None):
        assert labels is None
        return super().forward(input_ids)


class NamedAlone(Own):
    def forward(self, *, input_ids):
        return super().forward(input_ids)


class AnyNames(Own):
    def forward(self, **inputs):
        return super().forward(inputs["input_ids"])


class OtherName(Own):
    def forward(self, tokens):
        return super().forward(tokens)


class LossFirst(Own):
    def forward(self, input_ids):
        return torch.tensor(0.5), {"logits": 5}, super().forward(input_ids), torch.zeros(2, 9)


class Named(Own):
    def forward(self, input_ids):
        return SimpleNamespace(logits=super().forward(input_ids))


class Mapped(Own):
    def forward(self, input_ids):
        return {"loss": torch.zeros(()), "logits": super().forward(input_ids)}


class Masked(Own):
    def forward(self, input_ids, attention_mask, mask):
        assert attention_mask.dtype == mask.dtype == torch.long and attention_mask.all() and mask.all()
        return super().forward(input_ids)


@pytest.mark.parametrize("kind", [Own, LabelsFirst, NamedAlone, AnyNames, OtherName, LossFirst, Named, Mapped, Masked])
def test_ids_are_given_first_or_by_name_and_logits_found(kind):
    module = kind()
    found = own_model(module)
    with torch.no_grad():
        expected = module.head(module.encoder(IDS)[0][:, -1])
        assert torch.equal(found(input_ids=IDS).logits, expected)
    assert found.gives == "classes" and found.path == "encoder" and found.base_model is module.encoder


def test_one_number_for_a_text():
    class Squeezed(Own):
        def forward(self, input_ids):
            return super().forward(input_ids)[:, 0]

    module = Squeezed(1)
    found = own_model(module)
    assert found.gives == "numbers" and found.config.num_labels == 1
    with torch.no_grad():
        assert torch.equal(found(input_ids=IDS).logits, module(IDS)[:, None])


class Positions(Own):
    """Module with further embeddings, which read other numbers before and after the ids."""

    def __init__(self):
        super().__init__()
        self.places, self.all, self.table, self.later = (nn.Embedding(20, WIDTH) for _ in range(4))

    def forward(self, input_ids):
        places = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        x = self.places(places) + self.all(input_ids.flatten()).unflatten(0, input_ids.shape)
        x = x + self.table(input_ids) + self.later(input_ids)
        return self.head(self.encoder(inputs_embeds=x)[0][:, -1])


class NoneReads(Positions):
    def forward(self, input_ids):
        x = self.places(input_ids * 0)
        return self.head(self.encoder(inputs_embeds=x)[0][:, -1])


def test_the_embedding_is_the_first_that_reads_the_ids():
    module = Positions()
    assert own_model(module).get_input_embeddings() is module.table
    refuses("^no embedding of NoneReads reads the token ids, as a model that can be read", own_model, NoneReads())


class Language(Own):
    def __init__(self):
        super().__init__(VOCABULARY)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids):
        return self.head(self.encoder(input_ids)[0])


def test_the_head_is_the_one_linear_layer_outside_with_as_many_outputs():
    for outputs in (3, WIDTH, 2 * WIDTH, 4 * WIDTH):  # as layers within the backbone have
        module = Own(outputs)
        assert own_model(module).get_output_embeddings() is module.head
    module = Language()
    assert own_model(module).gives == "next tokens" and own_model(module).get_output_embeddings() is module.head
    module = Own(3)
    module.more = nn.Linear(5, 3)
    assert own_model(module).get_output_embeddings() is None
    module.more = nn.Linear(3, 5)
    assert own_model(module).get_output_embeddings() is module.head
    alone = own_model(backbone())
    assert alone.gives == "nothing" and alone.path == ""
    alone.module.more = nn.Linear(5, alone.config.num_labels)
    assert alone.get_output_embeddings() is None


def test_a_backbone_alone_has_no_logits():
    found = own_model(backbone())
    for mask in (None, torch.tensor([[1, 1, 1], [1, 0, 0]])):
        assert found(input_ids=IDS, attention_mask=mask).logits.shape == (2, 0)
    with torch.no_grad():
        assert torch.equal(found.run_backbone(IDS)[0], found.module(IDS)[0])


def configured(**fields: Any) -> Own:
    module = Own(3)
    module.config = SimpleNamespace(**fields)
    return module


NAMES = {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize(("fields", "gives", "labels"), [
    ({"num_labels": 3, "id2label": NAMES, "problem_type": "multi_label_classification"}, "labels", list("abc")),
    ({"num_labels": 3, "id2label": NAMES}, "classes", list("abc")),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, "labels", None),
    ({"num_labels": 3, "id2label": list("abc"), "problem_type": "regression"}, "numbers", None),
    ({"num_labels": 2, "id2label": {**NAMES}, "problem_type": "multi_label_classification"}, "classes", None),
    ({"id2label": NAMES, "problem_type": "multi_label_classification"}, "classes", None),
    ({}, "classes", None),
])  # fmt: skip
def test_a_configuration_that_names_as_many_outputs_is_its_own(fields, gives, labels):
    model = ssmscope.load(configured(**fields))
    assert model.gives == gives and model.labels == (labels or ["LABEL_0", "LABEL_1", "LABEL_2"])


def test_the_backbones_configuration_is_not_the_modules():
    module = Own(3, num_labels=3, problem_type="multi_label_classification")
    module.config = module.encoder.config
    assert own_model(module).gives == "classes" and module.config.problem_type == "multi_label_classification"
    for outputs in (1, 2):
        assert own_model(Own(outputs, problem_type="multi_label_classification")).config.num_labels == outputs


class Sometimes(Own):
    """Module that gives logits for texts of one length alone."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return logits if input_ids.shape[1] == self.length else {"scores": logits}


class Shaped(Own):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(12)
        self.change = change

    def forward(self, input_ids):
        return self.change(super().forward(input_ids)[:, : 2 * input_ids.shape[1]])


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Sometimes(7), "Sometimes gives a Tensor without logits"),
    (lambda: Sometimes(5), "Sometimes gives a dict without logits"),
    (lambda: Shaped(lambda t: t), r"Shaped gives \(2, 12\) for two texts of 7 tokens and \(2, 10\) for two of 5;"),
    (lambda: Shaped(lambda t: t[:1, :3]), r"Shaped gives \(1, 3\) for two texts of 7 tokens and \(1, 3\) for two"),
    (lambda: Shaped(lambda t: t[:, :3, None]), r"Shaped gives \(2, 3, 1\) for two texts of 7 tokens"),
    (lambda: Shaped(lambda t: t.sum()), r"Shaped gives \(\) for two texts of 7 tokens"),
])  # fmt: skip
def test_outputs_that_are_no_logits(make, said):
    refuses(f"^{said}", own_model, make())


def test_a_backbone_is_named_among_those_that_hold_every_layer():
    module = nn.ModuleDict({"one": Own(), "other": nn.Linear(2, 2)})
    refuses("ModuleDict has no backbone 'two'.* of its state-space layers are one.encoder", own_model, module, "two")
    refuses("MambaModel has no backbone 'two'.* of its state-space layers are none$", own_model, backbone(), "two")
    assert own_model(backbone(), "").gives == "nothing"
    assert own_model(nn.Linear(2, 2)) is None


def test_a_users_classes_are_named_with_a_hash_of_their_code():
    module = Language()
    module.unknown = type("Unknown", (nn.Module,), {"__module__": "torchless.parts"})()
    module.act = type("Act", (nn.Module,), {"__module__": "torch.parts"})()
    module.first = type("First", (nn.Module,), {"__module__": "a.transformers"})()
    code = hashlib.sha256(inspect.getsource(Language).encode()).hexdigest()[:16]
    assert own_model(module).config.around == [
        "a.transformers.First ",
        f"{__name__}.Language {code}",
        "torchless.parts.Unknown ",
    ]


def test_only_its_own_class_is_read_as_mamba_ssms():
    for name, within in (
        ("MambaLMHeadModel", "mine.models"),
        ("Other", "mamba_ssm.models"),
        ("MambaLMHeadModel", "mamba_ssm_2"),
    ):
        found = readable(type(name, (Own,), {"__module__": within})())
        assert isinstance(found, OwnModel) and found.gives == "classes"


class Experts(nn.Module):
    def __init__(self, has_experts: bool):
        super().__init__()
        self.asked, self.has_experts = [], has_experts

    def set_experts_implementation(self, name: str) -> None:
        self.asked.append(name)
        if not self.has_experts:
            raise ValueError("no experts")


def test_experts_are_plain_in_float64_alone():
    for dtype, asked in ((torch.float64, ["eager"]), (torch.float32, []), (None, [])):
        module = nn.Sequential(nn.Linear(2, 2), Experts(False), Experts(True))
        assert cast(module, dtype, None) is module
        assert [module[1].asked, module[2].asked] == [asked, asked]
        assert module[0].weight.dtype == (dtype or torch.float32)


class Elsewhere(nn.Linear):
    """Linear map whose weights say that they are on another device."""

    told = torch.device("cuda", 1)

    def parameters(self, recurse: bool = True):
        says = dict(is_floating_point=lambda: True, dtype=torch.float32, is_inference=lambda: False)
        yield SimpleNamespace(**says, device=self.told)

    def to(self, **options):
        return self


@pytest.mark.parametrize(
    ("device", "kept"),
    [("cuda:1", True), ("cuda", True), (None, True), ("cuda:0", False), ("cpu", False), ("mps:1", False)],
)
def test_a_module_is_kept_where_it_is_on_the_device(device, kept):
    module = Elsewhere(2, 2)
    assert (converted(module, torch.float32, device and torch.device(device)) is module) == kept
    assert converted(module, torch.float64, torch.device("cuda")) is not module


def test_what_cannot_be_copied_is_told_with_where_to():
    module = nn.Linear(2, 2)
    module.doubled = module.weight * 2  # deepcopy refuses tensors that autograd made
    for dtype, device, told in (
        (torch.float64, torch.device("meta"), "torch.float64"),
        (None, torch.device("meta"), "meta"),
    ):
        refuses(f"^Linear cannot be copied to {told} .*: convert it first", converted, module, dtype, device)


def test_adapters_that_change_the_input_are_refused():
    peft = pytest.importorskip("peft", reason="peft is in the dev extra: pip install '.[dev]' in a checkout")
    config = peft.LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(MambaForCausalLM(backbone().config), config)
    assert readable(wrapped) is wrapped.base_model.model
    wrapped.peft_config["default"].alora_invocation_tokens = [1, 2]
    refuses("^a PeftModel of LORA changes the model's input, not only its layers", readable, wrapped)
    prompts = dict(num_virtual_tokens=3, token_dim=WIDTH, num_layers=1, num_attention_heads=1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", **prompts)
    wrapped = peft.get_peft_model(MambaForCausalLM(backbone().config), config)
    refuses("^a PeftModel of PROMPT_TUNING changes the model's input", readable, wrapped)


def test_whole_numbers_and_inference():
    module = nn.Linear(2, 2)
    module.count = nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
    assert converted(module, torch.float32, None) is module
    with torch.inference_mode():
        module = nn.Linear(2, 2)
    assert converted(module, None, None) is not module
