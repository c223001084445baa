"""Control vectors: what a file gives back, and models that are steered by a bias."""

import json
import math

import numpy as np
import pytest
import torch
from examples import random_example, relative
from loud import loud
from planned import planned
from refusals import refuses
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
import ssmscope
from ssmscope.api.options import noted
from ssmscope.core.edits import recorded
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.steer.measure import norm
from ssmscope.interp.steer.vectors import ControlVector, bake

TOWARD, AWAY, TEXTS = [[5, 17, 3], [9, 22, 1, 4]], [[60, 2, 7]], [[7, 8, 9, 2, 40], [30, 2, 7]]


def model_of(name: str) -> Model:
    return Model(loud(random_example(name)), name=name)


@pytest.mark.parametrize("site", ["residual", "state"])
def test_a_file_steers_as_the_texts_do(site, tmp_path):
    model, file = model_of("mamba2"), tmp_path / "vector.safetensors"
    options = dict(strengths=[-1, 2], random=2, answer=3, generate=3)
    made = ssmscope.steer(
        model, model.encode(ids=TEXTS), toward=TOWARD, away=AWAY, site=site, layer=1, save=file, **options
    )
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert (about["site"], about["layer"], about["fingerprint"]) == (site, "1", model.fingerprint)
    assert float(about["norm"]) == pytest.approx(made.norm) and json.loads(about["toward"]) == TOWARD
    read = ssmscope.steer(model, model.encode(ids=TEXTS), vector=file, **options)
    assert (read.probability == made.probability).all() and read.written == made.written
    assert (read.site, read.layer, read.norm) == (site, 1, made.norm)
    vector = ControlVector.load(file, model)
    assert vector.source["model"] == "mamba2" and norm(vector.direction) == made.norm


@pytest.mark.parametrize(
    "name", ["mamba", "mamba2", "mamba-with-biases", "groupmamba", "baleen-b-mamba2", "bamba", "xlstm", "zamba2"]
)
def test_a_bias_steers_as_the_edit_does(name, tmp_path):
    model = model_of(name)
    vector = ControlVector.between(model, TOWARD, AWAY, "residual", model.layer_numbers[1])
    where = bake(model, vector, -1.5, tmp_path / "baked")
    batch = model.encode(ids=TEXTS)
    plain, steered = (model.run(batch, edits=edits).logits for edits in ((), vector.edit(-1.5)))
    assert relative(ssmscope.load(where).run(batch).logits, steered) < 1e-5 < 1e-2 < relative(plain, steered)
    assert (model.run(batch).logits == plain).all()  # the model itself is as before
    assert json.loads((where / "control_vector.json").read_text())["strength"] == -1.5


def test_the_command_exports_a_shipped_model(analyze, tmp_path, real_data):
    real_data("books", "test")
    line = "--text", "The old man", "--toward", "I am glad.", "--away", "I am sad.", "--layer", "3", "--limit", "2"
    where = tmp_path / "glad"
    options = "--strengths", "3", "--random", "1", "--export", where, "--export-strength", "3", "--generate", "6"
    answer = analyze("steer", "demo/books-mamba2", *line, *options)
    assert answer.code == 0 and "strength 3" in answer.out
    model = ssmscope.load(where)
    (text,) = model.generate("The old man", max_new_tokens=6).texts
    assert f"strength 3  {text.strip()}" in " ".join(answer.out.split(" ")).replace("\n", " ")
    assert analyze("steer", "demo/books-mamba2", *line, *options).err.count("exists") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["mamba2", "mamba-with-biases"])
def test_an_export_keeps_dtype_and_settings(name, dtype, tmp_path):
    """Its logits are those of the model in float64 that is steered by the direction in the bias's own dtype."""
    module = loud(random_example(name)).to(dtype)
    module.generation_config.eos_token_id, module.generation_config.repetition_penalty = [3, 5], 1.2
    model = Model(module, name=name)
    vector = ControlVector.between(model, TOWARD, AWAY, "residual", 1)
    where = bake(model, vector, 2.0, tmp_path / "baked")
    assert {part.dtype for part in load_file(where / "model.safetensors").values()} == {dtype}
    settings = GenerationConfig.from_pretrained(where)
    assert (settings.eos_token_id, settings.repetition_penalty) == ([3, 5], 1.2)
    wide, again = ssmscope.load(module, dtype="float64"), ssmscope.load(where, dtype="float64")
    batch = wide.encode(ids=TEXTS)
    steered = wide.run(batch, edits=vector.edit(2.0)).logits
    off = relative(again.run(batch).logits, steered)
    assert off < max(1e-9, 20 * torch.finfo(dtype).eps) < relative(wide.run(batch).logits, steered)


def test_an_export_says_what_a_dtype_cannot_hold(tmp_path):
    module = loud(random_example("mamba-with-biases")).half()
    module.backbone.layers[0].mixer.out_proj.bias.data.fill_(1.0)
    model = Model(module, name="m")
    vector = ControlVector.between(model, TOWARD, AWAY, "residual", 1)
    for strength, says in ((1e9, "float16 holds no number as large"), (1e-7, "of the direction are lost in float16")):
        refuses(says, bake, model, vector, strength, tmp_path / "baked")
        assert not (tmp_path / "baked").exists()


class Around(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds).logits


def test_what_is_no_directory_is_said(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(random_example("mamba2"), peft.LoraConfig(r=2, target_modules=["in_proj"]))
    for module, says in (
        (adapted, r"merge it \(merge_and_unload\(\)\)"),
        (Around(random_example("mamba2")), "a module of one's own, which cannot be exported"),
        (random_example("mamba2").backbone, "has no head, which cannot be exported"),
    ):
        model = ssmscope.load(module)
        width = torch.ones(model.width, dtype=torch.float64)
        refuses(says, bake, model, ControlVector("residual", 1, (width,)), 1.0, tmp_path / "baked")
        assert not (tmp_path / "baked").exists()
    merged = ssmscope.load(adapted.merge_and_unload())
    bake(merged, ControlVector("residual", 1, (torch.ones(merged.width, dtype=torch.float64),)), 1.0, tmp_path / "m")


def test_where_there_is_no_bias(tmp_path):
    for name, site, layer, says in (
        ("gla", "residual", 1, "no bias of the block before layer 1 of gla"),
        ("mamba", "residual", 0, "layer 0 reads the embeddings"),
        ("mamba2", "state", 1, "a state has no bias"),
    ):
        model = model_of(name)
        refuses(says, bake, model, ControlVector.between(model, TOWARD, AWAY, site, layer), 1.0, tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_full_disk_leaves_nothing_of_an_export(tmp_path):
    """What fails is the write of the weights, in safetensors, or of the configuration, in Python."""
    resource, signal = (pytest.importorskip(name) for name in ("resource", "signal"))
    model = model_of("mamba2")
    vector = ControlVector.between(model, TOWARD, AWAY, "residual", 1)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for most in (100, 3000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            with pytest.raises(InputError, match="cannot write to .*new/baked: File too large; make room$"):
                bake(model, vector, 1.0, tmp_path / "new" / "baked")
            assert not list(tmp_path.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    refuses("strength is nan; allowed is a finite number", bake, model, vector, math.nan, tmp_path / "new")


def test_files_that_do_not_fit(tmp_path):
    model, file = model_of("mamba2"), tmp_path / "vector.safetensors"
    ControlVector("residual", 1, (torch.ones(5, dtype=torch.float64),)).save(file)
    refuses("has a direction of the shape", ControlVector.load, file, model)
    ControlVector("residual", 9, (torch.ones(model.width, dtype=torch.float64),)).save(file)
    refuses("of residual 9; mamba2 has the layers 0 to 1", ControlVector.load, file, model)
    for numbers, says in (
        (torch.full((model.width,), math.nan), "direction.0 of a control vector holds numbers that are not finite"),
        (torch.ones(model.width, dtype=torch.int64), "direction.0 of a control vector holds int64; a direction is of"),
    ):
        refuses(says, ControlVector, "residual", 1, (numbers,))
        save_file({"direction.0": numbers}, file, metadata={"site": "residual", "layer": "1"})
        refuses(f"vector.safetensors: {says}", ControlVector.load, file, model)
    file.write_bytes(b"nothing")
    refuses("cannot read", ControlVector.load, file, model)
    refuses("cannot read", ControlVector.load, tmp_path / "absent", model)
    refuses(
        "toward=… has no effect with vector=…", ssmscope.steer, model, model.encode(ids=TEXTS), vector=file,
        toward=TOWARD,
    )  # fmt: skip
    refuses("no text to steer to or from", ssmscope.steer, model, model.encode(ids=TEXTS))


@pytest.mark.parametrize("option", ["save", "export"])
def test_a_plan_writes_no_files_of_its_own(option):
    options = {"text": "a film", "toward": ["a good film"], "away": ["a bad film"], option: "somewhere"}
    with pytest.raises(InputError, match=f"the option '{option}' writes a file of its own; give it to steer alone"):
        planned({"models": ["demo/books-mamba2"], "analyses": [{"steer": options}]})


def test_several_layers_are_steered_each_by_its_own_direction(tmp_path):
    model, file = model_of("mamba2"), tmp_path / "vector.safetensors"
    options = dict(strengths=[2.0], random=1, answer=3)
    result = ssmscope.steer(
        model, model.encode(ids=TEXTS), toward=TOWARD, away=AWAY, layer=[0, 1], save=file, **options
    )
    assert result.layer == (0, 1) and "before layers 0, 1" in result.headline
    edits = [ControlVector.between(model, TOWARD, AWAY, "residual", layer).edit(2.0) for layer in (0, 1)]
    logits = model.run(model.encode(ids=TEXTS), edits=edits, last_only=True).logits.double()
    assert result.probability[0, 0, 0] == pytest.approx(float(logits.softmax(-1)[:, 3].mean()), rel=1e-4)
    again = ssmscope.steer(model, model.encode(ids=TEXTS), vector=file, **options)
    assert again.layer == (0, 1) and (again.probability == result.probability).all()
    refuses("the direction of one layer", bake, model, ControlVector.load(file, model), 1.0, tmp_path / "baked")
    with pytest.raises(InputError, match="a state is one layer's"):
        ssmscope.steer(model, model.encode(ids=TEXTS), toward=TOWARD, away=AWAY, layer=[0, 1], site="state")


def test_the_first_component_is_that_of_the_pairs_differences():
    model = model_of("mamba2")
    away = [[60, 2, 7], [9, 8]]
    ends = []
    for ids in (*TOWARD, *away):
        kept = {}
        model.run(model.encode(ids=ids), edits=recorded("residual", kept))
        ends.append(kept[1][0, -1].double().numpy())
    pairs = np.stack([ends[0] - ends[2], ends[1] - ends[3]])
    values, vectors = np.linalg.eigh(pairs.T @ pairs)
    first, mean = vectors[:, values.argmax()], pairs.mean(0)
    vector = ControlVector.between(model, TOWARD, away, "residual", 1, pca=True)
    np.testing.assert_allclose(vector.direction[0].numpy(), first * (first @ mean), rtol=1e-6, atol=1e-9)
    with pytest.raises(InputError, match="2 texts to steer to and 1 from have no pairs"):
        ControlVector.between(model, TOWARD, AWAY, "residual", 1, pca=True)


def test_gguf_holds_what_is_added_after_a_block(tmp_path, monkeypatch):
    """llama.cpp adds direction.i to the output of block i, which block i + 1 reads."""
    gguf, file = pytest.importorskip("gguf"), tmp_path / "vector.gguf"
    model = ssmscope.load("demo/books-mamba2")
    vector = ControlVector.between(model, ["I am glad."], ["I am sad."], "residual", (2, 5))
    vector.save(file, model)
    reader = gguf.GGUFReader(file)
    assert [tensor.name for tensor in reader.tensors] == ["direction.1", "direction.4"]
    assert reader.fields["general.architecture"].contents() == "controlvector"
    assert reader.fields["controlvector.layer_count"].contents() == 2
    np.testing.assert_allclose(reader.tensors[1].data, vector.direction[1].numpy(), rtol=1e-6)
    read = ControlVector.load(file, model)
    assert read.layer == (2, 5)
    np.testing.assert_allclose(read.direction[0].numpy(), vector.direction[0].numpy(), rtol=1e-6)
    with pytest.raises(InputError, match="at layer 1, before block 1's output; give layers 2–[0-9]+, or a file ending"):
        ControlVector.between(model, ["I am glad."], ["I am sad."], "residual", 1).save(file, model)
    token = noted.set([])
    try:
        ControlVector.load(file, model)
        assert not noted.get([])
        monkeypatch.setattr(model.config, "model_type", "mamba")
        ControlVector.load(file, model)
        assert noted.get([]) == [f"{file} was made for the architecture 'mamba2', and {model.name} is 'mamba'"]
    finally:
        noted.reset(token)
    small = model_of("mamba2")
    refuses("of block 1, after which mamba2 has no state-space layer", ControlVector.load, file, small)
    file.write_bytes(b"nothing")
    refuses("as a control vector: .*; give a .gguf file with directions", ControlVector.load, file, model)
