"""Requirements as they are written: what each says, and what is refused."""

import pytest
from planned import planned

from ssmscope.errors import InputError
from ssmscope.reports.requirements import Requirement, read_requirement, read_requirements


def test_a_limit():
    text = "position.drop <= 0.2"
    assert read_requirement(text) == Requirement(text, "position.drop", "<=", 0.2, None, None, None)
    full = read_requirement(" words.success[deepwordbug, 500 queries]≥-1.5e-2   at 97.5 %  for runs/my model ")
    assert (full.name, full.operator, full.limit) == ("words.success[deepwordbug, 500 queries]", ">=", -0.015)
    assert (full.level, full.model, full.reference) == (0.975, "runs/my model", None)
    assert full.text == "words.success[deepwordbug, 500 queries]≥-1.5e-2 at 97.5 % for runs/my model"
    region = read_requirement("position.drop[0%:10%] < −.5")
    assert (region.name, region.operator, region.limit) == ("position.drop[0%:10%]", "<", -0.5)
    assert read_requirement("loss > 3 at 90%").level == 0.9 and read_requirement("loss > 3 at 99.9 %").level == 0.999


def test_no_worse_than():
    found = read_requirement("accuracy no worse than baseline by 0.01 at 95 % for demo/sst2-mamba2")
    assert (found.name, found.operator, found.limit, found.reference) == ("accuracy", "", 0.01, "baseline")
    assert (found.level, found.model) == (0.95, "demo/sst2-mamba2")
    short = read_requirement("words.success[textfooler] no worse than runs/old one")
    assert (short.limit, short.reference, short.level, short.model) == (0.0, "runs/old one", None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("position.drop", "write 'NAME <= NUMBER'"),
        ("accuracy >= 80 %", "a limit is a plain number, 0.2 for 20 %"),
        ("accuracy no worse than baseline by 1 %", "a limit is a plain number"),
        ("accuracy >= 0.8 at 0.95", "a level ends in %"),
        ("accuracy == 0.8", "the comparisons are <=, >=, < and >"),
        ("accuracy >= nan", "is not understood"),
        ("accuracy >= 0.8 and more", "is not understood"),
        (">= 0.8", "is not understood"),
        ("accuracy >= 0.8 at 50 %", "above 50 % and below 100 %"),
        ("accuracy >= 0.8 at 100 %", "above 50 % and below 100 %"),
        ("accuracy >= 0.8 at 99.99999999999999 %", "the level is 99.99999999999999 %; give one above 50 % and below"),
        ("accuracy >= 0.8 at 50.000000000000001 %", "above 50 % and below 100 %"),
        ("accuracy no worse than baseline by -0.1", "the margin is -0.1; give a number of at least 0"),
        ("accuracy >= " + "1" * 489, "501 characters; at most 500"),
    ],
)
def test_refusals(text, says):
    with pytest.raises(InputError) as refused:
        read_requirement(text)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_baseline_that_is_not_given():
    wanted = ["accuracy >= 0.5", "accuracy no worse than baseline", "accuracy >= 0.5"]
    with pytest.raises(InputError, match="needs an earlier report; give it with --baseline"):
        read_requirements(wanted, baseline=False)
    assert [each.text for each in read_requirements(wanted, baseline=True)] == wanted[:2]
    many = [f"accuracy >= {number}" for number in range(1001)]
    assert len(read_requirements(many[1:], baseline=False)) == 1000
    with pytest.raises(InputError, match="1,001 requirements; at most 1,000"):
        read_requirements(many, baseline=False)
    assert read_requirement("accuracy >= " + "0" * 488).limit == 0


class TestInAPlan:
    PLAN = {"models": ["demo/sst2-mamba2"], "analyses": ["stability"]}

    def test_a_text_or_a_list(self):
        assert planned(self.PLAN).require == ()
        assert planned({**self.PLAN, "require": "accuracy >= 0.5"}).require == ("accuracy >= 0.5",)
        two = ["accuracy >= 0.5", "words.success[deepwordbug] <= 0.5 at 95 %"]
        assert planned({**self.PLAN, "require": two}).require == tuple(two)

    def test_a_variable(self):
        plan = {**self.PLAN, "variables": {"gate": None}, "require": ["$gate"]}
        assert planned(plan, variables={"gate": "accuracy >= 0.5"}).require == ("accuracy >= 0.5",)
        with pytest.raises(InputError, match="require needs a variable that is not set"):
            planned(plan)

    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            ([], "nothing"),
            ([""], "nothing"),
            ([None], "nothing"),
            (["accuracy >= 0", None], "nothing"),
            ({"a": "b"}, "{'a': 'b'}"),
        ],
    )
    def test_refusals(self, given, shown):
        with pytest.raises(InputError) as refused:
            planned({**self.PLAN, "require": given})
        assert f"require has {shown}; give texts such as" in str(refused.value)
