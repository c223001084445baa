"""Reading of models and tokenizers in transformers' layout by its own classes, and of PEFT adapters.

A PEFT adapter is put unmerged on the model that it was made for.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from ssmscope.core.attention_layers import check_readable
from ssmscope.core.known_models import import_family
from ssmscope.errors import InputError
from ssmscope.loading import stored
from ssmscope.loading.device_map import device_of_parts, start_at_embeddings
from ssmscope.loading.fields import check_depth, check_generation, check_tokenizer, check_words, read_object, shown
from ssmscope.loading.in_memory import OwnModel, readable
from ssmscope.loading.multimodal import language_model_of
from ssmscope.loading.packed import read_quantised

REPLACED_HEADS = ("lm_head.weight", "score.weight")
"""Heads that a PEFT adapter for a classifier removes from a language model, and gives it."""
OBSOLETE_TENSORS = re.compile(r"(?:^|\.)(?:position_ids|inv_freq|masked_bias)$")
"""Pattern of tensors that old versions of transformers stored and newer ones compute."""


def _rescales(config: Any, asked: bool | None = None) -> bool:
    """Return True if a configuration has projections divided by √layers at initialisation; `asked` sets it.
    transformers 5 initialises weights again after reading them, and would divide them a second time."""
    within: list[Any] = [config, getattr(config, "backbone", None)]
    parts = [part for part in within if hasattr(part, "rescale_prenorm_residual")]
    found = any(part.rescale_prenorm_residual for part in parts)
    for part in parts if asked is not None else ():
        part.rescale_prenorm_residual = asked
    return found


def read_transformers(
    where: Path,
    name: str,
    fields: Mapping[str, Any],
    dtype: torch.dtype | None,
    device_map: Any,
    adapter: Mapping[str, stored.Stored] | None,
    quantisation: Mapping[str, Any] | None,
) -> nn.Module:
    """Return the model of a directory, given the checked `fields` of its config.json, the headers of an `adapter` for
    it, and the quantization_config of quantised weights, which are read dequantised. With an `adapter` it is the model
    that this was trained on, a multimodal one or the language model within. Raises InputError if the files do not fit,
    or no state-space layer can be read."""
    kind = fields["model_type"]
    stored.check_other_layouts(where, name)
    files = stored.weight_files(where)
    tensors = None if quantisation is None else read_quantised(files, quantisation, name)
    held = stored.contents(files, tensors)
    read = partial(stored.read_all, files) if tensors is None else partial(dict, tensors)
    check_depth(fields, len(held.tensors), name)
    auto = _class_for(fields.get("architectures") or [], name)
    classes = _classes_of(adapter or {})
    head_comes = classes is not None and auto is not transformers.AutoModelForSequenceClassification
    auto = transformers.AutoModelForSequenceClassification if head_comes else auto
    what = f"{name}: a model of type {kind!r}"
    if (where / "generation_config.json").is_file():
        check_generation(read_object(where / "generation_config.json"), name)
    try:
        # Not AutoConfig: it may read another file than the one that was checked (configuration_files).
        own = {key: value for key, value in fields.items() if key != "auto_map"}
        config = transformers.CONFIG_MAPPING[kind].from_dict(own, name_or_path=str(where))
        import_family(kind)
        if head_comes:
            config.num_labels = classes
        for part in (config, getattr(config, "backbone", None)):
            limits = getattr(part, "time_step_limit", None)
            if part is not None and limits is not None:
                part.time_step_limit = tuple(map(float, limits))
    except InputError:
        raise
    except stored.DAMAGE_ERRORS as error:
        raise InputError(f"{what} cannot be built from its config.json ({stored.reason(error)})") from error
    if auto is transformers.AutoModelForCausalLM and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForImageTextToText

    def outlined(auto: Any) -> Any:
        return stored.outline(lambda: auto.from_config(config, trust_remote_code=False), held, what, "its config.json")

    empty = outlined(auto)
    wrapper = transformers.AutoModelForImageTextToText
    multimodal = auto is not wrapper and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if adapter is not None and multimodal and not _has_parts(empty, adapter):
        empty = outlined(wrapper)
    check_readable(empty, name)
    stored.check_kinds(empty, held.tensors, name)
    try:
        # That of the language model alone, where transformers has one for a multimodal type.
        whole, config = config, empty.config
        rescales = _rescales(config, asked=False)
        where_to: dict[str, Any] = {}
        if device_map is not None:
            where_to["device_map"] = device_of_parts(empty, device_map, dtype)
        source: Path | None = where
        if tensors is not None or stored.is_wrapped(files):
            source, where_to["state_dict"] = None, read()
        where_to |= {"config": config, "dtype": dtype or "auto", "output_loading_info": True, "local_files_only": True}
        module, info = type(empty).from_pretrained(source, trust_remote_code=False, **where_to)
        if module.can_generate():
            module.generation_config = _generation_settings(where, whole)
        start_at_embeddings(module)
        if rescales:
            _rescales(module.config, asked=True)
    except InputError:
        raise
    except stored.DAMAGE_ERRORS as error:
        stored.read_all(files)  # Its error says more clearly what is wrong with a file.
        what = f"the weights of {name} cannot be read, they are damaged or do not fit"
        raise InputError(f"{what}: {stored.reason(error)}") from error
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if not OBSOLETE_TENSORS.search(key))
    if head_comes:
        module.score.weight.data.zero_()
        missing, unexpected = (sorted({*names} - {*REPLACED_HEADS}) for names in (missing, unexpected))
    stored.check_names(missing, unexpected, config, name)
    _check_head(module, read, held.tensors, name)
    if dtype == torch.float64:
        _widen(module, read)
    if adapter is not None:
        return module if _has_parts(module, adapter) else language_model_of(module)
    return OwnModel(module, "") if auto is transformers.AutoModel else language_model_of(module)


def _generation_settings(where: Path, config: Any) -> Any:
    """Return the generation settings of a directory, a multimodal model's of the whole model."""
    if (where / "generation_config.json").is_file():
        return transformers.GenerationConfig.from_pretrained(where, local_files_only=True)
    return transformers.GenerationConfig.from_model_config(config)


def _has_parts(module: nn.Module, adapter: Iterable[str]) -> bool:
    """Return True if a model has all parts that a PEFT adapter's tensors are of."""
    parts = {name for name, part in module.named_modules() if not any(part.children())}
    names = [name.removeprefix(PREFIX).split(".") for name in adapter if name.startswith(PREFIX)]
    return all(any(".".join(each[:end]) in parts for end in range(1, len(each))) for each in names)


def _class_for(architectures: Sequence[str], name: str) -> Any:
    """Return transformers' class for the named architectures; a language model's if none is named."""
    if any(head in each for each in architectures for head in ("TokenClassification", "QuestionAnswering")):
        raise InputError(
            f"{name} is a {architectures[0]}, which gives an answer per token; ssmscope explains one answer per text: "
            "load it with transformers, and give ssmscope a module around it whose forward pass returns the logits of "
            "the token in question, or its backbone"
        )
    if any("SequenceClassification" in each for each in architectures):
        return transformers.AutoModelForSequenceClassification
    bare = architectures and all(each.endswith("Model") and not each.endswith("LMHeadModel") for each in architectures)
    return transformers.AutoModel if bare else transformers.AutoModelForCausalLM


def _widen(module: nn.Module, read: Callable[[], Mapping[str, Tensor]]) -> None:
    """Reread the weights, such as A_log, that transformers rounded to the float32 in which layers create them."""
    rounded = {name: t for name, t in module.named_parameters() if t.dtype == torch.float32}
    module.double()
    exact = read() if rounded else {}
    with torch.no_grad():
        for name in rounded.keys() & exact.keys():
            module.get_parameter(name).copy_(exact[name])


def _check_head(module: Any, read: Callable[[], Mapping[str, Tensor]], held: Mapping[str, Any], name: str) -> None:
    """Raise InputError if transformers replaced a stored head with the embeddings, or the reverse."""
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or not getattr(module.config, "tie_word_embeddings", False):
        return
    names = {id(part): f"{at}.weight" for at, part in module.named_modules() if part is head or part is embeddings}
    paths = [names[id(part)] for part in (head, embeddings)]
    if all(each in held for each in paths):
        tensors = read()
        stored.check_tied(tensors[paths[0]], tensors[paths[1]], name)


TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")


def fetched(source: str | os.PathLike[str], files: Collection[str]) -> Path:
    """Return the directory of this name, else the one into which the hub's files matching `files` are downloaded."""
    where = Path(source).expanduser()
    return where if where.is_dir() else Path(snapshot_download(str(source), allow_patterns=list(files)))


def read_tokenizer(source: str | os.PathLike[str]) -> Any:
    """Return transformers' tokenizer of a directory or hub id, without running or offering to run any of its code.
    Raises InputError if there is none, its files are damaged or name other files, or it needs code of its own."""
    what = f"the tokenizer {str(source)[:200]!r}"
    try:
        with quiet():
            where = fetched(source, TOKENIZER_PATTERNS)
            kind = transformers.AutoTokenizer
            if (where / "tokenizer_config.json").is_file():
                saved = read_object(where / "tokenizer_config.json")
                check_tokenizer(saved, what)
                if saved.get("tokenizer_class") == "TokenizersBackend" and not hasattr(
                    transformers, "TokenizersBackend"
                ):
                    kind = transformers.PreTrainedTokenizerFast
            if (where / "config.json").is_file() and "configuration_files" in read_object(where / "config.json"):
                raise InputError(f"{what} has a config.json that names others (configuration_files): give theirs alone")
            # Without trust_remote_code=False, transformers asks on stdout whether to run the directory's code.
            found = kind.from_pretrained(where, trust_remote_code=False, local_files_only=True)
            found("", verbose=False)  # Some damage only shows in use.
            return found
    except InputError:
        raise
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, stored.DAMAGE_ERRORS):  # tokenizers raises this.
            raise
        if "trust_remote_code" in str(error):
            raise InputError(f"{what} is code, which is never run: give another one, load(tokenizer=…)") from error
        raise InputError(f"{what} cannot be loaded: {stored.reason(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' hints about kernels, which our scan does not use, and its progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# ---- directories with a PEFT adapter alone

PREFIX = "base_model.model."
"""Prefix of the names of the model's parts in a PEFT adapter's file."""
CONFIG_FILE, WEIGHT_FILES = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")

PEFT_TYPES = (
    "LORA", "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "MISS",
    "OFT", "RANDLORA", "ROAD", "SHIRA", "TRAINABLE_TOKENS", "VBLORA", "VERA",
)  # fmt: skip
"""Types of PEFT adapters that keep layers linear and leave their input as it is."""
FREE_TEXT_FIELDS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "feedforward_modules",
    "lambda_pattern", "layers_pattern", "modules_to_save", "peft_version", "rank_pattern", "revision", "target_modules",
    "target_parameters", "trainable_token_indices",
})  # fmt: skip
"""Fields of a PEFT adapter that name classes, models or parts of the model, and are not looked up here."""
CLASSIFIER_TASK = "SEQ_CLS"
ALLOWED_WORDS = frozenset({
    "CAUSAL_LM", "FEATURE_EXTRACTION", CLASSIFIER_TASK, "all", "gaussian", "lora_only", "megatron.core", "none",
    "olora", "orthogonal", "pissa", "random", "road_1", "road_2", "road_4", "xavier_uniform", *PEFT_TYPES,
})  # fmt: skip
WEIGHT_CHANGING_INITS = ("olora", "pissa")
"""Initialisations that take the PEFT adapter's weights out of the model's."""
REFUSED_FIELDS = frozenset({"layer_replication", "megatron_config"})
"""Fields that change a model's layers, or import a module for them."""
IGNORED_FIELDS = frozenset({"auto_mapping", "base_model_name_or_path", "loftq_config", "runtime_config"})
"""Fields about the PEFT adapter's origin and training, which change no output."""


def is_adapter(where: Path) -> bool:
    """Return True if a directory holds a PEFT adapter."""
    return (where / CONFIG_FILE).exists()


def base_of(where: Path, name: str, locate: Callable[[str], Path]) -> Path:
    """Return the directory of a PEFT adapter's model: the one of that name within its own, else what `locate` finds.
    Raises InputError if the configuration names no model, one that is not there, or another PEFT adapter."""
    named = read_object(where / CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise InputError(f"{name} holds a PEFT adapter whose {CONFIG_FILE} names no model (base_model_name_or_path)")
    within = where / named
    try:
        found = within if within.is_dir() else locate(named)
    except (InputError, OSError, ValueError) as error:
        said = f"{name} holds a PEFT adapter of {named!r:.100}, which is not there:"
        raise InputError(f"{said} {stored.reason(error)}") from error
    if is_adapter(found):
        raise InputError(f"{name} holds a PEFT adapter of {named!r:.100}, which is one too; merge that one first")
    return found


def headers_of(where: Path, name: str) -> Mapping[str, stored.Stored]:
    """Return the shapes and kinds of a PEFT adapter's tensors. Raises InputError if they cannot be read."""
    return stored.read_headers(_weights(where, name))


def _classes_of(adapter: Mapping[str, stored.Stored]) -> int | None:
    """Return the number of classes of a PEFT adapter that makes a classifier of a language model; None for others."""
    heads = [t.shape for n, t in adapter.items() if n.endswith(".score.weight")]
    return heads[0][0] if heads and len(heads[0]) == 2 else None


def _weights(where: Path, name: str) -> Path:
    file = next((where / each for each in WEIGHT_FILES if (where / each).is_file()), None)
    if file is None:
        raise InputError(f"{name} holds a PEFT adapter without weights: neither {' nor '.join(WEIGHT_FILES)}")
    return file


def with_adapter(base: nn.Module, where: Path, name: str) -> nn.Module:
    """Put the PEFT adapter of a directory on its model, unmerged. Raises InputError if peft is missing, or it is
    damaged, does not fit the model, changes the model's input or has an unknown field in its configuration."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{name} holds a PEFT adapter, which is read by peft: pip install peft")
    file = _weights(where, name)
    if stored.is_wrapped([file]):
        said = f"the PEFT adapter in {name} was saved within the wrapper of torch.compile, DataParallel or FSDP:"
        raise InputError(f"{said} save it from the PeftModel within (model._orig_mod, model.module)")
    headers = headers_of(where, name)
    _resize_vocabulary(base, headers, name)
    own, held = {f"{PREFIX}{each}" for each in base.state_dict()}, set(headers)
    import peft

    config = _config(read_object(where / CONFIG_FILE), name)
    initial = getattr(config, "init_lora_weights", True) in WEIGHT_CHANGING_INITS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own_files: dict[str, Any] = dict(low_cpu_mem_usage=not initial, local_files_only=True)
            model = peft.PeftModel.from_pretrained(base, str(where), config=config, **own_files)
            wanted = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    except stored.DAMAGE_ERRORS as error:
        said = f"the PEFT adapter in {name} is damaged, or of another model:"
        raise InputError(f"{said} {stored.reason(error)}") from error
    # peft may store the model's embeddings with the PEFT adapter, and reads them again.
    odd = (wanted - held) | {each for each in held - wanted if each.replace(".base_layer.", ".") not in own}
    if odd:
        which = f"has no {min(odd)}" if min(odd) in wanted else f"holds {min(odd)}, which has no place in the model"
        raise InputError(f"the PEFT adapter in {name} does not fit its model: {file.name} {which}")
    return readable(model)


def _resize_vocabulary(base: Any, adapter: Mapping[str, stored.Stored], name: str) -> None:
    """Give a model the number of tokens of a PEFT adapter's embeddings, which come with tokens that were added. Raises
    InputError if it has not all weights of these tokens."""
    table = base.get_input_embeddings()
    at = next(each for each, part in base.named_modules() if part is table)
    plain = {each.replace(".base_layer.", "."): held.shape for each, held in adapter.items()}
    shape = plain.get(f"{PREFIX}{at}.weight", tuple(table.weight.shape))
    if shape == table.weight.shape or shape[1:] != table.weight.shape[1:]:
        return
    before, count = {each: tensor.shape for each, tensor in base.state_dict().items()}, len(table.weight)
    with torch.random.fork_rng([]):
        base.resize_token_embeddings(shape[0], mean_resizing=False)
    head, tied = base.get_output_embeddings(), base.get_input_embeddings().weight
    shared = {f"{each}.weight" for each, part in base.named_modules() if part is head and part.weight is tied}
    changed = {each for each, tensor in base.state_dict().items() if tensor.shape != before[each]}
    if absent := sorted(each for each in changed - shared if f"{PREFIX}{each}" not in plain):
        said = f"the PEFT adapter in {name} is of {shape[0]:,} tokens, and its model of {count:,}:"
        raise InputError(f"{said} it lacks {absent[0]}; save it with save_embedding_layers=True")


def _config(fields: Mapping[str, Any], name: str) -> Any:
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = fields.get("peft_type")
    if kind not in PEFT_TYPES:
        raise InputError(
            f"{name} holds a PEFT adapter of type {shown(kind)}, which is not read: it changes the model's "
            f"input, not only its layers, or these by more than a linear map; {', '.join(PEFT_TYPES)} are read"
        )
    check_words(fields, FREE_TEXT_FIELDS, ALLOWED_WORDS, name, CONFIG_FILE)
    made = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(made)} - REFUSED_FIELDS
    allowed = known | IGNORED_FIELDS
    odd = [each for each, value in fields.items() if each not in allowed and value not in (None, False, [], {})]
    if odd:
        raise InputError(
            f"{name} holds a PEFT adapter whose {CONFIG_FILE} says {odd[0]} is {shown(fields[odd[0]])}, which is not "
            f"read with peft {peft.__version__}: merge it into its model (peft's merge_and_unload()), and give that"
        )
    try:
        return made(**{each: value for each, value in fields.items() if each in known - IGNORED_FIELDS})
    except stored.DAMAGE_ERRORS as error:
        said = f"{name} holds a PEFT adapter whose {CONFIG_FILE} is damaged:"
        raise InputError(f"{said} {stored.reason(error)}") from error
