"""Modules that read numbers: series as input, an answer at one position, and which step and channel decides it."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from own_layers import Unit, unit_terms
from refusals import refuses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
import ssmscope
from ssmscope.attacks.noise.series import CHANGES, changed
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.render.steps import in_steps


class Network(nn.Module):
    def __init__(self, channels: int, outputs: int, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(channels, width), nn.Linear(width, outputs)
        self.units = nn.ModuleList(Unit(width) for _ in range(layers))

    def forward(self, series: Tensor) -> Tensor:
        x = self.enter(series)
        for unit in self.units:
            x = x + unit(x)
        return self.head(x)


class Pooled(Network):
    def forward(self, series: Tensor) -> Tensor:
        return super().forward(series).mean(1)


@pytest.fixture(autouse=True)
def adapted() -> None:
    ssmscope.adapt(Unit, terms=unit_terms, form=ssmscope.Form(values="candidate", out=None))


series = pytest.fixture(lambda: torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(0)))


def network(kind: type[Network] = Network, outputs: int = 4) -> Network:
    torch.manual_seed(0)
    found = kind(3, outputs)
    with torch.no_grad():
        for weight in found.parameters():
            weight.mul_(2)
    return found.eval()


def test_the_answer_is_that_at_the_position(series: Tensor) -> None:
    module = network().double()
    whole = module(series.double())
    model = ssmscope.load(module, at=-1, example=series.double())
    assert model.reads == "series" and model.gives == "classes" and model.channels == 3
    for place in (-1, 0, 6):
        asked = model.at(place)
        torch.testing.assert_close(asked.logits(asked.encode(series)), whole[:, place])
        assert asked.source["position"] == place
    assert model.fingerprint == model.at(3).fingerprint
    short = [series[0], series[1, :7]]
    expected = torch.stack([whole[0, -1], module(series[1:, :7].double())[0, -1]])
    torch.testing.assert_close(model.logits(model.encode(short)), expected)
    refuses("no position 9 in an input of 7", lambda: model.at(9).logits(model.encode(short)))
    ssmscope.load(network(Pooled), example=series)
    refuses("gives one answer", lambda: ssmscope.load(network(Pooled), example=series).at(2))


def test_a_position_is_asked_about_by_every_verb(series: Tensor) -> None:
    module = network().double()
    model = ssmscope.load(module, at=-1, example=series.double(), labels=list("abcd"))
    there, end = (ssmscope.explain(each, series[:1], methods=["gradxinput"])[0] for each in (model.at(4), model))
    asked = ssmscope.explain(model, series[:1], methods=["gradxinput"], at=4)[0]
    assert np.array_equal(asked.attributions[0].scores, there.attributions[0].scores) and asked.answer == there.answer
    assert not np.array_equal(asked.attributions[0].scores, end.attributions[0].scores)
    heatmap, same = ssmscope.heatmap(model, series[:1], at=4), ssmscope.heatmap(model.at(4), series[:1])
    assert heatmap.headline == same.headline and "after step 4" in heatmap.headline
    assert heatmap[0].answer == there.answer
    cut = ssmscope.knockout(model, series[:1], from_="2", at=4, level="ssm").to_frame()
    named = ssmscope.knockout(model.at(4), series[:1], from_="2", to="4", level="ssm").to_frame()
    assert cut["change"].tolist() == named["change"].tolist() and abs(float(cut["change"].iloc[0])) > 1e-3
    refuses("no position 40", ssmscope.explain, model, series[:1], methods=["gradxinput"], at=40)


def test_all_positions_answers_are_on_a_page_with_what_each_rests_on(series: Tensor) -> None:
    model = ssmscope.load(network(), at=-1, example=series, labels=list("abcd"))
    methods, x = ["gradxinput", "survival"], series[:1]
    found = ssmscope.explain(model, x, methods=methods, at="all")
    answers = network()(x)[0].argmax(-1).tolist()
    assert [text.answer for text in found] == ["abcd"[each] for each in answers] and len(set(answers)) > 1
    frame = found.to_frame()
    for at in (0, 1, 6, 10):
        alone = ssmscope.explain(model.at(at), x, methods=methods)
        for mine, own in zip(found[at].attributions, alone[0].attributions):
            np.testing.assert_allclose(mine.scores, own.scores, atol=1e-6)
            assert (
                frame["score"][(frame["at"] == at) & (frame["method"] == own.method)].tolist() == mine.scores.tolist()
            )
            assert not mine.scores[at + 1 :].any() and mine.scores[: at + 1].any()
        assert f"at position {at} rests most on" in alone.headline
    best = [
        int(text.attributions[0].scores.argmax()) if text.attributions[0].scores.max() > 0 else -1 for text in found
    ]
    own = sum(at == each for at, each in enumerate(best))
    assert f"{own} of 11 answers rest most on their own step" in found.headline and 0 < own < 11
    page = found.to_html()
    assert re.findall("<small>(.)</small>", page) == ["abcd"[each] for each in answers]
    (text,) = json.loads(page.partition('<script type="application/json">')[2].partition("</script>")[0])["texts"]
    assert text["queries"] == [*range(11)] and [each["name"] for each in text["maps"]] == methods
    assert "ahead" not in text and text["notes"][3] == f"{found[3].answer}, p = {found[3].probability:.3f}"
    assert len(found.token_rows().texts[0].rows) == 22
    heatmap = ssmscope.heatmap(model, series, half_lives=True)
    tables = [*heatmap.tables(), *ssmscope.stability(model, length=16).tables()]
    assert {"series", "of", "steps from – to", "half-life in steps"} <= {*tables[0].heads, *tables[0].columns}
    for said in (heatmap.headline, heatmap.to_html(), str(ssmscope.stability(model, length=16))):
        shown = re.sub("<(style|script).*?</|<[^>]*>", "", said, flags=re.DOTALL)
        assert not re.search(r"\b(tokens?|texts?|words?)\b", shown)
    reads = ssmscope.attention(model.at(4), x).headline
    assert "step 4 “step 4” reads" in reads
    for given, options, said in [
        (series, {}, "asks about every position of one text, and 2 were given"),
        (x, {"by": ["sentence"]}, "give one of them"),
        (x, {"at": "al"}, "allowed are .*all"),
    ]:
        refuses(said, ssmscope.explain, model, given, **{"at": "all", **options})


def test_names_keep_their_words(series: Tensor) -> None:
    model = ssmscope.load(network(Pooled), inputs="floats", example=series, answer="class")
    model = dataclasses.replace(model, name="a text model")
    found = ssmscope.heatmap(model, series)
    for said in (found.headline, str(found)):
        assert "a text model" in said and "step" in said and "token" not in said, said
    drawn = [text.get_text() for text in found.figure(title="our tokens").findobj(Text)]
    assert "our tokens" in drawn and any("at each step" in each for each in drawn), drawn
    assert not any("word" in each or "token" in each for each in drawn if each != "our tokens"), drawn
    left = "--text x, runs/text-ssm, tokens.csv, text=3, “a word”, my token-model"
    assert in_steps(f"Words of texts: {left}.") == f"Steps of series: {left}."


def test_tokens_are_steps(series: Tensor) -> None:
    model = ssmscope.load(network(Pooled), inputs="floats", example=series)
    batch = model.encode([series[0, :2].numpy(), series[1].tolist()])
    assert batch.tokens[0] == ("step 0", "step 1") and batch.lengths == [2, 11]
    assert torch.equal(batch.rows([0]).values, series[:1, :2]) and torch.equal(batch.values[1], series[1])
    assert torch.equal(model.encode(series[0]).values, series[:1])


@pytest.mark.parametrize("kind", [Network, Pooled])
def test_scores_are_those_of_the_modules_own_gradients(series: Tensor, kind: type[Network]) -> None:
    module = network(kind).double()
    at = None if kind is Pooled else 8
    model = ssmscope.load(module, at=at, example=series.double())
    x = series.double()
    logits = (lambda v: module(v)) if kind is Pooled else (lambda v: module(v)[:, at])
    best = logits(x).argmax(1)

    def slope(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        logits(points).gather(1, best[:, None]).sum().backward()
        return points.grad

    found = ssmscope.explain(
        model, x, methods=["gradxinput", "ig", "occlusion", "lrp"], option={"ig": {"baseline": "zero"}}
    )
    places = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    expected = sum(slope(place * x) for place in places) / 60 * x
    mean = x.mean(1, keepdim=True)
    value = logits(x).gather(1, best[:, None])[:, 0]
    for row in range(2):
        by = {each.method: each for each in found[row].attributions}
        np.testing.assert_allclose(by["gradxinput"].channels, (slope(x) * x)[row], atol=1e-5)
        np.testing.assert_allclose(by["ig"].channels, expected[row], atol=2e-3)
        np.testing.assert_allclose(by["ig"].scores, by["ig"].channels.sum(1), atol=1e-6)
        assert by["ig"].converged and by["lrp"].delta < 1e-4
        for step in (0, 5, 8):
            hidden = x.clone()
            hidden[row, step] = mean[row, 0]
            lost = value[row] - logits(hidden)[row, best[row]]
            assert by["occlusion"].scores[step] == pytest.approx(lost.item(), abs=1e-5)
    frame = found.to_frame()
    assert {"channel_0", "channel_1", "channel_2"} < {*frame.columns}
    assert "channel" in found.verdict()


def test_what_reads_the_memory_of_series(series: Tensor, tmp_path) -> None:
    module = network().double()
    model = ssmscope.load(module, at=-1, example=series.double())
    trace = model.trace(series)
    first = module.enter(series.double())
    torch.testing.assert_close(trace.layers[0].u, first)
    heatmap = ssmscope.heatmap(model, series)
    assert "step" in heatmap.headline
    held = module.units[0].gate(first).sigmoid()
    np.testing.assert_allclose(trace.retention[0, 0], (1 - held).mean(-1)[0].detach(), atol=1e-6)
    attended = ssmscope.attention(model, series[:1], level="ssm", heads="all")
    kept, written = 1 - held[0, :, 2], held[0, :, 2]
    expected = [
        [float(kept[s + 1 : t + 1].prod() * written[s]) if s <= t else 0.0 for s in range(11)] for t in range(11)
    ]
    np.testing.assert_allclose(attended.map(0, layer=0, head=2), expected, atol=1e-6)
    heatmap.save(tmp_path, "heatmap")
    assert type(heatmap).load(tmp_path / "heatmap.json")[0].tokens[0] == "step 0"


@pytest.mark.parametrize(("options", "said"), [
    ({}, "has no embedding of token ids"),
    ({"inputs": "floats"}, "the example is nothing; for floats give"),
    ({"inputs": "series", "example": torch.randn(1, 5, 3)}, "inputs is 'series'; give one of tokens, floats"),
    ({"example": torch.randn(1, 5, 3)}, "gives logits at every position"),
    ({"example": torch.randn(1, 5, 3), "answer": "next"}, "gives logits at every position"),
    ({"example": torch.randn(1, 5, 3), "at": 5}, "at is 5; give the number of a position in the example"),
    ({"example": torch.randn(1, 5, 3), "at": True}, "at is True"),
    ({"example": torch.randn(1, 5, 2), "at": 0}, "cannot be run on numbers"),
    ({"example": torch.randn(5, 3), "at": 0}, r"the example is \(5, 3\)"),
])  # fmt: skip
def test_what_does_not_fit_is_said(options: dict, said: str) -> None:
    refuses(said, ssmscope.load, network(), **options)


@pytest.mark.parametrize(("given", "said"), [
    ("a text", "reads series of 3 channels"), ([1, 2, 3], "series 0 is"), (torch.randn(4, 2), r"series 0 is \(4, 2\)"),
    ([[[1.0, 2.0, float("inf")]]], "not finite"), ([], "give numbers"), ([["a", "b", "c"]], "give numbers"),
    (torch.zeros(1, 0, 3), r"series 0 is \(0, 3\)"),
])  # fmt: skip
def test_other_inputs_are_refused(series: Tensor, given, said: str) -> None:
    model = ssmscope.load(network(), at=-1, example=series)
    refuses(said, model.encode, given)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_step_and_channel_are_found(seed: int) -> None:
    """The sign of channel 2 at the one step where it is large is the class; all else is noise."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(number: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(number, 12, 3, generator=generator)
        at, sign = (torch.randint(0, most, (number,), generator=generator) for most in (12, 2))
        x[:, :, 2] *= 0.2
        x[torch.arange(number), at, 2] = 2.0 * (2 * sign - 1)
        return x, at, sign

    torch.manual_seed(seed)
    module = Network(3, 2, layers=1)
    step = torch.optim.Adam(module.parameters(), 2e-2)
    for _ in range(120):
        x, _, label = drawn(64)
        step.zero_grad()
        cross_entropy(module(x)[:, -1], label).backward()
        step.step()
    x, at, label = drawn(40)
    model = ssmscope.load(module.eval(), at=-1, labels=["below", "above"], example=x)
    assert (model.logits(model.encode(x)).argmax(1) == label).float().mean() > 0.95
    found = ssmscope.explain(model, x, methods=["ig", "lrp"])
    for number in range(2):
        scores = np.stack([each.attributions[number].channels for each in found])
        highest = [np.unravel_index(each.argmax(), each.shape) for each in scores]
        assert np.mean([(int(t), int(c)) == (place, 2) for (t, c), place in zip(highest, at.tolist())]) >= 0.9
    for row, place in enumerate(at.tolist()[:3]):
        cut = {t: ssmscope.knockout(model, x[row : row + 1], from_=str(t)).to_frame() for t in range(12)}
        changes = {t: float(frame["change"].iloc[0]) for t, frame in cut.items()}
        assert min(changes, key=changes.__getitem__) == place


Labelled = tuple[Network, ssmscope.Model, Tensor, list[int]]


@pytest.fixture
def labelled() -> Labelled:
    """A module that is right about half of its examples."""
    module = network(Pooled).double()
    x = torch.randn(24, 11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = module(x).argmax(1).tolist()
    labels[::2] = [(label + 1) % 4 for label in labels[::2]]
    return module, ssmscope.load(module, example=x, labels=list("abcd")), x, labels


@pytest.mark.parametrize("change", CHANGES)
def test_noise_in_series_is_what_it_says(labelled: Labelled, change: str) -> None:
    module, model, x, labels = labelled
    data, values = ssmscope.labelled_series(x, labels, list("abcd")), x.numpy()
    forms = [values, *(changed(values, change, rate, 0) for rate in (0.2, 0.9))]
    found = ssmscope.noise(model, data, change=change, rates=[0.2, 0.9])
    right = [(module(torch.tensor(form)).argmax(1).numpy() == labels).mean() for form in forms]
    assert [found.clean.value, *(level.accuracy.value for level in found.levels)] == pytest.approx(right)
    assert np.array_equal(changed(values, change, 0.0, 0), values)
    more, mean = forms[1], values.mean((0, 1))
    if change == "gaussian":
        assert (more - values).std((0, 1)) / values.std((0, 1)) == pytest.approx([0.2] * 3, rel=0.15)
        np.testing.assert_allclose(forms[2] - values, 4.5 * (more - values), atol=1e-12)
    elif change == "dropped":
        gone = (more != values).all(-1)
        assert gone.mean() == pytest.approx(0.2, abs=0.08) and (more[gone] == mean).all()
    else:
        moves = [
            [m for m in range(-3, 4) if np.array_equal(one[3:8], row[3 - m : 8 - m])] for one, row in zip(more, values)
        ]
        assert all(len(each) == 1 for each in moves) and {m for (m,) in moves} >= {-1, 0, 1}
    refuses("template and words are of texts", ssmscope.noise, model, data, template="{content}")


def test_replaced_and_hidden_steps_are_the_modules_own(labelled: Labelled) -> None:
    module, model, x, labels = labelled
    data, mean = ssmscope.labelled_series(x, labels, list("abcd")), x.mean((0, 1))
    found = ssmscope.position(model, data, regions=["0:3", "8:11"], replacement="mean")
    for region, place in zip(found.regions, (slice(0, 3), slice(8, 11))):
        spoiled = x.clone()
        spoiled[:, place] = mean
        right = (module(spoiled).argmax(1) == torch.tensor(labels)).double().mean().item()
        assert region.accuracy.value == pytest.approx(right, abs=1e-6)
    assert found.unit == "steps" and "steps" in found.headline
    later = lambda goal: Scores(torch.arange(11.0).expand(len(goal.batch.tokens), -1))  # noqa: E731
    fidelity = ssmscope.fidelity(model, data, methods={"later": later}, steps=11)
    answers, values = module(x).argmax(1)[:, None], []
    for hidden in range(12):
        spoiled = x.clone()
        spoiled[:, 11 - hidden :] = mean  # The last steps have the highest scores.
        values.append(module(spoiled).softmax(-1).gather(1, answers).mean().item())
    area = (np.array(values[:-1]) + np.array(values[1:])).mean() / 2
    frame = fidelity.to_frame().query("method == 'later' and measure == 'morf'")
    assert float(frame["value"].iloc[0]) == pytest.approx(area, abs=1e-5)


@pytest.mark.parametrize("at", [None, 4, -1])
def test_patched_steps_are_the_modules_own(series: Tensor, at: int | None) -> None:
    """The first unit reads the embedded step itself."""
    module = network(Pooled if at is None else Network).double()
    clean, corrupted = series[:1].double(), series[:1].double().clone()
    corrupted[0, 3:6] += 2
    logits = lambda x: module(x)[0] if at is None else module(x)[0, at]  # noqa: E731
    change = logits(clean) - logits(corrupted)
    answer, contrast = int(change.argmax()), int(change.argmin())
    model = ssmscope.load(module, at=at, example=clean, labels=list("abcd"))
    asked = {"answer": "abcd"[answer], "contrast": "abcd"[contrast], "metric": "difference"}
    found = ssmscope.patch(model, clean=clean, corrupted=model.encode(corrupted), site="residual", **asked)
    for step in (2, 3, 5):
        x = module.enter(corrupted)
        mixed = x.clone()
        mixed[0, step] = module.enter(clean)[0, step]
        x = x + module.units[0](mixed)
        y = module.head(x + module.units[1](x))[0]
        y = y.mean(0) if at is None else y[at]
        expected = y[answer] - y[contrast]
        assert found.values[0, step, 1] == pytest.approx(expected.item(), abs=1e-5)
    state = ssmscope.patch(model, clean=clean, corrupted=corrupted, **asked)
    if at == -1:  # All of the memory after step 3 is that of the clean steps up to it.
        joined = torch.cat([clean[:, :4], corrupted[:, 4:]], 1)
        expected = logits(joined)[answer] - logits(joined)[contrast]
        assert state.values[-1, 3, 1] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(("values", "labels", "names", "said"), [
    (torch.randn(3, 5), [0, 1, 0], None, r"the series are \(3, 5\)"),
    (np.zeros((3, 5, 2), dtype=int), [0, 1, 0], None, "int64; give floats"),
    (torch.full((3, 5, 2), float("nan")), [0, 1, 0], None, "not finite"),
    (torch.randn(3, 5, 2), [0, 1], None, "2 labels for 3 series"),
    (torch.randn(3, 5, 2), [0, 1, 2], ["no", "yes"], "the label 2 is none of the classes no, yes"),
    (torch.randn(3, 5, 2), ["no", "yes", "maybe"], ["no", "yes"], "the label 'maybe' is none"),
])  # fmt: skip
def test_labelled_series_that_do_not_fit_are_refused(values, labels, names, said: str) -> None:
    refuses(said, ssmscope.labelled_series, values, labels, names)
    assert ssmscope.labelled_series(torch.randn(2, 5, 2), ["b", "a"]).labels.tolist() == [1, 0]
