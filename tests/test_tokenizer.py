"""A GGUF's tokenizer is converted once, keeps what the file says, and loads without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.openai import tokenizer as module
from cluster.openai.chat import ChatPrompt, parse_messages, render_prompt
from cluster.openai.tokenizer import Tokenizer
from configs.errors import CheckpointError, ConfigError, RequestError

PROMPT = ChatPrompt(messages=[{"role": "user", "content": "x"}])


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def converted(smollm2_path: Path, smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the saved tokenizer files."""
    source = module._converted_gguf(smollm2_path, None)
    return Path(shutil.copytree(source, tmp_path_factory.mktemp("tokenizer") / "files"))


def test_the_conversion_keeps_template_and_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.vocab_size == 49152


def test_the_gguf_names_the_same_special_tokens_and_the_same_template(smollm2: Tokenizer, smollm2_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(str(smollm2_path)).fields
    assert fields["tokenizer.chat_template"].contents() == smollm2.chat_template
    assert fields["tokenizer.ggml.eos_token_id"].contents() == smollm2.eos_token_id
    assert fields["tokenizer.ggml.bos_token_id"].contents() == smollm2.bos_token_id
    assert len(fields["tokenizer.ggml.tokens"].contents()) == smollm2.vocab_size


def test_digits_are_single_tokens_as_the_gguf_asks(smollm2: Tokenizer) -> None:
    # The file's pre-tokenizer (`smollm`) splits numbers into digits; the conversion knows no such rule.
    ids = smollm2.encode("In 2024, 31415 days", add_special_tokens=False)
    texts = [smollm2.token_text(id_) for id_ in ids]
    assert "".join(texts) == "In 2024, 31415 days"
    assert all(sum(char.isdigit() for char in text) <= 1 for text in texts)


def test_a_second_load_reads_the_saved_files_only(converted: Path, tmp_path: Path, smollm2: Tokenizer) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"not a GGUF at all")
    target = tmp_path / "model.gguf.tokenizer"
    shutil.copytree(converted, target)
    stat = gguf.stat()
    source = {"name": gguf.name, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    (target / module._SOURCE_FILE).write_text(json.dumps(source))
    assert Tokenizer.load(gguf).encode("a b", add_special_tokens=False) == smollm2.encode(
        "a b", add_special_tokens=False
    )


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch, converted: Path) -> list[Path]:
    """Conversions that took place; each copies the saved files in place of four seconds of work."""
    calls: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        calls.append(gguf)
        shutil.copytree(converted, target, dirs_exist_ok=True)

    monkeypatch.setattr(module, "convert_gguf", convert)
    return calls


def test_a_changed_file_is_converted_again_and_an_unchanged_one_is_not(
    tmp_path: Path, fake_conversion: list[Path]
) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"one")
    Tokenizer.load(gguf)
    Tokenizer.load(gguf)
    assert len(fake_conversion) == 1
    gguf.write_bytes(b"other")
    Tokenizer.load(gguf)
    assert len(fake_conversion) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "model.gguf.tokenizer"]


def test_a_folder_that_cannot_be_written_sends_the_conversion_to_the_cache(
    tmp_path: Path, fake_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "read_only" / "model.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"one")
    make = module.tempfile.mkdtemp

    def mkdtemp(prefix: str, dir: Path) -> str:
        if Path(dir) == gguf.parent:  # root may write anywhere: permissions alone would not be a test
            raise PermissionError("read-only")
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(module.tempfile, "mkdtemp", mkdtemp)
    Tokenizer.load(gguf, cache_dir=tmp_path / "cache")
    Tokenizer.load(gguf, cache_dir=tmp_path / "cache")
    assert len(fake_conversion) == 1
    assert [path.name for path in gguf.parent.iterdir()] == ["model.gguf"]


def test_loading_saved_files_imports_no_torch(converted: Path) -> None:
    script = (
        "import sys; from cluster.openai.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(sys.argv[1]); t.template.render([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit(int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(converted)], cwd=Path.cwd(), check=False, timeout=120)
    assert done.returncode == 0


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf"):
        Tokenizer.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.load(tmp_path / "nothing.gguf")


def test_a_directory_with_a_models_shape_alone_has_no_tokenizer() -> None:
    models = Path(__file__).parent.parent / "benchmarks" / "models"
    with pytest.raises(CheckpointError, match=r"qwen3-8b holds no tokenizer; set `tokenizer`"):
        Tokenizer.load(models / "qwen3-8b")


def test_the_servers_chat_template_takes_the_place_of_the_models(converted: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    tokenizer = Tokenizer.load(converted, chat_template=str(template))
    assert render_prompt(tokenizer, PROMPT) == "[user:x]"
    with pytest.raises(ConfigError, match=r"server\.chat_template"):
        Tokenizer.load(converted, chat_template=str(tmp_path / "absent.jinja"))


def test_a_chat_is_rendered_as_the_template_says(smollm2: Tokenizer) -> None:
    text = render_prompt(smollm2, ChatPrompt(messages=parse_messages([{"role": "user", "content": "hi"}])))
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(text, add_special_tokens=False)
    assert ids[0] == smollm2.bos_token_id
    assert ids[1] != smollm2.bos_token_id
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_a_template_that_refuses_or_breaks_is_the_callers_error(converted: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    for source, match in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
    ]:
        template.write_text(source)
        tokenizer = Tokenizer.load(converted, chat_template=str(template))
        with pytest.raises(RequestError, match=match):
            render_prompt(tokenizer, PROMPT)


def test_a_model_without_chat_template_says_so(converted: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(converted, tmp_path / "bare"))
    os.remove(bare / "chat_template.jinja")
    with pytest.raises(RequestError, match="no chat template") as caught:
        render_prompt(Tokenizer.load(bare), PROMPT)
    assert caught.value.code == "no_chat_template"


def test_encoding_from_several_threads_gives_the_same_ids(smollm2: Tokenizer) -> None:
    texts = [f"text {i} " * 200 for i in range(16)]
    expected = [smollm2.encode(text, add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: smollm2.encode(text, add_special_tokens=False), texts * 4)) == expected * 4
