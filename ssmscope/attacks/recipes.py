"""Recipes of attacks built from TextAttack's parts without downloads.

There are two flavours: "prompt" follows PromptBench, for attacks on a task prompt; "words" follows TextAttack, for
attacks on single texts. A part whose resource is missing is replaced or left out, and the recipe says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssmscope.attacks.names import ATTACKS, Attack, Build, Recipe
from ssmscope.attacks.offline import stopwords, textattack
from ssmscope.errors import InputError


def attack_of(recipe: Recipe, goal_function: Any, *more_constraints: Any) -> Any:
    """Return TextAttack's `Attack` of a recipe for a goal, with further constraints."""
    constraints = [*recipe.constraints, *more_constraints]
    return textattack().Attack(goal_function, constraints, recipe.transformation, copy.copy(recipe.search))


def protect(words: Iterable[str], placeholder: str | None) -> Any:
    """Return a constraint that keeps words (usually labels) in any case and punctuation, and a placeholder."""
    textattack()
    from ssmscope.attacks.swaps import Protected

    return Protected(words, placeholder)


def recipe(name: str, *, flavour: str, **resources: Any) -> Recipe:
    """Return the attack of this name and flavour, "prompt" or "words"; resources are files or names of models."""
    declared = ATTACKS[name]
    if flavour == "prompt" and declared.suffixes:
        return Recipe(name, None, (), None, (declared.about,), suffixes=declared.suffixes)
    textattack()
    return declared.build(Resources(**resources), flavour == "prompt")


@dataclass
class Resources:
    """Files and models that a recipe may use, and its notes on what runs."""

    embeddings: str | Path | None = None
    masked_lm: str | Path | None = None
    encoder: str | Path | None = None
    synonyms: str | Path | None = None
    ran: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def kept_words(self, what: str = "") -> list[Any]:
        """Return constraints that keep stop words, and words that were changed before."""
        words, whose = stopwords()
        self.ran += ["no word twice", f"no stop word ({whose})"]
        self.left_out += [what] if what else []
        kinds = textattack().constraints.pre_transformation
        return [kinds.RepeatModification(), kinds.StopwordModification(stopwords=words)]

    def neighbours(self, number: int) -> list[Any]:
        """Return swaps for the nearest words, if there are word vectors."""
        if self.embeddings is None:
            self.left_out.append(f"{number} nearest neighbours of a word: they need word vectors (embeddings)")
            return []
        from ssmscope.attacks.resources import load_vectors
        from ssmscope.attacks.swaps import Vectors

        vectors = load_vectors(self.embeddings)
        self.ran.append(f"{number} nearest neighbours of a word ({len(vectors.words):,} vectors of {self.embeddings})")
        return [textattack().transformations.WordSwapEmbedding(max_candidates=number, embedding=Vectors(vectors))]

    def similar(self, threshold: float, metric: str, **options: Any) -> list[Any]:
        """Return a limit on the similarity of sentences, if there is an encoder."""
        described = f"sentence similarity ≥ {threshold:g} ({metric})"
        if self.encoder is None:
            self.left_out.append(f"{described}: it needs a sentence encoder (encoder)")
            return []
        from ssmscope.attacks.resources import Encoder
        from ssmscope.attacks.swaps import Similarity

        self.ran.append(f"{described} by {self.encoder} in place of the Universal Sentence Encoder")
        return [Similarity(Encoder(self.encoder), threshold=threshold, metric=metric, **options)]

    def part_of_speech(self) -> list[Any]:
        """Return the constraint to the same part of speech, if NLTK's tagger is installed."""
        import nltk

        try:
            nltk.pos_tag(["film"], tagset="universal")
        except LookupError:
            self.left_out.append("the same part of speech: it needs NLTK's tagger (averaged_perceptron_tagger_eng)")
            return []
        self.ran.append("the same part of speech, or noun for verb")
        return [textattack().constraints.grammaticality.PartOfSpeech(allow_verb_noun_swap=True)]

    def recipe(self, name: str, transformations: list[Any], constraints: list[Any], search: Any) -> Recipe:
        alone = len(transformations) == 1
        whole = transformations[0] if alone else textattack().transformations.CompositeTransformation(transformations)
        return Recipe(name, whole, tuple(constraints), search, tuple(self.ran), tuple(self.left_out))


def greedy(resources: Resources, importance: str) -> Any:
    described = {"unk": "[UNK] in its place", "delete": "its deletion", "weighted-saliency": "saliency times effect"}
    resources.ran.append(f"greedy, words by the effect of {described[importance]}")
    return textattack().search_methods.GreedyWordSwapWIR(wir_method=importance)


RANDOM_STRINGS = tuple(
    """
    d6ZQ3u0GBQ vTAjHynoIG OB4KVJzIft LkF0FZxMZ4 iia2yL9Uzm CuVpbbkC4c w52rwgo0Av Vq3aBzuZcD hXLpw3bbiw RcRneWo6Iv
    S6oUV5E54P xikCjkMydH MQnugHcaoy Q47Jmd4lMV 9vGXgnbWB8 IhuBIhoPGc 5yWbBXztUY AMsRIKZniY EAB4KP2NVY 9Q3S1F94fE
    b74X5IVXQY SFPCqpiClT bhrRSokrfa YHQiDfFhw4 BWmsLx8xOA PDCGfz6DL9 yh912BU8T0 ofOQXLxiW4 Cev0s49fbe rzu98kF2KF
    zexKUTWJYG 5XeflW1ZJc is77sOXAu8 XStsD2pUzu fwhUZUQzXW Pbl3tYuoRo MSAddJ4D2a mzjVogkRhM Kw6nrs57gH ItGDrrA1Sc
    KjPJJ2a7RB mOJ9nEwT4f ofw9fEkN5R njCuciQJpB 6a4Yn3RGVc SvAp8RlOFn g0vBZf3tQC zq0DcZ5dnI lf8wBa2yEm lWJoGGRdjv
""".split()
)

STRESSES = (" and true is true ", " and false is not true ", " and true is true " * 5)
"""Suffixes that mean nothing for the task (Naik et al. 2018), of PromptBench 0.0.4; it has 50 `RANDOM_STRINGS` too
(Ribeiro et al. 2020)."""

stresstest = Attack(
    suffixes=STRESSES,
    about="3 suffixes (true is true, false is not true, the first five times), all tried",
    row="3 suffixes",
)


def attack(*, prompts: bool = True, **declared: Any) -> Callable[[Build], Attack]:
    """Declare an attack by the function that builds its search, on words and, by default, on prompts."""
    return lambda build: Attack(words=build, prompts=build if prompts else None, **declared)


@attack(row="a search")
def deepwordbug(resources: Resources, prompt: bool) -> Recipe:
    """Build DeepWordBug (Gao et al. 2018)."""
    package = textattack()
    swaps = [
        package.transformations.WordSwapNeighboringCharacterSwap(),
        package.transformations.WordSwapRandomCharacterSubstitution(),
        package.transformations.WordSwapRandomCharacterDeletion(),
        package.transformations.WordSwapRandomCharacterInsertion(),
    ]
    resources.ran.append("swap, substitute, delete or insert a character")
    constraints = [*resources.kept_words(), package.constraints.overlap.LevenshteinEditDistance(30)]
    resources.ran.append("edit distance ≤ 30")
    return resources.recipe("deepwordbug", swaps, constraints, greedy(resources, "unk"))


@attack(options=("embeddings", "encoder"))
def textbugger(resources: Resources, prompt: bool) -> Recipe:
    """Build TextBugger (Li et al. 2019)."""
    from ssmscope.attacks.swaps import Homoglyphs

    kinds = textattack().transformations
    inner = dict(random_one=True, skip_first_char=True, skip_last_char=True)
    swaps = [
        kinds.WordSwapRandomCharacterInsertion(letters_to_insert=" ", **inner),
        kinds.WordSwapRandomCharacterDeletion(**inner),
        kinds.WordSwapNeighboringCharacterSwap(**inner),
        Homoglyphs(),
    ]
    resources.ran.append("insert a space, delete or swap an inner character, a look-alike letter")
    swaps += resources.neighbours(5)
    constraints = [*resources.kept_words(), *resources.similar(0.8, "angular")]
    return resources.recipe("textbugger", swaps, constraints, greedy(resources, "delete"))


@attack(options=("embeddings", "encoder"))
def textfooler(resources: Resources, prompt: bool) -> Recipe:
    """Build TextFooler (Jin et al. 2019). The minimum cosine of two words is PromptBench's 0.6 or TextAttack's 0.5."""
    if resources.embeddings is None:
        raise InputError("textfooler swaps words for their neighbours, by word vectors: give embeddings=…, a file")
    kinds, swaps = textattack().constraints, resources.neighbours(50)
    least = 0.6 if prompt else 0.5
    constraints = [
        *resources.kept_words("the list of stop words of TextFooler's authors: the one named is in its place"),
        kinds.pre_transformation.InputColumnModification(["premise", "hypothesis"], {"premise"}),
        kinds.semantics.WordEmbeddingDistance(embedding=swaps[0].embedding, min_cos_sim=least),
    ]
    resources.ran.append(f"cosine of the two words ≥ {least}")
    constraints += resources.part_of_speech()
    window = dict(compare_against_original=False, window_size=15, skip_text_shorter_than_window=True)
    constraints += resources.similar(0.840845057, "angular", **window)
    return resources.recipe("textfooler", swaps, constraints, greedy(resources, "delete"))


@attack(options=("masked_lm", "encoder"))
def bertattack(resources: Resources, prompt: bool) -> Recipe:
    """Build BERT-Attack (Li et al. 2020) with its 48 candidates; the limits are PromptBench's or TextAttack's."""
    from ssmscope.attacks.resources import MaskedLM
    from ssmscope.attacks.swaps import MaskedWords

    if resources.masked_lm is None:
        raise InputError("bertattack asks a masked language model for words: give masked_lm=…, a directory or a hub id")
    swaps = [MaskedWords(MaskedLM(resources.masked_lm), candidates=48)]
    resources.ran.append(f"48 words of the masked language model {resources.masked_lm}, ranked by perplexity")
    share, similarity = (1.0, 0.8) if prompt else (0.4, 0.2)
    few = textattack().constraints.overlap.MaxWordsPerturbed(max_percent=share)
    constraints = [*resources.kept_words(), few]
    resources.ran.append(f"at most {share:.0%} of the words")
    constraints += resources.similar(similarity, "cosine", compare_against_original=True, window_size=None)
    return resources.recipe("bertattack", swaps, constraints, greedy(resources, "unk"))


@attack(prompts=False, options=("synonyms",))
def pwws(resources: Resources, prompt: bool) -> Recipe:
    """Build PWWS (Ren et al. 2019)."""
    import nltk
    from ssmscope.attacks.resources import load_synonyms
    from ssmscope.attacks.swaps import Synonyms, WordNetSynonyms

    swap: Any = WordNetSynonyms()
    given = "WordNet"
    if resources.synonyms is not None:
        swap = Synonyms(load_synonyms(resources.synonyms))
        given = f"{len(swap.table):,} words of {resources.synonyms}"
    else:
        try:
            nltk.corpus.wordnet.synsets("film")
        except LookupError as error:
            raise InputError(
                "pwws swaps words for synonyms: give synonyms=…, a .json or .csv file, or install NLTK's wordnet"
            ) from error
    resources.ran.append(f"synonyms ({given})")
    resources.left_out.append("swaps of named entities: they need the entities of the whole data set")
    return resources.recipe("pwws", [swap], resources.kept_words(), greedy(resources, "weighted-saliency"))


@attack(
    prompts=False, row="50 suffixes", suffixes=RANDOM_STRINGS, about="50 random strings of 10 characters, all tried"
)
def checklist(resources: Resources, prompt: bool) -> Recipe:
    """Build CheckList (Ribeiro et al. 2020)."""
    from ssmscope.attacks.swaps import Contractions, Numbers

    package = textattack()
    resources.ran += ["expand or contract (it's, it is), other numbers", "no word twice", "greedy"]
    resources.left_out.append("other names and places: they need a tagger of entities")
    swaps = [package.transformations.WordSwapExtend(), Contractions(), Numbers()]
    once = package.constraints.pre_transformation.RepeatModification()
    return resources.recipe("checklist", swaps, [once], package.search_methods.GreedySearch())
