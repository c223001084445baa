"""Loading: every layout, and everything that is not what it claims."""

import inspect
import json
import pickle

import pandas as pd
import pytest
import torch
from loud import loud
from refusals import refused, refuses
from saving import write_mamba_ssm
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
import ssmscope
from ssmscope.core.known_models import demos
from ssmscope.errors import InputError
from ssmscope.loading.pretrained import _class_for
from ssmscope.zoo.sequences import listops, majority

IDS = [[5, 1, 17, 3, 9, 22, 4], [7, 8, 9]]
# See test_groups_normed_together.
GROUPS = 2 if "group_size" in inspect.signature(MambaRMSNormGated).parameters else 1
SIZES = dict(vocab_size=48, hidden_size=16, num_hidden_layers=2, expand=2)


def small(second: bool = False, **more):
    torch.manual_seed(0)
    if second:
        return loud(
            Mamba2ForCausalLM(Mamba2Config(**SIZES, state_size=4, num_heads=4, head_dim=8, n_groups=GROUPS, **more))
        )
    return loud(MambaForCausalLM(MambaConfig(**SIZES, state_size=4, time_step_rank=3, **more)))


@pytest.mark.parametrize("module", [
    lambda: small(), lambda: small(conv_kernel=3, use_bias=True), lambda: small(tie_word_embeddings=False),
    lambda: small(second=True), lambda: small(second=True, time_step_limit=(0.01, 0.3)),
    lambda: small(second=True, tie_word_embeddings=False),
])  # fmt: skip
@pytest.mark.parametrize("safetensors", [False, True])
def test_mamba_ssm_layout_and_back(module, safetensors, tmp_path):
    module = module()
    write_mamba_ssm(module, tmp_path, safetensors=safetensors)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["d_model"] == 16 and "model_type" not in config
    again = ssmscope.load(tmp_path)
    assert type(again.module) is type(module)
    batch = again.encode(ids=IDS)
    own = module(batch.input_ids[:1], use_cache=False).logits
    with torch.no_grad():
        torch.testing.assert_close(again.module(batch.input_ids[:1], use_cache=False).logits, own, rtol=0, atol=0)
    torch.testing.assert_close(again.logits(batch)[:1], own, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(GROUPS > 1, reason="this transformers norms every group by itself, as mamba_ssm does")
def test_groups_normed_together(tmp_path):
    """Before transformers 5.23 the gated norm takes all channels together, and the logits would not be mamba_ssm's."""
    write_mamba_ssm(small(second=True), tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "ssm_cfg": {**fields["ssm_cfg"], "ngroups": 2}}))
    refuses("2 groups of heads.*install transformers 5.23", ssmscope.load, tmp_path)


def log_odds(model, rows):
    logits = model.logits(model.encode(ids=rows))
    return logits[:, 1] - logits[:, 0]


def test_published_majority_checkpoint(oracle):
    model = ssmscope.load(oracle("majority_T25_seed1.pth"), dtype="float64")
    assert model.module.ssm.spectral_abscissa == pytest.approx(0.214152202, abs=1e-8)
    train, test = majority(25, seed=1)
    accuracies = [((log_odds(model, d.ids.tolist()) >= 0).numpy() == d.labels).mean() for d in (train, test)]
    assert accuracies == [0.936, 0.853]
    assert log_odds(model, test.ids.tolist()).mean().item() == pytest.approx(5.371450, abs=1e-5)


def test_published_listops_checkpoint(oracle, real_data):
    model = ssmscope.load(oracle("listops_T100_seed3.pth"), dtype="float64")
    assert model.module.ssm.spectral_abscissa == pytest.approx(-0.139018178, abs=1e-8)
    found = []
    for split in ("train", "test"):
        table = pd.read_parquet(real_data("listops", f"T100_1000_{split}"))
        data = listops(list(table.text), list(table.label), split=split)
        logits = model.logits(model.encode(ids=data.ids.tolist()))
        found.append((logits.argmax(1).numpy() == data.labels).mean())
    assert found == [0.242, 0.191]
    assert logits.mean().item() == pytest.approx(0.084632, abs=1e-5)


def test_published_imdb_checkpoint(oracle):
    model = ssmscope.load(oracle("imdb_T100_seed1.pth"), dtype="float64")
    assert model.module.ssm.spectral_abscissa == pytest.approx(0.205731139, abs=1e-8)
    rows = (torch.arange(8 * 100).view(8, 100) * 37 + 101) % 30522
    assert log_odds(model, rows.tolist()).mean().item() == pytest.approx(-0.074879, abs=1e-5)
    assert model.labels == ["LABEL_0", "LABEL_1"] and model.is_classifier


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_with_code_is_not_run(tmp_path):
    witness = tmp_path / "witness"
    with open(tmp_path / "evil.pth", "wb") as file:
        pickle.dump({"embedding.weight": Payload(witness)}, file)
    torch.save({"embedding.weight": Payload(witness)}, tmp_path / "evil2.pth")
    directory = write_mamba_ssm(small(), tmp_path / "mamba")
    torch.save({"backbone.embedding.weight": Payload(witness)}, directory / "pytorch_model.bin")
    in_transformers = tmp_path / "transformers"
    small().save_pretrained(in_transformers)
    (in_transformers / "model.safetensors").unlink()
    torch.save({"backbone.embeddings.weight": Payload(witness)}, in_transformers / "pytorch_model.bin")
    for name in ("evil.pth", "evil2.pth", "mamba", "transformers"):
        said = refused(ssmscope.load, tmp_path / name)
        assert len(said) < 400 and "pickle may hold" in said
        assert not witness.exists()


@pytest.mark.parametrize("name, words", [
    ("demo/nothing", "no demo is called"),
    ("nothing", "no file or directory"),
    ("./nothing/here", "no file or directory"),
    ("nobody/nothing", "not a directory here, and the hub"),
])  # fmt: skip
def test_unknown_names(name, words):
    with pytest.raises(InputError, match=words) as refused:
        ssmscope.load(name)
    assert str(refused.value).count("demo/") <= 4


@pytest.mark.parametrize("safetensors", [True, False])
def test_a_hub_id_is_fetched_and_read(tmp_path, monkeypatch, safetensors):
    """The hub's part is played by a directory: what is asked for, and how what comes back is read."""
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("ssmscope.loading.load.snapshot_download", snapshot_download)
    module = small()
    write_mamba_ssm(module, tmp_path, safetensors=safetensors)
    model = ssmscope.load("somebody/some-mamba")
    assert model.name == "somebody/some-mamba" and type(model.module) is type(module)
    assert [name for name, _ in asked] == ["somebody/some-mamba"] * (1 if safetensors else 2)
    assert "*.safetensors" in asked[0][1] and "*.bin" in asked[-1][1] or safetensors


def test_why_the_hub_gave_nothing(monkeypatch):
    def fetch(error):
        def snapshot_download(name, allow_patterns):
            raise error

        monkeypatch.setattr("ssmscope.loading.load.snapshot_download", snapshot_download)
        return refused(ssmscope.load, "somebody/some-mamba")

    answered = OSError("404")
    answered.response = object()  # as errors of the hub's library have one where the hub answered
    assert "it is not a directory here, and the hub has no such model;" in fetch(answered)
    assert "it is not a directory here, and the hub is out of reach;" in fetch(OSError("no route to host"))


def test_near_demos_are_named():
    refuses("did you mean 'demo/sst2-mamba2'", ssmscope.load, "sst2-mamba2")
    for name in demos():
        refuses("did you mean '" + name, ssmscope.load, name + "x")


def test_a_device_map_is_of_directories_in_transformers_layout_and_checked(oracle, tmp_path):
    pytest.importorskip("accelerate")
    small().save_pretrained(tmp_path)
    refuses("leaves the weights of the model out of memory", ssmscope.load, tmp_path, device_map={"": "disk"})
    refuses("a model in memory stays where it is", ssmscope.load, small(), device_map="auto")
    refuses("not in transformers' layout", ssmscope.load, oracle("majority_T25_seed1.pth"), device_map="auto")


def test_a_split_model_gives_the_numbers_of_a_whole_one(tmp_path):
    pytest.importorskip("accelerate")
    small().save_pretrained(tmp_path)
    whole = ssmscope.load(tmp_path)
    parts = {name: "cpu" for name, _ in whole.module.backbone.named_children()}
    split = ssmscope.load(
        tmp_path, device_map={f"backbone.{name}": at for name, at in parts.items()} | {"lm_head": "cpu"}
    )
    expected, found = whole.trace(ids=IDS), split.trace(ids=IDS)
    assert torch.equal(found.logits, expected.logits) and split.fingerprint == whole.fingerprint
    torch.testing.assert_close(found.survival(), expected.survival(), equal_nan=True)


def test_projections_that_were_rescaled_as_they_were_initialised_are_read_as_stored(tmp_path):
    """transformers 5 would divide such projections once more."""
    sizes = dict(vocab_size=60, hidden_size=24, num_hidden_layers=4, state_size=6, num_heads=6, head_dim=8, n_groups=2)
    module = Mamba2ForCausalLM(Mamba2Config(**sizes, chunk_size=8, rescale_prenorm_residual=True)).eval()
    module.save_pretrained(tmp_path)
    found = ssmscope.load(tmp_path)
    for name, weight in module.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], weight), name
    assert found.config.rescale_prenorm_residual is True and found.fingerprint == ssmscope.load(module).fingerprint


@pytest.mark.parametrize(("architectures", "head"), [
    ([], "CausalLM"), (["MambaForCausalLM"], "CausalLM"), (["MambaLMHeadModel"], "CausalLM"), (["MambaModel"], ""),
    (["MambaModel", "MambaForCausalLM"], "CausalLM"),
    (["MambaModel", "SSMForSequenceClassification"], "SequenceClassification"),
])  # fmt: skip
def test_the_class_that_reads_a_model_is_that_of_its_head(architectures, head):
    name = f"AutoModelFor{head}" if head else "AutoModel"
    assert _class_for(architectures, "m").__name__ == name
