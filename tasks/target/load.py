"""Finds a target's small files in a directory or on the Hugging Face hub, and checks that they fit together."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.errors import TargetError
from tasks.records import Message
from tasks.settings import TargetSettings
from tasks.target.family import Family, find_family
from tasks.target.infer import infer_family
from tasks.target.text import TargetText

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


def load_target(settings: TargetSettings) -> TargetText:
    """The target's text side, cached by everything that selects it.

    Raises TargetError when files are missing, unreadable or do not fit together.
    """
    return _load(settings.model_dump_json())


@functools.lru_cache(maxsize=4)
def _load(settings_json: str) -> TargetText:
    settings = TargetSettings.model_validate_json(settings_json)
    model, tokens = _places(settings)

    def find(name: str) -> Path | None:
        return tokens(name) or model(name)

    tokenizer = find("tokenizer.json")
    if tokenizer is None:
        raise TargetError(
            f"no tokenizer.json in {settings.tokenizer or settings.model}; "
            "name a directory or Hugging Face id that has a fast tokenizer as target.tokenizer"
        )
    config = _json(find("tokenizer_config.json"))
    special = {**_special(_json(find("special_tokens_map.json"))), **_special(config)}
    template, origin = _template(settings, find, config)
    family = find_family(template, settings.family, settings.families)
    parts = {name: _config(model(f"{name}.json")) for name in ("config", "generation_config")}

    def build(family: Family) -> TargetText:
        return _build(settings, tokenizer, template, origin, special, parts, family)

    text = build(family or Family("unknown"))
    _check_renders(text, origin)
    if family is None:
        return build(infer_family(text.render, template, origin))
    _check_stops(text)
    return text


def _places(settings: TargetSettings) -> tuple[Callable[[str], Path | None], Callable[[str], Path | None]]:
    """Where the model's and the tokenizer's files are found.

    A local tokenizer directory stands for both when the model is only a name that a server goes by: no hub is asked.
    """
    if settings.tokenizer is None:
        model = _locate(settings.model, settings.revision)
        return model, model
    tokens = _locate(settings.tokenizer, None)
    local = Path(settings.tokenizer).expanduser().is_dir()
    if local and not Path(settings.model).expanduser().is_dir():
        return tokens, tokens
    return _locate(settings.model, settings.revision), tokens


def _build(
    settings: TargetSettings,
    tokenizer: Path,
    template: str,
    origin: str,
    special: Mapping[str, str],
    parts: Mapping[str, dict[str, Any]],
    family: Family,
) -> TargetText:
    try:
        return TargetText(
            settings,
            tokenizer.parent,
            template,
            tokenizer.read_text(encoding="utf-8"),
            special,
            parts["config"],
            parts["generation_config"],
            family,
            origin,
        )
    except TargetError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise TargetError(f"cannot load {tokenizer}: {error}; fetch the model's tokenizer.json again") from error


_PROBE = "Is this rendered?"


def _check_renders(text: TargetText, origin: str) -> None:
    """The template writes one plain user message."""
    try:
        rendered = text.render([Message("user", _PROBE)])
    except ValueError as error:
        raise TargetError(
            f"the chat template {origin} fails to render one plain user message: {error}; "
            "give a working one as target.chat_template"
        ) from error
    if _PROBE not in rendered:
        found = f"only {rendered[:80]!r}" if rendered else "nothing"
        raise TargetError(
            f"the chat template {origin} renders {found} for one plain user message, expected the message's text in "
            "it; give a working one as target.chat_template"
        )


def _check_stops(text: TargetText) -> None:
    """The end of turn that the target's family describes is a token of this tokenizer."""
    stops = text.family.end_of_turn
    if stops and not any(text.tokenizer.token_to_id(stop) is not None for stop in stops):
        shown = text.encode(stops[0])
        raise TargetError(
            f"the tokenizer in {text.directory} does not match the chat template: the {text.family.name} template ends "
            f"a turn with {stops[0]!r}, which this tokenizer splits into {len(shown)} tokens; name the model's own "
            "tokenizer as target.tokenizer, or its own template as target.chat_template"
        )


def _locate(model: str, revision: str | None) -> Callable[[str], Path | None]:
    """A function from file name to path, for a directory or a hub id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return lambda name: folder / name if (folder / name).is_file() else None
    if model.startswith(("embedded:", "/", ".", "~")) or model.count("/") > 1:
        raise TargetError(f"target {model!r} is not a directory; name a model directory or a Hugging Face id")
    return functools.partial(_from_hub, model, revision)


def _from_hub(model: str, revision: str | None, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except LocalEntryNotFoundError as error:
        raise TargetError(f"{model} is not a directory, and the hub cannot be reached for it: {error}") from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise TargetError(f"cannot fetch {name} of {model} from the hub: {error}; check the id and access") from error


def _template(
    settings: TargetSettings, find: Callable[[str], Path | None], config: Mapping[str, Any]
) -> tuple[str, str]:
    """(the chat template, where it is from)."""
    given = Path(settings.chat_template).expanduser() if settings.chat_template else None
    own = given or find("chat_template.jinja")
    if own is not None:
        return _read(own), str(own)
    value, place = config.get("chat_template"), find("tokenizer_config.json")
    if not value:
        place = find("chat_template.json")
        value = _json(place).get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    if not isinstance(value, str):
        raise TargetError(
            f"{settings.model} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "give a file as target.chat_template"
        )
    return value, f"in {place}"


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, in either of the two forms that tokenizer configs use."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    found = {name: config.get(name) for name in names}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise TargetError(f"{path} is not JSON: {error}; fetch the model's files again") from error
    return value if isinstance(value, dict) else {}


def _config(path: Path | None) -> dict[str, Any]:
    """config.json or generation_config.json. Raises TargetError where the end-of-sequence ids are none."""
    values = _json(path)
    ids = values.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(index) is int for index in listed):
        raise TargetError(
            f"{path}: eos_token_id is {json.dumps(ids)[:80]}, expected a token id or a list of token ids; "
            "fetch the file again, or set it to the ids that end an answer"
        )
    return values


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"cannot read {path}: {error}; name an existing file") from error
