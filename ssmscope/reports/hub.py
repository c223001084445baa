"""Directories put on the Hugging Face hub: models with their cards, results and reports as data sets with theirs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from ssmscope.api.writing import write_whole
from ssmscope.core.known_models import demos
from ssmscope.data.hub import HUB_ID, NETWORK_ERRORS
from ssmscope.errors import InputError, check_path
from ssmscope.loading.stored import reason
from ssmscope.reports.cards import escaped

CARD = "README.md"
UNFINISHED = ("checkpoint/*", "working/*", "failed/*", ".*", "*/.*", "*.sqlite", "lock")
"""Files of a directory that are not put on the hub: what a run that was stopped has left."""


def dataset_card(directory: str | os.PathLike[str], title: str | None = None) -> str:
    """Return the README.md with which `datasets.load_dataset` reads the CSV tables of a report or of results, each a
    configuration by its name. Raises InputError without tables."""
    where, given = Path(directory), title or Path(directory).absolute().name
    files = sorted(where.glob("tables/*.csv")) or sorted(where.glob("*.csv"))
    if not files:
        raise InputError(f"{where} holds no tables: give the directory of a model, a report or a verb's --out")
    tables = {file.stem: file.relative_to(where).as_posix() for file in files}
    # A JSON string is a YAML string too, whatever characters it has.
    lines = ["---", f"pretty_name: {json.dumps(given)}", "tags: [ssmscope]", "configs:"]
    for name, file in tables.items():
        lines += [f"- config_name: {json.dumps(name)}", f"  data_files: {json.dumps(file)}"]
    lines += ["---", "", f"# {escaped(given)}", "", "Results of ssmscope. A table is read by its name:", ""]
    lines += ["```python", "import datasets", "", f'table = datasets.load_dataset("OWNER/NAME", "{min(tables)}")']
    lines += ["```", "", "| table | file |", "|---|---|", *(f"| {name} | `{file}` |" for name, file in tables.items())]
    return "\n".join([*lines, "", "JSON files of results have their models, options, seed and versions.", ""])


def push(directory: str | os.PathLike[str], repository: str, *, private: bool | None = None) -> str:
    """Put a directory on the Hugging Face hub and return its address there.

    A model (`demo/NAME`, or a directory with config.json) becomes a model repository, with its card if it has one. A
    report, or a verb's `--out`, becomes a data set; its README.md is written by `dataset_card` where there is none.
    What stopped runs have left is not uploaded. The account is that of `hf auth login` or `$HF_TOKEN`.

    Args:
        directory: the directory of a model, a report or results.
        repository: `OWNER/NAME`, made if there is none.
        private: whether a new repository is; by default as the account has it.

    Raises InputError if the directory is neither or its README.md cannot be written, the name is no repository's, or
    the hub refuses or is out of reach.
    """
    where = demos().get(str(directory), Path(check_path(directory, "what to push")))
    if not where.is_dir():
        raise InputError(f"{directory} is no directory: give that of a model, a report or results")
    if (found := HUB_ID.fullmatch(str(repository))) is None or ":" in found[0]:
        raise InputError(f"{repository!r:.100} is no name of a repository: give OWNER/NAME")
    kind = "model" if (where / "config.json").is_file() else "dataset"
    if kind == "dataset" and not (where / CARD).exists():
        write_whole(where / CARD, dataset_card(where))
    from huggingface_hub import HfApi

    api = HfApi(library_name="ssmscope")
    try:
        made = api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            repo_type=kind,
            folder_path=where,
            ignore_patterns=list(UNFINISHED),
            commit_message="Upload with ssmscope",
        )
    except HFValidationError as error:
        raise InputError(f"{repository!r:.100} is no name of a repository: {reason(error)}") from error
    except LocalTokenNotFoundError as error:
        raise InputError("the hub asks who you are: log in by hf auth login, or set HF_TOKEN") from error
    except NETWORK_ERRORS as error:
        refused = getattr(error, "response", None) is not None
        why = f"the hub refused it ({reason(error)})" if refused else "the hub is out of reach"
        raise InputError(f"{where} was not put into {repository}: {why}") from error
    return str(made)
