"""Lenses: the unembedding of every architecture, the residual stream, tuned-lens's own files, and refusals."""

import copy
import json
import shutil

import pytest
import torch
from examples import HALVES, TEXTS, random_example, relative
from loud import loud
from refusals import refuses
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

pytest.importorskip("tuned_lens")

from tuned_lens import TunedLens  # noqa: E402
import ssmscope  # noqa: E402
from ssmscope.core.model import Model  # noqa: E402
from ssmscope.errors import InputError  # noqa: E402
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification  # noqa: E402
from ssmscope.probes.lens import lenses


def example(name: str) -> Model:
    """A random model in which the final norm's own weights matter too."""
    model = Model(loud(random_example(name)))
    norm = lenses.final_norm_of(model)
    if norm is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)
    return model


def small(layers: int = 3, seed: int = 0, width: int = 16, cls=Mamba2ForCausalLM) -> Model:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=40, hidden_size=width, num_hidden_layers=layers, state_size=4, use_cache=False)
    if cls is Mamba2ForCausalLM:
        config = Mamba2Config(**sizes, num_heads=2, head_dim=width, expand=2, n_groups=1, chunk_size=8)
    else:
        config = MambaConfig(**sizes)
    return Model(loud(cls(config)), name="small")


def classifier(**options) -> Model:
    torch.manual_seed(0)
    backbone = Mamba2Config(
        vocab_size=options.pop("vocab_size", 40), hidden_size=16, num_hidden_layers=2, state_size=4, num_heads=2,
        head_dim=16, expand=2, n_groups=1, chunk_size=8, use_cache=False,
    )  # fmt: skip
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    module = SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=3, id2label=labels, **options))
    return Model(loud(module), name="classifier")


def randomly_tuned(model: Model, seed: int = 0):
    """The logit lens with random translators in it."""
    lens = lenses.logit_lens(model)
    generator = torch.Generator().manual_seed(seed)
    for translator in lens.tuned:
        translator.weight.copy_(0.1 * torch.randn(translator.weight.shape, generator=generator))
        translator.bias.copy_(torch.randn(translator.bias.shape, generator=generator))
    return lens


def hooks(module: torch.nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


class TestUnembedding:
    @pytest.mark.parametrize("name", HALVES[1])
    def test_of_the_last_stream_is_the_models_own_logits(self, name):
        model = example(name)
        batch = model.encode(ids=TEXTS)
        unembed, stream, own = lenses.SSMUnembed(model), lenses.hidden_states(model, batch)[-1], model.logits(batch)
        where = (torch.arange(3), batch.last) if model.is_classifier else batch.mask
        own = own if model.is_classifier else own[where]
        assert relative(unembed(stream)[where], own) < 1e-5
        if not isinstance(unembed.final_norm, torch.nn.Identity):
            assert relative(unembed.unembedding(stream)[where], own) > 1e-2
            assert relative(unembed(unembed.final_norm(stream))[where], own) > 1e-2  # normed twice
        else:
            assert name.startswith("selective")

    def test_of_pixels(self):
        model = classifier(vocab_size=1, channels=3, image_size=(2, 3))
        batch = model.encode(values=torch.rand(4, 6, 3))
        states = lenses.hidden_states(model, batch)
        assert states.shape == (3, 4, 7, 16)
        assert relative(lenses.SSMUnembed(model)(states[-1, :, -1]), model.logits(batch)) < 1e-5
        assert torch.equal(lenses.chosen_states(model, batch, "last"), states[:, :, -1])

    def test_is_a_frozen_copy_in_float32(self):
        model = small()
        half = Model(copy.deepcopy(model.module).to(torch.bfloat16))
        unembed = lenses.SSMUnembed(half)
        assert {p.dtype for p in unembed.parameters()} == {torch.float32}
        assert not any(p.requires_grad for p in unembed.parameters()) and not unembed.training
        assert unembed.unembedding.weight.data_ptr() != half.module.lm_head.weight.data_ptr()
        assert lenses.hidden_states(half, half.encode(ids=TEXTS[1])).dtype == torch.float32
        lenses.SSMUnembed(Model(copy.deepcopy(model.module).double()))

    def test_logits_that_are_made_otherwise_are_refused(self):
        model = small()

        def bounded(module, inputs, output):
            output.last_hidden_state = output.last_hidden_state.tanh()
            return output

        model.module.backbone.register_forward_hook(bounded)
        refuses("small: its final norm and head do not give its own logits", lenses.SSMUnembed, model)

    @pytest.mark.parametrize(("share", "refused"), [(3e-4, False), (4e-4, True)])
    def test_how_far_logits_may_be_off(self, share, refused):
        """The root of float32's precision, 3.45e-4, of their norm; a head that is near enough stays as it is."""
        model = small()
        with torch.no_grad():
            model.module.lm_head.weight.mul_(20)

        def off(module, inputs, output):
            random = torch.randn(output.logits.shape, generator=torch.Generator().manual_seed(0))
            apart = random - (random * output.logits).sum() / output.logits.square().sum() * output.logits
            output.logits = output.logits + share * output.logits.norm() / apart.norm() * apart
            return output

        model.module.register_forward_hook(off)
        if refused:
            refuses(r"do not give its own logits \(off by 4.0e-04\); a lens cannot read", lenses.SSMUnembed, model)
        else:
            assert torch.equal(lenses.SSMUnembed(model).unembedding.weight, model.module.lm_head.weight)

    def test_a_multiplier_after_the_head_is_merged_into_it(self):
        model = small()

        def times(module, inputs, output):
            output.logits = 0.25 * output.logits
            return output

        model.module.register_forward_hook(times)
        found = lenses.SSMUnembed(model).unembedding.weight
        torch.testing.assert_close(found, 0.25 * model.module.lm_head.weight, rtol=1e-4, atol=1e-6)

    def test_a_row_of_log_odds_becomes_two(self):
        head, hidden = torch.nn.Linear(5, 1), torch.randn(4, 5)
        for bias in (head.bias, None):
            head.bias = bias
            found = lenses._plain_linear(head)(hidden)
            assert found.shape == (4, 2) and not found[:, 0].any()
            torch.testing.assert_close(found[:, 1:], head(hidden))
        several = torch.nn.Linear(5, 3)
        torch.testing.assert_close(lenses._plain_linear(several)(hidden), several(hidden))

    def test_several_norms_or_stacks_are_refused(self):
        model = small()
        backbone = model.module.backbone
        backbone.second = torch.nn.Identity()
        handle = backbone.norm_f.register_forward_hook(lambda module, inputs, output: backbone.second(output))
        refuses("after the last block of small run Identity, Mamba2RMSNorm; a lens", lenses.SSMUnembed, model)
        handle.remove()
        assert lenses.final_norm_of(model) is backbone.norm_f
        # What runs before the last block is not a final norm, and a list without layers is not a stack.
        backbone.layers[-1].register_forward_pre_hook(lambda module, inputs: (backbone.second(inputs[0]), None)[1])
        backbone.side = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        assert lenses.final_norm_of(model) is backbone.norm_f and lenses.stream_blocks(model) == list(backbone.layers)
        backbone.more = copy.deepcopy(backbone.layers)
        refuses("small has 2 lists of layers", lenses.stream_blocks, model)


class TestStream:
    @pytest.mark.parametrize("cls", [MambaForCausalLM, Mamba2ForCausalLM])
    def test_is_that_of_transformers(self, cls):
        """transformers gives the same streams, but without the embeddings, and at the end the last one normed."""
        model = small(cls=cls)
        batch = model.encode(ids=TEXTS[1])
        with torch.no_grad():
            theirs = model.module(batch.input_ids, output_hidden_states=True).hidden_states
            ours = lenses.hidden_states(model, batch)
            normed = model.module.backbone.norm_f(ours[-1])
        assert len(theirs) == len(ours) == 4
        for layer in range(3):
            assert relative(ours[layer + 1], theirs[layer]) < 1e-5
        assert relative(normed, theirs[-1]) < 1e-5 and relative(ours[-1], theirs[-1]) > 1e-2

    @pytest.mark.parametrize("name", ["mamba2", "rwkv", "diff-mamba-hybrid", "selective-ssm-language"])
    def test_begins_with_the_embeddings_and_continues_block_by_block(self, name):
        model = example(name)
        batch = model.encode(ids=[TEXTS[0]])
        states = lenses.hidden_states(model, batch)
        assert len(states) == len(lenses.stream_blocks(model)) + 1
        assert torch.equal(states[0], model.embed(batch))
        with torch.no_grad():
            for index, block in enumerate(lenses.stream_blocks(model)):
                after = block(states[index])
                after = after[0] if isinstance(after, tuple) else after
                assert relative(states[index + 1], after) < 1e-5

    def test_padding_changes_no_stream(self):
        model = example("mamba2")
        together, batch = lenses.hidden_states(model, model.encode(ids=TEXTS)), model.encode(ids=TEXTS)
        chosen, at = lenses.chosen_states(model, batch, "every"), 0
        for row, text in enumerate(TEXTS):
            alone = lenses.hidden_states(model, model.encode(ids=[text]))[:, 0]
            assert relative(together[:, row, : len(text)], alone) < 1e-5
            assert relative(chosen[:, at : at + len(text)], alone) < 1e-5
            assert relative(lenses.chosen_states(model, batch, "last")[:, row], alone[:, -1]) < 1e-5
            at += len(text)
        assert at == chosen.shape[1]

    def test_leaves_nothing_behind(self, monkeypatch):
        model = small()
        before, drawn = hooks(model.module), torch.get_rng_state()
        lenses.logit_lens(model)
        monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
        for call in (lenses.hidden_states, lambda m, b: lenses.final_norm_of(m)):
            with pytest.raises(ZeroDivisionError):
                call(model, model.encode(ids=[1, 2]))
        assert hooks(model.module) == before and torch.equal(torch.get_rng_state(), drawn)


class TestLens:
    def test_logit_lens_is_norm_and_head(self):
        model = small()
        batch = model.encode(ids=TEXTS[1])
        lens, states = lenses.logit_lens(model), lenses.chosen_states(model, batch, "every")
        found = lens.log_probs(states)
        assert relative(found[-1], model.logits(batch)[0].log_softmax(-1)) < 1e-5
        for layer in range(3):
            with torch.no_grad():
                slow = model.module.lm_head(model.module.backbone.norm_f(states[layer])).log_softmax(-1)
            assert relative(found[layer], slow) < 1e-5
        assert len(lens) == 3 and lens.positions == "every" and lenses.logit_lens(classifier()).positions == "last"

    def test_all_layers_at_once_are_tuned_lens_one_by_one(self):
        model = small()
        lens, states = randomly_tuned(model), lenses.chosen_states(model, model.encode(ids=TEXTS[0][:3]), "every")
        found = lens.log_probs(states)
        for layer in range(3):
            slow = lens.tuned(states[layer], layer).log_softmax(-1)
            assert relative(found[layer], slow) < 1e-5
            assert relative(found[layer], lenses.logit_lens(model).log_probs(states)[layer]) > 1e-2
        assert relative(found[-1], lens.tuned.unembed(states[-1]).log_softmax(-1)) < 1e-6

    def test_slices_are_the_whole(self, monkeypatch):
        monkeypatch.setitem(ssmscope.probes.lens.lenses.MAX_LOGITS, "cpu", 30)
        pieces = list(lenses.slices(10, 10, torch.device("cpu")))
        assert [(p.start, p.stop) for p in pieces] == [(0, 3), (3, 6), (6, 9), (9, 10)]
        assert [p.stop - p.start for p in lenses.slices(2, 1000, torch.device("cpu"))] == [1, 1]
        monkeypatch.setitem(ssmscope.probes.lens.lenses.MAX_LOGITS, "cpu", 500)
        lens = lenses.logit_lens(small())  # four streams of 40 logits
        assert [(p.start, p.stop) for p in lens.slices(7)] == [(0, 3), (3, 6), (6, 7)]

    def test_tokens_that_run_together_are_those_of_all_streams(self, monkeypatch):
        asked = []
        monkeypatch.setattr(ssmscope.probes.lens.lenses, "tokens_at_once", lambda *given: asked.append(given) or 100)
        model = small()
        lenses.answers_of(model, lenses.logit_lens(model), model.encode(ids=[[3, 9, 4], [5]]), "last")
        assert asked[0] == (model.device, 4 * 16)


class TestFiles:
    @pytest.fixture
    def saved(self, tmp_path):
        model = small()
        lens = randomly_tuned(model)
        lens.tuned.save(tmp_path / "lens")
        return model, lens, tmp_path / "lens"

    def test_tuned_lens_own_files_are_read(self, saved):
        model, lens, path = saved
        found = lenses.load_lens(path, model)
        states = lenses.chosen_states(model, model.encode(ids=TEXTS[1]), "every")
        assert torch.equal(found.log_probs(states), lens.log_probs(states))
        assert found.fit is None and found.positions == "every" and found.name == str(path)
        assert torch.equal(lenses.lens_of(str(path), model).log_probs(states), lens.log_probs(states))
        assert lenses.lens_of(lens, model) is lens and lenses.lens_of(None, model).name == "logit lens"
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "unembed_hash"}))
        assert torch.equal(lenses.load_lens(path, model).log_probs(states), lens.log_probs(states))

    def test_positions_of_tuned_lens_own_files_are_the_kind_of_models(self, tmp_path):
        model = classifier()
        randomly_tuned(model).tuned.save(tmp_path / "lens")
        assert lenses.load_lens(tmp_path / "lens", model).positions == "last"

    def test_tuned_lens_reads_them_with_an_unembedding(self, saved):
        model, lens, path = saved
        theirs = TunedLens.from_unembed_and_pretrained(lenses.SSMUnembed(model), str(path))
        states = lenses.hidden_states(model, model.encode(ids=TEXTS[1]))
        torch.testing.assert_close(theirs(states[1], 1), lens.tuned(states[1], 1))

    def test_another_models_are_refused(self, saved):
        model, lens, path = saved
        for other, says in (
            (small(layers=2), "a lens for a model of number of layers 3; that of small is 2"),
            (small(width=8), "a lens for a model of width 16; that of small is 8"),
            (small(seed=1), r"was fitted to another model \(small, \?\) than small \(float32\), with other weights"),
        ):
            refuses(says, lenses.load_lens, path, other)
        with pytest.raises(InputError, match="the logit lens belongs to another model than small; fit one"):
            lenses.check_lens(lenses.logit_lens(model), small(seed=1))

    def test_absent_and_damaged_files_are_refused(self, saved, tmp_path):
        model, lens, path = saved
        with pytest.raises(InputError, match="nowhere has no lens: config.json is missing; fit one with fit_lens"):
            lenses.load_lens(tmp_path / "nowhere", model)
        whole = (path / "params.pt").read_bytes()
        for content in (b"", whole[: len(whole) // 2], b"not a file of torch"):
            (path / "params.pt").write_bytes(content)
            refuses("params.pt is damaged", lenses.load_lens, path, model)
        torch.save([1, 2], path / "params.pt")
        refuses("params.pt is damaged", lenses.load_lens, path, model)
        torch.save({"0.weight": torch.zeros(16, 16)}, path / "params.pt")
        refuses("params.pt is damaged", lenses.load_lens, path, model)
        (path / "params.pt").write_bytes(whole)
        config = json.loads((path / "config.json").read_text())
        for content, says in (("{", "is not JSON"), ("[]", "is not a JSON object")):
            (path / "config.json").write_text(content)
            refuses(says, lenses.load_lens, path, model)
        (path / "config.json").write_text(json.dumps(config))
        lenses.load_lens(path, model)
        shutil.rmtree(path)
