"""Many checkpoints at once: each row as its own run has it, files that are none, and the table's views."""

import math

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.core.model import Model
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.checkpoints import measure, stability_table
from ssmscope.probes.checkpoints.measure import expand_directories
from ssmscope.probes.stability import stability


def example(name: str) -> Model:
    return Model(loud(random_example(name)), None, name)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """State dicts of the paper's authors' kind with s_A from −0.2 to 0.2, and a file that is none."""
    folder, paths = tmp_path_factory.mktemp("sweep"), []
    for number, abscissa in enumerate((-0.2, -0.1, 0.0, 0.2)):
        torch.manual_seed(number)
        A = abscissa - torch.rand(6, 3)
        A[:, 0] = abscissa
        weights = {"embedding.weight": torch.randn(5, 6), "SSM.w": torch.randn(6), "SSM.ssm.A": A}
        weights |= {"SSM.ssm.W_B": torch.randn(3, 6), "SSM.ssm.W_C": torch.randn(3, 6)}
        weights |= {"SSM.ssm.q_delta": torch.randn(6) * 0.1, "SSM.ssm.p_delta": torch.zeros(1)}
        paths.append(folder / f"run{number}.pth")
        torch.save(weights, paths[-1])
    (folder / "notes.pth").write_text("no checkpoint")
    return [*paths[:2], folder / "notes.pth", *paths[2:]]


table = pytest.fixture(scope="module")(lambda sweep: stability_table(sweep, length=30, examples=1000))


class TestTable:
    def test_rows_are_those_of_single_runs(self, sweep, table):
        assert len(table) == 5 and [bool(row.reason) for row in table.rows] == [False, False, True, False, False]
        for path, row, curve in zip(sweep, table.rows, table.curves):
            if row.reason:
                continue
            model = ssmscope.load(path)
            bound = generalization_bound(model, length=30, examples=1000, lengths=table.lengths.tolist())
            alone = stability(model, length=30)
            assert row.name == str(path) and row.fingerprint == model.fingerprint
            assert row.norms == bound.norms and row.vacuous == bound.vacuous and row.bound == bound.gap.bound
            assert (row.log_capacity, row.log_capacity_printed) == (bound.capacity.log, bound.capacity.log_printed)
            assert row.abscissa == pytest.approx(bound.norms.abscissa) and row.behaviour == alone.behaviour
            assert row.possible_gain == pytest.approx(bound.norms.log_rho, rel=1e-9)
            assert (row.growth, row.largest_gain) == (alone[0].growth.value, alone[0].largest_gain)
            assert curve.tolist() == bound.curves[0].tolist()
        assert [row.behaviour for row in table.rows] == ["stable", "stable", "", "marginal", "unstable"]

    def test_a_bad_file_says_why(self, sweep, table):
        assert "notes.pth" in table[2].reason and np.isnan(table.curves[2]).all()
        assert table.names == ["run0.pth", "run1.pth", "notes.pth", "run2.pth", "run3.pth"]
        assert table.headline == "Stability of 5 checkpoints: 2 stable, 1 marginal, 1 unstable, 1 unreadable"
        assert f"notes.pth: {sweep[2]}" in str(table).replace("\n", "")
        frame = table.to_frame()
        assert frame.reason.tolist()[2] == table[2].reason and frame.iloc[2][["B_u", "log_capacity"]].isna().all()
        assert frame.vacuous.tolist()[:2] == [True, True] and frame.states.tolist()[0] == 3

    def test_all_bad_is_refused(self, sweep):
        refuses(r"none of the 2 checkpoints can be read: .*notes.pth", stability_table, [sweep[2], "no/such.pth"])
        refuses(r"the checkpoint cannot be read: .*notes.pth", stability_table, sweep[2])
        refuses("no checkpoint was given", stability_table, [])

    def test_lengths_of_their_own(self, sweep):
        good = [path for path in sweep if path.name != "notes.pth"]
        found = stability_table(good, length=[10, 20, 30, 40], lengths=[10, 20])
        assert [row.length for row in found.rows] == [10, 20, 30, 40] and found.lengths.tolist() == [10, 20]
        assert found[1].log_capacity == pytest.approx(found.curves[1, 1])
        assert found[0].vacuous is None and math.isnan(found[0].bound)  # no number of examples
        assert stability_table(good[:2], length=[5, 3000]).lengths[-1] == 30_000
        without = stability_table(good[:1])
        assert without.model_name == "1 checkpoint" and found.model_name == "4 checkpoints"
        assert without.provenance["options"]["length"] is None and found.provenance["options"]["length"] == [
            10, 20, 30, 40,
        ]  # fmt: skip
        assert math.isnan(without[0].log_capacity) and np.isfinite(without.curves).all()
        for options, says in (
            (dict(length=[10]), "1 lengths were given for 4 checkpoints"),
            (dict(length=0), "length is 0"),
            (dict(length="ten"), "length is 'ten'"),
            (dict(examples=0), "examples is 0"),
            (dict(lengths=[]), "lengths is empty"),
        ):
            refuses(says, stability_table, good, **options)

    def test_an_option_out_of_range_is_no_bad_file(self, sweep):
        refused = (
            (dict(delta=2), "^delta is 2"),
            (dict(loss_bound=0), "^loss_bound is 0"),
            (dict(seed=-1), "^seed is -1"),
        )
        for options, says in refused:
            refuses(says, stability_table, sweep, length=5, examples=10, **options)

    def test_models_of_other_kinds(self, sweep):
        found = stability_table([example("mamba2"), sweep[0]], length=20)
        assert found[0].norms is None and np.isnan(found.curves[0]).all() and found[0].behaviour == "stable"
        assert found[0].abscissa == pytest.approx(-1.0) and found[0].name == "mamba2"
        assert "No capacity C and no bound for 1 checkpoint" in str(found)
        growth, abscissa, curves, marks, _ = found.figure().axes  # one has no bound, and still has its rows
        for axes, values in ((growth, [row.growth for row in found]), (abscissa, [row.abscissa for row in found])):
            (drawn,) = [marks.get_offsets() for marks in axes.collections]  # both are stable
            np.testing.assert_allclose(drawn, [(values[0], 0), (values[1], 1)])
        np.testing.assert_allclose(marks.collections[0].get_offsets(), [(found[1].abscissa, found[1].log_capacity)])
        np.testing.assert_allclose(curves.lines[0].get_ydata(), found.curves[1])
        alone = stability_table([example("mamba2"), example("gla")])
        assert math.isnan(alone[1].abscissa) and "nan" not in str(alone)
        assert "no bound for any checkpoint" in str(alone) and "--length" not in str(alone)
        gated = stability_table(example("gla"))
        assert len(gated.figure().axes) == 1 and "s_A" not in str(gated)


class TestDirectories:
    def test_stand_for_the_checkpoints_in_them(self, tmp_path):
        for name in ("b.pth", "a.pt", ".hidden.pth", "notes.txt", "c.safetensors"):
            (tmp_path / name).touch()
        for name in ("model", "empty", "folder.pth"):
            (tmp_path / name).mkdir()
        (tmp_path / "model" / "config.json").touch()
        (tmp_path / "model" / "weights.pth").touch()
        (tmp_path / "empty" / "config.json").mkdir()
        model = example("mamba2")
        inside = [str(tmp_path / name) for name in ("a.pt", "b.pth", "model")]
        assert expand_directories([tmp_path]) == inside
        one, other = str(tmp_path / "model"), tmp_path / "folder.pth"
        assert expand_directories([one, model, tmp_path, "demo/x", other]) == [one, model, *inside, "demo/x", other]

    def test_without_any_are_told_as_they_are(self, tmp_path):
        refuses("the checkpoint cannot be read", stability_table, tmp_path)


@pytest.mark.parametrize(("length", "drawn"), [(None, 512), (1, 2), (2, 2), (30, 30), (512, 512), (700, 512)])
def test_sequences_are_as_long_as_the_length_within_limits(monkeypatch, length, drawn):
    asked = []

    def noted(model, **options):
        asked.append(options)
        return stability(model, **{**options, "length": 4})

    monkeypatch.setattr(measure, "stability", noted)
    row, curve = measure.measure_checkpoint(example("gla"), length, None, {}, np.array([2, 5]), 3)
    assert asked == [{"length": drawn, "positions": 1, "seed": 3}]
    assert row.name == "gla" and row.reason == "" and np.isnan(curve).all() and len(curve) == 2


def test_a_row_has_the_largest_numbers_of_all_layers():
    model = example("mamba")
    with torch.no_grad():
        model.mixers[1].A_log.fill_(-9)
    row, _ = measure.measure_checkpoint(model, 20, None, {}, np.array([2]), 0)
    alone = stability(model, length=20).to_frame()
    for name, column in (("abscissa", "spectral_abscissa"), ("largest_gain", "largest_gain"), ("growth", "growth")):
        assert getattr(row, name) == alone[column].max() != alone[column].min()
    assert row.possible_gain == 0 and row.behaviour == "marginal" and row.architecture == "mamba"


def test_a_capacity_has_a_length_and_a_bound_examples_too(sweep):
    setting = dict(delta=0.1, loss_bound=2.0, lipschitz=0.5)
    bound = generalization_bound(ssmscope.load(sweep[0]), length=9, examples=50, **setting)
    for length, examples in ((9, 50), (9, None), (None, 50), (None, None)):
        row, curve = measure.measure_checkpoint(sweep[0], length, examples, setting, np.array([4, 9]), 0)
        assert curve[1] == pytest.approx(bound.capacity.log) and row.norms is not None
        known = (row.log_capacity, row.log_capacity_printed)
        wanted = (bound.capacity.log, bound.capacity.log_printed) if length else (math.nan, math.nan)
        assert known == pytest.approx(wanted, nan_ok=True) and row.length == length
        assert row.vacuous == (bound.vacuous if length and examples else None)
        assert row.bound == pytest.approx(bound.gap.bound if length and examples else math.nan, nan_ok=True)
