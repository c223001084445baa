"""TextAttack, imported without downloads and without changes to the process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import logging.config
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ssmscope.errors import InputError, extra

FUNCTION_WORDS = frozenset(
    """
    a an the this that these those some any each every either neither both all few many much more most several such
    no none another other others own same
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves one who whom whose which what whoever whatever
    am is are was were be been being have has had having do does did doing can could may might must shall should will
    would ought
    and or nor but yet so if unless although though because since while whereas whether than as
    of at by for with without about against between among into onto through during before after above below to from
    up down in out on off over under again further upon within toward towards across along until
    then once here there when where why how
    not only very too just also even still ever never now
    isn't aren't wasn't weren't haven't hasn't hadn't don't doesn't didn't can't couldn't mightn't mustn't shan't
    shouldn't won't wouldn't i'm you're he's she's it's we're they're i've you've we've they've i'll you'll he'll
    she'll it'll we'll they'll i'd you'd he'd she'd we'd they'd that's there's
    """.split()
)
"""English words that carry grammar rather than content, in lower case."""
INSTALL = "textattack.shared.utils.install"


def stopwords() -> tuple[frozenset[str], str]:
    """Return English stop words and the name of their source: NLTK if its data is installed, else `FUNCTION_WORDS`."""
    try:
        import nltk

        with nltk.data.find("corpora/stopwords/english").open(encoding="utf-8") as lines:
            return frozenset(lines.read().split()), "NLTK's English stop words"
    except (ImportError, LookupError):
        return FUNCTION_WORDS, f"{len(FUNCTION_WORDS)} English function words, as NLTK's list is not installed"


@contextmanager
def stopwords_given() -> Iterator[None]:
    """Give `stopwords` to those that ask NLTK for English ones within the context."""
    import nltk.corpus

    words, _ = stopwords()
    before = nltk.corpus.stopwords
    if words is FUNCTION_WORDS:
        nltk.corpus.stopwords = SimpleNamespace(words=lambda language="english": sorted(words))
    try:
        yield
    finally:
        nltk.corpus.stopwords = before


def textattack() -> ModuleType:
    """Import the package textattack and return it. Its own import downloads NLTK data, needs NLTK's stop words, turns
    off other loggers and sets the cache directory of Hugging Face. Here nothing is fetched or written, and environment
    and loggers are restored. Its log lines below errors are not printed."""
    if sys.modules.get("textattack") is None:
        found = importlib.util.find_spec("textattack")
        if found is None or found.origin is None:
            raise InputError(
                "attacks that search through words need the package textattack, which is not installed; "
                f"install it {extra('attacks')}"
            )
        try:
            _import_without_installing(Path(found.origin).parent / "shared" / "utils" / "install.py")
        except ImportError as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"the package textattack cannot be imported ({reason}); install it {extra('attacks')}, which selects "
                "compatible versions of its libraries"
            ) from error
        texts: Any = sys.modules["textattack.shared.attacked_text"]
        texts.AttackedText.SPLIT_TOKEN = "\0SPLIT\0"  # Its own mark may occur in a text, which it then cuts.
        # A search makes a text of every candidate and splits all its words, most of them again.
        texts.words_from_text = functools.lru_cache(2**16)(texts.words_from_text)
    for logger in (INSTALL, "jieba"):  # TextAttack segments Chinese texts with jieba.
        logging.getLogger(logger).setLevel(logging.ERROR)
    return sys.modules["textattack"]


def _import_without_installing(installer: Path) -> None:
    """Import the package while its installer, which runs at import, finds everything in place."""
    from unittest.mock import patch

    with ExitStack() as kept:
        kept.enter_context(patch.dict(os.environ))
        kept.enter_context(patch.object(logging.config, "dictConfig"))  # It would close others' handlers.
        kept.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        kept.enter_context(stopwords_given())
        spec = importlib.util.spec_from_file_location(INSTALL, installer)
        if spec is None or spec.loader is None or not installer.is_file():  # Other versions of the package have none.
            importlib.import_module("textattack")
            return
        module: Any = importlib.util.module_from_spec(spec)
        cache = os.environ.get("TA_CACHE_DIR") or os.path.expanduser("~/.cache/textattack")
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TA_CACHE_DIR=folder):
            Path(folder, "post_install_check_3").touch()
            spec.loader.exec_module(module)
        module.TEXTATTACK_CACHE_DIR = cache
        sys.modules[INSTALL] = module
        try:
            importlib.import_module("textattack")
        except ImportError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "textattack"]:
                del sys.modules[name]
            raise
        utils: Any = sys.modules[INSTALL.rpartition(".")[0]]
        utils.install = module
