"""The task prompts fit their data sets."""

import ast
import re
from pathlib import Path

import pytest
from refusals import refuses
from ssmscope.data import prompts
from ssmscope.data.prompts import CONTENT, PAIRS, TASK_PROMPTS, content_of, prompts_of
from ssmscope.data.text import PAIR_SEPARATOR, SOURCES, load_text
from ssmscope.errors import InputError


@pytest.mark.parametrize("name", TASK_PROMPTS)
class TestEverySet:
    def test_templates_hold_their_text_once(self, name):
        templates = TASK_PROMPTS[name].templates
        assert len(templates) == len(set(templates)) == 6
        for template in templates:
            assert template.count(CONTENT) == 1 and template == template.strip()
            assert not re.search(r"[{}]", template.replace(CONTENT, "")) and "  " not in template

    def test_styles_differ(self, name):
        templates = TASK_PROMPTS[name].templates
        ends = [template.endswith(":") for template in templates]
        assert any(ends) and not all(ends)
        last = [template.endswith(CONTENT) for template in templates]
        assert any(last) and not all(last) and any(template.startswith(CONTENT) for template in templates)

    def test_words_are_one_for_each_class_and_named_in_most_templates(self, name):
        found = TASK_PROMPTS[name]
        assert len(found.words) == len(set(found.words)) == len(SOURCES[name].labels)
        naming = [all(re.search(rf"\b{word}\b", text) for word in found.words) for text in found.templates]
        assert sum(naming) >= 4


def test_words_are_in_the_order_of_the_classes():
    for name in ("sst2", "rotten_tomatoes", "imdb", "snli"):
        assert TASK_PROMPTS[name].words == SOURCES[name].labels
    # an entailed sentence resolves the pronoun correctly
    assert dict(zip(SOURCES["wnli"].labels, TASK_PROMPTS["wnli"].words)) == {
        **dict(not_entailment="incorrect", entailment="correct")
    }


def test_words_of_wnli_against_the_data(real_data, monkeypatch):
    """The thing that clogs a drain is the one to remove: this reading of the pronoun is the correct one."""
    monkeypatch.setenv("SSMSCOPE_DATA", str(real_data("wnli", "train").parents[1]))
    data = load_text("wnli", "train")
    pair = PAIR_SEPARATOR.join(["The drain is clogged with hair. It has to be removed.", "The hair has to be removed."])
    assert prompts_of("wnli").words[data.labels[data.texts.index(pair)]] == "correct"


def test_the_papers_prompt_is_one_of_wnlis():
    (paper,) = [text for text in TASK_PROMPTS["wnli"].templates if "ambiguous pronoun" in text]
    assert paper.endswith(f"Please classify: Question: {CONTENT}\nAnswer:")


def test_pairs_are_shown_with_their_names():
    pair = f"A man sleeps. {PAIR_SEPARATOR.strip()} A man rests. "
    assert content_of("wnli", pair) == "Sentence 1: A man sleeps. Sentence 2: A man rests."
    assert content_of("snli", pair) == "Premise: A man sleeps. Hypothesis: A man rests."
    assert content_of("sst2", pair) == pair and set(PAIRS) < set(TASK_PROMPTS)
    with pytest.raises(
        InputError, match="'alone' is not a pair of sentences of snli; join two by ' ||| '".replace("|", r"\|")
    ):
        content_of("snli", "alone")


def test_data_without_prompts():
    refuses("no task prompts for 'sst'; give templates and words, .*did you mean 'sst2'", prompts_of, "sst")


def test_importing_it_is_quick():
    """Training scripts import it, too."""
    tree = ast.parse(Path(prompts.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {
        "__future__", "collections", "dataclasses", "types", "ssmscope",
    }  # fmt: skip
