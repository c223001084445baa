"""The position-bias attack against a slow reference, on planted pixels, and as its users meet it."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from examples import EXAMPLES
from exhaustive import in_turns
from loud import loud
from refusals import refuses
from tokenizers import Tokenizer
from tokenizers import models as token_models
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import Mamba2Config, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
import ssmscope
from ssmscope.attacks.position import position_bias
from ssmscope.attacks.position.measure import (
    LEFT_OUT,
    PAPER,
    Pixels,
    Tokens,
    draw_donors,
    measure,
    noise_of,
    run_embeddings,
)
from ssmscope.attacks.position.regions import Region
from ssmscope.core.bootstrap import Estimate, share
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import text_data
from ssmscope.data.tokens import SequenceData
from ssmscope.errors import InputError
from ssmscope.interp.labelled import class_ids
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.documents import symbol_tokenizer

KEYS = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)


def images(n: int, seed: int, names=("dark", "bright"), shape=(4, 4), channels: int = 1) -> PixelData:
    """Random pixels, whose label is whether the last but one is bright."""
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (n, shape[0] * shape[1], channels)).astype(np.uint8)
    labels = (pixels[:, -2, 0] > 127).astype(np.int64)
    return PixelData("planted", "test", pixels, labels, names, shape)


def pixel_module(
    shape=(4, 4), channels=1, labels=("dark", "bright"), layers=1, **sizes
) -> SSMForSequenceClassification:
    sizes = dict(hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1, expand=2) | sizes
    backbone = Mamba2Config(vocab_size=1, num_hidden_layers=layers, **sizes, **KEYS)
    named = dict(num_labels=len(labels), id2label=dict(enumerate(labels)))
    return SSMForSequenceClassification(SSMClassifierConfig(backbone, channels=channels, image_size=shape, **named))


@pytest.fixture(scope="module")
def planted() -> ssmscope.Model:
    """A classifier without memory: its convolution shows the class token the last three pixels, and nothing else."""
    torch.manual_seed(0)
    module = pixel_module()
    mixer = module.backbone.layers[0].mixer
    with torch.no_grad():
        mixer.A_log.fill_(12.0)  # every state has decayed to nothing one step later
    mixer.A_log.requires_grad_(False)
    data = images(256, seed=1)
    values, labels = torch.from_numpy(data.pixels) / 255, torch.from_numpy(data.labels)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 2e-2)
    with ssmscope.fast_scan(module):
        for _ in range(60):
            optimizer.zero_grad()
            module(input_values=values, labels=labels).loss.backward()
            optimizer.step()
    return ssmscope.load(module.eval())


test_images = pytest.fixture(scope="module")(lambda: images(200, seed=2))


class TestPlanted:
    @pytest.mark.parametrize("replacement", ["noise", "zeros", "mean", "other"])
    def test_only_the_planted_region_matters(self, planted, test_images, replacement):
        found = position_bias(planted, test_images, regions="0:8,8:13,13:16,14:15", replacement=replacement)
        assert found.clean.value > 0.95
        for nothing in found.regions[:2]:
            assert nothing.accuracy == found.clean and nothing.drop == Estimate(0.0, 0.0, 0.0)
            assert nothing.flipped.value == 0 and (nothing.success is None or nothing.success.value == 0)
        for hit in found.regions[2:]:
            assert hit.accuracy.value < 0.75 and hit.drop.low > 0.2
        assert found.average.value == pytest.approx(np.mean([one.accuracy.value for one in found.regions]))
        assert found.average_drop.value == pytest.approx(np.mean([one.drop.value for one in found.regions]))
        assert found.average.low < found.average.value < found.average.high < found.clean.high

    def test_a_window_along_the_sequence_finds_it(self, planted, test_images):
        found = position_bias(planted, test_images, regions="0:8", window=2, stride=1)
        assert [one.region for one in found.windows] == [f"{at}:{at + 2}" for at in range(15)]
        drops = np.array([one.drop.value for one in found.windows])
        assert (drops[:11] == 0).all() and set(np.argsort(drops)[-2:]) == {13, 14}
        (alone,) = position_bias(planted, test_images, regions="13:15").regions
        assert alone == found.windows[13]  # noise is the same whatever else is asked for


REFERENCE = ["mamba2", "baleen-e-mamba2", "gla", "mamba"]
CONFIGS = {name: EXAMPLES[name].models[name].config for name in REFERENCE}


def deep(name: str) -> ssmscope.Model:
    """A random pixel classifier of two layers in which every position matters."""
    config = CONFIGS[name]
    backbone = type(config).from_dict({**config.to_dict(), "vocab_size": 1, **KEYS})
    torch.manual_seed(0)
    names = dict(enumerate(("a", "b", "c")))
    module = SSMForSequenceClassification(SSMClassifierConfig(backbone, channels=2, num_labels=3, id2label=names))
    model, data = ssmscope.load(loud(module)), three_classes()
    with torch.no_grad():
        module.head.bias -= model.logits(model.encode(values=data.pixels)).mean(0)  # so that no class stands out
    return model


def three_classes(n: int = 15, seed: int = 0) -> PixelData:
    data = images(n, seed, ("a", "b", "c"), (4, 5), channels=2)
    return dataclasses.replace(data, labels=np.arange(n) % 3)


def test_noise_and_mean_pixel():
    noise = np.stack([noise_of(row, (50, 3), 7) for row in range(200)])
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert abs(np.corrcoef(noise.reshape(200, -1))[0, 1:]).max() < 0.4  # every example has its own
    assert (noise_of(3, (50, 3), 7) == noise[3]).all() and (noise_of(3, (50, 3), 8) != noise[3]).all()
    data = three_classes()
    subject = Pixels(deep("mamba2"), data, "mean", 0)
    assert subject.mean.tolist() == pytest.approx([data.pixels[:, :, c].mean() / 255 for c in (0, 1)], rel=1e-6)


class TestAgainstASlowReference:
    def replaced(self, data, row, replacement, donors, seed):
        """Return the replacement of each pixel, in 0…1."""
        if replacement == "noise":
            return noise_of(row, data.pixels.shape[1:], seed)
        if replacement == "other":
            return data.pixels[donors[row]] / 255
        value = data.pixels.reshape(-1, data.channels).mean(0) / 255 if replacement == "mean" else np.zeros(2)
        return np.tile(value, (data.pixels.shape[1], 1))

    @pytest.mark.parametrize(("name", "replacement"), in_turns(REFERENCE, ["noise", "zeros", "mean", "other"]))
    def test_of_pixels(self, name, replacement):
        model, data, seed = deep(name), three_classes(), 5
        regions = [Region(0, 3), Region(7, 11), Region(3, 20), Region(19, 20), Region(7, 8), Region(0, 50, True)]
        donors = draw_donors(data.labels, np.full(15, 20), np.full(15, 20), seed) if replacement == "other" else None
        plain, attacked = Pixels(model, data, replacement, seed).predict(regions, donors, batch_size=4)
        clean = model.logits(model.encode(values=data.pixels)).argmax(-1)
        assert plain.tolist() == clean.tolist()
        whole = np.stack([self.replaced(data, row, replacement, donors, seed) for row in range(len(data))])
        for column, region in enumerate(regions):
            start, stop = region.bounds(20)
            values = data.pixels / 255
            values[:, start:stop] = whole[:, start:stop]
            expected = model.logits(model.encode(values=values)).argmax(-1)
            assert attacked[:, column].tolist() == expected.tolist()
        assert (attacked != plain[:, None]).any()  # the regions do matter to this model

    @pytest.mark.parametrize("replacement", ["noise", "zeros", "mean", "other"])
    def test_of_texts(self, replacement):
        model, data, seed = reader(), reviews(), 5
        subject = Tokens(model, data, replacement, seed)
        assert subject.lengths.tolist() == [len(text.split()) for text in data.texts]
        regions = [Region(0, 2), Region(3, 5), Region(0, 30, True), Region(80, 100, True)]
        labels = np.array(data.labels)
        needed = np.full(len(data), 5)
        donors = draw_donors(labels, subject.lengths, needed, seed) if replacement == "other" else None
        plain, attacked = subject.predict(regions, donors, batch_size=3)
        table = model.module.get_input_embeddings().weight.detach()
        changed = skipped = 0
        for row, text in enumerate(data.texts):
            batch = model.encode(text)
            clean = int(model.logits(batch).argmax(-1))
            assert plain[row] == clean
            length = len(text.split())
            for column, region in enumerate(regions):
                start, stop = region.bounds(length)
                reach = length if donors is None else min(length, subject.lengths[donors[row]])
                if stop > reach:
                    assert attacked[row, column] == LEFT_OUT
                    skipped += 1
                    continue
                embeddings = table[batch.input_ids].clone()
                for token in range(start, stop):  # at token + 1: the text begins with [CLS]
                    if replacement == "noise":
                        put = torch.from_numpy(noise_of(row, (length, 8), seed)[token]) * table.std()
                    elif replacement == "other":
                        put = table[model.encode(data.texts[donors[row]]).input_ids[0, 1 + token]]
                    else:
                        put = table.mean(0) if replacement == "mean" else torch.zeros(8)
                    embeddings[0, 1 + token] = put
                expected = int(run_embeddings(model, embeddings).logits.argmax(-1))
                assert attacked[row, column] == expected
                changed += expected != clean
        assert changed and skipped


WORDS = "[PAD] [UNK] [CLS] a good bad film with music acting but dull great".split()


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(token_models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single="[CLS] $A [CLS]", special_tokens=[("[CLS]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def reader() -> ssmscope.Model:
    """A random classifier of texts of ten words."""
    torch.manual_seed(0)
    backbone = MambaConfig(vocab_size=len(WORDS), hidden_size=8, state_size=3, num_hidden_layers=2, time_step_rank=2)
    config = SSMClassifierConfig(backbone, num_labels=2, id2label={0: "negative", 1: "positive"})
    return ssmscope.load(loud(SSMForSequenceClassification(config)), tokenizer=tokenizer())


def reviews(n: int = 14):
    draw = np.random.default_rng(0)
    texts = [" ".join([*draw.choice([*WORDS[3:], "zebra"], length), "film"]) for length in draw.integers(0, 11, n)]
    return text_data("reviews", "all", texts, [i % 2 for i in range(n)], ("negative", "positive"))


def reviews_of(*texts: str):
    return text_data("few", "all", list(texts), [i % 2 for i in range(len(texts))], ("negative", "positive"))


LANGUAGE = ssmscope.load(MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)))


class TestTexts:
    def test_those_too_short_are_left_out_and_counted(self):
        data, model = reviews(40), reader()
        found = position_bias(model, data, regions="0:6,0%:50%")
        long = np.array([len(text.split()) >= 6 for text in data.texts])
        first, share = found.regions
        assert (first.examples, first.left_out) == (long.sum(), (~long).sum()) and (share.left_out, share.examples) == (
            0,
            40,
        )
        right = np.array(
            [a == found_label for (a, _), found_label in zip(model.trace(list(data.texts)).answers, named(data))]
        )
        assert first.clean.value == pytest.approx(right[long].mean()) and found.clean.value == pytest.approx(
            right.mean()
        )
        assert first.drop.value == pytest.approx(1 - first.accuracy.value / first.clean.value)
        assert f"{(~long).sum()} of 40 at 0:6" in found.notes[-1] and "standard deviation" in found.notes[0]
        assert "examples" in str(found) and f"{long.sum()}" in str(found)

    def test_sequences_of_ids(self):
        draw = np.random.default_rng(0)
        ids = draw.integers(0, len(WORDS), (20, 8))
        data = SequenceData("bits", "test", ids, ids[:, 0] % 2, tuple(WORDS), ("negative", "positive"))
        model = dataclasses.replace(reader(), tokenizer=None)
        found = position_bias(model, data, regions="0:4", replacement="other")
        assert found.regions[0].left_out == 0 and found.unit == "tokens" and found.length == 8
        beyond = dataclasses.replace(data, ids=ids + 4)
        refuses("bits has token id 16, outside the model's 0…12", position_bias, model, beyond)

    def test_a_symbol_that_the_model_does_not_have(self):
        model = dataclasses.replace(reader(), tokenizer=symbol_tokenizer(WORDS))
        assert position_bias(model, reviews_of("good film", "bad film")).clean
        with pytest.raises(InputError, match="'zebra', which is not a symbol of this tokenizer"):
            position_bias(model, reviews_of("good film", "bad zebra"))

    def test_a_region_that_no_donor_reaches(self):
        data = reviews_of("a", "bad", "good film with music")  # only the last is long enough, and no donor of it is
        found = position_bias(reader(), data, regions="2:4,0:1", replacement="other", window=1)
        nowhere = found.regions[0]
        assert (nowhere.examples, nowhere.left_out) == (0, 3) and math.isnan(nowhere.accuracy.value)
        assert math.isnan(found.average.value) and "not defined on average" in found.headline
        assert not re.search("nan|…", str(found)) and "3 of 3 at 2:4" in found.notes[-1]
        assert type(found).from_dict(json.loads(found.to_json())) == found

    def test_a_donor_is_of_another_class_and_long_enough(self):
        labels, lengths = np.array([0, 0, 1, 1, 2]), np.array([5, 9, 3, 7, 6])
        seen = [draw_donors(labels, lengths, np.array([6, 6, 9, 20, 0]), seed).tolist() for seed in range(60)]
        assert [set(column) for column in zip(*seen)] == [{3, 4}, {3, 4}, {1}, {1}, {0, 1, 2, 3}]
        with pytest.raises(
            InputError, match="takes tokens from an example of another class, but all examples are of one"
        ):
            draw_donors(np.zeros(3, dtype=np.int64), lengths[:3], lengths[:3], 0)


def named(data):
    return [data.label_names[label] for label in data.labels]


class TestNumbers:
    """Numbers from class ids, without a model."""

    def test_by_hand(self):
        labels = np.array([0, 0, 1, 1, 2])
        clean = np.array([0, 0, 1, 1, 0])
        attacked = np.array([[0, 1, 1, 2, 2], [0, 0, LEFT_OUT, 2, 0]]).T
        donors = np.array([1, 1, 0, 2, 0])
        found = measure(labels, clean, attacked, donors, [Region(0, 1)], [Region(1, 2)], seed=0)
        (one,), (two,) = found["regions"], found["windows"]
        assert found["clean"].value == 0.8 and one.accuracy.value == 0.6 and one.drop.value == pytest.approx(0.25)
        assert one.flipped.value == 0.5 and one.success.value == 0.5  # the second becomes 1, the fourth 2
        assert (two.examples, two.left_out) == (4, 1) and two.clean.value == 0.75 and two.accuracy.value == 0.5
        assert found["right"].tolist() == [[1, 1, 1, 1, 0], [1, 0, 1, 0, 1], [1, 1, -1, 0, 0]]
        assert two.drop.value == pytest.approx(1 / 3) and two.flipped.value == two.success.value == pytest.approx(1 / 3)

    def test_what_was_wrong_before_is_not_flipped(self):
        """A wrong answer of three classes can become another wrong one, or the right one."""
        labels = np.array([0, 0, 0, 1, 2, 2, 1, 0])
        clean = np.array([0, 0, 0, 1, 2, 0, 0, 1])
        attacked = np.array([[0, 1, 2, 2, 2, 1, 2, 0]]).T
        donors = np.array([1, 1, 1, 2, 0, 1, 2, 0])
        (found,) = measure(labels, clean, attacked, donors, [Region(0, 1)], [], seed=0)["regions"]
        assert found.flipped.value == pytest.approx(3 / 5)  # the second, the third and the fourth of five right ones
        assert found.success.value == pytest.approx(2 / 5)  # the third is given a class that was not put in
        assert found.accuracy.value == pytest.approx(3 / 8) and found.drop.value == pytest.approx(2 / 5)

    def test_the_averages_are_those_of_the_papers_table(self):
        """Baleen-B and Mamba of Table 3: "Avg." holds the clean column, too, and ± is a sample standard deviation."""
        for row, average, spread in (
            ((0.659, 0.634, 0.603, 0.314, 0.453), 0.532, 0.146),
            ((0.672, 0.655, 0.631, 0.102, 0.152), 0.442, 0.289),
        ):
            hits = np.arange(1000)[:, None] < np.array(row) * 1000
            means = measure(np.ones(1000), hits[:, 0], hits[:, 1:], None, [Region(*r) for r in PAPER], [], seed=0)
            assert means["average_with_clean"].value == pytest.approx(average, abs=1.1e-3)
            assert means["spread"] == pytest.approx(spread, abs=6e-4)
            assert means["average"].value == pytest.approx(np.mean(row[1:]))
            assert means["average_drop"].value == pytest.approx(1 - np.mean(row[1:]) / row[0])
            assert [one.drop.value for one in means["regions"]] == pytest.approx([1 - a / row[0] for a in row[1:]])

    def test_intervals_are_paired(self):
        """For two sets of hits as independent draws the drop would vary; for nested ones it varies by the few
        between."""
        hits = np.arange(400)[:, None] < np.array([300, 290])
        drop = measure(np.ones(400), hits[:, 0], hits[:, 1:], None, [Region(0, 1)], [], seed=0)["regions"][0].drop
        assert drop.value == pytest.approx(1 / 30) and 0.013 < drop.low < drop.high < 0.056

    def test_without_a_right_answer_no_drop_is_given(self, planted, test_images):
        wrong = dataclasses.replace(test_images, labels=1 - test_images.labels)
        right = position_bias(planted, wrong, regions="0:8").clean.value
        wrong = wrong.take(np.flatnonzero(Pixels(planted, wrong, "zeros", 0).predict([], None)[0] != wrong.labels))
        assert right < 0.05 and len(wrong) > 190
        found = position_bias(planted, wrong, regions="0:8")
        assert found.clean == share(0, len(wrong))
        assert math.isnan(found.regions[0].drop.value) and math.isnan(found.average_drop.low)
        assert "clean accuracy is 0" in found.notes[0] and " – " in str(found) and "nan" not in str(found)
        found.figure()
        assert type(found).from_dict(json.loads(found.to_json())) == found


class TestOptions:
    def test_the_seed_and_nothing_else_changes_the_noise(self, planted, test_images):
        first = position_bias(planted, test_images, regions="13:16")
        again = position_bias(planted, test_images, regions="13:16,0:9", batch_size=7)
        assert first.regions[0] == again.regions[0]
        assert position_bias(planted, test_images, regions="13:16", seed=1).regions[0] != first.regions[0]

    def test_a_limit_draws_examples(self, planted, test_images):
        found = position_bias(planted, test_images, limit=20, seed=3)
        sample = test_images.sample(20, seed=3)
        assert found.provenance["data"] == {
            **dict(name="planted", split="test", fingerprint=sample.fingerprint, examples=20)
        }
        assert found.provenance["seed"] == 3 and found.provenance["options"]["limit"] == 20
        assert found.provenance["fingerprint"] == planted.fingerprint
        assert found.provenance["options"]["regions"] == ["0%:10%", "0%:25%", "75%:100%", "90%:100%"]

    def test_classes_are_matched_by_name(self, planted, test_images):
        turned = dataclasses.replace(test_images, label_names=("bright", "dark"), labels=1 - test_images.labels)
        assert (class_ids(planted, turned) == test_images.labels).all()
        assert position_bias(planted, turned, regions="0:8").clean.value > 0.95
        other = dataclasses.replace(test_images, label_names=("cat", "dog"))
        refuses(
            "planted has the classes cat, dog; .* tells apart dark, bright: give data", position_bias, planted, other
        )
        unnamed = ssmscope.load(pixel_module(labels=("LABEL_0", "LABEL_1")))
        assert (class_ids(unnamed, other) == other.labels).all()

    @pytest.mark.parametrize(("options", "says"), [
        (dict(replacement="zeroes"), "unknown replacement 'zeroes'; allowed are noise, zeros, mean, other; did you"),
        (dict(regions="0:17"), "region 0:17 is empty or not within 0 to 16"),
        (dict(limit=0), "limit is 0; allowed is a whole number from 1 on"),
    ])  # fmt: skip
    def test_what_is_refused(self, planted, test_images, options, says):
        refuses(says, position_bias, planted, test_images, **options)

    @pytest.mark.parametrize(("model", "data", "says"), [
        (None, reviews(), "reads pixels, but reviews holds texts"),
        (reader(), images(3, 0), "reads tokens, but planted holds images"),
        (dataclasses.replace(reader(), tokenizer=None), reviews(), "has no tokenizer to read texts with; give one"),
        (None, images(3, 0, channels=2), "planted has 2 channels a pixel, the model reads 1"),
        (None, images(3, 0, shape=(2, 8)), "planted has images of 8 × 2 pixels, the model was trained on 4 × 4"),
        (None, images(3, 0).take(np.arange(0)), r"planted \(test\) has no example"),
        (LANGUAGE, reviews(), "is not a classifier"),
        (None, [1], r"data is \[.*give the name of a data set"),
    ])  # fmt: skip
    def test_data_of_another_kind(self, planted, model, data, says):
        refuses(says, position_bias, model or planted, data)

    def test_a_damaged_model_is_refused(self, test_images):
        module = pixel_module()
        with torch.no_grad():
            module.head.bias[0] = torch.nan
        with pytest.raises(InputError, match="is damaged: 1 of the .* numbers of head.bias are not finite"):
            position_bias(ssmscope.load(module), test_images)

    def test_logits_that_overflow_are_refused(self, test_images):
        module = pixel_module()
        with torch.no_grad():
            module.head.bias[0], module.head.bias[1] = 3e38, 3e38
            module.head.weight.mul_(1e38)
        refuses("the logits of .* are not finite", position_bias, ssmscope.load(module), test_images)


class TestResult:
    def test_what_is_worst_is_told_by_paired_differences(self):
        """40 and 38 of 200 examples are lost, the same ones but for 2; and of two windows 30 each, other ones."""
        labels = np.zeros(200, dtype=int)
        attacked = np.zeros((200, 4), dtype=int)
        for region, lost in enumerate((range(38), range(40), range(30), range(100, 130))):
            attacked[list(lost), region] = 1
        regions = [Region(at, at + 1) for at in range(4)]
        found = measure(labels, labels, attacked, None, regions[:2], regions[2:], seed=0)
        assert found["worst_regions"] == (1, 0) and found["worst_windows"] == (0, 1)
        attacked[38:60, 1] = 1
        found = measure(labels, labels, attacked, None, regions[:2], regions[2:], seed=0)
        assert found["worst_regions"] == (1,)  # their own intervals overlap
        one, other = (region.drop for region in found["regions"])
        assert one.high > other.low
