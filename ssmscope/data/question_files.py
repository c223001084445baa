"""Questions about contexts from a user's own file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ssmscope.core.reading import parse_json
from ssmscope.data.babi import Question, QuestionData
from ssmscope.data.rows import SUFFIXES, Row, checked_text, read_rows
from ssmscope.errors import InputError

COLUMNS = ("context", "question", "answer")


def load_questions(path: str | Path) -> QuestionData:
    """Load the questions of a csv, tsv, jsonl or parquet file with the columns `context`, `question` and `answer`.

    An optional column `distractors` holds other words of the context that might be taken for the answer: a list, in a
    csv or tsv file written as JSON or separated by commas. It may be empty.

    Raises:
        InputError: for a file that cannot be read, a missing column, no row, an empty context, question or answer, or
            distractors that are no words or include the answer.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES or not os.path.isfile(path):
        raise InputError(
            f"there is no file of questions {path}; give one ending in {', '.join(SUFFIXES)}, with the columns "
            f"{', '.join(COLUMNS)}"
        )
    examples = []
    for number, row in enumerate(read_rows(path), 1):
        context, question, answer = (checked_text(row, (column,), number, path) for column in COLUMNS)
        examples.append(Question(context, question, answer, (), _distractors(row, answer, f"row {number} of {path}")))
    words = {word for one in examples for word in (one.answer, *one.distractors)}
    return QuestionData(path.stem, "all", tuple(examples), tuple(sorted(words)))


def _distractors(row: Row, answer: str, where: str) -> tuple[str, ...]:
    given = row.get("distractors")
    if isinstance(given, str):
        given = _listed(given.strip())
    if given is None or given != given:
        return ()
    if not isinstance(given, list) or not all(isinstance(word, str) and word.strip() for word in given):
        raise InputError(f"{where} has the distractors {given!r:.60}; allowed is a list of words")
    words = tuple(dict.fromkeys(word.strip() for word in given))
    if answer in words:
        raise InputError(f"{where} has its answer {answer!r:.40} among the distractors; leave it out there")
    return words


def _listed(given: str) -> Any:
    if given.startswith("["):
        try:
            return parse_json(given)
        except ValueError:
            return given
    return given.split(",") if given else None
