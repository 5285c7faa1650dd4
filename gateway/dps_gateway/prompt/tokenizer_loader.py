"""The parts of a Hugging Face tokenizer that the gateway uses, loaded in a child process.

transformers loads a tokenizer as engines do, but importing it takes seconds, so the description of a tokenizer in a
folder is cached. The library and the tokenizer occupy more than 200 MiB of memory, which is freed when the child
process ends.
"""

import hashlib
import os
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import orjson

from dps_gateway.cache_dir import cache_dir

DEFAULT_REVISION: Final = "main"

_SAMPLES: Final = (
    "",
    " leading and trailing ",
    "line\r\n\r\n\tindented  twice",
    "naïve café 한국어 日本語 Ω ﬁ e\u0301 👩‍👩‍👧 \u200d",
    "don't we'LL 12345 x=1;// {\"a\": [1, 2]}",
)


class TokenizerError(Exception):
    """The tokenizer cannot be used. The message states what to change."""


@dataclass(frozen=True, slots=True)
class Description:
    """A tokenizer and its chat templates, as transformers has read them."""

    definition: str
    """The tokenizer as JSON, in the format of tokenizer.json."""
    template: str | None
    """The chat template for chats without tools."""
    tools_template: str | None
    """The chat template for chats with tools."""
    template_tokens: dict[str, Any]
    """The variables with special tokens, such as `bos_token`, that templates may use."""
    added_tokens: list[str]
    """All tokens that are matched before the text is split."""
    separating_tokens: list[str]
    """Those of them that are matched on the raw text wherever it contains them, and strip nothing on their left."""
    added_count: int
    """Tokens that the engine adds around a plain text prompt, such as a BOS token."""
    samples: dict[str, list[int]]
    """The token ids of sample texts."""

    @classmethod
    def of(cls, hf: Any) -> "Description":
        """The description of a tokenizer that transformers has loaded. Raises TokenizerError."""
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError("it has no tokenizer.json; convert it to a fast tokenizer")
        added = {str(token): token for token in hf.added_tokens_decoder.values()}
        specials = [str(token) for token in backend.get_added_tokens_decoder().values()][:64]
        samples = (*_SAMPLES, "".join(specials), " x ".join(specials))
        return cls(
            definition=backend.to_str(),
            template=_chat_template(hf, "default"),
            tools_template=_chat_template(hf, "tool_use"),
            template_tokens=dict(hf.special_tokens_map),
            added_tokens=list(added),
            separating_tokens=[
                text
                for text, token in added.items()
                if not (token.normalized or token.lstrip or token.single_word)
            ],
            added_count=backend.num_special_tokens_to_add(is_pair=False),
            samples={text: list(backend.encode(text, add_special_tokens=False).ids) for text in samples},
        )


def describe(source: str, revision: str | None = None) -> Description:
    """Describe the tokenizer in a folder or of a Hub id. Raises TokenizerError if it cannot be loaded.

    revision: branch, tag or commit of a Hub id; its default branch if None.
    """
    folder = Path(source)
    is_folder = source.startswith((".", "/", "~")) or folder.exists()
    if is_folder and not folder.expanduser().is_dir():
        raise TokenizerError(
            f"model.tokenizer: there is no folder '{source}'; give a folder that holds tokenizer.json and "
            "tokenizer_config.json, or a Hub id"
        )
    if is_folder:
        return _cached(folder.expanduser(), source)
    return _described(source, source, revision or DEFAULT_REVISION)


def _cached(folder: Path, source: str) -> Description:
    """The description of the tokenizer in a folder, from an earlier start if its files are the same."""
    cache = _cache_file(folder)
    try:
        return Description(**orjson.loads(cache.read_bytes()))
    except (OSError, TypeError, ValueError):  # not described yet, or by another version
        pass
    description = _described(source, str(folder))
    with suppress(OSError):  # the cache only saves time
        cache.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=cache.parent, delete=False) as file:
            file.write(orjson.dumps(asdict(description), default=str))
        os.replace(file.name, cache)
    return description


def _cache_file(folder: Path) -> Path:
    """The file for the description of a tokenizer. Its name depends on the tokenizer's files and on transformers."""
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.jinja")) + sorted(folder.glob("*.model"))
    states = [(file.name, state.st_size, state.st_mtime_ns) for file in files if (state := file.stat())]
    key = [
        version("transformers"),
        str(folder.resolve()),
        states,
        [field.name for field in fields(Description)],
    ]
    return cache_dir() / "tokenizers" / f"{hashlib.sha256(orjson.dumps(key)).hexdigest()}.json"


def _described(source: str, *arguments: str) -> Description:
    """The description that a child process makes. Raises TokenizerError."""
    quiet = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    child = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=quiet | os.environ,
    )
    try:
        answer = orjson.loads(child.stdout)
    except orjson.JSONDecodeError:
        answer = {"error": f"exit status {child.returncode}"}
    if "error" in answer:
        raise TokenizerError(
            f"model.tokenizer: '{source}' cannot be loaded ({answer['error']}); give a folder that holds "
            "tokenizer.json and tokenizer_config.json, or a Hub id that this machine can reach"
        )
    return Description(**answer)


def _chat_template(hf: Any, name: str) -> str | None:
    """The template that transformers would select; some tokenizers have a separate one for tools."""
    template = hf.chat_template
    if isinstance(template, dict):
        template = template.get(name, template.get("default"))
    return template if isinstance(template, str) else None


def _main(source: str, revision: str | None = None) -> dict[str, Any]:
    """The description as a JSON object, or one with the field `error`. Runs no code of the tokenizer."""
    try:
        from transformers import AutoTokenizer

        options = {} if revision is None else {"revision": revision}
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        return asdict(Description.of(tokenizer))
    except Exception as error:  # transformers has no common base class for loading errors
        return {"error": next(iter(str(error).strip().splitlines()), type(error).__name__)}


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # libraries may print
        description = _main(*sys.argv[1:])
    sys.stdout.buffer.write(orjson.dumps(description, default=str))
