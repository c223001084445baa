"""Verbs that make pages: report, for a plan of models and analyses, and serve, for texts that are typed."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ssmscope.api.analysis import label_names
from ssmscope.api.options import REPEATED, Metavar, Range
from ssmscope.api.sharding.workers import check_engine
from ssmscope.api.writing import check_writable, write_errors_explained, write_whole
from ssmscope.cli.command import DEVICE, DTYPE, JSON, LABELS, MODEL, TOKENIZER, show
from ssmscope.cli.settings import named_values
from ssmscope.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from ssmscope.reports.jobs import Jobs
    from ssmscope.reports.plan import Plan
    from ssmscope.reports.running import JobEngine
    from ssmscope.reports.store import JobStore, Report, ReportEntry


def report(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A YAML file, or a shipped plan: quick, audit, baleen, diff-mamba.")
    ],
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Directory for results, tables and index.html; may exist.")
    ],
    model: Annotated[
        Sequence[str] | None, "Model to use instead of the plan's; may be repeated.", REPEATED, Metavar("MODEL")
    ] = None,
    data: Annotated[str | None, "The same as --set data=DATA.", Metavar("DATA")] = None,
    set: Annotated[
        Sequence[str] | None, "A variable of the plan; may be repeated.", REPEATED, Metavar("NAME=VALUE")
    ] = None,
    budget: Annotated[
        str | None, "Time for the whole plan, which chooses the sizes of its analyses, such as 10m.", Metavar("TIME")
    ] = None,
    require: Annotated[
        Sequence[str] | None,
        "A gate, such as 'accuracy >= 0.8 at 95 %' or 'accuracy no worse than baseline by 0.01 at 95 %'; may be "
        "repeated.",
        REPEATED,
        Metavar("GATE"),
    ] = None,
    baseline: Annotated[Path | None, "Earlier report, its directory or scores.json.", Metavar("DIR")] = None,
    strict: Annotated[bool, "An undecided gate counts as missed."] = False,
    github_summary: Annotated[bool, "Append the gates to the file $GITHUB_STEP_SUMMARY."] = False,
    cards: Annotated[bool, "Write cards for the hub: README.md of the tables as a data set, cards/MODEL.md."] = False,
    dry_run: Annotated[bool, "List the jobs, their state, and their estimated time."] = False,
    by_batch: Annotated[
        bool, "Let workers share the batches of a job over a data set; by default they share jobs."
    ] = False,
    json: JSON = False,
    **engine: Any,
) -> None:
    """Run a plan, models × analyses × data, into one page and its tables. A killed run continues.

    An analysis that does not apply to a model is left out, with a note. The exit code is 1 if a job failed or a gate is
    missed; a second run repeats only failed and missing jobs.
    """
    check_writable(out)
    summary = _step_summary() if github_summary else None
    variables = named_values([*(set or ()), *([] if data is None else [f"data={data}"])])
    run = _engine(**engine, by_batch=by_batch)
    text, name = _text(plan)

    from ssmscope.reports.plan import read_plan

    chosen = read_plan(text, name=name, models=model or (), variables=variables)

    from ssmscope.reports.budget import with_budget
    from ssmscope.reports.gates import check
    from ssmscope.reports.jobs import make_jobs
    from ssmscope.reports.requirements import read_requirements
    from ssmscope.reports.running import run_plan
    from ssmscope.reports.scores import read_scores
    from ssmscope.reports.sizes import read_budget
    from ssmscope.reports.store import JobStore

    requirements = read_requirements([*chosen.require, *(require or ())], baseline=baseline is not None)
    if not requirements and (strict or summary):
        raise InputError(f"{'--strict' if strict else '--github-summary'} is an option of gates; give --require too")
    earlier = [] if baseline is None else read_scores(baseline)
    check(requirements, chosen, earlier)
    chosen = with_budget(chosen if budget is None else replace(chosen, budget=read_budget(budget)))
    jobs = make_jobs(chosen)
    if dry_run:
        _list(chosen, jobs, JobStore(out), json)
        return
    gates: dict[str, Any] = {"requirements": requirements, "baseline": earlier, "strict": strict}
    try:
        made = run_plan(chosen, jobs, out, engine=run, **gates)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues with what is missing") from None
    if cards:
        from ssmscope.reports.cards import write_cards
        from ssmscope.reports.hub import CARD, dataset_card

        write_cards(made, out)
        if any((out / "tables").glob("*.csv")):
            write_whole(out / CARD, dataset_card(out, made.title))
    if summary is not None:
        _append(summary, (out / "gates.md").read_text(encoding="utf-8"))
    _answer(made, out, json, strict=strict)


def push(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory of a model, a report or results.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository, made if there is none.")],
    *,
    private: Annotated[bool, "Make a new repository private."] = False,
) -> None:
    """Put a model with its card, or a report or results as a data set, on the Hugging Face hub.

    A model, a demo too, is loaded from there by its name, as in analyze heatmap OWNER/NAME. The tables of a report or
    of a verb's --out are read by datasets.load_dataset("OWNER/NAME", TABLE), as the README.md says that is written
    where there is none. Log in by hf auth login.
    """
    from ssmscope.reports.hub import push as put

    print(put(directory, repository, private=private or None))


def serve(
    model: MODEL,
    beside: Annotated[str | None, typer.Argument(metavar="MODEL2", help="A second model to compare.")] = None,
    *,
    host: Annotated[
        str, "Address to listen on; by default only this machine has access.", Metavar("ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int | None, "Port to listen on; by default the first free one from 7860 on."] = None,
    max_tokens: Annotated[int, "Refuse longer texts.", Range(1)] = 1024,
    tokenizer: TOKENIZER = None,
    device: DEVICE = "cpu",
    dtype: DTYPE = "auto",
    labels: LABELS = None,
) -> None:
    """Serve a page for typed texts: prediction, heatmap, attention of a clicked token, an edited text, two models."""
    from ssmscope.loading.load import load
    from ssmscope.reports.live import Live
    from ssmscope.reports.serving import check_address
    from ssmscope.reports.serving import serve as serve_page

    check_address(host, port)

    named = None if labels is None else label_names(labels)
    setting: Any = {"tokenizer": tokenizer, "device": device, "dtype": dtype, "labels": named}
    models = [load(name, **setting) for name in (model, beside) if name is not None]
    serve_page(Live(models, max_tokens=max_tokens), host=host, port=port)


def _engine(engine: str, *, address: str | None, workers: int | None, by_batch: bool) -> JobEngine:
    check_engine(engine, address=address, workers=workers, by_batch=by_batch or None)
    from ssmscope.reports.running import batches_on_ray, ray_engine, run_locally

    if engine == "local":
        return run_locally
    return batches_on_ray(address, workers) if by_batch else ray_engine(address, workers)


def _text(plan: str) -> tuple[str, str]:
    """Return the text and the name of a plan, from a file or from the shipped ones."""
    from ssmscope.reports.plan import SHIPPED_PLANS as known

    path = Path(plan)
    if plan in known and not path.is_file():
        path = known[plan]
    try:
        return path.read_text(encoding="utf-8-sig"), path.stem
    except UnicodeDecodeError as error:
        raise InputError(f"the plan {plan} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"no plan {plan!r}: it is not a readable file ({reason}), nor a shipped plan: {', '.join(known)}"
            f"{did_you_mean(plan, known)}"
        ) from error


# ---- output


def _step_summary() -> Path:
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        raise InputError(
            "--github-summary needs $GITHUB_STEP_SUMMARY, which GitHub sets in a step; leave it out elsewhere"
        )
    return Path(name)


def _append(file: Path, text: str) -> None:
    with write_errors_explained(f"$GITHUB_STEP_SUMMARY, {file}"):
        with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text + "\n")


def _list(plan: Plan, jobs: Jobs, store: JobStore, json: bool) -> None:
    """Print the jobs with their state and estimated time: the mean of finished jobs of the same verb here."""
    times, rows = store.seconds(), []
    for job in jobs.to_run():
        entry, known = store.entry(job), times.get(job.verb, [])
        done = entry.state == "done"
        row = _row(replace(entry, seconds=entry.seconds if done else None))
        guess = sum(known) / len(known) if known else None
        more = {} if job.expected is None else {"runs": round(job.expected.runs)}
        guess = guess if job.expected is None else job.expected.seconds
        rows.append({**row, "estimate": None if done else guess, **more})
    if json:
        print(json_module.dumps({"title": plan.title, "jobs": rows}, indent=2))
        return

    listed = []
    for row in rows:
        took, guess = row["seconds"], row["estimate"]
        shown = f"{took:.1f}" if took is not None else f"about {guess:.1f}" if guess is not None else "unknown"
        listed.append((row["state"], shown, row["command"]))
    left = [row["estimate"] for row in rows if row["state"] != "done"]
    guessed = [guess for guess in left if guess is not None]
    parts = [f"{len(rows)} jobs, {len(rows) - len(left)} done"]
    if guessed:
        whose = "the mean of finished jobs of the same verb here"
        if plan.budget is not None:
            runs = sum(row.get("runs", 0) for row in rows)
            whose = f"about {runs:,} runs of a text on the reference machine, of a budget of {plan.budget:,.0f} s"
        parts.append(f"about {sum(guessed):.0f} s for {len(guessed)}, {whose}")
    if len(left) > len(guessed):
        parts.append(f"unknown for {len(left) - len(guessed)}: no job of the verb has finished here")
    show(("state", "seconds", "command"), listed, "; ".join(parts), title=plan.title)


def _row(entry: ReportEntry) -> dict[str, Any]:
    row = {name: getattr(entry, name) for name in ("key", "state", "verb", "models", "command", "seconds")}
    return {**row, "models": list(entry.models)}


def _answer(made: Report, out: Path, json: bool, *, strict: bool) -> None:
    from ssmscope.api.jsonable import encode
    from ssmscope.reports.gate_files import as_record, gates_headline, is_failure, told
    from ssmscope.reports.grouping import findings

    once = {entry.key: entry for entry in made.entries}
    refused = [entry for entry in once.values() if entry.state == "left-out"]
    failed = [entry for entry in once.values() if entry.state not in ("done", "left-out")]
    page = out / "index.html"
    if json:
        jobs = [{**_row(entry), "error": entry.error} for entry in once.values()]
        gates = {"gates": encode([as_record(gate) for gate in made.gates])} if made.gates else {}
        told_first = {"title": made.title, "page": str(page), "findings": findings(made)}
        print(json_module.dumps({**told_first, "jobs": jobs, **gates}, indent=2))
    else:
        done = f"{made.title}: {len(once) - len(failed) - len(refused)} of {len(once)} jobs done"
        print("\n".join([done, f"Page: {page}", *findings(made)]))
        if made.gates:
            print(gates_headline(made.gates))
    for entry in refused:
        print(f"analyze: left out: {entry.verb}: {entry.error}", file=sys.stderr)
    for entry in failed:
        reason = " ".join((entry.error or "it did not run").split())
        print(f"analyze: failed: {entry.command}: {reason}", file=sys.stderr)
    for gate in made.gates:
        if gate.state != "met":
            print(f"analyze: {gate.state}: {told(gate)}", file=sys.stderr)
    if failed or any(is_failure(gate, strict=strict) for gate in made.gates):
        raise typer.Exit(1)
