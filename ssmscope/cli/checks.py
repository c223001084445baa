"""What is checked of a verb's options without a model: how a plan is checked, which runs nothing.

A check takes a verb's options by name, as the command line parses them. It refuses what the verb itself would refuse
before it loads a model, and option values that no model can take.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ssmscope.command import Given, method_options, names, numbers
from ssmscope.errors import InputError, did_you_mean
from ssmscope.inputs import whole_numbers


class Options(dict[str, Any]):
    """The options of a verb by name; `changed` are those that are not their defaults."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.changed = {name for name, value in given.items() if value != defaults[name]}


Words = Collection[str] | str
"""Allowed words, or where they are, as module:name, which is imported for an option that is not its default."""
Check = Callable[[Options], None]
Verb = Callable[..., None]

LEAST = {"seed": 0, "pool": 0, "places": 2, "probes": 2, "random_rankings": 20, "fit_from": 0, "fit_to": 0}
"""The least value of an option that is a whole number, where that is not 1."""


def checked(check: Check) -> Callable[[Verb], Verb]:
    """Decorates a verb: `VERB.check(options)` checks its options by `check` without running it."""

    def noted(function: Verb) -> Verb:
        defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
        function.check = lambda given: check(Options(given, defaults))  # type: ignore[attr-defined]
        return function

    return noted


def heatmap(options: Options) -> None:
    _texts(options)
    _word(options, "score", "interp.selection:SCORES")
    _word(options, "layers", ("mean", "all"), read=numbers(options["layers"], "--layers", "0,3"))
    _wholes(options, "top")


def attention(options: Options) -> None:
    _texts(options)
    _word(options, "layer", ("all",), read=numbers(options["layer"], "--layer", "0,3"))
    _word(options, "rows", ("all", "last"), read=numbers(options["rows"], "--rows", "5,7"))
    _word(options, "level", "frozen:LEVELS")
    _word(options, "heads", "interp.attending:HEADS")
    _wholes(options, "pool", "top")
    if not 0 <= options["residual"] <= 1:
        raise InputError(f"residual is {options['residual']!r}; allowed is a share from 0 to 1")
    if options["target"] is not None and not options["gradient"]:
        raise InputError("--target is the class or token of --gradient; give both")
    if options["parts"] and options["rollout"]:
        raise InputError("parts and rollout cannot be combined: a rollout is of whole layers")


def explain(options: Options) -> None:
    _texts(options)
    _methods(options)
    _wholes(options, "top", "seed")


def fidelity(options: Options) -> None:
    _methods(options)
    _word(options, "mode", "interp.perturbed:MODES")
    _word(options, "value", "interp.perturbed:VALUES")
    _wholes(options, "limit", "max_tokens", "steps", "random_rankings", "batch_size", "seed")


def position(options: Options) -> None:
    _word(options, "replacement", "attacks.position:REPLACEMENTS")
    _wholes(options, "limit", "batch_size", "seed")
    if options["stride"] is not None and options["window"] is None:
        raise InputError("a stride was given without a window; give both")


def insertion(options: Options) -> None:
    _asked(options)
    _wholes(options, "places", "limit", "seed")


def overflow(options: Options) -> None:
    _asked(options)
    _lengths(options, "0,64,256")
    _wholes(options, "limit", "seed")


def prompts(options: Options) -> None:
    _asked(options)
    _each(options, "attacks", "attacks.prompts:ATTACKS")
    _word(options, "suffix", "attacks.prompts:PLACES")
    _wholes(options, "limit", "seed")


def words(options: Options) -> None:
    _asked(options)
    _word(options, "recipe", "attacks.words:RECIPES")
    _wholes(options, "budget", "beam", "flips", "limit", "seed")


def effect(options: Options) -> None:
    for name in ("before", "after"):
        if not options[name].strip():
            raise InputError(f"--{name} is empty; give a text")
    _word(options, "layers", ("mean", "all"), read=numbers(options["layers"], "--layers", "0,3"))
    _wholes(options, "top")


def lens_fit(options: Options) -> None:
    _word(options, "positions", "probes.lens_training:POSITIONS")
    _word(options, "optimizer", "probes.lens_training:OPTIMIZERS")
    _wholes(options, "length", "steps", "batch_tokens", "patience", "look_every", "seed")
    if not 0 < options["held_out"] < 1:
        raise InputError(f"held_out is {options['held_out']!r}; allowed is a share between 0 and 1")


def lens_show(options: Options) -> None:
    _texts(options)
    _word(options, "positions", "probes.lens_training:POSITIONS")
    _word(options, "statistic", "probes.trajectory:STATISTICS")


def snr(options: Options) -> None:
    _each(options, "tasks", "probes.snr:TASKS")
    _lengths(options, "250,1000")
    _word(options, "unit", "probes.snr:UNITS")
    _wholes(options, "examples", "seed")
    given, models = options["lens"], options["models"]
    if given and len(given) != len(models):
        raise InputError(f"{len(given)} lenses were given for {len(models)} models; give one for each, in their order")


def retrieval(options: Options) -> None:
    _each(options, "tasks", "probes.snr:TASKS")
    _lengths(options, "0,1000,4000")
    _wholes(options, "examples", "piece", "seed")


def loss(options: Options) -> None:
    if options["data"] is not None and options["file"] is not None:
        raise InputError("--data cannot be combined with --file; give one of them")
    if options["file"] is not None and not options["file"].lower().endswith(".txt"):
        raise InputError(f"--file {options['file']}: give a .txt file; other data is given with --data")
    _word(options, "unit", "probes.token_loss:UNITS")
    _wholes(options, "length", "limit", "smooth", "piece", "seed")
    if options["smooth"] % 2 == 0:
        raise InputError(f"smooth is {options['smooth']}; allowed is an odd number of positions, as many on both sides")


def stability(options: Options) -> None:
    _texts(options, needed=False)
    lengths = [] if options["length"] is None else whole_numbers(options["length"], "--length", "100")
    if options["positions"] is not None:
        whole_numbers(options["positions"], "--positions", "0,5")
    _least("length", min(lengths, default=2), 2)
    _lengths(options, "10,100,1000")
    _wholes(options, "samples", "examples", "seed")
    if options["tolerance"] is not None and not 0 <= options["tolerance"] < float("inf"):
        raise InputError(f"tolerance is {options['tolerance']!r}; allowed is a number from 0 on")
    if options["delta"] is not None and not 0 < options["delta"] < 1:
        raise InputError(f"delta is {options['delta']!r}; allowed is a probability between 0 and 1")


def influence(options: Options) -> None:
    if not _texts(options, needed=False) and options["length"] is None:
        raise InputError("no text; give --text, --file, --ids or --image, or --length N for random sequences")
    _word(options, "positions", ("last", "all"), read=numbers(options["positions"], "--positions", "0,-1"))
    _word(options, "at", "probes.influence:AT")
    _word(options, "of", "probes.influence_jacobian:OUTPUTS")
    _wholes(options, "length", "sequences", "probes", "fit_from", "fit_to", "recent", "seed")


# ---- what several verbs have


def _texts(options: Options, *, needed: bool = True) -> bool:
    """Whether there are texts, ids or images among the options; they are checked."""
    kinds = ("text", "file", "ids", "image")
    if not needed and not any(options[kind] or options[kind] == "" for kind in kinds):
        return False
    if not needed and options["length"] is not None:
        raise InputError("--length is that of random sequences; leave it out beside --text, --file, --ids and --image")
    text, file, ids, image = (options[kind] for kind in kinds)
    Given(text, file, ids, image, options["max_tokens"])
    return True


def _asked(options: Options) -> None:
    """Templates, label words and how answers are scored."""
    given = options["template"]
    if given:
        from ssmscope.evaluation.template import Template

        for text in [given] if isinstance(given, str) else given:
            Template(text)
    if options["words"] is not None:
        from ssmscope.evaluation.verbalizer import checked_words

        checked_words(names(options["words"]))
    if "scoring" in options:
        _word(options, "scoring", "evaluation.evaluator:SCORINGS")


def _methods(options: Options) -> None:
    from ssmscope.interp.methods import METHODS, method

    chosen, own = names(options["methods"]), method_options(options["option"])
    _each(options, "methods", [*METHODS, "random"])
    if len(set(chosen)) < len(chosen):
        raise InputError(f"methods is {options['methods']}; name each once")
    for name in own:
        if name not in chosen:
            raise InputError(f"options of {name!r}, which is not among the methods{did_you_mean(name, chosen)}")
    for name in own:
        if name in METHODS:
            method(name, own[name])


def _lengths(options: Options, example: str) -> None:
    if options["lengths"] is not None:
        _least("lengths", min(whole_numbers(options["lengths"], "--lengths", example)), 0)


def _word(options: Options, name: str, words: Words, *, read: Any = None) -> None:
    """Refuse a word that is not allowed; `read` is the option where it may be numbers instead."""
    value = options[name] if read is None else read
    if not isinstance(value, str) or name not in options.changed:
        return
    allowed = _found(words)
    if value not in allowed:
        known = ", ".join(allowed)
        raise InputError(f"unknown {name} {value!r:.80}; allowed are {known}{did_you_mean(value, allowed)}")


def _each(options: Options, name: str, words: Words) -> None:
    if options[name] is None or name not in options.changed:
        return
    allowed = _found(words)
    for word in names(options[name]):
        if word not in allowed:
            known = ", ".join(allowed)
            raise InputError(f"unknown among {name}: {word!r:.80}; allowed are {known}{did_you_mean(word, allowed)}")


def _found(words: Words) -> Collection[str]:
    if not isinstance(words, str):
        return words
    module, _, name = words.partition(":")
    return getattr(importlib.import_module(f"ssmscope.{module}"), name)


def _wholes(options: Options, *chosen: str) -> None:
    for name in chosen:
        if options[name] is not None:
            _least(name, options[name], LEAST.get(name, 1))


def _least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} is {value}; allowed is a whole number from {least} on")
