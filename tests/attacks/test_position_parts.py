"""Steps of the position-bias attack before and after its runs: batches, donors, default regions, notes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bags import tokenizer
from fading import fading
from refusals import refuses
from ssmscope.attacks.position import measure as module
from ssmscope.attacks.position import position_bias
from ssmscope.attacks.position.measure import Pixels, Tokens, notes_on
from ssmscope.attacks.position.regions import Region, check_places, regions_of, windows_of
from ssmscope.attacks.position.result import Attacked
from ssmscope.core import batching
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import text_data
from ssmscope.data.tokens import SequenceData
from ssmscope.interp import labelled

WORDS = "good bad film a".split()


class Stopped(Exception):
    """Exception that carries the arguments of a run."""


@pytest.mark.parametrize(("room", "size", "sizes"), [
    (21, None, [1] * 5), (41, None, [1] * 5), (42, None, [2, 2, 1]), (3, None, [1] * 5), (3, 3, [3, 2]),
    (999, None, [5]),
])  # fmt: skip
def test_images_run_in_batches_of_so_many_pixels(monkeypatch, room, size, sizes) -> None:
    """A run has the class token too."""
    images = object.__new__(Pixels)
    images.model = SimpleNamespace(device=SimpleNamespace(type="cpu"))  # type: ignore[assignment]
    pixels = np.arange(100, dtype=np.uint8).reshape(5, 20, 1)
    images.data = PixelData("own", "test", pixels, np.array([0, 1, 0, 1, 0]), ("a", "b"), (4, 5))
    monkeypatch.setattr(batching, "TOKENS_AT_ONCE", room)
    found = [list(rows) for rows in images._batches(size)]
    assert list(map(len, found)) == sizes and [row for rows in found for row in rows] == list(range(5))


class TestTokens:
    def test_ids_without_an_embedding_and_texts_without_a_token(self) -> None:
        model = fading(dict.fromkeys(WORDS, 0.0))
        ids = np.array([[1, 2, 3], [6, 0, 4], [5, 1, 2]])
        names = tuple(map(str, range(9)))
        data = SequenceData("bits", "test", ids, np.array([0, 1, 0]), names, ("bad", "good"))
        assert Tokens(model, data, "zeros", 0).lengths.tolist() == [3, 3, 3]
        ids[1, 0] = 7
        refuses("bits has token id 7, outside the model's 0…6", Tokens, model, data, "zeros", 0)
        model = fading(dict.fromkeys(WORDS, 0.0))
        data = text_data("own", "all", ["good film", "  ", "bad"], [0, 1, 0], ("bad", "good"))
        refuses("example 1 of own has no token of its own", Tokens, model, data, "noise", 0)
        assert model.tokenizer("a")["input_ids"] == tokenizer(WORDS)("a")["input_ids"] == [6, 2]

    def test_noise_is_told(self) -> None:
        model, data = fading({"a": 3.0, "b": 1.0}), text_data("own", "all", ["a b", "b"], [0, 1], ("bad", "good"))
        deviation = float(model.module.get_input_embeddings().weight.detach().std())
        (said,) = Tokens(model, data, "noise", 0).remarks
        assert said == f"noise is N(0, 1) times {deviation:.3g}, the standard deviation of the embedding table"
        assert Tokens(model, data, "zeros", 0).remarks == ()


class Nothing(Model):
    """A model without anything."""

    source: Any = {}


class TestCall:
    """Arguments that a run of inputs of some lengths is given."""

    @pytest.fixture
    def given(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def run(lengths: list[int], **options: Any) -> tuple[Any, ...]:
            def predict(*told: Any) -> None:
                raise Stopped(*told)

            inputs = SimpleNamespace(lengths=np.array(lengths), predict=predict)
            monkeypatch.setattr(module, "replaced_inputs", lambda model, data: lambda *_: inputs)
            monkeypatch.setattr(labelled, "class_ids", lambda model, data: np.arange(len(lengths)) % 2)
            data: Any = SimpleNamespace(fingerprint="0" * 16, name="own", split="test", __len__=lambda: len(lengths))
            monkeypatch.setattr("ssmscope.api.provenance.record_provenance", lambda *_, **more: more["options"])
            with pytest.raises(Stopped) as caught:
                position_bias(object.__new__(Nothing), data, **options)
            return caught.value.args

        return run

    @pytest.mark.parametrize(("lengths", "regions"), [
        ([1024, 1024], "0:32 0:96 928:1024 992:1024"),
        ([1024, 900], "0%:10% 0%:25% 75%:100% 90%:100%"),
        ([1023, 1023], "0%:10% 0%:25% 75%:100% 90%:100%"),
    ])  # fmt: skip
    def test_the_papers_regions_are_those_of_its_length(self, given, lengths, regions) -> None:
        every, donors, size, options = given(lengths)
        assert " ".join(map(str, every)) == regions and donors is None and size is None
        assert options["regions"] == regions.split()

    def test_a_donor_has_the_tokens_that_the_regions_within_an_example_need(self, given, monkeypatch) -> None:
        asked: list[Any] = []

        def draw(labels: np.ndarray, lengths: np.ndarray, needed: np.ndarray, seed: int) -> np.ndarray:
            asked.append((labels.tolist(), lengths.tolist(), needed.tolist(), seed))
            return np.array([1, 0, 1, 0])

        monkeypatch.setattr(module, "draw_donors", draw)
        every, donors, size, _ = given(
            [5, 3, 8, 1], regions="0:5,1:3", window=4, replacement="other", seed=9, batch_size=7
        )
        assert asked == [([0, 1, 0, 1], [5, 3, 8, 1], [5, 3, 8, 0], 9)]
        assert [str(each) for each in every] == ["0:5", "1:3", "0:4", "4:8"]
        assert donors.tolist() == [1, 0, 1, 0] and size == 7

    def test_batches_have_a_limit(self, given) -> None:
        assert given([4, 4], batch_size=2**16)[2] == 2**16
        refuses("batch_size is 65,537; allowed are up to 65,536", given, [4, 4], batch_size=2**16 + 1)


def test_notes_name_where_most_are_left_out() -> None:
    def one(region: str, left_out: int) -> Attacked:
        numbers = dict.fromkeys(("accuracy", "clean", "drop", "flipped"), Estimate(0.5, 0, 1))
        return Attacked(region, 0, 1, False, **numbers, success=None, examples=9, left_out=left_out)

    regions = [one("0:1", 0), one("0:4", 3), one("0:9", 1200), one("0:5", 7)]
    assert list(notes_on(Estimate(0.5, 0, 1), regions[:1], 9)) == []
    assert list(notes_on(Estimate(0.0, 0, 0), regions, 1500)) == [
        "the clean accuracy is 0: there is no drop to measure",
        "3 of the regions and windows extend beyond some examples or their donors, which are left out there: 1,200 of "
        "1,500 at 0:9",
    ]


class TestRegions:
    @pytest.mark.parametrize(("region", "length", "bounds"), [
        (Region(3, 7), 5, (3, 7)), (Region(29, 58, True), 100, (29, 58)), (Region(0, 10, True), 9, (0, 1)),
        (Region(30, 70, True), 5, (1, 3)), (Region(50, 100, True), 1, (0, 1)),
        (Region(100 - 1e-11, 100, True), 10, (9, 10)), (Region(90, 100, True), 11, (9, 11)),
    ])  # fmt: skip
    def test_bounds(self, region: Region, length: int, bounds: tuple[int, int]) -> None:
        assert region.bounds(length) == bounds

    @pytest.mark.parametrize(("window", "stride", "length", "windows"), [
        (3, None, 9, "0:3 3:6 6:9"), (3, None, 8, "0:3 3:6 5:8"), (3, 2, 8, "0:3 2:5 4:7 5:8"), (8, 5, 8, "0:8"),
        ("30%", None, 8, "0%:30% 30%:60% 60%:90% 70%:100%"), ("10%", "30%", 8, "0%:10% 30%:40% 60%:70% 90%:100%"),
        ("0.1%", "33.3%", 8, "0%:0.1% 33.3%:33.4% 66.6%:66.7% 99.9%:100%"), (" 4 ", "4", 5, "0:4 1:5"),
    ])  # fmt: skip
    def test_windows(self, window: Any, stride: Any, length: int, windows: str) -> None:
        assert " ".join(map(str, windows_of(window, stride, length))) == windows

    @pytest.mark.parametrize(("options", "said"), [
        ({"stride": 2}, "stride=… was given without window=…"), ({"regions": []}, "no region was given"),
        ({"regions": "3:3"}, "region 3:3 is empty; write"), ({"regions": [(-1, 3)]}, "region -1:3 is empty; write"),
        ({"regions": "0%:101%"}, "region 0%:101% is empty or not within 0 to 100 %"),
        ({"regions": "0%:5"}, "'0%:5' is not a region"), ({"regions": "0.5:2"}, "region 0.5:2 is not in whole tokens"),
        ({"regions": "0:2.5"}, "region 0:2.5 is not in whole tokens"),
        ({"regions": "0:2, 0:2"}, "region 0:2 was given twice"),
        ({"window": "5%", "stride": 2}, "window 5% and stride 2: give both"), ({"window": 0}, "window is 0; allowed"),
        ({"window": "0%"}, "window is '0%'; allowed"), ({"window": 1.5}, "window is 1.5; allowed"),
        ({"window": 3, "stride": "x"}, "stride is 'x'; allowed"),
    ])  # fmt: skip
    def test_refusals(self, options: dict[str, Any], said: str) -> None:
        refuses(said, check_places, **{"regions": None, "window": None, "stride": None, **options})

    def test_what_is_allowed(self) -> None:
        check_places(regions=" 0:2 ,0.5%:99.5%", window="2.5%", stride="100%", other=1)
        assert regions_of([(0, 2), "50%:100%"], 2) == (Region(0, 2), Region(50, 100, True))
        for given, length in (("0:3", 2), ([(0, 1), (1, 3)], 2)):
            refuses("is empty or not within 0 to 2, the tokens of the longest sequence", regions_of, given, length)
        refuses("window 9 is longer than the longest sequence, of 8 tokens", windows_of, 9, None, 8)
